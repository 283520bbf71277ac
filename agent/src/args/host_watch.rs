// SPDX-License-Identifier: Apache-2.0
//! Tells the agent's loop when addresses or routes of this host change. [`super::compose`] starts it; nothing is read here.

use std::future::Future;
use std::io;
use std::time::Duration;

use anyhow::Context as _;
use steerage_agent::kernel::AddressWatch;
use steerage_process::prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc::UnboundedSender;

/// Wait before a watch that failed is opened anew.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

/// A source of notice.
pub(super) trait Notice: Send + Sync + 'static {
    /// Returns when something has changed since the last call.
    fn changed(&self) -> impl Future<Output = io::Result<()>> + Send;
}

impl Notice for AddressWatch {
    fn changed(&self) -> impl Future<Output = io::Result<()>> + Send {
        AddressWatch::changed(self)
    }
}

/// One watch.
pub(super) struct HostWatch {
    /// What it watches, for logs.
    pub(super) what: &'static str,
    /// The first change is told at once, others once this time has passed.
    pub(super) settle: Duration,
    /// How often it failed and was opened anew.
    pub(super) restarts: Counter,
}

impl HostWatch {
    /// Sends the input at each change, and after each failure: a change may have been missed. Ends with the receiver.
    pub(super) fn start<W: Notice, I: Send + 'static>(
        self,
        open: fn() -> io::Result<W>,
        inputs: UnboundedSender<I>,
        input: fn() -> I,
    ) -> anyhow::Result<()> {
        let Self { what, settle, restarts } = self;
        let mut watch = open().with_context(|| format!("cannot watch the host's {what}"))?;
        tokio::spawn(async move {
            loop {
                if let Err(error) = watch.changed().await {
                    tracing::warn!(what, %error, "changes of the host not seen; watching anew");
                    restarts.inc();
                    tokio::time::sleep(REOPEN_INTERVAL).await;
                    match open() {
                        Ok(another) => watch = another,
                        Err(error) => tracing::warn!(what, %error, "cannot watch the host; trying again"),
                    }
                }
                if inputs.send(input()).is_err() {
                    return;
                }
                tokio::time::sleep(settle).await;
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    /// The number of watches opened. The first one fails, the second cannot be opened, and the third one sees a change and then nothing.
    static OPENED: AtomicU32 = AtomicU32::new(0);

    struct Failing(u32, AtomicU32);

    impl Notice for Failing {
        async fn changed(&self) -> io::Result<()> {
            match (self.0, self.1.fetch_add(1, Ordering::Relaxed)) {
                (0, _) => Err(io::ErrorKind::ConnectionReset.into()),
                (_, 0) => Ok(()),
                _ => std::future::pending().await,
            }
        }
    }

    fn open() -> io::Result<Failing> {
        match OPENED.fetch_add(1, Ordering::Relaxed) {
            1 => Err(io::ErrorKind::OutOfMemory.into()),
            number => Ok(Failing(number, AtomicU32::new(0))),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_watch_is_opened_anew_counted_and_told_as_a_change() {
        let (sender, mut inputs) = unbounded_channel();
        let restarts = Counter::default();
        let watch = HostWatch { what: "addresses", settle: Duration::ZERO, restarts: restarts.clone() };
        watch.start(open, sender, || ()).unwrap();
        for _ in 0..3 {
            inputs.recv().await.expect("a change may have been missed, or was seen");
        }
        let next = tokio::time::timeout(Duration::from_mins(1), inputs.recv()).await;
        assert!(next.is_err(), "it works again");
        assert_eq!((restarts.get(), OPENED.load(Ordering::Relaxed)), (2, 3));
    }
}

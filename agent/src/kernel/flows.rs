// SPDX-License-Identifier: Apache-2.0
//! Deletes conntrack entries of UDP flows whose endpoint is gone, or that bypass the rules. They would live as long as the client
//! keeps sending.
//!
//! TCP is never touched, nor is a flow whose original destination is not a frontend of this agent. A thread of its own does the
//! work, so that a full conntrack table delays no rule. The kernel hashes flows by their sources: to find those of a frontend it
//! walks the whole table, which keeps a processor busy (11 ms with 262,144 buckets, however few flows). So the first change is
//! cleaned up at once, and changes that follow soon are cleaned up together.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use steerage_model::{Family, Protocol};
use steerage_nft::{Conntrack, ConntrackEntry, Error};

use crate::plan::Frontend;
use crate::rules::StaleFlows;

/// Changes within this time after a clean-up are collected until none came for [`QUIET`], and for no longer than this.
const COLLECT: Duration = Duration::from_secs(1);
/// See [`COLLECT`].
const QUIET: Duration = Duration::from_millis(50);

/// Passes work to the cleaning thread.
#[derive(Debug, Clone)]
pub struct FlowCleaner {
    work: Sender<StaleFlows>,
}

impl FlowCleaner {
    /// Starts the thread in the network namespace of the caller. `deleted` gets the number of deleted flows.
    pub fn start(deleted: impl Fn(usize) + Send + 'static) -> Result<Self, Error> {
        let mut conntrack = Conntrack::open()?;
        let (work, queue) = channel();
        let serve = move || {
            let mut last = None;
            while let Some(stale) = collect(&queue, last) {
                match clean(&mut conntrack, &stale) {
                    Ok(0) => {}
                    Ok(count) => {
                        tracing::info!(count, "stale UDP flows deleted");
                        deleted(count);
                    }
                    Err(error) => {
                        tracing::warn!(
                            %error,
                            frontends = stale.len(),
                            "stale UDP flows not deleted; they continue to a removed endpoint until they time out"
                        );
                    }
                }
                last = Some(Instant::now());
            }
        };
        std::thread::Builder::new()
            .name("conntrack".to_owned())
            .spawn(serve)
            .map_err(|_| Error::NoReply("start the conntrack thread".to_owned()))?;
        Ok(Self { work })
    }

    /// Deletes the flows of these frontends that lead to other endpoints than given.
    pub fn clean(&self, stale: StaleFlows) {
        if !stale.is_empty() {
            // Cannot fail: the thread ends only with the last sender.
            let _ = self.work.send(stale);
        }
    }
}

/// The next work; `None` once all senders are gone. `last` is the time of the last clean-up.
fn collect(queue: &Receiver<StaleFlows>, last: Option<Instant>) -> Option<StaleFlows> {
    let mut stale = queue.recv().ok()?;
    let started = Instant::now();
    let at_once = last.is_none_or(|last| started.saturating_duration_since(last) >= COLLECT);
    loop {
        let rest = if at_once { Duration::ZERO } else { COLLECT.saturating_sub(started.elapsed()) };
        match queue.recv_timeout(rest.min(QUIET)) {
            // The later one of a frontend is right.
            Ok(more) => stale.extend(more),
            Err(_) => return Some(stale),
        }
    }
}

/// Deletes stale flows; returns their number.
pub(crate) fn clean(conntrack: &mut Conntrack, stale: &StaleFlows) -> Result<usize, Error> {
    let mut deleted = 0;
    for (model, family) in super::FAMILIES {
        if !stale.keys().any(|frontend| frontend.family() == model) {
            continue;
        }
        let flows = match conntrack.entries(family, |flow| is_stale(flow, stale)) {
            Err(error) if model == Family::V6 && error.is_unsupported() => continue,
            flows => flows?,
        };
        deleted += conntrack.delete(&flows)?;
    }
    Ok(deleted)
}

fn is_stale(flow: &ConntrackEntry, stale: &StaleFlows) -> bool {
    let destination = flow.original.destination;
    let frontend = Frontend { addr: destination.ip(), protocol: Protocol::Udp, port: destination.port() };
    flow.original.protocol == Protocol::Udp.number()
        && stale.get(&frontend).is_some_and(|serving| !serving.contains(&flow.reply.source))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn stale(port: u16) -> StaleFlows {
        let frontend = Frontend { addr: [192, 0, 2, 1].into(), protocol: Protocol::Udp, port };
        [(frontend, Arc::from([]))].into()
    }

    #[test]
    fn first_change_is_cleaned_up_at_once_and_later_ones_together() {
        let (work, queue) = channel();
        let elapsed = |_| {
            work.send(stale(1)).unwrap();
            let started = Instant::now();
            assert_eq!(collect(&queue, None).map(|found| found.len()), Some(1));
            started.elapsed()
        };
        // One of several: the thread may have no core for as long.
        assert!((0..10).map(elapsed).any(|elapsed| elapsed < QUIET), "at once");
        let last = Instant::now();
        (1..=20).for_each(|port| work.send(stale(port)).unwrap());
        assert_eq!(collect(&queue, Some(last)).map(|found| found.len()), Some(20));
        assert!(last.elapsed() >= QUIET);
        // Endless changes do not delay the clean-up endlessly.
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !enough.load(Ordering::Relaxed) {
                    work.send(stale(1)).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            assert!(collect(&queue, Some(Instant::now())).is_some());
            enough.store(true, Ordering::Relaxed);
        });
        drop(work);
        while collect(&queue, None).is_some() {}
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Notices when another program changes the agent's tables.

use std::io;
use std::time::Duration;

use steerage_nft::{Change, Error, Monitor};

use super::doubts::Doubts;
use crate::rules::TABLE;

/// Foreign changes within this time are reported once.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// How often the thread checks whether it is still needed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Wait before a socket that failed is replaced.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

/// Calls `changed`, on a thread of its own, with what others than the netlink `ports` may have changed in the agent's tables, and with
/// nothing at least once a second. Ends when `changed` returns `false`. A socket that fails is replaced by another from `open`,
/// and then anything may have changed.
pub fn watch_foreign(
    mut monitor: Monitor,
    ports: Vec<u32>,
    mut open: impl FnMut() -> Result<Monitor, Error> + Send + 'static,
    mut changed: impl FnMut(Doubts) -> bool + Send + 'static,
) -> io::Result<()> {
    let watch = move || {
        let mut failed = false;
        loop {
            let foreign = match wait(&mut monitor, &ports) {
                Ok(_) if std::mem::take(&mut failed) => Doubts::everything(),
                Ok(foreign) => foreign,
                Err(error) => {
                    tracing::warn!(%error, "changes of the tables by other programs not seen; watching anew");
                    failed = true;
                    std::thread::sleep(REOPEN_INTERVAL);
                    match open() {
                        Ok(another) => monitor = another,
                        Err(error) => tracing::warn!(%error, "cannot watch the tables; trying again"),
                    }
                    Doubts::default()
                }
            };
            let is_foreign = !foreign.is_empty();
            if !changed(foreign) {
                return;
            }
            if is_foreign {
                std::thread::sleep(DEBOUNCE);
            }
        }
    };
    std::thread::Builder::new().name("nft-monitor".to_owned()).spawn(watch).map(drop)
}

/// Waits for at most [`CHECK_INTERVAL`]. Returns what another program changed in the tables.
fn wait(monitor: &mut Monitor, ports: &[u32]) -> Result<Doubts, Error> {
    let mut foreign = Doubts::default();
    if monitor.wait(CHECK_INTERVAL)? {
        loop {
            match monitor.receive() {
                Ok(Some(changes)) => {
                    let changes = changes.into_iter().filter(|change| is_foreign(change, ports));
                    changes.map(Doubts::after).for_each(|doubts| foreign.merge(doubts));
                }
                Ok(None) => break,
                // Lost messages may have been foreign changes.
                Err(Error::Overrun) => foreign.merge(Doubts::everything()),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(foreign)
}

fn is_foreign(change: &Change, ports: &[u32]) -> bool {
    change.table.name == TABLE && !ports.contains(&change.port)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::sync::mpsc;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    /// A monitor whose socket is gone.
    #[allow(unsafe_code, reason = "no safe function replaces a descriptor that something else owns")]
    fn broken() -> Monitor {
        let monitor = Monitor::open().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: both descriptors are open, and the monitor keeps its own.
        let copied = unsafe { libc::dup2(null.as_raw_fd(), monitor.as_fd().as_raw_fd()) };
        assert!(copied >= 0);
        monitor
    }

    #[test]
    fn failed_monitor_is_replaced_and_everything_is_compared() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let (told, heard) = mpsc::channel();
            let mut opened =
                [Ok(Monitor::open().unwrap()), Err(Error::Overrun)].into_iter().collect::<Vec<_>>();
            let open = move || opened.pop().expect("one failure, one monitor");
            watch_foreign(broken(), Vec::new(), open, move |foreign| {
                told.send(foreign.is_everything()).is_ok()
            })
            .unwrap();
            let all: Vec<bool> = heard.iter().take_while(|foreign| !foreign).collect();
            assert_eq!(all.len(), 2, "not while nothing is watched");
        });
    }
}

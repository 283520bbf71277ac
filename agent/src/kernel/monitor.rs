// SPDX-License-Identifier: Apache-2.0
//! Notices what other programs do to nftables: that they change the agent's tables, and which chains of theirs there are.
//!
//! Runs on a thread of its own, from a write that left the tables as wanted, to the first foreign change of them. Then nobody listens
//! while [`super::Dataplane`] repairs: the kernel builds a message for each element that is written where somebody does, which takes as
//! long as the write itself.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_nft::{Error, Monitor, Nft, Notification, ObjectKind};

use super::chain_scan::ChainScan;
use super::foreign_chains::foreign_chains;
use crate::foreign::{ForeignChain, ForeignChange};
use crate::rules::TABLE;

/// How often the thread checks whether it is still needed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Wait after a failure of the socket.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);
/// The sockets of a watch that has ended are closed after this time.
const CLOSE_DELAY: Duration = Duration::from_secs(1);
/// Longest wait for the end of a transaction, whose notification names the process.
const ATTRIBUTION: Duration = Duration::from_millis(20);

/// What the thread tells.
#[derive(Debug)]
pub enum Noticed {
    /// Nothing. Asks whether it is still needed.
    Nothing,
    /// Other programs changed the agent's tables. It is the last that the thread tells.
    Change(ForeignChange),
    /// The chains of other programs, first of all and whenever they may have changed.
    Chains(Vec<ForeignChain>),
}

/// Is told what was noticed. Returns `false` if nobody is interested any more.
pub type Notice = Arc<dyn Fn(Noticed) -> bool + Send + Sync>;

/// Watches on a thread of its own until others than the netlink `ports` change the agent's tables, or `notice` returns `false`. Tells
/// no change earlier than after `pause`.
pub(super) fn watch_foreign(
    monitor: Monitor,
    nft: Nft,
    ports: Vec<u32>,
    pause: Duration,
    notice: Notice,
) -> io::Result<()> {
    let change = ForeignChange::default();
    let watch = Watch { monitor, nft, ports, change, scan: ChainScan::new(Instant::now()) };
    let run = move || watch.run(Instant::now() + pause, &notice);
    std::thread::Builder::new().name("nft-monitor".to_owned()).spawn(run).map(drop)
}

struct Watch {
    monitor: Monitor,
    nft: Nft,
    ports: Vec<u32>,
    change: ForeignChange,
    scan: ChainScan,
}

impl Watch {
    fn run(mut self, not_before: Instant, notice: &Notice) {
        while self.change.is_empty() {
            let timeout = self.scan.due_in(Instant::now()).unwrap_or(CHECK_INTERVAL).min(CHECK_INTERVAL);
            if let Err(error) = self.read(timeout) {
                tracing::warn!(%error, "changes of the tables by other programs not seen; comparing the tables");
                std::thread::sleep(REOPEN_INTERVAL);
                self.change.lose();
            }
            if self.change.is_empty() && self.scan.due_in(Instant::now()).is_some_and(|wait| wait.is_zero()) {
                self.scan(notice);
            }
            if !notice(Noticed::Nothing) {
                return;
            }
        }
        // Fails as before, and then the change is told without its author.
        let _ = self.read_until(Instant::now() + ATTRIBUTION, ForeignChange::is_attributed);
        let _ = self.read_until(not_before, |_| false);
        if let Err(error) = self.monitor.unsubscribe() {
            tracing::debug!(%error, "monitor still subscribed; the repair takes longer");
        }
        notice(Noticed::Change(std::mem::take(&mut self.change)));
        // The sockets are closed when the repair is done, see `Monitor::unsubscribe`.
        std::thread::sleep(CLOSE_DELAY);
    }

    /// Reads what comes until then, or until `done`.
    fn read_until(&mut self, end: Instant, done: impl Fn(&ForeignChange) -> bool) -> Result<(), Error> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || done(&self.change) {
                return Ok(());
            }
            self.read(left)?;
        }
    }

    /// Waits for notifications, and reads all that are there.
    fn read(&mut self, timeout: Duration) -> Result<(), Error> {
        // Otherwise the kernel would round a shorter wait down to none.
        if !self.monitor.wait(timeout.max(Duration::from_millis(1)))? {
            return Ok(());
        }
        loop {
            match self.monitor.receive() {
                Ok(Some(told)) => told.into_iter().for_each(|notification| self.take(notification)),
                Ok(None) => return Ok(()),
                // Lost messages may have been anything.
                Err(Error::Overrun) => {
                    self.change.lose();
                    self.scan.request(Instant::now());
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, notification: Notification) {
        match notification {
            Notification::Change(change) if self.ports.contains(&change.port) => {}
            Notification::Change(change) if change.table.name == TABLE => self.change.add(change),
            Notification::Change(change) => {
                if matches!(change.object, ObjectKind::Table | ObjectKind::Chain | ObjectKind::Rule) {
                    self.scan.request(Instant::now());
                }
            }
            Notification::Commit(commit) => self.change.commit(commit),
        }
    }

    fn scan(&mut self, notice: &Notice) {
        let begun = Instant::now();
        match foreign_chains(&mut self.nft) {
            Ok(chains) => {
                self.scan.scanned(begun, Instant::now());
                notice(Noticed::Chains(chains));
            }
            // Others commit just now, so that they can't be listed.
            Err(error) => {
                tracing::debug!(%error, "chains of other programs not listed; trying again");
                self.scan.scanned(begun, Instant::now());
                self.scan.request(Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::sync::{Mutex, mpsc};

    use steerage_nft::{Batch, Family, Table};
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

    /// Watches, and returns all that is told but `Nothing`.
    fn told(monitor: Monitor, ports: Vec<u32>) -> mpsc::Receiver<Noticed> {
        let (told, heard) = mpsc::channel();
        let told = Mutex::new(told);
        let notice = move |noticed| match noticed {
            Noticed::Nothing => true,
            noticed => told.lock().unwrap().send(noticed).is_ok(),
        };
        watch_foreign(monitor, Nft::open().unwrap(), ports, Duration::ZERO, Arc::new(notice)).unwrap();
        heard
    }

    #[test]
    fn failed_monitor_has_everything_compared() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let all: Vec<_> = told(broken(), Vec::new()).iter().collect();
            let [Noticed::Change(change)] = all.as_slice() else { panic!("{all:?}") };
            assert_eq!(*change, ForeignChange::unknown());
        });
    }

    #[test]
    fn own_changes_are_not_told_and_the_first_foreign_one_ends_the_watch() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let (mut ours, mut theirs) = (Nft::open().unwrap(), Nft::open().unwrap());
            let (own, other) = (Table::new(Family::Ip, TABLE), Table::new(Family::Ip, "other"));
            let heard = told(Monitor::open().unwrap(), vec![ours.port().unwrap()]);
            assert!(matches!(heard.recv().unwrap(), Noticed::Chains(chains) if chains.is_empty()));
            let add = |table| {
                let mut batch = Batch::new();
                batch.add_table(table, None);
                batch
            };
            ours.commit(add(&own)).unwrap();
            theirs.commit(add(&other)).unwrap();
            assert!(matches!(heard.recv().unwrap(), Noticed::Chains(_)), "a new table is looked at");
            let mut batch = Batch::new();
            batch.delete_table(&own);
            theirs.commit(batch).unwrap();
            let all: Vec<_> = heard.iter().collect();
            let [Noticed::Change(change)] = all.as_slice() else { panic!("{all:?}") };
            assert_eq!(change.to_string(), "ip steerage: deleted");
            // The kernel tells the thread.
            let own = std::fs::read_link("/proc/thread-self").unwrap();
            let thread = own.file_name().unwrap().to_str().unwrap();
            assert!(change.authors().contains(&format!("(process {thread})")), "{}", change.authors());
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Notices what other programs do to nftables: that they change the agent's tables, and which chains of theirs there are.
//!
//! Runs on a thread of its own, from a write that left the tables as wanted, to the first foreign change of them. Then nobody listens
//! while [`super::Dataplane`] repairs: the kernel builds a message for each element that is written where somebody does, which takes as
//! long as the write itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_nft::{CommitLog, Error, Monitor, Nft, Notification, ObjectKind, is_later_generation};

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
/// How often the thread looks whether lost notifications were all of own commits.
const DOUBT_INTERVAL: Duration = Duration::from_millis(5);
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

/// The connections that write, and may change the agent's tables.
#[derive(Debug)]
pub(super) struct OwnWrites {
    /// Their netlink ports.
    pub(super) ports: Vec<u32>,
    /// Their commits.
    pub(super) log: CommitLog,
}

/// Watches on a thread of its own until others than the connections of `own` change the agent's tables, or `notice` returns `false`.
/// Tells no change earlier than after `pause`.
pub(super) fn watch_foreign(
    monitor: Monitor,
    mut nft: Nft,
    own: OwnWrites,
    pause: Duration,
    notice: Notice,
) -> Result<(), Error> {
    let known = nft.generation()?;
    let (change, scan) = (ForeignChange::default(), ChainScan::new(Instant::now()));
    let watch = Watch { monitor, nft, own, known, is_in_doubt: false, change, scan };
    let run = move || watch.run(Instant::now() + pause, &notice);
    let thread = std::thread::Builder::new().name("nft-monitor".to_owned());
    thread.spawn(run).map(drop).map_err(|_| Error::NoReply("start the thread of the monitor".to_owned()))
}

struct Watch {
    monitor: Monitor,
    nft: Nft,
    own: OwnWrites,
    /// Nobody else has changed the tables up to this generation, except for what `change` says.
    known: u32,
    /// Notifications of later generations were lost. A large write of the agent itself fills the receive buffer.
    is_in_doubt: bool,
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
        if self.is_in_doubt {
            self.change.lose();
        }
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
        let timeout = if self.is_in_doubt { timeout.min(DOUBT_INTERVAL) } else { timeout };
        // Otherwise the kernel would round a shorter wait down to none.
        if self.monitor.wait(timeout.max(Duration::from_millis(1)))? {
            self.read_waiting()?;
        }
        if self.is_in_doubt {
            self.settle_doubt()?;
        }
        self.own.log.forget_until(self.known);
        Ok(())
    }

    fn read_waiting(&mut self) -> Result<(), Error> {
        loop {
            match self.monitor.receive() {
                Ok(Some(told)) => told.into_iter().for_each(|notification| self.take(notification)),
                Ok(None) => return Ok(()),
                // Told before what had come earlier, and nothing new comes until that is read.
                Err(Error::Overrun) => self.is_in_doubt = true,
                Err(error) => return Err(error),
            }
        }
    }

    /// Lost notifications may have been anything, unless all commits since were own ones.
    fn settle_doubt(&mut self) -> Result<(), Error> {
        let now = self.nft.generation()?;
        let Some(are_own) = self.own.log.covers(self.known, now) else { return Ok(()) };
        (self.known, self.is_in_doubt) = (now, false);
        if are_own {
            tracing::debug!("notifications lost, all of this agent's own writes");
        } else {
            self.change.lose();
            self.scan.request(Instant::now());
        }
        Ok(())
    }

    fn take(&mut self, notification: Notification) {
        match notification {
            Notification::Change(change) if self.own.ports.contains(&change.port) => {}
            Notification::Change(change) if change.table.name == TABLE => self.change.add(change),
            Notification::Change(change) => {
                if matches!(change.object, ObjectKind::Table | ObjectKind::Chain | ObjectKind::Rule) {
                    self.scan.request(Instant::now());
                }
            }
            Notification::Commit(commit) => {
                let is_known =
                    |generation: &u32| !self.is_in_doubt && is_later_generation(*generation, self.known);
                self.known = commit.generation.filter(is_known).unwrap_or(self.known);
                self.change.commit(commit);
            }
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
    use std::sync::{Condvar, Mutex, mpsc};

    use steerage_nft::{Batch, DataType, Element, Family, Field, Set, Table, concat};
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

    /// Stops the thread of a watch: whether that is wanted, and whether it is so.
    #[derive(Default)]
    struct Gate(Mutex<(bool, bool)>, Condvar);

    impl Gate {
        fn pass(&self) {
            let mut gate = self.0.lock().unwrap();
            while gate.0 {
                gate.1 = true;
                self.1.notify_all();
                gate = self.1.wait(gate).unwrap();
            }
            gate.1 = false;
            self.1.notify_all();
        }

        /// Does something while the thread is stopped.
        fn stopped(&self, work: impl FnOnce()) {
            let mut gate = self.0.lock().unwrap();
            gate.0 = true;
            drop(self.1.wait_while(gate, |gate| !gate.1).unwrap());
            work();
            let mut gate = self.0.lock().unwrap();
            gate.0 = false;
            self.1.notify_all();
            // Otherwise the next call would take it for stopped still.
            drop(self.1.wait_while(gate, |gate| gate.1).unwrap());
        }
    }

    /// Watches, and returns all that is told but `Nothing`.
    fn told(monitor: Monitor, own: OwnWrites, gate: Arc<Gate>) -> mpsc::Receiver<Noticed> {
        let (told, heard) = mpsc::channel();
        let told = Mutex::new(told);
        let notice = move |noticed| match noticed {
            Noticed::Nothing => {
                gate.pass();
                true
            }
            noticed => told.lock().unwrap().send(noticed).is_ok(),
        };
        watch_foreign(monitor, Nft::open().unwrap(), own, Duration::ZERO, Arc::new(notice)).unwrap();
        heard
    }

    fn own_writes(nft: &mut Nft) -> OwnWrites {
        let log = CommitLog::default();
        nft.log_commits(log.clone());
        OwnWrites { ports: vec![nft.port().unwrap()], log }
    }

    fn add(table: &Table) -> Batch {
        let mut batch = Batch::new();
        batch.add_table(table, None);
        batch
    }

    fn delete(table: &Table) -> Batch {
        let mut batch = Batch::new();
        batch.delete_table(table);
        batch
    }

    fn only_change(all: &[Noticed]) -> &ForeignChange {
        let [Noticed::Change(change)] = all else { panic!("{all:?}") };
        change
    }

    #[test]
    fn failed_monitor_has_everything_compared() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let own = own_writes(&mut Nft::open().unwrap());
            let all: Vec<_> = told(broken(), own, Arc::default()).iter().collect();
            assert_eq!(*only_change(&all), ForeignChange::unknown());
        });
    }

    #[test]
    fn own_changes_are_not_told_and_the_first_foreign_one_ends_the_watch() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let (mut ours, mut theirs) = (Nft::open().unwrap(), Nft::open().unwrap());
            let (own, other) = (Table::new(Family::Ip, TABLE), Table::new(Family::Ip, "other"));
            let heard = told(Monitor::open().unwrap(), own_writes(&mut ours), Arc::default());
            assert!(matches!(heard.recv().unwrap(), Noticed::Chains(chains) if chains.is_empty()));
            ours.commit(add(&own)).unwrap();
            theirs.commit(add(&other)).unwrap();
            assert!(matches!(heard.recv().unwrap(), Noticed::Chains(_)), "a new table is looked at");
            theirs.commit(delete(&own)).unwrap();
            let all: Vec<_> = heard.iter().collect();
            let change = only_change(&all);
            assert_eq!(change.to_string(), "ip steerage: deleted");
            // The kernel tells the thread.
            let own = std::fs::read_link("/proc/thread-self").unwrap();
            let thread = own.file_name().unwrap().to_str().unwrap();
            assert!(change.authors().contains(&format!("(process {thread})")), "{}", change.authors());
        });
    }

    /// A watch that is stopped, the agent's table with a set, its writer, another program, and a listener that reads nothing.
    struct Overrun {
        ours: Nft,
        theirs: Nft,
        table: Table,
        idle: Monitor,
        gate: Arc<Gate>,
        heard: mpsc::Receiver<Noticed>,
    }

    impl Overrun {
        fn new() -> Self {
            let (mut ours, theirs) = (Nft::open().unwrap(), Nft::open().unwrap());
            let table = Table::new(Family::Ip, TABLE);
            let own = own_writes(&mut ours);
            let mut batch = add(&table);
            batch.add_set(&table, &Set::new("numbers", &[DataType::Mark]));
            ours.commit(batch).unwrap();
            let gate = Arc::default();
            let heard = told(Monitor::open().unwrap(), own, Arc::clone(&gate));
            assert!(matches!(heard.recv().unwrap(), Noticed::Chains(_)));
            Self { ours, theirs, table, idle: Monitor::open().unwrap(), gate, heard }
        }

        /// Writes more than the buffers of listeners hold.
        fn overrun(&mut self) {
            let numbers: Vec<_> = (0..200_000).map(|n| Element::key(concat(&[Field::Number(n)]))).collect();
            let mut batch = Batch::new();
            batch.add_elements(&self.table, "numbers", &numbers);
            self.ours.commit(batch).unwrap();
            assert!(matches!(self.idle.receive(), Err(Error::Overrun)), "the buffers are too large");
        }

        /// Does something while the thread of the watch is stopped.
        fn stopped(&mut self, work: impl FnOnce(&mut Self)) {
            Arc::clone(&self.gate).stopped(|| work(self));
        }
    }

    #[test]
    fn large_write_of_the_agent_is_no_foreign_change() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let mut all = Overrun::new();
            all.stopped(Overrun::overrun);
            // Until the thread has read what the buffer holds.
            all.stopped(|_| {});
            // Nothing is told of it, and what comes after it is.
            all.theirs.commit(add(&Table::new(Family::Ip, "other"))).unwrap();
            let chains = all.heard.recv().unwrap();
            assert!(matches!(chains, Noticed::Chains(_)), "{chains:?}");
            all.theirs.commit(delete(&all.table)).unwrap();
            let told: Vec<_> = all.heard.iter().collect();
            assert_eq!(only_change(&told).to_string(), "ip steerage: deleted");
        });
    }

    #[test]
    fn foreign_change_whose_notification_was_lost_has_everything_compared() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let mut all = Overrun::new();
            all.stopped(|all| {
                all.overrun();
                let mut batch = Batch::new();
                batch.flush_set(&all.table, "numbers");
                all.theirs.commit(batch).unwrap();
            });
            let told: Vec<_> = all.heard.iter().collect();
            assert_eq!(*only_change(&told), ForeignChange::unknown());
        });
    }

    /// The kernel reports the loss before what had come earlier.
    #[test]
    fn foreign_change_before_lost_notifications_is_told() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let mut all = Overrun::new();
            all.stopped(|all| {
                let mut batch = Batch::new();
                batch.add_elements(&all.table, "numbers", &[Element::key(concat(&[Field::Number(7)]))]);
                all.theirs.commit(batch).unwrap();
                all.overrun();
            });
            let told: Vec<_> = all.heard.iter().collect();
            let change = only_change(&told);
            assert_eq!(change.to_string(), "ip steerage: 1 element of numbers; not all changes seen");
            assert_eq!(change.damage(), None);
        });
    }
}

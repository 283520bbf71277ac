// SPDX-License-Identifier: Apache-2.0
//! UDP flows that lead to an endpoint that is gone, or past the rules: they would live as long as the client keeps sending.
//!
//! TCP is never touched, nor any flow whose original destination is not a frontend of ours. The work is done on a thread of its
//! own, so that a full connection table delays no rule. The kernel knows flows by their senders: to find those of a frontend it
//! walks all of its table, and the processor does nothing else meanwhile (11 ms with 262,144 buckets, however few flows). So one
//! change is cleaned up after at once, and those that follow it closely, together.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use steerage_model::{Family, Protocol};
use steerage_nft::{Conntrack, ConntrackEntry, Error};

use crate::plan::Frontend;

/// UDP frontends, each with the endpoints whose flows may stay.
pub type StaleFlows = BTreeMap<Frontend, Arc<[SocketAddr]>>;

/// Changes that come this soon after a clean-up are gathered until none has come for [`QUIET`], and for no longer than this.
const GATHER: Duration = Duration::from_secs(1);
/// See [`GATHER`].
const QUIET: Duration = Duration::from_millis(50);

/// Hands work to the cleaning thread.
#[derive(Debug, Clone)]
pub struct FlowCleaner {
    work: Sender<StaleFlows>,
}

impl FlowCleaner {
    /// Starts the thread in the network namespace of the calling one. `deleted` is told how many flows went.
    pub fn start(deleted: impl Fn(usize) + Send + 'static) -> Result<Self, Error> {
        let mut conntrack = Conntrack::open()?;
        let (work, queue) = channel();
        let serve = move || {
            let mut last = None;
            while let Some(stale) = gather(&queue, last) {
                match clean(&mut conntrack, &stale) {
                    Ok(0) => {}
                    Ok(count) => {
                        tracing::info!(count, "UDP flows to endpoints that are gone were ended");
                        deleted(count);
                    }
                    Err(error) => tracing::warn!(%error, "UDP flows cannot be cleaned up"),
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

    /// Deletes the flows of these frontends that lead elsewhere than given.
    pub fn clean(&self, stale: StaleFlows) {
        if !stale.is_empty() {
            // The thread ends only with the last sender.
            let _ = self.work.send(stale);
        }
    }
}

/// What is to be cleaned up after next; `None` when nobody will say any more. `last` is when that was done last.
fn gather(queue: &Receiver<StaleFlows>, last: Option<Instant>) -> Option<StaleFlows> {
    let mut stale = queue.recv().ok()?;
    let begun = Instant::now();
    let at_once = last.is_none_or(|last| begun.saturating_duration_since(last) >= GATHER);
    loop {
        let rest = if at_once { Duration::ZERO } else { GATHER.saturating_sub(begun.elapsed()) };
        match queue.recv_timeout(rest.min(QUIET)) {
            // What comes later says more.
            Ok(more) => stale.extend(more),
            Err(_) => return Some(stale),
        }
    }
}

/// Deletes them now; returns how many there were.
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn stale(port: u16) -> StaleFlows {
        let frontend = Frontend { addr: [192, 0, 2, 1].into(), protocol: Protocol::Udp, port };
        [(frontend, Arc::from([]))].into()
    }

    #[test]
    fn one_change_is_not_waited_for_and_a_row_of_them_is_gathered() {
        let (work, queue) = channel();
        work.send(stale(1)).unwrap();
        let begun = Instant::now();
        assert_eq!(gather(&queue, None).map(|found| found.len()), Some(1));
        assert!(begun.elapsed() < GATHER, "at once");
        let last = Instant::now();
        (1..=20).for_each(|port| work.send(stale(port)).unwrap());
        assert_eq!(gather(&queue, Some(last)).map(|found| found.len()), Some(20));
        assert!(last.elapsed() >= QUIET);
        // A row without an end is not waited for.
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !enough.load(Ordering::Relaxed) {
                    work.send(stale(1)).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            assert!(gather(&queue, Some(Instant::now())).is_some());
            enough.store(true, Ordering::Relaxed);
        });
        drop(work);
        while gather(&queue, None).is_some() {}
    }
}

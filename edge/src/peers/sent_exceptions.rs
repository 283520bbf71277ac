// SPDX-License-Identifier: Apache-2.0
//! The exceptions that this host has sent to the others. Pure, owned by `exchange`: it finds what is new, changed or gone since.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use steerage_edge_dataplane::Pinned;
use steerage_edge_dataplane::packet::maps::{CLOSING, FlowKey, TCP_CLOSING, TCP_IDLE, UDP_IDLE};
use steerage_edge_dataplane::packet::{V6, protocol};

#[derive(Debug)]
struct Sent {
    target: u32,
    /// What the others know.
    seen: u32,
    /// What was found last.
    latest: u32,
    /// Of the last scan that found it.
    scan: u32,
}

/// Exceptions that the others have to be sent again.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rechecked {
    pub(crate) changed: Vec<(FlowKey<V6>, Pinned)>,
    /// With the numbers of the targets that the others know.
    pub(crate) gone: Vec<(FlowKey<V6>, u32)>,
}

#[derive(Debug)]
pub(crate) struct SentExceptions {
    flows: HashMap<FlowKey<V6>, Sent>,
    /// The number of the current scan.
    scan: u32,
    limit: usize,
    /// Exceptions beyond the limit, in the last scan.
    beyond: usize,
}

/// The others forget a flow of which they get nothing as if no packet came. They get news of packets long before that.
fn is_old(key: &FlowKey<V6>, sent: u32, seen: u32) -> bool {
    let limit = match key.protocol == u32::from(protocol::TCP) {
        // One side may still send for long.
        true if seen & CLOSING != 0 => TCP_CLOSING,
        true => TCP_IDLE,
        false => UDP_IDLE,
    };
    (sent ^ seen) & CLOSING != 0 || seen.wrapping_sub(sent) & !CLOSING >= limit / 4
}

impl SentExceptions {
    /// Keeps at most so many, because each takes memory here and on the other hosts.
    pub(crate) fn new(limit: usize) -> Self {
        Self { flows: HashMap::new(), scan: 0, limit, beyond: 0 }
    }

    /// The number of exceptions in the last scan, also of those beyond the limit.
    pub(crate) fn count(&self) -> usize {
        self.flows.len() + self.beyond
    }

    /// How many of these were not sent.
    pub(crate) fn beyond(&self) -> usize {
        self.beyond
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.flows = HashMap::new();
        self.beyond = 0;
    }

    /// A scan of all flows begins.
    pub(crate) fn begin_scan(&mut self) {
        self.scan = self.scan.wrapping_add(1);
        self.beyond = 0;
    }

    /// The flow is an exception. Returns whether the others have to be sent.
    pub(crate) fn note(&mut self, key: FlowKey<V6>, pinned: &Pinned) -> bool {
        let is_full = self.flows.len() >= self.limit;
        let Pinned { target, seen, .. } = *pinned;
        match self.flows.entry(key) {
            Entry::Occupied(mut entry) => {
                let sent = entry.get_mut();
                (sent.scan, sent.latest) = (self.scan, seen);
                let is_news = sent.target != target || is_old(&key, sent.seen, seen);
                if is_news {
                    (sent.target, sent.seen) = (target, seen);
                }
                is_news
            }
            Entry::Vacant(_) if is_full => {
                self.beyond += 1;
                false
            }
            Entry::Vacant(entry) => {
                entry.insert(Sent { target, seen, latest: seen, scan: self.scan });
                true
            }
        }
    }

    /// The scan has ended. Removes what it has not found and `is_exception` no longer is, and returns what of it the others have to be
    /// sent, which are flows of VIPs for which this host `tells`: other hosts tell those of others. With the numbers of the targets that
    /// the others know.
    pub(crate) fn end_scan(
        &mut self,
        tells: impl Fn(V6) -> bool,
        is_exception: impl Fn(&FlowKey<V6>) -> bool,
    ) -> Vec<(FlowKey<V6>, u32)> {
        let scan = self.scan;
        let is_gone =
            |key: &FlowKey<V6>, sent: &mut Sent| sent.scan != scan && !(tells(key.vip) && is_exception(key));
        let gone = self.flows.extract_if(is_gone).map(|(key, sent)| (key, sent.target));
        let gone = gone.filter(|(key, _)| tells(key.vip)).collect();
        // Slots have moved back: the memory of many is not needed any more.
        if self.flows.len() < self.flows.capacity() / 8 {
            self.flows.shrink_to_fit();
        }
        gone
    }

    /// Looks at each flow again. Returns those that the others have to be sent of, and those that are gone.
    pub(crate) fn recheck(&mut self, mut look: impl FnMut(&FlowKey<V6>) -> Option<Pinned>) -> Rechecked {
        let (mut changed, mut gone) = (Vec::new(), Vec::new());
        self.flows.retain(|key, sent| {
            let Some(pinned) = look(key) else {
                gone.push((*key, sent.target));
                return false;
            };
            sent.latest = pinned.seen;
            if sent.target != pinned.target || is_old(key, sent.seen, pinned.seen) {
                (sent.target, sent.seen) = (pinned.target, pinned.seen);
                changed.push((*key, pinned));
            }
            true
        });
        Rechecked { changed, gone }
    }

    /// All, with the times that were found last.
    pub(crate) fn all(&self) -> impl Iterator<Item = (FlowKey<V6>, Pinned)> {
        self.flows.iter().map(|(key, sent)| {
            (*key, Pinned { target: sent.target, seen: sent.latest, is_established: true })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    fn key(port: u16) -> FlowKey<V6> {
        FlowKey { ports: port.into(), protocol: 6, ..FlowKey::default() }
    }

    fn pinned(target: u32, seen: u32) -> Pinned {
        Pinned { target, seen, is_established: true }
    }

    #[test]
    fn others_get_news_of_packets_before_they_forget_a_flow() {
        let mut sent = SentExceptions::new(10);
        sent.begin_scan();
        assert!(sent.note(key(1), &pinned(1, 100)));
        assert!(!sent.note(key(1), &pinned(1, 101)));
        assert!(sent.note(key(1), &pinned(1, 100 + TCP_IDLE / 4)));
        assert!(sent.note(key(1), &pinned(1, (101 + TCP_IDLE / 4) | CLOSING)), "closed");
        assert!(!sent.note(key(1), &pinned(1, (102 + TCP_IDLE / 4) | CLOSING)));
        let closing = |later| pinned(1, (101 + TCP_IDLE / 4 + later) | CLOSING);
        assert!(!sent.note(key(1), &closing(TCP_CLOSING / 4 - 1)));
        assert!(sent.note(key(1), &closing(TCP_CLOSING / 4)), "one side still sends");
        assert!(sent.note(key(1), &pinned(2, (102 + TCP_IDLE / 4) | CLOSING)), "another target");
        let datagrams = FlowKey { protocol: 17, ..key(1) };
        assert!(sent.note(datagrams, &pinned(1, 100)));
        assert!(sent.note(datagrams, &pinned(1, 100 + UDP_IDLE / 4)));
        assert_eq!(sent.end_scan(|_| true, |_| false), []);
        let rechecked = sent.recheck(|key| (key.protocol == 17).then(|| pinned(3, 200)));
        let (changed, gone) = (vec![(datagrams, pinned(3, 200))], vec![(key(1), 2)]);
        assert_eq!(rechecked, Rechecked { changed, gone });
    }

    #[test]
    fn exceptions_beyond_the_limit_are_counted_and_not_sent() {
        let mut sent = SentExceptions::new(2);
        sent.begin_scan();
        let news: Vec<_> = (0..5).map(|port| sent.note(key(port), &pinned(1, 1))).collect();
        assert_eq!(news, [true, true, false, false, false]);
        assert_eq!((sent.count(), sent.beyond(), sent.all().count()), (5, 3, 2));
    }

    proptest! {
        /// Whoever follows what is sent has what the last scan found.
        #[test]
        fn follower_has_what_the_last_scan_found(
            scans in prop::collection::vec(prop::collection::btree_map(0..20_u16, 0..3_u32, 0..20), 1..8),
            by_look in any::<bool>(),
        ) {
            let mut sent = SentExceptions::new(100);
            let mut follower = BTreeMap::new();
            for scan in &scans {
                if by_look {
                    let Rechecked { changed, gone } = sent.recheck(|key| {
                        Some(pinned(*scan.get(&u16::try_from(key.ports).ok()?)?, 1))
                    });
                    follower.extend(changed.iter().map(|(key, pinned)| (*key, pinned.target)));
                    for (key, target) in gone {
                        prop_assert_eq!(follower.remove(&key), Some(target));
                    }
                }
                sent.begin_scan();
                for (port, target) in scan {
                    if sent.note(key(*port), &pinned(*target, 1)) {
                        follower.insert(key(*port), *target);
                    }
                }
                for (key, target) in sent.end_scan(|_| true, |_| false) {
                    prop_assert_eq!(follower.remove(&key), Some(target));
                }
                let wanted: BTreeMap<_, _> = scan.iter().map(|(port, target)| (key(*port), *target)).collect();
                prop_assert_eq!(&follower, &wanted);
                let all: BTreeMap<_, _> = sent.all().map(|(key, pinned)| (key, pinned.target)).collect();
                prop_assert_eq!(&all, &wanted);
            }
        }
    }
}

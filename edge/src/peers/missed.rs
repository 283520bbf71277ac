// SPDX-License-Identifier: Apache-2.0
//! What hosts have told that this host could not use, for lack of a VIP, a listener or a target. Pure, owned by `exchange`. Once this
//! host has one of these, such as after its first plan, it asks for a complete list.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::net::IpAddr;

use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Exception, Refusal};

use super::confirmed::SessionId;

/// Of each kind, for each session: one that appears is enough.
const MOST: usize = 1000;

#[derive(Debug, Default)]
pub(crate) struct MissedParts(HashMap<SessionId, Missed>);

#[derive(Debug, Default)]
struct Missed {
    vips: HashSet<V6>,
    listeners: HashSet<ListenerKey>,
    targets: HashSet<IpAddr>,
    wants_list: bool,
}

fn note<T: Eq + Hash>(set: &mut HashSet<T>, value: T) {
    if set.len() < MOST {
        set.insert(value);
    }
}

impl MissedParts {
    pub(crate) fn note_vip(&mut self, session: SessionId, vip: V6) {
        note(&mut self.0.entry(session).or_default().vips, vip);
    }

    /// An exception was not inserted.
    pub(crate) fn note_refusal(&mut self, session: SessionId, exception: &Exception, refusal: Refusal) {
        match refusal {
            Refusal::UnknownListener => {
                note(&mut self.0.entry(session).or_default().listeners, exception.key.listener());
            }
            Refusal::UnknownTarget => note(&mut self.0.entry(session).or_default().targets, exception.target),
            Refusal::Expired | Refusal::Known => {}
        }
    }

    /// This host has others than before.
    pub(crate) fn update(
        &mut self,
        has_vip: impl Fn(&V6) -> bool,
        has_listener: impl Fn(&ListenerKey) -> bool,
        has_target: impl Fn(&IpAddr) -> bool,
    ) {
        for missed in self.0.values_mut() {
            let has_any = missed.vips.iter().any(&has_vip)
                || missed.listeners.iter().any(&has_listener)
                || missed.targets.iter().any(&has_target);
            if has_any {
                *missed = Missed { wants_list: true, ..Missed::default() };
            }
        }
    }

    /// Whether this host lacks anything for what the host of this session has told.
    pub(crate) fn has_any(&self, session: SessionId) -> bool {
        self.0.get(&session).is_some_and(|missed| {
            let Missed { vips, listeners, targets, wants_list } = missed;
            *wants_list || !(vips.is_empty() && listeners.is_empty() && targets.is_empty())
        })
    }

    /// Whether the host of this session should send a complete list. True once.
    pub(crate) fn take_wish(&mut self, session: SessionId) -> bool {
        self.0.get_mut(&session).is_some_and(|missed| std::mem::take(&mut missed.wants_list))
    }

    pub(crate) fn end_session(&mut self, session: SessionId) {
        self.0.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use steerage_edge_dataplane::packet::maps::FlowKey;

    use super::*;

    #[test]
    fn list_is_wanted_once_a_missed_part_is_there() {
        let (vip, target) = (V6([1, 2, 3, 4]), IpAddr::from([10, 0, 0, 1]));
        let key = FlowKey { vip: target.into(), ports: 80, protocol: 6, ..FlowKey::default() };
        let listener = key.listener();
        let exception = Exception { key, target, idle: 0, is_closing: false };
        let no = |missed: &mut MissedParts| missed.update(|_| false, |_| false, |_| false);
        for part in 0..3 {
            let mut missed = MissedParts::default();
            match part {
                0 => missed.note_vip(1, vip),
                1 => missed.note_refusal(1, &exception, Refusal::UnknownListener),
                _ => missed.note_refusal(1, &exception, Refusal::UnknownTarget),
            }
            no(&mut missed);
            assert!(!missed.take_wish(1));
            assert!(missed.has_any(1) && !missed.has_any(2));
            missed.update(|found| *found == vip, |found| *found == listener, |found| *found == target);
            assert!(!missed.take_wish(2), "of another session");
            assert!(missed.has_any(1), "until the list comes");
            assert!(missed.take_wish(1));
            assert!(!missed.take_wish(1), "once");
            assert!(!missed.has_any(1));
            missed.update(|_| true, |_| true, |_| true);
            assert!(!missed.take_wish(1), "nothing is missed any more");
        }
    }

    #[test]
    fn missed_parts_take_little_memory() {
        let mut missed = MissedParts::default();
        for number in 0..5000 {
            missed.note_vip(1, V6([0, 0, 0, number]));
        }
        assert_eq!(missed.0[&1].vips.len(), MOST);
        missed.end_session(1);
        assert!(missed.0.is_empty());
    }
}

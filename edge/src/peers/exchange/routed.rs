// SPDX-License-Identifier: Apache-2.0
//! The exchange with hosts to which routers send packets as well: `super::super::routed` judges what they tell, and this applies it.

use std::collections::HashSet;
use std::time::Instant;

use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::{CLOSING, FlowKey};
use steerage_edge_dataplane::{Error, Exception, Pinned, Refusal};

use super::{Exchange, flow_time};
use crate::metrics::{FULL, reason};
use crate::peers::confirmed::SessionId;
use crate::peers::items::Changes;
use crate::peers::routed::{Judgement, RoutedChanges, ToldFlow};

/// Of flows that a host hears of with its next complete list. It contradicts the others again after theirs.
const MOST_UNTOLD: usize = 65_536;

impl Exchange {
    /// Whether the last packet of a flow decides between this host and that of the session, and not who answers for the VIP.
    pub(super) fn is_routed(&self, session: SessionId) -> bool {
        self.has_routes && self.confirmed.has_routes(session)
    }

    /// Inserts what a host with routes tells, where that host has seen the last packet. Tells all hosts where it has not, and the flow
    /// has another target.
    pub(super) fn insert_routed(
        &mut self,
        session: SessionId,
        exceptions: Vec<Exception>,
    ) -> Result<(), Error> {
        let (now, instant) = (flow_time(), Instant::now());
        let (mut believed, mut unknown, mut outdated) = (Vec::new(), HashSet::new(), Vec::new());
        for exception in exceptions {
            let key = exception.key;
            let known = self.flows.known(&key)?;
            let seen = now.wrapping_sub(exception.idle) & !CLOSING;
            let told = ToldFlow { key: &key, seen, target: self.flows.target_number(exception.target) };
            let own = known.filter(|known| known.is_alive(key.protocol, now));
            match self.routed.judge(session, told, own) {
                Judgement::New | Judgement::Replaces if self.has_room_for_routed(&key) => {
                    if known.is_none() {
                        unknown.insert(key);
                    }
                    believed.push(exception);
                }
                Judgement::New | Judgement::Replaces => self.metrics.count_refused(FULL),
                Judgement::Refused => self.metrics.count_refused(reason(Refusal::Known)),
                Judgement::Outdated => {
                    self.metrics.count_refused(reason(Refusal::Known));
                    outdated.extend(own.map(|own| (key, own)));
                }
            }
        }
        let results = self.flows.insert(&believed, now, |key| unknown.contains(key), |_, _| false)?;
        for (exception, result) in believed.iter().zip(results) {
            match result {
                Ok(()) => {
                    self.metrics.count_received();
                    // A later time of this host's own program shows that packets come here.
                    let seen = now.wrapping_sub(exception.idle) & !CLOSING;
                    self.confirmed.remove(&exception.key);
                    self.routed.note(session, exception.key, seen, instant);
                }
                Err(refusal) => {
                    self.metrics.count_refused(reason(refusal));
                    self.missed.note_refusal(session, exception, refusal);
                }
            }
        }
        self.tell_targets(&outdated, now);
        Ok(())
    }

    fn has_room_for_routed(&self, key: &FlowKey<V6>) -> bool {
        self.routed.contains(key) || self.routed.len() + self.confirmed.len() < self.limit
    }

    /// Looks at the flows that other hosts have told. Tells those whose packets come here now, and ends those that are told no more.
    pub(super) fn recheck_routed(&mut self, now: u32) {
        let flows = &self.flows;
        let RoutedChanges { used, ended } =
            self.routed.recheck(Instant::now(), |key| flows.known(key).ok().flatten());
        let mut others = Vec::new();
        for (key, own) in used {
            match self.flows.get(&key, now) {
                Ok(Some(pinned)) if self.sent.note(key, &pinned) => others.push((key, pinned)),
                // By its slot, as after a new connection from the same port: others have another target.
                Ok(None) if own.is_alive(key.protocol, now) => others.push((key, own)),
                _ => {}
            }
        }
        self.tell_targets(&others, now);
        if let Err(error) = self.flows.delete(&ended) {
            self.on_error(&error);
        }
    }

    /// Of flows that were told and are no exceptions any more: those that have another target than was told, which others would keep.
    pub(super) fn with_other_targets(
        &self,
        gone: &[(FlowKey<V6>, u32)],
        now: u32,
    ) -> Vec<(FlowKey<V6>, Pinned)> {
        if !self.has_routes {
            return Vec::new();
        }
        let other = |(key, told): &(FlowKey<V6>, u32)| {
            let own = self.flows.known(key).ok().flatten()?;
            let is_own = own.is_established && own.is_alive(key.protocol, now);
            (is_own && own.target != *told && !self.routed.is_told_by_other(key, own.seen))
                .then_some((*key, own))
        };
        gone.iter().filter_map(other).collect()
    }

    fn tell_targets(&mut self, flows: &[(FlowKey<V6>, Pinned)], now: u32) {
        let exceptions = self.exceptions(flows, now);
        self.send(Changes { exceptions, ..Changes::default() });
        self.note_untold(flows);
    }

    /// These flows were told, but are no exceptions: complete lists would not have them.
    pub(super) fn note_untold(&mut self, flows: &[(FlowKey<V6>, Pinned)]) {
        if self.followers.values().any(|follower| follower.listed.is_none()) {
            let room = MOST_UNTOLD.saturating_sub(self.untold.len());
            self.untold.extend(flows.iter().map(|(key, _)| *key).take(room));
        }
    }

    /// Those of them whose packets still come here.
    pub(super) fn untold(&self, now: u32) -> impl Iterator<Item = Exception> {
        self.untold.iter().filter_map(move |key| {
            let own = self.flows.known(key).ok().flatten()?;
            let is_own = own.is_alive(key.protocol, now) && !self.routed.is_told_by_other(key, own.seen);
            self.exception(*key, &own, now).filter(|_| is_own)
        })
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the hosts that answer for VIPs have confirmed of this host's flows. Pure, owned by `exchange`.
//!
//! A flow of a VIP for which another host answers is of use only if that host has confirmed it. This host may have a flow from the time
//! when it answered itself: the client may have closed that connection and opened another one from the same port, of which this host
//! has seen no packet. While the flow's target is that of its slot, the new connection has the same one. Once its slot moves, the flow
//! is wrong.

use std::collections::{HashMap, HashSet};

use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::FlowKey;

/// A session with another host.
pub(crate) type SessionId = u64;

#[derive(Debug)]
pub(crate) struct ConfirmedFlows {
    /// The flows, and the number of the list that has confirmed each last.
    flows: HashMap<FlowKey<V6>, u64>,
    limit: usize,
    /// The VIPs for which another host answers, by its last complete list.
    claims: HashMap<V6, SessionId>,
    /// The number of the last list of any host.
    last_list: u64,
    /// The list that each session has begun, or the last one that it has ended.
    lists: HashMap<SessionId, List>,
}

#[derive(Debug, Default)]
struct List {
    number: u64,
    is_open: bool,
    vips: HashSet<V6>,
}

impl ConfirmedFlows {
    pub(crate) fn new(limit: usize) -> Self {
        Self { flows: HashMap::new(), limit, claims: HashMap::new(), last_list: 0, lists: HashMap::new() }
    }

    /// Whether there is room for this flow.
    pub(crate) fn has_room(&self, key: &FlowKey<V6>) -> bool {
        self.flows.len() < self.limit || self.flows.contains_key(key)
    }

    pub(crate) fn contains(&self, key: &FlowKey<V6>) -> bool {
        self.flows.contains_key(key)
    }

    /// Whether another host answers for a VIP.
    pub(crate) fn is_claimed(&self, vip: V6) -> bool {
        self.claims.contains_key(&vip)
    }

    pub(crate) fn has_claims(&self) -> bool {
        !self.claims.is_empty()
    }

    /// A complete list begins.
    pub(crate) fn begin(&mut self, session: SessionId) {
        self.last_list += 1;
        let list = List { number: self.last_list, is_open: true, vips: HashSet::new() };
        self.lists.insert(session, list);
    }

    /// VIPs of the list.
    pub(crate) fn add_vips(&mut self, session: SessionId, vips: impl IntoIterator<Item = V6>) {
        if let Some(list) = self.lists.get_mut(&session).filter(|list| list.is_open) {
            list.vips.extend(vips);
        }
    }

    /// The flow was inserted, because a host has told so.
    pub(crate) fn confirm(&mut self, session: SessionId, key: FlowKey<V6>) {
        let number = self.lists.get(&session).map_or(0, |list| list.number);
        self.flows.insert(key, number);
    }

    /// The flow is no exception any more. Returns whether a host had confirmed it.
    pub(crate) fn remove(&mut self, key: &FlowKey<V6>) -> bool {
        self.flows.remove(key).is_some()
    }

    /// The list is complete. Returns the flows that it does not confirm any more, and whether it has VIPs for which the host of this
    /// session did not answer before. `answers`: whether this host answers for the VIP; then no other one's word counts.
    pub(crate) fn end(
        &mut self,
        session: SessionId,
        answers: impl Fn(V6) -> bool,
    ) -> (Vec<FlowKey<V6>>, bool) {
        let Some(list) = self.lists.get_mut(&session).filter(|list| list.is_open) else {
            return (Vec::new(), false);
        };
        list.is_open = false;
        let (number, vips) = (list.number, std::mem::take(&mut list.vips));
        // It may have left some to this or another host.
        self.claims.retain(|vip, owner| *owner != session || vips.contains(vip));
        let mut has_new = false;
        for vip in vips.iter().filter(|vip| !answers(**vip)) {
            has_new |= self.claims.insert(*vip, session) != Some(session);
        }
        let unconfirmed = self
            .flows
            .extract_if(|key, confirmed| *confirmed != number && vips.contains(&key.vip) && !answers(key.vip))
            .map(|(key, _)| key)
            .collect();
        (unconfirmed, has_new)
    }

    /// The session has ended. What its host has confirmed counts until another host answers.
    pub(crate) fn end_session(&mut self, session: SessionId) {
        self.lists.remove(&session);
    }

    /// This host answers for some of the VIPs now: their flows are its own.
    pub(crate) fn take_over(&mut self, answers: impl Fn(V6) -> bool) {
        self.claims.retain(|vip, _| !answers(*vip));
        self.flows.retain(|key, _| !answers(key.vip));
        if self.flows.is_empty() {
            self.flows.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vip(number: u32) -> V6 {
        V6([0, 0, 0, number])
    }

    fn key(vip_number: u32, port: u32) -> FlowKey<V6> {
        FlowKey { vip: vip(vip_number), ports: port, protocol: 6, ..FlowKey::default() }
    }

    fn list(
        confirmed: &mut ConfirmedFlows,
        session: SessionId,
        vips: &[u32],
        keys: &[FlowKey<V6>],
    ) -> (Vec<FlowKey<V6>>, bool) {
        confirmed.begin(session);
        confirmed.add_vips(session, vips.iter().map(|number| vip(*number)));
        for key in keys {
            confirmed.confirm(session, *key);
        }
        confirmed.end(session, |_| false)
    }

    #[test]
    fn complete_list_ends_what_it_does_not_confirm() {
        let mut confirmed = ConfirmedFlows::new(10);
        let (one, two, other) = (key(1, 1), key(1, 2), key(2, 1));
        assert_eq!(list(&mut confirmed, 7, &[1, 2], &[one, two, other]), (vec![], true));
        assert!(confirmed.is_claimed(vip(1)) && confirmed.is_claimed(vip(2)));
        assert_eq!(list(&mut confirmed, 7, &[1], &[two]), (vec![one], false));
        assert!(!confirmed.is_claimed(vip(2)), "left to another host");
        assert!(confirmed.contains(&other), "until that host has told its own");
        assert_eq!(list(&mut confirmed, 8, &[1, 2], &[two]), (vec![other], true));
        confirmed.confirm(8, one);
        assert_eq!(list(&mut confirmed, 8, &[1, 2], &[one, two]), (vec![], false));
    }

    #[test]
    fn list_that_was_cut_off_ends_nothing() {
        let mut confirmed = ConfirmedFlows::new(10);
        list(&mut confirmed, 7, &[1], &[key(1, 1)]);
        confirmed.begin(7);
        confirmed.add_vips(7, [vip(1)]);
        confirmed.end_session(7);
        assert_eq!(confirmed.end(7, |_| false), (vec![], false));
        assert!(confirmed.contains(&key(1, 1)) && confirmed.is_claimed(vip(1)));
        confirmed.add_vips(9, [vip(5)]);
        assert_eq!(confirmed.end(9, |_| false), (vec![], false), "no list was begun");
        assert!(!confirmed.is_claimed(vip(5)));
    }

    #[test]
    fn host_that_answers_believes_no_other_one() {
        let mut confirmed = ConfirmedFlows::new(10);
        list(&mut confirmed, 7, &[1, 2], &[key(1, 1), key(2, 1)]);
        confirmed.take_over(|found| found == vip(1));
        assert!(!confirmed.is_claimed(vip(1)) && !confirmed.contains(&key(1, 1)));
        assert!(confirmed.is_claimed(vip(2)) && confirmed.contains(&key(2, 1)));
        confirmed.begin(7);
        confirmed.add_vips(7, [vip(1), vip(2)]);
        assert_eq!(confirmed.end(7, |found| found == vip(1)), (vec![key(2, 1)], false));
        assert!(!confirmed.is_claimed(vip(1)));
    }

    #[test]
    fn flows_beyond_the_limit_have_no_room() {
        let mut confirmed = ConfirmedFlows::new(2);
        confirmed.confirm(1, key(1, 1));
        assert!(confirmed.has_room(&key(1, 2)));
        confirmed.confirm(1, key(1, 2));
        assert!(!confirmed.has_room(&key(1, 3)) && confirmed.has_room(&key(1, 2)));
        assert!(confirmed.remove(&key(1, 1)) && !confirmed.remove(&key(1, 1)));
        assert!(confirmed.has_room(&key(1, 3)));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the hosts that answer for VIPs have confirmed of this host's flows. Pure, owned by `exchange`.
//!
//! A flow of a VIP for which another host answers is of use only if that host has confirmed it. This host may have a flow from the time
//! when it answered itself: the client may have closed that connection and opened another one from the same port, of which this host
//! has seen no packet. While the flow's target is that of its slot, the new connection has the same one. Once its slot moves, the flow
//! is wrong.
//!
//! Routers may send a flow's packets to this host nevertheless. Of a flow that this host's own program has seen since the other host
//! claimed the VIP, no other host decides.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::{CLOSING, FlowKey, TOUCH};

/// So long after a claim began packets may still come that clients and routers sent before they knew, in the units of flows.
const HAND_OVER: u32 = TOUCH;
/// The program writes a flow's time every [`TOUCH`]. So long after a claim began the time of a flow in use is later than [`HAND_OVER`].
const SETTLED: Duration = Duration::from_secs(13);

/// A session with another host.
pub(crate) type SessionId = u64;

#[derive(Debug, Default)]
pub(crate) struct ConfirmedFlows {
    flows: HashMap<FlowKey<V6>, Confirmed>,
    /// The VIPs for which another host answers, by its last complete list.
    claims: HashMap<V6, Claim>,
    /// The number of the last list of any host.
    last_list: u64,
    /// The list that each session has begun, or the last one that it has ended.
    lists: HashMap<SessionId, List>,
}

#[derive(Debug)]
struct Confirmed {
    /// The number of the list that has confirmed the flow last.
    list: u64,
    /// The time that this host wrote into the flow then. Only this host's own program writes later ones.
    seen: u32,
}

#[derive(Debug)]
struct Claim {
    session: SessionId,
    /// Whether routers send that host packets.
    has_routes: bool,
    /// When other hosts began to answer, in the units of flows. Stays when another one of them takes over.
    since: u32,
    /// The same time.
    began: Instant,
}

/// Whether packets of a flow come to this host since another one answers for the VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LocalUse {
    Seen,
    /// The claim is too young.
    Unknown,
    Unseen,
}

/// The flow's time and the current one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    /// In the units of flows.
    pub(crate) seen: u32,
    pub(crate) instant: Instant,
}

/// Whether the first of two times of flows is later.
pub(crate) fn is_later(seen: u32, than: u32) -> bool {
    let later = seen.wrapping_sub(than) & !CLOSING;
    later != 0 && later < CLOSING / 2
}

#[derive(Debug, Default)]
struct List {
    number: u64,
    is_open: bool,
    has_routes: bool,
    vips: HashSet<V6>,
}

impl ConfirmedFlows {
    pub(crate) fn len(&self) -> usize {
        self.flows.len()
    }

    pub(crate) fn contains(&self, key: &FlowKey<V6>) -> bool {
        self.flows.contains_key(key)
    }

    /// Whether another host answers for a VIP.
    pub(crate) fn is_claimed(&self, vip: V6) -> bool {
        self.claims.contains_key(&vip)
    }

    /// Whether the host that answers for a VIP is connected.
    pub(crate) fn is_claim_live(&self, vip: V6) -> bool {
        self.claims.get(&vip).is_some_and(|claim| self.lists.contains_key(&claim.session))
    }

    /// Whether another host with routes answers for a VIP.
    pub(crate) fn is_claim_of_routes(&self, vip: V6) -> bool {
        self.claims.get(&vip).is_some_and(|claim| claim.has_routes)
    }

    /// Whether the host of this session has routes, as its last list says.
    pub(crate) fn has_routes(&self, session: SessionId) -> bool {
        self.lists.get(&session).is_some_and(|list| list.has_routes)
    }

    /// Whether packets of a flow come to this host, by the flow's time, which may also be one that another host has told.
    pub(crate) fn local_use(&self, key: &FlowKey<V6>, seen: u32, now: Instant) -> LocalUse {
        if self.flows.get(key).is_some_and(|confirmed| !is_later(seen, confirmed.seen)) {
            return LocalUse::Unseen;
        }
        let Some(claim) = self.claims.get(&key.vip) else { return LocalUse::Unknown };
        if is_later(seen, claim.since.wrapping_add(HAND_OVER)) {
            LocalUse::Seen
        } else if now.saturating_duration_since(claim.began) < SETTLED {
            LocalUse::Unknown
        } else {
            LocalUse::Unseen
        }
    }

    pub(crate) fn has_claims(&self) -> bool {
        !self.claims.is_empty()
    }

    /// A complete list begins.
    pub(crate) fn begin(&mut self, session: SessionId) {
        self.last_list += 1;
        let list = List { number: self.last_list, is_open: true, has_routes: false, vips: HashSet::new() };
        self.lists.insert(session, list);
    }

    /// The host that sends the list has routes.
    pub(crate) fn set_routes(&mut self, session: SessionId) {
        if let Some(list) = self.lists.get_mut(&session).filter(|list| list.is_open) {
            list.has_routes = true;
        }
    }

    /// VIPs of the list.
    pub(crate) fn add_vips(&mut self, session: SessionId, vips: impl IntoIterator<Item = V6>) {
        if let Some(list) = self.lists.get_mut(&session).filter(|list| list.is_open) {
            list.vips.extend(vips);
        }
    }

    /// The flow was inserted with the time `seen`, because a host has told so.
    pub(crate) fn confirm(&mut self, session: SessionId, key: FlowKey<V6>, seen: u32) {
        let list = self.lists.get(&session).map_or(0, |list| list.number);
        match self.flows.entry(key) {
            Entry::Occupied(mut entry) => {
                let confirmed = entry.get_mut();
                confirmed.list = list;
                // The flow keeps a later time.
                if is_later(seen, confirmed.seen) {
                    confirmed.seen = seen;
                }
            }
            Entry::Vacant(entry) => drop(entry.insert(Confirmed { list, seen })),
        }
    }

    /// The flow is no exception any more. Returns whether a host had confirmed it.
    pub(crate) fn remove(&mut self, key: &FlowKey<V6>) -> bool {
        self.flows.remove(key).is_some()
    }

    /// The list is complete. Returns the flows that it does not confirm any more, and whether it has VIPs for which the host of this
    /// session did not answer before. `answers`: whether this host answers for the VIP; then no other one decides.
    pub(crate) fn end(
        &mut self,
        session: SessionId,
        now: Now,
        answers: impl Fn(V6) -> bool,
    ) -> (Vec<FlowKey<V6>>, bool) {
        let Some(list) = self.lists.get_mut(&session).filter(|list| list.is_open) else {
            return (Vec::new(), false);
        };
        list.is_open = false;
        let (number, has_routes, vips) = (list.number, list.has_routes, std::mem::take(&mut list.vips));
        // It may have left some to this or another host.
        self.claims.retain(|vip, claim| claim.session != session || vips.contains(vip));
        let mut has_new = false;
        for vip in vips.iter().filter(|vip| !answers(**vip)) {
            match self.claims.entry(*vip) {
                Entry::Occupied(mut entry) => {
                    let claim = entry.get_mut();
                    claim.has_routes = has_routes;
                    has_new |= std::mem::replace(&mut claim.session, session) != session;
                }
                Entry::Vacant(entry) => {
                    entry.insert(Claim { session, has_routes, since: now.seen, began: now.instant });
                    has_new = true;
                }
            }
        }
        let unconfirmed = self.flows.iter().filter(|(key, confirmed)| {
            confirmed.list != number && vips.contains(&key.vip) && !answers(key.vip)
        });
        (unconfirmed.map(|(key, _)| *key).collect(), has_new)
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
impl ConfirmedFlows {
    /// As if all claims had begun so much earlier.
    pub(crate) fn make_older(&mut self, time: u32) {
        for claim in self.claims.values_mut() {
            claim.since = claim.since.wrapping_sub(time) & !CLOSING;
        }
    }

    /// As if enough time had passed since all claims began.
    pub(crate) fn settle(&mut self) {
        for claim in self.claims.values_mut() {
            claim.began = claim.began.checked_sub(SETTLED).expect("the machine has run for longer");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEN: u32 = 1000;

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
            confirmed.confirm(session, *key, SEEN);
        }
        end(confirmed, session, |_| false)
    }

    fn end(
        confirmed: &mut ConfirmedFlows,
        session: SessionId,
        answers: impl Fn(V6) -> bool,
    ) -> (Vec<FlowKey<V6>>, bool) {
        let now = Now { seen: SEEN, instant: Instant::now() };
        let (unconfirmed, has_new) = confirmed.end(session, now, answers);
        assert!(unconfirmed.iter().all(|key| confirmed.remove(key)));
        (unconfirmed, has_new)
    }

    #[test]
    fn complete_list_ends_what_it_does_not_confirm() {
        let mut confirmed = ConfirmedFlows::default();
        let (one, two, other) = (key(1, 1), key(1, 2), key(2, 1));
        assert_eq!(list(&mut confirmed, 7, &[1, 2], &[one, two, other]), (vec![], true));
        assert!(confirmed.is_claimed(vip(1)) && confirmed.is_claimed(vip(2)));
        assert_eq!(list(&mut confirmed, 7, &[1], &[two]), (vec![one], false));
        assert!(!confirmed.is_claimed(vip(2)), "left to another host");
        assert!(confirmed.contains(&other), "until that host has told its own");
        assert_eq!(list(&mut confirmed, 8, &[1, 2], &[two]), (vec![other], true));
        confirmed.confirm(8, one, SEEN);
        assert_eq!(list(&mut confirmed, 8, &[1, 2], &[one, two]), (vec![], false));
    }

    #[test]
    fn list_that_was_cut_off_ends_nothing() {
        let mut confirmed = ConfirmedFlows::default();
        list(&mut confirmed, 7, &[1], &[key(1, 1)]);
        confirmed.begin(7);
        confirmed.add_vips(7, [vip(1)]);
        confirmed.end_session(7);
        assert_eq!(end(&mut confirmed, 7, |_| false), (vec![], false));
        assert!(confirmed.contains(&key(1, 1)) && confirmed.is_claimed(vip(1)));
        confirmed.add_vips(9, [vip(5)]);
        assert_eq!(end(&mut confirmed, 9, |_| false), (vec![], false), "no list was begun");
        assert!(!confirmed.is_claimed(vip(5)));
    }

    #[test]
    fn host_that_answers_believes_no_other_one() {
        let mut confirmed = ConfirmedFlows::default();
        list(&mut confirmed, 7, &[1, 2], &[key(1, 1), key(2, 1)]);
        confirmed.take_over(|found| found == vip(1));
        assert!(!confirmed.is_claimed(vip(1)) && !confirmed.contains(&key(1, 1)));
        assert!(confirmed.is_claimed(vip(2)) && confirmed.contains(&key(2, 1)));
        confirmed.begin(7);
        confirmed.add_vips(7, [vip(1), vip(2)]);
        assert_eq!(end(&mut confirmed, 7, |found| found == vip(1)), (vec![key(2, 1)], false));
        assert!(!confirmed.is_claimed(vip(1)));
    }

    #[test]
    fn packets_after_a_claim_and_after_what_was_told_are_of_this_host() {
        use LocalUse::{Seen, Unknown, Unseen};
        let mut confirmed = ConfirmedFlows::default();
        let (flow, began) = (key(1, 1), Instant::now());
        assert_eq!(confirmed.local_use(&flow, SEEN, began), Unknown, "no claim");
        list(&mut confirmed, 7, &[1], &[]);
        let uses = |confirmed: &ConfirmedFlows, after: Duration| {
            [0, HAND_OVER, HAND_OVER + 1, HAND_OVER + 50]
                .map(|later| confirmed.local_use(&flow, SEEN + later, Instant::now() + after))
        };
        assert_eq!(uses(&confirmed, Duration::ZERO), [Unknown, Unknown, Seen, Seen]);
        assert_eq!(uses(&confirmed, SETTLED), [Unseen, Unseen, Seen, Seen]);
        assert_eq!(confirmed.local_use(&flow, (SEEN + 50) | CLOSING, began), Seen, "closed here");
        // Another host takes over: packets have come to this one all the time.
        list(&mut confirmed, 8, &[1], &[]);
        assert_eq!(uses(&confirmed, SETTLED), [Unseen, Unseen, Seen, Seen]);
        // A host tells the flow, and then again with an earlier time.
        confirmed.confirm(8, flow, SEEN + 20);
        confirmed.confirm(8, flow, SEEN + 10);
        assert_eq!(uses(&confirmed, Duration::ZERO), [Unseen, Unseen, Unseen, Seen]);
        assert_eq!(confirmed.local_use(&flow, SEEN + 20, began), Unseen, "as it was told");
        // This host has answered meanwhile.
        confirmed.take_over(|_| true);
        assert_eq!(uses(&confirmed, SETTLED), [Unknown; 4]);
    }

    #[test]
    fn claim_is_live_while_its_host_is_connected() {
        let mut confirmed = ConfirmedFlows::default();
        list(&mut confirmed, 7, &[1], &[]);
        assert!(confirmed.is_claim_live(vip(1)) && !confirmed.is_claim_live(vip(2)));
        confirmed.end_session(7);
        assert!(confirmed.is_claimed(vip(1)) && !confirmed.is_claim_live(vip(1)));
        list(&mut confirmed, 8, &[1], &[]);
        assert!(confirmed.is_claim_live(vip(1)));
    }
}

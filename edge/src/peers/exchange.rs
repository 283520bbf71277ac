// SPDX-License-Identifier: Apache-2.0
//! Decides which flow exceptions are told to the other hosts, and applies theirs. A thread of its own, because a scan of a million
//! flows takes longer than anything else may wait. `client` and `server` pass messages; the engine says when tables have changed.
//!
//! It asks the lease of each VIP whether this host answers for it. Of these VIPs it tells all exceptions, and no other host changes a
//! flow that is known here. Of other VIPs it keeps what the host that answers has confirmed (`confirmed`). What has not been confirmed,
//! and is an exception, is offered to that host, which may not have seen a packet of a flow that was idle. What it has not confirmed
//! seconds later is forgotten. Flows whose packets come to this host nevertheless are its own: they are not offered, and no other host
//! changes or ends them.
//!
//! Between hosts with routes the last packet of a flow decides instead (`routed`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::{FlowKey, seconds};
use steerage_edge_dataplane::{Error, Exception, FlowTable, Leases, Pinned};
use steerage_model::chain;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;

use super::confirmed::{ConfirmedFlows, LocalUse, SessionId};
use super::heard::HeardHosts;
use super::items::{Changes, Command, CompleteList, Item};
use super::missed::MissedParts;
use super::pace::{ScanPace, rest};
use super::routed::RoutedFlows;
use super::sent_exceptions::{Rechecked, SentExceptions};
use crate::link::mac::Mac;
use crate::metrics::FlowMetrics;

mod follower;
mod receive;
mod routed;

use follower::Follower;

/// How often the leases are looked at.
const TICK: Duration = Duration::from_millis(200);
/// Told exceptions are looked at again after this time, or ten times as long as it takes.
const RECHECK: Duration = Duration::from_secs(1);
/// A complete list is repeated after this time: it repairs what differs for any reason.
const LIST_INTERVAL: Duration = Duration::from_mins(2);
/// Unconfirmed flows that wait for the host that answers, since they take memory until then. Later scans find the others.
const MOST_OFFERS: usize = 65_536;
/// The host that answers has this time to confirm an offer. It takes what comes before in its session, scans its own flows, and tells
/// what it has found. Scans may follow each other sooner.
const OFFERED_FOR: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Exchange {
    flows: FlowTable,
    leases: Leases,
    metrics: FlowMetrics,
    sent: SentExceptions,
    confirmed: ConfirmedFlows,
    /// Whether routers send this host packets.
    has_routes: bool,
    routed: RoutedFlows,
    /// Flows of other hosts.
    limit: usize,
    missed: MissedParts,
    /// The hosts whose flows this host has.
    heard: HeardHosts,
    /// What has been offered, and when, and was not confirmed when the last scan looked.
    offered: HashMap<FlowKey<V6>, Instant>,
    followers: HashMap<SessionId, Follower>,
    /// Flows with other targets than were told, of which a host has not heard that needs a complete list.
    untold: HashSet<FlowKey<V6>>,
    /// The VIPs that the program knows, and their leases.
    vips: HashMap<V6, u32>,
    /// What [`FlowTable::changes`] was then.
    known_changes: Option<u64>,
    /// When they may be read again.
    vips_at: Option<Instant>,
    /// The leases that last.
    lasting: BTreeSet<u32>,
    pace: ScanPace,
    /// Whether a scan has found all exceptions of the VIPs for which this host answers.
    is_scanned: bool,
    recheck_at: Option<Instant>,
    has_failed: bool,
}

/// The time as flows have it.
fn flow_time() -> u32 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    seconds(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// The time as leases have it.
fn boot_time() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Whether this host answers for a VIP.
fn answers(vips: &HashMap<V6, u32>, lasting: &BTreeSet<u32>, vip: V6) -> bool {
    vips.get(&vip).is_some_and(|lease| lasting.contains(lease))
}

impl Exchange {
    /// `has_routes`: whether this host exports routes, so that routers send it packets; `heard` gets the hosts whose flows it has.
    pub(crate) fn new(
        flows: FlowTable,
        leases: Leases,
        metrics: FlowMetrics,
        has_routes: bool,
        heard: watch::Sender<BTreeSet<Mac>>,
    ) -> Result<Self, Error> {
        // Half of the map: what others tell must not take the places of this host's own flows.
        let limit = usize::try_from(flows.size()? / 2).unwrap_or(0);
        let mut exchange = Self {
            sent: SentExceptions::new(limit),
            confirmed: ConfirmedFlows::default(),
            has_routes,
            routed: RoutedFlows::new(LIST_INTERVAL),
            limit,
            missed: MissedParts::default(),
            heard: HeardHosts::new(heard),
            offered: HashMap::new(),
            flows,
            leases,
            metrics,
            followers: HashMap::new(),
            untold: HashSet::new(),
            vips: HashMap::new(),
            known_changes: None,
            vips_at: None,
            lasting: BTreeSet::new(),
            pace: ScanPace::default(),
            is_scanned: false,
            recheck_at: None,
            has_failed: false,
        };
        exchange.read_vips();
        Ok(exchange)
    }

    /// Runs until all that send commands are gone.
    pub(crate) fn run(mut self, commands: &Receiver<Command>) {
        let mut next = Instant::now();
        loop {
            match commands.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            next = self.work(Instant::now());
        }
    }

    pub(crate) fn handle(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::TablesChanged => self.pace.on_change(now),
            Command::Connected(session, items) => {
                if self.followers.is_empty() {
                    // Nobody was told, and nothing was looked for.
                    self.sent.clear();
                    self.is_scanned = false;
                }
                self.followers.insert(session, Follower { items, listed: None });
                // This host has been offered nothing.
                self.offered.clear();
                self.pace.on_change(now);
            }
            Command::Disconnected(session) => {
                self.followers.remove(&session);
                if self.followers.is_empty() {
                    self.sent.clear();
                    self.untold.clear();
                }
            }
            Command::Received(session, message, done) => {
                self.receive(session, message);
                // The session may have ended meanwhile.
                let _ = done.send(self.missed.take_wish(session));
            }
            Command::WantsList(session) => {
                if let Some(follower) = self.followers.get_mut(&session) {
                    follower.listed = None;
                }
            }
            Command::Began(session, host) => {
                self.routed.begin_session(session, host);
                self.heard.begin_session(session, host);
            }
            Command::Ended(session) => {
                self.confirmed.end_session(session);
                self.routed.end_session(session);
                self.missed.end_session(session);
                self.heard.end_session(session);
            }
            Command::Flush(done) => self.flush(&done),
        }
    }

    /// Does what is due. Returns when to look again.
    fn work(&mut self, now: Instant) -> Instant {
        // Also where nothing is told: flows that no host has confirmed are forgotten.
        if self.followers.is_empty() && !self.confirmed.has_claims() {
            return now + TICK;
        }
        self.look_at_changes();
        if self.pace.due().is_some_and(|due| due <= now) {
            self.scan();
        } else if self.is_scanned
            && (!self.sent.is_empty() || self.routed.len() > 0)
            && self.recheck_at.is_none_or(|at| at <= now)
        {
            self.recheck();
        }
        self.send_lists(now);
        let tick = now + TICK;
        self.pace.due().map_or(tick, |due| due.min(tick))
    }

    /// What the maps hold may be something else now. To read all VIPs again and again would take too long where slots move all the time.
    fn look_at_changes(&mut self) {
        let now = Instant::now();
        if self.known_changes != Some(self.flows.changes()) && self.vips_at.is_none_or(|at| at <= now) {
            self.read_vips();
            self.vips_at = Some(Instant::now() + rest(now.elapsed(), TICK));
        }
        self.read_leases();
    }

    fn read_vips(&mut self) {
        let changes = self.flows.changes();
        match self.flows.vips() {
            Ok(vips) => {
                self.known_changes = Some(changes);
                // Of a new VIP no other host has flows.
                let has_moved =
                    vips.iter().any(|(vip, lease)| self.vips.get(vip).is_some_and(|old| old != lease));
                self.vips = vips;
                if has_moved {
                    self.on_moved();
                }
                self.read_leases();
                self.forget_own();
                let (vips, flows) = (&self.vips, &self.flows);
                self.missed.update(
                    |vip| vips.contains_key(vip),
                    |listener| flows.has_listener(listener),
                    |target| flows.has_target(*target),
                );
            }
            Err(error) => self.on_error(&error),
        }
    }

    /// Leases may have begun or ended.
    fn read_leases(&mut self) {
        let now = boot_time();
        let leases: BTreeSet<_> = self.vips.values().copied().collect();
        let lasting = leases.into_iter().filter(|lease| self.leases.get(*lease) >= now).collect();
        if lasting == self.lasting {
            return;
        }
        self.lasting = lasting;
        self.forget_own();
        self.on_moved();
    }

    /// This host answers for other VIPs than before: all hosts need a new list.
    fn on_moved(&mut self) {
        self.is_scanned = false;
        for follower in self.followers.values_mut() {
            follower.listed = None;
        }
        self.pace.on_change(Instant::now());
    }

    /// No other host decides about flows of VIPs for which this host answers, or that it does not have.
    fn forget_own(&mut self) {
        let (vips, lasting) = (&self.vips, &self.lasting);
        self.confirmed.take_over(|vip| !vips.contains_key(&vip) || answers(vips, lasting, vip));
        self.routed.remove_vips(|vip| !vips.contains_key(&vip));
    }

    /// Finds the exceptions. Tells those of the VIPs for which this host answers; offers and forgets the others that no host has
    /// confirmed, and of which this host sees no packets.
    pub(crate) fn scan(&mut self) {
        let began = Instant::now();
        if self.known_changes != Some(self.flows.changes()) {
            self.read_vips();
        }
        let now = flow_time();
        let (vips, lasting) = (&self.vips, &self.lasting);
        let is_own = |vip| answers(vips, lasting, vip);
        let (sent, confirmed, routed) = (&mut self.sent, &self.confirmed, &self.routed);
        let (offered, has_routes) = (&self.offered, self.has_routes);
        let is_waited_for = |at: &Instant| began.saturating_duration_since(*at) < OFFERED_FOR;
        let most_offers = MOST_OFFERS.saturating_sub(offered.values().filter(|at| is_waited_for(at)).count());
        let tells = !self.followers.is_empty();
        let (mut news, mut offers) = (Vec::new(), Vec::new());
        let (mut waiting, mut unconfirmed) = (Vec::new(), Vec::new());
        sent.begin_scan();
        let scanned = self.flows.scan(now, |key, pinned| {
            let local_use = confirmed.local_use(&key, pinned.seen, began);
            // Other hosts with routes say which of this host's flows are outdated.
            let is_routed = has_routes && confirmed.is_claim_of_routes(key.vip);
            if is_own(key.vip) || is_routed || has_routes && local_use == LocalUse::Seen {
                let is_told = tells && pinned.is_established && !routed.is_told_by_other(&key, pinned.seen);
                if is_told && sent.note(key, &pinned) {
                    news.push((key, pinned));
                }
            } else if confirmed.is_claimed(key.vip) && !confirmed.contains(&key) && !routed.contains(&key) {
                match (offered.get(&key), local_use) {
                    (_, LocalUse::Seen) => {}
                    (Some(at), LocalUse::Unseen) if !is_waited_for(at) => unconfirmed.push(key),
                    // A scan follows when its time is over, or the use is known.
                    (Some(at), LocalUse::Unseen | LocalUse::Unknown) => waiting.push((key, *at)),
                    (None, _) if offers.len() < most_offers => offers.push((key, pinned)),
                    (None, _) => {}
                }
            }
        });
        let scanned = match scanned {
            Ok(scanned) => scanned,
            Err(error) => {
                self.on_error(&error);
                self.pace.on_change(began);
                self.pace.on_scan(began, Instant::now());
                return;
            }
        };
        let flows = &self.flows;
        let is_exception = |key: &FlowKey<V6>| {
            let found = flows.get(key, now).ok().flatten();
            found.is_some_and(|pinned| !routed.is_told_by_other(key, pinned.seen))
        };
        let gone = sent.end_scan(|vip| is_own(vip) || has_routes, is_exception);
        let others = self.with_other_targets(&gone, now);
        news.extend(others.iter().copied());
        // The scan may have taken long: other hosts take the age for that of now.
        let told_at = flow_time();
        let changes = Changes {
            gone: gone.into_iter().map(|(key, _)| key).collect(),
            exceptions: self.exceptions(&news, told_at),
            offers: self.exceptions(&offers, told_at),
        };
        let has_offers = !offers.is_empty();
        let deleted = self.flows.delete(&unconfirmed).and(self.flows.delete_ended(&scanned.ended, flow_time));
        self.is_scanned = true;
        let has_offered = self.send(changes);
        self.note_untold(&others);
        offers.retain(|(key, _)| {
            // Without a host to offer to, the one that answers may still confirm flows that it knows.
            has_offered || self.followers.is_empty() && self.confirmed.is_claim_live(key.vip)
        });
        if !offers.is_empty() || has_offers && !self.followers.is_empty() {
            // So that others follow: one forgets these once their time is over, the next offers those again that no host could take.
            self.pace.on_change(began);
        }
        // Of too many, those whose time is over are offered again.
        waiting.sort_by_key(|(_, at)| std::cmp::Reverse(*at));
        waiting.truncate(MOST_OFFERS - offers.len());
        let offered_at = Instant::now();
        self.offered = offers.into_iter().map(|(key, _)| (key, offered_at)).chain(waiting).collect();
        self.pace.on_scan(began, Instant::now());
        self.metrics.count_scan(self.sent.count(), began.elapsed());
        match deleted {
            Ok(()) => self.has_failed = false,
            Err(error) => self.on_error(&error),
        }
        tracing::debug!(
            flows = scanned.flows,
            ended = scanned.ended.len(),
            exceptions = self.sent.count(),
            beyond_limit = self.sent.beyond(),
            offered = self.offered.len(),
            forgotten = unconfirmed.len(),
            took = ?began.elapsed(),
            "scanned the flows"
        );
    }

    /// Looks at the told exceptions alone: a connection may have ended, and another one have begun from the same port.
    pub(crate) fn recheck(&mut self) {
        let (began, now) = (Instant::now(), flow_time());
        let (flows, routed) = (&self.flows, &self.routed);
        let Rechecked { mut changed, gone } = self.sent.recheck(|key| {
            let found = flows.get(key, now).ok().flatten();
            found.filter(|pinned| !routed.is_told_by_other(key, pinned.seen))
        });
        let others = self.with_other_targets(&gone, now);
        changed.extend(others.iter().copied());
        let exceptions = self.exceptions(&changed, now);
        let gone = gone.into_iter().map(|(key, _)| key).collect();
        self.send(Changes { gone, exceptions, offers: Vec::new() });
        self.note_untold(&others);
        if self.has_routes {
            self.recheck_routed(now);
        }
        self.recheck_at = Some(Instant::now() + rest(began.elapsed(), RECHECK));
    }

    fn exceptions(&self, pinned: &[(FlowKey<V6>, Pinned)], now: u32) -> Vec<Exception> {
        let exception = |(key, pinned): &(FlowKey<V6>, Pinned)| self.exception(*key, pinned, now);
        pinned.iter().filter_map(exception).collect()
    }

    fn exception(&self, key: FlowKey<V6>, pinned: &Pinned, now: u32) -> Option<Exception> {
        let target = self.flows.target(pinned.target)?;
        Some(Exception { key, target, idle: pinned.idle(now), is_closing: pinned.is_closing() })
    }

    /// Returns whether any host gets the offers.
    fn send(&mut self, changes: Changes) -> bool {
        if changes.is_empty() {
            return false;
        }
        let count = changes.exceptions.len() + changes.offers.len();
        let offered = changes.offers.len();
        // A host without a list gets everything else with its list.
        let has_unlisted = self.followers.values().any(|follower| follower.listed.is_none());
        let offers = (offered > 0 && has_unlisted).then(|| {
            Item::Changes(Arc::new(Changes { offers: changes.offers.clone(), ..Changes::default() }))
        });
        let (all, mut has_offered) = (Item::Changes(Arc::new(changes)), false);
        for follower in self.followers.values_mut() {
            let (item, count) =
                if follower.listed.is_some() { (Some(&all), count) } else { (offers.as_ref(), offered) };
            if let Some(item) = item
                && follower.send(item.clone())
            {
                has_offered |= offered > 0;
                self.metrics.count_sent(count);
            }
        }
        has_offered
    }

    /// Sends complete lists to the hosts that need one.
    fn send_lists(&mut self, now: Instant) {
        let is_due = |follower: &Follower| {
            follower.listed.is_none_or(|listed| now.duration_since(listed) >= LIST_INTERVAL)
        };
        if !self.is_scanned || !self.followers.values().any(is_due) {
            return;
        }
        let time = flow_time();
        let own = |vip: &V6| answers(&self.vips, &self.lasting, *vip);
        let list = CompleteList {
            has_routes: self.has_routes,
            vips: self.vips.keys().copied().filter(own).collect(),
            exceptions: self
                .sent
                .all()
                .filter_map(|(key, pinned)| self.exception(key, &pinned, time))
                .chain(self.untold(time))
                .collect(),
        };
        let count = list.exceptions.len();
        let list = Item::List(Arc::new(list));
        for follower in self.followers.values_mut().filter(|follower| is_due(follower)) {
            if follower.send(list.clone()) {
                follower.listed = Some(now);
                self.metrics.count_sent(count);
            }
        }
        if self.followers.values().all(|follower| follower.listed.is_some()) {
            self.untold.clear();
        }
    }

    /// Tells all that there is, and lets each host answer that has it.
    fn flush(&mut self, done: &Sender<()>) {
        self.read_leases();
        if self.followers.is_empty() {
            return;
        }
        self.scan();
        self.send_lists(Instant::now());
        for follower in self.followers.values_mut().filter(|follower| follower.listed.is_some()) {
            follower.send(Item::Barrier(done.clone()));
        }
    }

    /// Logs an error once: what failed is repeated.
    fn on_error(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!(
                error = %chain(error),
                "flow exceptions not exchanged; connections whose slots have moved may break at a takeover; retrying"
            );
        }
    }
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! Which targets of a group get new connections, with what share of their weight, and why. Pure, called for each group by a plan and
//! by what follows from changed health; what the next decision needs of this one is its [`Memory`].

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_api::{EdgeLoadBalancerSpec, TargetState, TargetUse};

/// How long the targets that were healthy last are used while none is. The last endpoint of a Service may be terminating and still
/// serve: it does so for 30 s unless its pod says otherwise.
pub(super) const LAST_GOOD_FOR: Duration = Duration::from_mins(1);
/// What failed no earlier than this before the last one failed together with it: hosts hear of it in different orders.
const TOGETHER: Duration = Duration::from_secs(1);
/// The parts of a whole weight. A slow start has one step less, and each is a table.
pub(super) const STEPS: u32 = 8;

const NO_ENDPOINT: &str = "no local endpoint";

/// What a load balancer asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct UseRules {
    /// In percent.
    panic_threshold: u32,
    slow_start: Duration,
}

impl UseRules {
    pub(super) fn new(spec: &EdgeLoadBalancerSpec) -> Self {
        Self {
            panic_threshold: spec.panic_threshold_percent.unwrap_or(0).min(100),
            slow_start: Duration::from_millis(spec.slow_start_milliseconds.unwrap_or(0).into()),
        }
    }

    /// As in an object; `None` without one.
    pub(super) fn panic_threshold_percent(self) -> Option<u32> {
        Some(self.panic_threshold).filter(|percent| *percent > 0)
    }

    /// The same.
    pub(super) fn slow_start_milliseconds(self) -> Option<u32> {
        u32::try_from(self.slow_start.as_millis()).ok().filter(|time| *time > 0)
    }
}

/// A target, as far as it matters for its use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known<'a> {
    pub(super) address: IpAddr,
    pub(super) state: TargetState,
    pub(super) lacks_endpoint: bool,
    /// Why its node drains, if it does.
    pub(super) drain: Option<&'a str>,
}

impl Known<'_> {
    fn is_healthy(&self) -> bool {
        self.state == TargetState::Healthy
    }

    fn is_ready(&self) -> bool {
        self.is_healthy() && self.drain.is_none()
    }

    /// It should serve, and does not.
    fn has_failed(&self) -> bool {
        self.state == TargetState::Unhealthy && !self.lacks_endpoint && self.drain.is_none()
    }
}

/// What one decision leaves to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// In order.
    healthy: Vec<IpAddr>,
    /// Targets that are no longer healthy, and since when.
    failed: BTreeMap<IpAddr, Instant>,
    /// Since when no target is healthy.
    none_since: Option<Instant>,
    /// Targets that fill, and since when.
    filling: BTreeMap<IpAddr, Instant>,
    /// The health of all targets was known once.
    was_known: bool,
}

impl Memory {
    /// Of a group whose table an earlier process has written, with these targets.
    pub(super) fn adopt(used: &[IpAddr], now: Instant) -> Self {
        let failed = used.iter().map(|address| (*address, now)).collect();
        Self { failed, none_since: Some(now), ..Self::default() }
    }

    /// The targets that it is about.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.healthy.iter().chain(self.failed.keys()).copied()
    }

    /// `untried` is the number of targets whose first probe has not ended, also of those that are not among `known`.
    fn next(&self, known: &[Known<'_>], untried: usize, now: Instant) -> Self {
        let mut healthy: Vec<_> =
            known.iter().filter(|target| target.is_healthy()).map(|target| target.address).collect();
        healthy.sort_unstable();
        let mut failed = self.failed.clone();
        for target in known {
            if target.is_healthy() {
                failed.remove(&target.address);
            } else if self.healthy.binary_search(&target.address).is_ok() {
                failed.insert(target.address, now);
            }
        }
        let none_since = healthy.is_empty().then(|| self.none_since.unwrap_or(now));
        if none_since.is_none() {
            failed.retain(|_, at| *at + LAST_GOOD_FOR > now);
        }
        let is_known = untried == 0 && known.iter().all(|target| target.state != TargetState::Initial);
        let was_known = self.was_known || is_known;
        Self { healthy, failed, none_since, filling: BTreeMap::new(), was_known }
    }

    /// Whether the target is one of those that were healthy last. One that has failed, and says nothing of its endpoints, counts as
    /// long as it could have been used: where all checks fail one after the other, the last target must not get all connections.
    fn is_last_good(&self, target: &Known<'_>, none_since: Instant) -> bool {
        let time = if target.lacks_endpoint { TOGETHER } else { LAST_GOOD_FOR };
        self.failed.get(&target.address).is_some_and(|at| *at + time >= none_since)
    }
}

/// Which targets are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    /// The healthy ones whose nodes do not drain.
    Ready,
    /// The healthy ones, all of whose nodes drain.
    Draining,
    /// Also those that have failed: too few are healthy.
    Panic,
    /// Those that were healthy last, as none is.
    LastGood,
    /// All that do not say that they have no endpoint, or all; see `tracked` for the most of each. Those whose nodes drain only if all of
    /// these drain.
    All,
}

/// How one target is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) usage: TargetUse,
    pub(super) reason: String,
    /// In parts of [`STEPS`] of its weight; zero if it gets no new connections.
    pub(super) share: u32,
}

impl Used {
    /// It gets no connections, because it says that it has no endpoint.
    pub(super) fn without_endpoint() -> Self {
        Self { usage: TargetUse::Inactive, reason: NO_ENDPOINT.to_owned(), share: 0 }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Usage {
    pub(super) basis: Basis,
    /// Of each target.
    pub(super) used: Vec<Used>,
    pub(super) memory: Memory,
    /// When another decision follows without any news.
    pub(super) next_change: Option<Instant>,
}

/// `untried` as in [`Memory::next`].
pub(super) fn decide(
    known: &[Known<'_>],
    untried: usize,
    rules: UseRules,
    before: &Memory,
    now: Instant,
) -> Usage {
    let mut memory = before.next(known, untried, now);
    let basis = basis(known, rules, &memory, now);
    memory.filling = filling(known, rules, before, now);
    let hold_ends = memory.none_since.filter(|_| basis == Basis::LastGood).map(|since| since + LAST_GOOD_FOR);
    let steps = memory.filling.values().map(|since| next_step(*since, rules.slow_start, now));
    let next_change = steps.chain(hold_ends).min();
    let has_endpoints = known.iter().any(|target| !target.lacks_endpoint);
    let is_possible = |target: &Known<'_>| !(has_endpoints && target.lacks_endpoint);
    let all_drain = known.iter().filter(|target| is_possible(target)).all(|target| target.drain.is_some());
    let used = known.iter().map(|target| {
        let is_used = match basis {
            Basis::Ready => target.is_ready(),
            Basis::Draining => target.is_healthy(),
            Basis::Panic => target.is_ready() || target.has_failed(),
            Basis::LastGood => memory.none_since.is_some_and(|since| memory.is_last_good(target, since)),
            Basis::All => is_possible(target) && (all_drain || target.drain.is_none()),
        };
        let since = memory.filling.get(&target.address).filter(|_| basis == Basis::Ready);
        let share = since.map_or(STEPS, |since| step(*since, rules.slow_start, now));
        used(target, basis, rules, if is_used { share } else { 0 })
    });
    let used = used.collect();
    Usage { basis, used, memory, next_change }
}

fn basis(known: &[Known<'_>], rules: UseRules, memory: &Memory, now: Instant) -> Basis {
    let ready = known.iter().filter(|target| target.is_ready()).count();
    let failed = known.iter().filter(|target| target.has_failed()).count();
    let percent = usize::try_from(rules.panic_threshold).unwrap_or(0);
    if ready > 0 {
        return if ready * 100 < percent * (ready + failed) { Basis::Panic } else { Basis::Ready };
    }
    match memory.none_since {
        None => Basis::Draining,
        Some(since)
            if now < since + LAST_GOOD_FOR
                && known.iter().any(|target| memory.is_last_good(target, since)) =>
        {
            Basis::LastGood
        }
        Some(_) => Basis::All,
    }
}

/// The targets that fill: they became healthy while others were and still are, once the health of all was known.
fn filling(known: &[Known<'_>], rules: UseRules, before: &Memory, now: Instant) -> BTreeMap<IpAddr, Instant> {
    let since = |target: &Known<'_>| match before.filling.get(&target.address) {
        Some(since) => Some(*since),
        None if !before.was_known => None,
        None => before.healthy.binary_search(&target.address).is_err().then_some(now),
    };
    let ready = known.iter().filter(|target| target.is_ready());
    let (filling, full): (Vec<_>, Vec<_>) = ready
        .map(|target| (target.address, since(target).filter(|since| now < *since + rules.slow_start)))
        .partition(|(_, since)| since.is_some());
    if full.is_empty() {
        // Among themselves they need no time, and nobody else serves.
        return BTreeMap::new();
    }
    filling.into_iter().filter_map(|(address, since)| Some((address, since?))).collect()
}

/// From 1 to [`STEPS`], which it is at the end.
fn step(since: Instant, slow_start: Duration, now: Instant) -> u32 {
    let done = now.duration_since(since).as_nanos() * u128::from(STEPS - 1) / slow_start.as_nanos().max(1);
    u32::try_from(done).unwrap_or(STEPS).saturating_add(1).min(STEPS)
}

fn next_step(since: Instant, slow_start: Duration, now: Instant) -> Instant {
    since + slow_start * step(since, slow_start, now) / (STEPS - 1)
}

fn used(target: &Known<'_>, basis: Basis, rules: UseRules, share: u32) -> Used {
    let (usage, reason) = match (share, target.drain) {
        (0, Some(why)) => (TargetUse::Draining, why.to_owned()),
        (0, None) => {
            let reason = match target.state {
                TargetState::Unhealthy if target.lacks_endpoint => NO_ENDPOINT,
                TargetState::Initial => "not probed yet",
                _ => "not healthy",
            };
            (TargetUse::Inactive, reason.to_owned())
        }
        (STEPS, drain) => {
            let reason = match basis {
                Basis::Ready => String::new(),
                Basis::Draining => {
                    format!("used although {}: no other target is healthy", drain.unwrap_or_default())
                }
                Basis::Panic if target.is_healthy() => String::new(),
                Basis::Panic => {
                    format!("used because fewer than {} % of the targets are healthy", rules.panic_threshold)
                }
                Basis::LastGood => "used because no target is healthy and this one was last".to_owned(),
                Basis::All => "used because no target is healthy".to_owned(),
            };
            (TargetUse::Active, reason)
        }
        (share, _) => (TargetUse::Filling, format!("slow start: {share}/{STEPS} of its weight")),
    };
    Used { usage, reason, share }
}

#[cfg(test)]
mod tests;

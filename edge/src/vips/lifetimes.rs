// SPDX-License-Identifier: Apache-2.0
//! How long the kernel keeps VIPs without this process: for some seconds while another host could take over, else without
//! limit.
//!
//! A dead process cannot remove its VIPs, and its kernel would answer ARP for them beside the host that took over, with the
//! targets that were healthy then. The task here waits for neither the kernel's rules nor the API, so that a long write does not
//! end the lifetimes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use steerage_model::chain;
use tokio::sync::watch;

use crate::link::election::HeartbeatTiming;
use crate::link::membership::Membership;
use crate::link::route::{RouteError, Rtnetlink};

/// How often lifetimes begin again, if that costs little.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// A lifetime has so many intervals, so that one refresh may fail.
const INTERVALS: u32 = 3;
/// A lifetime has so many times more in which a host is found dead: another host first waits for that, and then for its turn.
const TIMEOUTS: u32 = 2;
/// A refresh takes at most this part of the time, because others wait for the kernel's lock meanwhile.
const DUTY: u32 = 10;
/// The most that the engine waits for a refresh.
const MAX_ENGINE_WAIT: Duration = Duration::from_secs(1);

/// The time of a refresh of so many VIPs, estimated high. For each IPv6 address that changes, the kernel looks at all of them: 0.5 s
/// were measured for 1,000, and 50 s for 10,000.
fn estimated_cost(count: usize) -> Duration {
    let count = u64::try_from(count).unwrap_or(u64::MAX);
    Duration::from_micros(count.saturating_mul(count))
}

/// The time between two refreshes, of which the last one took `cost`.
fn interval(count: usize, cost: Duration) -> Duration {
    estimated_cost(count).max(cost).saturating_mul(DUTY).max(REFRESH_INTERVAL)
}

/// The lifetime of VIPs that are refreshed at this interval. The VIPs of a dead host must stay until another host has them.
fn limit(interval: Duration, timing: HeartbeatTiming) -> Duration {
    interval.saturating_mul(INTERVALS).saturating_add(timing.timeout().saturating_mul(TIMEOUTS))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    /// It goes on as it is.
    Unchanged,
    /// [`limit`], from now on.
    Limited,
    Unlimited,
}

impl Lifetime {
    fn new(membership: &Membership) -> Self {
        match (membership.settled, membership.may_have_vips(), membership.has_standby) {
            // A process that has just started does not know whether another host has them.
            (false, ..) | (true, false, _) => Self::Unchanged,
            (true, true, true) => Self::Limited,
            (true, true, false) => Self::Unlimited,
        }
    }
}

/// The VIPs on an interface. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct VipAddresses(Arc<Mutex<Addresses>>);

#[derive(Debug)]
struct Addresses {
    /// The interface's.
    index: u32,
    netlink: Rtnetlink,
    timing: HeartbeatTiming,
    held: BTreeSet<IpAddr>,
    /// Whether a lifetime may be limited.
    is_limited: bool,
    /// How long the last refresh took.
    cost: Duration,
    /// Counts refreshes: a new one ends those that still run.
    refreshes: u64,
}

impl VipAddresses {
    pub(crate) fn new(index: u32, netlink: Rtnetlink, timing: HeartbeatTiming) -> Self {
        // VIPs that an earlier process left may have a limited lifetime.
        let addresses = Addresses {
            index,
            netlink,
            timing,
            held: BTreeSet::new(),
            is_limited: true,
            cost: Duration::ZERO,
            refreshes: 0,
        };
        Self(Arc::new(Mutex::new(addresses)))
    }

    /// The VIPs that were found on the interface.
    pub(super) fn set_held(&self, found: &BTreeSet<IpAddr>) {
        self.lock().held.clone_from(found);
    }

    pub(super) fn timing(&self) -> HeartbeatTiming {
        self.lock().timing
    }

    /// Adds a VIP, with an unlimited lifetime until the next refresh: many take longer to add than a lifetime.
    pub(super) fn add(&self, vip: IpAddr) -> Result<(), RouteError> {
        let mut addresses = self.lock();
        addresses.write(vip, None)?;
        addresses.held.insert(vip);
        Ok(())
    }

    pub(super) fn remove(&self, vip: IpAddr) -> Result<(), RouteError> {
        let mut addresses = self.lock();
        let index = addresses.index;
        addresses.netlink.remove_vip(index, vip)?;
        addresses.held.remove(&vip);
        Ok(())
    }

    /// [`VipAddresses::keep`], unless it takes long.
    pub(super) fn keep_if_few(&self, membership: &Membership) {
        if estimated_cost(self.lock().held.len()) <= MAX_ENGINE_WAIT {
            self.keep(membership);
        }
    }

    /// Gives all VIPs the lifetime that the membership allows. Returns the time until the next refresh.
    fn keep(&self, membership: &Membership) -> Duration {
        let (interval, timing) = {
            let addresses = self.lock();
            (interval(addresses.held.len(), addresses.cost), addresses.timing)
        };
        match Lifetime::new(membership) {
            Lifetime::Unchanged => {}
            Lifetime::Limited => self.write_all(Some(limit(interval, timing))),
            Lifetime::Unlimited => self.write_all(None),
        }
        interval
    }

    /// Gives all VIPs an unlimited lifetime, the last one.
    pub(super) fn keep_without_process(&self) {
        self.write_all(None);
        self.lock().held.clear();
    }

    /// Locked for each VIP on its own: the engine must not wait for hundreds.
    fn write_all(&self, lifetime: Option<Duration>) {
        let begun = Instant::now();
        let (refresh, held) = {
            let mut addresses = self.lock();
            // Those that are added have no limit.
            if lifetime.is_none() && !addresses.is_limited {
                return;
            }
            addresses.is_limited = true;
            addresses.refreshes += 1;
            (addresses.refreshes, addresses.held.clone())
        };
        let mut failure = None;
        for vip in held {
            let mut addresses = self.lock();
            if addresses.refreshes != refresh {
                return;
            }
            // The engine may have removed it.
            if addresses.held.contains(&vip)
                && let Err(error) = addresses.write(vip, lifetime)
            {
                failure = Some(error);
            }
        }
        let mut addresses = self.lock();
        addresses.cost = begun.elapsed();
        addresses.is_limited = lifetime.is_some() || failure.is_some();
        drop(addresses);
        if let Some(error) = failure {
            tracing::warn!(error = chain(&error), "lifetime of VIPs not set; retrying");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Addresses> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Addresses {
    fn write(&mut self, vip: IpAddr, lifetime: Option<Duration>) -> Result<(), RouteError> {
        self.netlink.add_vip(self.index, vip, lifetime)
    }
}

/// When lifetimes are refreshed.
#[derive(Clone, Copy, Debug)]
struct RefreshSchedule {
    /// Not earlier, because a refresh costs others time.
    not_before: Instant,
    due: Instant,
}

impl RefreshSchedule {
    /// Something changed: refresh as soon as possible. Never later than planned, because lifetimes would end.
    fn hurry(&mut self) {
        self.due = self.due.min(self.not_before);
    }

    /// A refresh ran from `begun` to `now`, and the next one is due after `interval`.
    fn after(begun: Instant, now: Instant, interval: Duration) -> Self {
        let cost = now.duration_since(begun);
        Self { not_before: now + cost.saturating_mul(DUTY), due: now + interval }
    }
}

/// The task that keeps the VIPs while this process runs.
#[derive(Debug)]
pub(crate) struct LifetimeKeeper {
    pub(crate) addresses: VipAddresses,
    pub(crate) membership: watch::Receiver<Membership>,
    /// The VIPs of the engine.
    pub(crate) held: watch::Receiver<BTreeSet<IpAddr>>,
}

impl LifetimeKeeper {
    /// Runs until the engine is gone: the heartbeats go on for as long as anybody receives the membership.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let mut last = Lifetime::Unchanged;
        let begun = Instant::now();
        let mut schedule = RefreshSchedule { not_before: begun, due: begun };
        loop {
            tokio::select! {
                changed = self.membership.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    if Lifetime::new(&self.membership.borrow_and_update()) != last {
                        schedule.hurry();
                    }
                }
                changed = self.held.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    // The new ones have no limit.
                    schedule.hurry();
                }
                () = tokio::time::sleep_until(schedule.due.into()) => {
                    let membership = self.membership.borrow_and_update().clone();
                    let begun = Instant::now();
                    let interval = tokio::task::block_in_place(|| self.addresses.keep(&membership));
                    last = Lifetime::new(&membership);
                    schedule = RefreshSchedule::after(begun, Instant::now(), interval);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By whether the host has settled, is active, and whether another one is active and could take over.
    fn lifetime([settled, active, other_active, has_standby]: [bool; 4]) -> Lifetime {
        let membership = Membership { active, other_active, has_standby, settled, ..Membership::default() };
        Lifetime::new(&membership)
    }

    #[test]
    fn many_vips_are_refreshed_rarely_and_before_their_lifetime_ends() {
        assert_eq!(interval(100, Duration::ZERO), REFRESH_INTERVAL);
        for (count, cost) in [(1_000, 500), (10_000, 50_000), (10, 10_000)] {
            let (cost, interval) =
                (Duration::from_millis(cost), interval(count, Duration::from_millis(cost)));
            assert!(interval >= cost * DUTY, "{count}: {interval:?}");
            // Even a refresh that takes twice as long as the last one ends before the lifetimes.
            let timing = HeartbeatTiming { interval: Duration::from_millis(20), misses: 2 };
            assert!(limit(interval, timing) > interval + cost * 2, "{count}: {interval:?}");
        }
    }

    #[test]
    fn vips_of_a_dead_host_stay_until_another_host_has_them() {
        for (milliseconds, misses) in [(20, 2), (200, 3), (1_000, 30), (10_000, 100)] {
            let timing = HeartbeatTiming { interval: Duration::from_millis(milliseconds), misses };
            for count in [1, 1_000, 10_000] {
                let interval = interval(count, Duration::ZERO);
                // The host may die just before a refresh. The next one takes over once it is found dead, at the latest after as long
                // again, and then writes its VIPs.
                let needed = timing.timeout() * 2 + REFRESH_INTERVAL;
                assert!(limit(interval, timing) >= interval + needed, "{timing:?}, {count}: {interval:?}");
            }
        }
        let default = HeartbeatTiming { interval: Duration::from_millis(200), misses: 3 };
        assert_eq!(limit(REFRESH_INTERVAL, default), Duration::from_millis(16_200));
    }

    /// The interval follows the time of the refresh before, so a slow one may forbid the next one for longer than a lifetime.
    #[test]
    fn change_of_the_membership_delays_no_refresh() {
        let begun = Instant::now();
        for cost in [Duration::from_millis(10), Duration::from_secs(10)] {
            let now = begun + cost;
            let mut schedule = RefreshSchedule::after(begun, now, REFRESH_INTERVAL);
            schedule.hurry();
            assert!(schedule.due <= now + REFRESH_INTERVAL, "{cost:?}");
            assert!(schedule.due >= now + (cost * DUTY).min(REFRESH_INTERVAL), "{cost:?}");
        }
    }

    #[test]
    fn lifetime_is_limited_while_another_host_could_take_over() {
        assert_eq!(lifetime([true, true, false, true]), Lifetime::Limited);
        assert_eq!(lifetime([true, true, false, false]), Lifetime::Unlimited);
        assert_eq!(lifetime([true, false, false, true]), Lifetime::Limited, "nobody has them yet");
        assert_eq!(lifetime([true, false, false, false]), Lifetime::Unlimited);
        assert_eq!(lifetime([true, true, true, true]), Lifetime::Limited, "two active hosts for a moment");
    }

    #[test]
    fn lifetime_ends_by_itself_where_another_host_has_the_vips_or_may_have() {
        for has_standby in [false, true] {
            assert_eq!(lifetime([true, false, true, has_standby]), Lifetime::Unchanged);
            assert_eq!(lifetime([false, false, false, has_standby]), Lifetime::Unchanged);
        }
    }
}

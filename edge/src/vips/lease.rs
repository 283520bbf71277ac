// SPDX-License-Identifier: Apache-2.0
//! How long the kernel's program answers for the VIPs of each shard without this process: for some seconds while another host could take
//! over, else without limit. And how long it forwards, which `forwarding` decides.
//!
//! A dead process cannot stop it, and it would answer ARP beside the host that took over, with the targets that were healthy then.
//! The task here waits for neither the maps nor the API, so that a long write ends no lease, and an engine that is stuck leaves the
//! VIPs to another host.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use steerage_edge_dataplane::Leases;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::{UNDIVIDED, VipRole, VipRoles, forwarding};
use crate::link::ability::AbilityReport;
use crate::link::election::HeartbeatTiming;
use crate::link::membership::Membership;
use crate::shards::{Shard, Shards};

/// How often the lease is renewed.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);
/// A lease lasts so long, so that the renewals of a host without time for this process may be late.
const SLACK: Duration = Duration::from_secs(5);
/// And so many times longer in which a host is found dead: another host first waits for that, and then for its turn.
const TIMEOUTS: u32 = 2;

/// So long after a host could have taken over last, the lease lasts so long: that host may be there again. Later it has no end.
pub(crate) const AFTER_STANDBY: Duration = Duration::from_mins(1);

/// How long a lease lasts while another host could take over.
pub(crate) fn lease_time(timing: HeartbeatTiming) -> Duration {
    SLACK + timing.timeout().saturating_mul(TIMEOUTS)
}

/// For how long a lease is renewed. `limited`: while another host could take over; `since_standby`: the time since one could.
fn time_of_renewed(limited: Duration, since_standby: Option<Duration>) -> Duration {
    match since_standby {
        Some(Duration::ZERO) => limited,
        Some(since) if since < AFTER_STANDBY => limited.max(AFTER_STANDBY),
        _ => Duration::MAX,
    }
}

/// The next state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renewal {
    /// It continues as it is.
    Unchanged,
    /// It ends now.
    End,
    /// It lasts for [`time_of_renewed`], from now on.
    Renewed,
}

impl Renewal {
    /// `lasts`: whether the lease lasts now; `holds`: whether no other host can have taken over unnoticed.
    fn new(role: VipRole, lasts: bool, holds: bool) -> Self {
        match (role, lasts, holds) {
            // A process that has just started does not know whether another host has the VIPs, and neither does one that did not run
            // for so long that its lease has ended.
            (VipRole::Undecided, ..) | (VipRole::Unanswered, false, _) | (VipRole::Active, false, false) => {
                Self::Unchanged
            }
            (VipRole::Standby, ..) => Self::End,
            (VipRole::Active, ..) | (VipRole::Unanswered, true, _) => Self::Renewed,
        }
    }
}

/// The leases of the VIPs, one for each shard. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct VipLeases(Arc<Mutex<LeaseTable>>);

#[derive(Debug)]
struct LeaseTable {
    leases: Leases,
    time: Duration,
    /// How long routers get to leave this host when the process ends, if it keeps routes.
    withdraw_wait: Option<Duration>,
    /// When another host could have taken over last.
    standby_at: Option<Instant>,
    /// The program has left the packets to the kernel.
    is_over: bool,
    /// The process ends and has decided the last state of the leases.
    is_left: bool,
}

impl VipLeases {
    /// Before the program of this process is attached. `withdraw_wait`: how long routers get to leave this host when the process ends,
    /// if it keeps routes.
    pub(crate) fn new(leases: Leases, timing: HeartbeatTiming, withdraw_wait: Option<Duration>) -> Self {
        let time = lease_time(timing);
        let table =
            LeaseTable { leases, time, withdraw_wait, standby_at: None, is_over: false, is_left: false };
        table.divide();
        let left = forwarding::unchanged(table.forwarding_left(), table.longest());
        table.forward_for(left);
        Self(Arc::new(Mutex::new(table)))
    }

    /// The shards for which this host answers.
    pub(crate) fn lasting(&self) -> Shards {
        self.lock().lasting()
    }

    fn renew(&self, membership: &Membership, is_leaving: bool, can_serve: bool) {
        let mut table = self.lock();
        if table.is_left {
            return;
        }
        let time = table.time_of_renewed(membership);
        let roles = VipRoles::new(membership, is_leaving);
        let (now, before, holds) = (now(), table.lasting(), membership.roles_hold(Instant::now()));
        let until = |shard: Shard| match Renewal::new(roles.of(shard), before.contains(shard), holds) {
            Renewal::Unchanged => table.leases.get(shard.lease()),
            Renewal::End => Duration::ZERO,
            Renewal::Renewed => now.saturating_add(time),
        };
        let leases: Vec<_> = Shard::all().map(|shard| (shard, until(shard))).collect();
        let longest = leases.iter().map(|(_, until)| left_of(*until, now)).max().unwrap_or_default();
        // First: the host must not answer for VIPs that it does not forward to.
        table.renew_forwarding(membership.settled, time, longest, can_serve);
        for (shard, until) in leases {
            table.set(shard, until);
        }
        table.renew_undivided();
        log_change(before, table.lasting());
    }

    /// The maps hold what this host should serve: the program forwards again before anybody learns that this host can serve.
    pub(crate) fn forward(&self, membership: &Membership) {
        let mut table = self.lock();
        if !table.is_left {
            let time = table.time_of_renewed(membership);
            let longest = table.longest();
            table.renew_forwarding(membership.settled, time, longest, true);
        }
    }

    /// The process ends: other hosts have the shards for which they are active. The kernel keeps the others, for a limited time if
    /// another host can take over.
    pub(crate) fn leave(&self, membership: &Membership) {
        let mut table = self.lock();
        table.is_left = true;
        for shard in table.lasting().iter() {
            let is_taken = membership.others_active.contains(shard);
            table.set(shard, left_until(is_taken, membership.has_standby, now()));
        }
        table.renew_undivided();
        let (left, longest) = (table.forwarding_left(), table.longest());
        let withdraw_wait = table.withdraw_wait.unwrap_or_default();
        let left = forwarding::left_behind(left, longest, membership.has_standby, withdraw_wait);
        table.forward_for(left);
    }

    /// Routers send packets to this host, and no other host can serve: the program forwards without end, also after the process.
    pub(crate) fn remain(&self) {
        self.lock().forward_for(Duration::MAX);
    }

    fn lock(&self) -> MutexGuard<'_, LeaseTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeaseTable {
    /// The maps may be those of an earlier version, whose one lease is then that of each shard.
    fn divide(&self) {
        let undivided = self.leases.get(UNDIVIDED);
        if undivided >= now() && self.lasting().is_empty() {
            for shard in Shard::all() {
                self.set(shard, undivided);
            }
        }
    }

    /// Until the first plan is written, the VIPs may have the one lease of an earlier version.
    fn renew_undivided(&self) {
        let longest = Shard::all().map(|shard| self.leases.get(shard.lease())).max();
        self.leases.set(UNDIVIDED, longest.unwrap_or_default());
    }

    fn time_of_renewed(&mut self, membership: &Membership) -> Duration {
        let instant = Instant::now();
        if membership.has_standby {
            self.standby_at = Some(instant);
        }
        time_of_renewed(self.time, self.standby_at.map(|at| instant.duration_since(at)))
    }

    /// `lease_time`: of a lease that is renewed now; `longest`: what the longest lease has left.
    fn renew_forwarding(
        &mut self,
        is_settled: bool,
        lease_time: Duration,
        longest: Duration,
        can_serve: bool,
    ) {
        let left = self.forwarding_left();
        if left.is_zero() && !self.is_over {
            tracing::warn!(
                "the eBPF program leaves packets to VIPs to the kernel: this host cannot serve, and another host can"
            );
        }
        let next = if is_settled {
            forwarding::renewed(left, longest, lease_time, can_serve, self.withdraw_wait.is_some())
        } else {
            forwarding::unchanged(left, longest)
        };
        if left.is_zero() && !next.is_zero() {
            tracing::info!("the eBPF program forwards packets to VIPs again");
        }
        self.is_over = next.is_zero();
        self.forward_for(next);
    }

    fn forward_for(&self, left: Duration) {
        // What has ended must not end now: the program's clock is late.
        if left != self.forwarding_left() {
            self.leases.set_forwarding(clock().saturating_add(left));
        }
    }

    fn forwarding_left(&self) -> Duration {
        left_of(self.leases.forwarding(), clock())
    }

    /// What the longest lease has left.
    fn longest(&self) -> Duration {
        let now = now();
        let left = Shard::all().map(|shard| left_of(self.leases.get(shard.lease()), now));
        left.max().unwrap_or_default()
    }

    fn lasting(&self) -> Shards {
        let now = now();
        Shard::all().filter(|shard| self.leases.get(shard.lease()) >= now).collect()
    }

    fn set(&self, shard: Shard, until: Duration) {
        self.leases.set(shard.lease(), until);
    }
}

/// What is left until then; `Duration::MAX` stays without end.
fn left_of(until: Duration, now: Duration) -> Duration {
    if until == Duration::MAX { until } else { until.saturating_sub(now) }
}

/// The end of a lease that a process leaves behind. `is_taken`: whether another host answers for the shard; `has_standby`: whether one
/// could take over, and may do so later than this process waits. One that could until a moment ago is no reason: where all processes
/// end, the kernels serve on.
fn left_until(is_taken: bool, has_standby: bool, now: Duration) -> Duration {
    match (is_taken, has_standby) {
        (true, _) => Duration::ZERO,
        (false, true) => now + AFTER_STANDBY,
        (false, false) => Duration::MAX,
    }
}

fn log_change(before: Shards, after: Shards) {
    let (begun, ended) = (after - before, before - after);
    if !begun.is_empty() {
        tracing::info!(
            gained = begun.len(),
            shards = after.len(),
            "this host answers for the VIPs of more shards"
        );
    }
    if !ended.is_empty() {
        tracing::info!(
            lost = ended.len(),
            shards = after.len(),
            "this host no longer answers for the VIPs of some shards; another edge host does"
        );
    }
}

/// The time since the start of the kernel, as its program has it for leases. Every kernel has this clock.
pub(crate) fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// The same without suspended time, as the program has it for what it forwards.
fn clock() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// The task that renews and ends the leases while this process runs.
#[derive(Debug)]
pub(crate) struct LeaseRenewer {
    leases: VipLeases,
    membership: watch::Receiver<Membership>,
    /// Of the engine.
    leaving: watch::Receiver<bool>,
    abilities: watch::Receiver<AbilityReport>,
}

impl LeaseRenewer {
    pub(crate) fn new(
        leases: &VipLeases,
        membership: &watch::Receiver<Membership>,
        leaving: &watch::Sender<bool>,
        abilities: &watch::Sender<AbilityReport>,
    ) -> Self {
        let (leaving, abilities) = (leaving.subscribe(), abilities.subscribe());
        Self { leases: leases.clone(), membership: membership.clone(), leaving, abilities }
    }

    /// Runs until the engine is gone: the heartbeats go on for as long as anybody receives the membership.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval(RENEWAL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                changed = self.membership.changed() => if changed.is_err() { return Ok(()) },
                changed = self.leaving.changed() => if changed.is_err() { return Ok(()) },
                _ = ticks.tick() => {}
            }
            let can_serve = self.abilities.borrow().ability(Instant::now()).can_serve;
            self.leases.renew(&self.membership.borrow_and_update(), *self.leaving.borrow(), can_serve);
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_edge_dataplane::packet::maps::FORWARDING;

    use super::*;
    use crate::vips::WITHHELD;

    #[test]
    fn vips_of_a_dead_host_stay_until_another_host_has_them() {
        for (milliseconds, misses) in [(20, 2), (200, 3), (1_000, 30), (10_000, 100)] {
            let timing = HeartbeatTiming { interval: Duration::from_millis(milliseconds), misses };
            // The host may die just before a renewal. The next one takes over once it is found dead, at the latest after as long again.
            let needed = RENEWAL_INTERVAL + timing.timeout() * 2;
            assert!(lease_time(timing) > needed, "{timing:?}");
        }
        let default = HeartbeatTiming { interval: Duration::from_millis(200), misses: 3 };
        assert_eq!(lease_time(default), Duration::from_millis(6_200));
    }

    /// A host that has not taken over in time may still do so, and would answer beside a kernel that nobody stops.
    #[test]
    fn lease_that_a_process_leaves_ends_if_another_host_can_take_over() {
        let now = Duration::from_secs(1000);
        for (is_taken, has_standby, wanted) in [
            (true, true, Duration::ZERO),
            (true, false, Duration::ZERO),
            (false, true, now + AFTER_STANDBY),
            (false, false, Duration::MAX),
        ] {
            assert_eq!(left_until(is_taken, has_standby, now), wanted, "{is_taken}, {has_standby}");
        }
    }

    #[test]
    fn lease_is_limited_while_another_host_could_take_over() {
        let limited = Duration::from_secs(6);
        let [now, lately, over] = [Duration::ZERO, AFTER_STANDBY / 2, AFTER_STANDBY].map(Some);
        for (since_standby, time) in
            [(now, limited), (lately, AFTER_STANDBY), (over, Duration::MAX), (None, Duration::MAX)]
        {
            assert_eq!(time_of_renewed(limited, since_standby), time, "{since_standby:?}");
        }
        assert_eq!(time_of_renewed(AFTER_STANDBY * 2, lately), AFTER_STANDBY * 2);
    }

    #[test]
    fn lease_follows_the_role() {
        use Renewal::{End, Renewed, Unchanged};
        use VipRole::{Active, Standby, Unanswered, Undecided};
        for (role, lasts, wanted) in [
            (Active, false, Renewed),
            (Active, true, Renewed),
            (Unanswered, true, Renewed),
            (Unanswered, false, Unchanged),
            (Standby, true, End),
            (Undecided, true, Unchanged),
            (Undecided, false, Unchanged),
        ] {
            assert_eq!(Renewal::new(role, lasts, true), wanted, "{role:?}, {lasts}");
            // The process did not run, and continues with the role that it had.
            let unheard = if role == Active && !lasts { Unchanged } else { wanted };
            assert_eq!(Renewal::new(role, lasts, false), unheard, "{role:?}, {lasts}");
        }
    }

    #[test]
    fn no_lease_has_the_number_of_the_forwarding_time() {
        let leases = Shard::all().map(Shard::lease).chain([UNDIVIDED, WITHHELD]);
        assert!(leases.into_iter().all(|lease| lease < FORWARDING));
    }
}

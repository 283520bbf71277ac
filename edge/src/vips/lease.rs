// SPDX-License-Identifier: Apache-2.0
//! How long the kernel's program answers for the VIPs of each shard without this process: for some seconds while another host could take
//! over, else without limit.
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

use super::{UNDIVIDED, VipRole, VipRoles};
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

/// The next state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renewal {
    /// It continues as it is.
    Unchanged,
    /// It ends now.
    End,
    /// It lasts for [`lease_time`], from now on.
    Limited,
    /// It lasts for [`AFTER_STANDBY`], from now on.
    Long,
    /// It never ends.
    Unlimited,
}

impl Renewal {
    /// `lasts`: whether the lease lasts now; `since_standby`: the time since another host could have taken over.
    fn new(role: VipRole, lasts: bool, since_standby: Option<Duration>) -> Self {
        match (role, lasts) {
            // A process that has just started does not know whether another host has the VIPs.
            (VipRole::Undecided, _) | (VipRole::Unanswered, false) => Self::Unchanged,
            (VipRole::Standby, _) => Self::End,
            (VipRole::Active, _) | (VipRole::Unanswered, true) => match since_standby {
                Some(Duration::ZERO) => Self::Limited,
                Some(since) if since < AFTER_STANDBY => Self::Long,
                _ => Self::Unlimited,
            },
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
    /// When another host could have taken over last.
    standby_at: Option<Instant>,
    /// The process ends and has decided the last state of the leases.
    is_left: bool,
}

impl VipLeases {
    pub(crate) fn new(leases: Leases, timing: HeartbeatTiming) -> Self {
        let table = LeaseTable { leases, time: lease_time(timing), standby_at: None, is_left: false };
        table.divide();
        Self(Arc::new(Mutex::new(table)))
    }

    /// The shards for which this host answers.
    pub(crate) fn lasting(&self) -> Shards {
        self.lock().lasting()
    }

    fn renew(&self, membership: &Membership, is_leaving: bool) {
        let mut table = self.lock();
        if table.is_left {
            return;
        }
        let instant = Instant::now();
        if membership.has_standby {
            table.standby_at = Some(instant);
        }
        let since_standby = table.standby_at.map(|at| instant.duration_since(at));
        let roles = VipRoles::new(membership, is_leaving);
        let before = table.lasting();
        for shard in Shard::all() {
            match Renewal::new(roles.of(shard), before.contains(shard), since_standby) {
                Renewal::Unchanged => {}
                Renewal::End => table.set(shard, Duration::ZERO),
                Renewal::Limited => table.set(shard, now() + table.time),
                Renewal::Long => table.set(shard, now() + table.time.max(AFTER_STANDBY)),
                Renewal::Unlimited => table.set(shard, Duration::MAX),
            }
        }
        table.renew_undivided();
        log_change(before, table.lasting());
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

    fn lasting(&self) -> Shards {
        let now = now();
        Shard::all().filter(|shard| self.leases.get(shard.lease()) >= now).collect()
    }

    fn set(&self, shard: Shard, until: Duration) {
        self.leases.set(shard.lease(), until);
    }
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

/// The time since the start of the kernel, as its program has it. Every kernel has this clock.
pub(crate) fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// The task that renews and ends the leases while this process runs.
#[derive(Debug)]
pub(crate) struct LeaseRenewer {
    pub(crate) leases: VipLeases,
    pub(crate) membership: watch::Receiver<Membership>,
    /// Of the engine.
    pub(crate) leaving: watch::Receiver<bool>,
}

impl LeaseRenewer {
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
            self.leases.renew(&self.membership.borrow_and_update(), *self.leaving.borrow());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        use Renewal::{End, Limited, Long, Unchanged, Unlimited};
        use VipRole::{Active, Standby, Unanswered, Undecided};
        let (now, lately) = (Some(Duration::ZERO), Some(AFTER_STANDBY / 2));
        for (role, lasts, since_standby, wanted) in [
            (Active, false, now, Limited),
            (Active, true, now, Limited),
            (Active, true, lately, Long),
            (Active, true, Some(AFTER_STANDBY), Unlimited),
            (Active, false, None, Unlimited),
            (Unanswered, true, now, Limited),
            (Unanswered, true, lately, Long),
            (Unanswered, true, None, Unlimited),
            (Unanswered, false, now, Unchanged),
            (Unanswered, false, None, Unchanged),
            (Standby, true, now, End),
            (Standby, true, None, End),
            (Undecided, true, now, Unchanged),
            (Undecided, false, None, Unchanged),
        ] {
            assert_eq!(
                Renewal::new(role, lasts, since_standby),
                wanted,
                "{role:?}, {lasts}, {since_standby:?}"
            );
        }
    }
}

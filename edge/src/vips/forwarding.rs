// SPDX-License-Identifier: Apache-2.0
//! For how long the kernel's program forwards without this process. Pure; `lease` asks, and writes it.
//!
//! The program outlives its process, so that neither a kill nor a restart loses a packet. But without a process it does not learn of
//! edge hosts that come later. Where this host is a node, it would take what such a host forwards to the node for packets of clients,
//! and forward them again by old tables. So its time ends once other hosts have the VIPs. Then the kernel has the packets.
//!
//! All times are what is left; `Duration::MAX` has no end.

use std::time::Duration;

/// The program forwards for so long after the last lease has ended. Hosts that missed another edge host's announcement still send to
/// this one: Linux uses a neighbour's address for up to 45 s, and finds out within 8 s more that nobody answers.
const AFTER_LEASE: Duration = Duration::from_mins(1);

/// And for so long after other hosts have taken all VIPs from a process that ends, for packets under way. An edge host that this one
/// never knew gets VIPs later: others offer it theirs only after this time.
const AFTER_HAND_OVER: Duration = Duration::from_secs(10);

/// While the process runs. `left`: of the program's time; `leases`: of the longest lease, zero if none lasts; `lease_time`: how long
/// the leases of an active host last now, without end if no other host can serve; `has_routes`: routers may send packets to this host
/// as long as no process withdraws its routes, and in a container nobody does after a crash.
///
/// A host that cannot serve does not begin to forward by old tables beside one that can.
pub(super) fn renewed(
    left: Duration,
    leases: Duration,
    lease_time: Duration,
    can_serve: bool,
    has_routes: bool,
) -> Duration {
    let own = if has_routes { Duration::MAX } else { lease_time.saturating_add(AFTER_LEASE) };
    let own = if can_serve || lease_time == Duration::MAX { own } else { left.min(own) };
    own.max(covering(leases))
}

/// While it is not known whether other hosts can serve, and for leases that an earlier version has renewed alone.
pub(super) fn unchanged(left: Duration, leases: Duration) -> Duration {
    left.max(covering(leases))
}

/// After the end of the process. `has_standby`: whether another host can serve; `withdraw_wait`: how long routers get to leave this host.
pub(super) fn left_behind(
    left: Duration,
    leases: Duration,
    has_standby: bool,
    withdraw_wait: Duration,
) -> Duration {
    match (has_standby, leases.is_zero()) {
        (false, _) => Duration::MAX,
        (true, true) => left.min(AFTER_HAND_OVER + withdraw_wait),
        (true, false) => covering(leases),
    }
}

/// So long that no host answers for VIPs that it does not forward to.
fn covering(leases: Duration) -> Duration {
    if leases.is_zero() { Duration::ZERO } else { leases.saturating_add(AFTER_LEASE) }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::link::damping::Damping;

    const NONE: Duration = Duration::ZERO;
    const ENDLESS: Duration = Duration::MAX;

    const fn second(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn time_has_an_end_only_while_another_host_can_serve() {
        for (left, leases, lease_time, can_serve, wanted) in [
            // Alone.
            (ENDLESS, ENDLESS, ENDLESS, true, ENDLESS),
            (second(3), NONE, ENDLESS, true, ENDLESS),
            // Losing sight of the cluster takes no traffic down.
            (NONE, NONE, ENDLESS, false, ENDLESS),
            // Beside others.
            (ENDLESS, second(6), second(6), true, second(66)),
            (NONE, NONE, second(6), true, second(66)),
            (second(3), NONE, second(60), true, second(120)),
            // Beside others, but unable: tables may be old.
            (ENDLESS, NONE, second(6), false, second(66)),
            (second(30), NONE, second(6), false, second(30)),
            (NONE, NONE, second(6), false, NONE),
            // Unable, and answers nevertheless.
            (NONE, second(6), second(6), false, second(66)),
            (second(30), ENDLESS, second(6), false, ENDLESS),
        ] {
            let found = renewed(left, leases, lease_time, can_serve, false);
            assert_eq!(found, wanted, "{left:?}, {leases:?}, {lease_time:?}, {can_serve}");
        }
        // With routes.
        for (left, can_serve, wanted) in [
            (NONE, true, ENDLESS),
            (NONE, false, NONE),
            (second(3), false, second(3)),
            (ENDLESS, false, ENDLESS),
        ] {
            assert_eq!(renewed(left, NONE, second(6), can_serve, true), wanted, "{left:?}, {can_serve}");
        }
    }

    #[test]
    fn time_covers_leases_that_nobody_knows_of() {
        assert_eq!(unchanged(NONE, NONE), NONE);
        assert_eq!(unchanged(second(5), NONE), second(5));
        assert_eq!(unchanged(NONE, second(5)), second(65));
        assert_eq!(unchanged(second(5), ENDLESS), ENDLESS);
        assert_eq!(unchanged(ENDLESS, second(5)), ENDLESS);
    }

    #[test]
    fn process_that_ends_leaves_a_short_time_only_if_others_have_all_vips() {
        for (left, leases, has_standby, wait, wanted) in [
            (second(66), NONE, true, NONE, second(10)),
            (second(66), NONE, true, second(2), second(12)),
            (second(4), NONE, true, NONE, second(4)),
            (NONE, NONE, true, NONE, NONE),
            (second(66), second(60), true, NONE, second(120)),
            (second(66), ENDLESS, true, NONE, ENDLESS),
            (second(66), ENDLESS, false, NONE, ENDLESS),
            // Others have the VIPs, and cannot serve.
            (second(66), NONE, false, NONE, ENDLESS),
        ] {
            let found = left_behind(left, leases, has_standby, wait);
            assert_eq!(found, wanted, "{left:?}, {leases:?}, {has_standby}, {wait:?}");
        }
    }

    #[test]
    fn unknown_host_is_offered_vips_after_the_time_of_one_that_handed_over() {
        assert!(AFTER_HAND_OVER <= Damping::default().wait(Instant::now()));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What is used while no target is healthy.

use super::kept_targets::{Planner, checked, of_three_nodes};
use super::*;

const PORT: u16 = 31_000;

/// A planner whose targets 1 to 3 have been probed.
fn planner(healthy: &[u8], unhealthy: &[u8]) -> (Planner, Index) {
    let targets = [target(1, 1), target(2, 1), target(3, 1)];
    let (mut planner, index) = (Planner::new(), of_three_nodes(checked(&targets, PORT)));
    planner.plan(&index);
    planner.probed(&index, PORT, healthy, unhealthy);
    (planner, index)
}

#[test]
fn last_healthy_target_is_used_for_a_minute_after_it_has_failed() {
    let (mut planner, index) = planner(&[3], &[1, 2]);
    assert_eq!(planner.reached(), [3]);
    planner.now += Duration::from_mins(10);
    planner.probed(&index, PORT, &[], &[3]);
    assert_eq!(planner.reached(), [3], "its endpoint may be terminating, and still serve");
    planner.now += Duration::from_secs(59);
    planner.plan(&index);
    assert_eq!(planner.reached(), [3]);
    planner.now += Duration::from_secs(1);
    planner.plan(&index);
    assert_eq!(planner.reached(), [1, 2, 3], "fail open");
}

#[test]
fn targets_that_failed_one_after_the_other_are_used_together() {
    let (mut planner, index) = planner(&[1, 2, 3], &[]);
    for failed in 1..=3 {
        planner.now += Duration::from_secs(10);
        planner.probed(&index, PORT, &[], &[failed]);
    }
    assert_eq!(planner.reached(), [1, 2, 3], "one alone would get the connections of all");
}

#[test]
fn target_that_lost_its_endpoint_before_the_last_one_is_not_used() {
    let (mut planner, index) = planner(&[1, 2], &[3]);
    planner.now += Duration::from_secs(10);
    planner.without_endpoint(&index, &[1]);
    planner.now += Duration::from_secs(10);
    planner.without_endpoint(&index, &[2]);
    assert_eq!(planner.reached(), [2]);
    planner.now += Duration::from_mins(1);
    planner.plan(&index);
    assert_eq!(planner.reached(), [3], "the only one of which nobody knows that it has no endpoint");
    planner.without_endpoint(&index, &[3]);
    assert_eq!(planner.reached(), [1, 2, 3], "none is better");
}

#[test]
fn healthy_target_ends_the_use_of_the_last_ones() {
    let (mut planner, index) = planner(&[3], &[1, 2]);
    planner.probed(&index, PORT, &[], &[3]);
    planner.probed(&index, PORT, &[1], &[]);
    assert_eq!(planner.reached(), [1]);
    planner.now += Duration::from_mins(5);
    planner.probed(&index, PORT, &[], &[1]);
    assert_eq!(planner.reached(), [1], "what failed long before the last one is not used");
}

#[test]
fn next_process_uses_the_targets_of_the_tables_that_it_finds() {
    let (mut planner, index) = planner(&[3], &[1, 2]);
    planner.probed(&index, PORT, &[], &[3]);
    planner.plan.assignments = Assignments::adopt(&planner.plan.state);
    planner.health = HealthByProbe::default();
    planner.plan(&index);
    planner.probed(&index, PORT, &[], &[1, 2]);
    assert_eq!(planner.reached(), [3], "not probed yet");
    planner.probed(&index, PORT, &[], &[3]);
    assert_eq!(planner.reached(), [3]);
    planner.now += Duration::from_mins(1);
    planner.plan(&index);
    assert_eq!(planner.reached(), [1, 2, 3]);
    planner.probed(&index, PORT, &[1], &[]);
    planner.probed(&index, PORT, &[], &[1]);
    assert_eq!(planner.reached(), [1], "what was found has been forgotten");
}

#[test]
fn uses_and_their_reasons_are_reported() {
    let (mut planner, index) = planner(&[3], &[1]);
    let reported = |planner: &Planner| -> Vec<_> {
        let of = |target: &steerage_edge_api::TargetStatus| {
            format!("{:?} {}", target.usage.expect("a use"), target.use_reason).trim().to_owned()
        };
        planner.plan.statuses["a"].targets[0].targets.iter().map(of).collect()
    };
    assert_eq!(reported(&planner), ["Inactive not healthy", "Inactive not probed yet", "Active"]);
    planner.without_endpoint(&index, &[2, 3]);
    let last = "Active used because no target is healthy and this one was last";
    assert_eq!(reported(&planner), ["Inactive not healthy", last]);
    planner.now += Duration::from_mins(1);
    planner.plan(&index);
    let all = "Active used because no target is healthy";
    assert_eq!(reported(&planner), [all], "those without an endpoint are only counted");
}

/// Whoever waits for the end of its drain must not stop the only node that serves.
#[test]
fn draining_node_is_used_while_no_other_target_is_healthy() {
    let mut one = load_balancer("lb", "10.0.0.100", &[target(1, 1)]);
    one["spec"]["draining"] = json!([target(2, 1)]);
    let first = plan(std::slice::from_ref(&one), &host(), &HealthByProbe::default());
    for (failing, is_used) in [(&[][..], false), (&["10.0.0.1"][..], true)] {
        let plan = plan(std::slice::from_ref(&one), &host(), &health(&first, failing));
        let draining = plan.groups.draining();
        let node = draining.get("node2").expect("it drains");
        assert_eq!((draining.len(), node.is_used), (1, is_used), "{failing:?}");
        assert_eq!(node.addresses, [ip("10.0.0.2")].into());
    }
}

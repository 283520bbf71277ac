// SPDX-License-Identifier: Apache-2.0
//! Reports have all numbers, and name what matters.

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;

fn target(number: u32, state: TargetState, usage: TargetUse, lacks_endpoint: bool) -> TrackedTarget {
    let address = IpAddr::from((0x0a00_0000 + number).to_be_bytes());
    let status = TargetStatus {
        node: format!("node-{number:05}"),
        address,
        state,
        reason: String::new(),
        weight: 1,
        usage: Some(usage),
        use_reason: String::new(),
    };
    TrackedTarget { status, lacks_endpoint }
}

/// One kind of target.
type Kind = (TargetState, TargetUse, bool);

const FAILED: Kind = (TargetState::Unhealthy, TargetUse::Inactive, false);
const WITHOUT_ENDPOINT: Kind = (TargetState::Unhealthy, TargetUse::Inactive, true);
const USED: Kind = (TargetState::Unhealthy, TargetUse::Active, true);
const REFUSED: Kind = (TargetState::Refused, TargetUse::Inactive, false);
const DRAINING: Kind = (TargetState::Healthy, TargetUse::Draining, false);
const FILLING: Kind = (TargetState::Healthy, TargetUse::Filling, false);
const INITIAL: Kind = (TargetState::Initial, TargetUse::Inactive, false);
const ACTIVE: Kind = (TargetState::Healthy, TargetUse::Active, false);

/// So many targets of each kind, numbered on.
fn report(kinds: &[(u32, Kind)], without_endpoint: u32) -> GroupReport {
    let kinds = kinds.iter().flat_map(|(number, kind)| (0..*number).map(|_| *kind));
    let held = (0..).zip(kinds).map(|(at, (state, usage, lacks))| target(at, state, usage, lacks)).collect();
    GroupReport::new(
        None,
        IpFamily::V4,
        held,
        UntrackedCounts { without_endpoint: without_endpoint as usize, untried: 0 },
    )
}

/// The numbers of a report that are not zero.
fn numbers(counts: &TargetCounts) -> String {
    let value = serde_json::to_value(counts).expect("JSON");
    let fields = value.as_object().expect("an object").iter();
    let shown = fields.filter(|(_, value)| value.as_u64().is_some_and(|number| number > 0));
    shown.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn each_target_is_counted_by_state_and_use() {
    for (kinds, without_endpoint, expected) in [
        (&[][..], 0, ""),
        (&[], 7, "omitted=7 total=7 withoutEndpoint=7"),
        (&[(2, ACTIVE)], 0, "active=2 healthy=2 total=2"),
        (&[(1, ACTIVE), (3, WITHOUT_ENDPOINT)], 4, "active=1 healthy=1 omitted=7 total=8 withoutEndpoint=7"),
        (&[(2, FAILED), (1, REFUSED), (1, INITIAL)], 0, "failed=2 initial=1 refused=1 total=4"),
        (&[(1, DRAINING), (1, FILLING)], 0, "draining=1 filling=1 healthy=1 total=2"),
        (&[(3, USED)], 0, "active=3 total=3 withoutEndpoint=3"),
        (&[(5000, ACTIVE)], 0, "active=5000 healthy=5000 omitted=4900 total=5000"),
    ] {
        assert_eq!(numbers(&report(kinds, without_endpoint).counts), expected, "{kinds:?}");
    }
}

#[test]
fn trouble_is_listed_first_and_no_kind_of_it_hides_another() {
    let numbers_of = |kinds: &[(u32, Kind)]| {
        let report = report(kinds, 0);
        assert!(report.targets.is_sorted_by_key(|target| (target.node.clone(), target.address)));
        let number = |target: &TargetStatus| target.node["node-".len()..].parse::<u32>().expect("a number");
        report.targets.iter().map(number).collect::<Vec<_>>()
    };
    assert_eq!(numbers_of(&[(1, ACTIVE), (1, WITHOUT_ENDPOINT), (1, FAILED)]), [0, 2]);
    // Trouble fills the list, and ten active targets are in it.
    let many = numbers_of(&[(200, ACTIVE), (200, FAILED)]);
    assert_eq!(many, (0..10).chain(200..290).collect::<Vec<_>>());
    let kinds = [USED, REFUSED, DRAINING, FILLING, INITIAL, ACTIVE, FAILED];
    let all = numbers_of(&kinds.map(|kind| (1000, kind)));
    assert_eq!(all.len(), MAX_LISTED);
    for kind in 0..6 {
        let start = kind * 1000;
        assert_eq!(all.iter().filter(|number| (start..start + 1000).contains(*number)).count(), 10, "{kind}");
    }
    assert_eq!(numbers_of(&[(50, ACTIVE), (60, FILLING)]), (0..40).chain(50..110).collect::<Vec<_>>());
}

proptest! {
    /// Whatever the targets are, nothing is lost and nothing counted twice.
    #[test]
    fn numbers_and_list_make_up_all_targets(
        kinds in prop::collection::vec((0..150_u32, 0..8_usize), 0..8), without_endpoint in 0..5000_u32,
    ) {
        let all = [FAILED, WITHOUT_ENDPOINT, USED, REFUSED, DRAINING, FILLING, INITIAL, ACTIVE];
        let kinds: Vec<(u32, Kind)> = kinds.into_iter().map(|(number, kind)| (number, all[kind])).collect();
        let GroupReport { counts, targets, .. } = report(&kinds, without_endpoint);
        let held: u32 = kinds.iter().map(|(number, _)| number).sum();
        let idle: u32 = kinds.iter().filter(|(_, kind)| *kind == WITHOUT_ENDPOINT).map(|(number, _)| number).sum();
        prop_assert_eq!(counts.total, held + without_endpoint);
        let TargetCounts { healthy, failed, initial, refused, draining, .. } = counts;
        prop_assert_eq!(healthy + failed + counts.without_endpoint + initial + refused + draining, counts.total);
        prop_assert_eq!(targets.len(), MAX_LISTED.min(usize::try_from(held - idle).expect("few")));
        prop_assert_eq!(counts.omitted + u32::try_from(targets.len()).expect("few"), counts.total);
    }
}

#[test]
fn reasons_are_cut() {
    let mut long = target(1, TargetState::Unhealthy, TargetUse::Inactive, false);
    long.status.reason = "é".repeat(500);
    let report = GroupReport::new(None, IpFamily::V4, vec![long], UntrackedCounts::default());
    assert_eq!(report.targets[0].reason, format!("{}…", "é".repeat(MAX_REASON)));
}

#[test]
fn shared_groups_have_names_that_stay() {
    let check = r#"{"protocol": "HTTP", "port": 10256, "path": "/healthz", "intervalMilliseconds": 1000,
        "timeoutMilliseconds": 800, "healthyThreshold": 1, "unhealthyThreshold": 3}"#;
    let targets = |panic| SharedTargets {
        node_set: "eligible".to_owned(),
        health_check: serde_json::from_str(check).expect("a check"),
        panic_threshold_percent: panic,
        slow_start_milliseconds: None,
    };
    let name = |panic, family| SharedGroup::new(targets(panic), family).name;
    assert_eq!(name(None, IpFamily::V4), "eligible.d086888fd74a4b26");
    assert_ne!(name(None, IpFamily::V4), name(None, IpFamily::V6));
    assert_ne!(name(None, IpFamily::V4), name(Some(50), IpFamily::V4));
}

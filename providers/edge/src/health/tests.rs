// SPDX-License-Identifier: Apache-2.0
//! Which host's report counts, and what follows from its numbers.

use serde_json::{Value, json};

use super::*;

/// In shard 48.
const VIP4: &str = "10.0.200.1";
/// In shard 68.
const VIP6: &str = "fd00:200::1";

fn hosts(hosts: &[(&str, Option<&str>, u32)]) -> ActiveHosts {
    let entry = |(name, shards, version): &(&str, Option<&str>, u32)| {
        let mut spec =
            json!({"version": "1", "interface": "eth0", "addresses": [], "active": true, "shards": 1});
        if let Some(shards) = shards {
            spec["activeShards"] = json!(shards);
        }
        let metadata = json!({"name": name, "uid": "u", "resourceVersion": version.to_string()});
        Entry::parse(&json!({"metadata": metadata, "spec": spec}).to_string()).expect("a host")
    };
    let entries: Vec<Entry<HostContent>> = hosts.iter().map(entry).collect();
    ActiveHosts::new(entries.iter())
}

fn parse(report: Value) -> EdgeTargetHealthSpec {
    serde_json::from_value(report).expect("a report")
}

/// A report with numbers of targets, by family.
fn report(host: &str, counts: &[(&str, Value)]) -> EdgeTargetHealthSpec {
    let counts: Vec<Value> = counts
        .iter()
        .map(|(family, counts)| {
            let mut counts = counts.clone();
            (counts["family"], counts["total"]) = (json!(family), json!(0));
            counts
        })
        .collect();
    parse(json!({"loadBalancer": "lb", "host": host, "counts": counts}))
}

fn status(node: &str, address: &str, state: TargetState) -> TargetStatus {
    TargetStatus {
        node: node.to_owned(),
        address: address.parse().expect("ip"),
        state,
        reason: String::new(),
        weight: 1,
        usage: None,
        use_reason: String::new(),
    }
}

fn legacy(host: &str, active: bool, problem: &str, state: TargetState) -> EdgeTargetHealthSpec {
    let mut report = parse(json!({"loadBalancer": "lb", "host": host, "active": active, "problem": problem}));
    report.targets = vec![status(&format!("seen-by-{host}"), "10.0.0.1", state)];
    report
}

fn of(
    addresses: &[&str],
    hosts: &ActiveHosts,
    reports: &[EdgeTargetHealthSpec],
    shared: &[(&str, EdgeTargetHealthSpec)],
) -> Health {
    let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().expect("ip")).collect();
    let find = |name: &str| shared.iter().find(|(found, _)| *found == name).map(|(_, report)| report);
    health(&addresses, hosts, reports.iter(), find)
}

fn parts(health: &Health) -> Vec<(&str, Option<bool>)> {
    health.parts.iter().map(|part| (part.name.as_str(), part.is_served)).collect()
}

#[test]
fn report_of_the_active_host_counts_for_each_family() {
    let good = |host| report(host, &[("IPv4", json!({"healthy": 3})), ("IPv6", json!({"healthy": 3}))]);
    let bad = |host| report(host, &[("IPv4", json!({"failed": 3})), ("IPv6", json!({"failed": 3}))]);
    let (both, reports) = ([VIP4, VIP6], [good("a"), bad("b")]);
    let (yes, no) = (Some(true), Some(false));
    for (claims, expected) in [
        (&[("a", Some("0-127"), 1), ("b", Some(""), 2)][..], [("IPv4", yes), ("IPv6", yes)]),
        (&[("a", Some("1,48"), 1), ("b", Some("60-70"), 2)], [("IPv4", yes), ("IPv6", no)]),
        (&[("a", Some("48"), 1), ("b", None, 2)], [("IPv4", yes), ("IPv6", None)]),
        (&[("a", Some("wrong"), 1)], [("IPv4", None), ("IPv6", None)]),
        // Host a is dead: its last word was that it is active.
        (&[("a", Some("0-127"), 9), ("b", Some("0-127"), 10)], [("IPv4", no), ("IPv6", no)]),
        (&[("a", Some("0-127"), 11), ("b", Some("0-127"), 10)], [("IPv4", yes), ("IPv6", yes)]),
        // Of this one nothing is known.
        (&[("c", Some("0-127"), 1)], [("IPv4", None), ("IPv6", None)]),
    ] {
        let health = of(&both, &hosts(claims), &reports, &[]);
        let mut found = parts(&health);
        found.sort_unstable();
        assert_eq!(found, expected, "{claims:?}");
    }
    let one = of(&[VIP4], &hosts(&[("a", Some("0-127"), 1)]), &reports, &[]);
    assert_eq!(parts(&one), [("IPv4", yes)]);
}

/// A label, or a migration of the stored objects, gives the object of a dead host the newest version.
#[test]
fn other_clients_do_not_make_a_dead_host_the_last_one_that_spoke() {
    let entry = |name: &str, version: u32, managers: Value| {
        let spec = json!({"version": "1", "interface": "eth0", "addresses": [], "active": true, "shards": 128, "activeShards": "0-127"});
        let metadata = json!({"name": name, "uid": "u", "resourceVersion": version.to_string(), "managedFields": managers});
        Entry::<HostContent>::parse(&json!({"metadata": metadata, "spec": spec}).to_string()).expect("a host")
    };
    let manager = |name: &str, time: &str| json!({"manager": name, "operation": "Apply", "time": time});
    let (early, late, later) = ("2026-11-01T05:00:00Z", "2026-11-01T05:00:09Z", "2026-11-01T06:00:00Z");
    let living = entry("living", 10, json!([manager("steerage-edge-living", late)]));
    for (dead, expected) in [
        (json!([manager("steerage-edge-dead", early), manager("kubectl-label", later)]), "living"),
        (json!([manager("kubectl-label", later)]), "living"),
        (json!([{"manager": "steerage-edge-dead"}]), "living"),
        (json!([manager("steerage-edge-dead", late)]), "dead"),
        (json!([manager("steerage-edge-dead", later)]), "dead"),
    ] {
        let entries = [living.clone(), entry("dead", 11, dead.clone())];
        let hosts = ActiveHosts::new(entries.iter());
        assert_eq!(hosts.of(VIP4.parse().expect("ip")), Some(expected), "{dead}");
    }
}

#[test]
fn numbers_say_what_is_not_listed() {
    let mut report = report(
        "a",
        &[(
            "IPv4",
            json!({"healthy": 4000, "failed": 2, "withoutEndpoint": 900, "refused": 3, "initial": 1, "draining": 2}),
        )],
    );
    let mut drains = status("d", "10.0.0.9", TargetState::Healthy);
    (drains.usage, drains.use_reason) = (Some(TargetUse::Draining), "the node is cordoned".to_owned());
    report.targets = vec![
        status("b", "10.0.0.2", TargetState::Unhealthy),
        status("c", "10.0.0.3", TargetState::Refused),
        drains,
    ];
    let health = of(&[VIP4], &hosts(&[("a", Some("48"), 1)]), &[report], &[]);
    let listed: Vec<_> =
        health.targets.iter().map(|t| (t.target.as_str(), t.state, t.reason.as_str())).collect();
    let expected = [
        ("b", HealthState::Unhealthy, ""),
        ("c", HealthState::Unused, ""),
        ("d", HealthState::Draining, "the node is cordoned"),
    ];
    assert_eq!(listed, expected);
    let omitted: Vec<_> = health.omitted.iter().map(|(state, number)| (*state, *number)).collect();
    let expected = [
        (HealthState::Initial, 1),
        (HealthState::Healthy, 4000),
        (HealthState::Unhealthy, 901),
        (HealthState::Draining, 1),
        (HealthState::Unused, 2),
    ];
    assert_eq!(omitted, expected);
}

#[test]
fn only_initial_targets_leave_a_family_undecided_and_draining_ones_serve_nothing_new() {
    for (counts, expected) in [
        (json!({"initial": 2, "failed": 1}), Some(("IPv4", None))),
        (json!({"draining": 2, "failed": 1}), Some(("IPv4", Some(false)))),
        (json!({"withoutEndpoint": 5}), Some(("IPv4", Some(false)))),
        (json!({}), None),
    ] {
        let health =
            of(&[VIP4], &hosts(&[("a", Some("48"), 1)]), &[report("a", &[("IPv4", counts.clone())])], &[]);
        assert_eq!(parts(&health), Vec::from_iter(expected), "{counts}");
    }
}

#[test]
fn shared_reports_count_as_own_ones_and_a_missing_one_is_unknown() {
    let own = parse(json!({"loadBalancer": "lb", "host": "a", "sharedReports": ["four.a", "six.a"]}));
    let four = report("a", &[("IPv4", json!({"healthy": 5}))]);
    let six = report("a", &[("IPv6", json!({"failed": 5}))]);
    let hosts = hosts(&[("a", Some("0-127"), 1)]);
    let reports = [own];
    let both = of(&[VIP4, VIP6], &hosts, &reports, &[("four.a", four.clone()), ("six.a", six)]);
    assert_eq!(parts(&both), [("IPv4", Some(true)), ("IPv6", Some(false))]);
    let one = of(&[VIP4, VIP6], &hosts, &reports, &[("four.a", four)]);
    assert_eq!(parts(&one), [("IPv4", Some(true)), ("IPv6", None)]);
}

#[test]
fn problem_of_an_active_host_is_reported() {
    let with_problem = |host: &str| parse(json!({"loadBalancer": "lb", "host": host, "problem": "in use"}));
    let hosts = hosts(&[("a", Some("48"), 1), ("b", Some("3"), 1)]);
    let health = of(&[VIP4], &hosts, &[with_problem("a"), with_problem("b")], &[]);
    let found: Vec<_> = health.targets.iter().map(|t| (t.target.as_str(), t.state)).collect();
    assert_eq!(found, [("a", HealthState::Unused)]);
    assert_eq!(parts(&health), [], "it serves no family");
}

/// While edge hosts are upgraded.
#[test]
fn reports_of_earlier_versions_say_whether_they_count() {
    let (good, bad) = (TargetState::Healthy, TargetState::Unhealthy);
    let reports =
        [legacy("standby", false, "idle", bad), legacy("active", true, "the address is in use", good)];
    let found = of(&[VIP4], &ActiveHosts::default(), &reports, &[]);
    let seen: Vec<_> = found.targets.iter().map(|t| (t.target.as_str(), t.state)).collect();
    assert_eq!(seen, [("seen-by-active", HealthState::Healthy), ("active", HealthState::Unused)]);
    assert_eq!((parts(&found), found.omitted.len()), (vec![("IPv4", Some(true))], 0));
    // The host of this report is upgraded, and has not overwritten it.
    let upgraded = of(&[VIP4], &hosts(&[("active", Some(""), 1)]), &reports, &[]);
    assert_eq!(parts(&upgraded), [("IPv4", None)]);
    let active_again = of(&[VIP4], &hosts(&[("active", Some("48"), 1)]), &reports, &[]);
    assert_eq!(parts(&active_again), [("IPv4", Some(true))]);
    // One family is with a host of this version.
    let mixed = [legacy("old", true, "", good), report("new", &[("IPv6", json!({"failed": 1}))])];
    let found = of(&[VIP4, VIP6], &hosts(&[("new", Some("68"), 1), ("old", None, 1)]), &mixed, &[]);
    assert_eq!(parts(&found), [("IPv4", Some(true)), ("IPv6", Some(false))]);
    // The old host died while it was active, and does not take that back.
    let taken_over = [legacy("old", true, "in use", good), report("new", &[("IPv4", json!({"failed": 1}))])];
    let found = of(&[VIP4], &hosts(&[("new", Some("48"), 1), ("old", None, 1)]), &taken_over, &[]);
    assert_eq!((parts(&found), found.targets.len()), (vec![("IPv4", Some(false))], 0));
}

#[test]
fn numbers_alone_change_no_summary() {
    let of = |counts: Value| report("a", &[("IPv4", counts)]);
    let before = of(json!({"healthy": 5000, "failed": 1}));
    for (after, is_same) in [
        (of(json!({"healthy": 4000, "failed": 1001})), true),
        (of(json!({"healthy": 4000, "withoutEndpoint": 7})), true),
        (of(json!({"healthy": 5001})), true),
        (of(json!({"healthy": 5001, "initial": 1, "draining": 2})), true),
        (of(json!({"failed": 5001})), false),
        (of(json!({"healthy": 5000, "failed": 1, "refused": 1})), false),
        (EdgeTargetHealthSpec { problem: "in use".to_owned(), ..before.clone() }, false),
        (EdgeTargetHealthSpec { shared_reports: vec!["x".to_owned()], ..before.clone() }, false),
        (EdgeTargetHealthSpec { observed_generation: 7, ..before.clone() }, true),
    ] {
        assert_eq!(ReportSummary::of(&before) == ReportSummary::of(&after), is_same, "{after:?}");
    }
}

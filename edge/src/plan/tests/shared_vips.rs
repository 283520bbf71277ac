// SPDX-License-Identifier: Apache-2.0
//! Several load balancers at one VIP.

use super::*;

const VIP: &str = "10.0.0.100";

/// A load balancer at the VIP with this key, these TCP ports and one target.
fn sharing(name: &str, key: Option<&str>, ports: &[u16], number: u8) -> Value {
    let mut load_balancer = load_balancer(name, VIP, &[target(number, 1)]);
    load_balancer["spec"]["sharingKey"] = json!(key);
    load_balancer["spec"]["listeners"] =
        ports.iter().map(|port| json!({"protocol": "TCP", "port": port})).collect();
    load_balancer
}

fn planned(load_balancers: &[Value]) -> Plan {
    plan(load_balancers, &host(), &HealthByProbe::default())
}

fn ports(plan: &Plan) -> Vec<u16> {
    let port = |key: &ListenerKey| {
        (1..=u16::MAX).find(|port| ListenerKey::new(ip(VIP), 6, *port) == *key).expect("a TCP port")
    };
    plan.state.listeners.keys().map(port).collect()
}

#[test]
fn each_listener_has_the_targets_ranges_and_affinity_of_its_load_balancer() {
    let mut ranged = sharing("b", Some("web"), &[443], 2);
    ranged["spec"]["sourceRanges"] = json!(["192.0.2.0/24"]);
    ranged["spec"]["healthCheck"]["port"] = json!(30_000);
    let mut sticky = sharing("c", Some("web"), &[8443], 3);
    sticky["spec"]["affinity"] = json!({"timeoutSeconds": 10_800});
    let plan = planned(&[sharing("a", Some("web"), &[80, 81], 1), ranged, sticky]);
    assert_eq!(plan.state.vips, [(ip(VIP), lease(VIP))].into());
    for (port, number, is_ranged, has_affinity) in
        [(80, 1, false, false), (81, 1, false, false), (443, 2, true, false), (8443, 3, false, true)]
    {
        assert_eq!(reached(&plan, VIP, 6, port), [ip(&format!("10.0.0.{number}"))].into(), "{port}");
        let (listener, _) = listener(&plan, VIP, 6, port);
        assert_eq!((listener.ranges.is_some(), listener.has_affinity), (is_ranged, has_affinity), "{port}");
    }
    for name in ["a", "b", "c"] {
        assert_eq!(plan.statuses[name].problem, "", "{name}");
        assert_eq!(plan.statuses[name].targets.len(), 1, "{name}");
    }
    assert_eq!(plan.groups.healthy_vips(), 0);
}

#[test]
fn listener_of_two_load_balancers_is_that_of_the_first_by_name() {
    let plan = planned(&[
        sharing("b", Some("web"), &[80, 443], 2),
        sharing("a", Some("web"), &[80], 1),
        sharing("c", Some("web"), &[80, 443], 3),
    ]);
    assert_eq!(reached(&plan, VIP, 6, 80), [ip("10.0.0.1")].into());
    assert_eq!(reached(&plan, VIP, 6, 443), [ip("10.0.0.2")].into(), "its other ports are served");
    let problem = |name: &str| plan.statuses[name].problem.clone();
    assert_eq!(problem("a"), "");
    let lost = "Port TCP 80 of address 10.0.0.100 belongs to the load balancer a. It is not served here. Use another port.";
    assert_eq!(problem("b"), lost);
    assert!(problem("c").starts_with(lost) && problem("c").contains("443"), "{}", problem("c"));
}

#[test]
fn vip_is_shared_only_under_one_key() {
    for (first, second) in
        [(None, None), (Some("web"), None), (None, Some("web")), (Some("web"), Some("dns"))]
    {
        let plan = planned(&[sharing("a", first, &[80], 1), sharing("b", second, &[443], 2)]);
        assert_eq!(ports(&plan), [80], "{first:?} {second:?}");
        let problem = &plan.statuses["b"].problem;
        assert!(problem.contains("Address 10.0.0.100 belongs to the load balancer a."), "{problem}");
    }
}

/// A table must not get the number by which another load balancer's listener finds its own.
#[test]
fn new_process_adopts_the_tables_of_all_load_balancers_of_a_vip() {
    let first = index(&[
        sharing("b", Some("web"), &[80], 1),
        sharing("c", Some("web"), &[443], 2),
        sharing("d", Some("web"), &[25], 3),
    ]);
    let (health, now) = (HealthByProbe::default(), Instant::now());
    let old = plan_next(&first, &host(), &health, now, &Assignments::default());
    assert_eq!(old.state.tables.len(), 3);
    let new = plan_next(&first, &host(), &health, now, &Assignments::adopt(&old.state));
    assert_eq!(new.state, old.state);
    // One that came while no process ran gets no number of the others.
    let more = index(&[
        sharing("a", Some("web"), &[22], 4),
        sharing("b", Some("web"), &[80], 1),
        sharing("c", Some("web"), &[443], 2),
        sharing("d", Some("web"), &[25], 3),
    ]);
    let new = plan_next(&more, &host(), &health, now, &Assignments::adopt(&old.state));
    let mut known = new.state.listeners.clone();
    known.retain(|key, _| old.state.listeners.contains_key(key));
    assert_eq!(known, old.state.listeners);
}

/// Only the load balancer whose health check is edited waits for probes.
#[test]
fn each_load_balancer_of_a_vip_keeps_its_own_last_targets() {
    let two = |check: u16| {
        let mut edited = sharing("b", Some("web"), &[443], 2);
        edited["spec"]["healthCheck"]["port"] = json!(check);
        edited["spec"]["targets"] = json!([target(2, 1), target(3, 1)]);
        index(&[sharing("a", Some("web"), &[80], 1), edited])
    };
    let (before, now) = (two(10_256), Instant::now());
    let first = plan_next(&before, &host(), &HealthByProbe::default(), now, &Assignments::default());
    let health = health(&first, &["10.0.0.3"]);
    let known = plan_next(&before, &host(), &health, now, &first.assignments);
    assert_eq!(reached(&known, VIP, 6, 443), [ip("10.0.0.2")].into());
    let edited = plan_next(&two(30_000), &host(), &health, now, &known.assignments);
    assert!(edited.is_waiting);
    assert_eq!(reached(&edited, VIP, 6, 443), [ip("10.0.0.2")].into(), "not the one that failed");
    assert_eq!(reached(&edited, VIP, 6, 80), [ip("10.0.0.1")].into());
}

#[test]
fn room_of_a_load_balancer_is_that_of_its_own_listeners() {
    let room = Room { listeners: 40, ..ROOM };
    let numbers = |from: u16, count: u16| (from..from + count).collect::<Vec<_>>();
    let before = plan_in(
        room,
        &[sharing("a", Some("web"), &numbers(1, 30), 1), sharing("b", Some("web"), &numbers(100, 10), 2)],
    );
    assert_eq!(before.state.listeners.len(), 40);
    // One grows within what both had together: the other one stays.
    let grown =
        [sharing("a", Some("web"), &numbers(1, 35), 1), sharing("b", Some("web"), &numbers(100, 10), 2)];
    let after = plan_in_after(room, &grown, &before.assignments);
    assert_eq!(ports(&after), numbers(100, 10));
    assert!(after.statuses["a"].problem.contains("no room"), "{}", after.statuses["a"].problem);
    assert_eq!(after.state.vips, [(ip(VIP), lease(VIP))].into());
}

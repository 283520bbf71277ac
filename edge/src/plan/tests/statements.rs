// SPDX-License-Identifier: Apache-2.0
//! Plans where nodes state their endpoints: as if each target had a health of its own.

use super::*;
use crate::port_set::{PortSet, PortSetPool};

const PORTS: [u16; 3] = [31_000, 31_001, 31_002];
const NODES: u8 = 100;

/// Of all nodes, a load balancer for each port.
fn services() -> Index {
    let load_balancers = PORTS.map(|port| {
        let mut one = load_balancer(&format!("lb{port}"), &format!("10.0.1.{}", port - 30_999), &[]);
        one["spec"]["nodeSet"] = json!("eligible");
        one["spec"]["healthCheck"]["port"] = json!(port);
        one
    });
    with_nodes(index(&load_balancers))
}

fn with_nodes(mut index: Index) -> Index {
    let targets: Vec<_> = (1..=NODES).map(|number| target(number, 1)).collect();
    let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": targets}});
    let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
    let set = NodeSet { name: set.name_any(), uid: "set-uid".into(), spec: set.spec.into() };
    apply(&mut index, IndexEvent::NodeSet(Event::Apply(set)));
    index
}

fn probe(plan: &Plan, node: u8, port: u16) -> Probe {
    let address = IpAddr::from([10, 0, 0, node]);
    let is = |probe: &Probe| probe.address == address && probe.check.port == port;
    probes(plan).into_iter().find(is).expect("a probe")
}

fn stated() -> Arc<PortSet> {
    Arc::new(PORTS.into_iter().collect())
}

fn healthy() -> TargetHealth {
    TargetHealth { state: TargetState::Healthy, reason: String::new(), ..TargetHealth::default() }
}

#[test]
fn group_holds_the_targets_that_have_endpoints() {
    let index = services();
    let now = Instant::now();
    let next = |health: &HealthByProbe, before: &Plan, now| {
        plan_next(&index, &host(), health, now, &before.assignments)
    };
    let first = next(&HealthByProbe::default(), &Plan::default(), now);
    assert!(!first.is_tried);
    let mut health = HealthByProbe::default();
    let mut shared = PortSetPool::default();
    for node in 1..=NODES {
        health.set_stated(IpAddr::from([10, 0, 0, node]), shared.share(&stated()));
    }
    health.insert(probe(&first, 7, PORTS[0]), healthy());
    let second = next(&health, &first, now);
    assert!(second.is_tried);
    assert_eq!(reached(&second, "10.0.1.1", 6, 80), [ip("10.0.0.7")].into());
    let of = |plan: &Plan, name: &str| plan.statuses[name].targets[0].targets.len();
    assert_eq!(of(&second, "lb31000"), 1, "not a hundred");
    let counts = second.statuses["lb31000"].targets[0].counts.clone();
    assert_eq!((counts.total, counts.healthy, counts.without_endpoint), (100, 1, 99));
    let without = reached(&second, "10.0.1.2", 6, 80);
    assert_eq!(without.len(), 16, "any of them answers as well");
    assert_ne!(without, reached(&second, "10.0.1.3", 6, 80), "each load balancer has others");
    // The last endpoint terminates: its node serves for a minute.
    health.insert(probe(&first, 7, PORTS[0]), TargetHealth::without_endpoint());
    let third = next(&health, &second, now + Duration::from_secs(30));
    assert_eq!(reached(&third, "10.0.1.1", 6, 80), [ip("10.0.0.7")].into());
    let fourth = next(&health, &third, now + Duration::from_secs(91));
    assert_eq!(reached(&fourth, "10.0.1.1", 6, 80).len(), 16);
}

#[test]
fn nodes_that_do_not_state_a_new_port_are_probed_and_not_used_beside_healthy_ones() {
    let index = services();
    let mut health = HealthByProbe::default();
    let first = plan_next(&index, &host(), &health, Instant::now(), &Assignments::default());
    let others: Arc<PortSet> = Arc::new([PORTS[1], PORTS[2]].into_iter().collect());
    for node in 1..=NODES {
        let ports = if node <= 10 { stated() } else { Arc::clone(&others) };
        health.set_stated(IpAddr::from([10, 0, 0, node]), ports);
    }
    let second = plan_next(&index, &host(), &health, Instant::now(), &first.assignments);
    assert!(!second.is_tried);
    let counts = second.statuses["lb31000"].targets[0].counts.clone();
    assert_eq!((counts.initial, counts.without_endpoint), (90, 10));
    assert_eq!(reached(&second, "10.0.1.1", 6, 80).len(), 32, "some of those of which nothing is known");
    health.insert(probe(&first, 3, PORTS[0]), healthy());
    let third = plan_next(&index, &host(), &health, Instant::now(), &second.assignments);
    assert_eq!(reached(&third, "10.0.1.1", 6, 80), [ip("10.0.0.3")].into());
}

#[test]
fn nothing_fills_while_most_targets_are_unknown() {
    let mut one = load_balancer("a", "10.0.1.1", &[]);
    one["spec"]["nodeSet"] = json!("eligible");
    one["spec"]["slowStartMilliseconds"] = json!(10_000);
    let index = with_nodes(index(&[one]));
    let (mut now, mut health) = (Instant::now(), HealthByProbe::default());
    let mut plan = plan_next(&index, &host(), &health, now, &Assignments::default());
    for node in 1..=2 {
        now += Duration::from_secs(1);
        health.insert(probe(&plan, node, 10_256), healthy());
        plan = plan_next(&index, &host(), &health, now, &plan.assignments);
        assert!(!plan.is_tried);
    }
    let counts = plan.statuses["a"].targets[0].counts.clone();
    assert_eq!((counts.active, counts.filling, counts.initial), (2, 0, 98), "a new process knows nobody");
}

#[test]
fn services_without_endpoint_use_no_node_that_drains() {
    let mut index = services();
    let of =
        |numbers: std::ops::RangeInclusive<u8>| numbers.map(|number| target(number, 1)).collect::<Vec<_>>();
    let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": of(61..=NODES), "draining": of(1..=60)}});
    let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
    let set = NodeSet { name: set.name_any(), uid: "set-uid".into(), spec: set.spec.into() };
    apply(&mut index, IndexEvent::NodeSet(Event::Apply(set)));
    let (mut health, mut now, mut shared) =
        (HealthByProbe::default(), Instant::now(), PortSetPool::default());
    let mut plan = plan_next(&index, &host(), &health, now, &Assignments::default());
    let drains = |address: &IpAddr| *address <= ip("10.0.0.60");
    assert_eq!(reached(&plan, "10.0.1.1", 6, 80).into_iter().filter(drains).count(), 0, "not tried yet");
    for node in 1..=NODES {
        health.set_stated(IpAddr::from([10, 0, 0, node]), shared.share(&stated()));
    }
    for seconds in [0, 61] {
        now += Duration::from_secs(seconds);
        plan = plan_next(&index, &host(), &health, now, &plan.assignments);
        for vip in ["10.0.1.1", "10.0.1.2", "10.0.1.3"] {
            let used = reached(&plan, vip, 6, 80);
            assert_eq!(
                (used.len(), used.into_iter().filter(drains).count()),
                (16, 0),
                "{vip} after {seconds}s"
            );
        }
        assert!(plan.groups.draining().values().all(|node| !node.is_used));
    }
}

proptest! {
    /// Tables are those that follow from a value for each target, whoever has said it.
    #[test]
    fn statements_lead_to_the_tables_that_values_lead_to(
        steps in prop::collection::vec((prop::collection::vec((1..=NODES, 0..3_usize, 0..3_u8), 0..20), 0..70_u64), 1..8),
    ) {
        let (index, host, mut now) = (services(), host(), Instant::now());
        let (mut stated_health, mut values) = (HealthByProbe::default(), HealthByProbe::default());
        let first = plan_next(&index, &host, &stated_health, now, &Assignments::default());
        let of: HashMap<(IpAddr, u16), Probe> =
            probes(&first).into_iter().map(|probe| ((probe.address, probe.check.port), probe)).collect();
        let mut shared = PortSetPool::default();
        for probe in of.values() {
            stated_health.set_stated(probe.address, shared.share(&stated()));
            values.insert(probe.clone(), TargetHealth::without_endpoint());
        }
        let (mut sparse, mut dense) = (first.assignments.clone(), first.assignments);
        for (changes, seconds) in steps {
            now += Duration::from_secs(seconds);
            for (node, port, state) in changes {
                let health = match state {
                    0 => TargetHealth::without_endpoint(),
                    1 => healthy(),
                    _ => TargetHealth { lacks_endpoint: false, ..TargetHealth::without_endpoint() },
                };
                let probe = &of[&(IpAddr::from([10, 0, 0, node]), PORTS[port])];
                stated_health.insert(probe.clone(), health.clone());
                values.insert(probe.clone(), health);
            }
            let one = plan_next(&index, &host, &stated_health, now, &sparse);
            let other = plan_next(&index, &host, &values, now, &dense);
            prop_assert_eq!(&one.state, &other.state);
            prop_assert_eq!(&one.statuses, &other.statuses);
            prop_assert_eq!(one.is_tried, other.is_tried);
            (sparse, dense) = (one.assignments, other.assignments);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! From objects, a host and health to what the kernel should hold.

use super::*;
use crate::forward::SELF;
use crate::host::Neighbour;
use crate::link::route::Route;
use crate::world::Event;
use proptest::prelude::*;
use serde_json::{Value, json};

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

fn target(number: u8, weight: u32) -> Value {
    json!({"node": format!("node{number}"), "addresses": [format!("10.0.0.{number}"), format!("fd00::{number}")],
           "podCidrs": [format!("10.244.{number}.0/24")], "weight": weight})
}

fn balancer(name: &str, vip: &str, targets: &[Value]) -> Value {
    json!({
        "metadata": {"name": name, "uid": format!("uid-{name}"), "generation": 7},
        "spec": {
            "service": {"namespace": "default", "name": name, "uid": "s"},
            "addresses": [vip],
            "listeners": [{"protocol": "TCP", "port": 80}, {"protocol": "UDP", "port": 53}],
            "healthCheck": {"protocol": "HTTP", "port": 10256, "path": "/healthz", "intervalMilliseconds": 1000,
                "timeoutMilliseconds": 1000, "healthyThreshold": 1, "unhealthyThreshold": 2},
            "targets": targets,
        },
    })
}

fn world(balancers: &[Value]) -> World {
    let mut world = World::default();
    for balancer in balancers {
        world.take(Event::Balancer(Box::new(serde_json::from_value(balancer.clone()).expect("balancer"))));
    }
    world
}

fn host() -> Host {
    let route = |net: &str| Route { net: net.parse().expect("net"), device: Some(2), gateway: false };
    Host {
        interface: "eth0".to_owned(),
        index: 2,
        mac: [2, 0, 0, 0, 0, 5],
        addresses: vec!["10.0.0.5/24".parse().expect("net"), "fd00::5/64".parse().expect("net")],
        routes: vec![route("10.0.0.0/24"), route("fd00::/64")],
        neighbours: [(ip("10.0.0.1"), [2, 0, 0, 0, 0, 1])].into(),
        ..Host::default()
    }
}

fn plan(balancers: &[Value], host: &Host, health: &Health) -> Plan {
    Planner::default().plan(&world(balancers), host, health, Instant::now())
}

/// The addresses that a listener's table leads to.
fn reached(plan: &Plan, vip: &str, protocol: u8, port: u16) -> BTreeSet<IpAddr> {
    let table = &plan.state.listeners[&(ip(vip), protocol, port)];
    let own = ip("10.0.0.5");
    let address = |id: &u32| if *id == SELF { own } else { plan.state.targets[id] };
    plan.state.tables[table].slots.iter().map(address).collect()
}

fn seen(plan: &Plan, bad: &[&str]) -> Health {
    let judge = |probe: &Probe| {
        let state = if bad.iter().any(|bad| ip(bad) == probe.address) {
            TargetState::Unhealthy
        } else {
            TargetState::Healthy
        };
        (probe.clone(), Seen { state, reason: String::new(), weight: None })
    };
    plan.probes.iter().map(judge).collect()
}

#[test]
fn a_load_balancer_becomes_listeners_slots_and_targets() {
    let balancers = [balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])];
    let plan = plan(&balancers, &host(), &Health::new());
    for (protocol, port) in [(6, 80), (17, 53)] {
        assert_eq!(reached(&plan, "10.0.0.100", protocol, port), [ip("10.0.0.1"), ip("10.0.0.2")].into());
    }
    assert_eq!(plan.vips, [ip("10.0.0.100")].into());
    assert_eq!(plan.state.fragments.len(), 1);
    assert_eq!(plan.state.nodes, [[2, 0, 0, 0, 0, 1]].into(), "node2 has not been heard of on the link yet");
    let sources = &plan.state.sources[&[2, 0, 0, 0, 0, 1]];
    assert!(sources.contains(&"10.244.1.0/24".parse().expect("net")), "{sources:?}");
    let finding = &plan.reports["a"];
    assert_eq!((finding.generation, finding.problem.as_str()), (7, ""));
    assert_eq!(finding.targets[0][0].state, TargetState::Initial);
}

#[test]
fn only_healthy_targets_are_used_unless_there_is_none() {
    let balancers = [balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1), target(3, 1)])];
    let first = plan(&balancers, &host(), &Health::new());
    let some = plan(&balancers, &host(), &seen(&first, &["10.0.0.1"]));
    assert_eq!(reached(&some, "10.0.0.100", 6, 80), [ip("10.0.0.2"), ip("10.0.0.3")].into());
    let none = plan(&balancers, &host(), &seen(&first, &["10.0.0.1", "10.0.0.2", "10.0.0.3"]));
    assert_eq!(none.state.tables, first.state.tables, "fail open");
}

#[test]
fn a_target_that_went_keeps_its_address_for_its_connections() {
    let (mut planner, now) = (Planner::default(), Instant::now());
    let two = world(&[balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])]);
    let one = world(&[balancer("a", "10.0.0.100", &[target(2, 1)])]);
    let before = planner.plan(&two, &host(), &Health::new(), now);
    let after = planner.plan(&one, &host(), &Health::new(), now);
    assert_eq!(before.state.targets, after.state.targets);
    assert_eq!(reached(&after, "10.0.0.100", 6, 80), [ip("10.0.0.2")].into());
    let later = now + std::time::Duration::from_hours(25);
    let long_after = planner.plan(&one, &host(), &Health::new(), later);
    assert_eq!(long_after.state.targets.len(), 1);
}

#[test]
fn this_host_as_a_target_accepts() {
    let balancers = [balancer("a", "10.0.0.100", &[target(5, 1), target(2, 1)])];
    let plan = plan(&balancers, &host(), &Health::new());
    assert_eq!(plan.state.local, [ip("10.0.0.100")].into());
    assert!(plan.state.tables.values().any(|table| table.usable.contains(&SELF)));
    assert!(!plan.state.targets.contains_key(&SELF));
}

#[test]
fn weights_are_the_targets_own_or_what_their_answers_say() {
    let share = |plan: &Plan, address: &str| {
        let (id, _) = plan.state.targets.iter().find(|(_, of)| **of == ip(address)).expect("target");
        plan.state.tables.values().next().expect("table").slots.iter().filter(|slot| *slot == id).count()
    };
    let own = plan(&[balancer("a", "10.0.0.100", &[target(1, 1), target(2, 9)])], &host(), &Health::new());
    assert!(share(&own, "10.0.0.2") > 4 * share(&own, "10.0.0.1"));
    let balancers = [balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])];
    let mut health = seen(&plan(&balancers, &host(), &Health::new()), &[]);
    health
        .iter_mut()
        .filter(|(probe, _)| probe.address == ip("10.0.0.1"))
        .for_each(|(_, seen)| seen.weight = Some(9));
    let told = plan(&balancers, &host(), &health);
    assert!(share(&told, "10.0.0.1") > 4 * share(&told, "10.0.0.2"));
}

#[test]
fn load_balancers_with_one_node_set_share_a_table() {
    let shared = |name: &str, vip: &str| {
        let mut balancer = balancer(name, vip, &[]);
        balancer["spec"]["nodeSet"] = json!("eligible");
        balancer
    };
    let mut world = world(&[shared("a", "10.0.0.100"), shared("b", "10.0.0.101")]);
    let missing = Planner::default().plan(&world, &host(), &Health::new(), Instant::now());
    assert!(missing.reports["a"].problem.contains("EdgeNodeSet eligible does not exist"));
    let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": [target(1, 1), target(2, 1)]}});
    world.take(Event::NodeSet(Box::new(serde_json::from_value(set).expect("set"))));
    let plan = Planner::default().plan(&world, &host(), &Health::new(), Instant::now());
    assert_eq!(plan.state.tables.len(), 1);
    assert_eq!(plan.state.listeners.len(), 4);
    assert!(Arc::ptr_eq(&plan.reports["a"].targets[0], &plan.reports["b"].targets[0]));
}

#[test]
fn what_cannot_be_is_said_and_the_rest_goes_on() {
    let far = json!({"node": "far", "addresses": ["192.0.2.1"], "weight": 1});
    let mut ranged = balancer("c", "10.0.0.102", &[target(1, 1)]);
    ranged["spec"]["sourceRanges"] = json!(["10.1.0.0/16", "10.1.2.0/24", "nonsense", "fd00::/8"]);
    let balancers = [
        balancer("a", "10.0.0.100", &[target(1, 1), far]),
        balancer("b", "10.0.0.100", &[target(1, 1)]),
        ranged,
        balancer("d", "10.0.0.5", &[target(1, 1)]),
        balancer("e", "10.0.0.6", &[target(1, 1)]),
        balancer("f", "10.0.0.103", &[target(1, 1)]),
    ];
    let mut host = host();
    host.peers = vec![Neighbour { mac: [2, 0, 0, 0, 0, 6], addresses: vec![ip("10.0.0.6")] }];
    host.taken = [(ip("10.0.0.103"), [2, 0, 0, 0, 0, 0xab])].into();
    let plan = plan(&balancers, &host, &Health::new());
    let problem = |name: &str| plan.reports[name].problem.clone();
    assert_eq!(problem("a"), "");
    assert_eq!(plan.reports["a"].targets[0][0].state, TargetState::Refused);
    assert_eq!(reached(&plan, "10.0.0.100", 6, 80), [ip("10.0.0.1")].into());
    assert!(problem("b").contains("belongs to the load balancer a"), "{}", problem("b"));
    assert!(problem("c").contains("not a source range: nonsense"), "{}", problem("c"));
    assert_eq!(plan.state.ranges[&ip("10.0.0.102")], ["10.1.0.0/16".parse().expect("net")].into());
    assert!(problem("d").contains("own address of an edge host"), "{}", problem("d"));
    assert!(problem("e").contains("own address of an edge host"), "{}", problem("e"));
    assert!(problem("f").contains("in use on the link by 02:00:00:00:00:ab"), "{}", problem("f"));
    assert_eq!(plan.vips, [ip("10.0.0.100"), ip("10.0.0.102")].into());
    assert!(plan.wanted.contains(&ip("10.0.0.103")), "it is looked at again");
}

#[test]
fn a_new_process_gives_the_numbers_that_the_kernel_holds() {
    let world = world(&[
        balancer("b", "10.0.0.100", &[target(1, 1), target(2, 1)]),
        balancer("c", "10.0.0.101", &[target(2, 1), target(3, 1)]),
    ]);
    let mut first = Planner::default();
    first.plan(&world_of_one(), &host(), &Health::new(), Instant::now());
    let old = first.plan(&world, &host(), &Health::new(), Instant::now());
    let mut second = Planner::adopt(&old.state);
    let new = second.plan(&world, &host(), &Health::new(), Instant::now());
    assert_eq!(new.state, old.state);
}

fn world_of_one() -> World {
    world(&[balancer("a", "10.0.0.99", &[target(9, 1)])])
}

proptest! {
    #[test]
    fn two_hosts_send_a_client_to_the_same_node(order in Just((1_u8..30).collect::<Vec<_>>()).prop_shuffle(), bad in 1_u8..30) {
        let targets = |numbers: &[u8]| numbers.iter().map(|number| target(*number, 1)).collect::<Vec<_>>();
        let straight = [balancer("a", "10.0.0.100", &targets(&(1..30).collect::<Vec<_>>()))];
        let mixed = [balancer("0", "10.0.0.98", &targets(&order[..3])), balancer("a", "10.0.0.100", &targets(&order))];
        let bad = format!("10.0.0.{bad}");
        let table = |balancers: &[Value]| {
            let health = seen(&plan(balancers, &host(), &Health::new()), &[&bad]);
            let plan = plan(balancers, &host(), &health);
            let table = &plan.state.tables[&plan.state.listeners[&(ip("10.0.0.100"), 6, 80)]];
            let address = |id: &u32| if *id == SELF { ip("10.0.0.5") } else { plan.state.targets[id] };
            table.slots.iter().map(address).collect::<Vec<_>>()
        };
        prop_assert_eq!(table(&straight), table(&mixed));
    }
}

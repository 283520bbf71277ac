// SPDX-License-Identifier: Apache-2.0
//! Plans from objects, a host and the health of targets.

use super::*;
use crate::health::{Probe, TargetHealth};
use crate::host::{EdgePeer, PeerLiveness};
use crate::index::{IndexChange, IndexEvent, LoadBalancer, NodeSet};
use crate::link::route::Route;
use crate::reach::Tunnel;
use crate::shards::Shard;
use crate::vips::WITHHELD;
use kube::ResourceExt as _;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::time::Duration;
use steerage_edge_api::{EdgeLoadBalancer, EdgeLoadBalancerSpec, EdgeNodeSet, TargetState, TargetUse};
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Path, Sender, Table};
use steerage_model::TunnelReceiver;
use steerage_watch::Event;

mod amending;
mod fused;
mod host_network;
mod kept_targets;
mod last_good;
mod measure;
mod retargeting;
mod room;
mod shared_vips;
mod statements;

fn lease(vip: &str) -> u32 {
    Shard::of(ip(vip)).lease()
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

fn target(number: u8, weight: u32) -> Value {
    json!({"node": format!("node{number}"), "addresses": [format!("10.0.0.{number}"), format!("fd00::{number}")],
           "podCidrs": [format!("10.244.{number}.0/24")], "weight": weight})
}

fn load_balancer(name: &str, vip: &str, targets: &[Value]) -> Value {
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

fn index(load_balancers: &[Value]) -> Index {
    let mut index = Index::default();
    for json in load_balancers {
        let object: EdgeLoadBalancer = serde_json::from_value(json.clone()).expect("load balancer");
        let load_balancer = LoadBalancer {
            name: object.name_any(),
            uid: object.uid().unwrap_or_default(),
            generation: object.metadata.generation.unwrap_or_default(),
            created: object.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            endpoint_nodes: object.spec.endpoint_nodes.clone().map(Into::into),
            spec: EdgeLoadBalancerSpec { endpoint_nodes: None, ..object.spec }.into(),
        };
        apply(&mut index, IndexEvent::LoadBalancer(Event::Apply(load_balancer)));
    }
    index
}

fn apply(index: &mut Index, event: IndexEvent) {
    index.apply(event, &mut IndexChange::default());
}

fn host() -> HostNetwork {
    let route =
        |net: &str| Route { net: net.parse().expect("net"), device: Some(2), gateway: false, next_hop: None };
    HostNetwork {
        interface: "eth0".to_owned(),
        index: 2,
        addresses: vec!["10.0.0.5/24".parse().expect("net"), "fd00::5/64".parse().expect("net")],
        routes: vec![route("10.0.0.0/24"), route("fd00::/64")].into(),
        neighbours: [(ip("10.0.0.1"), [2, 0, 0, 0, 0, 1])].into(),
        ..HostNetwork::default()
    }
}

fn peer(number: u8, liveness: PeerLiveness) -> EdgePeer {
    EdgePeer { mac: [2, 0, 0, 0, 0, number], addresses: vec![IpAddr::from([10, 0, 0, number])], liveness }
}

const ROOM: Room = Room { listeners: 1 << 16, prefixes: 1 << 20, slots: 5 << 20, members: 1 << 20 };

fn plan(load_balancers: &[Value], host: &HostNetwork, health: &HealthByProbe) -> Plan {
    plan_next(&index(load_balancers), host, health, Instant::now(), &Assignments::default())
}

fn plan_next(
    index: &Index,
    host: &HostNetwork,
    health: &HealthByProbe,
    now: Instant,
    previous: &Assignments,
) -> Plan {
    plan_fused(index, host, health, &EndpointNodes::default(), now, previous)
}

fn plan_fused(
    index: &Index,
    host: &HostNetwork,
    health: &HealthByProbe,
    endpoints: &EndpointNodes,
    now: Instant,
    previous: &Assignments,
) -> Plan {
    super::plan(&PlanInputs { index, host, health, endpoints, room: ROOM, now }, previous)
}

fn plan_in(room: Room, load_balancers: &[Value]) -> Plan {
    plan_in_after(room, load_balancers, &Assignments::default())
}

fn plan_in_after(room: Room, load_balancers: &[Value], previous: &Assignments) -> Plan {
    let (index, health) = (index(load_balancers), HealthByProbe::default());
    let endpoints = EndpointNodes::default();
    let inputs = PlanInputs {
        index: &index,
        host: &host(),
        health: &health,
        endpoints: &endpoints,
        room,
        now: Instant::now(),
    };
    super::plan(&inputs, previous)
}

/// The listener and its table.
fn listener<'a>(plan: &'a Plan, vip: &str, protocol: u8, port: u16) -> (&'a Listener, &'a Table) {
    let listener = &plan.state.listeners[&ListenerKey::new(ip(vip), protocol, port)];
    (listener, &plan.state.tables[&listener.table])
}

/// The target of each slot of a listener.
fn slots(plan: &Plan, vip: &str, protocol: u8, port: u16) -> Vec<IpAddr> {
    let (_, table) = listener(plan, vip, protocol, port);
    table.slots.iter().map(|number| plan.state.targets[number].address).collect()
}

/// The targets of a listener.
fn reached(plan: &Plan, vip: &str, protocol: u8, port: u16) -> BTreeSet<IpAddr> {
    slots(plan, vip, protocol, port).into_iter().collect()
}

fn probes(plan: &Plan) -> HashSet<Probe> {
    plan.checks.probes().into_keys().collect()
}

fn urgent_probes(plan: &Plan) -> HashSet<Probe> {
    plan.checks.probes().into_iter().filter(|(_, is_urgent)| *is_urgent).map(|(probe, _)| probe).collect()
}

fn health(plan: &Plan, failing: &[&str]) -> HealthByProbe {
    let target_health = |probe: &Probe| {
        let state = if failing.iter().any(|address| ip(address) == probe.address) {
            TargetState::Unhealthy
        } else {
            TargetState::Healthy
        };
        (probe.clone(), TargetHealth { state, reason: String::new(), ..TargetHealth::default() })
    };
    let mut all = HealthByProbe::default();
    probes(plan).iter().map(target_health).for_each(|(probe, health)| all.insert(probe, health));
    all
}

#[test]
fn healthy_vips_are_those_with_a_healthy_target() {
    let load_balancers = [
        load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)]),
        load_balancer("b", "10.0.0.101", &[target(2, 1)]),
    ];
    let first = plan(&load_balancers, &host(), &HealthByProbe::default());
    let count = |failing| plan(&load_balancers, &host(), &health(&first, failing)).groups.healthy_vips();
    assert_eq!([count(&[]), count(&["10.0.0.2"]), count(&["10.0.0.1", "10.0.0.2"])], [2, 1, 0]);
    // Of an empty list all and none are the same, and another host may have VIPs.
    assert_eq!(plan(&[], &host(), &HealthByProbe::default()).groups.healthy_vips(), 0);
}

#[test]
fn load_balancer_becomes_listeners_slots_and_targets() {
    let load_balancers = [load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])];
    let plan = plan(&load_balancers, &host(), &HealthByProbe::default());
    for (protocol, port) in [(6, 80), (17, 53)] {
        assert_eq!(reached(&plan, "10.0.0.100", protocol, port), [ip("10.0.0.1"), ip("10.0.0.2")].into());
    }
    assert_eq!(plan.state.vips, [(ip("10.0.0.100"), lease("10.0.0.100"))].into());
    let senders: Vec<_> = plan.state.senders.iter().collect();
    let [(mac, Sender::Own(nets))] = senders.as_slice() else {
        panic!("the link-layer address of node2 is unknown: {senders:?}");
    };
    assert_eq!(**mac, [2, 0, 0, 0, 0, 1]);
    assert!(nets.contains(&"10.244.1.0/24".parse().expect("net")), "{nets:?}");
    let status = &plan.statuses["a"];
    assert_eq!((status.generation, status.problem.as_str()), (7, ""));
    assert_eq!(status.targets[0].targets[0].state, TargetState::Initial);
}

#[test]
fn only_healthy_targets_are_used_unless_all_fail() {
    let load_balancers = [load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1), target(3, 1)])];
    let first = plan(&load_balancers, &host(), &HealthByProbe::default());
    let some = plan(&load_balancers, &host(), &health(&first, &["10.0.0.1"]));
    assert_eq!(reached(&some, "10.0.0.100", 6, 80), [ip("10.0.0.2"), ip("10.0.0.3")].into());
    let none = plan(&load_balancers, &host(), &health(&first, &["10.0.0.1", "10.0.0.2", "10.0.0.3"]));
    assert_eq!(none.state.tables, first.state.tables, "fail open");
}

#[test]
fn removed_target_keeps_its_address_for_a_day() {
    let now = Instant::now();
    let two = index(&[load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])]);
    let one = index(&[load_balancer("a", "10.0.0.100", &[target(2, 1)])]);
    let health = HealthByProbe::default();
    let before = plan_next(&two, &host(), &health, now, &Assignments::default());
    let after = plan_next(&one, &host(), &health, now, &before.assignments);
    assert_eq!(before.state.targets, after.state.targets);
    assert_eq!(reached(&after, "10.0.0.100", 6, 80), [ip("10.0.0.2")].into());
    let later = now + std::time::Duration::from_hours(25);
    let long_after = plan_next(&one, &host(), &health, later, &after.assignments);
    assert_eq!(long_after.state.targets.len(), 1);
}

#[test]
fn weights_come_from_the_spec_or_else_from_probes() {
    let share = |plan: &Plan, address: &str| {
        slots(plan, "10.0.0.100", 6, 80).into_iter().filter(|target| *target == ip(address)).count()
    };
    let own = plan(
        &[load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 9)])],
        &host(),
        &HealthByProbe::default(),
    );
    assert!(share(&own, "10.0.0.2") > 4 * share(&own, "10.0.0.1"));
    let load_balancers = [load_balancer("a", "10.0.0.100", &[target(1, 1), target(2, 1)])];
    let first = plan(&load_balancers, &host(), &HealthByProbe::default());
    let mut health = health(&first, &[]);
    for probe in probes(&first).iter().filter(|probe| probe.address == ip("10.0.0.1")) {
        let told = TargetHealth { weight: Some(9), ..health.get(probe).cloned().expect("probed") };
        health.insert(probe.clone(), told);
    }
    let told = plan(&load_balancers, &host(), &health);
    assert!(share(&told, "10.0.0.1") > 4 * share(&told, "10.0.0.2"));
}

#[test]
fn load_balancers_of_one_node_set_share_a_table() {
    let shared = |name: &str, vip: &str| {
        let mut load_balancer = load_balancer(name, vip, &[]);
        load_balancer["spec"]["nodeSet"] = json!("eligible");
        load_balancer
    };
    let mut affine = shared("b", "10.0.0.101");
    affine["spec"]["affinity"] = json!({"timeoutSeconds": 10_800});
    let mut index = index(&[shared("a", "10.0.0.100"), affine]);
    let missing =
        plan_next(&index, &host(), &HealthByProbe::default(), Instant::now(), &Assignments::default());
    assert!(missing.statuses["a"].problem.contains("EdgeNodeSet eligible does not exist"));
    let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": [target(1, 1), target(2, 1)]}});
    let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
    let node_set = NodeSet { name: set.name_any(), uid: "set".into(), spec: set.spec.into() };
    apply(&mut index, IndexEvent::NodeSet(Event::Apply(node_set)));
    let plan = plan_next(&index, &host(), &HealthByProbe::default(), Instant::now(), &Assignments::default());
    assert_eq!(plan.state.tables.len(), 1);
    assert_eq!(plan.state.listeners.len(), 4);
    let has_affinity = |vip| listener(&plan, vip, 6, 80).0.has_affinity;
    assert_eq!([has_affinity("10.0.0.100"), has_affinity("10.0.0.101")], [false, true]);
    assert!(Arc::ptr_eq(&plan.statuses["a"].targets[0], &plan.statuses["b"].targets[0]));
}

#[test]
fn problems_are_reported_and_the_rest_is_served() {
    let far = json!({"node": "far", "addresses": ["192.0.2.1"], "weight": 1});
    let mut ranged = load_balancer("c", "10.0.0.102", &[target(1, 1)]);
    ranged["spec"]["sourceRanges"] = json!(["10.1.0.0/16", "10.1.2.0/24", "nonsense", "fd00::/8"]);
    let mut twice = load_balancer("g", "10.0.0.5", &[target(1, 1)]);
    twice["spec"]["sourceRanges"] = json!(["nonsense"]);
    let load_balancers = [
        twice,
        load_balancer("a", "10.0.0.100", &[target(1, 1), far]),
        load_balancer("b", "10.0.0.100", &[target(1, 1)]),
        ranged,
        load_balancer("d", "10.0.0.5", &[target(1, 1)]),
        load_balancer("e", "10.0.0.6", &[target(1, 1)]),
        load_balancer("f", "10.0.0.103", &[target(1, 1)]),
    ];
    let mut host = host();
    host.peers = vec![peer(6, PeerLiveness::Live)];
    host.conflicts = [(ip("10.0.0.103"), [2, 0, 0, 0, 0, 0xab])].into();
    let plan = plan(&load_balancers, &host, &HealthByProbe::default());
    let problem = |name: &str| plan.statuses[name].problem.clone();
    assert_eq!(problem("a"), "");
    assert_eq!(plan.statuses["a"].targets[0].targets[0].state, TargetState::Refused);
    assert_eq!(reached(&plan, "10.0.0.100", 6, 80), [ip("10.0.0.1")].into());
    assert!(problem("b").contains("belongs to the load balancer a"), "{}", problem("b"));
    assert!(problem("c").contains("Source ranges nonsense are invalid"), "{}", problem("c"));
    let ranges = listener(&plan, "10.0.0.102", 6, 80).0.ranges.as_deref();
    assert_eq!(ranges, Some(&["10.1.0.0/16".parse().expect("net")].into()));
    assert!(problem("d").contains("own address of an edge host"), "{}", problem("d"));
    assert!(problem("e").contains("own address of an edge host"), "{}", problem("e"));
    assert!(problem("g").contains("Write CIDRs. Address 10.0.0.5 belongs"), "sentences: {}", problem("g"));
    assert!(problem("f").contains("in use on the link by 02:00:00:00:00:ab"), "{}", problem("f"));
    let served = ["10.0.0.100", "10.0.0.102"].map(|vip| (vip, lease(vip)));
    let leases = [served[0], served[1], ("10.0.0.103", WITHHELD)];
    assert_eq!(plan.state.vips, leases.map(|(vip, lease)| (ip(vip), lease)).into());
}

/// Also of an object that has more than the controller writes: fewer would cut clients.
#[test]
fn source_ranges_are_merged() {
    let mut many = load_balancer("a", "10.0.0.100", &[target(1, 1)]);
    let ranges = |step: u32| {
        (0..1500).map(move |number| Ipv4Addr::from(0x0a01_0000 + number * step).to_string() + "/32")
    };
    for (step, count) in [(1, 7), (2, 1500)] {
        many["spec"]["sourceRanges"] = ranges(step).collect();
        let plan = plan(std::slice::from_ref(&many), &host(), &HealthByProbe::default());
        let ranges = listener(&plan, "10.0.0.100", 6, 80).0.ranges.as_ref();
        assert_eq!(ranges.map(|ranges| ranges.len()), Some(count));
        assert_eq!(plan.statuses["a"].problem, "");
    }
}

#[test]
fn new_process_adopts_the_kernels_numbers() {
    let index = index(&[
        load_balancer("b", "10.0.0.100", &[target(1, 1), target(2, 1)]),
        load_balancer("c", "10.0.0.101", &[target(2, 1), target(3, 1)]),
    ]);
    let (health, now) = (HealthByProbe::default(), Instant::now());
    let first = plan_next(&index_of_one(), &host(), &health, now, &Assignments::default());
    let old = plan_next(&index, &host(), &health, now, &first.assignments);
    let adopted = Assignments::adopt(&old.state);
    let new = plan_next(&index, &host(), &health, now, &adopted);
    assert_eq!(new.state, old.state);
}

fn index_of_one() -> Index {
    index(&[load_balancer("a", "10.0.0.99", &[target(9, 1)])])
}

proptest! {
    #[test]
    fn all_hosts_choose_the_same_node_for_a_client(order in Just((1_u8..30).collect::<Vec<_>>()).prop_shuffle(), bad in 1_u8..30) {
        let targets = |numbers: &[u8]| numbers.iter().map(|number| target(*number, 1)).collect::<Vec<_>>();
        let straight = [load_balancer("a", "10.0.0.100", &targets(&(1..30).collect::<Vec<_>>()))];
        let mixed = [load_balancer("0", "10.0.0.98", &targets(&order[..3])), load_balancer("a", "10.0.0.100", &targets(&order))];
        let bad = format!("10.0.0.{bad}");
        let table = |load_balancers: &[Value]| {
            let health = health(&plan(load_balancers, &host(), &HealthByProbe::default()), &[&bad]);
            slots(&plan(load_balancers, &host(), &health), "10.0.0.100", 6, 80)
        };
        prop_assert_eq!(table(&straight), table(&mixed));
    }
}

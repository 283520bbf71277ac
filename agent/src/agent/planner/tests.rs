// SPDX-License-Identifier: Apache-2.0
//! Plans of a node whose cluster changes, as the loop has them made.

use steerage_model::{Endpoint, EndpointPort, Family, Ingress, Protocol, ServiceKind, ServicePort, names};

use std::net::Ipv4Addr;

use super::*;
use crate::plan::{Action, ElementLimits};
use crate::settings::{DetectLocal, NodePortAddresses};

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn settings(kube_proxy_replacement: bool) -> AgentSettings {
    AgentSettings {
        node: "here".to_owned(),
        kube_proxy_replacement,
        node_port_addresses: NodePortAddresses::Primary,
        detect_local: DetectLocal::NodeCidrs,
        masquerade_all: false,
        node_ip: None,
        unassigned: Vec::new(),
        deny_external_ips: false,
        api_server: None,
        element_limits: ElementLimits::default(),
        forward_to_peers: Some(ForwardToPeers::default()),
    }
}

fn node(name: &str, address: &str, has_agent: bool) -> Node {
    let agent = NodeAgent { mode: String::new(), version: String::new() };
    Node {
        name: name.to_owned(),
        addresses: vec![addr(address)],
        agent: has_agent.then_some(agent),
        ..Node::default()
    }
}

fn key() -> Key {
    Key::new("shop", "web")
}

/// A Service of policy Local with an endpoint on the node `there`.
fn planner() -> Planner {
    let mut planner = Planner::default();
    planner.index.apply_service(Event::Apply(Service {
        kind: ServiceKind::LoadBalancer,
        external_policy: TrafficPolicy::Local,
        cluster_ips: vec![addr("10.96.0.1")],
        ingress: vec![Ingress { ip: Some(addr("192.0.2.1")), hostname: None, ip_mode: None }],
        ports: vec![ServicePort::new("web", Protocol::Tcp, 80, None)],
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(key())
    }));
    planner.index.apply_slice(Event::Apply(EndpointSlice {
        ports: [EndpointPort { name: "web".to_owned(), protocol: Protocol::Tcp, port: 8080 }].into(),
        endpoints: vec![Endpoint::ready(addr("10.244.1.1"), "there")],
        ..EndpointSlice::new(Key::new("shop", "web-1"), key(), Family::V4)
    }));
    planner.index.apply_node(Event::Apply(node("here", "10.0.0.1", true)));
    planner
}

/// What there is to write, with the nodes to which the Service's packets are forwarded, and how many nodes are unreachable, if that
/// changed.
fn step(
    planner: &mut Planner,
    settings: &AgentSettings,
    all: bool,
    off_link: &str,
) -> (Option<Vec<IpAddr>>, Option<usize>) {
    let flags = settings.forward_to_peers.clone().unwrap();
    let next_hop = |to: IpAddr| Some(NextHop { device: "eth0".to_owned(), is_on_link: to != addr(off_link) });
    let unreachable = planner.find_peers(settings, &flags, all, next_hop);
    let updates = planner.plan(settings, Instant::now(), &Desired::default(), || false).unwrap();
    let peers = updates.get(&key()).map(|plan| {
        let actions = plan.frontends.iter().filter_map(|(_, action): &(_, Action)| action.peers.as_ref());
        let mut found: Vec<_> = actions.flat_map(|peers| peers.iter().copied()).collect();
        found.dedup();
        found
    });
    (peers, unreachable)
}

/// Whoever may write slices in the namespace `default` reserves no addresses by them, nor the agent's memory.
#[test]
fn only_the_api_servers_say_where_they_listen() {
    let mut planner = planner();
    let service = Key::new("default", "kubernetes");
    let slice = |name: &str, first: u32, endpoints: u32| {
        let endpoint = |n: u32| Endpoint::ready(Ipv4Addr::from_bits(first + n).into(), "there");
        let port = EndpointPort { name: "https".to_owned(), protocol: Protocol::Tcp, port: 6443 };
        Event::Apply(EndpointSlice {
            ports: [port].into(),
            endpoints: (0..endpoints).map(endpoint).collect(),
            ..EndpointSlice::new(Key::new("default", name), service.clone(), Family::V4)
        })
    };
    let first = 0x0a00_0001;
    planner.index.apply_slice(slice("kubernetes-of-a-tenant", 0xc633_6401, 3));
    planner.index.apply_slice(slice("kubernetes", first, 2));
    planner.note_api_servers();
    let wanted = ["10.0.0.1:6443", "10.0.0.2:6443"].map(|addr| addr.parse().unwrap());
    assert_eq!(planner.api_servers, BTreeSet::from(wanted));
    planner.index.apply_slice(slice("kubernetes", first + 2, 1));
    planner.note_api_servers();
    assert_eq!(planner.api_servers.len(), 3, "those that left are kept");
    planner.index.apply_slice(slice("kubernetes", first + 100, 1_000));
    planner.note_api_servers();
    assert_eq!(planner.api_servers.len(), MAX_API_SERVERS);
}

#[test]
fn api_servers_are_read_when_their_slice_changes() {
    let (settings, mut planner) = (settings(true), planner());
    let slice = |key: Key, addr: &str| {
        let port = EndpointPort { name: "https".to_owned(), protocol: Protocol::Tcp, port: 6443 };
        Event::Apply(EndpointSlice {
            ports: [port].into(),
            endpoints: vec![Endpoint::ready(addr.parse().unwrap(), "there")],
            ..EndpointSlice::new(key.clone(), key, Family::V4)
        })
    };
    let count = |planner: &mut Planner| {
        planner.plan(&settings, Instant::now(), &Desired::default(), || false).unwrap();
        planner.api_servers.len()
    };
    planner.index.apply_slice(slice(api_servers(), "10.0.0.1"));
    assert_eq!(count(&mut planner), 1);
    planner.api_servers.clear();
    planner.index.apply_slice(slice(key(), "10.0.0.2"));
    assert_eq!(count(&mut planner), 0, "another slice was looked at");
    planner.index.apply_slice(slice(api_servers(), "10.0.0.3"));
    assert_eq!(count(&mut planner), 1);
    // Found by the search for other nodes, which takes changes, too.
    planner.index.apply_slice(slice(api_servers(), "10.0.0.4"));
    step(&mut planner, &settings, true, "10.9.9.9");
    assert_eq!(count(&mut planner), 2);
}

#[test]
fn other_nodes_are_found_as_they_come_and_go() {
    let (settings, mut planner) = (settings(true), planner());
    let none = "10.9.9.9";
    assert_eq!(step(&mut planner, &settings, true, none), (Some(vec![]), None), "no other node yet");
    planner.index.apply_node(Event::Apply(node("there", "10.0.0.2", false)));
    assert_eq!(step(&mut planner, &settings, false, none), (Some(vec![addr("10.0.0.2")]), None));
    planner.index.apply_node(Event::Apply(Node { cordoned: true, ..node("there", "10.0.0.2", false) }));
    assert_eq!(step(&mut planner, &settings, false, none), (None, None), "nothing depends on it");
    planner.index.apply_node(Event::Apply(node("there", "10.0.0.3", false)));
    assert_eq!(step(&mut planner, &settings, false, none), (Some(vec![addr("10.0.0.3")]), None));
    assert_eq!(
        step(&mut planner, &settings, true, "10.0.0.3"),
        (Some(vec![]), Some(1)),
        "a route has changed"
    );
    assert_eq!(step(&mut planner, &settings, true, "10.0.0.3"), (None, None));
    planner.index.apply_node(Event::Delete { key: "there".to_owned(), version: String::new() });
    assert_eq!(step(&mut planner, &settings, false, none), (None, Some(0)));
}

#[test]
fn beside_kube_proxy_only_nodes_with_an_agent_take_packets() {
    let (settings, mut planner) = (settings(false), planner());
    planner.index.apply_node(Event::Apply(node("there", "10.0.0.2", false)));
    assert_eq!(step(&mut planner, &settings, true, "10.9.9.9").0, Some(vec![]));
    planner.index.apply_node(Event::Apply(node("there", "10.0.0.2", true)));
    assert_eq!(step(&mut planner, &settings, false, "10.9.9.9").0, Some(vec![addr("10.0.0.2")]));
}

#[test]
fn node_that_leaves_is_not_eligible() {
    let settings = settings(true);
    let mut planner = Planner::default();
    assert!(!planner.is_eligible(&settings), "it is not known");
    let present = node("here", "10.0.0.1", true);
    let cordoned = Node { cordoned: true, ..present.clone() };
    let autoscaled = Node { autoscaler_taint: true, ..present.clone() };
    let deleted = Node { deleting: true, ..present.clone() };
    for (node, is_eligible) in
        [(present.clone(), true), (cordoned, true), (autoscaled, false), (present, true), (deleted, false)]
    {
        planner.index.apply_node(Event::Apply(node.clone()));
        assert_eq!(planner.is_eligible(&settings), is_eligible, "{node:?}");
    }
}

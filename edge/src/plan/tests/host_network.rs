// SPDX-License-Identifier: Apache-2.0
//! What follows from the host's network: whether it is a node, the other edge hosts, routers and the tunnel.

use super::*;

#[test]
fn local_host_as_a_target_accepts() {
    let load_balancers = [load_balancer("a", "10.0.0.100", &[target(5, 1), target(2, 1)])];
    let plan = plan(&load_balancers, &host(), &HealthByProbe::default());
    let paths: BTreeMap<_, _> =
        plan.state.targets.values().map(|target| (target.address, target.path)).collect();
    assert_eq!(paths, [(ip("10.0.0.2"), Path::Neighbour), (ip("10.0.0.5"), Path::Local)].into());
    assert_eq!(reached(&plan, "10.0.0.100", 6, 80), [ip("10.0.0.2"), ip("10.0.0.5")].into());
}

/// Edge hosts on nodes: what another one sends to a VIP is for this node.
#[test]
fn host_that_is_a_node_takes_what_other_edge_hosts_forward() {
    let host = HostNetwork { peers: vec![peer(9, PeerLiveness::Live)], ..host() };
    let of_peer = |targets: &[Value]| {
        let load_balancers = [load_balancer("a", "10.0.0.100", targets)];
        plan(&load_balancers, &host, &HealthByProbe::default()).state.senders[&[2, 0, 0, 0, 0, 9]].clone()
    };
    let own = Sender::Own(Arc::new(["10.0.0.9/32".parse().expect("net")].into()));
    assert_eq!(of_peer(&[target(2, 1)]), own);
    assert_eq!(of_peer(&[target(2, 1), target(5, 1)]), Sender::Forwarder);
}

/// Other edge hosts forward the packets of its flows for as long as these last.
#[test]
fn host_that_was_a_target_takes_what_other_edge_hosts_forward() {
    let host = HostNetwork { peers: vec![peer(9, PeerLiveness::Live)], ..host() };
    let (begun, health) = (Instant::now(), HealthByProbe::default());
    let next = |targets: &[Value], previous: &Plan, now| {
        let index = index(&[load_balancer("a", "10.0.0.100", targets)]);
        plan_next(&index, &host, &health, now, &previous.assignments)
    };
    let is_forwarder = |plan: &Plan| plan.state.senders[&[2, 0, 0, 0, 0, 9]] == Sender::Forwarder;
    let both = next(&[target(2, 1), target(5, 1)], &Plan::default(), begun);
    let one = next(&[target(2, 1)], &both, begun);
    assert_eq!([is_forwarder(&both), is_forwarder(&one)], [true; 2]);
    let later = next(&[target(2, 1)], &one, begun + Duration::from_hours(24));
    assert!(!is_forwarder(&later));
}

/// A forged heartbeat has its Ethernet address, and what it forwards would be dropped.
#[test]
fn router_of_this_host_is_no_edge_host() {
    let default = Route {
        net: "0.0.0.0/0".parse().expect("net"),
        device: Some(2),
        gateway: true,
        next_hop: Some(ip("10.0.0.254")),
    };
    let router = [2, 0, 0, 0, 0, 254];
    let mut host =
        HostNetwork { peers: [254, 9].map(|number| peer(number, PeerLiveness::Live)).into(), ..host() };
    // A node with an edge host, and the network of its Pods.
    let pods = Route {
        net: "10.244.9.0/24".parse().expect("net"),
        next_hop: Some(ip("10.0.0.9")),
        ..default.clone()
    };
    host.routes = host.routes.iter().cloned().chain([default, pods]).collect::<Vec<_>>().into();
    host.neighbours.extend([(ip("10.0.0.254"), router), (ip("10.0.0.9"), [2, 0, 0, 0, 0, 9])]);
    for targets in [&[target(2, 1)][..], &[target(5, 1)]] {
        let load_balancers = [load_balancer("a", "10.0.0.100", targets)];
        let senders = plan(&load_balancers, &host, &HealthByProbe::default()).state.senders;
        assert!(!senders.contains_key(&router));
        assert!(senders.contains_key(&[2, 0, 0, 0, 0, 9]));
    }
}

/// A new load balancer may have the address of a host that is gone.
#[test]
fn address_of_a_dead_edge_host_is_served() {
    let problem = |liveness| {
        let host = HostNetwork { peers: vec![peer(6, liveness)], ..host() };
        let load_balancers = [load_balancer("a", "10.0.0.6", &[target(1, 1)])];
        plan(&load_balancers, &host, &HealthByProbe::default()).statuses["a"].problem.clone()
    };
    assert!(problem(PeerLiveness::Live).contains("own address"));
    assert!(problem(PeerLiveness::Recent).contains("own address"));
    assert_eq!(problem(PeerLiveness::Dead), "");
}

/// A host that reaches other networks by a router, and their nodes through a tunnel.
pub(super) fn host_with_tunnel() -> HostNetwork {
    let default =
        Route { net: "0.0.0.0/0".parse().expect("net"), device: Some(2), gateway: true, next_hop: None };
    let routes: Vec<_> = host().routes.iter().cloned().chain([default]).collect();
    let tunnel = Tunnel::Ready { vni: 7, port: 10_361, mtu: None };
    HostNetwork { routes: routes.into(), tunnel, mtus: [(2, 1500)].into(), ..host() }
}

/// They are still asked, so that their nodes can state something else, and their connections keep the way.
#[test]
fn targets_off_the_link_whose_nodes_do_not_receive_are_refused_and_followed() {
    let far = json!({"node": "far", "addresses": ["192.0.2.1"], "weight": 1});
    let mut draining = load_balancer("b", "10.0.0.101", &[target(1, 1)]);
    draining["spec"]["draining"] = json!([far]);
    let load_balancers = [
        load_balancer("a", "10.0.0.100", &[target(1, 1), far.clone()]),
        draining,
        load_balancer("c", "10.0.0.102", &[far]),
    ];
    let (now, known, index) = (Instant::now(), host_with_tunnel(), index(&load_balancers));
    let first = plan_next(&index, &known, &HealthByProbe::default(), now, &Assignments::default());
    let mut healthy = health(&first, &[]);
    let next = |health: &HealthByProbe, previous: &Plan| {
        plan_next(&index, &known, health, now, &previous.assignments)
    };
    let before = next(&healthy, &first);
    assert_eq!(reached(&before, "10.0.0.100", 6, 80), [ip("10.0.0.1"), ip("192.0.2.1")].into());
    for address in ["10.0.0.1", "192.0.2.1"] {
        healthy.set_tunnel_receiver(ip(address), Some(TunnelReceiver::EdgeHost));
    }
    let refused = next(&healthy, &before);
    assert_eq!(reached(&refused, "10.0.0.100", 6, 80), [ip("10.0.0.1")].into());
    assert_eq!(reached(&refused, "10.0.0.102", 6, 80), [].into(), "not by a guess either");
    assert_eq!((probes(&refused), &refused.state.targets), (probes(&first), &before.state.targets));
    for name in ["a", "b", "c"] {
        let status = &refused.statuses[name].targets[0].targets;
        let far = status.iter().find(|target| target.address == ip("192.0.2.1")).expect("a status");
        assert_eq!((far.state, far.usage), (TargetState::Refused, Some(TargetUse::Inactive)), "{name}");
        assert!(far.reason.ends_with("an edge host's device steerage-vx has the port"), "{}", far.reason);
    }
    healthy.set_tunnel_receiver(ip("192.0.2.1"), Some(TunnelReceiver::Receives { vni: 7, port: 10_361 }));
    let again = next(&healthy, &refused);
    assert_eq!((again.state.tables, again.statuses), (before.state.tables, before.statuses));
}

/// Also under a change of the routes, or of the tunnel, all connections stay with their targets' numbers.
#[test]
fn targets_off_the_link_are_tunnelled_if_there_is_a_tunnel() {
    let far = json!({"node": "far", "addresses": ["192.0.2.1"], "weight": 1});
    let load_balancers = [load_balancer("a", "10.0.0.100", &[target(1, 1), far, target(5, 1)])];
    let host = host_with_tunnel();
    let now = Instant::now();
    let next = |host: &HostNetwork, previous: &Assignments| {
        plan_next(&index(&load_balancers), host, &HealthByProbe::default(), now, previous)
    };
    let paths = |plan: &Plan| -> BTreeMap<IpAddr, (u32, Path)> {
        let targets = plan.state.targets.iter();
        targets.map(|(number, target)| (target.address, (*number, target.path))).collect()
    };
    let first = next(&host, &Assignments::default());
    let far_path = Path::Tunnel { mac: [2, 0x53, 0x54, 0, 0, 7], mtu: 1450, vni: 7 };
    let found = paths(&first);
    for (address, path) in [("10.0.0.1", Path::Neighbour), ("192.0.2.1", far_path), ("10.0.0.5", Path::Local)]
    {
        assert_eq!(found[&ip(address)].1, path, "{address}");
    }
    assert!(first.checks.probes().keys().any(|probe| probe.address == ip("192.0.2.1")), "it is probed");
    assert!(
        first.state.senders.values().all(|sender| !matches!(sender, Sender::Own(nets)
        if nets.contains(&"192.0.2.1/32".parse().expect("net")))),
        "its frames are a router's"
    );

    let smaller = HostNetwork { mtus: [(2, 1400)].into(), ..host.clone() };
    let number = found[&ip("192.0.2.1")].0;
    let path = Path::Tunnel { mac: [2, 0x53, 0x54, 0, 0, 7], mtu: 1350, vni: 7 };
    assert_eq!(paths(&next(&smaller, &first.assignments))[&ip("192.0.2.1")], (number, path));

    let failed = HostNetwork { tunnel: Tunnel::Failed("no device".to_owned()), ..host };
    let plan = next(&failed, &first.assignments);
    let status = &plan.statuses["a"].targets[0].targets;
    let refused = status.iter().find(|target| target.address == ip("192.0.2.1")).expect("a status");
    assert_eq!(refused.state, TargetState::Refused);
    assert!(refused.reason.ends_with("the tunnel does not work: no device"), "{}", refused.reason);
    assert_eq!(paths(&plan)[&ip("10.0.0.1")], found[&ip("10.0.0.1")]);
}

/// Of load balancers with a target that is refused, one that is removed, draining ones, and some of which none has an endpoint.
fn with_many_kinds_of_targets() -> [Vec<Value>; 2] {
    let some = |numbers: &[u8]| numbers.iter().map(|number| target(*number, 1)).collect::<Vec<_>>();
    let far = json!({"node": "far", "addresses": ["192.0.2.1"], "weight": 1});
    let mut first = load_balancer("a", "10.0.0.100", &some(&[1, 2, 5]));
    first["spec"]["targets"].as_array_mut().expect("targets").push(far);
    first["spec"]["draining"] = json!([target(6, 1)]);
    let second = load_balancer("b", "fd00::101", &some(&[3, 4]));
    let mut removed = first.clone();
    removed["spec"]["targets"].as_array_mut().expect("targets").remove(1);
    [vec![first, second.clone()], vec![removed, second]]
}

proptest! {
    /// Routes may change all the time, and a plan is made only where one may come to something else.
    #[test]
    fn plan_follows_from_the_routes_to_targets(
        routes in prop::collection::vec((0..9_usize, 0..3_u32, any::<bool>()), 0..8),
        has_tunnel in any::<bool>(),
    ) {
        let nets = ["0.0.0.0/0", "10.0.0.0/24", "10.0.0.1/32", "10.0.0.2/32", "10.0.0.0/30", "192.0.2.0/24",
            "198.51.100.0/24", "fd00::/64", "fd00::3/128"];
        let route = |(net, device, gateway): (usize, u32, bool)| Route {
            net: nets[net].parse().expect("net"),
            device: Some(device + 2),
            gateway,
            next_hop: gateway.then(|| ip("10.0.0.1")),
        };
        let tunnel = if has_tunnel { Tunnel::Ready { vni: 7, port: 10_361, mtu: None } } else { Tunnel::Off };
        let known = HostNetwork { tunnel, mtus: [(2, 1500), (3, 9000)].into(), ..host() };
        let routes: Vec<_> = known.routes.iter().cloned().chain(routes.into_iter().map(route)).collect();
        let other = HostNetwork { routes: routes.into(), ..known.clone() };
        let [first, second] = with_many_kinds_of_targets().map(|load_balancers| index(&load_balancers));
        let (now, health) = (Instant::now(), HealthByProbe::default());
        let before = plan_next(&first, &known, &health, now, &Assignments::default());
        let planned = plan_next(&second, &known, &health, now, &before.assignments);
        let is_alike = other.is_alike(&known, || planned.groups.target_addresses(&planned.assignments));
        let next = plan_next(&second, &other, &health, now, &planned.assignments);
        let is_same = next.state == planned.state && next.statuses == planned.statuses;
        prop_assert!(is_same || !is_alike, "{:?}", other.routes);
    }
}

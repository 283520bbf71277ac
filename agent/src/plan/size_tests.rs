// SPDX-License-Identifier: Apache-2.0
//! The size of plans: a Service, however large, makes none with many more addresses than it may have elements.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use proptest::prelude::*;
use steerage_model::{
    Backend, Endpoint, EndpointPort, EndpointSlice, Family, Ingress, Key, Protocol, Service, ServiceKind,
    ServicePort, TrafficPolicy, names,
};
use steerage_watch::{Event, Index};

use super::port_endpoints::{Collected, PortEndpoints, PortUse};
use super::*;
use crate::local_node::LocalNode;

fn place(service: usize) -> LocalNode {
    let element_limits = ElementLimits { service, ..ElementLimits::default() };
    LocalNode { node: "here".to_owned(), element_limits, ..LocalNode::default() }
}

fn service(protocol: Protocol, ports: u16, external_ips: u8, policy: TrafficPolicy) -> Service {
    Service {
        kind: ServiceKind::ClusterIp,
        cluster_ips: vec![IpAddr::from([10, 96, 0, 1])],
        external_ips: (0..external_ips).map(|n| IpAddr::from([192, 0, 2, n])).collect(),
        ports: (1..=ports).map(|port| ServicePort::new(port.to_string(), protocol, port, None)).collect(),
        external_policy: policy,
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(Key::new("shop", "web"))
    }
}

/// Endpoints of which one in `local` is on this node, and one in `ending` terminates.
fn endpoints(count: u32, local: u32, ending: u32) -> Vec<Endpoint> {
    let endpoint = |n: u32| {
        let addr = IpAddr::V4(Ipv4Addr::from_bits(0x0af4_0000 + n));
        let terminates = n % ending == ending - 1;
        let ready = Endpoint::ready(addr, if n.is_multiple_of(local) { "here" } else { "there" });
        Endpoint { ready: !terminates, serving: true, terminating: terminates, ..ready }
    };
    (0..count).map(endpoint).collect()
}

fn index(service: &Service, endpoints: Vec<Endpoint>) -> Index {
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    let port = |port: &ServicePort| EndpointPort {
        name: port.name.clone(),
        protocol: port.protocol,
        port: 20_000 + port.port,
    };
    index.apply_slice(Event::Apply(EndpointSlice {
        ports: service.ports.iter().map(port).collect(),
        endpoints,
        ..EndpointSlice::new(Key::new("shop", "web-1"), service.key.clone(), Family::V4)
    }));
    index
}

/// The addresses in memory: frontends share lists.
fn addresses(plan: &ServicePlan) -> usize {
    let mut lists: BTreeMap<*const SocketAddr, usize> = BTreeMap::new();
    for (_, action) in &plan.frontends {
        let local = action.local.iter().map(|local| &local.list);
        for list in [&action.targets.list, &action.serving].into_iter().chain(local) {
            lists.insert(list.as_ptr(), list.len());
        }
    }
    lists.values().sum()
}

#[test]
fn plan_of_a_service_that_is_too_large_holds_few_addresses() {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            let service = service(protocol, 40, 3, policy);
            let index = index(&service, endpoints(2_000, 2, 3));
            let plan = plan_service(&service, &index, &place(1_000));
            // The lists, and for UDP those whose flows stay.
            let most = 1_000 * if protocol == Protocol::Udp { 3 } else { 1 };
            assert!((500..=most).contains(&addresses(&plan)), "{protocol} {policy:?}: {}", addresses(&plan));
            let needs = if protocol == Protocol::Udp { 78_000 } else { 53_000 };
            assert!(plan.cost() > needs, "{}", plan.cost());
        }
    }
    let tcp = service(Protocol::Tcp, 1, 1, TrafficPolicy::Cluster);
    let plan = plan_service(&tcp, &index(&tcp, endpoints(2_000, 2, 3)), &place(100_000));
    assert!(plan.frontends.iter().all(|(_, action)| action.serving.is_empty()), "only UDP flows are deleted");
    assert!(plan.frontends.iter().all(|(_, action)| action.targets.len() == 1_334));
    let plan = plan_service(&tcp, &index(&tcp, endpoints(26_000, 2, 3)), &place(100_000));
    assert!(plan.frontends.iter().all(|(_, action)| action.targets.len() == MOST_ENDPOINTS));
}

/// A list has no room for more endpoints, even if the Service may have more elements.
#[test]
fn list_that_is_too_long_is_reported() {
    let tcp = service(Protocol::Tcp, 1, 1, TrafficPolicy::Cluster);
    let plan = |ready: u32, limit: usize| {
        let all = endpoints(ready, 2, u32::MAX);
        let mut plan = plan_service(&tcp, &index(&tcp, all), &place(limit));
        let reduced = plan.reduce(limit, 7);
        (plan, reduced)
    };
    let (full, reduced) = plan(17_000, 100_000);
    let reduced = reduced.expect("too long");
    assert_eq!((reduced.endpoints, reduced.sources, reduced.frontends), (MOST_ENDPOINTS, 0, 0));
    assert!(reduced.needs <= reduced.limit, "{reduced:?}");
    assert_eq!(full.frontends[0].1.targets.len(), MOST_ENDPOINTS);
    let (_, reduced) = plan(17_000, 12_000);
    let reduced = reduced.expect("too large");
    assert!(reduced.endpoints < 12_000 && reduced.needs > reduced.limit, "{reduced:?}");
    assert_eq!(plan(16_384, 100_000).1, None);
}

#[test]
fn plan_of_a_service_that_is_too_large_has_few_frontends() {
    let service = service(Protocol::Tcp, 30, 200, TrafficPolicy::Cluster);
    let mut plan = plan_service(&service, &index(&service, endpoints(1, 1, 3)), &place(800));
    assert_eq!(plan.frontends.len(), 100);
    assert!(plan.cost() >= 30 * 201 * FRONTEND_ELEMENTS, "{}", plan.cost());
    let reduced = plan.reduce(800, 0).expect("too large");
    assert_eq!(reduced.frontends + plan.frontends.len(), 30 * 201);
    let cluster_ips = plan.frontends.iter().filter(|(_, action)| action.role == Role::ClusterIp);
    assert_eq!(cluster_ips.count(), 30, "they come first");
}

#[test]
fn collected_endpoints_never_exceed_twice_the_budget() {
    let all = endpoints(3_000, 2, 3);
    let backends: Vec<_> = all.iter().map(|endpoint| Backend { port: 80, endpoint }).collect();
    let mut collected = Collected::new(4_000, 7);
    for _ in 0..100 {
        let port = PortUse { protocol: Protocol::Udp, cluster: true, local: true };
        collected.add(PortEndpoints::new(&backends, port, &place(4_000)));
        assert!(collected.length() <= 8_000, "{}", collected.length());
    }
}

proptest! {
    /// What is left out at once would have been left out anyway.
    #[test]
    fn bounded_plan_is_reduced_to_what_the_whole_one_is(
        ports in 1_u16..20, count in 1_u32..400, local in 1_u32..4, ending in 1_u32..4, external_ips in 0_u8..4,
        udp: bool, local_policy: bool, limit in 256_usize..3_000,
    ) {
        let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
        let policy = if local_policy { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        let service = service(protocol, ports, external_ips, policy);
        let index = index(&service, endpoints(count, local, ending));
        let mut whole = plan_service(&service, &index, &place(1_000_000));
        let mut bounded = plan_service(&service, &index, &place(limit));
        for plan in [&whole, &bounded] {
            prop_assert!(least_needs(&service, &index, &place(limit)) <= plan.cost());
        }
        let seed = crate::hash::flow_seed("here");
        let (of_whole, of_bounded) = (whole.reduce(limit, seed), bounded.reduce(limit, seed));
        prop_assert_eq!(of_whole.is_some(), of_bounded.is_some());
        let without_needs = |reduced: Option<Reduced>| reduced.map(|reduced| Reduced { needs: 0, ..reduced });
        prop_assert_eq!(without_needs(of_whole), without_needs(of_bounded));
        let used = |plan: &ServicePlan| -> Vec<_> {
            let of = |(frontend, action): &(Frontend, Action)| {
                (*frontend, action.targets.clone(), action.local.clone(), action.reject)
            };
            plan.frontends.iter().map(of).collect()
        };
        prop_assert_eq!(used(&whole), used(&bounded));
        for (_, action) in &bounded.frontends {
            prop_assert!(action.serving.is_sorted());
            let local = action.local.iter().flat_map(|local| local.iter());
            let mut used = action.targets.iter().chain(local);
            prop_assert!(!udp || used.all(|endpoint| action.serving.contains(endpoint)));
        }
    }
}

/// Of thousands of ports with thousands of endpoints, few are looked at: those of this node, which are ready, before others.
#[test]
fn service_of_many_ports_and_endpoints_is_served_by_some() {
    let ports = 3_000;
    for (limit, policy) in [
        (100_000, TrafficPolicy::Local),
        (100_000, TrafficPolicy::Cluster),
        (10_000_000, TrafficPolicy::Local),
    ] {
        let service = service(Protocol::Tcp, ports, 1, policy);
        // Each hundredth is on this node, and ready.
        let index = index(&service, endpoints(2_000, 100, 7));
        let plan = plan_service(&service, &index, &place(limit));
        let local = plan.frontends.iter().filter_map(|(_, action)| action.local.as_ref());
        let ready_here = (0..2_000).filter(|n| n % 100 == 0 && n % 7 != 6).count();
        assert!(local.clone().all(|local| (1..=ready_here).contains(&local.len())), "{policy:?}");
        if limit == 10_000_000 {
            assert!(local.clone().all(|local| local.len() == ready_here), "all of them stay");
        }
        let looks: usize = plan.frontends.iter().map(|(_, action)| action.targets.len()).max().unwrap();
        assert!(looks <= 349, "{looks}");
        // Two frontends of each port, and what was not looked at.
        assert!(plan.cost() > 2 * usize::from(ports) + 3_000 * (2_000 - 349), "{}", plan.cost());
    }
}

/// A load balancer needs the VIP or the node port of a port, and nobody knows here which: a port that is served keeps both.
#[test]
fn ports_that_are_served_keep_vip_and_node_port() {
    let mut service = service(Protocol::Tcp, 10, 0, TrafficPolicy::Cluster);
    service.kind = ServiceKind::LoadBalancer;
    service.ingress = vec![Ingress { ip: "198.51.100.1".parse().ok(), hostname: None, ip_mode: None }];
    for port in &mut service.ports {
        port.node_port = Some(30_000 + port.port);
    }
    let node = IpAddr::from([10, 0, 0, 1]);
    let place = LocalNode { node_port_addresses: [node].into(), ..place(10_000) };
    let mut plan = plan_service(&service, &index(&service, endpoints(1, 1, 3)), &place);
    assert_eq!(plan.frontends.len(), 30);
    assert!(plan.reduce(256, 1).is_some());
    let of = |role| plan.frontends.iter().filter(|(_, action)| action.role == role).count();
    let (vips, node_ports) = (of(Role::Vip), of(Role::NodePort));
    assert_eq!(of(Role::ClusterIp), 10);
    assert!(vips > 1 && vips - node_ports <= 1, "{vips} VIPs, {node_ports} node ports");
}

/// The VIPs of both families, and of all ports, come before node ports at addresses that no load balancer sends to.
#[test]
fn node_ports_at_other_addresses_take_no_vips_place() {
    let mut service = service(Protocol::Tcp, 5, 0, TrafficPolicy::Cluster);
    service.kind = ServiceKind::LoadBalancer;
    service.cluster_ips.push("fd00::1".parse().unwrap());
    let ingress = |ip: &str| Ingress { ip: ip.parse().ok(), hostname: None, ip_mode: None };
    service.ingress = vec![ingress("198.51.100.1"), ingress("2001:db8::1")];
    for port in &mut service.ports {
        port.node_port = Some(30_000 + port.port);
    }
    let own = [IpAddr::from([10, 0, 0, 9]), "fd00:1::9".parse().unwrap()];
    let others = (1..=200).map(|last| IpAddr::from([10, 0, 1, last]));
    let node_port_addresses = others.chain(own).collect();
    let place = LocalNode { node_port_addresses, addresses: own.to_vec(), ..place(10_000) };
    let mut plan = plan_service(&service, &index(&service, endpoints(1, 1, 3)), &place);
    assert_eq!(plan.frontends.len(), 10 + 10 + 5 * 201 + 5);
    assert!(plan.reduce(1_000, 1).is_some());
    let of = |role, addr: &IpAddr| {
        plan.frontends.iter().filter(|(at, action)| action.role == role && at.addr == *addr).count()
    };
    for addr in service.vips() {
        assert_eq!(of(Role::Vip, &addr), 5, "{addr}");
    }
    for addr in &own {
        assert_eq!(of(Role::NodePort, addr), 5, "{addr}");
    }
}

/// Where a VIP is an address of node ports, the VIP comes first, also before a node port of another of the Service's ports.
#[test]
fn node_port_does_not_take_the_frontend_of_a_vip() {
    let node = IpAddr::from([10, 0, 0, 1]);
    let mut service = service(Protocol::Tcp, 2, 0, TrafficPolicy::Cluster);
    service.kind = ServiceKind::LoadBalancer;
    service.ingress = vec![Ingress { ip: Some(node), hostname: None, ip_mode: None }];
    (service.ports[1].port, service.ports[0].node_port) = (30_080, Some(30_080));
    let place = LocalNode { node_port_addresses: [node].into(), ..place(10_000) };
    let plan = plan_service(&service, &index(&service, endpoints(1, 1, 3)), &place);
    let roles: Vec<_> =
        plan.frontends.iter().filter(|(at, _)| (at.addr, at.port) == (node, 30_080)).collect();
    assert_eq!(roles.len(), 1);
    assert_eq!(roles[0].1.role, Role::Vip);
}

/// Each external IP counts at each port, whether there was room to look at it or not.
#[test]
fn external_ips_at_many_ports_are_counted() {
    let (ports, addresses) = (4_000, 200);
    let service = service(Protocol::Tcp, ports, addresses, TrafficPolicy::Cluster);
    let plan = plan_service(&service, &index(&service, endpoints(1, 1, 3)), &place(8_000));
    assert_eq!(plan.frontends.len(), 1_000, "as many as there is room for");
    let all = usize::from(ports) * (1 + usize::from(addresses));
    assert_eq!(plan.frontends.len() + plan.omitted.frontends, all);
}

/// Where few of very many endpoints are looked at, those of this node do not hide the others unless they can take their place.
#[test]
fn unusable_endpoints_of_the_node_hide_no_ready_ones() {
    let ports = 15_000;
    let service = service(Protocol::Tcp, ports, 0, TrafficPolicy::Cluster);
    let mut all = endpoints(200, u32::MAX, u32::MAX);
    for endpoint in all.iter_mut().take(100) {
        let unready = Endpoint::ready(endpoint.addr, "here");
        *endpoint = Endpoint { ready: false, serving: false, ..unready };
    }
    let plan = plan_service(&service, &index(&service, all), &place(100_000));
    assert!(plan.frontends.iter().all(|(_, action)| !action.reject && !action.targets.is_empty()));
}

/// A Service without a selector whose ports have slices of their own.
fn with_slices_of_ports(ports: u16, endpoints: impl Fn(u16) -> Vec<Endpoint>) -> (Service, Index) {
    let service = service(Protocol::Tcp, ports, 0, TrafficPolicy::Cluster);
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    for port in &service.ports {
        index.apply_slice(Event::Apply(EndpointSlice {
            ports: [EndpointPort { name: port.name.clone(), protocol: port.protocol, port: 80 }].into(),
            endpoints: endpoints(port.port),
            ..EndpointSlice::new(
                Key::new("shop", format!("web-{}", port.port)),
                service.key.clone(),
                Family::V4,
            )
        }));
    }
    (service, index)
}

/// Each endpoint counts at the ports that its slice has, and each port keeps an endpoint.
#[test]
fn ports_with_slices_of_their_own_are_served() {
    let of_port = |first: u16, count: u32| -> Vec<Endpoint> {
        let addr = |n: u32| Ipv4Addr::from_bits(0x0af4_0000 + u32::from(first) * 1_000 + n).into();
        (0..count).map(|n| Endpoint::ready(addr(n), "there")).collect()
    };
    let (service, index) = with_slices_of_ports(512, |port| of_port(port, 10));
    let plan = plan_service(&service, &index, &place(100_000));
    assert_eq!(plan.omitted, Omitted::default());
    assert!(plan.frontends.iter().all(|(_, action)| !action.reject && action.targets.len() == 10));
    // Far too many, but for the last port.
    let (service, index) = with_slices_of_ports(600, |port| of_port(port, if port == 600 { 1 } else { 900 }));
    let plan = plan_service(&service, &index, &place(100_000));
    assert!(plan.frontends.iter().all(|(_, action)| !action.reject && !action.targets.is_empty()));
    assert!((539_000..550_000).contains(&plan.cost()), "all are counted: {}", plan.cost());
}

/// Endpoints of this node that terminate are a last resort, and hide no ready ones of other nodes.
#[test]
fn terminating_endpoints_of_the_node_hide_no_ready_ones() {
    let ports = 4_000;
    for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
        let service = service(Protocol::Tcp, ports, 1, policy);
        let mut all = endpoints(200, u32::MAX, u32::MAX);
        for endpoint in all.iter_mut().take(100) {
            let here = Endpoint::ready(endpoint.addr, "here");
            *endpoint = Endpoint { ready: false, terminating: true, ..here };
        }
        let is_terminating = |of: &SocketAddr| endpoint_number_of(of.ip()) < 100;
        let plan = plan_service(&service, &index(&service, all), &place(100_000));
        for (_, action) in &plan.frontends {
            assert!(!action.targets.is_empty() && !action.targets.iter().any(is_terminating), "{policy:?}");
            let local = action.local.as_ref();
            assert!(local.is_none_or(|local| !local.is_empty() && local.iter().all(is_terminating)));
        }
        assert!(
            plan.frontends.iter().any(|(_, action)| action.local.is_some())
                == (policy == TrafficPolicy::Local)
        );
    }
}

/// Under internal policy Local, endpoints of other nodes are in no list.
#[test]
fn endpoints_of_other_nodes_make_no_local_service_too_large() {
    let service = Service {
        internal_policy: TrafficPolicy::Local,
        ..service(Protocol::Tcp, 3_000, 0, TrafficPolicy::Cluster)
    };
    let all = endpoints(2_000, 1_000, u32::MAX);
    let mut plan = plan_service(&service, &index(&service, all), &place(100_000));
    assert_eq!(plan.omitted, Omitted::default());
    assert_eq!(plan.reduce(100_000, 0), None);
    assert!(plan.frontends.iter().all(|(_, action)| action.targets.len() == 2));
}

/// What is too large in any case is known without the plan, and a small Service is no reason to look.
#[test]
fn least_needs_are_known_without_the_plan() {
    use ServiceKind::{ClusterIp, LoadBalancer};
    use TrafficPolicy::{Cluster, Local};

    let limit = 10_000;
    let least = |service: &Service, index: &Index| {
        let (least, plan) =
            (least_needs(service, index, &place(limit)), plan_service(service, index, &place(limit)));
        assert!(least <= plan.cost(), "{least}, {}", plan.cost());
        least
    };
    let vip = Ingress { ip: Some(IpAddr::from([192, 0, 2, 1])), hostname: None, ip_mode: None };
    let of_kind = |kind, internal_policy, external_policy| Service {
        kind,
        internal_policy,
        ingress: vec![vip.clone()],
        ..service(Protocol::Tcp, 100, 0, external_policy)
    };
    for (kind, internal, external, is_too_large) in [
        (ClusterIp, Cluster, Cluster, true),
        (ClusterIp, Local, Cluster, false),
        (LoadBalancer, Local, Cluster, true),
        (LoadBalancer, Local, Local, true),
    ] {
        let service = of_kind(kind, internal, external);
        let needs = least(&service, &index(&service, endpoints(200, 100, u32::MAX)));
        assert_eq!(needs >= limit, is_too_large, "{kind:?} {internal:?} {external:?}: {needs}");
    }
    // The first port has a slice of its own.
    let service = of_kind(ClusterIp, Cluster, Cluster);
    let mut index = index(&service, endpoints(200, 100, u32::MAX));
    let port = EndpointPort { name: "1".to_owned(), protocol: Protocol::Tcp, port: 1 };
    index.apply_slice(Event::Apply(EndpointSlice {
        ports: [port].into(),
        endpoints: endpoints(1, 1, u32::MAX),
        ..EndpointSlice::new(Key::new("shop", "web-2"), service.key.clone(), Family::V4)
    }));
    assert!(least(&service, &index) >= limit);
}

/// All ports usually have the same endpoints, which are chosen once; here each second port is not in one of the slices, or has another
/// number there.
#[test]
fn each_port_has_the_endpoints_of_its_slices() {
    let service = service(Protocol::Udp, 12, 0, TrafficPolicy::Local);
    let mut index = index(&service, endpoints(3, 2, 3));
    let port = |n: u16| EndpointPort {
        name: n.to_string(),
        protocol: Protocol::Udp,
        port: if n.is_multiple_of(4) { 9 } else { 20_000 + n },
    };
    let mut other = endpoints(5, 2, 3);
    for endpoint in &mut other {
        endpoint.addr = IpAddr::from([10, 245, 0, endpoint_number(endpoint)]);
    }
    index.apply_slice(Event::Apply(EndpointSlice {
        ports: (2..=12).step_by(2).map(port).collect(),
        endpoints: other,
        ..EndpointSlice::new(Key::new("shop", "web-2"), service.key.clone(), Family::V4)
    }));
    let plan = plan_service(&service, &index, &place(100_000));
    for port in &service.ports {
        let all = steerage_model::backends(index.slices(&service.key), Family::V4, &port.name, Protocol::Udp);
        let all: Vec<_> = all.iter().map(|b| SocketAddr::new(b.endpoint.addr, b.port)).collect();
        let (_, action) = plan.frontends.iter().find(|(frontend, _)| frontend.port == port.port).unwrap();
        assert_eq!(action.serving.to_vec(), all, "{}", port.name);
        assert_eq!(all.len(), if port.port % 2 == 0 { 8 } else { 3 });
        let ready = all.iter().filter(|endpoint| endpoint_number_of(endpoint.ip()) % 3 != 2);
        assert_eq!(action.targets.to_vec(), ready.copied().collect::<Vec<_>>());
    }
}

fn endpoint_number(endpoint: &Endpoint) -> u8 {
    endpoint_number_of(endpoint.addr)
}

fn endpoint_number_of(addr: IpAddr) -> u8 {
    let IpAddr::V4(addr) = addr else { panic!("of IPv4") };
    addr.octets()[3]
}

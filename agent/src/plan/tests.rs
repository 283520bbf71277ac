// SPDX-License-Identifier: Apache-2.0

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use steerage_model::{
    Affinity, Endpoint, EndpointPort, EndpointSlice, Family, Hints, Ingress, IpMode, Key, Node, Protocol,
    Service, ServiceKind, ServicePort, TrafficPolicy, names,
};
use steerage_watch::{Event, Index};

use super::*;
use crate::local_node::LocalNode;

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn ingress(ip: &str, ip_mode: Option<IpMode>) -> Ingress {
    Ingress { ip: Some(addr(ip)), hostname: None, ip_mode }
}

fn service(name: &str) -> Service {
    let port = ServicePort::new("web", Protocol::Tcp, 80, Some(30080));
    Service {
        kind: ServiceKind::LoadBalancer,
        cluster_ips: vec![addr("10.96.0.1")],
        ingress: vec![ingress("192.0.2.1", None)],
        ports: vec![port],
        health_check_node_port: Some(31000),
        proxy_name: Some(names::PROXY_NAME.to_owned()),
        ..Service::new(Key::new("shop", name))
    }
}

fn slice(name: &str, endpoints: Vec<Endpoint>) -> EndpointSlice {
    EndpointSlice {
        ports: [EndpointPort { name: "web".to_owned(), protocol: Protocol::Tcp, port: 8080 }].into(),
        endpoints,
        ..EndpointSlice::new(Key::new("shop", format!("{name}-1")), Key::new("shop", name), Family::V4)
    }
}

fn local_node() -> LocalNode {
    LocalNode {
        node: "here".to_owned(),
        addresses: vec![addr("10.0.0.1"), addr("fd00::1")],
        node_port_addresses: vec![addr("10.0.0.1"), addr("fd00::1")],
        ..LocalNode::default()
    }
}

fn index_of(service: &Service, endpoints: Vec<Endpoint>) -> Index {
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    index.apply_slice(Event::Apply(slice(service.key.name(), endpoints)));
    index
}

fn plan(service: &Service, endpoints: Vec<Endpoint>) -> ServicePlan {
    plan_service(service, &index_of(service, endpoints), &local_node())
}

fn both() -> Vec<Endpoint> {
    vec![Endpoint::ready(addr("10.244.0.1"), "here"), Endpoint::ready(addr("10.244.1.1"), "there")]
}

fn action<'a>(plan: &'a ServicePlan, at: &str) -> &'a Action {
    let at: SocketAddr = at.parse().unwrap();
    let found = plan.frontends.iter().find(|(f, _)| (f.addr, f.port) == (at.ip(), at.port()));
    &found.unwrap_or_else(|| panic!("no {at} in {plan:?}")).1
}

fn targets(list: &[SocketAddr]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

const HERE: &str = "10.244.0.1:8080";
const THERE: &str = "10.244.1.1:8080";

#[test]
fn which_services_are_served() {
    let named = |name: Option<&str>| Service { proxy_name: name.map(str::to_owned), ..service("web") };
    let cases = [
        (named(Some("steerage")), true, true),
        (named(None), false, true),
        (named(Some("other")), false, false),
        (Service { kind: ServiceKind::ExternalName, ..service("web") }, false, false),
        (Service { cluster_ips: Vec::new(), ..service("web") }, false, false),
        (Service { headless_label: true, ..service("web") }, false, false),
    ];
    for (service, labelled, all) in cases {
        assert_eq!((serves(&service, false), serves(&service, true)), (labelled, all), "{service:?}");
    }
}

#[test]
fn masquerade_all_concerns_cluster_ips_only() {
    let mut local = service("web");
    local.external_policy = TrafficPolicy::Local;
    let index = index_of(&local, both());
    let plan = plan_service(&local, &index, &LocalNode { masquerade_all: true, ..local_node() });
    assert_eq!(action(&plan, "10.96.0.1:80").masquerade, Masquerade::All);
    assert_eq!(
        action(&plan, "192.0.2.1:80").masquerade,
        Masquerade::HostOnly,
        "policy Local keeps the client's"
    );
}

#[test]
fn ports_without_local_endpoints_are_counted_by_family() {
    let mut local = service("web");
    local.internal_policy = TrafficPolicy::Local;
    let there = || vec![both().remove(1)];
    let gap = BTreeSet::from([(Family::V4, Protocol::Tcp, 80)]);
    let gaps = plan(&local, there()).local_gaps();
    assert_eq!((&gaps.internal, gaps.count(Family::V4), gaps.count(Family::V6)), (&gap, (1, 0), (0, 0)));
    local.external_policy = TrafficPolicy::Local;
    assert_eq!(plan(&local, there()).local_gaps(), LocalGaps { internal: gap.clone(), external: gap });
    assert!(plan(&local, both()).local_gaps().is_empty());
    assert!(
        plan(&local, Vec::new()).local_gaps().is_empty(),
        "a Service without endpoints lacks no local ones"
    );
}

#[test]
fn each_frontend_kind_has_its_targets_and_masquerade() {
    let mut local = service("web");
    local.external_policy = TrafficPolicy::Local;
    let plan = plan(&local, both());
    let internal = action(&plan, "10.96.0.1:80");
    assert_eq!(targets(&internal.targets), [HERE, THERE]);
    assert_eq!((&internal.local, internal.masquerade), (&None, Masquerade::AllButLocalPods));
    for external in ["192.0.2.1:80", "10.0.0.1:30080"] {
        let external = action(&plan, external);
        assert_eq!(targets(&external.targets), [HERE, THERE]);
        assert_eq!(targets(external.local.as_ref().unwrap()), [HERE]);
        assert_eq!(external.masquerade, Masquerade::HostOnly);
    }
    assert_eq!(plan.frontends.len(), 3, "no frontend of a family without cluster address");
    assert_eq!(plan.hairpins, [addr("10.244.0.1")]);
    assert_eq!(
        plan.health,
        Some(HealthPort {
            port: 31000,
            v4: Some(1),
            v6: None,
            vips: Arc::from(["192.0.2.1".parse().unwrap()])
        })
    );
}

#[test]
fn cluster_policy_masquerades_all_and_has_no_health_port() {
    let plan = plan(&service("web"), both());
    let external = action(&plan, "192.0.2.1:80");
    assert_eq!((external.masquerade, &external.local, external.reject), (Masquerade::All, &None, false));
    assert_eq!(plan.health, None);
}

#[test]
fn rejects_only_without_any_endpoint() {
    let mut local = service("web");
    (local.external_policy, local.internal_policy) = (TrafficPolicy::Local, TrafficPolicy::Local);
    let far = plan(&local, vec![Endpoint::ready(addr("10.244.1.1"), "there")]);
    let vip = action(&far, "192.0.2.1:80");
    assert_eq!(
        (vip.reject, vip.local.as_deref(), targets(&vip.targets)),
        (false, Some(&[][..]), vec![THERE.to_owned()])
    );
    let internal = action(&far, "10.96.0.1:80");
    assert_eq!((internal.reject, internal.targets.len()), (false, 0), "silence, not refusal");
    let none = plan(&local, Vec::new());
    assert!(none.frontends.iter().all(|(_, action)| action.reject));
}

#[test]
fn terminating_endpoints_take_traffic_but_do_not_count() {
    let mut leaving = Endpoint::ready(addr("10.244.0.1"), "here");
    (leaving.ready, leaving.terminating) = (false, true);
    let mut local = service("web");
    local.external_policy = TrafficPolicy::Local;
    let alone = plan(&local, vec![leaving.clone()]);
    assert_eq!(targets(action(&alone, "192.0.2.1:80").local.as_ref().unwrap()), [HERE]);
    assert_eq!(alone.health.as_ref().and_then(|health| health.v4), Some(0));
    let beside = plan(&local, vec![leaving.clone(), Endpoint::ready(addr("10.244.1.1"), "there")]);
    let vip = action(&beside, "192.0.2.1:80");
    assert_eq!(targets(&vip.targets), [THERE]);
    assert_eq!(targets(&vip.serving), [""; 0], "only UDP flows are deleted");
    local.ports[0].protocol = Protocol::Udp;
    let mut slice = slice("web", vec![leaving, Endpoint::ready(addr("10.244.1.1"), "there")]);
    slice.ports = [EndpointPort { name: "web".to_owned(), protocol: Protocol::Udp, port: 8080 }].into();
    let mut index = Index::default();
    index.apply_service(Event::Apply(local.clone()));
    index.apply_slice(Event::Apply(slice));
    let udp = plan_service(&local, &index, &local_node());
    for (_, action) in &udp.frontends {
        assert_eq!(targets(&action.serving), [HERE, THERE], "its flows are left alone");
    }
}

#[test]
fn only_addresses_that_packets_carry_become_frontends() {
    let mut service = service("web");
    service.ingress = vec![
        ingress("192.0.2.1", Some(IpMode::Proxy)),
        ingress("192.0.2.2", Some(IpMode::Vip)),
        ingress("2001:db8::1", None),
        Ingress { ip: None, hostname: Some("lb.example".to_owned()), ip_mode: None },
    ];
    service.external_ips = vec![addr("192.0.2.2"), addr("198.51.100.1")];
    service.source_ranges = vec!["203.0.113.0/24".parse().unwrap()];
    let plan = plan(&service, both());
    let mut addresses: Vec<_> = plan.frontends.iter().map(|(front, _)| front.addr.to_string()).collect();
    addresses.sort();
    assert_eq!(addresses, ["10.0.0.1", "10.96.0.1", "192.0.2.2", "198.51.100.1"]);
    assert!(action(&plan, "192.0.2.2:80").sources.is_some(), "it is a VIP first");
    assert!(
        action(&plan, "198.51.100.1:80").sources.is_none()
            && action(&plan, "10.0.0.1:30080").sources.is_none()
    );
}

#[test]
fn every_protocol_has_frontends_of_its_own() {
    let mut service = service("web");
    let port = |protocol| ServicePort::new("web", protocol, 80, (protocol != Protocol::Tcp).then_some(30080));
    service.ports = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].map(port).to_vec();
    let mut index = Index::default();
    index.apply_service(Event::Apply(service.clone()));
    let mut endpoints = slice("web", both());
    endpoints.ports = [(Protocol::Udp, 5353), (Protocol::Sctp, 3868)]
        .map(|(protocol, port)| EndpointPort { name: "web".to_owned(), protocol, port })
        .into();
    index.apply_slice(Event::Apply(endpoints));
    let plan = plan_service(&service, &index, &local_node());
    let lead = |protocol: Protocol, at: &str| {
        let at: SocketAddr = at.parse().unwrap();
        let front = Frontend { addr: at.ip(), protocol, port: at.port() };
        let found = plan.frontends.iter().find(|(of, _)| *of == front);
        found.map(|(_, action)| (action.reject, targets(&action.targets)))
    };
    for at in ["10.96.0.1:80", "192.0.2.1:80"] {
        assert_eq!(lead(Protocol::Tcp, at), Some((true, Vec::new())), "no endpoint of this protocol");
        for (protocol, number) in [(Protocol::Udp, 5353), (Protocol::Sctp, 3868)] {
            let both = ["10.244.0.1", "10.244.1.1"].map(|pod| format!("{pod}:{number}")).to_vec();
            assert_eq!(lead(protocol, at), Some((false, both.clone())));
            assert_eq!(lead(protocol, "10.0.0.1:30080"), Some((false, both)), "one number, two protocols");
        }
    }
    assert_eq!(lead(Protocol::Tcp, "10.0.0.1:30080"), None, "no node port, no frontend");
}

#[test]
fn topology_hints_limit_the_cluster_list_only() {
    let mut endpoints = both();
    endpoints.push(Endpoint::ready(addr("10.244.0.2"), "here"));
    for (endpoint, zone) in endpoints.iter_mut().zip(["far", "near", "far"]) {
        endpoint.hints = Some(Box::new(Hints { nodes: Vec::new(), zones: vec![zone.into()] }));
    }
    let mut local = service("web");
    local.external_policy = TrafficPolicy::Local;
    let mut index = Index::default();
    index.apply_slice(Event::Apply(slice("web", endpoints)));
    let local_node = LocalNode { zone: Some("near".to_owned()), ..local_node() };
    let plan = plan_service(&local, &index, &local_node);
    let vip = action(&plan, "192.0.2.1:80");
    assert_eq!(targets(&vip.targets), [THERE]);
    assert_eq!(targets(vip.local.as_ref().unwrap()), [HERE, "10.244.0.2:8080"]);
}

#[test]
fn source_ranges() {
    let sources = |ranges: &[&str]| {
        let mut service = service("web");
        service.source_ranges = ranges.iter().map(|net| net.parse().unwrap()).collect();
        let plan = plan(&service, both());
        let of = action(&plan, "192.0.2.1:80").sources.clone();
        of.map(|nets| nets.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    assert_eq!(sources(&[]), None);
    assert_eq!(sources(&["0.0.0.0/0", "203.0.113.0/24"]), None);
    assert_eq!(sources(&["203.0.113.7/24"]).unwrap(), ["203.0.113.0/24"]);
    assert_eq!(sources(&["203.0.113.0/25", "203.0.113.0/24"]).unwrap(), ["203.0.113.0/24"], "no overlap");
    // This node is in the range, and its packets to a VIP of its own carry that as source.
    assert_eq!(sources(&["10.0.0.0/24"]).unwrap(), ["10.0.0.0/24", "192.0.2.1/32"]);
    assert_eq!(sources(&["2001:db8::/64"]).unwrap(), [""; 0], "closed for the family that is not named");
}

#[test]
fn frontend_of_two_services_has_one_owner() {
    let (mut a, mut b) = (service("a"), service("b"));
    (a.cluster_ips, b.cluster_ips) = (vec![addr("10.96.0.1")], vec![addr("10.96.0.2")]);
    a.affinity = Some(Affinity { timeout: Duration::from_secs(5) });
    let vip = Frontend { addr: addr("192.0.2.1"), protocol: Protocol::Tcp, port: 80 };
    let mut desired = Desired::default();
    let plans: BTreeMap<_, _> = [&a, &b].map(|service| (service.key.clone(), plan(service, both()))).into();
    desired.update(plans);
    assert_eq!(desired.action(&vip).unwrap().affinity, Some(5));
    // The VIP moves to the other one.
    a.ingress.clear();
    let update: BTreeMap<_, _> = [(a.key.clone(), plan(&a, both()))].into();
    assert!(desired.affected_by(&update).frontends.contains(&vip));
    desired.update(update);
    assert_eq!(desired.action(&vip).unwrap().affinity, None);
    desired.update([(a.key, ServicePlan::default()), (b.key, ServicePlan::default())].into());
    assert_eq!(
        desired.actions().count() + desired.cluster_addresses().count() + desired.hairpins().count(),
        0
    );
}

fn desired_of(services: &[&Service]) -> Desired {
    let mut desired = Desired::default();
    for service in services {
        desired.update([(service.key.clone(), plan(service, both()))].into());
    }
    desired
}

fn external(name: &str, at: &str, port: u16) -> Service {
    let mut external = service(name);
    (external.kind, external.ingress, external.health_check_node_port) =
        (ServiceKind::ClusterIp, Vec::new(), None);
    (external.cluster_ips, external.external_ips) = (vec![addr("10.96.0.9")], vec![addr(at)]);
    external.ports[0].port = port;
    external
}

/// The first Service by name must not take what the API server assigned to another.
#[test]
fn external_ip_takes_nothing_from_another_service() {
    let victim = Service { external_policy: TrafficPolicy::Local, ..service("web") };
    for (at, port, winner) in [
        ("10.96.0.1", 80, Some(Role::ClusterIp)),
        ("192.0.2.1", 80, Some(Role::Vip)),
        ("10.0.0.1", 30080, Some(Role::NodePort)),
        ("10.0.0.1", 31000, None),
    ] {
        let thief = external("a", at, port);
        let frontend = Frontend { addr: addr(at), protocol: Protocol::Tcp, port };
        for order in [[&thief, &victim], [&victim, &thief]] {
            let mut desired = desired_of(&order);
            assert_eq!(desired.action(&frontend).map(|action| action.role), winner, "{at}:{port}");
            let shadowed = Shadowed { service: thief.key.clone(), by: victim.key.clone(), frontend };
            assert_eq!((desired.take_shadowed(), desired.shadowed_count()), ([shadowed].into(), 1));
            desired.update([(thief.key.clone(), plan(&thief, Vec::new()))].into());
            assert_eq!(desired.take_shadowed(), [].into(), "reported once");
            desired.update([(victim.key.clone(), ServicePlan::default())].into());
            assert_eq!(desired.action(&frontend).map(|action| action.role), Some(Role::ExternalIp));
            assert_eq!(desired.shadowed_count(), 0);
        }
    }
}

/// Whatever its name, and in whatever order the agent sees them.
#[test]
fn oldest_service_with_a_frontend_is_served() {
    let mut services = ["a", "b", "c"].map(|name| external(name, "198.51.100.1", 80));
    for (service, created) in services.iter_mut().zip([30, 10, 20]) {
        service.created = created;
    }
    let [a, b, c] = &services;
    let frontend = Frontend { addr: addr("198.51.100.1"), protocol: Protocol::Tcp, port: 80 };
    for order in [[a, b, c], [c, b, a], [b, a, c]] {
        let desired = desired_of(&order);
        assert_eq!(desired.owners(&frontend).map(Key::name).collect::<Vec<_>>(), ["b", "c", "a"]);
    }
}

/// The address of a load balancer may be one of the node.
#[test]
fn load_balancer_comes_before_a_node_port_and_that_before_an_external_ip() {
    let mut of_vip = Service { created: 30, ingress: vec![ingress("10.0.0.1", None)], ..service("vip") };
    of_vip.ports = vec![ServicePort::new("web", Protocol::Tcp, 30080, None)];
    let of_node_port = Service { created: 20, ingress: Vec::new(), ..service("node-port") };
    let of_external_ip = Service { created: 10, ..external("external", "10.0.0.1", 30080) };
    let frontend = Frontend { addr: addr("10.0.0.1"), protocol: Protocol::Tcp, port: 30080 };
    let all = [&of_vip, &of_node_port, &of_external_ip];
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let desired = desired_of(&order.map(|at| all[at]));
        let owners: Vec<_> = desired.owners(&frontend).map(Key::name).collect();
        assert_eq!(owners, ["vip", "node-port", "external"]);
    }
}

#[test]
fn reserved_external_ips_are_refused() {
    let external_ips = ExternalIps {
        denied: false,
        service_cidrs: vec!["10.96.0.0/16".parse().unwrap(), "fd96::/112".parse().unwrap()],
        pods: vec!["10.244.0.0/24".parse().unwrap()],
        node: vec![addr("10.0.0.1")],
        api_servers: vec!["10.0.0.9:80".parse().unwrap(), "198.51.100.1:6443".parse().unwrap()],
        cluster: ClusterNodes::default(),
    };
    let mut node = LocalNode { external_ips, ..local_node() };
    let mut service = external("a", "198.51.100.1", 80);
    service.external_ips =
        ["198.51.100.1", "10.96.7.7", "10.0.0.1", "10.0.0.9", "fd96::1", "10.244.0.7"].map(addr).to_vec();
    let mut index = Index::default();
    index.apply_slice(Event::Apply(slice("a", both())));
    let served = |plan: &ServicePlan| -> Vec<String> {
        let external = plan.frontends.iter().filter(|(_, action)| action.role == Role::ExternalIp);
        external.map(|(frontend, _)| frontend.addr.to_string()).collect()
    };
    let found = plan_service(&service, &index, &node);
    assert_eq!(served(&found), ["198.51.100.1"]);
    let refused = [
        ("10.96.7.7", Refusal::ServiceCidr),
        ("10.0.0.1", Refusal::Node),
        ("10.0.0.9", Refusal::ApiServer),
        ("fd96::1", Refusal::ServiceCidr),
        ("10.244.0.7", Refusal::Pod),
    ];
    assert_eq!(found.refused, refused.map(|(at, why)| (addr(at), why)));

    let mut desired = Desired::default();
    desired.update([(service.key.clone(), found.clone())].into());
    assert_eq!((desired.take_refused().len(), desired.refused_count()), (5, 5));
    desired.update([(service.key.clone(), found)].into());
    assert_eq!((desired.take_refused().len(), desired.refused_count()), (0, 5), "reported once");

    node.external_ips.denied = true;
    let found = plan_service(&service, &index, &node);
    assert_eq!((served(&found).len(), found.refused.len()), (0, 6));
    desired.update([(service.key.clone(), found)].into());
    assert_eq!((desired.take_refused().len(), desired.refused_count()), (6, 6));
    desired.update([(service.key, ServicePlan::default())].into());
    assert_eq!(desired.refused_count(), 0);
}

#[test]
fn addresses_and_pods_of_other_nodes_are_refused_as_external_ips() {
    let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect();
    let others = [
        Node {
            addresses: vec![addr("10.0.0.2"), addr("fd00::2")],
            external_addresses: vec![addr("203.0.113.2")],
            pod_cidrs: nets(&["10.244.2.0/24", "fd44:2::/64"]),
            ..Node::default()
        },
        Node { addresses: vec![addr("10.0.0.3")], pod_cidrs: nets(&["10.245.0.0/20"]), ..Node::default() },
    ];
    let mut node = local_node();
    node.external_ips.node = vec![addr("10.0.0.2")];
    node.external_ips.cluster = ClusterNodes::Known(Arc::new(others.iter().collect()));
    for (at, refusal) in [
        ("10.0.0.2", Some(Refusal::Node)),
        ("fd00::2", Some(Refusal::OtherNode)),
        ("203.0.113.2", Some(Refusal::OtherNode)),
        ("10.0.0.3", Some(Refusal::OtherNode)),
        ("10.244.2.255", Some(Refusal::Pod)),
        ("10.245.15.1", Some(Refusal::Pod)),
        ("fd44:2::1", Some(Refusal::Pod)),
        ("10.244.3.1", None),
        ("10.245.16.1", None),
        ("fd44:3::1", None),
        ("203.0.113.3", None),
    ] {
        let plan = plan_service(&external("a", at, 80), &Index::default(), &node);
        assert_eq!(plan.refused, refusal.map(|why| (addr(at), why)).into_iter().collect::<Vec<_>>(), "{at}");
        let is_served = plan.frontends.iter().any(|(_, action)| action.role == Role::ExternalIp);
        let family = Family::of(addr(at));
        assert_eq!(is_served, refusal.is_none() && family == Family::V4, "{at}");
    }
    node.external_ips.cluster = ClusterNodes::Awaited;
    let plan = plan_service(&external("a", "203.0.113.3", 80), &Index::default(), &node);
    assert!(plan.frontends.iter().all(|(_, action)| action.role != Role::ExternalIp));
    assert_eq!(plan.refused, [], "within seconds it is served");
}

/// The agent's rules come before kube-proxy's, so a labelled Service must not take what kube-proxy serves.
#[test]
fn external_ip_takes_nothing_from_a_service_of_another_proxy() {
    let dns = Service { proxy_name: None, ..service("kube-dns") };
    for (at, port) in [("10.96.0.1", 80), ("192.0.2.1", 80), ("10.0.0.1", 30080)] {
        let thief = external("a", at, port);
        let frontend = Frontend { addr: addr(at), protocol: Protocol::Tcp, port };
        for order in [[&thief, &dns], [&dns, &thief]] {
            let mut desired = desired_of(&order);
            assert_eq!(desired.action(&frontend), None, "{at}:{port}");
            assert_eq!(desired.reserved_at(&frontend), Some(&dns.key));
            desired.update([(dns.key.clone(), ServicePlan::default())].into());
            assert_eq!(desired.action(&frontend).map(|action| action.role), Some(Role::ExternalIp));
        }
    }
}

proptest! {
    #[test]
    fn external_ips_never_own_what_another_service_was_assigned(
        cluster in proptest::collection::vec((0_u8..6, proptest::collection::vec(0_usize..9, 0..3), any::<bool>()), 1..12)
    ) {
        let external = ["10.96.0.1", "10.96.0.2", "192.0.2.1", "192.0.2.2", "10.0.0.1"].map(addr);
        let mut desired = Desired::default();
        let mut plans = BTreeMap::new();
        for (n, picks, is_local) in &cluster {
            let mut service = service(&n.to_string());
            service.cluster_ips = vec![IpAddr::from([10, 96, 0, *n])];
            service.ingress = vec![ingress(&format!("192.0.2.{n}"), None)];
            service.ports[0].node_port = Some(30080 + u16::from(*n));
            service.health_check_node_port = Some(31000 + u16::from(*n));
            service.external_policy = if *is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
            service.external_ips = picks.iter().filter_map(|pick| external.get(*pick).copied()).collect();
            for (i, number) in [30080, 30081, 31000, 31001].into_iter().enumerate() {
                let name = format!("more-{i}");
                service.ports.push(ServicePort::new(name, Protocol::Tcp, number, None));
            }
            let plan = plan(&service, both());
            desired.update([(service.key.clone(), plan.clone())].into());
            plans.insert(service.key, plan);
        }
        for plan in plans.values() {
            for (frontend, _) in plan.frontends.iter().filter(|(_, action)| action.role != Role::ExternalIp) {
                prop_assert!(desired.action(frontend).is_some_and(|action| action.role != Role::ExternalIp));
            }
            for frontend in &plan.reserved {
                prop_assert!(desired.action(frontend).is_none_or(|action| action.role != Role::ExternalIp));
            }
        }
        let mut fresh = Desired::default();
        fresh.update(plans);
        prop_assert!(desired.actions().eq(fresh.actions()), "the order of updates decides nothing");
    }
}

#[test]
fn only_packets_to_vips_without_local_endpoint_are_forwarded_to_other_nodes() {
    let mut peers = PeerNodes::new(1);
    peers.set("there", PeerAddresses { v4: Some(addr("10.0.0.2")), v6: None });
    let node = LocalNode { peers: Some(Arc::new(peers)), ..local_node() };
    let mut service = service("web");
    service.external_ips = vec![addr("198.51.100.1")];
    let forwarded = |service: &Service, endpoints: Vec<Endpoint>, node: &LocalNode| {
        let mut index = Index::default();
        index.apply_slice(Event::Apply(slice("web", endpoints)));
        let mut plan = plan_service(service, &index, node);
        let at = |plan: &ServicePlan| {
            let with_peers = plan.frontends.iter().filter(|(_, action)| action.peers.is_some());
            with_peers.map(|(frontend, _)| frontend.to_string()).collect::<Vec<_>>()
        };
        let before = at(&plan);
        plan.fall_back_to_cluster_policy();
        assert!(at(&plan).is_empty(), "the policy was Cluster just now");
        before
    };
    let there = || vec![Endpoint::ready(addr("10.244.1.1"), "there")];
    assert!(forwarded(&service, there(), &node).is_empty(), "policy Cluster");
    service.external_policy = TrafficPolicy::Local;
    assert_eq!(forwarded(&service, there(), &node), ["192.0.2.1:80/TCP"]);
    assert!(forwarded(&service, there(), &local_node()).is_empty(), "it is off");
    assert!(forwarded(&service, both(), &node).is_empty(), "an endpoint is here");
    assert!(forwarded(&service, Vec::new(), &node).is_empty(), "none anywhere: rejected");
    let elsewhere = vec![Endpoint::ready(addr("10.244.1.1"), "off-link")];
    assert!(forwarded(&service, elsewhere, &node).is_empty());
}

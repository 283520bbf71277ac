// SPDX-License-Identifier: Apache-2.0
//! Plans of Services, table by table, and the properties of any plan.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ipnet::{IpNet, Ipv4Net};
use proptest::prelude::*;
use serde_json::json;
use steerage_model::{
    Affinity, Endpoint, EndpointSlice, Family, IneligibleReason, Ingress, Key, Node, NodeAgent, Protocol,
    Service, ServiceKind, ServicePort, TrafficPolicy, annotations, names,
};
use steerage_provider_api::{Addressing, HealthProtocol, SharedSet, Steering, Target, TargetSet};

use super::targets::TargetReason;
use super::*;

mod node_labels;

use node_labels::{choosing, web};

fn config() -> Config {
    Config::with_defaults(steerage_provider_edge::capabilities(), Steering::HealthCheck)
}

fn service() -> Service {
    let mut service = Service::new(Key::new("default", "web"));
    service.uid = "u".to_owned();
    service.kind = ServiceKind::LoadBalancer;
    service.class = Some("steerage.dev/edge".to_owned());
    service.cluster_ips = vec!["10.96.0.1".parse().expect("ip")];
    service.families = vec![Family::V4];
    service.ports = vec![ServicePort::new("", Protocol::Tcp, 80, Some(30080))];
    service.external_policy = TrafficPolicy::Local;
    service.health_check_node_port = Some(32000);
    service
}

fn annotated(name: &str, value: &str) -> Service {
    let mut service = service();
    service.annotations.insert(name.to_owned(), value.to_owned());
    service
}

fn plan_of(service: &Service, config: &Config) -> Result<steerage_provider_api::LoadBalancer, PlanError> {
    load_balancer(service, steering(service, config)?, config)
}

#[test]
fn unsupported_services_are_refused_with_their_reason() {
    let with = |change: fn(&mut Service)| {
        let mut service = service();
        change(&mut service);
        service
    };
    for (service, reason) in [
        (with(|s| s.ports.clear()), "NoPorts"),
        (with(|s| s.ports[0].protocol = Protocol::Sctp), "ProtocolNotSupported"),
        (with(|s| s.cluster_ips.clear()), "NoIPFamily"),
        (with(|s| s.health_check_node_port = None), "NoHealthCheckNodePort"),
        (with(|s| s.load_balancer_ip = Some("ten".to_owned())), "InvalidRequestedAddress"),
        (annotated(annotations::ADDRESSES, "10.0.0.1,,"), "InvalidRequestedAddress"),
        (annotated(annotations::STEERING, "magic"), "UnknownSteering"),
        (annotated("steerage.dev/health-check-interval", "often"), "InvalidAnnotation"),
        (annotated("steerage.dev/health-check-interval", "10ms"), "InvalidAnnotation"),
        (annotated("steerage.dev/health-check-interval", "10"), "InvalidAnnotation"),
        (annotated("steerage.dev/health-check-timeout", "2s"), "InvalidAnnotation"),
        (annotated("steerage.dev/health-check-healthy-threshold", "0"), "InvalidAnnotation"),
        (annotated("steerage.dev/health-check-unhealthy-threshold", "-1"), "InvalidAnnotation"),
    ] {
        assert_eq!(plan_of(&service, &config()).map_err(|error| error.reason()), Err(reason));
    }
}

/// Service proxies write each range for each port on every node.
#[test]
fn ports_times_source_ranges_have_a_limit() {
    let with = |ports: u16, ranges: u16| {
        let mut service = service();
        service.ports =
            (1..=ports).map(|port| ServicePort::new(format!("p{port}"), Protocol::Tcp, port, None)).collect();
        let range = |i: u16| format!("10.{}.{}.0/24", i / 256, i % 256).parse().expect("range");
        service.source_ranges = (0..ranges).map(range).collect();
        plan_of(&service, &config()).map(|_| ())
    };
    for (ports, ranges) in [(1000, 0), (1000, 10), (10, 1000), (1, 10_000)] {
        assert_eq!(with(ports, ranges), Ok(()), "{ports} {ranges}");
    }
    for (ports, ranges) in [(400, 1000), (1001, 10), (10, 1001)] {
        let error = with(ports, ranges).expect_err("refused");
        assert_eq!(error.reason(), "TooManySourceRanges", "{ports} {ranges}");
        let text = error.to_string();
        assert!(text.contains(&ports.to_string()) && text.contains(&ranges.to_string()), "{text}");
    }
}

/// Nothing is gained by the refusal of one that kube-proxy has written, and its load balancer is repaired as before.
#[test]
fn published_service_has_no_limit_of_source_ranges() {
    let mut service = service();
    service.source_ranges = (0..10_001_u32).map(|i| IpNet::V4(Ipv4Net::new_assert(i.into(), 32))).collect();
    assert_eq!(
        plan_of(&service, &config()).map(drop).map_err(|error| error.reason()),
        Err("TooManySourceRanges")
    );
    service.ingress = vec![Ingress { ip: Some([192, 0, 2, 1].into()), hostname: None, ip_mode: None }];
    assert_eq!(plan_of(&service, &config()).map(drop), Ok(()));
}

/// An annotation may have 256 KiB, and conditions and logs repeat what is wrong.
#[test]
fn long_annotations_are_not_repeated_whole() {
    let (long, mut refused) = ("x".repeat(200_000), 0);
    for known in annotations::ALL {
        let service = annotated(known.name, &long);
        let mut told = Vec::from_iter(plan_of(&service, &config()).err().map(|error| error.to_string()));
        if let LegacyRequest::Invalid(message) = legacy_request(&service) {
            told.push(message);
        }
        assert!(told.iter().all(|message| message.len() < 1000), "{}", known.name);
        refused += told.len();
    }
    assert!(refused > 6, "{refused}");
}

#[test]
fn the_providers_capabilities_bound_the_plan() {
    let mut config = config();
    config.capabilities.addressing = Addressing::NodePort;
    config.capabilities.ipv6 = false;
    config.capabilities.steerings = &[Steering::Api];
    config.default_steering = Steering::Api;
    let mut ports = service();
    ports.ports[0].node_port = None;
    assert_eq!(plan_of(&ports, &config), Err(PlanError::NoNodePort { port: 80 }));
    let mut dual = service();
    dual.families.push(Family::V6);
    assert_eq!(plan_of(&dual, &config), Err(PlanError::IpFamilyNotSupported(Family::V6)));
    for steering in ["health-check", "fused"] {
        let error = plan_of(&annotated(annotations::STEERING, steering), &config).expect_err("refused");
        assert_eq!(error.reason(), "SteeringNotSupported");
        assert_eq!(error.to_string(), format!("The provider does not support the steering {steering}"));
    }
    config.capabilities.affinity = false;
    let mut sticky = service();
    sticky.affinity = Some(Affinity { timeout: Duration::from_secs(9) });
    assert_eq!(plan_of(&sticky, &config).expect("a plan").groups[0].affinity, None);
}

#[test]
fn the_health_check_follows_policy_steering_and_label() {
    for (policy, steering, labelled, port) in [
        (TrafficPolicy::Local, "health-check", false, 32000),
        (TrafficPolicy::Local, "health-check", true, 32000),
        (TrafficPolicy::Local, "fused", false, 32000),
        (TrafficPolicy::Local, "fused", true, 32000),
        (TrafficPolicy::Local, "api", false, 10256),
        (TrafficPolicy::Local, "api", true, 10356),
        (TrafficPolicy::Cluster, "health-check", false, 10256),
        (TrafficPolicy::Cluster, "fused", false, 10256),
        (TrafficPolicy::Cluster, "api", true, 10356),
    ] {
        let mut service = annotated(annotations::STEERING, steering);
        service.external_policy = policy;
        service.proxy_name = labelled.then(|| names::PROXY_NAME.to_owned());
        let check = plan_of(&service, &config()).expect("a plan").groups[0].health_check.clone();
        assert_eq!(
            (check.port, check.protocol),
            (Some(port), HealthProtocol::Http { path: "/healthz".to_owned() })
        );
    }
}

#[test]
fn the_health_check_is_bounded_by_the_provider_and_changed_by_annotations() {
    let mut config = config();
    let plain = plan_of(&service(), &config).expect("a plan").groups[0].health_check.clone();
    assert_eq!((plain.interval, plain.timeout), (Duration::from_secs(1), Duration::from_millis(800)));
    config.capabilities.health_interval = (Duration::from_secs(5), Duration::from_mins(5));
    let slow = plan_of(&service(), &config).expect("a plan").groups[0].health_check.clone();
    assert_eq!((slow.interval, slow.timeout), (Duration::from_secs(5), Duration::from_secs(4)));
    let mut tuned = annotated("steerage.dev/health-check-interval", "10s");
    tuned.annotations.insert("steerage.dev/health-check-timeout".to_owned(), "500ms".to_owned());
    tuned.annotations.insert("steerage.dev/health-check-healthy-threshold".to_owned(), "3".to_owned());
    tuned.annotations.insert("steerage.dev/health-check-unhealthy-threshold".to_owned(), "4".to_owned());
    let check = plan_of(&tuned, &config).expect("a plan").groups[0].health_check.clone();
    assert_eq!((check.interval, check.timeout), (Duration::from_secs(10), Duration::from_millis(500)));
    assert_eq!((check.healthy_threshold, check.unhealthy_threshold), (3, 4));
}

#[test]
fn the_controllers_own_writes_change_no_plan() {
    let mut noted = service();
    noted.annotations.insert(annotations::PROVIDER.to_owned(), "edge".to_owned());
    noted.finalizers.push(names::FINALIZER.to_owned());
    noted.generation = Some(2);
    assert_eq!(plan_of(&noted, &config()), plan_of(&service(), &config()));
    assert_eq!(fingerprint(&noted), fingerprint(&service()));
    assert_ne!(fingerprint(&annotated(annotations::STEERING, "api")), fingerprint(&service()));
}

fn node(name: &str, change: fn(&mut Node)) -> Node {
    let mut node =
        Node { name: name.to_owned(), addresses: vec!["10.0.0.1".parse().expect("ip")], ..Node::default() };
    change(&mut node);
    node
}

fn slice(endpoints: Vec<Endpoint>) -> EndpointSlice {
    let service = Key::new("default", "web");
    EndpointSlice { endpoints, ..EndpointSlice::new(service.clone(), service, Family::V4) }
}

fn ready(node: &str, last: u8) -> Endpoint {
    Endpoint::ready([10, 2, 0, last].into(), node)
}

/// The targets as `name*weight`, or the name of the shared set.
fn shown(
    service: &Service,
    slices: &[EndpointSlice],
    nodes: &NodeTargets,
    mode: Steering,
) -> (String, TargetPlan) {
    let labels = node_labels(service, &config()).expect("readable labels");
    let endpoints = EndpointSummary::new(slices.iter());
    let plan = targets(service, &endpoints, nodes, mode, labels.as_ref(), &config());
    let list: Vec<String> = plan.set.targets.iter().map(|t| format!("{}*{}", t.node, t.weight)).collect();
    (format!("{}{}", plan.set.shared.map_or("", SharedSet::as_str), list.join(",")), plan)
}

#[test]
fn api_steering_chooses_nodes_with_endpoints_and_falls_back_before_it_is_empty() {
    let nodes = [
        node("a", |_| ()),
        node("b", |_| ()),
        node("gone", |n| n.autoscaler_taint = true),
        node("out", |n| n.excluded = true),
    ];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let of = |endpoints: Vec<Endpoint>| shown(&service(), &[slice(endpoints)], &nodes, Steering::Api);
    assert_eq!(of(vec![ready("a", 1), ready("a", 2), ready("b", 3)]).0, "a*2,b*1");
    assert_eq!(of(vec![ready("a", 1), ready("gone", 2)]).0, "a*1");
    let (list, plan) = of(vec![ready("gone", 1), ready("out", 2)]);
    assert_eq!(list, "gone*1,out*1", "no eligible node has one");
    assert_eq!(plan.ineligible.len(), 2);
    // The health check of their service proxy fails: a provider that does not fail open looks at their port.
    let mut closed = config();
    closed.capabilities.fails_open = false;
    let checked = |steering, config: &Config, plan: &TargetPlan| {
        let lb = load_balancer(&service(), steering, config).expect("planned");
        let check = with_last_resort(lb, plan, config).groups.remove(0).health_check;
        (check.protocol == HealthProtocol::Tcp && check.port.is_none(), check.port)
    };
    assert_eq!(checked(Steering::Api, &closed, &plan), (true, None));
    assert_eq!(checked(Steering::HealthCheck, &closed, &plan), (false, Some(32000)));
    assert_eq!(checked(Steering::Api, &config(), &plan), (false, Some(10256)));
    let eligible = of(vec![ready("a", 1)]).1;
    assert_eq!(checked(Steering::Api, &closed, &eligible), (false, Some(10256)));
    let nowhere = Endpoint { node: None, ..ready("a", 1) };
    assert_eq!(of(vec![nowhere]).0, "eligiblea*1,b*1", "an endpoint without a node");
    assert_eq!(of(vec![ready("unknown", 1)]).0, "eligiblea*1,b*1", "a node that has not been seen yet");
    assert_eq!(of(Vec::new()).0, "");
    assert!(!EndpointSummary::new([slice(Vec::new())].iter()).is_usable);
    let unready = Endpoint { ready: false, serving: false, ..ready("a", 1) };
    assert_eq!(of(vec![unready]).0, "");
}

#[test]
fn draining_nodes_leave_the_targets_and_are_named_beside_them() {
    let all = [
        node("a", |_| ()),
        node("b", |n| n.drain_requested = true),
        node("c", |n| n.shutting_down = true),
        node("d", |n| n.cordoned = true),
        node("e", |n| (n.excluded, n.deleting) = (true, true)),
    ];
    let draining = |plan: &TargetPlan| -> Vec<String> {
        plan.set.draining.iter().map(|node| format!("{} {:?}", node.target.node, node.reason)).collect()
    };
    let shared = |nodes: &NodeTargets| shown(&service(), &[], nodes, Steering::HealthCheck);
    let nodes = NodeTargets::new(all.iter(), 1, &NodeTargets::default(), false);
    let (list, plan) = shared(&nodes);
    assert_eq!(list, "eligiblea*1,d*1");
    assert_eq!(draining(&plan), ["b DrainRequested", "c ShuttingDown"], "an excluded node was no target");
    let cordoned = NodeTargets::new(all.iter(), 2, &nodes, true);
    let (list, plan) = shared(&cordoned);
    assert_eq!(list, "eligiblea*1");
    assert_eq!(draining(&plan), ["b DrainRequested", "c ShuttingDown", "d Cordoned"]);
    let endpoints = [slice(vec![ready("a", 1), ready("c", 2), ready("d", 3)])];
    let (list, plan) = shown(&service(), &endpoints, &cordoned, Steering::Api);
    assert_eq!(
        (list.as_str(), draining(&plan)),
        ("a*1", vec!["c ShuttingDown".to_owned(), "d Cordoned".to_owned()])
    );
    // Another reason is a change of the set: the edge reports it.
    let deleted = all.clone().map(|node| Node { deleting: node.name == "b" || node.deleting, ..node });
    let after = NodeTargets::new(deleted.iter(), 3, &cordoned, true);
    let change = NodeChange::between(&cordoned, &after, ["b".to_owned()].into());
    assert_eq!(change.sets, [SharedSet::Eligible]);
    // A decided drain is never held; cordoned nodes may all be so by mistake.
    assert_eq!(["b", "c", "d"].map(|node| cordoned.staying(node).is_some()), [false, false, true]);
}

#[test]
fn other_modes_choose_all_eligible_nodes() {
    let nodes = [
        node("a", |n| n.agent = Some(NodeAgent { mode: "labelled".to_owned(), version: "1".to_owned() })),
        node("b", |_| ()),
        node("x", |n| n.deleting = true),
    ];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let slices = [slice(vec![ready("a", 1)])];
    assert_eq!(shown(&service(), &slices, &nodes, Steering::HealthCheck).0, "eligiblea*1,b*1");
    let mut cluster = service();
    cluster.external_policy = TrafficPolicy::Cluster;
    assert_eq!(shown(&cluster, &slices, &nodes, Steering::Api).0, "eligiblea*1,b*1");
    cluster.proxy_name = Some(names::PROXY_NAME.to_owned());
    let (list, plan) = shown(&cluster, &slices, &nodes, Steering::Api);
    assert_eq!(list, "agentsa*1");
    assert!(matches!(&*plan.without_agent, [missing] if missing.node == "b"), "{plan:?}");
}

/// All but the nodes with an endpoint is as under `health-check` steering, so that a change between the two moves nothing.
#[test]
fn fused_steering_adds_the_nodes_with_an_endpoint_to_the_plan_of_health_check_steering() {
    let agent = NodeAgent { mode: "labelled".to_owned(), version: "1".to_owned() };
    let all = [
        Node { agent: Some(agent), ..node("a", |_| ()) },
        node("b", |n| n.drain_requested = true),
        node("c", |n| n.labels = Arc::new([("disk".to_owned(), "ssd".to_owned())].into())),
    ];
    let nodes = NodeTargets::new(all.iter(), 1, &NodeTargets::default(), false);
    let terminating =
        |node: &str, last| Endpoint { ready: false, serving: true, terminating: true, ..ready(node, last) };
    let nowhere = Endpoint { node: None, ..ready("a", 9) };
    let mut labelled = service();
    labelled.proxy_name = Some(names::PROXY_NAME.to_owned());
    let chosen = annotated(annotations::TARGET_NODE_LABELS, "disk=ssd");
    for service in [service(), labelled, chosen] {
        for (endpoints, listed) in [
            (vec![ready("c", 1), ready("a", 2), ready("c", 3)], Some(&["a", "c"][..])),
            (vec![ready("b", 1), terminating("a", 2)], Some(&["b"])),
            (vec![terminating("a", 1)], Some(&["a"])),
            (vec![ready("unknown", 1)], None),
            (vec![ready("unknown", 1), ready("a", 1)], Some(&["a"])),
            (vec![terminating("unknown", 1)], None),
            (vec![], Some(&[])),
            (vec![nowhere.clone()], None),
            (vec![nowhere.clone(), ready("a", 1)], Some(&["a"])),
        ] {
            let slices = [slice(endpoints)];
            let [checked, fused] = [Steering::HealthCheck, Steering::Fused]
                .map(|steering| shown(&service, &slices, &nodes, steering).1);
            let names = fused.set.endpoint_nodes.as_deref();
            assert_eq!(
                names,
                listed.map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>()).as_deref()
            );
            assert_eq!(checked.set.endpoint_nodes, None);
            let same = TargetSet { endpoint_nodes: None, ..fused.set.clone() };
            let depends = NodeDependence { members: Vec::new(), ..fused.depends.clone() };
            assert_eq!(TargetPlan { set: same, depends, ..fused }, checked, "{service:?}");
            let [checked, fused] = [Steering::HealthCheck, Steering::Fused]
                .map(|steering| load_balancer(&service, steering, &config()).expect("planned"));
            assert_eq!(checked, fused);
        }
    }
    let (_, plan) = shown(&service(), &[slice(vec![ready("unknown", 1)])], &nodes, Steering::Fused);
    assert_eq!(plan.depends.members, ["unknown"], "it is planned again when there is such a node");
    let cluster = Service { external_policy: TrafficPolicy::Cluster, ..service() };
    let (_, plan) = shown(&cluster, &[slice(vec![ready("a", 1)])], &nodes, Steering::Fused);
    assert_eq!(plan.set.endpoint_nodes, None, "any node serves");
}

#[test]
fn new_node_has_time_to_get_its_agent() {
    let now = SystemTime::now();
    let grace = |created: Option<SystemTime>| {
        let nodes = [Node { created, ..node("a", |_| ()) }];
        let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
        let mut labelled = service();
        labelled.proxy_name = Some(names::PROXY_NAME.to_owned());
        let (_, plan) = shown(&labelled, &[], &nodes, Steering::HealthCheck);
        plan.without_agent[0].grace(now)
    };
    assert_eq!(grace(None), None);
    assert_eq!(grace(Some(now)), Some(Duration::from_mins(5)));
    assert_eq!(grace(Some(now - Duration::from_mins(2))), Some(Duration::from_mins(3)));
    assert_eq!(grace(Some(now - Duration::from_mins(5))), None);
    assert_eq!(grace(Some(now + Duration::from_hours(1))), Some(Duration::from_mins(5)));
}

#[test]
fn all_nodes_are_targets_while_none_is_eligible() {
    let nodes = [node("leaving", |n| n.autoscaler_taint = true), node("out", |n| n.excluded = true)];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let slices = [slice(vec![Endpoint { node: None, ..ready("leaving", 1) }])];
    for mode in [Steering::Api, Steering::HealthCheck] {
        let (list, plan) = shown(&service(), &slices, &nodes, mode);
        assert_eq!((list.as_str(), plan.ineligible.len()), ("eligibleleaving*1,out*1", 2), "{mode}");
    }
}

#[test]
fn every_node_has_a_reason() {
    let nodes = [node("a", |_| ()), node("b", |_| ()), node("x", |n| n.deleting = true)];
    let nodes = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let slices = [slice(vec![ready("a", 1)])];
    let reasons = |mode| {
        let (_, plan) = shown(&service(), &slices, &nodes, mode);
        let list = target_reasons(&service(), &EndpointSummary::new(slices.iter()), &nodes, &plan);
        list.into_iter().map(|(node, reason)| format!("{node}: {reason}")).collect::<Vec<_>>()
    };
    assert_eq!(reasons(Steering::Api), ["a: 1 endpoint", "b: no endpoint", "x: the node is being deleted"]);
    assert_eq!(
        reasons(Steering::HealthCheck)[1],
        "b: eligible, and with the labels if the Service asks for some"
    );
}

#[test]
fn legacy_annotations_are_applied_once() {
    let (beta, alpha) = (annotations::BETA_EXTERNAL_TRAFFIC, annotations::ALPHA_EXTERNAL_TRAFFIC);
    let old = |name: &str, value: &str| {
        let mut service = annotated(name, value);
        service.external_policy = TrafficPolicy::Cluster;
        service
    };
    assert_eq!(
        legacy_request(&old(alpha, "OnlyLocal")),
        LegacyRequest::Local(json!({"spec": {"externalTrafficPolicy": "Local"}}))
    );
    assert_eq!(legacy_request(&old(alpha, "Global")), LegacyRequest::None);
    assert!(matches!(legacy_request(&old(beta, "local")), LegacyRequest::Invalid(_)));
    assert_eq!(legacy_request(&annotated(beta, "OnlyLocal")), LegacyRequest::None, "it is Local already");
    let mut both = old(alpha, "OnlyLocal");
    both.annotations.insert(beta.to_owned(), "Global".to_owned());
    assert_eq!(legacy_request(&both), LegacyRequest::None, "the newer annotation counts");
    let mut port = old(beta, "OnlyLocal");
    port.annotations.insert(annotations::ALPHA_HEALTH_CHECK_NODE_PORT.to_owned(), "31000".to_owned());
    let LegacyRequest::Local(patch) = legacy_request(&port) else { panic!("a patch") };
    assert_eq!(patch["spec"]["healthCheckNodePort"], 31000);
    port.annotations.insert(annotations::BETA_HEALTH_CHECK_NODE_PORT.to_owned(), "70000".to_owned());
    assert!(matches!(legacy_request(&port), LegacyRequest::Invalid(_)));
    port.annotations.insert(annotations::LEGACY_ANNOTATIONS_MIGRATED.to_owned(), "true".to_owned());
    assert_eq!(legacy_request(&port), LegacyRequest::None);
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    (0u8..5, any::<u8>(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(node, last, ready, serving, terminating)| {
            let node = ["a", "b", "c", "unknown", ""][usize::from(node)];
            let endpoint = Endpoint::ready([10, 2, 0, last].into(), node);
            Endpoint {
                node: endpoint.node.filter(|node| !node.is_empty()),
                ready: ready && !terminating,
                serving,
                terminating,
                ..endpoint
            }
        },
    )
}

#[test]
fn known_nodes_change_their_eligibility() {
    let of = |nodes: &[Node]| NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
    let before = of(&[
        node("stays", |_| {}),
        node("leaves", |_| {}),
        node("returns", |node| node.excluded = true),
        node("gone", |_| {}),
    ]);
    let now = of(&[
        node("stays", |node| node.addresses.clear()),
        node("leaves", |node| node.autoscaler_taint = true),
        node("returns", |_| {}),
        node("new", |_| {}),
    ]);
    let changed = ["gone", "leaves", "new", "returns", "stays"].map(str::to_owned).into();
    let found: Vec<_> = now.changed_eligibility(&before, &changed).collect();
    assert_eq!(found, [("leaves", Err(IneligibleReason::AutoscalerTaint)), ("returns", Ok(()))]);
}

proptest! {
    #[test]
    fn targets_are_never_empty_while_an_endpoint_is_usable(
        endpoints in proptest::collection::vec(endpoint(), 0..6),
        (tainted, of_web) in (0u8..8, 0u8..8),
        (api, chooses) in any::<(bool, bool)>(),
    ) {
        let mut nodes: Vec<Node> = ["a", "b", "c"].iter().map(|name| node(name, |_| ())).collect();
        for (i, node) in nodes.iter_mut().enumerate() {
            node.autoscaler_taint = tainted & (1 << i) != 0;
            if of_web & (1 << i) != 0 {
                web(node);
            }
        }
        let service = if chooses { choosing() } else { service() };
        let view = NodeTargets::new(nodes.iter(), 1, &NodeTargets::default(), false);
        let mode = if api { Steering::Api } else { Steering::HealthCheck };
        let usable = endpoints.iter().any(|e| e.ready || e.is_serving_terminating());
        let slices = [slice(endpoints.clone())];
        let (_, plan) = shown(&service, &slices, &view, mode);
        prop_assert_eq!(EndpointSummary::new(slices.iter()).is_usable, usable);
        if usable {
            prop_assert!(!plan.set.targets.is_empty());
        }
        if plan.ineligible.is_empty() {
            for target in plan.set.targets.iter() {
                let node = nodes.iter().find(|node| node.name == target.node).expect("known");
                prop_assert!(node.eligibility(false).is_ok());
                prop_assert!(!chooses || plan.misses_labels || node.labels.contains_key("tier"));
            }
        }
        let mut turned = endpoints;
        turned.reverse();
        let (_, again) = shown(&service, &[slice(turned)], &NodeTargets::new(nodes.iter().rev(), 1, &NodeTargets::default(), false), mode);
        prop_assert_eq!(plan, again, "the order of events does not matter");
    }

    #[test]
    fn a_plan_that_a_change_of_nodes_does_not_concern_stays_the_same(
        endpoints in proptest::collection::vec(endpoint(), 0..4),
        before in proptest::collection::vec(0u8..8, 3),
        after in proptest::collection::vec(0u8..8, 3),
        (api, cluster, labelled, ipv6, chooses) in any::<(bool, bool, bool, bool, bool)>(),
    ) {
        let nodes = |states: &[u8]| -> Vec<Node> {
            let of = |(name, state): (&str, &u8)| {
                let mut node = node(name, |_| ());
                match state {
                    0 => return None,
                    1 => node.autoscaler_taint = true,
                    2 => node.excluded = true,
                    3 => node.addresses.push("fd00::1".parse().expect("ip")),
                    5 => node.addresses = vec!["fd00::1".parse().expect("ip")],
                    7 => web(&mut node),
                    4 => node.agent = Some(NodeAgent { mode: "labelled".to_owned(), version: "1".to_owned() }),
                    _ => {}
                }
                Some(node)
            };
            ["a", "b", "c"].into_iter().zip(states).filter_map(of).collect()
        };
        let changed = ["a", "b", "c"].into_iter().zip(before.iter().zip(&after));
        let changed = changed.filter(|(_, (old, new))| old != new).map(|(name, _)| name.to_owned()).collect();
        let [old, new] = [nodes(&before), nodes(&after)].map(|list| NodeTargets::new(list.iter(), 1, &NodeTargets::default(), false));
        let mut service = if chooses { choosing() } else { service() };
        service.external_policy = if cluster { TrafficPolicy::Cluster } else { TrafficPolicy::Local };
        service.proxy_name = labelled.then(|| names::PROXY_NAME.to_owned());
        let family = if ipv6 { Family::V6 } else { Family::V4 };
        service.families = vec![family];
        let mode = if api { Steering::Api } else { Steering::HealthCheck };
        let slices = [slice(endpoints)];
        let (was, plan) = shown(&service, &slices, &old, mode);
        let (is, next) = shown(&service, &slices, &new, mode);
        let change = NodeChange::between(&old, &new, changed);
        if !change.concerns(&plan.depends, false) {
            prop_assert_eq!(&plan, &next);
        }
        if !change.concerns(&plan.depends, true) {
            // The shared set itself may be another: the provider gets it apart.
            prop_assert_eq!(plan.set.shared, next.set.shared);
            prop_assert!(plan.set.shared.is_some() || was == is, "{} became {}", was, is);
            prop_assert_eq!((&plan.ineligible, &plan.without_agent), (&next.ineligible, &next.without_agent));
            prop_assert_eq!(plan.set.targets.is_empty(), next.set.targets.is_empty());
            let lacking = |set: &TargetSet| -> Vec<String> {
                let has = |target: &Target| target.addresses.iter().any(|address| Family::of(*address) == family);
                let lacking = set.targets.iter().filter(|target| !target.addresses.is_empty() && !has(target));
                lacking.map(|target| target.node.clone()).collect()
            };
            prop_assert!(plan.set.shared.is_none() || lacking(&plan.set) == lacking(&next.set));
        }
    }
}

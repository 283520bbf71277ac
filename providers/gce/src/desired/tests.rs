// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::{Affinity, Key};
use steerage_provider_api::{
    GroupKey, HealthCheck, HealthProtocol, Listener, TargetGroup, TargetSet, Targets,
};

use super::*;
use crate::checks::PROBERS_V4;
use crate::config::tests::config;

pub(crate) fn listeners(ports: &[(Protocol, u16)]) -> Vec<Listener> {
    let listener = |(protocol, port): &(Protocol, u16)| Listener {
        name: String::new(),
        protocol: *protocol,
        port: *port,
        group: GroupKey::Vip,
    };
    ports.iter().map(listener).collect()
}

/// A Service with one TCP port.
pub(crate) fn web() -> LoadBalancer {
    let health_check = HealthCheck {
        protocol: HealthProtocol::Http { path: "/healthz".to_owned() },
        port: Some(10256),
        is_of_service: false,
        interval: Duration::from_secs(8),
        timeout: Duration::from_millis(500),
        healthy_threshold: 1,
        unhealthy_threshold: 3,
    };
    let targets = Targets::Nodes(TargetSet::default());
    LoadBalancer {
        owner: Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() },
        families: vec![Family::V4],
        listeners: listeners(&[(Protocol::Tcp, 80)]),
        groups: vec![TargetGroup { key: GroupKey::Vip, health_check, affinity: None, targets }],
        requested_addresses: Vec::new(),
        pool: None,
        published: Vec::new(),
        published_hostnames: Vec::new(),
        labels: std::sync::Arc::default(),
        source_ranges: Vec::new(),
        annotations: BTreeMap::new(),
    }
}

pub(crate) fn annotated(mut lb: LoadBalancer, pairs: &[(&str, &str)]) -> LoadBalancer {
    lb.annotations.extend(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    lb
}

/// With health checks of the Service, as under `externalTrafficPolicy: Local`.
pub(crate) fn local(mut lb: LoadBalancer) -> LoadBalancer {
    for group in &mut lb.groups {
        (group.health_check.is_of_service, group.health_check.port) = (true, Some(32000));
    }
    lb
}

pub(crate) const INTERNAL: (&str, &str) = (annotations::LOAD_BALANCER_TYPE, "Internal");

fn rules(wanted: &Desired) -> Vec<&Value> {
    wanted.frontends.iter().flat_map(|frontend| frontend.rules.values()).collect()
}

fn refused(lb: &LoadBalancer) -> (&'static str, String) {
    let error = desired(lb, &config()).unwrap_err();
    (error.reason(), error.to_string())
}

#[test]
fn external_service_has_one_of_each() {
    let wanted = desired(&web(), &config()).unwrap();
    let (_, backend) = &wanted.backend;
    assert_eq!(
        (&backend["protocol"], &backend["loadBalancingScheme"], &backend["sessionAffinity"]),
        (&json!("UNSPECIFIED"), &json!("EXTERNAL"), &json!("NONE"))
    );
    let [rule] = rules(&wanted)[..] else { panic!("{wanted:?}") };
    assert_eq!((&rule["IPProtocol"], &rule["ports"]), (&json!("TCP"), &json!(["80"])));
    assert_eq!(rule["backendService"], wanted.backend.0.url(&config()));
    assert!(rule.get("subnetwork").is_none() && rule.get("allowGlobalAccess").is_none());
    let Source::Own(_, address) = &wanted.frontends[0].source else { panic!("{wanted:?}") };
    assert_eq!((&address["addressType"], &address["networkTier"]), (&json!("EXTERNAL"), &json!("PREMIUM")));
    let (_, firewall) = wanted.frontends[0].firewall.as_ref().unwrap();
    assert_eq!(firewall["sourceRanges"], json!(["0.0.0.0/0"]));
    assert_eq!(firewall["allowed"], json!([{ "IPProtocol": "tcp", "ports": ["80"] }]));
    assert_eq!(firewall["targetTags"], json!(["node"]));
}

#[test]
fn internal_service_has_an_address_of_its_subnet_that_protocols_share() {
    let lb =
        annotated(web(), &[INTERNAL, (annotations::GLOBAL_ACCESS, "true"), (annotations::SUBNET, "other")]);
    let wanted = desired(&lb, &config()).unwrap();
    let Source::Own(_, address) = &wanted.frontends[0].source else { panic!("{wanted:?}") };
    let subnet = json!("projects/p/regions/r/subnetworks/other");
    assert_eq!((&address["purpose"], &address["subnetwork"]), (&json!("SHARED_LOADBALANCER_VIP"), &subnet));
    let rule = rules(&wanted)[0];
    assert_eq!((&rule["subnetwork"], &rule["allowGlobalAccess"]), (&subnet, &json!(true)));
    assert!(rule.get("networkTier").is_none() && address.get("networkTier").is_none());
}

/// Issue 475 of cloud-provider-gcp.
#[test]
fn tcp_and_udp_share_a_backend_service_and_an_address() {
    let lb = LoadBalancer { listeners: listeners(&[(Protocol::Tcp, 53), (Protocol::Udp, 53)]), ..web() };
    let wanted = desired(&lb, &config()).unwrap();
    let protocols: Vec<&Value> = rules(&wanted).iter().map(|rule| &rule["IPProtocol"]).collect();
    assert!(protocols.contains(&&json!("TCP")) && protocols.contains(&&json!("UDP")) && protocols.len() == 2);
    let (_, firewall) = wanted.frontends[0].firewall.as_ref().unwrap();
    assert_eq!(
        firewall["allowed"],
        json!([{ "IPProtocol": "tcp", "ports": ["53"] }, { "IPProtocol": "udp", "ports": ["53"] }])
    );
}

/// Issues 2575 of ingress-gce and 826 of cloud-provider-gcp: a range forwards ports that the Service does not have.
#[test]
fn ports_are_exact_up_to_five_and_the_firewall_rule_pins_more() {
    let ports = |count: u16| {
        let all: Vec<(Protocol, u16)> = (0..count).map(|i| (Protocol::Tcp, 8000 + 10 * i)).collect();
        LoadBalancer { listeners: listeners(&all), ..web() }
    };
    let wanted = desired(&ports(5), &config()).unwrap();
    assert_eq!(rules(&wanted)[0]["ports"], json!(["8000", "8010", "8020", "8030", "8040"]));
    let wanted = desired(&ports(6), &config()).unwrap();
    let rule = rules(&wanted)[0];
    assert!(rule.get("ports").is_none() && rule["portRange"] == "8000-8050", "{rule}");
    let (_, firewall) = wanted.frontends[0].firewall.as_ref().unwrap();
    assert_eq!(firewall["allowed"][0]["ports"], json!(["8000", "8010", "8020", "8030", "8040", "8050"]));
    let wanted = desired(&annotated(ports(6), &[INTERNAL]), &config()).unwrap();
    assert_eq!(rules(&wanted)[0]["allPorts"], true);
}

#[test]
fn neighbouring_ports_are_a_range_of_a_firewall_rule() {
    let all = |ports: &[u16]| spans(&ports.iter().copied().collect());
    assert_eq!(all(&[80, 81, 82, 443, 65534, 65535]), ["80-82", "443", "65534-65535"]);
    assert_eq!(all(&[1]), ["1"]);
}

#[test]
fn checks_of_nodes_are_shared_and_those_of_a_service_are_its_own() {
    let (one, other) = (desired(&web(), &config()).unwrap(), {
        let owner = Owner { service: Key::new("a", "b"), uid: "u2".to_owned() };
        desired(&LoadBalancer { owner, ..web() }, &config()).unwrap()
    });
    assert!(one.are_checks_shared && one.checks == other.checks);
    let check = &one.checks[&one.check];
    // Rounded up: GCE counts in seconds.
    assert_eq!((&check["checkIntervalSec"], &check["timeoutSec"]), (&json!(8), &json!(1)));
    assert_eq!(check["httpHealthCheck"]["port"], 10256);
    let (_, probes) = one.checks.iter().find(|(id, _)| id.kind == Kind::Firewall).unwrap();
    assert_eq!(probes["sourceRanges"], json!(PROBERS_V4));
    assert_eq!(probes["allowed"], json!([{ "IPProtocol": "tcp", "ports": ["10256"] }]));
    let mut slower = web();
    slower.groups[0].health_check.interval = Duration::from_secs(20);
    assert_ne!(desired(&slower, &config()).unwrap().check, one.check);

    let own = desired(&local(web()), &config()).unwrap();
    assert!(!own.are_checks_shared && own.ids().contains(&own.check));
    assert_eq!(own.checks[&own.check]["httpHealthCheck"]["port"], 32000);
    // The other settings change in place.
    let mut slower = local(web());
    slower.groups[0].health_check.interval = Duration::from_secs(20);
    assert_eq!(desired(&slower, &config()).unwrap().check, own.check);
    assert_eq!(one.backend.0, own.backend.0, "a policy change keeps the backend service");
}

#[test]
fn dual_stack_has_a_frontend_for_each_family() {
    let lb = LoadBalancer {
        families: vec![Family::V6, Family::V4],
        source_ranges: vec!["2001:db8::/32".parse().unwrap()],
        ..web()
    };
    let wanted = desired(&lb, &config()).unwrap();
    let [six, four] = &wanted.frontends[..] else { panic!("{wanted:?}") };
    let Source::Own(_, address) = &six.source else { panic!("{wanted:?}") };
    assert_eq!((&address["ipVersion"], &address["ipv6EndpointType"]), (&json!("IPV6"), &json!("NETLB")));
    assert_eq!(address["subnetwork"], config().subnetwork);
    assert_eq!(six.firewall.as_ref().unwrap().1["sourceRanges"], json!(["2001:db8::/32"]));
    assert!(four.firewall.is_none(), "nobody with IPv4 is admitted");
    assert!(
        six.rules
            .values()
            .all(|rule| rule["ipVersion"] == "IPV6" && rule["subnetwork"] == config().subnetwork)
    );
    let sources = wanted.checks.iter().filter(|(id, _)| id.kind == Kind::Firewall).count();
    assert_eq!(sources, 2, "probes of both families");
    let standard = annotated(lb, &[(annotations::NETWORK_TIER, "Standard")]);
    assert_eq!(refused(&standard).0, "ConflictingAnnotations");
}

/// Issue 2623 of ingress-gce: weights without health checks that report them.
#[test]
fn weights_need_health_checks_that_report_them() {
    let weighted = (annotations::WEIGHTED, "pods-per-node");
    for (lb, policy) in [
        (annotated(local(web()), &[weighted]), json!("WEIGHTED_MAGLEV")),
        (annotated(local(web()), &[weighted, INTERNAL]), json!("WEIGHTED_GCP_RENDEZVOUS")),
        (local(web()), json!("MAGLEV")),
    ] {
        let wanted = desired(&lb, &config()).unwrap();
        assert_eq!((&wanted.backend.1["localityLbPolicy"], &wanted.incomplete), (&policy, &None));
    }
    let wanted = desired(&annotated(web(), &[weighted]), &config()).unwrap();
    assert_eq!(wanted.backend.1["localityLbPolicy"], "MAGLEV");
    let (reason, message) = wanted.incomplete.unwrap();
    assert!(reason == "WeightsNotAvailable" && message.contains("health-check"), "{message}");
}

#[test]
fn affinity_is_by_client_address() {
    let mut lb = web();
    lb.groups[0].affinity = Some(Affinity { timeout: Duration::from_mins(3) });
    assert_eq!(desired(&lb, &config()).unwrap().backend.1["sessionAffinity"], "CLIENT_IP");
}

#[test]
fn another_address_is_another_rule_so_that_both_exist_for_a_while() {
    let ids = |lb: &LoadBalancer| {
        desired(lb, &config()).unwrap().frontends[0].rules.keys().cloned().collect::<Vec<_>>()
    };
    let all = [
        ids(&web()),
        ids(&annotated(web(), &[INTERNAL])),
        ids(&annotated(web(), &[INTERNAL, (annotations::SUBNET, "other")])),
        ids(&annotated(web(), &[(annotations::NETWORK_TIER, "Standard")])),
        ids(&annotated(web(), &[(annotations::ADDRESSES, "mine")])),
        ids(&LoadBalancer { requested_addresses: vec![[203, 0, 113, 1].into()], ..web() }),
    ];
    let distinct: BTreeSet<_> = all.iter().flatten().collect();
    assert_eq!(distinct.len(), all.len());
    let more = LoadBalancer { listeners: listeners(&[(Protocol::Tcp, 81)]), ..web() };
    assert_eq!(ids(&more), ids(&web()), "other ports do not make another rule");
}

#[test]
fn requests_that_contradict_each_other_are_refused() {
    let (v4, other) = ([203, 0, 113, 1].into(), [203, 0, 113, 2].into());
    for (lb, reason, part) in [
        (LoadBalancer { pool: Some("a".to_owned()), ..web() }, "AddressPoolNotSupported", "AddressPool a"),
        (
            LoadBalancer { requested_addresses: vec![v4, other], ..web() },
            "ConflictingAnnotations",
            "Two addresses",
        ),
        (
            LoadBalancer { requested_addresses: vec!["2001:db8::1".parse().unwrap()], ..web() },
            "ConflictingAnnotations",
            "ipFamilies",
        ),
        (annotated(web(), &[(annotations::ADDRESSES, "a,b")]), "ConflictingAnnotations", "one IP family"),
        (
            annotated(
                LoadBalancer { requested_addresses: vec![v4], ..web() },
                &[(annotations::ADDRESSES, "a")],
            ),
            "ConflictingAnnotations",
            "both request",
        ),
        (LoadBalancer { groups: Vec::new(), ..web() }, "RejectedByProvider", "no port"),
    ] {
        let (got, message) = refused(&lb);
        assert!(got == reason && message.contains(part), "{got}: {message}");
    }
}

#[test]
fn source_ranges_of_the_annotation_count_where_the_field_is_empty() {
    let annotation = (annotation::SOURCE_RANGES, "192.0.2.0/24,10.1.0.0/16");
    let lb = annotated(web(), &[annotation]);
    let ranges = |lb: &LoadBalancer| {
        desired(lb, &config()).unwrap().frontends[0].firewall.as_ref().unwrap().1["sourceRanges"].clone()
    };
    assert_eq!(ranges(&lb), json!(["10.1.0.0/16", "192.0.2.0/24"]));
    let field = LoadBalancer { source_ranges: vec!["10.0.0.1/8".parse().unwrap()], ..lb };
    assert_eq!(ranges(&field), json!(["10.0.0.0/8"]));
    assert_eq!(refused(&annotated(web(), &[(annotation::SOURCE_RANGES, "x")])).0, "InvalidAnnotation");
}

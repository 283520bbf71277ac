// SPDX-License-Identifier: Apache-2.0

use std::time::Duration;

use steerage_model::{Affinity, Key};
use steerage_provider_api::{Owner, Target, Targets};

use super::*;
use crate::options::tests::config;

pub(crate) fn owner() -> Owner {
    Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() }
}

pub(crate) fn target(index: u8, weight: u32) -> Target {
    Target {
        node: format!("node-{index}"),
        addresses: vec![[10, 0, 0, index].into(), std::net::Ipv6Addr::from(u128::from(index)).into()],
        provider_id: None,
        zone: None,
        pod_cidrs: Vec::new(),
        weight,
    }
}

/// A planned load balancer with these listeners: protocol, port and node port.
pub(crate) fn planned(listeners: &[(Protocol, u16, u16)], nodes: &[u8]) -> LoadBalancer {
    let health_check = HealthCheck {
        protocol: HealthProtocol::Http { path: "/healthz".to_owned() },
        port: Some(32000),
        is_of_service: true,
        interval: Duration::from_secs(3),
        timeout: Duration::from_millis(2400),
        healthy_threshold: 2,
        unhealthy_threshold: 3,
    };
    let nodes = TargetSet::own(nodes.iter().map(|index| target(*index, 1)));
    LoadBalancer {
        owner: owner(),
        families: vec![Family::V4],
        listeners: listeners
            .iter()
            .map(|(protocol, port, node_port)| Listener {
                name: String::new(),
                protocol: *protocol,
                port: *port,
                group: GroupKey::NodePort(*node_port),
            })
            .collect(),
        groups: listeners
            .iter()
            .map(|(_, _, node_port)| TargetGroup {
                key: GroupKey::NodePort(*node_port),
                health_check: health_check.clone(),
                affinity: None,
                targets: Targets::Nodes(nodes.clone()),
            })
            .collect(),
        requested_addresses: Vec::new(),
        pool: None,
        published: Vec::new(),
        published_hostnames: Vec::new(),
        labels: std::sync::Arc::default(),
        source_ranges: Vec::new(),
        annotations: BTreeMap::new(),
    }
}

const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);
const DNS: (Protocol, u16, u16) = (Protocol::Udp, 53, 30053);

fn with(annotations: &[(&str, &str)]) -> LoadBalancer {
    let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    LoadBalancer { annotations: annotations.collect(), ..planned(&[WEB, DNS], &[1, 2]) }
}

fn wanted(lb: &LoadBalancer, provider: &str) -> Result<Desired, (&'static str, String)> {
    desired(lb, &config(provider)).map_err(|error| (error.reason(), error.to_string()))
}

#[test]
fn creation_has_everything_in_one_request() {
    let wanted = wanted(&with(&[]), "amphora").unwrap();
    let body = wanted.creation(&[("subnet", None)]);
    let balancer = &body["loadbalancer"];
    assert_eq!((&balancer["provider"], &balancer["vip_subnet_id"]), (&json!("amphora"), &json!("subnet")));
    let tags = ["cluster=prod", "cluster-uid=c1", "service=shop/web", "uid=u1"];
    assert_eq!(balancer["tags"], json!(tags.map(|tag| format!("steerage.dev/{tag}"))));
    assert!(balancer.get("vip_address").is_none());
    let web = &balancer["listeners"][0];
    assert_eq!((&web["protocol"], &web["protocol_port"]), (&json!("TCP"), &json!(80)));
    assert!(web.get("allowed_cidrs").is_none(), "{web}");
    let pool = &web["default_pool"];
    assert_eq!((&pool["protocol"], &pool["lb_algorithm"]), (&json!("TCP"), &json!("ROUND_ROBIN")));
    let member = json!({
        "address": "10.0.0.1", "protocol_port": 30080, "name": "node-1", "weight": 1, "monitor_port": 32000,
        "subnet_id": "members", "backup": false, "admin_state_up": true,
    });
    assert_eq!(pool["members"][0], member);
    let monitor = &pool["healthmonitor"];
    for (field, value) in [
        ("type", json!("HTTP")),
        ("delay", json!(3)),
        ("timeout", json!(2)),
        ("max_retries", json!(2)),
        ("max_retries_down", json!(3)),
        ("url_path", json!("/healthz")),
        ("expected_codes", json!("200")),
        ("tags", json!(["steerage.dev/uid=u1"])),
    ] {
        assert_eq!(monitor[field], value, "{field}");
    }
    assert_eq!(balancer["listeners"][1]["default_pool"]["protocol"], json!("UDP"));
}

#[test]
fn ovn_checks_the_ports_that_receive_packets() {
    let wanted = wanted(&with(&[]), "ovn").unwrap();
    let kinds: Vec<_> = wanted.listeners.iter().map(|listener| listener.pool.check.r#type.as_str()).collect();
    assert_eq!(kinds, ["TCP", "UDP-CONNECT"]);
    for listener in &wanted.listeners {
        assert_eq!(listener.pool.algorithm, "SOURCE_IP_PORT");
        assert!(listener.limits.is_none());
        assert!(
            listener.pool.members.values().all(|member| member.monitor_port.is_none() && member.weight == 1)
        );
    }
}

/// The plan names no port if only nodes are left whose service proxy fails its check.
#[test]
fn amphora_checks_the_same_ports_if_no_other_is_named() {
    let mut lb = with(&[]);
    for group in &mut lb.groups {
        (group.health_check.protocol, group.health_check.port) = (HealthProtocol::Tcp, None);
    }
    let wanted = wanted(&lb, "amphora").unwrap();
    let kinds: Vec<_> = wanted.listeners.iter().map(|listener| listener.pool.check.r#type.as_str()).collect();
    assert_eq!(kinds, ["TCP", "UDP-CONNECT"]);
    assert!(wanted.listeners[0].pool.members.values().all(|member| member.monitor_port.is_none()));
}

#[test]
fn weights_keep_their_proportions() {
    let weights = |of: &[u32], driver| {
        let nodes = (1..).zip(of).map(|(index, weight)| target(index, *weight));
        let ports = PoolPorts { node_port: 30080, check_port: None };
        let mut refused = BTreeMap::new();
        let members = members(&TargetSet::own(nodes), ports, &[(Family::V4, "s")], driver, &mut refused);
        members.values().map(|member| member.weight).collect::<Vec<_>>()
    };
    assert_eq!(weights(&[1, 3, 256], Driver::Amphora), [1, 3, 256]);
    assert_eq!(weights(&[1, 500, 1000], Driver::Amphora), [1, 128, 256]);
    assert_eq!(weights(&[1, 3], Driver::Ovn), [1, 1]);
}

#[test]
fn node_without_an_address_of_the_family_is_refused() {
    let mut lb = planned(&[WEB], &[1, 2]);
    let mut bare = target(3, 1);
    bare.addresses.retain(IpAddr::is_ipv6);
    lb = lb.with_nodes(TargetSet::own([target(1, 1), bare]));
    let wanted = wanted(&lb, "amphora").unwrap();
    assert_eq!(wanted.listeners[0].pool.members.len(), 1);
    assert!(matches!(wanted.refused.as_slice(), [(node, why)] if node == "node-3" && why.contains("IPv4")));
    lb.families = vec![Family::V6];
    let wanted = desired(&lb, &config("amphora")).unwrap();
    assert_eq!((wanted.listeners[0].pool.members.len(), wanted.refused.len()), (2, 0));
}

#[test]
fn second_family_has_a_vip_and_the_clients_of_both_are_restricted() {
    let of = |provider: &str| {
        let mut config = config(provider);
        (config.ipv6_subnet, config.ipv6_member_subnet) =
            (Some("six".to_owned()), Some("nodes-six".to_owned()));
        let mut lb = planned(&[WEB], &[1, 2]);
        lb.families = vec![Family::V4, Family::V6];
        if provider == "amphora" {
            lb.source_ranges = vec!["10.0.0.0/8".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
        }
        desired(&lb, &config).unwrap()
    };
    let proxy = of("amphora");
    let body = &proxy.creation(&[("subnet", None), ("six", None)])["loadbalancer"];
    assert_eq!(
        (&body["vip_subnet_id"], &body["additional_vips"]),
        (&json!("subnet"), &json!([{ "subnet_id": "six" }]))
    );
    let listener = &proxy.listeners[0];
    assert_eq!(listener.allowed_cidrs, ["10.0.0.0/8", "2001:db8::/32"]);
    assert!(
        listener.pool.members.keys().all(|(address, _)| address.is_ipv4())
            && listener.pool.members.len() == 2
    );
    // The load balancer is older, and has one VIP.
    let old = proxy.for_families(&[Family::V4]);
    assert_eq!(old.listeners[0].allowed_cidrs, ["10.0.0.0/8"]);
    // OVN sends what comes to a VIP to members of its family.
    let ovn = of("ovn");
    let subnets: Vec<_> =
        ovn.listeners[0].pool.members.values().map(|member| member.subnet_id.as_deref().unwrap()).collect();
    assert_eq!(subnets, ["members", "members", "nodes-six", "nodes-six"]);
    assert_eq!(ovn.for_families(&[Family::V4]).listeners[0].pool.members.len(), 2);
}

#[test]
fn requested_addresses_are_of_each_family() {
    let (four, six): (IpAddr, IpAddr) = ([203, 0, 113, 7].into(), "2001:db8::7".parse().unwrap());
    let of = |requested: &[IpAddr], network: Option<&str>| {
        let mut config = config("amphora");
        (config.ipv6_subnet, config.floating_network) = (Some("six".to_owned()), network.map(str::to_owned));
        let mut lb = LoadBalancer { requested_addresses: requested.to_vec(), ..planned(&[WEB], &[1]) };
        lb.families = vec![Family::V6, Family::V4];
        let wanted = desired(&lb, &config).map_err(|error| error.reason())?;
        Ok((wanted.address, wanted.vips.iter().map(|vip| vip.requested).collect::<Vec<_>>()))
    };
    let floating = WantedAddress::Floating { network: "net".to_owned(), subnet: None };
    assert_eq!(of(&[six], Some("net")), Ok((floating, vec![Some(six), None])));
    assert_eq!(of(&[four, six], Some("net")), Ok((WantedAddress::Given(four), vec![Some(six), None])));
    assert_eq!(of(&[four, six], None), Ok((WantedAddress::Internal, vec![Some(six), Some(four)])));
    assert_eq!(of(&[six, six], None), Err("ConflictingAnnotations"));
}

#[test]
fn choices_at_creation_are_sent() {
    let named = [(annotations::FLAVOR, "f1"), (annotations::AVAILABILITY_ZONE, "az 1")];
    let body = &wanted(&with(&named), "amphora").unwrap().creation(&[("subnet", None)])["loadbalancer"];
    assert_eq!((&body["flavor_id"], &body["availability_zone"]), (&json!("f1"), &json!("az 1")));
}

#[test]
fn proxy_protocol_is_for_tcp_and_names_another_pool() {
    let plain = wanted(&with(&[]), "amphora").unwrap();
    let proxied = wanted(&with(&[(annotations::PROXY_PROTOCOL, "v2")]), "amphora").unwrap();
    let protocols: Vec<_> = proxied.listeners.iter().map(|listener| listener.pool.protocol).collect();
    assert_eq!(protocols, ["PROXYV2", "UDP"]);
    assert!(proxied.has_proxy_protocol);
    assert_ne!(
        proxied.listeners[0].pool.name, plain.listeners[0].pool.name,
        "Octavia cannot change the protocol"
    );
    assert_eq!(proxied.listeners[1].pool.name, plain.listeners[1].pool.name);
}

#[test]
fn affinity_has_a_timeout_only_for_udp() {
    let mut lb = with(&[]);
    for group in &mut lb.groups {
        group.affinity = Some(Affinity { timeout: Duration::from_mins(3) });
    }
    let wanted = wanted(&lb, "amphora").unwrap();
    let timeouts: Vec<_> = wanted
        .listeners
        .iter()
        .map(|listener| listener.pool.persistence.as_ref().and_then(|kept| kept.persistence_timeout))
        .collect();
    assert_eq!(timeouts, [None, Some(180)]);
}

#[test]
fn source_ranges_of_the_other_family_admit_nobody() {
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
    assert!(allowed(&[], &[Family::V4]).is_empty());
    assert_eq!(allowed(&ranges(&["10.1.2.3/8", "2001:db8::/32"]), &[Family::V4]), ["10.0.0.0/8"]);
    assert_eq!(allowed(&ranges(&["2001:db8::/32"]), &[Family::V4]), ["0.0.0.0/32"]);
    assert_eq!(allowed(&ranges(&["10.0.0.0/8"]), &[Family::V6]), ["::/128"]);
}

#[test]
fn address_is_internal_floating_or_given() {
    let given: IpAddr = [203, 0, 113, 7].into();
    let address = |annotations: &[(&str, &str)], requested: &[IpAddr], network: Option<&str>| {
        let mut config = config("amphora");
        config.floating_network = network.map(str::to_owned);
        let lb = LoadBalancer { requested_addresses: requested.to_vec(), ..with(annotations) };
        desired(&lb, &config).map(|wanted| wanted.address).map_err(|error| error.reason())
    };
    let internal = (annotations::INTERNAL, "true");
    let external = (annotations::INTERNAL, "false");
    let floating = |network: &str| Ok(WantedAddress::Floating { network: network.to_owned(), subnet: None });
    assert_eq!(address(&[], &[], None), Ok(WantedAddress::Internal));
    assert_eq!(address(&[], &[], Some("net")), floating("net"));
    assert_eq!(address(&[internal], &[], Some("net")), Ok(WantedAddress::Internal));
    assert_eq!(address(&[internal], &[given], Some("net")), Ok(WantedAddress::Internal));
    assert_eq!(address(&[(annotations::FLOATING_NETWORK, "mine")], &[], None), floating("mine"));
    assert_eq!(address(&[], &[given], Some("net")), Ok(WantedAddress::Given(given)));
    assert_eq!(address(&[external], &[], None), Err("NoFloatingNetwork"));
    assert_eq!(address(&[], &[given, given], Some("net")), Err("ConflictingAnnotations"));
    assert_eq!(address(&[], &["2001:db8::1".parse().unwrap()], Some("net")), Err("ConflictingAnnotations"));
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let refused = |change: fn(&mut LoadBalancer), provider: &str| {
        let mut lb = with(&[]);
        change(&mut lb);
        let (reason, message) = wanted(&lb, provider).unwrap_err();
        assert!(message.contains("No load balancer is created or changed."), "{message}");
        reason
    };
    assert_eq!(refused(|lb| lb.pool = Some("p".to_owned()), "amphora"), "AddressPoolNotSupported");
    let restrict = |lb: &mut LoadBalancer| lb.source_ranges = vec!["10.0.0.0/8".parse().unwrap()];
    assert_eq!(refused(restrict, "ovn"), "NoSecurityGroup");
    let unknown = |lb: &mut LoadBalancer| {
        lb.annotations.insert("loadbalancer.openstack.org/flavour-id".to_owned(), "x".to_owned());
    };
    assert_eq!(refused(unknown, "amphora"), "UnknownAnnotation");
}

#[test]
fn service_with_too_many_rules_is_refused() {
    let config = Config { security_group: Some("nodes".to_owned()), ..config("ovn") };
    let many = |count: u8| LoadBalancer {
        source_ranges: (0..count).map(|index| format!("192.0.{index}.0/24").parse().unwrap()).collect(),
        ..planned(&[WEB, DNS], &[1])
    };
    assert!(desired(&many(49), &config).is_ok());
    let error = desired(&many(50), &config).unwrap_err();
    assert!(
        error.reason() == "TooManySecurityGroupRules" && error.to_string().contains("at most 100"),
        "{error}"
    );
    let amphora = Config { provider: "amphora".to_owned(), ..config };
    assert!(desired(&many(200), &amphora).is_ok());
}

/// The annotation that all providers read, which the field overrides.
#[test]
fn source_ranges_come_from_the_field_or_from_the_annotation() {
    let ovn = Config { security_group: Some("nodes".to_owned()), ..config("ovn") };
    let admitted = |field: &[&str], value: &str| {
        let mut lb = with(&[(annotations::SOURCE_RANGES, value)]);
        lb.source_ranges = field.iter().map(|range| range.parse().unwrap()).collect();
        let amphora = desired(&lb, &config("amphora")).map_err(|error| error.reason())?;
        let rules = desired(&lb, &ovn).map_err(|error| error.reason())?.sources;
        let rules: Vec<String> = rules.iter().map(ToString::to_string).collect();
        assert_eq!(amphora.listeners[0].allowed_cidrs, rules);
        Ok::<_, &str>(rules.join(" "))
    };
    assert_eq!(admitted(&[], "10.0.0.0/8, 192.0.2.0/24"), Ok("10.0.0.0/8 192.0.2.0/24".to_owned()));
    assert_eq!(admitted(&["10.0.0.0/8"], "192.0.2.0/24"), Ok("10.0.0.0/8".to_owned()));
    assert_eq!(admitted(&[], " "), Ok(String::new()));
    assert_eq!(admitted(&[], "10.0.0.0/8,,"), Err("InvalidAnnotation"));
    let limited = with(&[(annotations::SOURCE_RANGES, "10.0.0.0/8")]);
    assert_eq!(desired(&limited, &config("ovn")).unwrap_err().reason(), "NoSecurityGroup");
}

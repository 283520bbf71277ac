// SPDX-License-Identifier: Apache-2.0
//! The configurations of all contenders for the same Services: a VIP with one TCP and UDP port, and three of the nodes. Pure.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use steerage_model::Family;

use crate::edge_bed::addresses::{node_address, vip};
use crate::edge_bed::{CHECK, NODES, PORT};

/// Targets of each Service.
const TARGETS: u8 = 3;

/// The nodes of a Service. Every node is left out by as many Services.
pub fn nodes_of(service: u32) -> Vec<u8> {
    let left_out = service % u32::from(NODES);
    (0..NODES).filter(|node| u32::from(*node) != left_out).take(usize::from(TARGETS)).collect()
}

fn at(address: IpAddr) -> SocketAddr {
    SocketAddr::new(address, PORT)
}

/// The EdgeLoadBalancer of a Service with these nodes.
pub fn edge_load_balancer(family: Family, service: u32, nodes: &[u8]) -> Value {
    let targets: Vec<_> = nodes
        .iter()
        .map(|node| json!({ "node": format!("node{node}"), "weight": 1, "addresses": [node_address(family, *node)] }))
        .collect();
    json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeLoadBalancer",
        "metadata": { "name": format!("lb-{service}"), "uid": format!("u-{service}"), "generation": 1 },
        "spec": {
            "service": { "namespace": "default", "name": format!("s-{service}"), "uid": format!("s-{service}") },
            "addresses": [vip(family, service)],
            "listeners": [{ "protocol": "TCP", "port": PORT }, { "protocol": "UDP", "port": PORT }],
            "healthCheck": {
                "protocol": "HTTP", "port": CHECK, "path": "/healthz", "intervalMilliseconds": 1000,
                "timeoutMilliseconds": 1000, "healthyThreshold": 1, "unhealthyThreshold": 2,
            },
            "targets": targets,
        },
    })
}

/// `HAProxy` in TCP mode, a proxy for each Service, without health checks: they would be thousands of connections a second. It has
/// no UDP. In `folder` is the socket for its commands.
pub fn haproxy(family: Family, services: u32, folder: &Path) -> String {
    let mut text = format!(
        "global\n  maxconn 3000\n  log 127.0.0.1 local0 emerg\n  stats socket {} level admin\ndefaults\n  mode tcp\n  \
         balance roundrobin\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n",
        haproxy_socket(folder).display()
    );
    for service in 0..services {
        let _ = writeln!(text, "listen s{service}\n  bind {}", at(vip(family, service)));
        for node in nodes_of(service) {
            let _ = writeln!(text, "  server n{node} {}", at(node_address(family, node)));
        }
    }
    text
}

/// Where `HAProxy` takes commands.
pub fn haproxy_socket(folder: &Path) -> PathBuf {
    folder.join("haproxy.sock")
}

/// The file that Envoy watches for the endpoints of the first Service.
pub fn envoy_endpoints_file(folder: &Path) -> PathBuf {
    folder.join("envoy-endpoints.json")
}

/// A Service's endpoints.
fn envoy_assignment(family: Family, service: u32, nodes: &[u8]) -> Value {
    let endpoint = |node: &u8| {
        json!({ "endpoint": { "address": { "socket_address": {
            "address": node_address(family, *node), "port_value": PORT } } } })
    };
    let endpoints: Vec<_> = nodes.iter().map(endpoint).collect();
    json!({ "cluster_name": format!("c{service}"), "endpoints": [{ "lb_endpoints": endpoints }] })
}

/// The content of [`envoy_endpoints_file`].
pub fn envoy_endpoints(family: Family, service: u32, nodes: &[u8]) -> Value {
    let mut assignment = envoy_assignment(family, service, nodes);
    assignment["@type"] = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment".into();
    json!({ "resources": [assignment] })
}

/// Envoy with a TCP and a UDP proxy for each Service. `folder` has the file with the first one's endpoints.
pub fn envoy(family: Family, services: u32, folder: &Path) -> String {
    let cluster = |service: u32| {
        let mut cluster =
            json!({ "name": format!("c{service}"), "connect_timeout": "5s", "lb_policy": "ROUND_ROBIN" });
        if service == 0 {
            cluster["type"] = "EDS".into();
            cluster["eds_cluster_config"] = json!({ "eds_config": {
                "resource_api_version": "V3", "path_config_source": { "path": envoy_endpoints_file(folder) } } });
        } else {
            cluster["type"] = "STATIC".into();
            cluster["load_assignment"] = envoy_assignment(family, service, &nodes_of(service));
        }
        cluster
    };
    let address = |service: u32, protocol: &str| json!({ "socket_address": { "protocol": protocol, "address": vip(family, service), "port_value": PORT } });
    let tcp = |service: u32| {
        json!({
            "name": format!("t{service}"), "address": address(service, "TCP"),
            "filter_chains": [{ "filters": [{ "name": "envoy.filters.network.tcp_proxy", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                "stat_prefix": "t", "cluster": format!("c{service}"),
            } }] }],
        })
    };
    let udp = |service: u32| {
        json!({
            "name": format!("u{service}"), "address": address(service, "UDP"),
            "listener_filters": [{ "name": "envoy.filters.udp_listener.udp_proxy", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.udp.udp_proxy.v3.UdpProxyConfig",
                "stat_prefix": "u",
                "matcher": { "on_no_match": { "action": { "name": "route", "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.udp.udp_proxy.v3.Route",
                    "cluster": format!("c{service}"),
                } } } },
            } }],
        })
    };
    let listeners: Vec<_> = (0..services).flat_map(|service| [tcp(service), udp(service)]).collect();
    let clusters: Vec<_> = (0..services).map(cluster).collect();
    json!({
        "node": { "id": "bench", "cluster": "bench" },
        "static_resources": { "listeners": listeners, "clusters": clusters },
    })
    .to_string()
}

fn nat_types(family: Family) -> (&'static str, &'static str) {
    if family == Family::V4 { ("ip", "ipv4_addr") } else { ("ip6", "ipv6_addr") }
}

/// The table of [`nat`].
pub fn nat_table(family: Family) -> String {
    format!("{} kube-proxy", nat_types(family).0)
}

/// The rules of an endpoint's chain.
pub fn nat_endpoint_rules(family: Family, protocol: &str, node: u8) -> [String; 2] {
    let (ip, address) = (nat_types(family).0, node_address(family, node));
    [
        format!("{ip} saddr {address} jump mark-for-masquerade"),
        format!("meta l4proto {protocol} dnat to {}", at(address)),
    ]
}

/// What the chain of a Service's port does, whose endpoints are at these nodes.
pub fn nat_service_rule(name: &str, nodes: &[u8]) -> String {
    let choice = |(index, node)| format!("{index} : goto endpoint-{name}-{node}");
    let choices: Vec<_> = nodes.iter().enumerate().map(choice).collect();
    format!("numgen random mod {} vmap {{ {} }}", nodes.len(), choices.join(", "))
}

/// A ruleset as kube-proxy's nftables mode makes it for Services with external addresses under policy Cluster: a map from address and
/// port to a chain for each Service, a chain for each endpoint, and masquerading.
pub fn nat(family: Family, services: u32) -> String {
    let (ip, kind) = nat_types(family);
    let mut text = format!(
        "table {} {{\n  chain mark-for-masquerade {{ meta mark set meta mark or 0x4000; }}\n",
        nat_table(family)
    );
    let mut elements = Vec::new();
    for service in 0..services {
        for protocol in ["tcp", "udp"] {
            let name = format!("{protocol}-{service}");
            let nodes = nodes_of(service);
            for node in &nodes {
                let rules = nat_endpoint_rules(family, protocol, *node).join("; ");
                let _ = writeln!(text, "  chain endpoint-{name}-{node} {{ {rules}; }}");
            }
            let _ = writeln!(
                text,
                "  chain service-{name} {{ {}; }}\n  \
                 chain external-{name} {{ jump mark-for-masquerade; goto service-{name}; }}",
                nat_service_rule(&name, &nodes)
            );
            elements.push(format!("{} . {protocol} . {PORT} : goto external-{name}", vip(family, service)));
        }
    }
    let _ = writeln!(
        text,
        "  map service-ips {{ type {kind} . inet_proto . inet_service : verdict; elements = {{ {} }} }}
  chain services {{ {ip} daddr . meta l4proto . th dport vmap @service-ips; }}
  chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
  chain masquerading {{ meta mark and 0x4000 == 0 return; meta mark set meta mark xor 0x4000; masquerade fully-random; }}
  chain nat-postrouting {{ type nat hook postrouting priority srcnat; jump masquerading; }}
}}",
        elements.join(", ")
    );
    text
}

/// The input of `ipvsadm --restore`: direct routing, with the scheduler that is closest to the edge's.
pub fn ipvs(family: Family, services: u32) -> String {
    let mut text = String::new();
    for service in 0..services {
        for option in ["-t", "-u"] {
            let to = at(vip(family, service));
            let _ = writeln!(text, "-A {option} {to} -s rr");
            for node in nodes_of(service) {
                let _ = writeln!(text, "-a {option} {to} -r {} -g", at(node_address(family, node)));
            }
        }
    }
    text
}

/// A VRRP instance with one VIP.
pub fn keepalived(interface: &str, vip: IpAddr, priority: u8, interval: &str) -> String {
    let version = if interval == "1" { 2 } else { 3 };
    format!(
        "global_defs {{\n  vrrp_version {version}\n}}\nvrrp_instance bench {{\n  state BACKUP\n  interface {interface}\n  \
         virtual_router_id 51\n  priority {priority}\n  advert_int {interval}\n  virtual_ipaddress {{\n    {vip}/32\n  }}\n}}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn nodes_serve_as_many_services() {
        let mut counts = BTreeMap::<u8, u32>::new();
        for service in 0..100 {
            assert_eq!(nodes_of(service).len(), usize::from(TARGETS));
            for node in nodes_of(service) {
                *counts.entry(node).or_default() += 1;
            }
        }
        assert!(
            counts.len() == usize::from(NODES) && counts.values().all(|count| *count == 75),
            "{counts:?}"
        );
    }

    #[test]
    fn every_contender_has_every_service_and_target() {
        for family in [Family::V4, Family::V6] {
            let last = vip(family, 9).to_string();
            let (edge, folder) = (edge_load_balancer(family, 9, &nodes_of(9)).to_string(), Path::new("/f"));
            let (haproxy, envoy) = (haproxy(family, 10, folder), envoy(family, 10, folder));
            for text in [haproxy, envoy, nat(family, 10), ipvs(family, 10), edge] {
                assert!(text.contains(&last), "{text}");
                for node in nodes_of(9) {
                    assert!(text.contains(&node_address(family, node).to_string()), "{text}");
                }
            }
        }
    }

    #[test]
    fn fast_timers_need_the_third_version_of_vrrp() {
        let vip = vip(Family::V4, 0);
        assert!(keepalived("eth0", vip, 100, "1").contains("vrrp_version 2"));
        assert!(keepalived("eth0", vip, 100, "0.05").contains("vrrp_version 3"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Services.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::Deserialize;
use steerage_model::{
    Affinity, Condition, Family, Ingress, IpMode, Key, Service, ServiceKind, ServicePort, TargetPort,
    TrafficPolicy, names,
};

use super::json::{Meta, address_or_note, exact, or_default, protocol_or_note};
use super::{Kind, Malformed};

/// All Services.
#[derive(Clone, Copy, Debug)]
pub struct Services;

/// The API's default of `sessionAffinityConfig.clientIP.timeoutSeconds`: three hours.
const AFFINITY_TIMEOUT: u32 = 10_800;

impl Kind for Services {
    type Object = Service;

    fn name(&self) -> &'static str {
        "services"
    }

    fn path(&self) -> String {
        "/api/v1/services".to_owned()
    }

    fn key(&self, key: Key) -> Key {
        key
    }

    fn project(json: &str, notes: &mut Vec<String>) -> Result<Option<Service>, Malformed> {
        let Wire { metadata, spec, status } = serde_json::from_str(json)?;
        let mut service = Service::new(Key::new(metadata.namespace, metadata.name));
        service.uid = metadata.uid;
        service.annotations = metadata.annotations.0;
        service.proxy_name = metadata.labels.get(names::PROXY_NAME_LABEL).cloned();
        service.headless_label = metadata.labels.contains_key(names::HEADLESS_LABEL);
        service.finalizers = metadata.finalizers;
        service.deleting = metadata.deletion_timestamp.is_some();
        service.generation = metadata.generation;
        let created = metadata.creation_timestamp.and_then(|text| text.parse::<Timestamp>().ok());
        service.created = created.map(Timestamp::as_second).unwrap_or_default();
        fill_spec(&mut service, spec, notes)?;
        if service.kind == ServiceKind::LoadBalancer {
            service.labels = Arc::new(metadata.labels);
        }
        fill_status(&mut service, status, notes);
        Ok(Some(service))
    }
}

fn fill_spec(service: &mut Service, spec: Spec, notes: &mut Vec<String>) -> Result<(), Malformed> {
    service.kind = kind(spec.kind.as_deref())?;
    service.affinity = affinity(&spec)?;
    // Objects written before dual-stack have only the single field.
    let cluster_ips =
        if spec.cluster_ips.is_empty() { spec.cluster_ip.into_iter().collect() } else { spec.cluster_ips };
    let cluster_ips = cluster_ips.iter().filter(|ip| !ip.is_empty() && *ip != "None");
    service.cluster_ips = exact(cluster_ips.filter_map(|ip| address_or_note("spec.clusterIPs", ip, notes)));
    let external_ips = spec.external_ips.iter();
    service.external_ips =
        exact(external_ips.filter_map(|ip| address_or_note("spec.externalIPs", ip, notes)));
    service.ports = exact(spec.ports.into_iter().filter_map(|p| port(p, notes)));
    service.external_policy =
        policy("spec.externalTrafficPolicy", spec.external_traffic_policy.as_deref(), notes);
    service.internal_policy =
        policy("spec.internalTrafficPolicy", spec.internal_traffic_policy.as_deref(), notes);
    service.health_check_node_port = spec.health_check_node_port.filter(|port| *port != 0);
    service.source_ranges = source_ranges(&spec.load_balancer_source_ranges, notes);
    service.class = spec.load_balancer_class.filter(|class| !class.is_empty());
    service.load_balancer_ip = spec.load_balancer_ip.filter(|ip| !ip.is_empty());
    service.families = exact(spec.ip_families.iter().filter_map(|f| family(f, notes)));
    service.allocate_node_ports = spec.allocate_load_balancer_node_ports.unwrap_or(true);
    service.has_selector = !spec.selector.is_empty();
    Ok(())
}

/// An empty list admits everybody. So a list of which no range can be read becomes ranges that no client has.
fn source_ranges(texts: &[String], notes: &mut Vec<String>) -> Vec<IpNet> {
    let parsed = texts
        .iter()
        .filter_map(|text| address_or_note::<IpNet>("spec.loadBalancerSourceRanges", text, notes));
    let ranges: Vec<IpNet> = parsed.map(|range| range.trunc()).collect();
    if ranges.is_empty() && !texts.is_empty() {
        notes.push(
            "spec.loadBalancerSourceRanges: no range can be read; admitting nobody. Correct the ranges"
                .to_owned(),
        );
        return vec![
            IpNet::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            IpNet::from(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
        ];
    }
    ranges
}

fn fill_status(service: &mut Service, status: Status, notes: &mut Vec<String>) {
    let entries = status.load_balancer.ingress.into_iter();
    service.ingress = exact(entries.filter_map(|entry| ingress(entry, notes)));
    service.conditions = status
        .conditions
        .into_iter()
        .map(|c| Condition {
            kind: c.kind,
            status: c.status,
            reason: c.reason,
            message: c.message,
            observed_generation: c.observed_generation,
        })
        .collect();
}

fn kind(text: Option<&str>) -> Result<ServiceKind, Malformed> {
    match text {
        None | Some("" | "ClusterIP") => Ok(ServiceKind::ClusterIp),
        Some("NodePort") => Ok(ServiceKind::NodePort),
        Some("LoadBalancer") => Ok(ServiceKind::LoadBalancer),
        Some("ExternalName") => Ok(ServiceKind::ExternalName),
        Some(other) => Err(Malformed::Unknown { field: "spec.type", value: other.to_owned() }),
    }
}

fn affinity(spec: &Spec) -> Result<Option<Affinity>, Malformed> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => Ok(None),
        Some("ClientIP") => {
            let config = spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref());
            let seconds = config.and_then(|c| c.timeout_seconds).unwrap_or(AFFINITY_TIMEOUT);
            Ok(Some(Affinity { timeout: Duration::from_secs(seconds.into()) }))
        }
        Some(other) => Err(Malformed::Unknown { field: "spec.sessionAffinity", value: other.to_owned() }),
    }
}

fn policy(field: &str, text: Option<&str>, notes: &mut Vec<String>) -> TrafficPolicy {
    match text {
        Some("Local") => TrafficPolicy::Local,
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some(other) => {
            notes.push(format!("{field}: using Cluster for the unknown policy `{other}`"));
            TrafficPolicy::Cluster
        }
    }
}

fn family(text: &str, notes: &mut Vec<String>) -> Option<Family> {
    match text {
        "IPv4" => Some(Family::V4),
        "IPv6" => Some(Family::V6),
        other => {
            notes.push(format!("spec.ipFamilies: ignoring the unknown family `{other}`"));
            None
        }
    }
}

fn port(wire: WirePort, notes: &mut Vec<String>) -> Option<ServicePort> {
    let protocol = protocol_or_note("spec.ports", wire.protocol.as_deref(), notes)?;
    let target_port = match wire.target_port {
        Some(WireTargetPort::Number(port)) if port != 0 => TargetPort::Number(port),
        Some(WireTargetPort::Name(name)) if !name.is_empty() => TargetPort::Name(name),
        _ => TargetPort::Number(wire.port),
    };
    let node_port = wire.node_port.filter(|port| *port != 0);
    Some(ServicePort {
        name: wire.name.unwrap_or_default(),
        protocol,
        port: wire.port,
        target_port,
        node_port,
    })
}

fn ingress(wire: WireIngress, notes: &mut Vec<String>) -> Option<Ingress> {
    let ip = wire.ip.filter(|ip| !ip.is_empty());
    let ip = ip.and_then(|ip| address_or_note::<IpAddr>("status.loadBalancer.ingress", &ip, notes));
    let hostname = wire.hostname.filter(|name| !name.is_empty());
    if ip.is_none() && hostname.is_none() {
        return None;
    }
    let ip_mode = match wire.ip_mode.as_deref() {
        None | Some("") => None,
        Some("VIP") => Some(IpMode::Vip),
        // With an unknown mode the agent must not serve the address: the load balancer may terminate connections.
        Some(_) => Some(IpMode::Proxy),
    };
    Some(Ingress { ip, hostname, ip_mode })
}

#[derive(Deserialize)]
struct Wire {
    metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    spec: Spec,
    #[serde(default, deserialize_with = "or_default")]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(rename = "clusterIP")]
    cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs", deserialize_with = "or_default")]
    cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs", deserialize_with = "or_default")]
    external_ips: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    ports: Vec<WirePort>,
    external_traffic_policy: Option<String>,
    internal_traffic_policy: Option<String>,
    session_affinity: Option<String>,
    session_affinity_config: Option<AffinityConfig>,
    health_check_node_port: Option<u16>,
    #[serde(deserialize_with = "or_default")]
    load_balancer_source_ranges: Vec<String>,
    load_balancer_class: Option<String>,
    #[serde(rename = "loadBalancerIP")]
    load_balancer_ip: Option<String>,
    #[serde(deserialize_with = "or_default")]
    ip_families: Vec<String>,
    allocate_load_balancer_node_ports: Option<bool>,
    #[serde(deserialize_with = "or_default")]
    selector: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct AffinityConfig {
    #[serde(rename = "clientIP")]
    client_ip: Option<ClientIp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClientIp {
    timeout_seconds: Option<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WirePort {
    name: Option<String>,
    protocol: Option<String>,
    port: u16,
    target_port: Option<WireTargetPort>,
    node_port: Option<u16>,
}

/// `IntOrString`.
#[derive(Deserialize)]
#[serde(untagged)]
enum WireTargetPort {
    Number(u16),
    Name(String),
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    #[serde(deserialize_with = "or_default")]
    load_balancer: LoadBalancer,
    #[serde(deserialize_with = "or_default")]
    conditions: Vec<WireCondition>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct LoadBalancer {
    #[serde(deserialize_with = "or_default")]
    ingress: Vec<WireIngress>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireIngress {
    ip: Option<String>,
    hostname: Option<String>,
    ip_mode: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireCondition {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    status: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
    observed_generation: Option<i64>,
}

#[cfg(test)]
mod tests;

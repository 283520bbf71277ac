// SPDX-License-Identifier: Apache-2.0
//! What edge hosts should forward. The controller writes these objects, and the edge hosts read them.

use std::fmt;
use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The most source ranges of one IP family that a load balancer has, after ranges that overlap or adjoin were merged: the kernel needs
/// time in proportion to all ranges for each one that leaves, and other changes wait meanwhile.
pub const MAX_SOURCE_RANGES: usize = 1000;

/// The Service that a load balancer belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceReference {
    /// Namespace of the Service.
    pub namespace: String,
    /// Name of the Service.
    pub name: String,
    /// UID of the Service.
    pub uid: String,
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum ListenerProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for ListenerProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

/// A port that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Listener {
    /// Name of the Service port.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Transport protocol: TCP or UDP.
    pub protocol: ListenerProtocol,
    /// Port number.
    #[schemars(range(min = 1))]
    pub port: u16,
}

/// Client affinity: the hash uses the client's address alone, so that a client stays on its target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Affinity {
    /// Affinity timeout of the Service in seconds. For information: affinity by hash does not time out.
    pub timeout_seconds: u32,
}

/// The protocol of a health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum HealthCheckProtocol {
    /// A probe passes when a TCP connection opens.
    Tcp,
    /// A probe passes when an HTTP GET returns status 200.
    Http,
}

/// A health check of targets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HealthCheck {
    /// Protocol of the probes: TCP or HTTP.
    pub protocol: HealthCheckProtocol,
    /// Port on the node.
    #[schemars(range(min = 1))]
    pub port: u16,
    /// Path of the HTTP request; `/` if unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Interval between two probes of a target in milliseconds, at least 100.
    #[schemars(range(min = 100))]
    pub interval_milliseconds: u32,
    /// Timeout of a probe in milliseconds.
    #[schemars(range(min = 10))]
    pub timeout_milliseconds: u32,
    /// Number of consecutive passed probes after which a target is healthy.
    #[schemars(range(min = 1))]
    pub healthy_threshold: u32,
    /// Number of consecutive failed probes after which a target is unhealthy.
    #[schemars(range(min = 1))]
    pub unhealthy_threshold: u32,
}

/// A node that the edge may forward to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeTarget {
    /// Name of the node.
    pub node: String,
    /// Internal addresses of the node. The edge uses the first of each family.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// Pod CIDRs of the node. Frames from the node may carry source addresses in these CIDRs besides the node's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<String>,
    /// Share of connections relative to the other targets.
    #[serde(default = "one")]
    #[schemars(range(min = 1))]
    pub weight: u32,
    /// Why the node drains. Empty for other nodes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub drain_reason: String,
}

fn one() -> u32 {
    1
}

/// A load balancer: its addresses, its listeners, and the targets that it forwards packets to. The controller writes it.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "EdgeLoadBalancer",
    namespaced,
    shortname = "elb",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Namespace","type":"string","jsonPath":".spec.service.namespace"}"#,
    printcolumn = r#"{"name":"Service","type":"string","jsonPath":".spec.service.name"}"#,
    printcolumn = r#"{"name":"Addresses","type":"string","jsonPath":".spec.addresses"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeLoadBalancerSpec {
    /// Service that the load balancer belongs to.
    pub service: ServiceReference,
    /// Virtual IP addresses (VIPs), at most one of each family.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// Load balancers with the same key may have the same address, if each of their listeners is of one of them. Unset: the addresses
    /// are of this load balancer alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing_key: Option<String>,
    /// Ports that are served on each address.
    pub listeners: Vec<Listener>,
    /// Health check of the targets.
    pub health_check: HealthCheck,
    /// Client affinity. Unset: the hash uses the client's address and port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// CIDRs of clients that may connect, after merging at most 1000 of each IP family. Empty: all clients.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source_ranges: Vec<String>,
    /// Name of the `EdgeNodeSet` whose nodes are the targets. `targets` is then empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_set: Option<String>,
    /// Targets of this load balancer. Empty if `nodeSet` is set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<EdgeTarget>,
    /// Nodes that were targets and drain: they get no new connections while a target is healthy, and keep those that they have.
    /// Earlier versions of the edge do not read them. Empty if `nodeSet` is set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub draining: Vec<EdgeTarget>,
    /// Names of the nodes that have an endpoint by the Service's `EndpointSlices`, sorted. The edge uses the list under `fused` steering:
    /// for nodes that state nothing of the health check's port, a change of the list counts before the next probe. Unset: probes and
    /// statements alone decide, as in earlier versions of the edge, which do not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_nodes: Option<Vec<String>>,
    /// Panic threshold in percent: if fewer of the targets that have an endpoint are healthy, all of them are used. Unset or 0: only
    /// if none is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub panic_threshold_percent: Option<u32>,
    /// Slow start in milliseconds: the time in which a target that becomes healthy beside others gets its whole share of connections.
    /// Unset or 0: at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub slow_start_milliseconds: Option<u32>,
}

/// Nodes that several load balancers use as targets. The controller writes it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "EdgeNodeSet",
    namespaced,
    derive = "PartialEq",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeNodeSetSpec {
    /// Nodes, sorted by name.
    #[serde(default)]
    pub targets: Vec<EdgeTarget>,
    /// Nodes that drain, sorted by name, as in an `EdgeLoadBalancer`.
    #[serde(default)]
    pub draining: Vec<EdgeTarget>,
}

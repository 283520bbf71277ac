// SPDX-License-Identifier: Apache-2.0
//! What an edge should forward: written by the controller, read by the edge hosts.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The Service that a load balancer belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceReference {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The Service's UID.
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

/// A port that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Listener {
    /// The Service port's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The transport protocol.
    pub protocol: ListenerProtocol,
    /// The port.
    #[schemars(range(min = 1))]
    pub port: u16,
}

/// Keeps a client on its target: the hash then uses the client's address alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Affinity {
    /// The Service's affinity time-out in seconds. A hash needs none; it is kept for those who look.
    pub timeout_seconds: u32,
}

/// What a probe speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum HealthCheckProtocol {
    /// Healthy when a connection opens.
    Tcp,
    /// Healthy when a GET answers 200.
    Http,
}

/// How targets are probed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HealthCheck {
    /// What a probe speaks.
    pub protocol: HealthCheckProtocol,
    /// The port on the node.
    #[schemars(range(min = 1))]
    pub port: u16,
    /// The path of the GET.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Milliseconds from one probe to the next, 100 or more.
    #[schemars(range(min = 100))]
    pub interval_milliseconds: u32,
    /// Milliseconds that one probe may take.
    #[schemars(range(min = 10))]
    pub timeout_milliseconds: u32,
    /// Good probes in a row that make a target healthy.
    #[schemars(range(min = 1))]
    pub healthy_threshold: u32,
    /// Bad probes in a row that make a target unhealthy.
    #[schemars(range(min = 1))]
    pub unhealthy_threshold: u32,
}

/// A node that the edge may forward to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeTarget {
    /// The node's name.
    pub node: String,
    /// The node's internal addresses; the edge uses the first of each family.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// CIDRs of the node's pods: the source addresses that frames of this node may carry besides its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<String>,
    /// Share of the connections relative to the other targets.
    #[serde(default = "one")]
    #[schemars(range(min = 1))]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

/// One load balancer: addresses, listeners and where their packets go.
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
    /// The Service that it belongs to.
    pub service: ServiceReference,
    /// The virtual addresses, at most one of each family.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// The ports served on each address.
    pub listeners: Vec<Listener>,
    /// How targets are probed.
    pub health_check: HealthCheck,
    /// Set when a client should keep its target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// CIDRs whose packets may come in; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source_ranges: Vec<String>,
    /// The name of the `EdgeNodeSet` whose nodes are the targets, each with weight 1. Then `targets` is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_set: Option<String>,
    /// The targets, where they are this load balancer's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<EdgeTarget>,
}

/// Nodes that many load balancers have in common.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// The nodes, sorted by name.
    #[serde(default)]
    pub targets: Vec<EdgeTarget>,
}

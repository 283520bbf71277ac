// SPDX-License-Identifier: Apache-2.0
//! The health of targets as one edge host sees it. Only that host writes it: on changes, at most once a second.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::HealthCheck;

/// Label with the name of the edge host that writes the object.
pub const HOST_LABEL: &str = "steerage.dev/edge-host";

/// The state of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TargetState {
    /// Its health is not decided yet.
    Initial,
    /// Passes its probes and gets traffic.
    Healthy,
    /// Fails its probes.
    Unhealthy,
    /// Unusable, for example because it is not on the edge's link.
    Refused,
}

/// How a target is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TargetUse {
    /// Gets new connections.
    Active,
    /// Gets new connections, and more of them step by step: it has just become healthy (slow start).
    Filling,
    /// Gets no new connections because its node drains, and keeps those that it has.
    Draining,
    /// Gets no new connections, and keeps those that it has.
    Inactive,
}

/// The state of one address of one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// Name of the node.
    pub node: String,
    /// Address that is probed and that packets are forwarded to.
    #[schemars(with = "String")]
    pub address: IpAddr,
    /// State of the target: Initial, Healthy, Unhealthy or Refused.
    pub state: TargetState,
    /// Reason for the state: the error of the last probe, or why the target is refused. Empty for healthy targets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Weight in use: the share of connections relative to the other targets.
    pub weight: u32,
    /// How the target is used: Active, Filling, Draining or Inactive. Unset by edge hosts of earlier versions.
    #[serde(rename = "use", default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<TargetUse>,
    /// Reason for `use`. Empty for a healthy target that is active.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub use_reason: String,
}

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum IpFamily {
    /// IPv4.
    #[serde(rename = "IPv4")]
    V4,
    /// IPv6.
    #[serde(rename = "IPv6")]
    V6,
}

impl IpFamily {
    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv6() { Self::V6 } else { Self::V4 }
    }
}

/// How many targets of an IP family there are. Each is counted once in `healthy`, `failed`, `withoutEndpoint`, `initial`, `refused` or
/// `draining`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetCounts {
    /// IP family: IPv4 or IPv6.
    pub family: IpFamily,
    /// Number of all targets.
    pub total: u32,
    /// Targets that are healthy.
    #[serde(default)]
    pub healthy: u32,
    /// Targets that are unhealthy, except those without an endpoint.
    #[serde(default)]
    pub failed: u32,
    /// Targets that are unhealthy because their nodes have no ready endpoint. That is no failure.
    #[serde(default)]
    pub without_endpoint: u32,
    /// Targets whose health is not decided yet.
    #[serde(default)]
    pub initial: u32,
    /// Unusable targets.
    #[serde(default)]
    pub refused: u32,
    /// Targets that get no new connections because their nodes drain.
    #[serde(default)]
    pub draining: u32,
    /// Number of targets with `use: Active`, also unhealthy ones where too few are healthy.
    #[serde(default)]
    pub active: u32,
    /// Number of targets with `use: Filling` (slow start); not in `active`.
    #[serde(default)]
    pub filling: u32,
    /// Number of targets that `targets` does not list.
    #[serde(default)]
    pub omitted: u32,
}

/// Targets that several load balancers share: the nodes of an `EdgeNodeSet` with one health check and the same rules of use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharedTargets {
    /// Name of the `EdgeNodeSet`.
    pub node_set: String,
    /// Health check of the targets.
    pub health_check: HealthCheck,
    /// Panic threshold in percent, as in an `EdgeLoadBalancer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic_threshold_percent: Option<u32>,
    /// Slow start in milliseconds, as in an `EdgeLoadBalancer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_start_milliseconds: Option<u32>,
}

/// The health of targets as one edge host sees it: of the targets of one load balancer, or of targets that several load balancers share.
/// The edge host writes the object, and puts its own name in the label `steerage.dev/edge-host`. The report of a load balancer is named
/// `<load balancer>.<host>`, and the load balancer owns it. A report of shared targets is named `<node set>.<hash>.<host>`, and the
/// `EdgeNodeSet` owns it. The host deletes a report of shared targets when load balancers no longer share them.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "EdgeTargetHealth",
    plural = "edgetargethealths",
    namespaced,
    derive = "PartialEq",
    printcolumn = r#"{"name":"LoadBalancer","type":"string","jsonPath":".spec.loadBalancer"}"#,
    printcolumn = r#"{"name":"NodeSet","type":"string","jsonPath":".spec.shared.nodeSet"}"#,
    printcolumn = r#"{"name":"Host","type":"string","jsonPath":".spec.host"}"#,
    printcolumn = r#"{"name":"Addresses","type":"string","jsonPath":".spec.addresses"}"#,
    printcolumn = r#"{"name":"Shards","type":"string","jsonPath":".spec.shards"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeTargetHealthSpec {
    /// Name of the `EdgeLoadBalancer`. Unset in a report of shared targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_balancer: Option<String>,
    /// Name of the edge host that writes this object.
    pub host: String,
    /// The targets that load balancers share. Unset in the report of a load balancer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedTargets>,
    /// Addresses of the load balancer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// The shard of each address, from 0 to 127, in the order of `addresses`. The edge host whose `activeShards` has the shard answers
    /// for the address. Only that host's report of the address's IP family counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<u32>,
    /// `metadata.generation` of the `EdgeLoadBalancer` that the host last acted on.
    #[serde(default)]
    pub observed_generation: i64,
    /// Reason why the load balancer is not served in whole, for example an address that another host on the link uses. Empty if it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// Names of the `EdgeTargetHealth` objects that have the health of targets that the load balancer shares with others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_reports: Vec<String>,
    /// Numbers of targets of each IP family. An IP family whose targets are shared is in a shared report instead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<TargetCounts>,
    /// Health of single targets, sorted by node and address. At most 100 of each IP family are listed: those that need attention are
    /// chosen first, then those that get connections. Targets without an endpoint are listed only while they are used or drain.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<TargetStatus>,
    /// Whether the host answers for one of the load balancer's addresses. Only edge hosts of earlier versions set this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<bool>,
}

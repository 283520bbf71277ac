// SPDX-License-Identifier: Apache-2.0
//! The health of one load balancer's targets as one edge host sees it. Only that host writes it: on changes, at most once a second.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TargetState {
    /// No probe has completed yet.
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

/// The health of one load balancer's targets as one edge host sees it. The edge host writes it. It is named `<load balancer>.<host>`
/// and owned by the load balancer.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "EdgeTargetHealth",
    plural = "edgetargethealths",
    namespaced,
    derive = "PartialEq",
    printcolumn = r#"{"name":"LoadBalancer","type":"string","jsonPath":".spec.loadBalancer"}"#,
    printcolumn = r#"{"name":"Host","type":"string","jsonPath":".spec.host"}"#,
    printcolumn = r#"{"name":"Active","type":"boolean","jsonPath":".spec.active"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeTargetHealthSpec {
    /// Name of the `EdgeLoadBalancer`.
    pub load_balancer: String,
    /// Name of the edge host that writes this object.
    pub host: String,
    /// Whether this host answers for one of the load balancer's addresses. Then `targets` are those of its addresses.
    pub active: bool,
    /// `metadata.generation` of the `EdgeLoadBalancer` that the host last acted on.
    pub observed_generation: i64,
    /// What prevents the load balancer from being served in whole, for example an address that another host on the link uses.
    /// Empty if nothing does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// Health of each target, sorted by node and address.
    #[serde(default)]
    pub targets: Vec<TargetStatus>,
}

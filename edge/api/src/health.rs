// SPDX-License-Identifier: Apache-2.0
//! What one edge host sees of one load balancer's targets: written by that host alone, on transitions, at most once a second.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a target is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TargetState {
    /// Not enough probes yet.
    Initial,
    /// Takes traffic.
    Healthy,
    /// Fails its probes.
    Unhealthy,
    /// Cannot be used at all, for example since it is not on the edge's link.
    Refused,
}

/// The state of one address of one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// The node's name.
    pub node: String,
    /// The address that is probed and forwarded to.
    #[schemars(with = "String")]
    pub address: IpAddr,
    /// The state.
    pub state: TargetState,
    /// Why, in a few words: the probe's error, or what to do about a refused target.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The weight in use.
    pub weight: u32,
}

/// The health of one load balancer's targets as one edge host sees it. Named `<load balancer>.<host>` and owned by the load balancer.
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
    /// The name of the `EdgeLoadBalancer`.
    pub load_balancer: String,
    /// The name of the edge host that writes this.
    pub host: String,
    /// Whether this host answers for the addresses.
    pub active: bool,
    /// `metadata.generation` of the `EdgeLoadBalancer` that is in force on the host.
    pub observed_generation: i64,
    /// What keeps the load balancer from being in force, for example an address that another host on the link uses; empty if nothing does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// The targets, sorted by node and address.
    #[serde(default)]
    pub targets: Vec<TargetStatus>,
}

// SPDX-License-Identifier: Apache-2.0
//! An edge host's description of itself.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The field manager with which the edge host of this name applies its objects.
pub fn field_manager(host: &str) -> String {
    format!("steerage-edge-{host}")
}

/// An edge host. It is named after the host, which writes it on changes and every ten minutes.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "EdgeHost",
    namespaced,
    derive = "PartialEq",
    printcolumn = r#"{"name":"Active","type":"boolean","jsonPath":".spec.active"}"#,
    printcolumn = r#"{"name":"Shards","type":"integer","jsonPath":".spec.shards"}"#,
    printcolumn = r#"{"name":"Interface","type":"string","jsonPath":".spec.interface"}"#,
    printcolumn = r#"{"name":"Version","type":"string","jsonPath":".spec.version"}"#,
    printcolumn = r#"{"name":"Active-Shards","type":"string","jsonPath":".spec.activeShards","priority":1}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeHostSpec {
    /// Version of steerage-edge.
    pub version: String,
    /// Interface on the link that edge hosts and nodes share.
    pub interface: String,
    /// Addresses of the host itself on that interface.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// Whether this host answers for any shard of the load balancers' addresses.
    pub active: bool,
    /// For how many of the 128 shards of the addresses this host answers.
    #[serde(default)]
    pub shards: u32,
    /// The shards for which this host answers: numbers and ranges, such as `0-2,5`. The column `Shards` of `kubectl get edgetargethealths`
    /// shows the shard of each address. Unset by edge hosts of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_shards: Option<String>,
    /// The nodes that drain, sorted by name. Unset by edge hosts of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining_nodes: Option<Vec<DrainingNode>>,
}

/// A node that drains, as one edge host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainingNode {
    /// Name of the node.
    pub node: String,
    /// Whether the host has forwarded a packet to the node within the last minute, or sends it new connections because no other target is
    /// healthy. Also true in the first minute after the host has learned that the node drains.
    pub forwards: bool,
}

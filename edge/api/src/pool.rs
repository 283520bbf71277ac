// SPDX-License-Identifier: Apache-2.0
//! Pools of addresses for load balancers.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A pool of addresses that the controller assigns to load balancers. They must be on the link of the edge hosts, and no host may use
/// them.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "AddressPool",
    namespaced,
    status = "AddressPoolStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Addresses","type":"string","jsonPath":".spec.addresses"}"#,
    printcolumn = r#"{"name":"Auto","type":"boolean","jsonPath":".spec.autoAssign"}"#,
    printcolumn = r#"{"name":"Priority","type":"integer","jsonPath":".spec.priority","priority":1}"#,
    printcolumn = r#"{"name":"Namespaces","type":"string","jsonPath":".spec.namespaces","priority":1}"#,
    printcolumn = r#"{"name":"Assigned","type":"integer","jsonPath":".status.assigned"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolSpec {
    /// CIDRs (`10.0.200.0/24`), ranges (`10.0.200.10-10.0.200.20`) and single addresses of either family. The network and
    /// broadcast address of an IPv4 CIDR, and the first address of an IPv6 CIDR, are not assigned.
    pub addresses: Vec<String>,
    /// Whether to assign addresses of this pool to Services that do not name a pool.
    #[serde(default = "yes")]
    pub auto_assign: bool,
    /// Addresses that are not assigned: CIDRs with their first and last addresses, ranges, and single addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<String>,
    /// Namespaces whose Services may use the pool. Empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    /// Pools of a higher priority come first for Services that do not name a pool; those of equal priority by name.
    #[serde(default)]
    pub priority: i32,
    /// Which Services with one `steerage.dev/address-sharing-key` share an address: `Namespace`, those of one namespace; `Cluster`,
    /// those of all namespaces that may use the pool.
    #[serde(default)]
    pub sharing: AddressSharing,
}

/// Which Services with one key share an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AddressSharing {
    /// Those of one namespace.
    #[default]
    Namespace,
    /// Those of all namespaces.
    Cluster,
}

impl Default for AddressPoolSpec {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            auto_assign: yes(),
            excluded: Vec::new(),
            namespaces: Vec::new(),
            priority: 0,
            sharing: AddressSharing::default(),
        }
    }
}

fn yes() -> bool {
    true
}

/// Usage of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolStatus {
    /// Number of assigned addresses.
    #[serde(default)]
    pub assigned: u64,
    /// What is wrong with the pool, for example an unreadable entry. Empty if nothing is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

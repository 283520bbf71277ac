// SPDX-License-Identifier: Apache-2.0
//! Pools of addresses for load balancers.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LabelSelector;

/// A pool of addresses that the controller assigns to load balancers. They must be on the link of the edge hosts, or routers must
/// know them by routes that the edge hosts export (`--route-table`). No host may use them.
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
    /// Most addresses of each IP family that Services of one namespace may have of the pool; a shared address counts once. Unset: no
    /// limit. Services keep what they have when it is lowered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_addresses_per_namespace: Option<u32>,
    /// Namespaces whose Services may use the pool. Empty: all. Where selectors are set, too, all of them must match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    /// Labels of namespaces whose Services may use the pool. Unset: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Pools of a higher priority come first for Services that do not name a pool; those of equal priority by name.
    #[serde(default)]
    pub priority: i32,
    /// Time in seconds after which an address that was released may be given to a Service of another name. Unset: at once, but other
    /// free addresses first for a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 31_536_000))]
    pub reuse_delay_seconds: Option<u32>,
    /// Labels of Services that may use the pool. Unset: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_selector: Option<LabelSelector>,
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
            max_addresses_per_namespace: None,
            namespaces: Vec::new(),
            namespace_selector: None,
            priority: 0,
            reuse_delay_seconds: None,
            service_selector: None,
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
    /// What is wrong with the pool, for example an unreadable entry, or few free addresses. Empty if nothing is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// Addresses that were released, while `spec.reuseDelaySeconds` keeps them from other Services.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub released: Vec<ReleasedAddress>,
}

/// An address that was released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReleasedAddress {
    /// The address.
    #[schemars(with = "String")]
    pub address: IpAddr,
    /// When it was released, in seconds since 1970.
    pub released_at_seconds: i64,
    /// Namespace of the Service that had it, which may have it again at once.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name of that Service.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

// SPDX-License-Identifier: Apache-2.0
//! Addresses that load balancers may have.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Addresses that the controller may give to load balancers. They must lie on the link of the edge hosts and be used by nobody else.
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
    printcolumn = r#"{"name":"Assigned","type":"integer","jsonPath":".status.assigned"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolSpec {
    /// CIDRs (`10.0.200.0/24`), ranges (`10.0.200.10-10.0.200.20`) or single addresses, of either family.
    pub addresses: Vec<String>,
    /// Whether Services that do not name this pool may get addresses of it.
    #[serde(default = "yes")]
    pub auto_assign: bool,
}

fn yes() -> bool {
    true
}

/// How much of a pool is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolStatus {
    /// How many addresses are given out.
    #[serde(default)]
    pub assigned: u64,
    /// What is wrong with the pool, for example an entry that cannot be read; empty if nothing is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

// SPDX-License-Identifier: Apache-2.0
//! An edge host, as it describes itself.

use std::net::IpAddr;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One edge host. Named after the host and written by it alone, when something in it changes.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "steerage.dev",
    version = "v1alpha1",
    kind = "EdgeHost",
    namespaced,
    derive = "PartialEq",
    printcolumn = r#"{"name":"Active","type":"boolean","jsonPath":".spec.active"}"#,
    printcolumn = r#"{"name":"Interface","type":"string","jsonPath":".spec.interface"}"#,
    printcolumn = r#"{"name":"Version","type":"string","jsonPath":".spec.version"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeHostSpec {
    /// The version of the edge binary.
    pub version: String,
    /// The interface on the nodes' link.
    pub interface: String,
    /// The host's own addresses on that interface.
    #[schemars(with = "Vec<String>")]
    pub addresses: Vec<IpAddr>,
    /// Whether this host answers for the load balancers' addresses.
    pub active: bool,
}

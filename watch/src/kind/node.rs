// SPDX-License-Identifier: Apache-2.0
//! Nodes.

use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;
use serde::Deserialize;
use steerage_model::{Key, Node, NodeAgent, names};

use super::json::{Meta, address_or_note, or_default};
use super::{Kind, Malformed, Selectors};

/// Nodes: all, or one.
#[derive(Clone, Debug)]
pub struct Nodes {
    name: Option<String>,
}

impl Nodes {
    /// All nodes.
    pub fn all() -> Self {
        Self { name: None }
    }

    /// The node of this name.
    pub fn one(name: impl Into<String>) -> Self {
        Self { name: Some(name.into()) }
    }
}

impl Kind for Nodes {
    type Object = Node;

    fn name(&self) -> &'static str {
        "nodes"
    }

    fn path(&self) -> String {
        "/api/v1/nodes".to_owned()
    }

    fn selectors(&self) -> Selectors {
        Selectors { labels: None, fields: self.name.as_ref().map(|name| format!("metadata.name={name}")) }
    }

    fn key(&self, key: Key) -> String {
        key.name().to_owned()
    }

    fn project(json: &str, notes: &mut Vec<String>) -> Result<Option<Node>, Malformed> {
        let Wire { metadata, spec, status } = serde_json::from_str(json)?;
        let mut addresses = |kind: &str| {
            let of_kind = status.addresses.iter().filter(|address| address.kind == kind);
            of_kind
                .filter_map(|address| address_or_note("status.addresses", &address.address, notes))
                .collect()
        };
        let (internal, external) = (addresses("InternalIP"), addresses("ExternalIP"));
        // Objects written before dual-stack have only the single field.
        let pod_cidrs =
            if spec.pod_cidrs.is_empty() { spec.pod_cidr.into_iter().collect() } else { spec.pod_cidrs };
        let labels = metadata.labels;
        let mut annotations = metadata.annotations.0;
        Ok(Some(Node {
            addresses: internal,
            external_addresses: external,
            provider_id: spec.provider_id.filter(|id| !id.is_empty()),
            zone: labels.get(names::ZONE_LABEL).filter(|zone| !zone.is_empty()).cloned(),
            pod_cidrs: pod_cidrs
                .iter()
                .filter(|cidr| !cidr.is_empty())
                .filter_map(|cidr| address_or_note("spec.podCIDRs", cidr, notes))
                .collect(),
            excluded: labels.get(names::EXCLUDE_LABEL).is_some_and(|v| Node::exclusion_label_excludes(v)),
            deleting: metadata.deletion_timestamp.is_some(),
            autoscaler_taint: spec.taints.iter().any(|taint| taint.key == names::AUTOSCALER_TAINT),
            cordoned: spec.unschedulable.unwrap_or(false),
            shutting_down: status.conditions.iter().any(Condition::is_of_shutdown),
            drain_requested: annotations.get(names::DRAIN).is_some_and(|v| Node::annotation_drains(v)),
            created: metadata
                .creation_timestamp
                .and_then(|text| text.parse::<Timestamp>().ok())
                .map(SystemTime::from),
            agent: annotations.remove(names::AGENT_MODE).map(|mode| NodeAgent {
                mode,
                version: annotations.remove(names::AGENT_VERSION).unwrap_or_default(),
            }),
            labels: Arc::new(labels),
            name: metadata.name,
        }))
    }
}

#[derive(Deserialize)]
struct Wire {
    metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    spec: Spec,
    #[serde(default, deserialize_with = "or_default")]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs", deserialize_with = "or_default")]
    pod_cidrs: Vec<String>,
    #[serde(rename = "providerID")]
    provider_id: Option<String>,
    unschedulable: Option<bool>,
    #[serde(deserialize_with = "or_default")]
    taints: Vec<Taint>,
}

#[derive(Deserialize)]
struct Taint {
    key: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    #[serde(deserialize_with = "or_default")]
    addresses: Vec<Address>,
    #[serde(deserialize_with = "or_default")]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    message: Option<String>,
}

impl Condition {
    fn is_of_shutdown(&self) -> bool {
        let message = self.message.as_deref().unwrap_or_default();
        self.kind == "Ready" && self.status == "False" && Node::message_is_of_shutdown(message)
    }
}

#[derive(Deserialize)]
struct Address {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! The projection of a Node, and the rule of its eligibility.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use ipnet::IpNet;

/// The fields of a Node that Steerage uses. Not readiness: it does not affect eligibility (KEP-3458), and every heartbeat
/// would be a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The node's name.
    pub name: String,
    /// The internal addresses, in the order of the status.
    pub addresses: Vec<IpAddr>,
    /// The external addresses, in the order of the status.
    pub external_addresses: Vec<IpAddr>,
    /// `spec.providerID`.
    pub provider_id: Option<String>,
    /// The label `topology.kubernetes.io/zone`.
    pub zone: Option<String>,
    /// `metadata.labels`.
    pub labels: Arc<BTreeMap<String, String>>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// The exclusion label is set, with any value but false.
    pub excluded: bool,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// The cluster autoscaler's taint is set.
    pub autoscaler_taint: bool,
    /// `spec.unschedulable`: the node is cordoned.
    pub cordoned: bool,
    /// `metadata.creationTimestamp`.
    pub created: Option<SystemTime>,
    /// The agent that serves it.
    pub agent: Option<NodeAgent>,
}

/// What an agent's annotations on its Node say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAgent {
    /// The annotation [`crate::names::AGENT_MODE`]: a name of [`AgentMode`], unless the agent is of another version.
    pub mode: String,
    /// The annotation [`crate::names::AGENT_VERSION`].
    pub version: String,
}

/// Which Services an agent serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentMode {
    /// Those labelled for it; kube-proxy serves the others.
    Labelled,
    /// All that are not labelled for another proxy; no kube-proxy runs.
    KubeProxyReplacement,
}

impl AgentMode {
    /// The mode as the annotation names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Labelled => "labelled",
            Self::KubeProxyReplacement => "kube-proxy-replacement",
        }
    }
}

/// Why a node is not eligible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IneligibleReason {
    /// The node is being deleted.
    Deleting,
    /// The cluster autoscaler will delete the node.
    AutoscalerTaint,
    /// The node has the exclusion label.
    Excluded,
}

impl fmt::Display for IneligibleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deleting => "the node is being deleted",
            Self::AutoscalerTaint => "the cluster autoscaler is about to delete the node",
            Self::Excluded => "the node is labelled node.kubernetes.io/exclude-from-external-load-balancers",
        })
    }
}

impl Node {
    /// Whether the node is eligible, else why not.
    pub fn eligibility(&self) -> Result<(), IneligibleReason> {
        if self.deleting {
            Err(IneligibleReason::Deleting)
        } else if self.autoscaler_taint {
            Err(IneligibleReason::AutoscalerTaint)
        } else if self.excluded {
            Err(IneligibleReason::Excluded)
        } else {
            Ok(())
        }
    }

    /// Whether this value of the exclusion label excludes the node: every value but a false of Go's `strconv.ParseBool`, as in
    /// the service controller.
    pub fn exclusion_label_excludes(value: &str) -> bool {
        !matches!(value, "0" | "f" | "F" | "false" | "FALSE" | "False")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_false_values_of_the_label_include_a_node() {
        for value in ["false", "False", "FALSE", "f", "F", "0"] {
            assert!(!Node::exclusion_label_excludes(value), "{value}");
        }
        for value in ["", "true", "no", "fAlse", "garbage"] {
            assert!(Node::exclusion_label_excludes(value), "{value}");
        }
    }

    #[test]
    fn deletion_precedes_other_reasons() {
        let node = Node { deleting: true, autoscaler_taint: true, excluded: true, ..Node::default() };
        assert_eq!(node.eligibility(), Err(IneligibleReason::Deleting));
        let node = Node { autoscaler_taint: true, excluded: true, ..Node::default() };
        assert_eq!(node.eligibility(), Err(IneligibleReason::AutoscalerTaint));
        assert_eq!(Node::default().eligibility(), Ok(()));
    }
}

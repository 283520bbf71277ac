// SPDX-License-Identifier: Apache-2.0
//! The projection of a Node, and the rule of its eligibility.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use ipnet::IpNet;

/// The fields of a Node that Steerage uses. Not readiness, but for an orderly shutdown: it does not affect eligibility (KEP-3458),
/// and every heartbeat would be a change.
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
    /// The kubelet says that the node is shutting down.
    pub shutting_down: bool,
    /// The annotation [`crate::names::DRAIN`] asks for it.
    pub drain_requested: bool,
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
    /// The kubelet says that the node is shutting down.
    ShuttingDown,
    /// An annotation of the node asks that it be drained.
    DrainRequested,
    /// The node is cordoned, where that drains it.
    Cordoned,
    /// The node has the exclusion label.
    Excluded,
}

impl IneligibleReason {
    /// Whether the node drains: it was eligible, and is about to leave.
    pub fn is_drain(self) -> bool {
        self != Self::Excluded
    }

    /// Whether somebody has said of this very node that it should leave. A node that is only cordoned or excluded may be so by
    /// mistake, with many others.
    pub fn is_decided(self) -> bool {
        !matches!(self, Self::Cordoned | Self::Excluded)
    }
}

impl fmt::Display for IneligibleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deleting => "the node is being deleted",
            Self::AutoscalerTaint => "the cluster autoscaler is about to delete the node",
            Self::ShuttingDown => "the node is shutting down",
            Self::DrainRequested => "the node is annotated steerage.dev/drain",
            Self::Cordoned => "the node is cordoned",
            Self::Excluded => "the node is labelled node.kubernetes.io/exclude-from-external-load-balancers",
        })
    }
}

impl Node {
    /// Whether the node is eligible, else why not. `drains_cordoned`: a cordoned one is not.
    pub fn eligibility(&self, drains_cordoned: bool) -> Result<(), IneligibleReason> {
        let reasons = [
            (self.deleting, IneligibleReason::Deleting),
            (self.autoscaler_taint, IneligibleReason::AutoscalerTaint),
            (self.shutting_down, IneligibleReason::ShuttingDown),
            (self.drain_requested, IneligibleReason::DrainRequested),
            (self.cordoned && drains_cordoned, IneligibleReason::Cordoned),
            (self.excluded, IneligibleReason::Excluded),
        ];
        reasons.into_iter().find(|(holds, _)| *holds).map_or(Ok(()), |(_, reason)| Err(reason))
    }

    /// Why the node drains, if it does. One that is excluded was no target.
    pub fn drain(&self, drains_cordoned: bool) -> Option<IneligibleReason> {
        self.eligibility(drains_cordoned).err().filter(|reason| reason.is_drain() && !self.excluded)
    }

    /// Whether the value of [`crate::names::DRAIN`] asks for a drain.
    pub fn annotation_drains(value: &str) -> bool {
        value.trim() == "true"
    }

    /// Whether the message of a Ready condition that is false says that the node is shutting down. The kubelet lists several
    /// reasons in brackets.
    pub fn message_is_of_shutdown(message: &str) -> bool {
        let listed = message.trim().trim_start_matches('[').trim_end_matches(']');
        listed.split(", ").any(|reason| reason == "node is shutting down")
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
        assert_eq!(node.eligibility(false), Err(IneligibleReason::Deleting));
        let node = Node { autoscaler_taint: true, excluded: true, ..Node::default() };
        assert_eq!(node.eligibility(false), Err(IneligibleReason::AutoscalerTaint));
        assert_eq!(Node::default().eligibility(true), Ok(()));
    }

    #[test]
    fn excluded_node_does_not_drain_and_a_cordoned_one_only_on_request() {
        let cordoned = Node { cordoned: true, ..Node::default() };
        assert_eq!((cordoned.eligibility(false), cordoned.drain(false)), (Ok(()), None));
        assert_eq!(cordoned.drain(true), Some(IneligibleReason::Cordoned));
        let shutting_down = Node { shutting_down: true, ..cordoned.clone() };
        assert_eq!(shutting_down.drain(true), Some(IneligibleReason::ShuttingDown));
        let requested = Node { drain_requested: true, ..cordoned };
        assert_eq!(requested.drain(false), Some(IneligibleReason::DrainRequested));
        assert_eq!(Node { excluded: true, ..requested }.drain(true), None);
    }

    #[test]
    fn shutdown_is_one_of_the_kubelets_reasons() {
        for message in ["node is shutting down", "[container runtime is down, node is shutting down]"] {
            assert!(Node::message_is_of_shutdown(message), "{message}");
        }
        for message in ["", "Kubelet stopped posting node status.", "kubelet is posting ready status"] {
            assert!(!Node::message_is_of_shutdown(message), "{message}");
        }
    }
}

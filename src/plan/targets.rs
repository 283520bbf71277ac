// SPDX-License-Identifier: Apache-2.0
//! The nodes that a Service's load balancer sends to, with a reason per node.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use steerage_model::{EndpointSlice, Family, IneligibleReason, Service, TrafficPolicy, membership};
use steerage_provider_api::{GroupTargets, SharedSet, Steering, Target, TargetSet};

use super::node_change::NodeDependence;
use super::node_targets::{NodeTarget, NodeTargets, NodeWithoutAgent};
use super::{Config, NodeLabels, PodTargets};

/// The most nodes with an endpoint that are named to the edge: each edge host reads all.
const MOST_ENDPOINT_NODES: usize = 5000;

/// What the plan needs of a Service's endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndpointSummary {
    /// Whether an endpoint takes traffic, on any node or none.
    pub(crate) is_usable: bool,
    /// The number of endpoints of each member node.
    members: BTreeMap<String, u32>,
}

impl EndpointSummary {
    pub(crate) fn new<'a>(slices: impl Iterator<Item = &'a EndpointSlice> + Clone) -> Self {
        let mut endpoints = slices.clone().flat_map(|slice| &slice.endpoints);
        let is_usable = endpoints.any(|endpoint| endpoint.ready || endpoint.is_serving_terminating());
        let members = membership(slices).into_iter().map(|(node, count)| (node.to_owned(), count)).collect();
        Self { is_usable, members }
    }

    /// The names of the nodes with an endpoint, sorted. Slices, which a tenant may write, can name any number of nodes that do not exist:
    /// these are left out. `None` if no usable endpoint is on a known node, so that nobody knows where they are, and if there are more
    /// than a cluster has.
    fn nodes(&self, is_node: impl Fn(&str) -> bool) -> Option<Arc<[String]>> {
        let names: Arc<[String]> = self.members.keys().filter(|name| is_node(name)).cloned().collect();
        let is_known = !self.is_usable || !names.is_empty();
        (is_known && names.len() <= MOST_ENDPOINT_NODES).then_some(names)
    }
}

/// The targets of one load balancer: nodes, or pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TargetPlan {
    pub(crate) set: TargetSet,
    /// `None` if the targets are nodes.
    pub(crate) pods: Option<PodTargets>,
    /// Targets that are not eligible: no eligible node can serve the Service.
    pub(crate) ineligible: Vec<(String, IneligibleReason)>,
    /// Eligible nodes that cannot serve this Service because they have no agent.
    pub(crate) without_agent: Arc<[NodeWithoutAgent]>,
    /// Whether no node with the labels can serve the Service, so that others are targets.
    pub(crate) misses_labels: bool,
    /// Whether nodes are targets because of their endpoints.
    pub(crate) is_by_endpoints: bool,
    /// The nodes on which the plan depends.
    pub(crate) depends: NodeDependence,
}

impl TargetPlan {
    /// The plan of a Service whose targets are pods. It depends on no node.
    pub(crate) fn of_pods(pods: PodTargets) -> Self {
        Self { pods: Some(pods), ..Self::default() }
    }

    /// The labels that the Service asks for.
    pub(crate) fn labels(&self) -> Option<&NodeLabels> {
        self.depends.choice.as_ref().map(|(labels, _)| labels)
    }

    /// Whether any pod is a target.
    pub(crate) fn has_pods(&self) -> bool {
        self.pods.iter().flat_map(BTreeMap::values).any(|pods| !pods.is_empty())
    }

    /// The targets, for the provider.
    pub(crate) fn targets(&self) -> GroupTargets {
        match &self.pods {
            Some(pods) => GroupTargets { nodes: None, pods: pods.clone() },
            None => GroupTargets::of_nodes(self.set.clone()),
        }
    }
}

/// Why a node is a target, or is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetReason {
    /// A target: it has this many endpoints.
    Endpoints(u32),
    /// A target: all eligible nodes are, of those with the labels that the Service asks for.
    AllEligible,
    /// A target although it is not eligible: no eligible node can serve the Service.
    LastResort(IneligibleReason),
    /// No target: it has no endpoint of the Service.
    NoEndpoint,
    /// No target: it is not eligible.
    Ineligible(IneligibleReason),
    /// No target: the Service is labelled for the agent, and the node has none.
    NoAgent,
    /// No target: it lacks a label that the Service asks for.
    NoLabels,
    /// A target although it lacks a label: no node with the labels can serve the Service.
    DespiteLabels,
    /// A target for now: its removal is held.
    Held,
}

impl fmt::Display for TargetReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoints(1) => f.write_str("1 endpoint"),
            Self::Endpoints(count) => write!(f, "{count} endpoints"),
            Self::AllEligible => f.write_str("eligible, and with the labels if the Service asks for some"),
            Self::LastResort(why) => {
                write!(f, "target although ineligible ({why}): no eligible node can serve the Service")
            }
            Self::NoEndpoint => f.write_str("no endpoint"),
            Self::Ineligible(why) => write!(f, "{why}"),
            Self::NoAgent => f.write_str("no agent on the node"),
            Self::NoLabels => f.write_str("the node lacks a label that the Service asks for"),
            Self::DespiteLabels => f.write_str(
                "target although the node lacks a label: no node with the labels can serve the Service",
            ),
            Self::Held => {
                f.write_str("target for now: more than a third of the targets would leave within a minute")
            }
        }
    }
}

/// The targets of a Service.
///
/// Under the policy Local and `api` steering: the eligible nodes with an endpoint. If there are none, the ineligible nodes with an
/// endpoint. If there are none either although an endpoint is usable (it has no node, or an unknown one), all eligible nodes: a load
/// balancer never goes to zero targets while the Service has a usable endpoint. In all other cases: all eligible nodes, or all nodes
/// if none is eligible. Under `fused` steering and the policy Local the set also has the names of the nodes with an endpoint.
///
/// With labels, only nodes that have them. If none of these is eligible, or has an endpoint where endpoints count, all as if there were no
/// labels.
pub(crate) fn targets(
    service: &Service,
    endpoints: &EndpointSummary,
    nodes: &NodeTargets,
    steering: Steering,
    labels: Option<&NodeLabels>,
    config: &Config,
) -> TargetPlan {
    let needs_agent = service.is_labelled_for_agent();
    let set = if needs_agent { SharedSet::Agents } else { SharedSet::Eligible };
    let shared = nodes.shared(set);
    let mut plan = TargetPlan {
        set: nodes.set(set),
        pods: None,
        ineligible: shared.exceptions.ineligible.clone(),
        without_agent: Arc::clone(&shared.exceptions.without_agent),
        misses_labels: false,
        is_by_endpoints: false,
        depends: NodeDependence {
            set: Some(set),
            family: only_family(service),
            members: Vec::new(),
            choice: labels.map(|labels| (labels.clone(), needs_agent)),
            copies_set: false,
            revision: nodes.revision,
        },
    };
    if let Some(choice) = &plan.depends.choice {
        let labelled = nodes.labelled(choice);
        plan.misses_labels = labelled.is_empty();
        plan.depends.copies_set = plan.misses_labels;
        // Its own set in each case: the removals of one set are counted, whatever it consists of.
        if plan.misses_labels {
            plan.set = TargetSet::own_shared(Arc::clone(&shared.targets));
        } else {
            (plan.set, plan.ineligible) = (TargetSet::own_shared(labelled), Vec::new());
        }
    }
    if service.external_policy == TrafficPolicy::Local && steering == Steering::Fused {
        plan.set.endpoint_nodes = endpoints.nodes(|name| nodes.by_name.contains_key(name));
        plan.depends.members = endpoints.members.keys().cloned().collect();
    }
    if (service.external_policy, steering) != (TrafficPolicy::Local, Steering::Api) {
        return plan;
    }
    plan.depends.members = endpoints.members.keys().cloned().collect();
    let (mut chosen, mut others, mut last_resort) = (Vec::new(), Vec::new(), Vec::new());
    for (name, count) in &endpoints.members {
        let Some(node) = nodes.by_name.get(name) else { continue };
        match target_reason(node, Some(*count), needs_agent, labels, steering) {
            TargetReason::Endpoints(count) => chosen.push(weighted(node, count, config)),
            TargetReason::NoLabels => others.push(weighted(node, *count, config)),
            TargetReason::Ineligible(why) => last_resort.push((node, *count, why)),
            _ => {}
        }
    }
    let is_missed = chosen.is_empty() && !(others.is_empty() && last_resort.is_empty());
    if chosen.is_empty() {
        chosen = others;
    }
    let mut ineligible = Vec::new();
    if chosen.is_empty() {
        for (node, count, why) in last_resort {
            chosen.push(weighted(node, count, config));
            ineligible.push((node.target.node.clone(), why));
        }
    }
    if chosen.is_empty() && endpoints.is_usable {
        return plan;
    }
    plan.misses_labels |= labels.is_some() && is_missed;
    plan.ineligible = ineligible;
    plan.set = TargetSet {
        draining: nodes.draining(endpoints.members.keys().map(String::as_str)),
        ..TargetSet::own(chosen)
    };
    plan.is_by_endpoints = true;
    // The nodes without an agent are reported also where the targets are chosen one by one.
    plan.depends.set = Some(set).filter(|_| needs_agent);
    plan
}

/// A node as a target of the Service's own set, if it may stay one: nobody deletes it or is about to, and it has an endpoint, where
/// nodes without endpoint drop connections.
pub(crate) fn staying_target(
    node: &str,
    plan: &TargetPlan,
    endpoints: &EndpointSummary,
    nodes: &NodeTargets,
    config: &Config,
) -> Option<Arc<Target>> {
    if !plan.is_by_endpoints {
        return nodes.staying(node);
    }
    let count = endpoints.members.get(node)?;
    Some(weighted(nodes.existing(node)?, *count, config))
}

/// The family of a Service that has only one.
fn only_family(service: &Service) -> Option<Family> {
    match (&service.families[..], &service.cluster_ips[..]) {
        ([only], _) => Some(*only),
        ([], [only]) => Some(Family::of(*only)),
        _ => None,
    }
}

fn weighted(node: &NodeTarget, count: u32, config: &Config) -> Arc<Target> {
    let weight = if config.capabilities.weights { count.max(1) } else { 1 };
    if weight == node.target.weight {
        return Arc::clone(&node.target);
    }
    Arc::new(Target { weight, ..(*node.target).clone() })
}

fn target_reason(
    node: &NodeTarget,
    endpoints: Option<u32>,
    needs_agent: bool,
    labels: Option<&NodeLabels>,
    steering: Steering,
) -> TargetReason {
    if needs_agent && !node.has_agent {
        return TargetReason::NoAgent;
    }
    match (node.eligibility, endpoints, steering) {
        (Err(why), _, _) => TargetReason::Ineligible(why),
        _ if labels.is_some_and(|labels| !labels.are_on(&node.labels)) => TargetReason::NoLabels,
        (Ok(()), Some(count), Steering::Api) => TargetReason::Endpoints(count),
        (Ok(()), None, Steering::Api) => TargetReason::NoEndpoint,
        (Ok(()), _, Steering::HealthCheck | Steering::Fused) => TargetReason::AllEligible,
    }
}

/// Why each node is a target of this plan, or is not.
pub(crate) fn target_reasons(
    service: &Service,
    endpoints: &EndpointSummary,
    nodes: &NodeTargets,
    plan: &TargetPlan,
) -> Vec<(String, TargetReason)> {
    let steering = if plan.is_by_endpoints { Steering::Api } else { Steering::HealthCheck };
    let reason = |(name, node): (&String, &NodeTarget)| {
        let count = endpoints.members.get(name).copied();
        let ineligible = plan.ineligible.iter().find(|(node, _)| node == name);
        let is_target = plan.set.targets.binary_search_by(|target| target.node.cmp(name)).is_ok();
        let reason = match ineligible {
            Some((_, why)) => TargetReason::LastResort(*why),
            None => target_reason(node, count, service.is_labelled_for_agent(), plan.labels(), steering),
        };
        let reason = match reason {
            TargetReason::NoLabels if is_target && plan.misses_labels => TargetReason::DespiteLabels,
            TargetReason::Ineligible(_) | TargetReason::NoAgent | TargetReason::NoLabels if is_target => {
                TargetReason::Held
            }
            reason => reason,
        };
        (name.clone(), reason)
    };
    nodes.by_name.iter().map(reason).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_endpoints_are_named_unless_they_are_too_many_or_unknown() {
        let summary = |is_usable, count: usize| {
            let members = (0..count).map(|number| (format!("n{number}"), 1)).collect();
            EndpointSummary { is_usable, members }
        };
        let named = |is_usable, count| summary(is_usable, count).nodes(|_| true).map(|nodes| nodes.len());
        assert_eq!(named(true, 2), Some(2));
        assert_eq!(named(false, 0), Some(0), "no endpoint");
        assert_eq!(named(true, 0), None, "endpoints without a node");
        assert_eq!(named(true, MOST_ENDPOINT_NODES), Some(MOST_ENDPOINT_NODES));
        assert_eq!(named(true, MOST_ENDPOINT_NODES + 1), None);
        let invented = summary(true, MOST_ENDPOINT_NODES + 1);
        assert_eq!(invented.nodes(|name| name == "n1").as_deref(), Some(&["n1".to_owned()][..]));
        assert_eq!(invented.nodes(|_| false), None, "endpoints on unknown nodes alone");
    }
}

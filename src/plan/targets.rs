// SPDX-License-Identifier: Apache-2.0
//! The nodes that a Service's load balancer sends to, with a reason per node.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use steerage_model::{EndpointSlice, Family, IneligibleReason, Node, Service, TrafficPolicy, membership};
use steerage_provider_api::{GroupTargets, SharedSet, Steering, Target, TargetSet};

use super::node_change::NodeDependence;
use super::{Config, PodTargets};

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
}

/// All nodes as possible targets, prepared once for the plans of many Services.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeTargets {
    /// Grows with every change of a node.
    pub(crate) generation: u64,
    by_name: BTreeMap<String, NodeTarget>,
    eligible: SharedTargets,
    agents: SharedTargets,
}

/// The targets of a shared set.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedTargets {
    pub(super) targets: Arc<[Target]>,
    pub(super) exceptions: SetExceptions,
    /// Targets that have an address, but not of this family: load balancers with this family alone report them.
    pub(super) lacking: BTreeMap<Family, Vec<String>>,
}

/// What all users of a shared set report of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SetExceptions {
    is_empty: bool,
    /// All targets, if no node is eligible.
    ineligible: Vec<(String, IneligibleReason)>,
    /// Eligible nodes that are no targets, because they have no agent.
    without_agent: Arc<[String]>,
}

impl SharedTargets {
    /// The eligible nodes. If there is none, all nodes: pods that still run there are better than nothing.
    fn new<'a>(nodes: impl Iterator<Item = &'a NodeTarget> + Clone) -> Self {
        let mut exceptions = SetExceptions::default();
        let eligible = nodes.clone().filter(|node| node.eligibility.is_ok());
        let mut targets: Arc<[Target]> = eligible.map(|node| node.target.clone()).collect();
        // A node that has just registered may have no address: it is no target yet.
        if targets.iter().all(|target| target.addresses.is_empty()) {
            let reason = |node: &NodeTarget| Some((node.target.node.clone(), node.eligibility.err()?));
            targets = nodes.clone().map(|node| node.target.clone()).collect();
            exceptions.ineligible = nodes.filter_map(reason).collect();
        }
        exceptions.is_empty = targets.is_empty();
        let mut lacking = BTreeMap::<Family, Vec<String>>::new();
        // A node that has no address yet is about to get one; it is no exception worth a condition on every Service.
        for target in targets.iter().filter(|target| !target.addresses.is_empty()) {
            let has = |family| target.addresses.iter().any(|address| Family::of(*address) == family);
            for family in [Family::V4, Family::V6].into_iter().filter(|family| !has(*family)) {
                lacking.entry(family).or_default().push(target.node.clone());
            }
        }
        Self { targets, exceptions, lacking }
    }
}

#[derive(Clone, Debug)]
struct NodeTarget {
    target: Target,
    eligibility: Result<(), IneligibleReason>,
    has_agent: bool,
}

impl NodeTargets {
    pub(crate) fn new<'a>(nodes: impl Iterator<Item = &'a Node>, generation: u64) -> Self {
        let by_name: BTreeMap<String, NodeTarget> = nodes
            .map(|node| {
                let node_target = NodeTarget {
                    target: target(node),
                    eligibility: node.eligibility(),
                    has_agent: node.agent.is_some(),
                };
                (node.name.clone(), node_target)
            })
            .collect();
        let without_agent = by_name.values().filter(|node| node.eligibility.is_ok() && !node.has_agent);
        let without_agent = without_agent.map(|node| node.target.node.clone()).collect();
        let mut agents = SharedTargets::new(by_name.values().filter(|node| node.has_agent));
        agents.exceptions.without_agent = without_agent;
        Self { generation, eligible: SharedTargets::new(by_name.values()), agents, by_name }
    }

    /// Of the changed nodes, those that became eligible or ineligible, in order. New nodes did not.
    pub(crate) fn changed_eligibility<'a>(
        &'a self,
        before: &'a Self,
        changed: &'a BTreeSet<String>,
    ) -> impl Iterator<Item = (&'a str, Result<(), IneligibleReason>)> {
        changed.iter().filter_map(|name| {
            let (old, new) = (before.by_name.get(name)?, self.by_name.get(name)?);
            (old.eligibility != new.eligibility).then_some((name.as_str(), new.eligibility))
        })
    }

    /// A shared set, for the provider.
    pub(crate) fn set(&self, set: SharedSet) -> TargetSet {
        let targets = Arc::clone(&self.shared(set).targets);
        TargetSet { shared: Some(set), generation: self.generation, targets }
    }

    /// Puts other targets in the place of a shared set's.
    pub(crate) fn replace(&mut self, set: SharedSet, targets: Arc<[Target]>) {
        match set {
            SharedSet::Eligible => self.eligible.targets = targets,
            SharedSet::Agents => self.agents.targets = targets,
        }
    }

    /// A node as a target of a shared set, if it may stay one: nobody deletes it or is about to.
    pub(crate) fn staying(&self, node: &str) -> Option<Target> {
        Some(self.existing(node)?.target.clone())
    }

    /// A node that exists, that nobody deletes, and that the cluster autoscaler is not about to delete.
    fn existing(&self, node: &str) -> Option<&NodeTarget> {
        let stops = |node: &NodeTarget| {
            matches!(node.eligibility, Err(IneligibleReason::Deleting | IneligibleReason::AutoscalerTaint))
        };
        self.by_name.get(node).filter(|node| !stops(node))
    }

    pub(super) fn shared(&self, set: SharedSet) -> &SharedTargets {
        match set {
            SharedSet::Eligible => &self.eligible,
            SharedSet::Agents => &self.agents,
        }
    }
}

fn target(node: &Node) -> Target {
    Target {
        node: node.name.clone(),
        addresses: node.addresses.clone(),
        provider_id: node.provider_id.clone(),
        zone: node.zone.clone(),
        pod_cidrs: node.pod_cidrs.clone(),
        weight: 1,
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
    pub(crate) without_agent: Arc<[String]>,
    /// The nodes on which the plan depends.
    pub(crate) depends: NodeDependence,
}

impl TargetPlan {
    /// The plan of a Service whose targets are pods. It depends on no node.
    pub(crate) fn of_pods(pods: PodTargets) -> Self {
        Self { pods: Some(pods), ..Self::default() }
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
    /// A target: all eligible nodes are.
    AllEligible,
    /// A target although it is not eligible: no eligible node can serve the Service.
    LastResort(IneligibleReason),
    /// No target: it has no endpoint of the Service.
    NoEndpoint,
    /// No target: it is not eligible.
    Ineligible(IneligibleReason),
    /// No target: the Service is labelled for the agent, and the node has none.
    NoAgent,
    /// A target for now: its removal is held.
    Held,
}

impl fmt::Display for TargetReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoints(1) => f.write_str("1 endpoint"),
            Self::Endpoints(count) => write!(f, "{count} endpoints"),
            Self::AllEligible => f.write_str("all eligible nodes are targets"),
            Self::LastResort(why) => {
                write!(f, "target although ineligible ({why}): no eligible node can serve the Service")
            }
            Self::NoEndpoint => f.write_str("no endpoint"),
            Self::Ineligible(why) => write!(f, "{why}"),
            Self::NoAgent => f.write_str("no agent on the node"),
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
/// if none is eligible.
pub(crate) fn targets(
    service: &Service,
    endpoints: &EndpointSummary,
    nodes: &NodeTargets,
    steering: Steering,
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
        depends: NodeDependence { set: Some(set), family: only_family(service), members: Vec::new() },
    };
    if (service.external_policy, steering) != (TrafficPolicy::Local, Steering::Api) {
        return plan;
    }
    plan.depends.members = endpoints.members.keys().cloned().collect();
    let (mut chosen, mut last_resort) = (Vec::new(), Vec::new());
    for (name, count) in &endpoints.members {
        let Some(node) = nodes.by_name.get(name) else { continue };
        match target_reason(node, Some(*count), needs_agent, steering) {
            TargetReason::Endpoints(count) => chosen.push(weighted(node, count, config)),
            TargetReason::Ineligible(why) => last_resort.push((node, *count, why)),
            _ => {}
        }
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
    plan.ineligible = ineligible;
    plan.set = TargetSet::own(chosen);
    // The nodes without an agent are reported also where the targets are chosen one by one.
    plan.depends.set = Some(set).filter(|_| needs_agent);
    plan
}

/// A node as a target of a Service's own set, if it may stay one: nobody deletes it or is about to, and it has an endpoint. A node
/// without endpoint drops connections.
pub(crate) fn staying_target(
    node: &str,
    endpoints: &EndpointSummary,
    nodes: &NodeTargets,
    config: &Config,
) -> Option<Target> {
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

fn weighted(node: &NodeTarget, count: u32, config: &Config) -> Target {
    let weight = if config.capabilities.weights { count.max(1) } else { 1 };
    Target { weight, ..node.target.clone() }
}

fn target_reason(
    node: &NodeTarget,
    endpoints: Option<u32>,
    needs_agent: bool,
    steering: Steering,
) -> TargetReason {
    if needs_agent && !node.has_agent {
        return TargetReason::NoAgent;
    }
    match (node.eligibility, endpoints, steering) {
        (Err(why), _, _) => TargetReason::Ineligible(why),
        (Ok(()), Some(count), Steering::Api) => TargetReason::Endpoints(count),
        (Ok(()), None, Steering::Api) => TargetReason::NoEndpoint,
        (Ok(()), _, Steering::HealthCheck) => TargetReason::AllEligible,
    }
}

/// Why each node is a target of this plan, or is not.
pub(crate) fn target_reasons(
    service: &Service,
    endpoints: &EndpointSummary,
    nodes: &NodeTargets,
    plan: &TargetPlan,
) -> Vec<(String, TargetReason)> {
    let steering = if plan.set.shared.is_none() { Steering::Api } else { Steering::HealthCheck };
    let reason = |(name, node): (&String, &NodeTarget)| {
        let count = endpoints.members.get(name).copied();
        let ineligible = plan.ineligible.iter().find(|(node, _)| node == name);
        let is_target = plan.set.targets.binary_search_by(|target| target.node.cmp(name)).is_ok();
        let reason = match ineligible {
            Some((_, why)) => TargetReason::LastResort(*why),
            None => target_reason(node, count, service.is_labelled_for_agent(), steering),
        };
        let reason = match reason {
            TargetReason::Ineligible(_) | TargetReason::NoAgent if is_target => TargetReason::Held,
            reason => reason,
        };
        (name.clone(), reason)
    };
    nodes.by_name.iter().map(reason).collect()
}

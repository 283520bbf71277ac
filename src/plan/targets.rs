// SPDX-License-Identifier: Apache-2.0
//! Which nodes a Service's load balancer sends to, and why.

use std::collections::{BTreeMap, hash_map::DefaultHasher};
use std::fmt;
use std::hash::{Hash, Hasher};

use steerage_model::{EndpointSlice, IneligibleReason, Node, Service, TrafficPolicy, membership};
use steerage_provider_api::{SharedSet, Steering, Target, TargetSet};

use super::Config;

/// All nodes, prepared for the plans of many Services. Made anew when a node changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeTargets {
    all: BTreeMap<String, NodeTarget>,
    eligible: Shared,
    agents: Shared,
    without_agent: Vec<String>,
}

#[derive(Clone, Debug)]
struct NodeTarget {
    target: Target,
    eligible: Result<(), IneligibleReason>,
    agent: bool,
}

/// A shared set, with what tells it from another.
#[derive(Clone, Debug, Default)]
struct Shared {
    targets: Vec<Target>,
    digest: u64,
}

impl Shared {
    fn new(which: SharedSet, targets: Vec<Target>) -> Self {
        Self { digest: digest(&(which, &targets)), targets }
    }
}

impl NodeTargets {
    /// A view of these nodes.
    pub(crate) fn new<'a>(nodes: impl Iterator<Item = &'a Node>) -> Self {
        let all: BTreeMap<String, NodeTarget> = nodes
            .map(|node| {
                let view = NodeTarget {
                    target: target(node),
                    eligible: node.eligibility(),
                    agent: node.agent.is_some(),
                };
                (node.name.clone(), view)
            })
            .collect();
        let of = |keep: fn(&NodeTarget) -> bool| -> Vec<Target> {
            all.values()
                .filter(|view| view.eligible.is_ok() && keep(view))
                .map(|view| view.target.clone())
                .collect()
        };
        Self {
            eligible: Shared::new(SharedSet::Eligible, of(|_| true)),
            agents: Shared::new(SharedSet::Agents, of(|view| view.agent)),
            without_agent: of(|view| !view.agent).into_iter().map(|target| target.node).collect(),
            all,
        }
    }

    fn shared(&self, which: SharedSet) -> &Shared {
        match which {
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

fn digest(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The targets of one load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TargetPlan {
    kind: Kind,
    /// Equal for equal sets.
    pub(crate) digest: u64,
    /// How many targets there are.
    pub(crate) count: usize,
    /// Whether the Service has an endpoint that takes traffic, wherever it is.
    pub(crate) usable_endpoint: bool,
    /// NodeTargets that had to be used although they are not eligible.
    pub(crate) ineligible: Vec<(String, IneligibleReason)>,
    /// Eligible nodes that cannot serve this Service, for they have no agent.
    pub(crate) without_agent: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Shared(SharedSet),
    Own(Vec<Target>),
}

impl TargetPlan {
    /// The set itself; `nodes` are those that the plan was made from.
    pub(crate) fn set(&self, nodes: &NodeTargets) -> TargetSet {
        match &self.kind {
            Kind::Shared(which) => {
                TargetSet { shared: Some(*which), targets: nodes.shared(*which).targets.clone() }
            }
            Kind::Own(targets) => TargetSet { shared: None, targets: targets.clone() },
        }
    }
}

/// ReasonMessage a node is or is not a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetReason {
    /// A target: it has so many endpoints.
    Endpoints(u32),
    /// A target, as all eligible nodes are.
    AllEligible,
    /// A target although it is not eligible: nobody else has an endpoint.
    LastResort(u32, IneligibleReason),
    /// No target: no endpoint of the Service runs there.
    NoEndpoint,
    /// No target: not eligible.
    Ineligible(IneligibleReason),
    /// No target: the Service is served by our agent, and there is none.
    NoAgent,
}

impl fmt::Display for TargetReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoints(count) => write!(f, "{count} endpoints"),
            Self::AllEligible => f.write_str("all eligible nodes are targets"),
            Self::LastResort(count, why) => {
                write!(f, "{count} endpoints and nobody else has one, though {why}")
            }
            Self::NoEndpoint => f.write_str("no endpoint"),
            Self::Ineligible(why) => write!(f, "{why}"),
            Self::NoAgent => f.write_str("no agent on the node"),
        }
    }
}

/// The targets of a Service, given its slices.
///
/// Under the policy Local and `api` steering: the members that are eligible. If no member is, the members all the same; if nobody
/// is a member though an endpoint is usable (one without a node), all eligible nodes: a load balancer never goes to zero targets
/// while there is a usable endpoint anywhere. In all other cases: all eligible nodes.
pub(crate) fn targets<'a>(
    service: &Service,
    slices: impl Iterator<Item = &'a EndpointSlice> + Clone,
    nodes: &NodeTargets,
    steering: Steering,
    config: &Config,
) -> TargetPlan {
    let usable_endpoint = slices
        .clone()
        .flat_map(|slice| &slice.endpoints)
        .any(|endpoint| endpoint.ready || endpoint.is_serving_terminating());
    let labelled = service.is_labelled_for_agent();
    let which = if labelled { SharedSet::Agents } else { SharedSet::Eligible };
    let shared = nodes.shared(which);
    let mut plan = TargetPlan {
        kind: Kind::Shared(which),
        digest: shared.digest,
        count: shared.targets.len(),
        usable_endpoint,
        ineligible: Vec::new(),
        without_agent: if labelled { nodes.without_agent.clone() } else { Vec::new() },
    };
    if (service.external_policy, steering) != (TrafficPolicy::Local, Steering::Api) {
        return plan;
    }
    let members = membership(slices);
    if members.is_empty() && usable_endpoint {
        return plan;
    }
    let decide = |(name, count): (&&str, &u32)| {
        let view = nodes.all.get(*name)?;
        Some((view, decide(view, Some(*count), labelled, steering)))
    };
    let mut chosen = Vec::new();
    let mut last_resort = Vec::new();
    for (view, reason) in members.iter().filter_map(decide) {
        match reason {
            TargetReason::Endpoints(count) => chosen.push(weighted(view, count, config)),
            TargetReason::Ineligible(why) => last_resort.push((view, why)),
            _ => {}
        }
    }
    if chosen.is_empty() {
        for (view, why) in last_resort {
            chosen.push(weighted(view, members.get(view.target.node.as_str()).copied().unwrap_or(1), config));
            plan.ineligible.push((view.target.node.clone(), why));
        }
    }
    if chosen.is_empty() && usable_endpoint {
        return plan;
    }
    plan.digest = digest(&chosen);
    plan.count = chosen.len();
    plan.kind = Kind::Own(chosen);
    plan
}

fn weighted(view: &NodeTarget, count: u32, config: &Config) -> Target {
    let weight = if config.capabilities.weights { count.max(1) } else { 1 };
    Target { weight, ..view.target.clone() }
}

fn decide(view: &NodeTarget, endpoints: Option<u32>, labelled: bool, steering: Steering) -> TargetReason {
    if labelled && !view.agent {
        return TargetReason::NoAgent;
    }
    match (view.eligible, endpoints, steering) {
        (Err(why), _, _) => TargetReason::Ineligible(why),
        (Ok(()), Some(count), Steering::Api) => TargetReason::Endpoints(count),
        (Ok(()), None, Steering::Api) => TargetReason::NoEndpoint,
        (Ok(()), _, Steering::HealthCheck) => TargetReason::AllEligible,
    }
}

/// ReasonMessage each node is a target of this plan or not, for people.
pub(crate) fn reasons<'a>(
    service: &Service,
    slices: impl Iterator<Item = &'a EndpointSlice>,
    nodes: &NodeTargets,
    plan: &TargetPlan,
) -> Vec<(String, TargetReason)> {
    let members = membership(slices);
    let steering = if matches!(plan.kind, Kind::Own(_)) { Steering::Api } else { Steering::HealthCheck };
    let reason = |(name, view): (&String, &NodeTarget)| {
        let count = members.get(name.as_str()).copied();
        let why = plan.ineligible.iter().find(|(node, _)| node == name).map(|(_, why)| *why);
        let reason = match why {
            Some(why) => TargetReason::LastResort(count.unwrap_or(1), why),
            None => decide(view, count, service.is_labelled_for_agent(), steering),
        };
        (name.clone(), reason)
    };
    nodes.all.iter().map(reason).collect()
}

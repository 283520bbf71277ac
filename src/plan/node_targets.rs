// SPDX-License-Identifier: Apache-2.0
//! All nodes as possible targets: the sets that many load balancers share, and the nodes with labels.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use steerage_model::{Family, IneligibleReason, Node};
use steerage_provider_api::{SharedSet, Target, TargetSet};

use super::NodeLabels;

/// The eligible nodes with these labels; of those with an agent, if true.
type ByLabels = BTreeMap<(NodeLabels, bool), Arc<[Target]>>;

/// All nodes as possible targets, prepared once for the plans of many Services.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeTargets {
    /// Grows with every change of a node.
    pub(crate) generation: u64,
    pub(super) by_name: BTreeMap<String, NodeTarget>,
    eligible: SharedTargets,
    agents: SharedTargets,
    /// What [`NodeTargets::labelled`] has found: many Services ask for the same labels.
    labelled: Arc<Mutex<ByLabels>>,
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
    pub(super) ineligible: Vec<(String, IneligibleReason)>,
    /// Eligible nodes that are no targets, because they have no agent.
    pub(super) without_agent: Arc<[String]>,
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
pub(super) struct NodeTarget {
    pub(super) target: Target,
    pub(super) eligibility: Result<(), IneligibleReason>,
    pub(super) has_agent: bool,
    pub(super) labels: BTreeMap<String, String>,
}

impl NodeTargets {
    pub(crate) fn new<'a>(nodes: impl Iterator<Item = &'a Node>, generation: u64) -> Self {
        let by_name: BTreeMap<String, NodeTarget> = nodes
            .map(|node| {
                let node_target = NodeTarget {
                    target: target(node),
                    eligibility: node.eligibility(),
                    has_agent: node.agent.is_some(),
                    labels: node.labels.clone(),
                };
                (node.name.clone(), node_target)
            })
            .collect();
        let without_agent = by_name.values().filter(|node| node.eligibility.is_ok() && !node.has_agent);
        let without_agent = without_agent.map(|node| node.target.node.clone()).collect();
        let mut agents = SharedTargets::new(by_name.values().filter(|node| node.has_agent));
        agents.exceptions.without_agent = without_agent;
        let eligible = SharedTargets::new(by_name.values());
        Self { generation, eligible, agents, by_name, labelled: Arc::default() }
    }

    /// The eligible nodes with these labels; none if none of them has an address.
    pub(super) fn labelled(&self, labels: &NodeLabels, needs_agent: bool) -> Arc<[Target]> {
        let mut known = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        let find = || {
            let can_serve = |node: &&NodeTarget| node.eligibility.is_ok() && (node.has_agent || !needs_agent);
            let found = self.by_name.values().filter(can_serve).filter(|node| labels.are_on(&node.labels));
            let found: Arc<[Target]> = found.map(|node| node.target.clone()).collect();
            if found.iter().all(|target| target.addresses.is_empty()) { Arc::default() } else { found }
        };
        Arc::clone(known.entry((labels.clone(), needs_agent)).or_insert_with(find))
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
    pub(super) fn existing(&self, node: &str) -> Option<&NodeTarget> {
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

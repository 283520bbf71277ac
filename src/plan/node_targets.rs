// SPDX-License-Identifier: Apache-2.0
//! All nodes as possible targets: the sets that many load balancers share, and the nodes with labels.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use steerage_model::{Family, IneligibleReason, Node};
use steerage_provider_api::{DrainingTarget, SharedSet, Target, TargetSet};

use super::NodeLabels;

/// Labels, and whether only nodes with an agent count.
pub(super) type Choice = (NodeLabels, bool);

/// The eligible nodes of each choice.
type Chosen = BTreeMap<Choice, Arc<[Arc<Target>]>>;

/// Choices that are remembered. Whoever edits an annotation all the time uses up no more memory.
const MAX_CHOICES: usize = 1000;

/// A node that is younger may still be about to get its agent.
const AGENT_GRACE: Duration = Duration::from_mins(5);

/// All nodes as possible targets, prepared once for the plans of many Services.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeTargets {
    /// Grows with every change of a node but its labels. A provider knows the age of shared sets by it.
    pub(crate) generation: u64,
    /// Grows with every change of a node.
    pub(crate) revision: u64,
    pub(super) by_name: BTreeMap<String, NodeTarget>,
    eligible: SharedTargets,
    agents: SharedTargets,
    /// What [`NodeTargets::labelled`] has found: many Services ask for the same labels.
    labelled: Arc<Mutex<Chosen>>,
}

/// The targets of a shared set.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedTargets {
    pub(super) targets: Arc<[Arc<Target>]>,
    pub(super) exceptions: SetExceptions,
    /// Targets that have an address, but not of this family: load balancers with this family alone report them.
    pub(super) lacking: BTreeMap<Family, Vec<String>>,
    /// Nodes that would be targets if they did not drain.
    pub(super) draining: Arc<[DrainingTarget]>,
}

/// An eligible node that has no agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeWithoutAgent {
    pub(crate) node: String,
    created: Option<SystemTime>,
}

impl NodeWithoutAgent {
    /// For how long the node may still be about to get its agent; `None` if it should have one. Otherwise every node that joins would
    /// change the status of all Services that need an agent.
    pub(crate) fn grace(&self, now: SystemTime) -> Option<Duration> {
        // A clock that is behind makes no node younger than new.
        let age = now.duration_since(self.created?).unwrap_or_default();
        AGENT_GRACE.checked_sub(age).filter(|rest| !rest.is_zero())
    }
}

/// What all users of a shared set report of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SetExceptions {
    is_empty: bool,
    /// All targets, if no node is eligible.
    pub(super) ineligible: Vec<(String, IneligibleReason)>,
    /// Eligible nodes that are no targets, because they have no agent.
    pub(super) without_agent: Arc<[NodeWithoutAgent]>,
}

impl SharedTargets {
    /// The eligible nodes. If there is none, all nodes: pods that still run there are better than nothing.
    fn new<'a>(nodes: impl Iterator<Item = &'a NodeTarget> + Clone) -> Self {
        let mut exceptions = SetExceptions::default();
        let draining = nodes.clone().filter_map(NodeTarget::draining).collect();
        let eligible = nodes.clone().filter(|node| node.eligibility.is_ok());
        let mut targets: Arc<[Arc<Target>]> = eligible.map(|node| node.target.clone()).collect();
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
        Self { targets, exceptions, lacking, draining }
    }
}

#[derive(Clone, Debug)]
pub(super) struct NodeTarget {
    pub(super) target: Arc<Target>,
    pub(super) eligibility: Result<(), IneligibleReason>,
    drain: Option<IneligibleReason>,
    pub(super) has_agent: bool,
    created: Option<SystemTime>,
    pub(super) labels: Arc<BTreeMap<String, String>>,
}

impl NodeTarget {
    /// As a target that drains, if it does.
    fn draining(&self) -> Option<DrainingTarget> {
        Some(DrainingTarget { target: Arc::clone(&self.target), reason: self.drain? })
    }

    fn can_serve(&self, needs_agent: bool) -> bool {
        self.eligibility.is_ok() && (self.has_agent || !needs_agent)
    }
}

impl NodeTargets {
    /// Whether a node of this name drains.
    pub(crate) fn drains(&self, node: &str) -> bool {
        self.by_name.get(node).is_some_and(|node| node.drain.is_some())
    }

    /// Nodes that are as in `before` share its targets. `drains_cordoned`: cordoned nodes drain.
    pub(crate) fn new<'a>(
        nodes: impl Iterator<Item = &'a Node>,
        generation: u64,
        before: &Self,
        drains_cordoned: bool,
    ) -> Self {
        let by_name: BTreeMap<String, NodeTarget> = nodes
            .map(|node| {
                let (old, new) = (before.by_name.get(&node.name), target(node));
                let old = old.map(|old| &old.target).filter(|old| ***old == new);
                let node_target = NodeTarget {
                    target: old.map_or_else(|| Arc::new(new), Arc::clone),
                    eligibility: node.eligibility(drains_cordoned),
                    drain: node.drain(drains_cordoned),
                    has_agent: node.agent.is_some(),
                    created: node.created,
                    labels: Arc::clone(&node.labels),
                };
                (node.name.clone(), node_target)
            })
            .collect();
        let without_agent = by_name.values().filter(|node| node.eligibility.is_ok() && !node.has_agent);
        let without_agent = without_agent
            .map(|node| NodeWithoutAgent { node: node.target.node.clone(), created: node.created })
            .collect();
        let mut agents = SharedTargets::new(by_name.values().filter(|node| node.has_agent));
        agents.exceptions.without_agent = without_agent;
        let eligible = SharedTargets::new(by_name.values());
        Self { generation, eligible, agents, by_name, labelled: Arc::default(), revision: generation }
    }

    /// The eligible nodes with these labels; none if none of them has an address.
    pub(super) fn labelled(&self, choice: &Choice) -> Arc<[Arc<Target>]> {
        let mut known = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.get(choice) {
            return Arc::clone(found);
        }
        if known.len() >= MAX_CHOICES {
            known.clear();
        }
        let found = self.find(choice);
        // Choices of the same nodes share them.
        let same = known.values().chain([&self.eligible.targets, &self.agents.targets]);
        let same = same.filter(|other| other.len() == found.len()).find(|other| ***other == *found);
        let found = same.map_or_else(|| found.into(), Arc::clone);
        known.insert(choice.clone(), Arc::clone(&found));
        found
    }

    fn find(&self, (labels, needs_agent): &Choice) -> Vec<Arc<Target>> {
        let found = self.by_name.values();
        let found = found.filter(|node| node.can_serve(*needs_agent) && labels.are_on(&node.labels));
        let found: Vec<Arc<Target>> = found.map(|node| Arc::clone(&node.target)).collect();
        if found.iter().all(|target| target.addresses.is_empty()) { Vec::new() } else { found }
    }

    /// The choices that `before` remembers, and that have the same nodes now.
    pub(super) fn same_choices(&self, before: &Self) -> BTreeSet<Choice> {
        let before = before.labelled.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_same = |(choice, nodes): &(Choice, Arc<[Arc<Target>]>)| self.labelled(choice) == *nodes;
        before.into_iter().filter(is_same).map(|(choice, _)| choice).collect()
    }

    /// Whether nothing but labels, and what follows from them, differs.
    pub(crate) fn differs_only_in_labels(&self, other: &Self) -> bool {
        let same_node = |(a, b): ((&String, &NodeTarget), (&String, &NodeTarget))| {
            (a.0, a.1.eligibility, a.1.drain, a.1.has_agent)
                == (b.0, b.1.eligibility, b.1.drain, b.1.has_agent)
                && a.1.target == b.1.target
        };
        let sets = SharedSet::ALL.into_iter();
        self.by_name.len() == other.by_name.len()
            && self.by_name.iter().zip(&other.by_name).all(same_node)
            && sets.into_iter().all(|set| self.shared(set).targets == other.shared(set).targets)
    }

    /// Those of these nodes that exist and can serve.
    pub(crate) fn able(&self, names: &[Arc<str>], needs_agent: bool) -> Vec<Arc<Target>> {
        let found = names.iter().filter_map(|name| self.by_name.get(&**name));
        let found = found.filter(|node| node.can_serve(needs_agent));
        found.map(|node| Arc::clone(&node.target)).collect()
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
        let SharedTargets { targets, draining, .. } = self.shared(set);
        let (targets, draining) = (Arc::clone(targets), Arc::clone(draining));
        TargetSet { shared: Some(set), generation: self.generation, targets, draining, endpoint_nodes: None }
    }

    /// Puts other targets in the place of a shared set's.
    pub(crate) fn replace(&mut self, set: SharedSet, targets: Arc<[Arc<Target>]>) {
        match set {
            SharedSet::Eligible => self.eligible.targets = targets,
            SharedSet::Agents => self.agents.targets = targets,
        }
    }

    /// A node as a target of a shared set, if it may stay one: nobody has decided that it leaves.
    pub(crate) fn staying(&self, node: &str) -> Option<Arc<Target>> {
        Some(self.existing(node)?.target.clone())
    }

    /// A node that exists, and of which nobody has decided that it leaves.
    pub(super) fn existing(&self, node: &str) -> Option<&NodeTarget> {
        let leaves = |node: &NodeTarget| node.eligibility.is_err_and(IneligibleReason::is_decided);
        self.by_name.get(node).filter(|node| !leaves(node))
    }

    /// Those of these nodes that drain.
    pub(super) fn draining<'a>(&'a self, names: impl Iterator<Item = &'a str>) -> Arc<[DrainingTarget]> {
        names.filter_map(|name| self.by_name.get(name)?.draining()).collect()
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

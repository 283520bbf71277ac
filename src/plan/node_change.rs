// SPDX-License-Identifier: Apache-2.0
//! Which load balancers a change of nodes concerns. A node of thousands must not cost a plan for every Service.

use std::collections::BTreeSet;

use steerage_model::Family;
use steerage_provider_api::SharedSet;

use super::node_targets::{Choice, NodeTargets};

/// The nodes on which a plan depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeDependence {
    /// The shared set that it uses, or reports of.
    pub(super) set: Option<SharedSet>,
    /// The Service's only family: nodes without an address of it are reported.
    pub(super) family: Option<Family>,
    /// Nodes that it looked at one by one, known or not.
    pub(super) members: Vec<String>,
    /// The labels by which it chose among all nodes.
    pub(super) choice: Option<Choice>,
    /// Whether its own set is a copy of the shared one.
    pub(super) copies_set: bool,
    /// [`NodeTargets::revision`] of the nodes as it saw them.
    pub(super) revision: u64,
}

/// Nodes that changed, and what that means for the shared sets.
#[derive(Clone, Debug)]
pub(crate) struct NodeChange {
    nodes: BTreeSet<String>,
    /// Sets with other targets, or other ones that drain.
    pub(crate) sets: Vec<SharedSet>,
    /// Sets of which their users have something else to report.
    exceptions: Vec<SharedSet>,
    /// The same, for users with this family alone.
    lacking: Vec<(SharedSet, Family)>,
    /// Choices by labels that have the same nodes. Any further one may have others.
    same_choices: BTreeSet<Choice>,
    /// The revisions before and after.
    revisions: (u64, u64),
}

impl NodeChange {
    /// The change from `old` to `new`, which differ in `nodes` only.
    pub(crate) fn between(old: &NodeTargets, new: &NodeTargets, nodes: BTreeSet<String>) -> Self {
        let both = |set: &SharedSet| (old.shared(*set), new.shared(*set));
        let sets = SharedSet::ALL;
        let has_other_targets = |set: &SharedSet| {
            let (old, new) = both(set);
            old.targets != new.targets || old.draining != new.draining
        };
        let has_other_exceptions = |set: &SharedSet| both(set).0.exceptions != both(set).1.exceptions;
        let lacks_others = |(set, family): &(SharedSet, Family)| {
            both(set).0.lacking.get(family) != both(set).1.lacking.get(family)
        };
        let pairs = sets.into_iter().flat_map(|set| [(set, Family::V4), (set, Family::V6)]);
        Self {
            lacking: pairs.filter(lacks_others).collect(),
            nodes,
            sets: sets.into_iter().filter(has_other_targets).collect(),
            exceptions: sets.into_iter().filter(has_other_exceptions).collect(),
            same_choices: new.same_choices(old),
            revisions: (old.revision, new.revision),
        }
    }

    /// Whether a plan may differ. `shared_sets`: the provider changes a shared set for all at once.
    pub(crate) fn concerns(&self, plan: &NodeDependence, shared_sets: bool) -> bool {
        let is_other = |set: SharedSet| {
            self.exceptions.contains(&set)
                || plan.family.is_some_and(|family| self.lacking.contains(&(set, family)))
                || ((plan.copies_set || !shared_sets) && self.sets.contains(&set))
        };
        // A plan between the two may have seen what neither shows.
        let (before, after) = self.revisions;
        (plan.revision > before && plan.revision != after)
            || plan.choice.as_ref().is_some_and(|choice| !self.same_choices.contains(choice))
            || plan.set.is_some_and(is_other)
            || plan.members.iter().any(|node| self.nodes.contains(node))
    }
}

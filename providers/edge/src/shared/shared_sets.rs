// SPDX-License-Identifier: Apache-2.0
//! The target sets that load balancers share: which of them are used, what each must contain, and what other programs did to them. The
//! provider's calls write them.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use steerage_edge_api::EdgeNodeSetSpec;
use steerage_model::Family;
use steerage_provider_api::{Owner, SharedSet, TargetSet};

use super::{OfferedSet, Shared};
use crate::entry::{Change, Entry};
use crate::objects::NodeSetContent;
use crate::spec;

impl Shared {
    /// Whether a load balancer uses a shared set, or may.
    pub(crate) fn is_used(&self, set: &str) -> bool {
        self.users().values().any(|used| *used == set) || self.balancers.cache.index(|index| index.uses(set))
    }

    /// The newest value of a shared set: this one, or a newer one that came before.
    pub(crate) fn offer_set(&self, which: SharedSet, set: &TargetSet) -> Arc<EdgeNodeSetSpec> {
        let mut offered = self.offered_sets.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = offered.get(which.as_str()).filter(|newest| newest.generation >= set.generation);
        if let Some(newest) = newest {
            return Arc::clone(&newest.spec);
        }
        let spec = Arc::new(spec::shared_set(set));
        let new =
            OfferedSet { generation: set.generation, spec: Arc::clone(&spec), refused: BTreeMap::new() };
        offered.insert(which.as_str(), new);
        spec
    }

    /// [`spec::refused`] for a shared set. Thousands of load balancers ask it of thousands of targets, so it is found once.
    pub(crate) fn refused(
        &self,
        which: SharedSet,
        families: &[Family],
        set: &TargetSet,
    ) -> Vec<(String, String)> {
        let mut offered = self.offered_sets.lock().unwrap_or_else(PoisonError::into_inner);
        let same = offered.get_mut(which.as_str()).filter(|offered| offered.generation == set.generation);
        match same {
            Some(same) => {
                let find = || spec::refused(families, set);
                same.refused.entry(families.to_vec()).or_insert_with(find).clone()
            }
            None => spec::refused(families, set),
        }
    }

    /// Whether this version of a shared set was found equal to this value.
    pub(crate) fn is_known_set(&self, set: &str, version: &str, wanted: &Arc<EdgeNodeSetSpec>) -> bool {
        let known = self.known_sets.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(set).is_some_and(|(known, spec)| known == version && Arc::ptr_eq(spec, wanted))
    }

    /// Records that this version of a shared set equals this value.
    pub(crate) fn set_known(&self, set: &'static str, version: String, wanted: Arc<EdgeNodeSetSpec>) {
        self.known_sets.lock().unwrap_or_else(PoisonError::into_inner).insert(set, (version, wanted));
    }

    /// Records what a shared set must contain; `None` if it is not needed any more.
    pub(crate) fn want_set(&self, set: &str, wanted: Option<Arc<EdgeNodeSetSpec>>) {
        let mut sets = self.wanted_sets.lock().unwrap_or_else(PoisonError::into_inner);
        match wanted {
            Some(wanted) => drop(sets.insert(set.to_owned(), wanted)),
            None => drop(sets.remove(set)),
        }
    }

    /// Another program changed or deleted a node set. Its load balancers would have other targets, or none.
    pub(crate) fn on_node_set(&self, change: &Change<NodeSetContent>) {
        let Some(entry) = change.new.as_ref().or(change.old.as_ref()) else { return };
        let content = change.new.as_ref().filter(|new| new.managed).and_then(|new| new.content.as_ref().ok());
        {
            let sets = self.wanted_sets.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(wanted) = sets.get(entry.name.as_str()) else { return };
            // The watch may deliver a write of the provider before its response arrives.
            if content.is_some_and(|content| content.spec == **wanted) {
                return;
            }
        }
        let is_foreign = |entry: Option<&Entry<NodeSetContent>>| entry.is_some_and(|entry| !entry.managed);
        if is_foreign(change.old.as_ref()) && is_foreign(change.new.as_ref()) {
            return;
        }
        tracing::warn!(
            node_set = entry.name,
            "another program changed or deleted the EdgeNodeSet; reconciling all load balancers"
        );
        // All: one whose targets were refused does not name the set yet.
        let owners: Vec<Owner> =
            self.balancers.cache.read(|rows| rows.filter_map(|entry| entry.owner.clone()).collect());
        self.notify(&owners);
    }
}

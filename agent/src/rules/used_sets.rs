// SPDX-License-Identifier: Apache-2.0
//! The sets that a table has only where Services need them, with the chains that look in them. Pure.
//!
//! Most clusters need few: no source ranges of a length, no list as long as a class, no affinity. A rule costs the kernel up to a
//! kilobyte, and each look-up costs packets time. A set that was needed once stays until the process ends: they are few, and a Service
//! that comes and goes does not change rules each time. The next process deletes what nobody needs.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::{Family, Key};

use super::layout::{LONG, SHORT, SetId, Side, long_class};
use super::source_lists::{kernel_length, prefix_lengths};
use crate::plan::{AFFINITY_TIMEOUTS, ServicePlan};

/// Of each family, the sets that are in use, as far as not every table has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsedSets {
    v4: BTreeSet<SetId>,
    v6: BTreeSet<SetId>,
}

impl UsedSets {
    /// All that Services may need.
    pub fn all() -> Self {
        let of = |family| optional(family).collect();
        Self { v4: of(Family::V4), v6: of(Family::V6) }
    }

    /// Those of the table of a family, by the names of its sets.
    pub fn of_table<'n>(family: Family, names: impl Iterator<Item = &'n str>) -> Self {
        let (mut used, names) = (Self::default(), names.collect::<BTreeSet<_>>());
        used.of_mut(family).extend(optional(family).filter(|id| names.contains(id.name().as_str())));
        used
    }

    /// Whether these are all that are in `others`, of a family.
    pub fn has_all(&self, others: &Self, family: Family) -> bool {
        self.of(family).is_superset(others.of(family))
    }

    /// Whether a family has the same sets in `others`.
    pub(super) fn is_same(&self, others: &Self, family: Family) -> bool {
        self.of(family) == others.of(family)
    }

    /// These and others.
    #[must_use]
    pub fn union(mut self, others: &Self) -> Self {
        self.v4.extend(&others.v4);
        self.v6.extend(&others.v6);
        self
    }

    /// Whether a table has a set.
    pub(super) fn has(&self, family: Family, id: SetId) -> bool {
        group(id).is_none_or(|id| self.of(family).contains(&id))
    }

    /// Adds what some Services need.
    pub(super) fn add(&mut self, plans: &BTreeMap<Key, ServicePlan>) {
        for (frontend, action) in plans.values().flat_map(|plan| &plan.frontends) {
            let of_family = self.of_mut(frontend.family());
            if let Some(seconds) = action.affinity {
                of_family.extend([SetId::Affine, SetId::AffineFor(seconds)]);
            }
            let sides = [(Side::Cluster, Some(&action.targets)), (Side::Local, action.local.as_ref())];
            for (side, targets) in sides {
                let count = targets.map_or(0, |targets| targets.len());
                if u32::try_from(count).is_ok_and(|count| count > SHORT) {
                    of_family.insert(SetId::Long(side, long_class(count)));
                }
            }
        }
        // The table of each family has the networks of its family, whatever the frontend's is.
        for net in plans.values().flat_map(ServicePlan::source_lists).flat_map(|networks| networks.iter()) {
            self.of_mut(Family::of(net.addr())).insert(SetId::Sources(kernel_length(*net)));
        }
    }

    fn of(&self, family: Family) -> &BTreeSet<SetId> {
        if family == Family::V4 { &self.v4 } else { &self.v6 }
    }

    fn of_mut(&mut self, family: Family) -> &mut BTreeSet<SetId> {
        if family == Family::V4 { &mut self.v4 } else { &mut self.v6 }
    }
}

/// The set that stands for those that a table has together with it; `None` if every table has it.
fn group(id: SetId) -> Option<SetId> {
    match id {
        SetId::Sources(_) | SetId::Long(..) | SetId::AffineFor(_) => Some(id),
        SetId::Affine | SetId::Namespaces | SetId::Sticky(_) => Some(SetId::Affine),
        _ => None,
    }
}

/// The sets that stand for all that a table may lack.
fn optional(family: Family) -> impl Iterator<Item = SetId> {
    let long = Side::ALL.into_iter().flat_map(|side| LONG.map(|class| SetId::Long(side, class)));
    let sources = prefix_lengths(family == Family::V6).map(SetId::Sources);
    let affinity = AFFINITY_TIMEOUTS.map(SetId::AffineFor);
    long.chain(sources).chain(affinity).chain([SetId::Affine])
}

// SPDX-License-Identifier: Apache-2.0
//! Lists of allowed sources. The kernel has each list once, under a number, for all frontends of all Services with these networks.
//! Pure.
//!
//! A list never changes: a Service whose ranges change uses another one. So the kernel can have the new list before a frontend uses
//! it, see [`Changes::first`](super::Changes::first).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::Key;

use super::numbers::Numbers;
use crate::plan::ServicePlan;

/// Networks that Services allow, in order and without overlaps.
pub(super) type Networks = Arc<[IpNet]>;

/// A list in use.
#[derive(Debug, Clone)]
struct SourceList {
    /// Identifies it. No two lists have one number, or the sources of one would be allowed by the other.
    number: u32,
    /// The number of Services that use it.
    users: usize,
}

/// All lists, with the Services that use them.
#[derive(Debug, Clone, Default)]
pub(super) struct SourceLists {
    lists: BTreeMap<Networks, SourceList>,
    numbers: Numbers,
    services: BTreeMap<Key, BTreeSet<Networks>>,
}

impl SourceLists {
    /// The number of a list in use.
    pub(super) fn number(&self, networks: &[IpNet]) -> Option<u32> {
        self.lists.get(networks).map(|list| list.number)
    }

    /// All lists with their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = (u32, &Networks)> {
        self.lists.iter().map(|(networks, list)| (list.number, networks))
    }

    /// The lists that [`SourceLists::update`] with the same plans may add or remove.
    pub(super) fn affected_by(&self, updates: &BTreeMap<Key, ServicePlan>) -> BTreeSet<Networks> {
        let of = |(key, plan): (&Key, &ServicePlan)| {
            let old = self.services.get(key).into_iter().flatten().cloned();
            wanted(plan).into_iter().chain(old).collect::<Vec<_>>()
        };
        updates.iter().flat_map(of).collect()
    }

    /// Replaces the lists of some Services.
    pub(super) fn update(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        for (service, plan) in updates {
            let wanted = wanted(plan);
            for networks in &wanted {
                self.add_user(networks);
            }
            let old = if wanted.is_empty() {
                self.services.remove(service)
            } else {
                self.services.insert(service.clone(), wanted)
            };
            for networks in old.iter().flatten() {
                self.remove_user(networks);
            }
        }
    }

    fn add_user(&mut self, networks: &Networks) {
        let numbers = &mut self.numbers;
        let list = self
            .lists
            .entry(Arc::clone(networks))
            .or_insert_with(|| SourceList { number: numbers.take(&format!("{networks:?}")), users: 0 });
        list.users += 1;
    }

    fn remove_user(&mut self, networks: &Networks) {
        let Some(list) = self.lists.get_mut(networks) else { return };
        list.users -= 1;
        if list.users == 0 {
            self.numbers.give_back(list.number);
            self.lists.remove(networks);
        }
    }
}

fn wanted(plan: &ServicePlan) -> BTreeSet<Networks> {
    plan.frontends.iter().filter_map(|(_, action)| action.sources.clone()).collect()
}

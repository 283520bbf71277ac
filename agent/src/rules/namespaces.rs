// SPDX-License-Identifier: Apache-2.0
//! The numbers of namespaces whose Services have affinity: the rules count the clients of each. Pure.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Key;

use super::numbers::Numbers;
use crate::plan::ServicePlan;

/// Namespaces with Services that have affinity.
#[derive(Debug, Clone, Default)]
pub(super) struct Namespaces {
    numbers: Numbers,
    namespaces: BTreeMap<String, (u32, BTreeSet<Key>)>,
}

impl Namespaces {
    /// The number of a namespace.
    pub(super) fn number(&self, namespace: &str) -> Option<u32> {
        self.namespaces.get(namespace).map(|(number, _)| *number)
    }

    /// Notes whether some Services have affinity.
    pub(super) fn update(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        for (service, plan) in updates {
            let name = service.namespace();
            if plan.frontends.iter().any(|(_, action)| action.affinity.is_some()) {
                let numbers = &mut self.numbers;
                let new = || (numbers.take(name), BTreeSet::new());
                self.namespaces.entry(name.to_owned()).or_insert_with(new).1.insert(service.clone());
            } else if let Some((number, services)) = self.namespaces.get_mut(name) {
                services.remove(service);
                if services.is_empty() {
                    self.numbers.give_back(*number);
                    self.namespaces.remove(name);
                }
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The numbers of namespaces whose Services have affinity: the rules count the clients of each. Pure.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Key;

use super::affinity::shares;
use super::numbers::Numbers;
use crate::plan::ServicePlan;

/// Namespaces with Services that have affinity.
#[derive(Debug, Clone, Default)]
pub(super) struct Namespaces {
    numbers: Numbers,
    namespaces: BTreeMap<String, Namespace>,
}

#[derive(Debug, Clone)]
struct Namespace {
    number: u32,
    /// The timeouts of each Service with affinity.
    services: BTreeMap<Key, BTreeSet<u32>>,
}

impl Namespace {
    /// The number, and how many shares there are of the places for clients.
    fn shares(&self) -> (u32, u32) {
        let timeouts: BTreeSet<_> = self.services.values().flatten().collect();
        (self.number, shares(timeouts.len()))
    }
}

impl Namespaces {
    /// The number of a namespace.
    pub(super) fn number(&self, namespace: &str) -> Option<u32> {
        self.namespaces.get(namespace).map(|namespace| namespace.number)
    }

    /// The numbers of the namespaces of these Services, each once, and how many shares each makes of its places for clients.
    pub(super) fn shares_of<'a>(&self, services: impl Iterator<Item = &'a Key>) -> BTreeSet<(u32, u32)> {
        services.filter_map(|key| self.namespaces.get(key.namespace())).map(Namespace::shares).collect()
    }

    /// The same of all namespaces.
    pub(super) fn shares(&self) -> BTreeSet<(u32, u32)> {
        self.namespaces.values().map(Namespace::shares).collect()
    }

    /// Notes whether some Services have affinity.
    pub(super) fn update(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        for (service, plan) in updates {
            let name = service.namespace();
            let timeouts: BTreeSet<_> =
                plan.frontends.iter().filter_map(|(_, action)| action.affinity).collect();
            if !timeouts.is_empty() {
                let numbers = &mut self.numbers;
                let new = || Namespace { number: numbers.take(name), services: BTreeMap::new() };
                let namespace = self.namespaces.entry(name.to_owned()).or_insert_with(new);
                namespace.services.insert(service.clone(), timeouts);
            } else if let Some(namespace) = self.namespaces.get_mut(name) {
                namespace.services.remove(service);
                if namespace.services.is_empty() {
                    self.numbers.give_back(namespace.number);
                    self.namespaces.remove(name);
                }
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The stores of Services, `EndpointSlice`s, Nodes and gated pods, joined, with the keys of the changed objects.
//!
//! The watch tasks of the controller and of the agent apply events one at a time, in any order across kinds. It never waits and
//! never plans. Every change marks its Service or node as dirty.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::{Endpoint, EndpointSlice, Key, Node, Pod, Service};

use crate::{Event, Store};

/// The changes since the last [`Index::take_dirty`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Services that were added, changed or deleted, or whose endpoints or gated pods were.
    pub services: BTreeSet<Key>,
    /// Nodes that were added, changed or deleted.
    pub nodes: BTreeSet<String>,
}

impl Dirty {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && self.nodes.is_empty()
    }
}

/// Services, endpoint slices, nodes and gated pods, joined.
#[derive(Clone, Debug, Default)]
pub struct Index {
    services: Store<Service>,
    slices: Store<EndpointSlice>,
    nodes: Store<Node>,
    pods: Store<Pod>,
    /// By Service; sorted.
    slices_of: BTreeMap<Key, Vec<Key>>,
    dirty: Dirty,
}

impl Index {
    /// Applies an event of the watch of Services.
    pub fn apply_service(&mut self, event: Event<Service>) {
        let dirty = &mut self.dirty.services;
        self.services.apply(event, |old, new| {
            dirty.extend(old.or(new).map(|service| service.key.clone()));
        });
    }

    /// Applies an event of the watch of `EndpointSlice`s.
    pub fn apply_slice(&mut self, event: Event<EndpointSlice>) {
        let (dirty, slices_of) = (&mut self.dirty.services, &mut self.slices_of);
        self.slices.apply(event, |old, new| {
            if let Some(old) = old {
                dirty.insert(old.service.clone());
                if let Some(keys) = slices_of.get_mut(&old.service) {
                    keys.retain(|key| *key != old.key);
                    if keys.is_empty() {
                        slices_of.remove(&old.service);
                    }
                }
            }
            if let Some(new) = new {
                dirty.insert(new.service.clone());
                let keys = slices_of.entry(new.service.clone()).or_insert_with(|| Vec::with_capacity(1));
                keys.insert(keys.partition_point(|key| *key < new.key), new.key.clone());
            }
        });
    }

    /// Applies an event of the watch of Nodes.
    pub fn apply_node(&mut self, event: Event<Node>) {
        let dirty = &mut self.dirty.nodes;
        self.nodes.apply(event, |old, new| dirty.extend(old.or(new).map(|node| node.name.clone())));
    }

    /// Applies an event of the watch of pods. It concerns the Services of which the pod is an unready endpoint.
    pub fn apply_pod(&mut self, event: Event<Pod>) {
        let Self { pods, slices, slices_of, dirty, .. } = self;
        pods.apply(event, |old, new| {
            let Some(pod) = new.or(old) else { return };
            let is_named = |endpoint: &Endpoint| {
                endpoint.unready_pod.as_ref().is_some_and(|named| named.name == pod.key.name())
            };
            let names = |key: &Key| slices.get(key).is_some_and(|slice| slice.endpoints.iter().any(is_named));
            let of_namespace = slices_of
                .range(Key::new(pod.key.namespace(), "")..)
                .take_while(|(service, _)| service.namespace() == pod.key.namespace());
            let concerned = of_namespace.filter(|(_, keys)| keys.iter().any(names));
            dirty.services.extend(concerned.map(|(service, _)| service.clone()));
        });
    }

    /// Whether all three kinds have been listed that every program watches. A plan before that would be wrong.
    pub fn has_synced(&self) -> bool {
        self.services.has_synced() && self.slices.has_synced() && self.nodes.has_synced()
    }

    /// Takes the changes since the last call.
    pub fn take_dirty(&mut self) -> Dirty {
        std::mem::take(&mut self.dirty)
    }

    /// One Service.
    pub fn service(&self, key: &Key) -> Option<&Service> {
        self.services.get(key)
    }

    /// All Services, by key.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.iter()
    }

    /// The slices of a Service, by name, even if the Service itself is not in the store.
    pub fn slices(&self, service: &Key) -> impl Iterator<Item = &EndpointSlice> {
        self.slices_of.get(service).into_iter().flatten().filter_map(|key| self.slices.get(key))
    }

    /// The gated pod behind an endpoint of this Service, while the pod is not ready.
    pub fn pod_behind(&self, service: &Key, endpoint: &Endpoint) -> Option<&Pod> {
        let named = endpoint.unready_pod.as_ref()?;
        let pod = self.pods.get(&Key::new(service.namespace(), &named.name))?;
        Some(pod).filter(|pod| pod.is_behind(endpoint))
    }

    /// All gated pods, by key.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.iter()
    }

    /// One node.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(&name.to_owned())
    }

    /// All nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter()
    }
}

#[cfg(test)]
mod tests;

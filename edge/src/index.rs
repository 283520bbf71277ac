// SPDX-License-Identifier: Apache-2.0
//! What the API says, as an index. Pure: `source` feeds it, `plan` reads it. What cannot be read keeps its last good form.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt as _;
use steerage_edge_api::{EdgeLoadBalancer, EdgeLoadBalancerSpec, EdgeNodeSet, EdgeTarget};

/// A load balancer as the controller asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadBalancer {
    /// Its UID, for owner references.
    pub(crate) uid: String,
    /// Its generation.
    pub(crate) generation: i64,
    /// What is asked for.
    pub(crate) spec: EdgeLoadBalancerSpec,
}

/// A change.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A load balancer came or changed.
    LoadBalancer(Box<EdgeLoadBalancer>),
    /// A load balancer went.
    LoadBalancerDeleted(String),
    /// These are all load balancers.
    LoadBalancers(BTreeSet<String>),
    /// A node set came or changed.
    NodeSet(Box<EdgeNodeSet>),
    /// A node set went.
    NodeSetDeleted(String),
    /// These are all node sets.
    NodeSets(BTreeSet<String>),
}

/// All that the API says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    /// The load balancers by name.
    pub(crate) load_balancers: BTreeMap<String, Arc<LoadBalancer>>,
    /// The node sets by name.
    pub(crate) node_sets: BTreeMap<String, Arc<Vec<EdgeTarget>>>,
    listed: (bool, bool),
}

impl Index {
    /// Whether both kinds have been listed once.
    pub(crate) fn has_synced(&self) -> bool {
        self.listed == (true, true)
    }

    /// Takes a change in.
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::LoadBalancer(object) => {
                // One that is being deleted is served until it is gone: the controller says when.
                let load_balancer = LoadBalancer {
                    uid: object.uid().unwrap_or_default(),
                    generation: object.metadata.generation.unwrap_or_default(),
                    spec: object.spec.clone(),
                };
                self.load_balancers.insert(object.name_any(), Arc::new(load_balancer));
            }
            Event::LoadBalancerDeleted(name) => drop(self.load_balancers.remove(&name)),
            Event::LoadBalancers(names) => {
                self.load_balancers.retain(|name, _| names.contains(name));
                self.listed.0 = true;
            }
            Event::NodeSet(object) => {
                self.node_sets.insert(object.name_any(), Arc::new(object.spec.targets));
            }
            Event::NodeSetDeleted(name) => drop(self.node_sets.remove(&name)),
            Event::NodeSets(names) => {
                self.node_sets.retain(|name, _| names.contains(name));
                self.listed.1 = true;
            }
        }
    }
}

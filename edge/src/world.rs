// SPDX-License-Identifier: Apache-2.0
//! What the API says, as an index. Pure: `source` feeds it, `plan` reads it. What cannot be read keeps its last good form.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt as _;
use steerage_edge_api::{EdgeLoadBalancer, EdgeLoadBalancerSpec, EdgeNodeSet, EdgeTarget};

/// A load balancer as the controller asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Balancer {
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
    Balancer(Box<EdgeLoadBalancer>),
    /// A load balancer went.
    BalancerGone(String),
    /// These are all load balancers.
    Balancers(BTreeSet<String>),
    /// A node set came or changed.
    NodeSet(Box<EdgeNodeSet>),
    /// A node set went.
    NodeSetGone(String),
    /// These are all node sets.
    NodeSets(BTreeSet<String>),
}

/// All that the API says.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    /// The load balancers by name.
    pub(crate) balancers: BTreeMap<String, Arc<Balancer>>,
    /// The node sets by name.
    pub(crate) node_sets: BTreeMap<String, Arc<Vec<EdgeTarget>>>,
    listed: (bool, bool),
}

impl World {
    /// Whether both kinds have been listed once.
    pub(crate) fn is_whole(&self) -> bool {
        self.listed == (true, true)
    }

    /// Takes a change in.
    pub(crate) fn take(&mut self, event: Event) {
        match event {
            Event::Balancer(object) => {
                // One that is being deleted is served until it is gone: the controller says when.
                let balancer = Balancer {
                    uid: object.uid().unwrap_or_default(),
                    generation: object.metadata.generation.unwrap_or_default(),
                    spec: object.spec.clone(),
                };
                self.balancers.insert(object.name_any(), Arc::new(balancer));
            }
            Event::BalancerGone(name) => drop(self.balancers.remove(&name)),
            Event::Balancers(names) => {
                self.balancers.retain(|name, _| names.contains(name));
                self.listed.0 = true;
            }
            Event::NodeSet(object) => {
                self.node_sets.insert(object.name_any(), Arc::new(object.spec.targets));
            }
            Event::NodeSetGone(name) => drop(self.node_sets.remove(&name)),
            Event::NodeSets(names) => {
                self.node_sets.retain(|name, _| names.contains(name));
                self.listed.1 = true;
            }
        }
    }
}

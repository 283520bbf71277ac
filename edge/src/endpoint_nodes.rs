// SPDX-License-Identifier: Apache-2.0
//! Which nodes have an endpoint by the `EndpointSlices` of each Service under `fused` steering, when that changed, and how it is joined
//! with what a node says of itself. `engine` hands over the lists, and the plan asks. Pure.
//!
//! A list only bridges the time until a node speaks for itself. A node that leaves a list counts as without endpoint for a limited
//! time, and after that its own answers decide again: neither a controller that is away nor a list that is wrong can keep a serving
//! node out for longer, or a node in that does not serve.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_edge_api::TargetState;

use crate::health::TargetHealth;
use crate::index::{Index, LoadBalancer};

/// How long a node that has left the list counts as without endpoint, whatever its probes say. Service proxies follow within seconds.
pub(crate) const MASKED_FOR: Duration = Duration::from_secs(30);

/// Why a masked target is unhealthy, in its status.
const NO_ENDPOINT: &str = "no endpoint by EndpointSlices";

/// The lists of all load balancers that have one, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct EndpointNodes(HashMap<String, NodeList>);

/// The nodes of one load balancer that have an endpoint.
#[derive(Clone, Debug)]
pub(crate) struct NodeList {
    /// Of the load balancer: another one of the same name has another history.
    uid: String,
    /// Sorted.
    nodes: Arc<[String]>,
    /// The nodes that have left, and when this host saw it.
    left: BTreeMap<String, Instant>,
}

/// Nodes that have joined a list, and nodes that have left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListChange {
    pub(crate) load_balancer: String,
    pub(crate) joined: Vec<String>,
    pub(crate) left: Vec<String>,
    pub(crate) at: Instant,
}

impl EndpointNodes {
    /// Takes in the lists of all load balancers, and no others.
    pub(crate) fn sync(&mut self, index: &Index, now: Instant) -> Vec<ListChange> {
        let is_listed = |name: &str| {
            index.load_balancer(name).is_some_and(|load_balancer| load_balancer.endpoint_nodes.is_some())
        };
        self.0.retain(|name, _| is_listed(name));
        index.load_balancers().filter_map(|load_balancer| self.update(load_balancer, now)).collect()
    }

    /// Takes in the list of a load balancer. The first one that is seen of it is no news: nobody knows how old it is.
    pub(crate) fn update(&mut self, load_balancer: &LoadBalancer, now: Instant) -> Option<ListChange> {
        let LoadBalancer { name, uid, endpoint_nodes, .. } = load_balancer;
        let Some(nodes) = endpoint_nodes else {
            self.0.remove(name);
            return None;
        };
        let Some(list) = self.0.get_mut(name).filter(|list| list.uid == *uid) else {
            let list = NodeList { uid: uid.clone(), nodes: Arc::clone(nodes), left: BTreeMap::new() };
            self.0.insert(name.clone(), list);
            return None;
        };
        let (joined, left) = list.update(nodes, now)?;
        Some(ListChange { load_balancer: name.clone(), joined, left, at: now })
    }

    /// The load balancer is gone.
    pub(crate) fn remove(&mut self, load_balancer: &str) {
        self.0.remove(load_balancer);
    }

    /// The list of a load balancer, if it has one.
    pub(crate) fn of(&self, load_balancer: &str) -> Option<&NodeList> {
        self.0.get(load_balancer)
    }
}

impl NodeList {
    /// Returns the nodes that have joined and those that have left, if any.
    fn update(&mut self, nodes: &Arc<[String]>, now: Instant) -> Option<(Vec<String>, Vec<String>)> {
        self.left.retain(|_, at| now < *at + MASKED_FOR);
        if Arc::ptr_eq(&self.nodes, nodes) || self.nodes == *nodes {
            return None;
        }
        let before = std::mem::replace(&mut self.nodes, Arc::clone(nodes));
        let missing = |from: &[String], of: &[String]| -> Vec<String> {
            of.iter().filter(|node| from.binary_search(node).is_err()).cloned().collect()
        };
        let (joined, left) = (missing(&before, nodes), missing(nodes, &before));
        for node in &joined {
            self.left.remove(node);
        }
        self.left.extend(left.iter().map(|node| (node.clone(), now)));
        Some((joined, left))
    }

    /// Until when the node counts as without endpoint, if it does.
    pub(crate) fn masked_until(&self, node: &str, now: Instant) -> Option<Instant> {
        self.left.get(node).map(|at| *at + MASKED_FOR).filter(|until| now < *until)
    }
}

/// The health of a target for one load balancer: what its node states, whatever the list says; else, while it is masked, that it has no
/// endpoint; else what its probes have found.
pub(crate) fn join(own: TargetHealth, is_masked: bool) -> TargetHealth {
    if own.is_stated || !is_masked {
        return own;
    }
    let (state, reason) = (TargetState::Unhealthy, NO_ENDPOINT.to_owned());
    TargetHealth { state, reason, lacks_endpoint: true, ..own }
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! The endpoints of all ports of a Service, collected port by port. What cannot fit into the Service's budget of elements is left out
//! at once: a thousand ports with ten thousand endpoints each would take the agent's memory before the plan is reduced. Pure.

use std::net::SocketAddr;
use std::sync::Arc;

use steerage_model::{Backend, Protocol, cluster_backends, local_backends};

use super::Omitted;
use super::endpoints::{Used, sample, sample_serving};
use crate::local_node::LocalNode;

/// The most endpoints of a list: the rules have no class for more.
pub const MOST_ENDPOINTS: usize = 16_384;

/// The endpoints of one port in one family.
#[derive(Debug, Clone)]
pub(super) struct PortEndpoints {
    /// Those of traffic policy Cluster.
    pub(super) cluster: Arc<[SocketAddr]>,
    /// Those of traffic policy Local.
    pub(super) local: Arc<[SocketAddr]>,
    /// UDP: those whose flows stay.
    pub(super) serving: Arc<[SocketAddr]>,
    /// No endpoint in the cluster is usable.
    pub(super) reject: bool,
}

impl PortEndpoints {
    /// Of these endpoints of a port, which are in order.
    pub(super) fn new(all: &[Backend<'_>], port: PortUse, local_node: &LocalNode) -> Self {
        let cluster = cluster_backends(all, &local_node.node, local_node.zone.as_deref());
        // A usable endpoint on this node is one of the cluster's, or those have better ones.
        let reject = cluster.is_empty();
        let cluster = if port.cluster { sockets(&cluster) } else { Arc::default() };
        let local = if port.local { sockets(&local_backends(all, &local_node.node)) } else { Arc::default() };
        let serving = if port.protocol == Protocol::Udp {
            let serves = |b: &&Backend<'_>| b.endpoint.serving || b.endpoint.ready;
            sockets(&all.iter().filter(serves).copied().collect::<Vec<_>>())
        } else {
            Arc::default()
        };
        Self { cluster, local, serving, reject }.sharing()
    }

    /// The same at another number, which all endpoints have.
    pub(super) fn at_port(&self, number: u16) -> Self {
        let at = |list: &Arc<[SocketAddr]>| -> Arc<[SocketAddr]> {
            list.iter().map(|endpoint| SocketAddr::new(endpoint.ip(), number)).collect()
        };
        let (cluster, local) = (at(&self.cluster), at(&self.local));
        let is_shared = Arc::ptr_eq(&self.serving, &self.cluster);
        let serving = if is_shared { Arc::clone(&cluster) } else { at(&self.serving) };
        Self { cluster, local, serving, reject: self.reject }
    }

    /// Nearly always both lists are the same, and there are many.
    fn sharing(mut self) -> Self {
        if self.serving == self.cluster {
            self.serving = Arc::clone(&self.cluster);
        }
        self
    }

    fn used(&self) -> Used<'_> {
        Used { targets: &self.cluster, local: &self.local }
    }

    /// The endpoints in the lists: those of each, and those that are only in `serving`.
    fn lengths(&self) -> [usize; 3] {
        [self.cluster.len(), self.local.len(), self.used().others(&self.serving).count()]
    }

    /// With `most` endpoints in each list.
    fn cut(self, most: usize, seed: u32) -> Self {
        if self.lengths().into_iter().all(|length| length <= most) {
            return self;
        }
        let [cluster, local] = [&self.cluster, &self.local].map(|list| sample(list, most, seed));
        let kept = Used { targets: &cluster, local: &local };
        let serving = match self.serving.len() {
            0 => Arc::default(),
            _ => sample_serving(&self.serving, &self.used(), &kept, most, seed),
        };
        Self { cluster, local, serving, ..self }.sharing()
    }
}

/// What the lists of a port are for.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortUse {
    pub(super) protocol: Protocol,
    /// A frontend has traffic policy Cluster, or clients that it holds for.
    pub(super) cluster: bool,
    /// A frontend has traffic policy Local.
    pub(super) local: bool,
}

fn sockets(backends: &[Backend<'_>]) -> Arc<[SocketAddr]> {
    backends.iter().map(|b| SocketAddr::new(b.endpoint.addr, b.port)).collect()
}

/// The endpoints of a Service's ports, as far as they fit into a budget.
#[derive(Debug)]
pub(super) struct Collected {
    ports: Vec<PortEndpoints>,
    budget: usize,
    seed: u32,
    /// Endpoints in the lists.
    length: usize,
    /// The most endpoints of a list.
    most: usize,
    omitted: Omitted,
}

impl Collected {
    /// None, with room for `budget` endpoints. `seed` says which ones stay.
    pub(super) fn new(budget: usize, seed: u32) -> Self {
        Self { ports: Vec::new(), budget, seed, length: 0, most: MOST_ENDPOINTS, omitted: Omitted::default() }
    }

    /// Adds a port.
    pub(super) fn add(&mut self, port: PortEndpoints) {
        self.omitted.has_full_list |= port.cluster.len().max(port.local.len()) > MOST_ENDPOINTS;
        let port = port.cut(MOST_ENDPOINTS, self.seed);
        self.length += port.lengths().iter().sum::<usize>();
        let port = self.cut(port);
        self.ports.push(port);
        // Twice the budget, so that not each port makes all others shorter.
        if self.length > 2 * self.budget && self.most > 1 {
            self.fit();
        }
    }

    /// The endpoints in all lists.
    #[cfg(test)]
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// All ports in the order in which they were added, and what they lack.
    pub(super) fn finish(mut self) -> (Vec<PortEndpoints>, Omitted) {
        if self.length > self.budget {
            self.fit();
        }
        (self.ports, self.omitted)
    }

    /// Makes the lists so short that they fit, with one endpoint each at least. A plan that keeps to the budget has none longer.
    fn fit(&mut self) {
        let lengths: Vec<_> = self.ports.iter().flat_map(PortEndpoints::lengths).collect();
        let needs = |most: usize| lengths.iter().map(|length| *length.min(&most)).sum::<usize>();
        let candidates: Vec<_> = (1..=self.most).collect();
        self.most = candidates.partition_point(|most| needs(*most) <= self.budget).max(1);
        for port in std::mem::take(&mut self.ports) {
            let port = self.cut(port);
            self.ports.push(port);
        }
    }

    fn cut(&mut self, port: PortEndpoints) -> PortEndpoints {
        let before: usize = port.lengths().iter().sum();
        let port = port.cut(self.most, self.seed);
        let after = port.lengths().iter().sum();
        self.omitted.endpoints += before.saturating_sub(after);
        self.length = self.length + after - before;
        port
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The agent's index, and the plans computed from it. Called by the loop alone; does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use steerage_model::{Endpoint, Key, Node, NodeAgent, Service, ServiceCidr, TrafficPolicy};
use steerage_watch::{Dirty, Event, Index, Store};

use crate::local_node::{LocalNode, LocalPods};
use crate::peers::{ForwardToPeers, NextHop};
use crate::plan::{Budgets, PeerAddresses, PeerNodes, PolicyTransitions, ServicePlan, plan_service};
use crate::rules::flow_seed;
use crate::settings::AgentSettings;

/// Everything that plans depend on.
#[derive(Default)]
pub(super) struct Planner {
    pub(super) index: Index,
    /// The host's own addresses, if node ports are served at some of them.
    pub(super) host_addresses: Vec<IpAddr>,
    /// This node as it was planned with last, without its peers. It outlives the Node object: the machine may still run.
    pub(super) local_node: Option<(LocalNode, LocalPods)>,
    pub(super) transitions: PolicyTransitions,
    /// What each Service may have of the kernel's memory.
    budgets: Budgets,
    /// Where API servers listen, or did.
    api_servers: BTreeSet<SocketAddr>,
    service_cidrs: Store<ServiceCidr>,
    service_cidrs_changed: bool,
    /// Changes that were taken from the index and not planned yet.
    dirty: Dirty,
    peers: Peers,
}

/// The nodes to which packets may be forwarded.
#[derive(Default)]
struct Peers {
    /// Where they are reached; `None` if none is asked for.
    reached: Option<Arc<PeerNodes>>,
    /// Those that are not reached.
    unreachable: BTreeSet<String>,
    /// What was planned with differs.
    changed: bool,
}

impl Planner {
    pub(super) fn new(host_addresses: Vec<IpAddr>, budgets: Budgets) -> Self {
        Self { host_addresses, budgets, ..Self::default() }
    }

    pub(super) fn on_service_cidr(&mut self, event: Event<ServiceCidr>) {
        // A list counts once it is complete: the rules are not written for each of its items.
        self.service_cidrs_changed |= !matches!(event, Event::Init | Event::InitApply(_));
        self.service_cidrs.apply(event, |_, _| {});
    }

    /// The changed networks of cluster IPs, if they changed since the last call.
    pub(super) fn take_service_cidrs(&mut self) -> Option<&Store<ServiceCidr>> {
        std::mem::take(&mut self.service_cidrs_changed).then_some(&self.service_cidrs)
    }

    /// Whether load balancers may use this node: it exists, is not being deleted, and is not about to be.
    pub(super) fn is_eligible(&self, settings: &AgentSettings) -> bool {
        self.own_node(settings).is_some_and(|node| !node.deleting && !node.autoscaler_taint)
    }

    /// What the Node object says about its agent.
    pub(super) fn annotations(&self, settings: &AgentSettings) -> Option<&NodeAgent> {
        self.own_node(settings)?.agent.as_ref()
    }

    /// Notes where API servers listen: they publish it as the endpoints of the Service `kubernetes`. One that leaves, because it ends or
    /// restarts, stays reserved: an external IP in its place would keep the agent from ever seeing it again.
    fn note_api_servers(&mut self) {
        for slice in self.index.slices(&Key::new("default", "kubernetes")) {
            for port in &slice.ports {
                let at = |endpoint: &Endpoint| SocketAddr::new(endpoint.addr, port.port);
                self.api_servers.extend(slice.endpoints.iter().map(at));
            }
        }
    }

    /// Finds out where other nodes are reached: those that changed, or all. `next_hop` asks the kernel. Returns the number of nodes that
    /// cannot be reached, if it changed.
    pub(super) fn find_peers(
        &mut self,
        settings: &AgentSettings,
        flags: &ForwardToPeers,
        all: bool,
        mut next_hop: impl FnMut(IpAddr) -> Option<NextHop>,
    ) -> Option<usize> {
        let Dirty { services, nodes: mut changed } = self.index.take_dirty();
        self.dirty.services.extend(services);
        if all {
            changed.extend(self.index.nodes().map(|node| node.name.clone()));
        }
        let Peers { reached, unreachable, changed: peers_changed } = &mut self.peers;
        let reached = reached.get_or_insert_with(|| Arc::new(PeerNodes::new(flow_seed(&settings.node))));
        let before = unreachable.len();
        for name in changed.into_iter().filter(|name| *name != settings.node) {
            // A Service that kube-proxy serves on all other nodes has this agent's endpoints only where an agent runs, too.
            let takes_them = |node: &&Node| settings.kube_proxy_replacement || node.agent.is_some();
            let node = self.index.node(&name).filter(takes_them);
            let addresses = node.map(|node| flags.addresses(node, &mut next_hop));
            if addresses == Some(PeerAddresses::default()) {
                unreachable.insert(name.clone());
            } else {
                unreachable.remove(&name);
            }
            let addresses = addresses.unwrap_or_default();
            if reached.get(&name) != addresses {
                Arc::make_mut(reached).set(&name, addresses);
                *peers_changed = true;
            }
        }
        (unreachable.len() != before).then_some(unreachable.len())
    }

    fn own_node(&self, settings: &AgentSettings) -> Option<&Node> {
        self.index.node(&settings.node)
    }

    /// The plans of Services that may have changed since the last call: all, if this node changed, and those whose share of their
    /// namespace's budget changed. `None` while this node is not known.
    pub(super) fn plan(
        &mut self,
        settings: &AgentSettings,
        now: Instant,
    ) -> Option<BTreeMap<Key, ServicePlan>> {
        self.note_api_servers();
        let known = self.own_node(settings).map(|node| {
            let api_servers = self.api_servers.iter().copied().chain(settings.api_server).collect();
            let local_node =
                settings.local_node(node, &self.host_addresses, &self.service_cidrs, api_servers);
            (local_node, settings.local_pods(node))
        });
        let (local_node, pods) = known.or_else(|| self.local_node.clone())?;
        let mut dirty = std::mem::take(&mut self.dirty.services);
        dirty.extend(self.index.take_dirty().services);
        if std::mem::take(&mut self.peers.changed) {
            let is_local = |service: &&Service| service.external_policy == TrafficPolicy::Local;
            dirty.extend(self.index.services().filter(is_local).map(|service| service.key.clone()));
        }
        for key in &dirty {
            self.transitions.observe(key, self.index.service(key), now);
        }
        dirty.extend(self.transitions.expire(now));
        if self.local_node.as_ref().is_none_or(|(old, old_pods)| *old != local_node || *old_pods != pods) {
            dirty.extend(self.index.services().map(|service| service.key.clone()));
        }
        let with_peers = LocalNode { peers: self.peers.reached.clone(), ..local_node.clone() };
        let mut updates = BTreeMap::new();
        for key in dirty {
            let plan = self.plan_one(&key, &with_peers);
            self.budgets.set(&key, plan.cost());
            updates.insert(key, plan);
        }
        for key in self.budgets.settle() {
            updates.entry(key).or_insert_with_key(|key| self.plan_one(key, &with_peers));
        }
        let seed = flow_seed(&settings.node);
        for (key, plan) in &mut updates {
            plan.reduced = plan.reduce(self.budgets.limit(key), seed);
        }
        self.local_node = Some((local_node, pods));
        Some(updates)
    }

    /// How local pods are recognised, as planned with last.
    pub(super) fn pods(&self) -> Option<&LocalPods> {
        self.local_node.as_ref().map(|(_, pods)| pods)
    }

    fn plan_one(&self, key: &Key, local_node: &LocalNode) -> ServicePlan {
        let Some(service) = self.index.service(key) else { return ServicePlan::default() };
        let mut plan = plan_service(service, &self.index, local_node);
        if self.transitions.contains(key) {
            plan.fall_back_to_cluster_policy();
        }
        plan
    }
}

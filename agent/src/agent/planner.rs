// SPDX-License-Identifier: Apache-2.0
//! The agent's index, and the plans computed from it. Called by the loop alone; does no I/O.

mod claimants;
mod cluster_nodes;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use steerage_model::{EndpointSlice, Key, Node, NodeAgent, Service, ServiceCidr, TrafficPolicy};
use steerage_watch::{Dirty, Event, Index, Store};

use claimants::{Claim, Contested, Jumps, Vacant};
use cluster_nodes::ClusterNodes;

use crate::local_node::{LocalNode, LocalPods};
use crate::peers::{ForwardToPeers, NextHop};
use crate::plan::{
    Budgets, Desired, PeerAddresses, PeerNodes, PolicyTransitions, ServicePlan, least_needs, plan_service,
};
use crate::rules::flow_seed;
use crate::settings::AgentSettings;
use turns::Turns;

/// Addresses and ports of API servers that are known, with those that have left.
const MAX_API_SERVERS: usize = 256;

/// The Service whose endpoints the API servers are, and the name of the slice that they write.
fn api_servers() -> Key {
    Key::new("default", "kubernetes")
}

/// Everything that plans depend on.
#[derive(Default)]
pub(super) struct Planner {
    pub(super) index: Index,
    /// The host's own addresses, if node ports are served at some of them.
    pub(super) host_addresses: Vec<IpAddr>,
    /// This node as it was planned with last, without other nodes. It outlives the Node object: the machine may still run.
    pub(super) local_node: Option<(LocalNode, LocalPods)>,
    transitions: PolicyTransitions,
    /// What each Service may have of the kernel's memory.
    budgets: Budgets,
    /// Where API servers listen, or did.
    api_servers: BTreeSet<SocketAddr>,
    service_cidrs: Store<ServiceCidr>,
    service_cidrs_changed: bool,
    /// Changes that were taken from the index and not seen by [`Planner::plan`] yet.
    dirty: BTreeSet<Key>,
    /// Changed Services that are not planned yet.
    turns: Turns,
    /// What the Services need that were planned, by namespaces of which others wait.
    planned: BTreeMap<String, usize>,
    /// Services that are planned again when the needs of all in their namespace are known.
    later: BTreeSet<Key>,
    /// Those of which that is so.
    settled: BTreeSet<Key>,
    vacant: Vacant,
    /// The plans that were made.
    #[cfg(test)]
    made: std::cell::Cell<usize>,
    peers: Peers,
    cluster: ClusterNodes,
}

/// What the plans of one round depend on, besides the index.
struct Round<'a> {
    local_node: &'a LocalNode,
    seed: u32,
    now: Instant,
    /// What was planned before.
    desired: &'a Desired,
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

    /// Takes an event of the watch of all Nodes.
    pub(super) fn on_cluster_node(&mut self, event: Event<Node>) {
        self.cluster.on_node(event);
    }

    /// Takes note that all Nodes are too many to be watched.
    pub(super) fn give_cluster_nodes_up(&mut self) {
        self.cluster.give_up();
    }

    /// Whether all Nodes have to be watched, because a Service has an external IP.
    pub(super) fn wants_cluster_nodes(&self) -> bool {
        self.cluster.are_wanted()
    }

    /// Whether external IPs wait for the list of Nodes.
    pub(super) fn awaits_cluster_nodes(&self) -> bool {
        self.cluster.deadline().is_some()
    }

    /// Whether load balancers may use this node: it exists, is not being deleted, and is not about to be.
    pub(super) fn is_eligible(&self, settings: &AgentSettings) -> bool {
        self.own_node(settings).is_some_and(|node| !node.deleting && !node.autoscaler_taint)
    }

    /// What the Node object says about its agent.
    pub(super) fn annotations(&self, settings: &AgentSettings) -> Option<&NodeAgent> {
        self.own_node(settings)?.agent.as_ref()
    }

    /// Notes where API servers listen: they publish it as the endpoints of the Service `kubernetes`, in a slice of the same name; others
    /// are not theirs. One that leaves, because it ends or restarts, stays reserved, unless they are too many: an external IP in its place
    /// would keep the agent from ever seeing it again.
    fn note_api_servers(&mut self) {
        let service = api_servers();
        let of_slice = |slice: &EndpointSlice| {
            let ports = slice.ports.iter().map(|port| port.port);
            let at = |port| slice.endpoints.iter().map(move |endpoint| SocketAddr::new(endpoint.addr, port));
            ports.flat_map(at).take(MAX_API_SERVERS).collect::<Vec<_>>()
        };
        let slice = self.index.slices(&service).find(|slice| slice.key == service);
        let known: BTreeSet<SocketAddr> = slice.map(of_slice).into_iter().flatten().collect();
        if self.api_servers.union(&known).count() > MAX_API_SERVERS {
            self.api_servers.clear();
        }
        self.api_servers.extend(known);
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
        self.dirty.extend(services);
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
    /// namespace's budget changed. If `is_over` says so after a Service, the others wait for the next call, see [`Planner::is_waiting`].
    /// `desired` is what was planned before. `None` while this node is not known.
    pub(super) fn plan(
        &mut self,
        settings: &AgentSettings,
        now: Instant,
        desired: &Desired,
        is_over: impl FnMut() -> bool,
    ) -> Option<BTreeMap<Key, ServicePlan>> {
        self.dirty.extend(self.index.take_dirty().services);
        if self.dirty.contains(&api_servers()) {
            self.note_api_servers();
        }
        let known = self.own_node(settings).map(|node| {
            let api_servers = self.api_servers.iter().copied().chain(settings.api_server).collect();
            let local_node =
                settings.local_node(node, &self.host_addresses, &self.service_cidrs, api_servers);
            (local_node, settings.local_pods(node))
        });
        let (local_node, pods) = known.or_else(|| self.local_node.clone())?;
        let mut dirty = std::mem::take(&mut self.dirty);
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
        for service in dirty.iter().filter_map(|key| self.index.service(key)) {
            self.cluster.on_service(service, &local_node, now);
        }
        if self.cluster.update(now) {
            let has_external_ip = |service: &&Service| !service.external_ips.is_empty();
            dirty.extend(self.index.services().filter(has_external_ip).map(|service| service.key.clone()));
        }
        let among_others = self.among_others(&local_node);
        let gone = dirty.extract_if(.., |key| self.index.service(key).is_none()).collect();
        let deleted = self.plan_deleted(gone);
        self.turns.extend(dirty);
        let round = Round { local_node: &among_others, seed: flow_seed(&settings.node), now, desired };
        let updates = self.plan_in_turns(&round, deleted, is_over);
        self.local_node = Some((local_node, pods));
        Some(updates)
    }

    /// This node with all that was planned with last, and how its pods are recognised.
    pub(super) fn planned_node(&self) -> Option<(LocalNode, &LocalPods)> {
        self.local_node.as_ref().map(|(local_node, pods)| (self.among_others(local_node), pods))
    }

    fn among_others(&self, local_node: &LocalNode) -> LocalNode {
        let mut among_others = LocalNode { peers: self.peers.reached.clone(), ..local_node.clone() };
        among_others.external_ips.cluster = self.cluster.planned().clone();
        among_others
    }

    /// The empty plans of deleted Services. They wait for no turn: another Service, also of another namespace, may have their addresses.
    fn plan_deleted(&mut self, gone: Vec<Key>) -> BTreeMap<Key, ServicePlan> {
        for key in &gone {
            self.turns.remove(key);
            self.later.remove(key);
            self.settled.remove(key);
            self.budgets.set(key, 0);
        }
        gone.into_iter().map(|key| (key, ServicePlan::default())).collect()
    }

    /// The plans of Services that wait, and of those whose share of the namespace's budget changes, besides those that are `deleted`.
    /// Each is reduced as soon as it is made: all plans of a namespace together never have more elements than the namespace may have,
    /// besides those that it had before.
    fn plan_in_turns(
        &mut self,
        round: &Round<'_>,
        deleted: BTreeMap<Key, ServicePlan>,
        mut is_over: impl FnMut() -> bool,
    ) -> BTreeMap<Key, ServicePlan> {
        self.vacant.tidy(round.desired, round.now);
        let (mut updates, mut contested) = (deleted, Contested::new(&self.vacant, round.desired));
        for (key, plan) in &updates {
            contested.note(key, plan, round.desired);
        }
        let mut has_completed = false;
        self.settle(round.now);
        while let Some(key) = self.turns.next() {
            has_completed |= self.take_turn(&key, round, &mut updates, &mut contested);
            let is_over = is_over();
            // Not after each namespace: it looks at all that changed.
            if has_completed && (is_over || self.turns.is_empty()) {
                has_completed = false;
                self.settle(round.now);
            }
            if is_over {
                break;
            }
        }
        self.plan_claimants(round, &mut updates, contested);
        for (key, plan) in &updates {
            self.vacant.note(key, plan, round.desired, round.now);
        }
        updates
    }

    /// Plans a Service that waits no more for its turn. Returns whether it was the last one of its namespace.
    fn take_turn(
        &mut self,
        key: &Key,
        round: &Round<'_>,
        updates: &mut BTreeMap<Key, ServicePlan>,
        contested: &mut Contested,
    ) -> bool {
        match self.plan_waiting(key, round) {
            Some(plan) => {
                contested.note(key, &plan, round.desired);
                updates.insert(key.clone(), plan);
            }
            None => {
                if let Some(service) = self.index.service(key) {
                    contested.note_waiting(service, round.local_node, round.desired);
                }
            }
        }
        let is_last = !self.turns.has(key.namespace());
        if is_last {
            self.planned.remove(key.namespace());
        }
        is_last
    }

    /// Plans Services before their turn that were assigned what others leave or take as an external IP, or take what others leave as an
    /// external IP: a few. For those that wait all the same it is reserved, if it was assigned to them.
    fn plan_claimants(
        &mut self,
        round: &Round<'_>,
        updates: &mut BTreeMap<Key, ServicePlan>,
        mut contested: Contested,
    ) {
        let mut jumps = Jumps::default();
        let mut has_completed = false;
        // Each pass but the last one plans a Service: what that one leaves may be another one's.
        while !contested.is_empty() {
            let waiting = self.turns.all().chain(&self.later).filter_map(|key| self.index.service(key));
            for Claim { service: key, assigned } in contested.take(waiting, round.local_node) {
                if self.turns.contains(&key) && jumps.take(&key) {
                    self.turns.remove(&key);
                    has_completed |= self.take_turn(&key, round, updates, &mut contested);
                }
                if self.is_waiting(&key) && !assigned.is_empty() {
                    // It ends with the next plan, which has everything that this one has.
                    let plan = updates.entry(key).or_insert_with_key(|key| round.desired.plan(key));
                    let known: BTreeSet<_> = plan.reserved.iter().copied().collect();
                    plan.reserved.extend(assigned.into_iter().filter(|at| !known.contains(at)));
                }
            }
        }
        if has_completed {
            self.settle(round.now);
        }
    }

    /// The plan of a Service whose turn it is. `None` if it waits until the needs of all are known: a Service that needs no more than
    /// before waits for nothing, because a namespace whose Services change all the time may never come to its end.
    fn plan_waiting(&mut self, key: &Key, round: &Round<'_>) -> Option<ServicePlan> {
        let local_node = round.local_node;
        let is_settled = self.settled.remove(key);
        // What needs more than any Service may have is planned when it is known what it may have.
        let least = if is_settled { 0 } else { self.least_needs(key, local_node) };
        let plan = (least < local_node.element_limits.service).then(|| self.plan_one(key, local_node));
        let needs = plan.as_ref().map_or(least, ServicePlan::cost);
        let grows = self.budgets.set(key, needs);
        let planned = self.planned.entry(key.namespace().to_owned()).or_default();
        *planned += needs.min(self.budgets.limit(key));
        let is_too_much = *planned > local_node.element_limits.namespace;
        // One that changes again while it waits needs no more than was noted, and has not got it yet.
        if !is_settled && (grows || self.later.contains(key)) && is_too_much {
            self.later.insert(key.clone());
            return None;
        }
        self.later.remove(key);
        let plan = plan.unwrap_or_else(|| self.plan_one(key, local_node));
        Some(self.reduced(plan, key, round.seed))
    }

    /// Shares out the budgets of the namespaces of which no Service waits. Those whose share changed wait then.
    fn settle(&mut self, now: Instant) {
        let Self { budgets, turns, later, settled, .. } = self;
        let mut concerned = budgets.settle(now, |namespace| turns.has(namespace));
        concerned.extend(later.extract_if(.., |key| !turns.has(key.namespace())));
        settled.extend(concerned.iter().cloned());
        turns.extend(concerned);
    }

    /// Whether there are changes that are not planned.
    pub(super) fn has_waiting(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Whether changes of this Service are not planned.
    pub(super) fn is_waiting(&self, key: &Key) -> bool {
        self.turns.contains(key) || self.later.contains(key)
    }

    fn reduced(&self, mut plan: ServicePlan, key: &Key, seed: u32) -> ServicePlan {
        plan.reduced = plan.reduce(self.budgets.limit(key), seed);
        plan
    }

    /// When plans change without an input, or are made that wait.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        let waiting = self.has_waiting().then_some(now);
        let deadlines = [self.transitions.next(), self.budgets.next(), self.cluster.deadline(), waiting];
        deadlines.into_iter().flatten().min()
    }

    /// How local pods are recognised, as planned with last.
    pub(super) fn pods(&self) -> Option<&LocalPods> {
        self.local_node.as_ref().map(|(_, pods)| pods)
    }

    fn least_needs(&self, key: &Key, local_node: &LocalNode) -> usize {
        self.index.service(key).map_or(0, |service| least_needs(service, &self.index, local_node))
    }

    fn plan_one(&self, key: &Key, local_node: &LocalNode) -> ServicePlan {
        let Some(service) = self.index.service(key) else { return ServicePlan::default() };
        #[cfg(test)]
        self.made.set(self.made.get() + 1);
        let mut plan = plan_service(service, &self.index, local_node);
        if self.transitions.contains(key) {
            plan.fall_back_to_cluster_policy();
        }
        plan
    }
}

#[cfg(test)]
mod budget_tests;
#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! The agent's index, and the plans computed from it. Called by the loop alone; does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use steerage_model::{Endpoint, Key, Node, NodeAgent, ServiceCidr};
use steerage_watch::{Event, Index, Store};

use crate::local_node::{LocalNode, LocalPods};
use crate::plan::{Budgets, PolicyTransitions, ServicePlan, plan_service};
use crate::rules::flow_seed;
use crate::settings::AgentSettings;

/// Everything that plans depend on.
#[derive(Default)]
pub(super) struct Planner {
    pub(super) index: Index,
    /// The host's own addresses, if node ports are served at some of them.
    pub(super) host_addresses: Vec<IpAddr>,
    /// This node as it was planned with last. It outlives the Node object: the machine may still run.
    pub(super) local_node: Option<(LocalNode, LocalPods)>,
    transitions: PolicyTransitions,
    /// What each Service may have of the kernel's memory.
    budgets: Budgets,
    /// Where API servers listen, or did.
    api_servers: BTreeSet<SocketAddr>,
    service_cidrs: Store<ServiceCidr>,
    service_cidrs_changed: bool,
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
        let mut dirty = self.index.take_dirty().services;
        for key in &dirty {
            self.transitions.observe(key, self.index.service(key), now);
        }
        dirty.extend(self.transitions.expire(now));
        if self.local_node.as_ref().is_none_or(|(old, old_pods)| *old != local_node || *old_pods != pods) {
            dirty.extend(self.index.services().map(|service| service.key.clone()));
        }
        let updates = self.plan_all(&dirty, &local_node, flow_seed(&settings.node), now);
        self.local_node = Some((local_node, pods));
        Some(updates)
    }

    /// The plans of these Services, and of those whose share of the namespace's budget changes. Each is reduced as soon as it is made:
    /// all plans of a namespace together never have more elements than the namespace may have.
    fn plan_all(
        &mut self,
        dirty: &BTreeSet<Key>,
        local_node: &LocalNode,
        seed: u32,
        now: Instant,
    ) -> BTreeMap<Key, ServicePlan> {
        let mut updates = BTreeMap::new();
        let mut later = BTreeSet::new();
        let mut elements: BTreeMap<&str, usize> = BTreeMap::new();
        for key in dirty {
            let plan = self.plan_one(key, local_node);
            let needs = plan.cost();
            self.budgets.set(key, needs);
            let of_namespace = elements.entry(key.namespace()).or_default();
            *of_namespace += needs.min(self.budgets.limit(key));
            if *of_namespace > local_node.element_limits.namespace {
                // What it may have is known once the needs of all are.
                later.insert(key.clone());
            } else {
                updates.insert(key.clone(), self.reduced(plan, key, seed));
            }
        }
        later.extend(self.budgets.settle(now));
        for key in later {
            let plan = self.reduced(self.plan_one(&key, local_node), &key, seed);
            updates.insert(key, plan);
        }
        updates
    }

    fn reduced(&self, mut plan: ServicePlan, key: &Key, seed: u32) -> ServicePlan {
        plan.reduced = plan.reduce(self.budgets.limit(key), seed);
        plan
    }

    /// When plans change without an input.
    pub(super) fn next(&self) -> Option<Instant> {
        self.transitions.next().into_iter().chain(self.budgets.next()).min()
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use steerage_model::{EndpointPort, EndpointSlice, Family, Protocol, Service, ServicePort};

    use super::*;
    use crate::plan::ElementLimits;

    const LIMITS: ElementLimits = ElementLimits { service: 2_500, namespace: 10_000 };

    /// A Service of ten ports with 200 endpoints.
    fn add(planner: &mut Planner, number: u8) -> Key {
        let key = Key::new("tenant", number.to_string());
        let port = |n: u16| ServicePort::new(n.to_string(), Protocol::Tcp, n, None);
        let ports: Vec<_> = (1..=10).map(port).collect();
        let slice_port = |port: &ServicePort| EndpointPort {
            name: port.name.clone(),
            protocol: Protocol::Tcp,
            port: port.port,
        };
        let endpoint = |n: u32| Endpoint::ready(Ipv4Addr::from_bits(0x0af4_0000 + n).into(), "there");
        planner.index.apply_slice(Event::Apply(EndpointSlice {
            ports: ports.iter().map(slice_port).collect(),
            endpoints: (0..200).map(endpoint).collect(),
            ..EndpointSlice::new(Key::new("tenant", format!("{number}-1")), key.clone(), Family::V4)
        }));
        planner.index.apply_service(Event::Apply(Service {
            cluster_ips: vec![IpAddr::from([10, 96, 0, number])],
            ports,
            ..Service::new(key.clone())
        }));
        key
    }

    #[test]
    fn plans_of_a_namespace_are_reduced_whether_they_come_together_or_not() {
        let local_node =
            LocalNode { kube_proxy_replacement: true, element_limits: LIMITS, ..LocalNode::default() };
        let mut together = Planner::new(Vec::new(), Budgets::new(LIMITS));
        let keys: BTreeSet<_> = (0..20).map(|number| add(&mut together, number)).collect();
        let plans = together.plan_all(&keys, &local_node, 0, Instant::now());
        assert_eq!(plans.len(), 20);
        let needs: usize = plans.values().map(ServicePlan::cost).sum();
        assert!((LIMITS.namespace / 2..=LIMITS.namespace).contains(&needs), "{needs}");

        let mut one_by_one = Planner::new(Vec::new(), Budgets::new(LIMITS));
        let mut last: BTreeMap<Key, ServicePlan> = BTreeMap::new();
        for number in 0..20 {
            let key = add(&mut one_by_one, number);
            last.extend(one_by_one.plan_all(&[key].into(), &local_node, 0, Instant::now()));
            let needs: usize = last.values().map(ServicePlan::cost).sum();
            assert!(needs <= LIMITS.namespace, "{needs}");
        }
        assert_eq!(last, plans);
    }
}

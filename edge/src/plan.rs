// SPDX-License-Identifier: Apache-2.0
//! The plan: from what the API says, what the host sees and what probes found, to what the kernel should hold and what should be
//! reported. Pure but for the ids that it gives out; called by `engine` whenever any of these changes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use steerage_edge_api::{EdgeTarget, HealthCheck, ListenerProtocol, TargetState, TargetStatus};

use crate::forward::{ForwardingState, Mac, SlotTable, slot_table_id};
use crate::hash;
use crate::health::{HealthByProbe, Probe, TargetHealth};
use crate::host::HostNetwork;
use crate::ids::IdAllocator;
use crate::index::{Index, LoadBalancer};
use crate::slot_table::{self, WeightedTarget};

/// What should be.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    /// What the kernel should hold.
    pub(crate) forwarding: ForwardingState,
    /// The addresses to answer for when this host is the active one.
    pub(crate) vips: BTreeSet<IpAddr>,
    /// All virtual addresses that must not be somebody else's.
    pub(crate) wanted: BTreeSet<IpAddr>,
    /// What to probe.
    pub(crate) probes: HashSet<Probe>,
    /// What to report of each load balancer.
    pub(crate) statuses: BTreeMap<String, LoadBalancerStatus>,
}

/// What is reported of one load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadBalancerStatus {
    /// The UID of the load balancer.
    pub(crate) uid: String,
    /// The generation that this follows from.
    pub(crate) generation: i64,
    /// What keeps it from being in force; empty if nothing does.
    pub(crate) problem: String,
    /// The targets, a list for each family, which load balancers may share.
    pub(crate) targets: Vec<Arc<Vec<TargetStatus>>>,
}

/// Which slot table: load balancers with the same nodes, check and kind of hash share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SlotTableKey {
    /// The name of the load balancer, or of the node set with the check that is shared.
    owner: Owner,
    v6: bool,
    affinity: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    LoadBalancer(String),
    NodeSet(String, HealthCheck),
}

/// A table as planned.
#[derive(Clone, Debug)]
struct PlannedTable {
    id: u32,
    statuses: Arc<Vec<TargetStatus>>,
    local: bool,
}

/// The planner: remembers ids, and tables whose members have not changed.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    ids: IdAllocator<SlotTableKey>,
    filled: HashMap<SlotTableKey, CachedSlotTable>,
}

#[derive(Debug)]
struct CachedSlotTable {
    class: usize,
    members: Vec<WeightedTarget>,
    slots: Arc<SlotTable>,
}

impl Planner {
    /// A planner that goes on with the ids that the kernel holds.
    pub(crate) fn adopt(written: &ForwardingState) -> Self {
        Self { ids: IdAllocator::adopt(written), filled: HashMap::new() }
    }

    /// What should be now.
    pub(crate) fn plan(
        &mut self,
        index: &Index,
        host: &HostNetwork,
        health: &HealthByProbe,
        now: Instant,
    ) -> Plan {
        let mut plan = Plan::default();
        let mut tables = HashMap::<SlotTableKey, PlannedTable>::new();
        let mut owners = BTreeMap::<IpAddr, &str>::new();
        for (name, load_balancer) in &index.load_balancers {
            for vip in &load_balancer.spec.addresses {
                owners.entry(*vip).or_insert(name);
            }
        }
        for (name, load_balancer) in &index.load_balancers {
            let mut work =
                Work { index, host, health, plan: &mut plan, tables: &mut tables, owners: &owners };
            let status = self.one(&mut work, name, load_balancer);
            plan.statuses.insert(name.clone(), status);
        }
        self.filled.retain(|key, _| tables.contains_key(key));
        self.ids.retain_tables(|key| tables.contains_key(key));
        plan.forwarding.targets = self.ids.retire(&plan.forwarding.tables, now);
        plan.forwarding.vips.clone_from(&plan.wanted);
        link(&mut plan, host);
        plan
    }

    fn one(&mut self, work: &mut Work<'_>, name: &str, load_balancer: &LoadBalancer) -> LoadBalancerStatus {
        let spec = &load_balancer.spec;
        let mut problems = Vec::new();
        let targets = match &spec.node_set {
            None => spec.targets.as_slice(),
            Some(set) => {
                let targets = work.index.node_sets.get(set);
                if targets.is_none() {
                    problems.push(format!("the EdgeNodeSet {set} does not exist"));
                }
                targets.map_or(&[][..], |targets| targets.as_slice())
            }
        };
        let (ranges, unreadable) = ranges(&spec.source_ranges);
        problems.extend(unreadable);
        let mut statuses = Vec::new();
        for vip in &spec.addresses {
            if let Some(problem) = work.refuse(name, *vip) {
                problems.push(problem);
                continue;
            }
            let key = SlotTableKey {
                owner: match &spec.node_set {
                    Some(set) => Owner::NodeSet(set.clone(), spec.health_check.clone()),
                    None => Owner::LoadBalancer(name.to_owned()),
                },
                v6: vip.is_ipv6(),
                affinity: spec.affinity.is_some(),
            };
            let known = work.tables.get(&key).cloned();
            let table = known.unwrap_or_else(|| self.table(work, &key, *vip, targets, &spec.health_check));
            work.tables.insert(key, table.clone());
            let plan = &mut *work.plan;
            for listener in &spec.listeners {
                let protocol = match listener.protocol {
                    ListenerProtocol::Tcp => 6,
                    ListenerProtocol::Udp => {
                        plan.forwarding.fragments.insert(*vip, table.id);
                        17
                    }
                };
                plan.forwarding.listeners.insert((*vip, protocol, listener.port), table.id);
            }
            if !spec.source_ranges.is_empty() {
                let of_family = ranges.iter().filter(|net| net.addr().is_ipv6() == vip.is_ipv6());
                plan.forwarding.ranges.insert(*vip, of_family.copied().collect());
            }
            if table.local {
                plan.forwarding.local.insert(*vip);
            }
            plan.wanted.insert(*vip);
            match work.host.taken.get(vip) {
                None => drop(plan.vips.insert(*vip)),
                Some(mac) => problems.push(format!(
                    "{vip} is in use on the link by {}: free it there, or take it out of the address pool",
                    text(*mac)
                )),
            }
            statuses.push(table.statuses);
        }
        LoadBalancerStatus {
            uid: load_balancer.uid.clone(),
            generation: load_balancer.generation,
            problem: problems.join("; "),
            targets: statuses,
        }
    }

    fn table(
        &mut self,
        work: &mut Work<'_>,
        key: &SlotTableKey,
        vip: IpAddr,
        targets: &[EdgeTarget],
        check: &HealthCheck,
    ) -> PlannedTable {
        let mut candidates = Vec::new();
        let mut statuses = Vec::new();
        let own_weights = targets.iter().any(|target| target.weight != 1);
        for target in targets {
            let of_family = target.addresses.iter().find(|address| address.is_ipv6() == vip.is_ipv6());
            let Some(address) = of_family.copied() else { continue };
            let is_local = work.host.is_mine(address);
            if let Some(reason) = if is_local { None } else { work.host.off_link(address) } {
                let state = TargetState::Refused;
                statuses.push(TargetStatus { node: target.node.clone(), address, state, reason, weight: 0 });
                continue;
            }
            work.admit(target, address);
            let probe = Probe { address, check: check.clone() };
            let seen = work.health.get(&probe).cloned().unwrap_or_default();
            work.plan.probes.insert(probe);
            let weight = if own_weights { target.weight } else { seen.weight.unwrap_or(1) };
            let TargetHealth { state, reason, .. } = seen;
            statuses.push(TargetStatus { node: target.node.clone(), address, state, reason, weight });
            let id = self.ids.target(address, is_local);
            let name = hash::bytes(target.node.as_bytes());
            candidates.push((WeightedTarget { id, hash: name, weight }, state, is_local));
        }
        statuses.sort_by(|a, b| (&a.node, a.address).cmp(&(&b.node, b.address)));
        let local = candidates.iter().any(|(_, _, is_local)| *is_local);
        let class = slot_table::class(candidates.len());
        let healthy = candidates.iter().any(|(_, state, _)| *state == TargetState::Healthy);
        // Fail open: where nobody is healthy, everybody is used.
        let members: Vec<_> = candidates
            .into_iter()
            .filter(|(_, state, _)| !healthy || *state == TargetState::Healthy)
            .map(|(member, ..)| member)
            .collect();
        let slots = self.fill(key, class, members);
        let id = slot_table_id(self.ids.table(key, vip), class, key.affinity);
        work.plan.forwarding.tables.insert(id, slots);
        PlannedTable { id, statuses: Arc::new(statuses), local }
    }

    fn fill(&mut self, key: &SlotTableKey, class: usize, mut members: Vec<WeightedTarget>) -> Arc<SlotTable> {
        members.sort_by_key(|member| (member.hash, member.id));
        if let Some(filled) = self.filled.get(key)
            && filled.class == class
            && filled.members == members
        {
            return Arc::clone(&filled.slots);
        }
        let size = slot_table::SIZES.get(class).copied().unwrap_or(0);
        let slots = Arc::new(SlotTable {
            slots: slot_table::fill(size, &members),
            usable: members.iter().map(|member| member.id).collect(),
        });
        self.filled.insert(key.clone(), CachedSlotTable { class, members, slots: Arc::clone(&slots) });
        slots
    }
}

/// What the planning of one load balancer works with.
struct Work<'w> {
    index: &'w Index,
    host: &'w HostNetwork,
    health: &'w HealthByProbe,
    plan: &'w mut Plan,
    tables: &'w mut HashMap<SlotTableKey, PlannedTable>,
    owners: &'w BTreeMap<IpAddr, &'w str>,
}

impl Work<'_> {
    /// Why an address cannot be served at all.
    fn refuse(&self, name: &str, vip: IpAddr) -> Option<String> {
        let first = self.owners.get(&vip).copied().unwrap_or(name);
        if first != name {
            return Some(format!("{vip} belongs to the load balancer {first} already"));
        }
        if vip.is_loopback() || vip.is_multicast() || vip.is_unspecified() {
            return Some(format!("{vip} cannot be the address of a load balancer"));
        }
        let peer = self.host.peers.iter().any(|peer| peer.addresses.contains(&vip));
        if self.host.is_mine(vip) || peer {
            return Some(format!(
                "{vip} is the own address of an edge host: take it out of the address pool"
            ));
        }
        None
    }

    /// Notes where a target is and what may come from it.
    fn admit(&mut self, target: &EdgeTarget, address: IpAddr) {
        let Some(mac) = self.host.neighbours.get(&address).copied() else { return };
        self.plan.forwarding.nodes.insert(mac);
        let pods = target.pod_cidrs.iter().filter_map(|net| net.parse::<IpNet>().ok());
        let own = target.addresses.iter().copied().map(IpNet::from);
        self.plan.forwarding.sources.entry(mac).or_default().extend(own.chain(pods));
    }
}

/// Who else is on the link; and lists made disjoint, as the kernel needs ranges to be.
fn link(plan: &mut Plan, host: &HostNetwork) {
    for peer in &host.peers {
        plan.forwarding.peers.insert(peer.mac);
        let own = peer.addresses.iter().copied().map(IpNet::from);
        plan.forwarding.sources.entry(peer.mac).or_default().extend(own);
    }
    let lists = plan.forwarding.sources.values_mut().chain(plan.forwarding.ranges.values_mut());
    for list in lists {
        *list = IpNet::aggregate(&list.iter().copied().collect()).into_iter().collect();
    }
}

fn ranges(texts: &[String]) -> (Vec<IpNet>, Option<String>) {
    let parsed: Vec<_> = texts.iter().map(|text| (text, text.trim().parse::<IpNet>())).collect();
    let bad: Vec<_> = parsed.iter().filter(|(_, net)| net.is_err()).map(|(text, _)| text.as_str()).collect();
    let problem = (!bad.is_empty()).then(|| format!("not a source range: {}", bad.join(", ")));
    (parsed.into_iter().filter_map(|(_, net)| Some(net.ok()?.trunc())).collect(), problem)
}

fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests;

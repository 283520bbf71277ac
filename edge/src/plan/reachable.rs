// SPDX-License-Identifier: Apache-2.0
//! The targets of an object for one IP family, as this host reaches them. Pure. A plan makes one for all groups with the same targets:
//! under `health-check` steering each load balancer has all nodes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_api::{EdgeTarget, TargetState, TargetStatus, TargetUse};
use steerage_edge_dataplane::Path;

use super::targets::Targets;
use crate::hash;
use crate::health::HealthByProbe;
use crate::host::HostNetwork;
use crate::link::mac::Mac;

#[derive(Debug)]
pub(super) struct ReachableTargets {
    /// Those that can be reached.
    pub(super) targets: Vec<ReachableTarget>,
    positions: HashMap<IpAddr, usize>,
    /// Those that cannot.
    pub(super) refused: Vec<TargetStatus>,
    /// Those of them that are refused for what their nodes state. They are still asked, so that the nodes can state something else.
    asked: BTreeSet<IpAddr>,
    /// The weights are the objects', and not those that the targets' responses ask for.
    pub(super) has_own_weights: bool,
    /// The sources that frames of a node may carry.
    pub(super) sources: Vec<(Mac, Vec<IpNet>)>,
    /// The positions of targets whose nodes had never stated anything when the plan was made, in order.
    pub(super) without_statement: Vec<usize>,
    /// All positions, in the order of the hashes of the nodes' names.
    by_name: Vec<usize>,
    /// Whether this host is one of them.
    pub(super) has_own_host: bool,
}

#[derive(Debug)]
pub(super) struct ReachableTarget {
    pub(super) node: String,
    pub(super) address: IpAddr,
    pub(super) name_hash: u64,
    pub(super) weight: u32,
    /// Why its node drains, if it does.
    pub(super) drain: Option<String>,
}

impl ReachableTargets {
    fn new(targets: &Targets, v6: bool, host: &HostNetwork, health: &HealthByProbe) -> Self {
        let mut reachable = Self {
            targets: Vec::new(),
            positions: HashMap::new(),
            refused: Vec::new(),
            asked: BTreeSet::new(),
            has_own_weights: targets.as_slice().iter().any(|target| target.weight != 1),
            sources: Vec::new(),
            without_statement: Vec::new(),
            by_name: Vec::new(),
            has_own_host: false,
        };
        let draining = targets.draining().map(|target| (target, Some(target.drain_reason.clone())));
        for (target, drain) in targets.as_slice().iter().map(|target| (target, None)).chain(draining) {
            let mut of_family = target.addresses.iter().filter(|address| address.is_ipv6() == v6);
            let Some(address) = of_family.next().copied() else { continue };
            let reached = host.reach(address);
            let refusal = reached
                .as_ref()
                .ok()
                .and_then(|path| host.refusal(address, path, health.tunnel_receiver(address)));
            reachable.asked.extend(refusal.is_some().then_some(address));
            let path = match refusal.map_or(reached, Err) {
                Ok(path) => path,
                Err(reason) => {
                    reachable.refused.push(TargetStatus {
                        node: target.node.clone(),
                        address,
                        state: TargetState::Refused,
                        reason,
                        weight: 0,
                        usage: Some(TargetUse::Inactive),
                        use_reason: "refused".to_owned(),
                    });
                    continue;
                }
            };
            // Two nodes with one address are one target.
            let position = reachable.targets.len();
            if *reachable.positions.entry(address).or_insert(position) != position {
                continue;
            }
            reachable.has_own_host |= path == Path::Local;
            if !health.is_stating(address) {
                reachable.without_statement.push(position);
            }
            reachable.sources.extend(sources(host, target, address));
            reachable.targets.push(ReachableTarget {
                node: target.node.clone(),
                address,
                name_hash: hash::bytes(target.node.as_bytes()),
                weight: target.weight,
                drain,
            });
        }
        reachable.by_name = (0..reachable.targets.len()).collect();
        let targets = &reachable.targets;
        reachable
            .by_name
            .sort_by_key(|position| targets.get(*position).map(|target| (target.name_hash, target.address)));
        reachable
    }

    /// All positions in the order of the hashes of the nodes' names, beginning at this one, and from the end on with the first.
    pub(super) fn ring_from(&self, name_hash: u64) -> impl Iterator<Item = usize> {
        let hash = |position: &usize| self.targets.get(*position).map(|target| target.name_hash);
        let begin = self.by_name.partition_point(|position| hash(position) < Some(name_hash));
        let (before, after) = self.by_name.split_at(begin);
        after.iter().chain(before).copied()
    }

    pub(super) fn position(&self, address: IpAddr) -> Option<usize> {
        self.positions.get(&address).copied()
    }

    /// The addresses of the node of this name.
    pub(super) fn addresses_of(&self, node: &str) -> impl Iterator<Item = IpAddr> {
        let name_hash = hash::bytes(node.as_bytes());
        let of_hash = self.ring_from(name_hash).filter_map(|position| self.targets.get(position));
        let of_hash = of_hash.take_while(move |target| target.name_hash == name_hash);
        of_hash.filter(move |target| target.node == node).map(|target| target.address)
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.targets.iter().map(|target| target.address)
    }

    /// The addresses of targets whose health is followed.
    pub(super) fn followed(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses().chain(self.asked.iter().copied())
    }

    /// Whether the health of a target at this address is followed.
    pub(super) fn follows(&self, address: IpAddr) -> bool {
        self.positions.contains_key(&address) || self.asked.contains(&address)
    }
}

/// Where frames of a target come from, once its link-layer address is known.
fn sources(host: &HostNetwork, target: &EdgeTarget, address: IpAddr) -> Option<(Mac, Vec<IpNet>)> {
    let mac = host.neighbours.get(&address).copied()?;
    let pods = target.pod_cidrs.iter().filter_map(|net| net.parse().ok());
    let own = target.addresses.iter().copied().map(IpNet::from);
    Some((mac, own.chain(pods).collect()))
}

/// What a plan has made of the targets of each object, once.
#[derive(Debug, Default)]
pub(super) struct ReachableByTargets(HashMap<(usize, bool), (Targets, Arc<ReachableTargets>)>);

impl ReachableByTargets {
    pub(super) fn reachable(
        &mut self,
        targets: &Targets,
        v6: bool,
        host: &HostNetwork,
        health: &HealthByProbe,
    ) -> Arc<ReachableTargets> {
        // The targets are held as long as the result, so that no others get their place in memory.
        let make = || (targets.clone(), Arc::new(ReachableTargets::new(targets, v6, host, health)));
        Arc::clone(&self.0.entry((targets.memory_address(), v6)).or_insert_with(make).1)
    }

    /// No group has these any more.
    pub(super) fn forget(&mut self, targets: &Targets, v6: bool) {
        self.0.remove(&(targets.memory_address(), v6));
    }
}

/// The reachable targets of some groups, each object once.
pub(super) fn distinct<'a>(
    all: impl Iterator<Item = &'a Arc<ReachableTargets>>,
) -> impl Iterator<Item = &'a Arc<ReachableTargets>> {
    let mut seen = HashSet::new();
    all.filter(move |reachable| seen.insert(Arc::as_ptr(reachable)))
}

// SPDX-License-Identifier: Apache-2.0
//! The targets of a load balancer and family: which can be reached, with what weight, and what is reported of each. `usage` decides
//! which of them are used.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use steerage_edge_api::{
    EdgeLoadBalancerSpec, EdgeNodeSetSpec, EdgeTarget, HealthCheck, IpFamily, SharedTargets, TargetState,
    TargetStatus, TargetUse,
};
use steerage_edge_dataplane::maglev::{self, Member};
use steerage_edge_dataplane::packet::maps::ListenerKey;

use super::HealthInputs;
use super::is_same_family;
use super::report::{GroupReport, HeldTarget, SharedGroup};
use super::usage::{Basis, Known, Memory, STEPS, UseRules, Used, decide};
use crate::hash;
use crate::health::{Probe, TargetHealth};
use crate::host::HostNetwork;
use crate::index::LoadBalancer;
use crate::link::mac::Mac;
use crate::numbers::TargetNumbers;

/// Load balancers with the same targets, check and rules share a table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct TableKey {
    owner: Owner,
    check: HealthCheck,
    rules: UseRules,
    v6: bool,
}

/// The largest table of a group that uses all its targets because none is healthy. Under `health-check` steering all nodes are targets of each Service: those
/// without endpoints would need more memory than all others.
const MAX_FAIL_OPEN_SIZE: u32 = 1021;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    LoadBalancer(String),
    NodeSet(String),
}

impl TableKey {
    pub(super) fn new(object: &LoadBalancer, vip: IpAddr) -> Self {
        let owner = match &object.spec.node_set {
            Some(set) => Owner::NodeSet(set.clone()),
            None => Owner::LoadBalancer(object.name.clone()),
        };
        let check = object.spec.health_check.clone();
        Self { owner, check, rules: UseRules::new(&object.spec), v6: vip.is_ipv6() }
    }

    fn family(&self) -> IpFamily {
        if self.v6 { IpFamily::V6 } else { IpFamily::V4 }
    }

    /// What load balancers with this key share; `None` if it is of one load balancer.
    fn shared(&self) -> Option<Arc<SharedGroup>> {
        let Owner::NodeSet(node_set) = &self.owner else { return None };
        let targets = SharedTargets {
            node_set: node_set.clone(),
            health_check: self.check.clone(),
            panic_threshold_percent: self.rules.panic_threshold_percent(),
            slow_start_milliseconds: self.rules.slow_start_milliseconds(),
        };
        Some(Arc::new(SharedGroup::new(targets, self.family())))
    }

    /// The same on all hosts.
    fn hash(&self) -> u64 {
        let (Owner::LoadBalancer(name) | Owner::NodeSet(name)) = &self.owner;
        hash::bytes(name.as_bytes())
    }
}

/// Targets as an object holds them, or held them last.
#[derive(Clone, Debug)]
pub(super) enum Targets {
    Own(Arc<EdgeLoadBalancerSpec>),
    OfNodeSet(Arc<EdgeNodeSetSpec>),
}

impl Targets {
    /// Whether both are the same value in memory.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Own(a), Self::Own(b)) => Arc::ptr_eq(a, b),
            (Self::OfNodeSet(a), Self::OfNodeSet(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    fn as_slice(&self) -> &[EdgeTarget] {
        match self {
            Self::Own(spec) => &spec.targets,
            Self::OfNodeSet(spec) => &spec.targets,
        }
    }

    /// Those whose nodes drain. One that is among the others too, as its removal is held, does not.
    fn draining(&self) -> impl Iterator<Item = &EdgeTarget> {
        let draining = match self {
            Self::Own(spec) => &spec.draining,
            Self::OfNodeSet(spec) => &spec.draining,
        };
        let others = if draining.is_empty() { &[] } else { self.as_slice() };
        let held: HashSet<_> = others.iter().map(|target| target.node.as_str()).collect();
        draining.iter().filter(move |target| !held.contains(target.node.as_str()))
    }
}

#[derive(Clone, Debug)]
pub(super) struct TargetGroup {
    pub(super) key: TableKey,
    pub(super) targets: Targets,
    /// The first listener that it serves.
    pub(super) first: ListenerKey,
    pub(super) candidates: Vec<Candidate>,
    /// Of all targets, also of refused ones.
    pub(super) report: Arc<GroupReport>,
    pub(super) probes: Vec<Probe>,
    /// The sources that frames of a node may carry.
    pub(super) sources: Vec<(Mac, Vec<IpNet>)>,
    basis: Basis,
    /// For the next group with this key.
    pub(super) memory: Arc<Memory>,
    /// When the group changes without any news.
    pub(super) next_change: Option<Instant>,
}

/// A target that can be reached.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    address: IpAddr,
    name_hash: u64,
    weight: u32,
    state: TargetState,
    /// Whether its first probe has ended, answered or not.
    is_tried: bool,
    /// In parts of [`STEPS`] of its weight.
    share: u32,
}

impl Candidate {
    fn is_healthy(&self) -> bool {
        self.state == TargetState::Healthy
    }
}

impl TargetGroup {
    /// `before` is what an earlier group with this key has left.
    pub(super) fn new(
        inputs: HealthInputs<'_>,
        key: TableKey,
        targets: &Targets,
        first: ListenerKey,
        before: &Memory,
    ) -> Self {
        let vip = IpAddr::from(first.vip);
        let HealthInputs { host, health, now, .. } = inputs;
        let use_own_weights = targets.as_slice().iter().any(|target| target.weight != 1);
        let rules = key.rules;
        let report = Arc::new(GroupReport::new(None, key.family(), Vec::new(), 0));
        let mut group = Self {
            key,
            targets: targets.clone(),
            first,
            candidates: Vec::new(),
            report,
            probes: Vec::new(),
            sources: Vec::new(),
            basis: Basis::All,
            memory: Arc::default(),
            next_change: None,
        };
        let (mut statuses, mut known) = (Vec::new(), Vec::new());
        let draining = targets.draining().map(|target| (target, Some(target.drain_reason.as_str())));
        for (target, drain) in targets.as_slice().iter().map(|target| (target, None)).chain(draining) {
            let mut of_family = target.addresses.iter().filter(|address| is_same_family(**address, vip));
            let Some(address) = of_family.next().copied() else { continue };
            let held = |state, reason, weight, lacks_endpoint| {
                let status = TargetStatus {
                    node: target.node.clone(),
                    address,
                    state,
                    reason,
                    weight,
                    usage: Some(TargetUse::Inactive),
                    use_reason: "refused".to_owned(),
                };
                HeldTarget { status, lacks_endpoint }
            };
            let is_local = host.is_local(address);
            if let Some(reason) = host.off_link(address).filter(|_| !is_local) {
                statuses.push(held(TargetState::Refused, reason, 0, false));
                continue;
            }
            let probe = Probe { address, check: group.key.check.clone() };
            let of_probe = health.get(&probe);
            let is_tried = of_probe.is_some();
            let TargetHealth { state, reason, weight, lacks_endpoint } =
                of_probe.cloned().unwrap_or_default();
            let weight = if use_own_weights { target.weight } else { weight.unwrap_or(1) };
            group.probes.push(probe);
            group.sources.extend(sources(host, target, address));
            known.push((Known { address, state, lacks_endpoint, drain }, statuses.len()));
            statuses.push(held(state, reason, weight, lacks_endpoint));
            let name_hash = hash::bytes(target.node.as_bytes());
            group.candidates.push(Candidate { address, name_hash, weight, state, is_tried, share: 0 });
        }
        let (known, places): (Vec<_>, Vec<_>) = known.into_iter().unzip();
        let usage = decide(&known, rules, before, now);
        for ((candidate, place), used) in group.candidates.iter_mut().zip(places).zip(usage.used) {
            let Used { usage, reason, share } = used;
            candidate.share = share;
            if let Some(HeldTarget { status, .. }) = statuses.get_mut(place) {
                (status.usage, status.use_reason) = (Some(usage), reason);
            }
        }
        (group.basis, group.next_change) = (usage.basis, usage.next_change);
        group.memory = Arc::new(usage.memory);
        group.report = Arc::new(GroupReport::new(group.key.shared(), group.key.family(), statuses, 0));
        group
    }

    /// Whether a target's address is such.
    pub(super) fn has_target(&self, is_such: impl Fn(IpAddr) -> bool) -> bool {
        self.candidates.iter().any(|candidate| is_such(candidate.address))
    }

    /// The same targets, with the health that they have now.
    pub(super) fn refreshed(&self, inputs: HealthInputs<'_>) -> Self {
        Self::new(inputs, self.key.clone(), &self.targets, self.first, &self.memory)
    }

    pub(super) fn has_healthy(&self) -> bool {
        self.candidates.iter().any(Candidate::is_healthy)
    }

    /// Whether all targets were tried, and one is healthy or none will soon be. One healthy target alone would get all connections
    /// for a moment; and while all refuse their first probes, the ports of a new Service may not be open yet.
    pub(super) fn is_health_known(&self) -> bool {
        let is_decided = |candidate: &Candidate| candidate.state != TargetState::Initial;
        self.candidates.iter().all(|candidate| candidate.is_tried)
            && (self.has_healthy() || self.candidates.iter().all(is_decided))
    }

    /// The targets that are used, and the size of their table. Every target gets a number, also an unused one. The size follows from
    /// the whole weights of these members alone, and not from an earlier size: all hosts must have the same, and a target that fills
    /// must not move the slots of the others.
    pub(super) fn members(&self, numbers: &mut TargetNumbers) -> (Vec<Member>, u32) {
        let mut used = Vec::new();
        for candidate in &self.candidates {
            let target = numbers.assign(candidate.address);
            if candidate.share > 0 {
                let member = Member { target, seed: candidate.name_hash, weight: candidate.weight };
                used.push((member, candidate.share));
            }
        }
        used.sort_by_key(|(member, _)| (member.seed, member.target));
        let (mut members, shares): (Vec<_>, Vec<_>) = used.into_iter().unzip();
        let size = maglev::size(None, &members);
        let size = if self.basis == Basis::All { size.min(MAX_FAIL_OPEN_SIZE) } else { size };
        take_shares(&mut members, &shares);
        self.keep_members(&mut members, usize::try_from(size).unwrap_or(usize::MAX));
        (members, size)
    }

    /// The numbers of all targets, once they have any.
    pub(super) fn numbers(&self, numbers: &TargetNumbers) -> impl Iterator<Item = u32> {
        self.candidates.iter().filter_map(|candidate| numbers.get(candidate.address))
    }

    /// Keeps so many of the members. Groups keep different ones.
    pub(super) fn keep_members(&self, members: &mut Vec<Member>, most: usize) {
        if members.len() > most {
            let own = self.key.hash();
            members.sort_by_key(|member| (hash::mix64(member.seed ^ own), member.target));
            members.truncate(most);
            members.sort_by_key(|member| (member.seed, member.target));
        }
    }
}

/// Gives each member its share of its weight, as far as weights can be divided: all grow first if there is room for that.
fn take_shares(members: &mut [Member], shares: &[u32]) {
    if shares.iter().all(|share| *share == STEPS) {
        return;
    }
    let heaviest = members.iter().map(|member| member.weight).max().unwrap_or(1);
    let scale = (maglev::MAX_WEIGHT / heaviest.max(1)).clamp(1, STEPS);
    for (member, share) in members.iter_mut().zip(shares) {
        member.weight = (member.weight.saturating_mul(scale * share) / STEPS).max(1);
    }
}

/// Where frames of a target come from, once its link-layer address is known.
fn sources(host: &HostNetwork, target: &EdgeTarget, address: IpAddr) -> Option<(Mac, Vec<IpNet>)> {
    let mac = host.neighbours.get(&address).copied()?;
    let pods = target.pod_cidrs.iter().filter_map(|net| net.parse().ok());
    let own = target.addresses.iter().copied().map(IpNet::from);
    Some((mac, own.chain(pods).collect()))
}

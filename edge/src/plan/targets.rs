// SPDX-License-Identifier: Apache-2.0
//! The targets of a load balancer and family: which can be reached, with what weight, and what is reported of each. `usage` decides
//! which of them are used, and `tracked` which have a value in the group.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use steerage_edge_api::{
    EdgeLoadBalancerSpec, EdgeNodeSetSpec, EdgeTarget, HealthCheck, IpFamily, SharedTargets, TargetState,
    TargetStatus,
};
use steerage_edge_dataplane::maglev::{self, Member};
use steerage_edge_dataplane::packet::maps::ListenerKey;

use super::HealthInputs;
use super::reachable::{ReachableTarget, ReachableTargets};
use super::report::{GroupReport, SharedGroup, TrackedTarget, UntrackedCounts};
use super::tracked::{MOST_WITHOUT_ENDPOINT, Tracked, track};
use super::usage::{Basis, Known, Memory, STEPS, UseRules, Used, decide};
use crate::endpoint_nodes::join;
use crate::hash;
use crate::health::{Probe, TargetHealth};
use crate::index::LoadBalancer;
use crate::numbers::TargetNumbers;

/// Load balancers with the same targets, check and rules share a table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct TableKey {
    owner: Owner,
    check: HealthCheck,
    rules: UseRules,
    v6: bool,
}

/// The largest table of a group that uses targets although none is healthy: each slot is a guess, and Services without a healthy target
/// must not need more memory than all others.
const MAX_FAIL_OPEN_SIZE: u32 = 1021;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    LoadBalancer(String),
    NodeSet(String),
    /// The nodes of a set for one load balancer, which has a list of those with an endpoint.
    Listed {
        node_set: String,
        load_balancer: String,
    },
}

impl TableKey {
    pub(super) fn new(object: &LoadBalancer, vip: IpAddr) -> Self {
        Self::of(object, vip, object.endpoint_nodes.is_some())
    }

    /// The key of the same load balancer with the other steering of `health-check` and `fused`.
    pub(super) fn of_other_steering(object: &LoadBalancer, vip: IpAddr) -> Self {
        Self::of(object, vip, object.endpoint_nodes.is_none())
    }

    fn of(object: &LoadBalancer, vip: IpAddr, is_listed: bool) -> Self {
        let owner = match object.spec.node_set.clone() {
            Some(node_set) if is_listed => Owner::Listed { node_set, load_balancer: object.name.clone() },
            Some(node_set) => Owner::NodeSet(node_set),
            None => Owner::LoadBalancer(object.name.clone()),
        };
        let check = object.spec.health_check.clone();
        Self { owner, check, rules: UseRules::new(&object.spec), v6: vip.is_ipv6() }
    }

    /// The load balancer whose list of nodes with an endpoint counts for the group, if it has one: never that of another one with the
    /// same check.
    pub(super) fn load_balancer(&self) -> Option<&str> {
        match &self.owner {
            Owner::LoadBalancer(name) | Owner::Listed { load_balancer: name, .. } => Some(name),
            Owner::NodeSet(_) => None,
        }
    }

    /// The check of the targets.
    pub(super) fn check(&self) -> &HealthCheck {
        &self.check
    }

    pub(super) fn is_v6(&self) -> bool {
        self.v6
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

    /// Where the group is on a ring of the hashes of nodes' names: the same on all hosts, and another one for each group. If it keeps
    /// only some targets, it keeps the next ones.
    pub(super) fn ring_position(&self) -> u64 {
        let (Owner::LoadBalancer(name) | Owner::NodeSet(name) | Owner::Listed { node_set: name, .. }) =
            &self.owner;
        hash::mix64(hash::bytes(name.as_bytes()) ^ u64::from(self.check.port))
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
        self.memory_address() == other.memory_address()
    }

    /// No other value has it while this one is held.
    pub(super) fn memory_address(&self) -> usize {
        match self {
            Self::Own(spec) => Arc::as_ptr(spec).addr(),
            Self::OfNodeSet(spec) => Arc::as_ptr(spec).addr(),
        }
    }

    pub(super) fn as_slice(&self) -> &[EdgeTarget] {
        match self {
            Self::Own(spec) => &spec.targets,
            Self::OfNodeSet(spec) => &spec.targets,
        }
    }

    /// Those whose nodes drain. One that is among the others too, as its removal is held, does not.
    pub(super) fn draining(&self) -> impl Iterator<Item = &EdgeTarget> {
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
    pub(super) reachable: Arc<ReachableTargets>,
    /// The first listener that it serves.
    pub(super) first: ListenerKey,
    /// See [`track`].
    pub(super) candidates: Vec<Candidate>,
    /// Of all targets, also of refused ones and of those that are no candidates.
    pub(super) report: Arc<GroupReport>,
    basis: Basis,
    /// The number of targets whose first probe has not ended, also of those that are no candidates.
    untried: usize,
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
        reachable: Arc<ReachableTargets>,
        first: ListenerKey,
        before: &Memory,
    ) -> Self {
        let HealthInputs { health, endpoints, now, .. } = inputs;
        let list = key.load_balancer().and_then(|name| endpoints.of(name));
        let mut probe = Probe { address: IpAddr::from(first.vip), check: key.check.clone() };
        let mut candidates = Vec::new();
        let refused = |status: &TargetStatus| TrackedTarget { status: status.clone(), lacks_endpoint: false };
        let mut held: Vec<_> = reachable.refused.iter().map(refused).collect();
        let (mut known, mut tracked_untried, mut mask_ends) = (Vec::new(), 0, Vec::new());
        let Tracked { positions, untried } = track(&reachable, &key, health, before);
        for position in positions {
            let Some(target) = reachable.targets.get(position) else { continue };
            probe.address = target.address;
            let of_probe = health.get(&probe);
            tracked_untried += usize::from(of_probe.is_none());
            let masked = list.and_then(|list| list.masked_until(&target.node, now));
            mask_ends.extend(masked);
            let TargetHealth { state, reason, weight, lacks_endpoint, .. } =
                join(of_probe.cloned().unwrap_or_default(), masked.is_some());
            let weight = if reachable.has_own_weights { target.weight } else { weight.unwrap_or(1) };
            let ReachableTarget { address, name_hash, .. } = *target;
            known.push(Known { address, state, lacks_endpoint, drain: target.drain.as_deref() });
            candidates.push(Candidate { address, name_hash, weight, state, share: 0 });
            let status = TargetStatus {
                node: target.node.clone(),
                address,
                state,
                reason,
                weight,
                usage: None,
                use_reason: String::new(),
            };
            held.push(TrackedTarget { status, lacks_endpoint });
        }
        let is_without_endpoint = known.iter().all(|target| target.lacks_endpoint);
        let mut usage = decide(&known, untried, key.rules, before, now);
        if usage.basis == Basis::All && is_without_endpoint {
            limit_without_endpoint(&mut usage.used, &candidates, &key);
        }
        let of_candidates = held.iter_mut().skip(reachable.refused.len());
        for ((candidate, held), used) in candidates.iter_mut().zip(of_candidates).zip(usage.used) {
            let Used { usage, reason, share } = used;
            candidate.share = share;
            (held.status.usage, held.status.use_reason) = (Some(usage), reason);
        }
        let other_untried = untried.saturating_sub(tracked_untried);
        let without_endpoint = reachable.targets.len().saturating_sub(candidates.len() + other_untried);
        let others = UntrackedCounts { without_endpoint, untried: other_untried };
        let report = GroupReport::new(key.shared(), key.family(), held, others);
        Self {
            key,
            targets: targets.clone(),
            reachable,
            first,
            candidates,
            report: Arc::new(report),
            basis: usage.basis,
            untried,
            memory: Arc::new(usage.memory),
            next_change: usage.next_change.into_iter().chain(mask_ends).min(),
        }
    }

    /// The same targets, with the health that they have now.
    pub(super) fn refreshed(&self, inputs: HealthInputs<'_>) -> Self {
        let reachable = Arc::clone(&self.reachable);
        Self::new(inputs, self.key.clone(), &self.targets, reachable, self.first, &self.memory)
    }

    /// The check of its targets.
    pub(super) fn check(&self) -> &HealthCheck {
        &self.key.check
    }

    /// Whether the first probe of every target has ended.
    pub(super) fn is_tried(&self) -> bool {
        self.untried == 0
    }

    pub(super) fn has_healthy(&self) -> bool {
        self.candidates.iter().any(Candidate::is_healthy)
    }

    /// The targets that get new connections.
    pub(super) fn used(&self) -> impl Iterator<Item = &ReachableTarget> {
        let used = self.candidates.iter().filter(|candidate| candidate.share > 0);
        used.filter_map(|candidate| self.reachable.targets.get(self.reachable.position(candidate.address)?))
    }

    /// Whether all targets were tried, and one is healthy or none will soon be. One healthy target alone would get all connections
    /// for a moment; and while all refuse their first probes, the ports of a new Service may not be open yet.
    pub(super) fn is_health_known(&self) -> bool {
        let is_decided = |candidate: &Candidate| candidate.state != TargetState::Initial;
        self.is_tried() && (self.has_healthy() || self.candidates.iter().all(is_decided))
    }

    /// The targets that are used, and the size of their table. The size follows from the whole weights of these members alone, and not
    /// from an earlier size: all hosts must have the same, and a target that fills must not move the slots of the others.
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

    /// Keeps so many of the members. Groups keep different ones.
    pub(super) fn keep_members(&self, members: &mut Vec<Member>, most: usize) {
        if members.len() > most {
            let begin = self.key.ring_position();
            members.sort_by_key(|member| (member.seed.wrapping_sub(begin), member.target));
            members.truncate(most);
            members.sort_by_key(|member| (member.seed, member.target));
        }
    }
}

/// Uses at most [`MOST_WITHOUT_ENDPOINT`] targets if all say that they have no endpoint: the same ones as where their nodes state it.
fn limit_without_endpoint(used: &mut [Used], candidates: &[Candidate], key: &TableKey) {
    let begin = key.ring_position();
    let distance = |candidate: &Candidate| (candidate.name_hash.wrapping_sub(begin), candidate.address);
    // Not those of draining nodes, unless all drain.
    let get_connections = used.iter().zip(candidates).filter(|(used, _)| used.share > 0);
    let mut distances: Vec<_> = get_connections.map(|(_, candidate)| distance(candidate)).collect();
    if let Some(most) = MOST_WITHOUT_ENDPOINT.checked_sub(1).filter(|most| *most < distances.len()) {
        let (_, last, _) = distances.select_nth_unstable(most);
        for (used, candidate) in used.iter_mut().zip(candidates) {
            if used.share > 0 && distance(candidate) > *last {
                *used = Used::without_endpoint();
            }
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

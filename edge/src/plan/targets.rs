// SPDX-License-Identifier: Apache-2.0
//! The targets of a load balancer and family: which can be used, with what weight, and what is reported of each.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_api::{EdgeTarget, HealthCheck, TargetState, TargetStatus};

use super::accept::Accepted;
use super::{PlanInputs, is_same_family};
use crate::forward::Mac;
use crate::hash;
use crate::health::{Probe, TargetHealth};
use crate::host::HostNetwork;
use crate::ids::TargetIds;
use crate::index::LoadBalancer;
use crate::slot_table::WeightedTarget;

/// Load balancers with the same nodes, check and kind of hash share a slot table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SlotTableKey {
    owner: Owner,
    v6: bool,
    pub(super) affinity: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    LoadBalancer(String),
    NodeSet(String, HealthCheck),
}

impl SlotTableKey {
    pub(super) fn new(object: &LoadBalancer, vip: IpAddr) -> Self {
        let owner = match &object.spec.node_set {
            Some(set) => Owner::NodeSet(set.clone(), object.spec.health_check.clone()),
            None => Owner::LoadBalancer(object.name.clone()),
        };
        Self { owner, v6: vip.is_ipv6(), affinity: object.spec.affinity.is_some() }
    }
}

pub(super) struct TargetGroup {
    pub(super) key: SlotTableKey,
    /// The first VIP that it serves.
    pub(super) vip: IpAddr,
    /// False if it is a node set that does not exist.
    pub(super) exists: bool,
    pub(super) candidates: Vec<Candidate>,
    /// Of all targets, also of refused ones; by node and address.
    pub(super) statuses: Arc<Vec<TargetStatus>>,
    pub(super) probes: Vec<Probe>,
    /// The sources that frames of a node may carry.
    pub(super) sources: Vec<(Mac, Vec<IpNet>)>,
}

/// A target that can be reached.
pub(super) struct Candidate {
    address: IpAddr,
    name_hash: u64,
    weight: u32,
    state: TargetState,
    is_local: bool,
}

impl TargetGroup {
    pub(super) fn new(
        inputs: &PlanInputs<'_>,
        load_balancer: &Accepted<'_>,
        key: SlotTableKey,
        vip: IpAddr,
    ) -> Self {
        let check = &load_balancer.object.spec.health_check;
        let targets = load_balancer.targets.unwrap_or_default();
        let use_own_weights = targets.iter().any(|target| target.weight != 1);
        let mut group = Self {
            key,
            vip,
            exists: load_balancer.targets.is_some(),
            candidates: Vec::new(),
            statuses: Arc::default(),
            probes: Vec::new(),
            sources: Vec::new(),
        };
        let mut statuses = Vec::new();
        for target in targets {
            let mut of_family = target.addresses.iter().filter(|address| is_same_family(**address, vip));
            let Some(address) = of_family.next().copied() else { continue };
            let status = |state, reason, weight| TargetStatus {
                node: target.node.clone(),
                address,
                state,
                reason,
                weight,
            };
            let is_local = inputs.host.is_local(address);
            if let Some(reason) = inputs.host.off_link(address).filter(|_| !is_local) {
                statuses.push(status(TargetState::Refused, reason, 0));
                continue;
            }
            let probe = Probe { address, check: check.clone() };
            let TargetHealth { state, reason, weight } =
                inputs.health.get(&probe).cloned().unwrap_or_default();
            let weight = if use_own_weights { target.weight } else { weight.unwrap_or(1) };
            group.probes.push(probe);
            group.sources.extend(sources(inputs.host, target, address));
            statuses.push(status(state, reason, weight));
            let name_hash = hash::bytes(target.node.as_bytes());
            group.candidates.push(Candidate { address, name_hash, weight, state, is_local });
        }
        statuses.sort_by(|a, b| (&a.node, a.address).cmp(&(&b.node, b.address)));
        group.statuses = Arc::new(statuses);
        group
    }

    pub(super) fn has_local_target(&self) -> bool {
        self.candidates.iter().any(|candidate| candidate.is_local)
    }

    /// Whether a target is healthy, or none can turn out to be at its first probe.
    pub(super) fn is_health_known(&self) -> bool {
        let is = |state| self.candidates.iter().any(|candidate| candidate.state == state);
        self.exists && (is(TargetState::Healthy) || !is(TargetState::Initial))
    }

    /// The healthy targets, or all where none is healthy (fail open). Every target gets an id, also an unhealthy one.
    pub(super) fn members(&self, ids: &mut TargetIds) -> Vec<WeightedTarget> {
        let is_healthy = |candidate: &Candidate| candidate.state == TargetState::Healthy;
        let any_healthy = self.candidates.iter().any(is_healthy);
        let member = |candidate: &Candidate| {
            let id = ids.assign(candidate.address, candidate.is_local);
            (!any_healthy || is_healthy(candidate)).then_some(WeightedTarget {
                id,
                hash: candidate.name_hash,
                weight: candidate.weight,
            })
        };
        let mut members: Vec<_> = self.candidates.iter().filter_map(member).collect();
        members.sort_by_key(|member| (member.hash, member.id));
        members
    }
}

/// Where frames of a target come from, once its link-layer address is known.
fn sources(host: &HostNetwork, target: &EdgeTarget, address: IpAddr) -> Option<(Mac, Vec<IpNet>)> {
    let mac = host.neighbours.get(&address).copied()?;
    let pods = target.pod_cidrs.iter().filter_map(|net| net.parse().ok());
    let own = target.addresses.iter().copied().map(IpNet::from);
    Some((mac, own.chain(pods).collect()))
}

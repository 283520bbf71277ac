// SPDX-License-Identifier: Apache-2.0
//! The planned targets of a load balancer, and their health as the provider reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, IneligibleReason};

use crate::PodPort;

/// A node that a load balancer may send to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The node's name.
    pub node: String,
    /// The node's internal addresses.
    pub addresses: Vec<IpAddr>,
    /// `spec.providerID`, by which a cloud knows its instance.
    pub provider_id: Option<String>,
    /// The node's zone.
    pub zone: Option<String>,
    /// The node's pod CIDRs: source addresses other than its own that its packets may carry.
    pub pod_cidrs: Vec<IpNet>,
    /// Share of connections relative to the other targets; at least 1.
    pub weight: u32,
}

/// A set of targets that many Services share, so that a provider can store it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SharedSet {
    /// All eligible nodes.
    Eligible,
    /// All eligible nodes with an agent.
    Agents,
}

impl SharedSet {
    /// Every shared set.
    pub const ALL: [Self; 2] = [Self::Eligible, Self::Agents];

    /// Its name, valid as an object name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Eligible => "eligible",
            Self::Agents => "agents",
        }
    }
}

/// The nodes that are targets of one load balancer, sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TargetSet {
    /// The shared set that `targets` equals, with weight 1 each.
    pub shared: Option<SharedSet>,
    /// Of two values of a shared set the one with the larger number is the newer one; 0 if it is not shared.
    pub generation: u64,
    /// The targets. Load balancers with the same set share all of them, others each one.
    pub targets: Arc<[Arc<Target>]>,
    /// Nodes that would be targets if they did not drain, sorted by name. A provider without a use for them has removed them.
    pub draining: Arc<[DrainingTarget]>,
    /// The names of the nodes that have an endpoint, sorted, for a provider that supports `fused` steering; `None` with other steerings,
    /// and where no endpoint says its node. Load balancers with the same shared set have different ones.
    pub endpoint_nodes: Option<Arc<[String]>>,
}

/// A node that drains: it should get no new connections, and keep those that it has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DrainingTarget {
    /// The node as a target.
    pub target: Arc<Target>,
    /// Why it drains.
    pub reason: IneligibleReason,
}

impl TargetSet {
    /// Targets that are no shared set.
    pub fn own<T: Into<Arc<Target>>>(targets: impl IntoIterator<Item = T>) -> Self {
        Self::own_shared(targets.into_iter().map(Into::into).collect())
    }

    /// The same, of targets that other load balancers have too.
    pub fn own_shared(targets: Arc<[Arc<Target>]>) -> Self {
        Self { shared: None, generation: 0, targets, draining: Arc::default(), endpoint_nodes: None }
    }

    /// The same targets, with these nodes that have an endpoint.
    #[must_use]
    pub fn with_endpoint_nodes(self, endpoint_nodes: Option<Arc<[String]>>) -> Self {
        Self { endpoint_nodes, ..self }
    }
}

/// A pod that a load balancer may send to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodTarget {
    /// The address and port on which it receives packets.
    pub address: SocketAddr,
    /// The zone of its node.
    pub zone: Option<Arc<str>>,
}

/// The targets of one group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Targets {
    /// Nodes.
    Nodes(TargetSet),
    /// Pods, sorted by address.
    Pods(Arc<[PodTarget]>),
}

/// The targets of all groups of a load balancer, whatever its structure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupTargets {
    /// The targets of every group of nodes; `None` if such groups keep those that they have.
    pub nodes: Option<TargetSet>,
    /// The targets of groups of pods. A group that is not contained keeps those that it has.
    pub pods: BTreeMap<PodPort, Arc<[PodTarget]>>,
}

impl GroupTargets {
    /// Those of a load balancer without groups of pods.
    pub fn of_nodes(nodes: TargetSet) -> Self {
        Self { nodes: Some(nodes), pods: BTreeMap::new() }
    }

    /// The same groups with the targets of an earlier time, as far as it had some for them.
    #[must_use]
    pub fn frozen_at(&self, earlier: &Self) -> Self {
        let nodes = self.nodes.as_ref().map(|now| earlier.nodes.as_ref().unwrap_or(now).clone());
        let pods = self
            .pods
            .iter()
            .map(|(port, now)| (port.clone(), Arc::clone(earlier.pods.get(port).unwrap_or(now))));
        Self { nodes, pods: pods.collect() }
    }

    /// The number of nodes and pods. A pod counts once, however many groups it is in.
    pub fn count(&self) -> usize {
        let pods = self.pods.values().flat_map(|pods| pods.iter());
        let pods: BTreeSet<IpAddr> = pods.map(|pod| pod.address.ip()).collect();
        self.nodes.as_ref().map_or(0, |nodes| nodes.targets.len()) + pods.len()
    }
}

/// The health of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HealthState {
    /// Not decided yet.
    Initial,
    /// Passes its health check.
    Healthy,
    /// Fails its health check.
    Unhealthy,
    /// Gets no new connections; existing ones continue.
    Draining,
    /// Registered but not used; `reason` says why.
    Unused,
}

impl HealthState {
    /// Whether this is a worse state than the other one. A node whose ports are checked one by one has the worst of their states.
    pub fn is_worse_than(self, other: Self) -> bool {
        self.rank() > other.rank()
    }

    fn rank(self) -> u8 {
        match self {
            Self::Healthy => 0,
            Self::Initial => 1,
            Self::Draining => 2,
            Self::Unused => 3,
            Self::Unhealthy => 4,
        }
    }
}

/// The health of one target, as reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHealth {
    /// The node's name, the pod's address and port, or the provider's name for the target if neither is known.
    pub target: String,
    /// The checked IP family, if the provider checks each separately.
    pub family: Option<Family>,
    /// The state.
    pub state: HealthState,
    /// The provider's explanation; may be empty.
    pub reason: String,
}

/// The health of a part of a load balancer whose targets are checked apart from those of the others: some ports, or an IP family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartHealth {
    /// Which part it is, for users.
    pub name: String,
    /// Whether one of its targets is healthy; `None` while that is not decided.
    pub is_served: Option<bool>,
}

impl PartHealth {
    /// Of a part with targets in these states.
    pub fn of(name: String, states: impl Iterator<Item = HealthState>) -> Self {
        let states: Vec<HealthState> = states.collect();
        let (is_healthy, is_undecided) =
            (states.contains(&HealthState::Healthy), states.contains(&HealthState::Initial));
        let is_served = (is_healthy || !is_undecided).then_some(is_healthy);
        Self { name, is_served }
    }
}

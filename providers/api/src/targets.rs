// SPDX-License-Identifier: Apache-2.0
//! The planned targets of a load balancer, and their health as the provider reports it.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::Family;

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

/// The targets of one load balancer, sorted by node name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TargetSet {
    /// The shared set that `targets` equals, with weight 1 each.
    pub shared: Option<SharedSet>,
    /// Of two values of a shared set the one with the larger number is the newer one; 0 if it is not shared.
    pub generation: u64,
    /// The targets. Load balancers with the same set share them.
    pub targets: Arc<[Target]>,
}

impl TargetSet {
    /// Targets that are no shared set.
    pub fn own(targets: impl Into<Arc<[Target]>>) -> Self {
        Self { shared: None, generation: 0, targets: targets.into() }
    }
}

/// The health of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// The health of one target, as reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHealth {
    /// The node's name, or the provider's name for the target if the node is unknown.
    pub node: String,
    /// The checked IP family, if the provider checks each separately.
    pub family: Option<Family>,
    /// The state.
    pub state: HealthState,
    /// The provider's explanation; may be empty.
    pub reason: String,
}

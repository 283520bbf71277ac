// SPDX-License-Identifier: Apache-2.0
//! The targets of a load balancer as planned, and their health as the provider sees it.

use std::net::IpAddr;

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
    /// The addresses of the node's pods: what may come from it under a foreign source address.
    pub pod_cidrs: Vec<IpNet>,
    /// Its share of the connections relative to the other targets; at least 1.
    pub weight: u32,
}

/// A set of targets that many Services have in common, so that a provider can store it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SharedSet {
    /// All eligible nodes.
    Eligible,
    /// All eligible nodes that our agent serves.
    Agents,
}

impl SharedSet {
    /// A name for it, fit for an object name.
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
    /// Set when the targets are a shared set, each with weight 1.
    pub shared: Option<SharedSet>,
    /// The targets.
    pub targets: Vec<Target>,
}

/// How a target is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealthState {
    /// Not enough probes yet.
    Initial,
    /// Takes traffic.
    Healthy,
    /// Fails its probes.
    Unhealthy,
    /// Finishes what it has.
    Draining,
    /// Registered, but never used; the reason says why.
    Unused,
}

/// The health of one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHealth {
    /// The node's name; where the provider cannot tell it, the provider's own name for the target.
    pub node: String,
    /// The family that was probed, where the provider probes them apart.
    pub family: Option<Family>,
    /// The state.
    pub state: HealthState,
    /// Why, in the provider's words; empty where there is nothing to say.
    pub reason: String,
}

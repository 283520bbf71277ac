// SPDX-License-Identifier: Apache-2.0
//! A planned target group: how its targets are reached and checked, and which they are.

use std::fmt;
use std::time::Duration;

use steerage_model::{Affinity, Protocol};

use crate::{TargetSet, Targets};

/// The protocol of a health check.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HealthProtocol {
    /// Passes when a connection opens.
    Tcp,
    /// Passes when a GET request is answered with status 200.
    Http {
        /// The path, with its leading slash.
        path: String,
    },
}

/// How targets are checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HealthCheck {
    /// The protocol.
    pub protocol: HealthProtocol,
    /// The port; `None` for the one on which each target receives packets.
    pub port: Option<u16>,
    /// Whether the port answers for this Service on the node; otherwise it answers for the node's service proxy, or for the pod.
    pub is_of_service: bool,
    /// Time between two checks.
    pub interval: Duration,
    /// Time after which a check fails.
    pub timeout: Duration,
    /// Consecutive successful checks that make a target healthy.
    pub healthy_threshold: u32,
    /// Consecutive failed checks that make a target unhealthy.
    pub unhealthy_threshold: u32,
}

/// The port on which pods receive packets: `targetPort` of a Service's port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PodPort {
    /// This one.
    Number(u16),
    /// Each pod's port of this name and protocol.
    Name(String, Protocol),
}

impl fmt::Display for PodPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(port) => write!(f, "{port}"),
            Self::Name(name, _) => f.write_str(name),
        }
    }
}

/// What distinguishes a target group from the others of its load balancer, and does not change with its targets: how they are reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupKey {
    /// Nodes, with VIP and Service port: the only group of its load balancer.
    Vip,
    /// Nodes, on this port.
    NodePort(u16),
    /// Pods.
    Pods(PodPort),
}

/// A target group as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetGroup {
    /// Its key.
    pub key: GroupKey,
    /// How targets are checked.
    pub health_check: HealthCheck,
    /// Session affinity by client address.
    pub affinity: Option<Affinity>,
    /// The targets: pods if the key says so, else nodes. All else is the structure.
    pub targets: Targets,
}

impl TargetGroup {
    /// Whether both request the same structure.
    pub fn has_structure_of(&self, other: &Self) -> bool {
        let Self { key, health_check, affinity, targets: _ } = self;
        *key == other.key && *health_check == other.health_check && *affinity == other.affinity
    }

    /// The targets of a group of nodes.
    pub fn nodes(&self) -> Option<&TargetSet> {
        match &self.targets {
            Targets::Nodes(nodes) => Some(nodes),
            Targets::Pods(_) => None,
        }
    }
}

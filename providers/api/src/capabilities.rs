// SPDX-License-Identifier: Apache-2.0
//! What a provider supports. The plan requests nothing else, and reports what is unsupported.

use std::fmt;
use std::time::Duration;

use steerage_model::Protocol;

/// How a target group comes to send traffic only to nodes that have an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Steering {
    /// The controller registers and deregisters nodes as endpoints change.
    Api,
    /// All eligible nodes are registered; each node's `/healthz` decides.
    HealthCheck,
    /// As [`HealthCheck`](Self::HealthCheck), and the load balancer is told which nodes have an endpoint.
    Fused,
}

impl Steering {
    /// The value in annotation and flag.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::HealthCheck => "health-check",
            Self::Fused => "fused",
        }
    }

    /// Whether all eligible nodes are targets, and each one's `/healthz` says whether it has an endpoint.
    pub fn asks_nodes(self) -> bool {
        match self {
            Self::Api => false,
            Self::HealthCheck | Self::Fused => true,
        }
    }
}

impl fmt::Display for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Steering {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "api" => Ok(Self::Api),
            "health-check" => Ok(Self::HealthCheck),
            "fused" => Ok(Self::Fused),
            _ => Err("use api, health-check or fused".to_owned()),
        }
    }
}

/// How packets reach a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addressing {
    /// With VIP and Service port: one target group serves all listeners.
    Vip,
    /// With node address and node port: every listener needs a node port, and a target group for it.
    NodePort,
}

/// The annotation by which a Service chooses what its targets are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetsAnnotation {
    /// Its name.
    pub name: &'static str,
    /// The value that chooses nodes, as does a Service without the annotation.
    pub nodes: &'static str,
    /// The value that chooses pods.
    pub pods: &'static str,
}

/// What a provider supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The steerings.
    pub steerings: &'static [Steering],
    /// The protocols of listeners.
    pub protocols: &'static [Protocol],
    /// How packets reach the nodes.
    pub addressing: Addressing,
    /// How a Service chooses pods as targets; `None` if the provider reaches only nodes.
    pub pod_targets: Option<TargetsAnnotation>,
    /// The vendor's annotation with labels of target nodes, beside Steerage's own.
    pub node_labels: Option<&'static str>,
    /// Whether several Services can share a load balancer by the annotation `steerage.dev/shared-load-balancer`.
    pub shared_load_balancers: bool,
    /// Whether addresses come from an `AddressPool`: Services share one by the annotation `steerage.dev/address-sharing-key`, and pools
    /// select Services by their labels.
    pub address_pools: bool,
    /// Whether IPv6 is supported.
    pub ipv6: bool,
    /// Whether all targets of a load balancer are reached over the Service's first IP family, whatever family its clients use.
    pub one_target_family: bool,
    /// Whether targets can have different weights.
    pub weights: bool,
    /// Whether the provider stores a shared set once. Then its changes reach all load balancers that use it by
    /// [`Provider::set_shared`](crate::Provider::set_shared), without another call for each.
    pub shared_sets: bool,
    /// Whether the load balancer supports `sessionAffinity: ClientIP`.
    pub affinity: bool,
    /// Whether all targets are used while none is healthy. If not, such targets get nothing.
    pub fails_open: bool,
    /// The shortest and the longest health-check interval.
    pub health_interval: (Duration, Duration),
}

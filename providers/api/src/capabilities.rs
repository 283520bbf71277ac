// SPDX-License-Identifier: Apache-2.0
//! What a provider can do, so that the plan asks for nothing else and says plainly what cannot be had.

use std::fmt;
use std::time::Duration;

use steerage_model::{IpMode, Protocol};

/// How a target group comes to send traffic only to nodes that can serve it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Steering {
    /// The controller registers and deregisters nodes as endpoints come and go.
    Api,
    /// All eligible nodes stay registered; the node's `/healthz` decides.
    HealthCheck,
}

impl Steering {
    /// The value of the annotation and of the flag.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::HealthCheck => "health-check",
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
            _ => Err(format!("{text:?} is not a kind of steering: use api or health-check")),
        }
    }
}

/// Where a packet is addressed to when it reaches the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addressing {
    /// VIP and Service port: one target set serves all listeners.
    Vip,
    /// Node address and node port: every listener needs one.
    NodePort,
}

/// What a provider can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The kinds of steering it supports.
    pub steerings: &'static [Steering],
    /// The protocols that a listener can have.
    pub protocols: &'static [Protocol],
    /// How packets reach the nodes.
    pub addressing: Addressing,
    /// What to write as `ipMode` beside an address; `None` where the provider publishes names only.
    pub ip_mode: Option<IpMode>,
    /// Whether IPv6 can be served.
    pub ipv6: bool,
    /// Whether targets can have different weights.
    pub weights: bool,
    /// Whether `sessionAffinity: ClientIP` is kept by the load balancer.
    pub affinity: bool,
    /// The health-check intervals that it takes, shortest and longest.
    pub health_interval: (Duration, Duration),
}

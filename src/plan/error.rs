// SPDX-License-Identifier: Apache-2.0
//! ReasonMessage there can be no load balancer as the Service asks for it.

use steerage_model::{Family, Protocol};

use crate::reasons;

/// A Service that cannot be served as it stands. The message says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("annotation steerage.dev/steering: {0}")]
    UnknownSteering(String),
    #[error("the provider cannot steer by {0}: change steerage.dev/steering to {1}")]
    SteeringNotSupported(String, String),
    #[error("annotation {name}: {problem}")]
    InvalidAnnotation { name: &'static str, problem: String },
    #[error(
        "{field}: {value:?} is not an address: write one, or one of each family with a comma between them"
    )]
    InvalidRequestedAddress { field: &'static str, value: String },
    #[error("the Service has no ports: add one to spec.ports")]
    NoPorts,
    #[error("port {port} is {protocol}, which the provider does not serve: take it out")]
    ProtocolNotSupported { port: u16, protocol: Protocol },
    #[error(
        "port {port} has no node port, by which the provider reaches the nodes: set spec.allocateLoadBalancerNodePorts"
    )]
    NoNodePort { port: u16 },
    #[error("the provider does not serve {0}: take it out of spec.ipFamilies")]
    IpFamilyNotSupported(Family),
    #[error("the Service has no cluster IP, so that no node can serve it: give it one")]
    NoIpFamily,
    #[error(
        "externalTrafficPolicy is Local and spec.healthCheckNodePort is not set: set it, or make the Service anew"
    )]
    NoHealthCheckNodePort,
}

impl PlanError {
    /// The stable reason for event and condition.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::UnknownSteering(_) => reasons::UNKNOWN_STEERING,
            Self::SteeringNotSupported(..) => reasons::STEERING_NOT_SUPPORTED,
            Self::InvalidAnnotation { .. } => reasons::INVALID_ANNOTATION,
            Self::InvalidRequestedAddress { .. } => reasons::INVALID_REQUESTED_ADDRESS,
            Self::NoPorts => reasons::NO_PORTS,
            Self::ProtocolNotSupported { .. } => reasons::PROTOCOL_NOT_SUPPORTED,
            Self::NoNodePort { .. } => reasons::NO_NODE_PORT,
            Self::IpFamilyNotSupported(_) => reasons::IP_FAMILY_NOT_SUPPORTED,
            Self::NoIpFamily => reasons::NO_IP_FAMILY,
            Self::NoHealthCheckNodePort => reasons::NO_HEALTH_CHECK_NODE_PORT,
        }
    }
}

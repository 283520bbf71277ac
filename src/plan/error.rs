// SPDX-License-Identifier: Apache-2.0
//! Why a Service cannot have the load balancer that it specifies.

use std::net::IpAddr;

use steerage_model::{Family, Protocol, shown};

use super::AddressHolder;
use crate::reasons;

/// A Service that cannot be planned as specified. `Display` says what is wrong, [`PlanError::remedy`] what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("Annotation steerage.dev/steering has the unknown value `{}`", shown(.0))]
    UnknownSteering(String),
    #[error("The provider does not support the steering {steering}")]
    SteeringNotSupported { steering: &'static str, supported: String },
    #[error("Annotation steerage.dev/steering is {0}, but the targets are pods, not nodes")]
    SteeringOfPods(&'static str),
    #[error("Annotation {name} has the invalid value `{}`: {problem}", shown(value))]
    InvalidAnnotation { name: &'static str, value: String, problem: String },
    #[error("{field} contains `{}`, which is not an IP address", shown(value))]
    InvalidRequestedAddress { field: &'static str, value: String },
    #[error("The address {address} belongs to {holder}")]
    ClusterAddress { address: IpAddr, holder: AddressHolder },
    #[error(
        "Annotation steerage.dev/shared-load-balancer is set, but the provider cannot share a load balancer"
    )]
    SharedLoadBalancersNotSupported,
    #[error("Annotation steerage.dev/address-sharing-key is set, but the provider cannot share an address")]
    SharedAddressesNotSupported,
    #[error("The Service has no ports")]
    NoPorts,
    #[error(
        "The Service has {ports} ports with {ranges} source ranges each, and Steerage allows {most} pairs of a port and a range, because a \
         service proxy may write each pair on every node"
    )]
    TooManySourceRanges { ports: usize, ranges: usize, most: usize },
    #[error("Port {port} has the protocol {protocol}, which the provider does not support")]
    ProtocolNotSupported { port: u16, protocol: Protocol },
    #[error("Port {port} has no node port, and the provider reaches nodes by node port")]
    NoNodePort { port: u16 },
    #[error("The provider does not support {0}")]
    IpFamilyNotSupported(Family),
    #[error("The Service has no cluster IP, so no node can serve it")]
    NoIpFamily,
    #[error("externalTrafficPolicy is Local, but spec.healthCheckNodePort is not set")]
    NoHealthCheckNodePort,
}

impl PlanError {
    /// The stable reason for conditions and events.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::UnknownSteering(_) => reasons::UNKNOWN_STEERING,
            Self::SteeringNotSupported { .. } | Self::SteeringOfPods(_) => reasons::STEERING_NOT_SUPPORTED,
            Self::InvalidAnnotation { .. } => reasons::INVALID_ANNOTATION,
            Self::InvalidRequestedAddress { .. } => reasons::INVALID_REQUESTED_ADDRESS,
            Self::ClusterAddress { .. } => reasons::CLUSTER_ADDRESS,
            Self::SharedLoadBalancersNotSupported => reasons::SHARED_LOAD_BALANCERS_NOT_SUPPORTED,
            Self::SharedAddressesNotSupported => reasons::SHARED_ADDRESSES_NOT_SUPPORTED,
            Self::NoPorts => reasons::NO_PORTS,
            Self::TooManySourceRanges { .. } => reasons::TOO_MANY_SOURCE_RANGES,
            Self::ProtocolNotSupported { .. } => reasons::PROTOCOL_NOT_SUPPORTED,
            Self::NoNodePort { .. } => reasons::NO_NODE_PORT,
            Self::IpFamilyNotSupported(_) => reasons::IP_FAMILY_NOT_SUPPORTED,
            Self::NoIpFamily => reasons::NO_IP_FAMILY,
            Self::NoHealthCheckNodePort => reasons::NO_HEALTH_CHECK_NODE_PORT,
        }
    }

    /// What the user can do about it.
    pub(crate) fn remedy(&self) -> String {
        match self {
            Self::UnknownSteering(_) => "Use api, health-check or, on the edge, fused",
            Self::SteeringNotSupported { supported, .. } => {
                return format!("Set annotation steerage.dev/steering to {supported}");
            }
            Self::SteeringOfPods(_) => "Remove this annotation, or the one that chooses pods as targets",
            Self::InvalidAnnotation { .. } => "Correct the annotation, or remove it if you want the default",
            Self::InvalidRequestedAddress { .. } => {
                "Write one address, or one per IP family separated by a comma"
            }
            Self::ClusterAddress { .. } => "Request another one",
            Self::SharedLoadBalancersNotSupported => "Remove the annotation steerage.dev/shared-load-balancer",
            Self::SharedAddressesNotSupported => "Remove the annotation steerage.dev/address-sharing-key",
            Self::NoPorts => "Add a port to spec.ports",
            Self::TooManySourceRanges { .. } => "Use fewer ports, or fewer and larger source ranges",
            Self::ProtocolNotSupported { .. } => "Remove the port from spec.ports",
            Self::NoNodePort { .. } => "Set spec.allocateLoadBalancerNodePorts to true, or choose pods as targets if the provider can",
            Self::IpFamilyNotSupported(_) => "Remove the family from spec.ipFamilies",
            Self::NoIpFamily => "Create the Service again with a cluster IP",
            Self::NoHealthCheckNodePort => "Set the port, or create the Service again",
        }
        .to_owned()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Why the rules drop or reject a packet. Each table has a counter for each reason, which metrics show.

/// A reason, and the name of its counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DropReason {
    /// `loadBalancerSourceRanges` do not have the source.
    SourceNotAllowed,
    /// No endpoint in the cluster is usable.
    NoEndpoint,
    /// The traffic policy is Local, and this node has no usable endpoint.
    NoLocalEndpoint,
    /// No Service has this port of the cluster IP.
    UnknownPort,
    /// No Service has the address, in a `ServiceCIDR` or a pool of load balancers' addresses.
    UnassignedAddress,
    /// The frontend changed while the packet passed, more than once.
    Changed,
    /// Connection tracking cannot tell to which connection it belongs, so that it would not be translated.
    Invalid,
    /// Another node without a local endpoint has forwarded it here, and this one has none either.
    AlreadyForwarded,
}

impl DropReason {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::SourceNotAllowed,
        Self::NoEndpoint,
        Self::NoLocalEndpoint,
        Self::UnknownPort,
        Self::UnassignedAddress,
        Self::Changed,
        Self::Invalid,
        Self::AlreadyForwarded,
    ];

    /// The name of the counter, and the value of the metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::SourceNotAllowed => "source-not-allowed",
            Self::NoEndpoint => "no-endpoint",
            Self::NoLocalEndpoint => "no-local-endpoint",
            Self::UnknownPort => "unknown-port",
            Self::UnassignedAddress => "unassigned-address",
            Self::Changed => "changed",
            Self::Invalid => "invalid",
            Self::AlreadyForwarded => "already-forwarded",
        }
    }
}

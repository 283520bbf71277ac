// SPDX-License-Identifier: Apache-2.0
//! What the agent's loop receives: from watches, from the kernel, and from the debug socket.

use steerage_model::{EndpointSlice, Node, Service, ServiceCidr};
use steerage_watch::Event;

use crate::debug_request::DebugRequest;
use crate::kernel::Noticed;

/// One input of the loop.
#[allow(clippy::large_enum_variant, reason = "moved once through a queue; a box would cost more")]
#[derive(Debug)]
pub enum Input {
    /// From the watch of Services.
    Service(Event<Service>),
    /// From the watch of `EndpointSlices`.
    Slice(Event<EndpointSlice>),
    /// From the watch of this node, or of all nodes where packets are forwarded to them.
    Node(Event<Node>),
    /// From the watch of all nodes, which begins once a Service has an external IP. Nothing waits for it longer than some seconds.
    ClusterNode(Event<Node>),
    /// All nodes are too many to be watched.
    TooManyNodes,
    /// From the watch of the networks of cluster IPs, where there is one. Nothing waits for it.
    ServiceCidr(Event<ServiceCidr>),
    /// What other programs do to nftables.
    Foreign(Noticed),
    /// Addresses of this host came or went.
    HostAddresses,
    /// Routes or devices of this host changed.
    Routes,
    /// From the debug socket.
    Debug(DebugRequest),
}

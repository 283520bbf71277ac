// SPDX-License-Identifier: Apache-2.0
//! What the agent's loop receives: from watches, from the kernel, and from the debug socket.

use steerage_model::{EndpointSlice, Node, Service, ServiceCidr};
use steerage_watch::Event;

use crate::debug_request::DebugRequest;
use crate::kernel::Doubts;

/// One input of the loop.
#[allow(clippy::large_enum_variant, reason = "moved once through a queue; a box would cost more")]
#[derive(Debug)]
pub enum Input {
    /// From the watch of Services.
    Service(Event<Service>),
    /// From the watch of `EndpointSlices`.
    Slice(Event<EndpointSlice>),
    /// From the watch of this node.
    Node(Event<Node>),
    /// From the watch of the networks of cluster IPs, where there is one. Nothing waits for it.
    ServiceCidr(Event<ServiceCidr>),
    /// Another program may have changed the agent's tables.
    ForeignChange(Doubts),
    /// Addresses of this host came or went.
    HostAddresses,
    /// From the debug socket.
    Debug(DebugRequest),
}

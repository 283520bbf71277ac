// SPDX-License-Identifier: Apache-2.0
//! The cluster's objects as plain values: Services, their endpoints and the nodes.
//!
//! Owns the projections that every part of Steerage works on (only the fields that Steerage uses), the rules that say which
//! node is eligible and which endpoints count. `steerage-watch`
//! creates the values; the controller, the agent and the providers read them. [`chain`] prints an error and its causes in one line,
//! for logs, [`shown`] shortens what a user wrote, for messages, and [`printable`] escapes control characters in them. [`Statement`] is what an agent says of its node. No Kubernetes client, no I/O, no clock.

pub mod annotations;
mod chain;
mod endpoint_ports;
mod endpoints;
mod key;
pub mod names;
mod node;
mod pod;
mod selection;
mod service;
mod service_cidr;
mod shown;
mod statement;

pub use chain::chain;
pub use endpoint_ports::{EndpointPort, EndpointPortRef, EndpointPorts};
pub use endpoints::{Endpoint, EndpointSlice, Hints, PodRef};
pub use key::Key;
pub use node::{AgentMode, IneligibleReason, Node, NodeAgent};
pub use pod::{Pod, PodGate};
pub use selection::{
    Backend, SlicePorts, backends, cluster_backends, local_backends, local_ready_count, membership,
};
pub use service::{
    Affinity, Condition, Family, Ingress, IpMode, Protocol, Service, ServiceKind, ServicePort, TargetPort,
    TrafficPolicy,
};
pub use service_cidr::ServiceCidr;
pub use shown::{printable, shortened, shown};
pub use statement::{MAX_STATEMENT_WAIT, STATEMENT_PATH, Statement, TunnelReceiver};

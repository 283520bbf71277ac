// SPDX-License-Identifier: Apache-2.0
//! What load balancers ask this node: per Service on its health-check node port, and of the node as a whole.
//!
//! Answers with kube-proxy's contract (pkg/proxy/healthcheck of Kubernetes 1.36). A count falls as soon as the endpoint is gone
//! and rises only after the rules that serve it are in the kernel.

mod guests;
mod http;
mod listeners;
mod node;
mod ports;

pub use listeners::Listeners;
pub use node::serve_node_health;
pub use ports::{Plane, Ports};

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

use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub use listeners::Listeners;
pub use node::serve_node_health;
pub use ports::{Plane, Ports};

/// Lets this process have as many descriptors as it may: a thousand ports on two addresses need more than the usual 1024.
pub fn allow_many_connections() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open descriptors stays as it is");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Health checks of load balancers: per Service on its health-check node port, and for the node as a whole. A statement says of all
//! these ports at once what each answers.
//!
//! Responses follow kube-proxy (pkg/proxy/healthcheck of Kubernetes 1.36). A count falls as soon as an endpoint is gone, and rises
//! only after the rules that serve it are in the kernel.

mod http;
mod listeners;
mod node;
mod ports;
mod proxy_health;
mod stated_ports;
mod stated_tunnel;
mod statement;

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::runtime::{Builder, Handle};

pub use listeners::Listeners;
pub use node::{HealthAddress, NodeHealth, serve_node_health};
pub use ports::HealthCheckPorts;
pub use proxy_health::ProxyHealth;
pub use stated_tunnel::StatedTunnel;

/// Starts a runtime of one thread for the health servers, for the life of the process. Their clients can keep one processor busy
/// at most, and never delay the agent's loop.
pub fn server_runtime() -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let serve = move || runtime.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("health".to_owned()).spawn(serve)?;
    Ok(handle)
}

/// Raises the limit of open descriptors: a thousand ports on two addresses need more than the usual 1024.
pub fn allow_many_connections() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "limit of open descriptors not raised; continuing with less");
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv6Addr, TcpListener};
    use std::sync::atomic::{AtomicU16, Ordering};

    static NEXT: AtomicU16 = AtomicU16::new(0);

    /// Ports for servers of a test. Nobody else takes them in the meantime: they are below the range from which the kernel chooses, and
    /// each process begins at another one.
    pub(super) fn free_ports(count: usize) -> Vec<u16> {
        let first = 10_000 + u16::try_from(std::process::id() % 100).unwrap() * 100;
        let next = std::iter::repeat_with(|| first + NEXT.fetch_add(1, Ordering::Relaxed));
        next.filter(|port| TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)).is_ok()).take(count).collect()
    }
}

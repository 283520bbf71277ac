// SPDX-License-Identifier: Apache-2.0
//! Keeps the servers on health-check ports open, and reports ports that are in use by others.

use std::net::IpAddr;
use std::time::Duration;

use steerage_watch::events::{Notice, Severity, Subject};
use tokio::time::Instant;

use super::{Agent, LoopState};

/// How often busy ports are tried again.
const REOPEN_INTERVAL: Duration = Duration::from_secs(2);

/// What the servers were last opened for.
#[derive(Default)]
pub(super) struct PortState {
    /// The version of the ports, and the addresses.
    opened: Option<(u64, Vec<IpAddr>)>,
    /// When busy ports are tried again.
    pub(super) reopen: Option<Instant>,
}

impl Agent {
    /// Opens and closes servers where ports or addresses changed, and tries busy ports again when that is due. Opens none before
    /// the rules are in the kernel, so that the first answer is right.
    pub(super) fn open_ports(&mut self, state: &mut LoopState) {
        let Some((local_node, _)) = &state.planner.local_node else { return };
        let version = (self.ports.version(), local_node.node_port_addresses.clone());
        let due = state.ports.reopen.is_some_and(|at| at <= Instant::now());
        if self.first.is_some() || (state.ports.opened.as_ref() == Some(&version) && !due) {
            return;
        }
        state.ports.opened = Some(version);
        let busy = self.listeners.reconcile(&local_node.node_port_addresses);
        state.ports.reopen = self.listeners.has_busy_ports().then(|| Instant::now() + REOPEN_INTERVAL);
        for port in busy {
            tracing::warn!(
                service = %port.service, address = %port.address, error = %port.error,
                "health-check port not opened; retrying"
            );
            let Some(service) = state.planner.index.service(&port.service) else { continue };
            self.recorder.publish(Notice {
                subject: Subject::service(service),
                severity: Severity::Warning,
                reason: "FailedToStartServiceHealthcheck",
                action: "Listen",
                note: format!(
                    "Node {} cannot listen on {} for health checks: {}. It keeps trying; load balancers treat it as unhealthy \
                     until the port is free.",
                    local_node.node, port.address, port.error
                ),
            });
        }
    }
}

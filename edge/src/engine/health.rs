// SPDX-License-Identifier: Apache-2.0
//! How the engine reads what the prober has found: of the health of targets, and of what nodes state.

use std::collections::BTreeSet;

use std::time::Instant;

use tokio::sync::mpsc;

use super::Engine;
use crate::health::Probe;
use crate::prober::{HealthChange, StatementReport};

/// Then other inputs have their turn: nodes that state without end must not keep the engine from all else.
const MOST_STATEMENTS_AT_ONCE: usize = 16;

impl Engine {
    /// Records this report, and some of those that wait.
    pub(super) fn record_statements(
        &mut self,
        report: &StatementReport,
        more: &mut mpsc::Receiver<StatementReport>,
    ) {
        let urgency = |probe: &Probe| self.groups.as_ref()?.urgency(probe);
        self.prober.record(report, &self.health, urgency);
        for _ in 0..MOST_STATEMENTS_AT_ONCE {
            let Ok(report) = more.try_recv() else { break };
            self.prober.record(&report, &self.health, urgency);
        }
    }

    /// Reads this change, and those that wait. Returns the probes whose health has changed; `None` if a plan has to follow at once.
    pub(super) fn read_health(
        &mut self,
        change: HealthChange,
        more: &mut mpsc::UnboundedReceiver<HealthChange>,
        ports: &mut BTreeSet<u16>,
    ) -> Option<Vec<Probe>> {
        let mut changed = Vec::from_iter(self.update_health(change, ports));
        while let Ok(change) = more.try_recv() {
            changed.extend(self.update_health(change, ports));
        }
        // A refused node that is healthy would get connections until the plan, which waits only in a large cluster.
        let is_refused = std::mem::take(&mut self.has_new_refusal);
        let plans_now = is_refused && self.pace.due().is_some_and(|due| due <= tokio::time::Instant::now());
        (!plans_now).then_some(changed)
    }

    /// Returns the probe if that is news. Adds ports that a node states now and did not, or no longer.
    fn update_health(&mut self, change: HealthChange, changed_ports: &mut BTreeSet<u16>) -> Option<Probe> {
        let (probe, health) = match change {
            HealthChange::Target(probe, health) => (probe, health),
            HealthChange::Stated(address, ports) => {
                if self.prober.follows_node(address) {
                    match self.health.set_stated(address, ports) {
                        Some(ports) => changed_ports.extend(ports),
                        // All groups count the nodes that have never stated anything. That rarely changes which targets a group uses,
                        // so the plan may wait.
                        None => self.pace.request(Instant::now()),
                    }
                }
                return None;
            }
            HealthChange::Tunnel(address) => {
                self.has_new_refusal |= self.follow_tunnel(address);
                return None;
            }
        };
        let health = self.prober.stated_health(&probe).unwrap_or(health);
        // A result may come after the last load balancer with this check has gone.
        if !self.prober.follows(&probe) || self.health.is_known(&probe, &health) {
            return None;
        }
        let known = self.health.get(&probe);
        if known.is_some_and(|known| !known.says_as(&health)) {
            tracing::info!(
                target_address = %probe.address,
                port = probe.check.port,
                state = ?health.state,
                weight = health.weight,
                reason = health.reason,
                "target health changed"
            );
        } else {
            // After a start there is one for each endpoint, and so where a node begins or ends to state them.
            tracing::debug!(target_address = %probe.address, port = probe.check.port, state = ?health.state, "target health known");
        }
        self.health.insert(probe.clone(), health);
        Some(probe)
    }
}

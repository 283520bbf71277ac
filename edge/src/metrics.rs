// SPDX-License-Identifier: Apache-2.0
//! The metrics `steerage_edge_…`. All parts write them; the administration server reads them. Those of packets are in `traffic`.

use std::sync::atomic::{AtomicI64, AtomicU64};

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::registry::Registry;

use crate::prober::{StatementMode, StatementResult};

mod flows;
mod traffic;

pub(crate) use flows::{FULL, FlowMetrics, reason};
#[cfg(test)]
pub(crate) use traffic::register_sample_traffic;
pub(crate) use traffic::register_traffic;

/// Clones share their values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) active: Gauge<i64, AtomicI64>,
    pub(crate) shards: Gauge<i64, AtomicI64>,
    pub(crate) able: Gauge<i64, AtomicI64>,
    pub(crate) peers: Gauge<i64, AtomicI64>,
    pub(crate) unattended: Gauge<i64, AtomicI64>,
    pub(crate) routes: Gauge<i64, AtomicI64>,
    pub(crate) tunnel_ready: Gauge<i64, AtomicI64>,
    pub(crate) tunnel_failed: Gauge<i64, AtomicI64>,
    pub(crate) load_balancers: Gauge<i64, AtomicI64>,
    pub(crate) problems: Gauge<i64, AtomicI64>,
    pub(crate) probes: Gauge<i64, AtomicI64>,
    pub(crate) healthy: Gauge<i64, AtomicI64>,
    probe_results: Family<[(&'static str, &'static str); 1], Counter<u64, AtomicU64>>,
    statements: Family<[(&'static str, &'static str); 1], Counter<u64, AtomicU64>>,
    nodes: Family<[(&'static str, &'static str); 1], Gauge<i64, AtomicI64>>,
    pub(crate) takeovers: Counter<u64, AtomicU64>,
    pub(crate) failures: Counter<u64, AtomicU64>,
    pub(crate) status_writes: Counter<u64, AtomicU64>,
    pub(crate) status_write_failures: Counter<u64, AtomicU64>,
    status_objects_waiting: Gauge<i64, AtomicI64>,
    /// Of the exchange of flow exceptions.
    pub(crate) flows: FlowMetrics,
}

const STATEMENT_KINDS: [&str; 5] = ["complete", "changes", "unchanged", "none", "unanswered"];

fn decided_by(mode: StatementMode) -> Option<&'static str> {
    match mode {
        StatementMode::Asked => None,
        StatementMode::Stating => Some("statements"),
        StatementMode::Silent => Some("silence"),
        StatementMode::Probed => Some("probes"),
    }
}

impl Metrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("active", "Whether this host answers for any shard of the VIPs (1) or not (0)", &self.active),
            (
                "active_shards",
                "Shards of the VIPs, of 128, for which this host is active. All hosts of a group have 128 together",
                &self.shards,
            ),
            (
                "can_serve",
                "Whether this host can serve (1): objects listed, maps written, main loop running; or not (0)",
                &self.able,
            ),
            ("peers", "Other edge hosts that are alive", &self.peers),
            (
                "unattended_hosts",
                "Hosts without a steerage-edge process that answer for VIPs which this host serves: clients may reach old targets there",
                &self.unattended,
            ),
            (
                "exported_routes",
                "VIPs that have a route in the table of --route-table, for routing daemons to export",
                &self.routes,
            ),
            (
                "tunnel_ready",
                "Whether the device of --tunnel-vni exists (1), through which nodes off the link get packets; or not (0)",
                &self.tunnel_ready,
            ),
            (
                "tunnel_failed",
                "Whether the device of --tunnel-vni is missing (1): the log says why; or not (0). 0 also without --tunnel-vni",
                &self.tunnel_failed,
            ),
            (
                "load_balancers",
                "EdgeLoadBalancers that this host knows, also those with a problem",
                &self.load_balancers,
            ),
            ("load_balancers_with_problem", "Load balancers with a problem in their status", &self.problems),
            (
                "health_checks",
                "Pairs of address and health check that are probed or decided by statements",
                &self.probes,
            ),
            ("health_checks_healthy", "Pairs of address and health check that are healthy", &self.healthy),
            (
                "status_objects_waiting",
                "Status objects that differ from those of the API server and wait to be written",
                &self.status_objects_waiting,
            ),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        let counters = [
            ("takeovers", "Shards of the VIPs for which this host became active", &self.takeovers),
            (
                "write_failures",
                "Failed writes of the kernel's maps, program, multicast groups and routes",
                &self.failures,
            ),
            ("status_writes", "Status objects written or deleted", &self.status_writes),
            (
                "status_write_failures",
                "Failed writes, deletions and lists of status objects",
                &self.status_write_failures,
            ),
        ];
        // From zero on: otherwise an alert misses the first one of a process.
        for result in ["passed", "failed"] {
            self.probe_results.get_or_create(&[("result", result)]).inc_by(0);
        }
        registry.register("probes", "Probes, by result: passed or failed", self.probe_results.clone());
        for kind in STATEMENT_KINDS {
            self.statements.get_or_create(&[("kind", kind)]).inc_by(0);
        }
        registry.register(
            "statement_requests",
            "Ended requests to nodes for their statements, by the kind of answer: complete, changes, unchanged, none (another answer, \
             or refused) or unanswered",
            self.statements.clone(),
        );
        for by in [StatementMode::Stating, StatementMode::Silent, StatementMode::Probed] {
            if let Some(by) = decided_by(by) {
                self.nodes.get_or_create(&[("by", by)]).set(0);
            }
        }
        registry.register(
            "statement_nodes",
            "Node addresses that are asked for statements, by what decides the health of their targets: statements, silence after \
             statements, or probes",
            self.nodes.clone(),
        );
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        self.flows.register(registry);
    }

    pub(crate) fn count_status_objects_waiting(&self, count: usize) {
        self.status_objects_waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    #[cfg(test)]
    pub(crate) fn status_objects_waiting(&self) -> i64 {
        self.status_objects_waiting.get()
    }

    /// A request for a statement has ended.
    pub(crate) fn count_statement(&self, result: &StatementResult) {
        let [complete, changes, unchanged, none, unanswered] = STATEMENT_KINDS;
        let kind = match result {
            StatementResult::Stated(statement) if statement.complete => complete,
            StatementResult::Stated(statement) if !statement.ports.is_empty() => changes,
            StatementResult::Stated(_) => unchanged,
            StatementResult::NotStated(_) => none,
            StatementResult::Unanswered(_) => unanswered,
        };
        self.statements.get_or_create(&[("kind", kind)]).inc();
    }

    /// What decides the health of a node's targets has changed.
    pub(crate) fn count_node(&self, before: StatementMode, after: StatementMode) {
        if let Some(by) = decided_by(before) {
            self.nodes.get_or_create(&[("by", by)]).dec();
        }
        if let Some(by) = decided_by(after) {
            self.nodes.get_or_create(&[("by", by)]).inc();
        }
    }

    #[cfg(test)]
    pub(crate) fn probes_that_passed(&self) -> u64 {
        self.probe_results.get_or_create(&[("result", "passed")]).get()
    }

    pub(crate) fn count_probe(&self, passed: bool) {
        let result = if passed { "passed" } else { "failed" };
        self.probe_results.get_or_create(&[("result", result)]).inc();
    }
}

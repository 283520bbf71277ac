// SPDX-License-Identifier: Apache-2.0
//! The edge's own metrics, `steerage_edge_…`. Written by all parts, read by the administration server.

use std::sync::atomic::{AtomicI64, AtomicU64};

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::registry::Registry;

/// The metrics; clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    /// Whether this host answers for the virtual addresses.
    pub(crate) active: Gauge<i64, AtomicI64>,
    /// Other edge hosts that are heard.
    pub(crate) peers: Gauge<i64, AtomicI64>,
    /// Load balancers.
    pub(crate) load_balancers: Gauge<i64, AtomicI64>,
    /// Load balancers with a problem.
    pub(crate) problems: Gauge<i64, AtomicI64>,
    /// Things that are probed.
    pub(crate) probes: Gauge<i64, AtomicI64>,
    /// Of these, healthy ones.
    pub(crate) healthy: Gauge<i64, AtomicI64>,
    good: Counter<u64, AtomicU64>,
    bad: Counter<u64, AtomicU64>,
    /// Times that this host has become active.
    pub(crate) takeovers: Counter<u64, AtomicU64>,
    /// Elements written to the kernel.
    pub(crate) elements: Counter<u64, AtomicU64>,
    /// Writes to the kernel or the link that failed.
    pub(crate) failures: Counter<u64, AtomicU64>,
    /// Objects written to the API.
    pub(crate) status_writes: Counter<u64, AtomicU64>,
    /// Such writes that failed.
    pub(crate) status_write_failures: Counter<u64, AtomicU64>,
}

impl Metrics {
    /// Registers them all.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("active", "Whether this host answers for the virtual addresses", &self.active),
            ("peers", "Other edge hosts that are heard on the link", &self.peers),
            ("load_balancers", "Load balancers", &self.load_balancers),
            ("load_balancers_with_problem", "Load balancers with a problem", &self.problems),
            ("probed", "Addresses and checks that are probed", &self.probes),
            ("probed_healthy", "Of these, the healthy ones", &self.healthy),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        let counters = [
            ("probes_good", "Probes that were answered well", &self.good),
            ("probes_bad", "Probes that were not", &self.bad),
            ("takeovers", "Times that this host has become the active one", &self.takeovers),
            ("kernel_elements_written", "Elements of sets and maps written to the kernel", &self.elements),
            ("kernel_failures", "Writes to the kernel or the link that failed", &self.failures),
            ("api_writes", "Objects written to the API", &self.status_writes),
            ("api_write_failures", "Writes to the API that failed", &self.status_write_failures),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
    }

    /// A probe has ended.
    pub(crate) fn probe(&self, good: bool) {
        if good {
            self.good.inc()
        } else {
            self.bad.inc()
        };
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the agent counts. Names carry the prefix `steerage_agent_`, save those that are kube-proxy's.

mod kubeproxy;
mod pending;

pub use kubeproxy::KubeProxyMetrics;
pub use pending::PendingMetrics;

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::metrics::histogram::Histogram;
use steerage_process::prometheus_client::registry::{Registry, Unit};

/// The agent's metrics. Clones are the same.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Changes written to the kernel.
    pub applies: Counter,
    /// Of them, those that compared everything.
    pub full_applies: Counter,
    /// Writes that failed.
    pub failures: Counter,
    /// Elements written.
    pub elements: Counter,
    /// From taking changes in to having them in the kernel.
    pub apply_seconds: Histogram,
    /// Times that somebody else changed our tables.
    pub foreign_changes: Counter,
    /// UDP flows deleted.
    pub flows: Counter,
    /// Frontends served.
    pub frontends: Gauge,
    /// Health-check ports.
    pub health_ports: Gauge,
    /// When the kernel last held all that it should, in seconds since 1970.
    pub last_apply: Gauge,
    /// What kube-proxy counts; registered on its own.
    pub kube_proxy: KubeProxyMetrics,
}

impl Metrics {
    /// Registers them.
    pub fn new(registry: &mut Registry) -> Self {
        // 50 µs to 26 s.
        let times =
            steerage_process::prometheus_client::metrics::histogram::exponential_buckets(0.000_05, 2.0, 20);
        let metrics = Self {
            applies: Counter::default(),
            full_applies: Counter::default(),
            failures: Counter::default(),
            elements: Counter::default(),
            apply_seconds: Histogram::new(times),
            foreign_changes: Counter::default(),
            flows: Counter::default(),
            frontends: Gauge::default(),
            health_ports: Gauge::default(),
            last_apply: Gauge::default(),
            kube_proxy: KubeProxyMetrics::default(),
        };
        let Self {
            applies,
            full_applies,
            failures,
            elements,
            apply_seconds,
            foreign_changes,
            flows,
            frontends,
            health_ports,
            last_apply,
            kube_proxy: _,
        } = metrics.clone();
        registry.register("applies", "Changes written to the kernel", applies);
        registry.register("full_applies", "Writes that compared all rules with the kernel's", full_applies);
        registry.register("apply_failures", "Writes to the kernel that failed", failures);
        registry.register("elements", "Elements of kernel maps written", elements);
        registry.register_with_unit(
            "apply",
            "From taking changes in to having them in the kernel",
            Unit::Seconds,
            apply_seconds,
        );
        registry.register("foreign_changes", "Times that others changed our tables", foreign_changes);
        registry.register("udp_flows_deleted", "UDP flows to endpoints that are gone", flows);
        registry.register("frontends", "Addresses with protocol and port that are served", frontends);
        registry.register("health_ports", "Health-check node ports", health_ports);
        registry.register_with_unit(
            "last_apply_timestamp",
            "When the kernel last held all that it should",
            Unit::Seconds,
            last_apply,
        );
        metrics
    }
}

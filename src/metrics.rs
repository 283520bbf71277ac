// SPDX-License-Identifier: Apache-2.0
//! The controller's metrics. `docs/reference/controller.md` is generated from them.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::condition_metrics::ConditionMetrics;
use crate::pod_gates::PodGateMetrics;
use crate::removal_hold::HoldMetrics;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResult {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCall {
    call: &'static str,
    result: &'static str,
}

/// Clones share the metrics.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    reconciles: Family<ByResult, Counter>,
    calls: Family<ByCall, Histogram, fn() -> Histogram>,
    target_programming: Histogram,
    pub(crate) workqueue_depth: Gauge,
    pub(crate) leader: Gauge,
    pub(crate) load_balancers: Gauge,
    pub(crate) orphaned_load_balancers: Gauge,
    provider_rate_limiter: Histogram,
    pub(crate) holds: HoldMetrics,
    pub(crate) pod_gates: PodGateMetrics,
    pub(crate) conditions: ConditionMetrics,
}

fn call_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            reconciles: Family::default(),
            calls: Family::new_with_constructor(call_histogram as fn() -> Histogram),
            target_programming: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            workqueue_depth: Gauge::default(),
            leader: Gauge::default(),
            load_balancers: Gauge::default(),
            orphaned_load_balancers: Gauge::default(),
            provider_rate_limiter: call_histogram(),
            holds: HoldMetrics::new(registry),
            pod_gates: PodGateMetrics::new(registry),
            conditions: ConditionMetrics::new(registry),
        };
        let Self {
            reconciles,
            calls,
            target_programming,
            workqueue_depth,
            leader,
            load_balancers,
            orphaned_load_balancers,
            provider_rate_limiter,
            holds: _,
            pod_gates: _,
            conditions: _,
        } = metrics.clone();
        // From zero on: otherwise an alert misses the first failure of a process.
        for result in ["done", "again", "rejected", "failed"] {
            reconciles.get_or_create(&ByResult { result }).inc_by(0);
        }
        registry.register("reconciles", "Reconciles of one load balancer, by result: done, again (not complete yet), rejected (the Service is refused), failed (retried)", reconciles);
        registry.register(
            "provider_call_duration_seconds",
            "Duration of provider calls, by call (apply, set_targets, restrict_sources, set_shared, delete, target_health, owned) and result: ok, or the reason of the error",
            calls,
        );
        registry.register(
            "target_programming_duration_seconds",
            "Time from an EndpointSlice event to the end of the provider call that changed the targets",
            target_programming,
        );
        registry.register(
            "provider_rate_limiter_duration_seconds",
            "Time that a provider call waits because of --provider-qps",
            provider_rate_limiter,
        );
        registry.register(
            "workqueue_depth",
            "Load balancers that are due and wait for a worker",
            workqueue_depth,
        );
        registry.register("leader", "1 while this process holds the Lease", leader);
        registry.register("load_balancers", "Load balancers that this process manages", load_balancers);
        registry.register(
            "orphaned_load_balancers",
            "Load balancers at the provider whose Service is gone and that this process never managed",
            orphaned_load_balancers,
        );
        metrics
    }

    pub(crate) fn reconciled(&self, result: &'static str) {
        self.reconciles.get_or_create(&ByResult { result }).inc();
    }

    /// How many reconciles had this result.
    #[cfg(test)]
    pub(crate) fn reconciles_of(&self, result: &'static str) -> u64 {
        self.reconciles.get_or_create(&ByResult { result }).get()
    }

    pub(crate) fn rate_limit_waited(&self, waited: Duration) {
        self.provider_rate_limiter.observe(waited.as_secs_f64());
    }

    /// `result` is `ok`, or the reason of the error.
    pub(crate) fn called(&self, call: &'static str, result: &'static str, took: Duration) {
        self.calls.get_or_create(&ByCall { call, result }).observe(took.as_secs_f64());
    }

    pub(crate) fn targets_programmed(&self, took: Duration) {
        self.target_programming.observe(took.as_secs_f64());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the controller counts. `docs/annotations.md` names each metric; a test holds it to that.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResult {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCall {
    call: &'static str,
    result: &'static str,
}

/// The controller's own metrics. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    reconciles: Family<ByResult, Counter>,
    calls: Family<ByCall, Histogram, fn() -> Histogram>,
    lag: Histogram,
    /// Units that wait for a worker.
    pub(crate) queue: Gauge,
    /// One while this process holds the Lease.
    pub(crate) leader: Gauge,
    /// Load balancers that this process keeps.
    pub(crate) load_balancers: Gauge,
}

fn call_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

impl Metrics {
    /// Registers all under `registry`'s prefix.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            reconciles: Family::default(),
            calls: Family::new_with_constructor(call_histogram as fn() -> Histogram),
            lag: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            queue: Gauge::default(),
            leader: Gauge::default(),
            load_balancers: Gauge::default(),
        };
        let Self { reconciles, calls, lag, queue, leader, load_balancers } = metrics.clone();
        registry.register("reconciles", "Looks at one load balancer, by what came of it", reconciles);
        registry.register(
            "provider_call_duration_seconds",
            "Calls of the provider, by method and result",
            calls,
        );
        registry.register(
            "target_programming_duration_seconds",
            "From an endpoint's event to the end of the call that changed the targets for it",
            lag,
        );
        registry.register("workqueue_depth", "Load balancers that wait to be looked at", queue);
        registry.register("leader", "Whether this process holds the Lease", leader);
        registry.register("load_balancers", "Load balancers that this process keeps", load_balancers);
        metrics
    }

    /// A look at a load balancer ended.
    pub(crate) fn reconciled(&self, result: &'static str) {
        self.reconciles.get_or_create(&ByResult { result }).inc();
    }

    /// A call of the provider ended; `result` is `ok` or the reason of its error.
    pub(crate) fn called(&self, call: &'static str, result: &'static str, took: Duration) {
        self.calls.get_or_create(&ByCall { call, result }).observe(took.as_secs_f64());
    }

    /// Targets followed an endpoint.
    pub(crate) fn lagged(&self, lag: Duration) {
        self.lag.observe(lag.as_secs_f64());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Metrics of readiness gates.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::reasons;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    reason: &'static str,
}

/// Clones share the metrics.
#[derive(Clone, Debug)]
pub(crate) struct PodGateMetrics {
    waiting: Gauge,
    written: Family<ByReason, Counter>,
}

impl PodGateMetrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self { waiting: Gauge::default(), written: Family::default() };
        // From zero on: otherwise an alert misses the first one of a process.
        metrics.written.get_or_create(&ByReason { reason: reasons::GATE_TIMED_OUT }).inc_by(0);
        let Self { waiting, written } = metrics.clone();
        registry.register("pods_waiting", "Pods that wait for their readiness gate", waiting);
        let help = "Written conditions of readiness gates, by reason";
        registry.register("pod_readiness_gates_written", help, written);
        metrics
    }

    pub(super) fn set_waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn written(&self, reason: &'static str) {
        self.written.get_or_create(&ByReason { reason }).inc();
    }
}

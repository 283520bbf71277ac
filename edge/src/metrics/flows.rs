// SPDX-License-Identifier: Apache-2.0
//! The metrics of the exchange of flow exceptions. `peers` writes them.

use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use steerage_edge_dataplane::Refusal;
use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::registry::Registry;

/// Clones share their values.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlowMetrics {
    pub(crate) enabled: Gauge<i64, AtomicI64>,
    pub(crate) peers: Gauge<i64, AtomicI64>,
    exceptions: Gauge<i64, AtomicI64>,
    scan_seconds: Gauge<f64, AtomicU64>,
    sent: Counter<u64, AtomicU64>,
    received: Counter<u64, AtomicU64>,
    refused: Family<[(&'static str, &'static str); 1], Counter<u64, AtomicU64>>,
    pub(crate) session_failures: Counter<u64, AtomicU64>,
}

/// Another host sent more than there is room for.
pub(crate) const FULL: &str = "full";
const REFUSALS: [Refusal; 4] =
    [Refusal::UnknownListener, Refusal::UnknownTarget, Refusal::Expired, Refusal::Known];

pub(crate) fn reason(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::UnknownListener => "unknown_listener",
        Refusal::UnknownTarget => "unknown_target",
        Refusal::Expired => "expired",
        Refusal::Known => "known",
    }
}

impl FlowMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "flow_exchange",
            "Whether this host exchanges flow exceptions with other edge hosts (1), or not (0): without a usable key, or disabled",
            self.enabled.clone(),
        );
        registry.register(
            "flow_peers",
            "Other edge hosts that have this host's complete list of flow exceptions",
            self.peers.clone(),
        );
        registry.register(
            "flow_exceptions",
            "Flow exceptions (flows that stay on another target than that of their slot) that this host sends to other hosts: of VIPs for \
             which it answers, and with --route-table all of which it sees packets. 0 while no other host is connected",
            self.exceptions.clone(),
        );
        registry.register(
            "flow_scan_seconds",
            "Duration of the last scan of all flows",
            self.scan_seconds.clone(),
        );
        registry.register("flow_exceptions_sent", "Flow exceptions sent to other hosts", self.sent.clone());
        registry.register(
            "flow_exceptions_received",
            "Flow exceptions of other hosts that were written to the kernel's maps",
            self.received.clone(),
        );
        for reason in REFUSALS.map(reason).into_iter().chain([FULL]) {
            self.refused.get_or_create(&[("reason", reason)]).inc_by(0);
        }
        registry.register(
            "flow_exceptions_refused",
            "Flow exceptions of other hosts that were not written, by reason: unknown_listener, unknown_target, expired, known (this \
             host knows the flow, and no later packet) or full (no room for more)",
            self.refused.clone(),
        );
        registry.register(
            "flow_session_failures",
            "Sessions with other hosts that ended because a message was malformed or not authentic, as with another key or version",
            self.session_failures.clone(),
        );
    }

    pub(crate) fn count_scan(&self, exceptions: usize, took: Duration) {
        self.exceptions.set(i64::try_from(exceptions).unwrap_or(i64::MAX));
        self.scan_seconds.set(took.as_secs_f64());
    }

    pub(crate) fn count_sent(&self, count: usize) {
        self.sent.inc_by(u64::try_from(count).unwrap_or(0));
    }

    pub(crate) fn count_received(&self) {
        self.received.inc();
    }

    pub(crate) fn count_refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    #[cfg(test)]
    pub(crate) fn refused(&self, reason: &'static str) -> u64 {
        self.refused.get_or_create(&[("reason", reason)]).get()
    }
}

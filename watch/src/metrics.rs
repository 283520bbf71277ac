// SPDX-License-Identifier: Apache-2.0
//! Metrics of the watches.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::Staleness;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    kind: &'static str,
    reason: &'static str,
}

/// Counters by kind of object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    events: Family<KindLabels, Counter>,
    lists: Family<KindLabels, Counter>,
    malformed: Family<KindLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
}

/// Registers a program's metrics of watches with a sample of each, for the generated reference: a registry leaves out metrics
/// without samples.
pub fn register_sample_metrics(registry: &mut Registry) {
    let metrics = Metrics::new(registry);
    metrics.event("services");
    metrics.list("services");
    metrics.malformed("services");
    metrics.failure("services", "idle");
    let staleness = Staleness::default();
    staleness.record("services");
    registry.register_collector(Box::new(staleness));
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let Self { events, lists, malformed, failures } = metrics.clone();
        registry.register("events", "Watch events, without bookmarks", events);
        registry.register("lists", "Complete lists: the first one and relists", lists);
        registry.register(
            "malformed_objects",
            "Unreadable objects; their last readable form is kept",
            malformed,
        );
        registry.register(
            "failures",
            "Failed lists and watches, by reason: expired (410), missing (404), invalid (400, 422), denied (401, 403), busy (429, 503), \
             refused (other status), malformed (unreadable data), idle (no data in time), empty (ended before any data) or cut \
             (connection broke)",
            failures,
        );
        metrics
    }

    pub(crate) fn event(&self, kind: &'static str) {
        self.events.get_or_create(&KindLabels { kind }).inc();
    }

    pub(crate) fn list(&self, kind: &'static str) {
        self.lists.get_or_create(&KindLabels { kind }).inc();
    }

    pub(crate) fn malformed(&self, kind: &'static str) {
        self.malformed.get_or_create(&KindLabels { kind }).inc();
    }

    pub(crate) fn failure(&self, kind: &'static str, reason: &'static str) {
        self.failures.get_or_create(&FailureLabels { kind, reason }).inc();
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the watches count.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct With {
    kind: &'static str,
    reason: &'static str,
}

/// Counters by kind of object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    events: Family<Of, Counter>,
    lists: Family<Of, Counter>,
    malformed: Family<Of, Counter>,
    failures: Family<With, Counter>,
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let Self { events, lists, malformed, failures } = metrics.clone();
        registry.register("events", "Events that watches brought, without bookmarks", events);
        registry.register("lists", "Lists begun, the first and those after a gap", lists);
        registry.register("malformed_objects", "Objects skipped because they cannot be read", malformed);
        registry.register("failures", "Lists and watches that failed or were cut", failures);
        metrics
    }

    pub(crate) fn event(&self, kind: &'static str) {
        self.events.get_or_create(&Of { kind }).inc();
    }

    pub(crate) fn list(&self, kind: &'static str) {
        self.lists.get_or_create(&Of { kind }).inc();
    }

    pub(crate) fn malformed(&self, kind: &'static str) {
        self.malformed.get_or_create(&Of { kind }).inc();
    }

    pub(crate) fn failure(&self, kind: &'static str, reason: &'static str) {
        self.failures.get_or_create(&With { kind, reason }).inc();
    }
}

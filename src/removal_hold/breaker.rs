// SPDX-License-Identifier: Apache-2.0
//! Updates the holds of all sets by one setting, and reports what is held: log lines and metrics.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use steerage_model::Key;
use steerage_process::duration;
use steerage_provider_api::{SharedSet, Target};
use tokio::time::Instant;

use super::RemovalHold;

/// The label of Services' own sets.
const OWN: &str = "own";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySet {
    set: &'static str,
}

/// Clones share the metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct HoldMetrics {
    removals: Family<BySet, Counter>,
    sets: Family<BySet, Gauge>,
}

impl HoldMetrics {
    /// With a value for each label, so that an alert sees the first removal that is held.
    pub(crate) fn new(registry: &mut prometheus_client::registry::Registry) -> Self {
        let metrics = Self::default();
        for set in SharedSet::ALL.map(SharedSet::as_str).into_iter().chain([OWN]) {
            metrics.removals.get_or_create(&BySet { set }).inc_by(0);
            metrics.sets.get_or_create(&BySet { set }).set(0);
        }
        registry.register(
            "held_target_removals",
            "Removals of targets that were held because more than a third of a set would have left within a minute, by set: eligible or \
             agents (shared by many Services), own (of one Service)",
            metrics.removals.clone(),
        );
        registry.register(
            "target_sets_holding_removals",
            "Sets of targets with held removals now, by set: eligible or agents (shared by many Services), own (of one Service)",
            metrics.sets.clone(),
        );
        metrics
    }

    /// The number of Services of whose own sets removals are held.
    pub(crate) fn set_own(&self, count: usize) {
        self.sets.get_or_create(&BySet { set: OWN }).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    #[cfg(test)]
    pub(crate) fn held(&self, set: HoldingSet<'_>) -> (u64, i64) {
        let label = BySet { set: set.label() };
        (self.removals.get_or_create(&label).get(), self.sets.get_or_create(&label).get())
    }
}

/// The set of a hold.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HoldingSet<'a> {
    Shared(SharedSet),
    /// That of one Service.
    Own(&'a Key),
}

impl HoldingSet<'_> {
    fn label(self) -> &'static str {
        match self {
            Self::Shared(set) => set.as_str(),
            Self::Own(_) => OWN,
        }
    }
}

/// Clones share the metrics. The default holds nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemovalBreaker {
    hold: Duration,
    metrics: HoldMetrics,
}

impl RemovalBreaker {
    /// `hold`: the longest time that a removal is held; zero holds nothing.
    pub(crate) fn new(hold: Duration, metrics: HoldMetrics) -> Self {
        Self { hold, metrics }
    }

    /// [`RemovalHold::update`], now and with a report.
    pub(crate) fn update(
        &self,
        set: HoldingSet<'_>,
        hold: &mut RemovalHold,
        wanted: &Arc<[Target]>,
        staying: impl Fn(&str) -> Option<Target>,
    ) -> Arc<[Target]> {
        let before = hold.clone();
        let targets = hold.update(wanted, staying, self.hold, Instant::now());
        let label = BySet { set: set.label() };
        let added = hold.held.keys().filter(|node| !before.held.contains_key(*node)).count();
        if added > 0 {
            self.metrics.removals.get_or_create(&label).inc_by(u64::try_from(added).unwrap_or(u64::MAX));
        }
        let count = hold.held().len();
        match set {
            HoldingSet::Shared(name) => {
                self.metrics.sets.get_or_create(&label).set(i64::from(count > 0));
                if added > 0 {
                    tracing::warn!(
                        set = name.as_str(), held = count, of = targets.len(), at_most = %duration::display(self.hold),
                        "more than a third of the targets would leave within a minute; holding their removal"
                    );
                }
            }
            // One cause can hold those of thousands of Services.
            HoldingSet::Own(service) if added > 0 => tracing::info!(
                %service, held = count, of = targets.len(), at_most = %duration::display(self.hold),
                "more than a third of the targets would leave within a minute; holding their removal"
            ),
            HoldingSet::Own(_) => {}
        }
        targets
    }
}

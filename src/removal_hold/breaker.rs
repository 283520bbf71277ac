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
use crate::node_list::first_nodes;

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
        wanted: &Arc<[Arc<Target>]>,
        staying: impl Fn(&str) -> Option<Arc<Target>>,
    ) -> Arc<[Arc<Target>]> {
        let before = hold.clone();
        let targets = hold.update(wanted, staying, self.hold, Instant::now());
        let label = BySet { set: set.label() };
        let added = hold.held.keys().filter(|node| !before.held.contains_key(*node)).count();
        if added > 0 {
            self.metrics.removals.get_or_create(&label).inc_by(u64::try_from(added).unwrap_or(u64::MAX));
            self.log_held(set, hold, targets.len());
        }
        if let HoldingSet::Shared(_) = set {
            self.metrics.sets.get_or_create(&label).set(i64::from(!hold.held.is_empty()));
        }
        let left = hold.left_after(&before);
        if !left.is_empty() {
            log_left(set, &left, targets.len());
        }
        targets
    }

    fn log_held(&self, set: HoldingSet<'_>, hold: &RemovalHold, targets: usize) {
        let held: Vec<&str> = hold.held().collect();
        let (count, nodes, longest) = (held.len(), first_nodes(&held), duration::display(self.hold));
        match set {
            HoldingSet::Shared(set) => tracing::warn!(
                set = set.as_str(), held = count, targets, hold = %longest, nodes,
                "more than a third of the targets would leave within a minute; holding their removal"
            ),
            // One cause can hold those of thousands of Services.
            HoldingSet::Own(service) => tracing::info!(
                %service, set = OWN, held = count, targets, hold = %longest, nodes,
                "more than a third of the targets would leave within a minute; holding their removal"
            ),
        }
    }
}

/// `targets`: how many remain.
fn log_left(set: HoldingSet<'_>, left: &[&str], targets: usize) {
    let (removed, nodes) = (left.len(), first_nodes(left));
    match set {
        HoldingSet::Shared(set) => {
            tracing::warn!(set = set.as_str(), removed, targets, nodes, "targets removed after a hold");
        }
        HoldingSet::Own(service) => {
            tracing::info!(%service, set = OWN, removed, targets, nodes, "targets removed after a hold");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The number of load balancers by the status of each condition, and by why they are degraded. A reconcile replaces what was counted for its
//! load balancer.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steerage_model::{Condition, Service, names};
use steerage_provider_cloud::reasons::{OPERATION_NOT_PERMITTED, QUOTA_EXCEEDED};

use crate::reasons;

/// The label's value of each condition.
const CONDITIONS: [(&str, &str); 3] =
    [(names::PROGRAMMED, "Programmed"), (names::SERVING, "Serving"), (names::DEGRADED, "Degraded")];
const STATUSES: [&str; 3] = ["True", "False", "Unknown"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByStatus {
    provider: &'static str,
    condition: &'static str,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    provider: &'static str,
    reason: &'static str,
}

/// The status of each condition of one load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConditionStatuses {
    statuses: [&'static str; 3],
    /// The reason of `Degraded`, while that is `True`.
    degraded: Option<&'static str>,
    /// Why the load balancer is not as requested, if it is not.
    unprogrammed: Option<&'static str>,
}

/// All reasons of `Degraded=True`.
fn degraded_reasons() -> impl Iterator<Item = &'static str> {
    let of_degraded = reasons::ALL.iter().filter(|(condition, _)| *condition == names::DEGRADED);
    let all = of_degraded.flat_map(|(_, reasons)| reasons.iter().map(|(reason, _)| *reason));
    all.filter(|reason| *reason != reasons::AS_EXPECTED)
}

impl ConditionStatuses {
    /// The desired conditions; the Service's own for those that are left as they are; else `Unknown`.
    pub(crate) fn new(service: &Service, desired: &[Condition]) -> Self {
        let found = |kind| desired.iter().chain(&service.conditions).find(|condition| condition.kind == kind);
        let statuses = CONDITIONS.map(|(kind, _)| {
            let status = found(kind).map(|found| found.status.as_str());
            STATUSES.into_iter().find(|known| status == Some(*known)).unwrap_or("Unknown")
        });
        let degraded = found(names::DEGRADED).filter(|found| found.status == "True");
        let degraded = degraded.and_then(|found| degraded_reasons().find(|reason| found.reason == *reason));
        Self { statuses, degraded, unprogrammed: None }
    }

    /// The same with the reason of `Programmed`, while that is `False`.
    pub(crate) fn because_of(self, unprogrammed: Option<&'static str>) -> Self {
        Self { unprogrammed, ..self }
    }
}

/// Clones share the metric.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConditionMetrics {
    balancers: Family<ByStatus, Gauge>,
    degraded: Family<ByReason, Gauge>,
    unprogrammed: Family<ByReason, Gauge>,
}

impl ConditionMetrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "load_balancer_conditions",
            "Load balancers that this process manages, by provider, condition (Programmed, Serving or Degraded) and its status (True, \
             False or Unknown)",
            metrics.balancers.clone(),
        );
        registry.register(
            "degraded_load_balancers",
            "Load balancers that this process manages and whose condition Degraded is True, by provider and the worst reason",
            metrics.degraded.clone(),
        );
        registry.register(
            "unprogrammed_load_balancers",
            "Load balancers that this process manages and whose condition Programmed is False, by provider and reason. A reason without a load balancer so far may be missing",
            metrics.unprogrammed.clone(),
        );
        metrics
    }

    /// Shows zero for each status and reason, so that no query misses one.
    pub(crate) fn begin(&self, provider: &'static str) {
        for (_, condition) in CONDITIONS {
            for status in STATUSES {
                self.balancers.get_or_create(&ByStatus { provider, condition, status }).set(0);
            }
        }
        for reason in degraded_reasons() {
            self.degraded.get_or_create(&ByReason { provider, reason }).set(0);
        }
        // Providers have others of their own.
        for reason in [QUOTA_EXCEEDED, OPERATION_NOT_PERMITTED, reasons::PROGRESSING] {
            self.unprogrammed.get_or_create(&ByReason { provider, reason }).set(0);
        }
    }

    /// Counts a load balancer as `new` instead of `old`; `None` is not counted.
    pub(crate) fn replace(
        &self,
        provider: &'static str,
        old: Option<ConditionStatuses>,
        new: Option<ConditionStatuses>,
    ) {
        let count = |statuses: Option<ConditionStatuses>, by: i64| {
            let Some(ConditionStatuses { statuses, degraded, unprogrammed }) = statuses else { return };
            for ((_, condition), status) in CONDITIONS.into_iter().zip(statuses) {
                self.balancers.get_or_create(&ByStatus { provider, condition, status }).inc_by(by);
            }
            if let Some(reason) = degraded {
                self.degraded.get_or_create(&ByReason { provider, reason }).inc_by(by);
            }
            if let Some(reason) = unprogrammed {
                self.unprogrammed.get_or_create(&ByReason { provider, reason }).inc_by(by);
            }
        };
        count(old, -1);
        count(new, 1);
    }

    #[cfg(test)]
    pub(crate) fn count(&self, provider: &'static str, condition: &'static str, status: &'static str) -> i64 {
        self.balancers.get_or_create(&ByStatus { provider, condition, status }).get()
    }

    #[cfg(test)]
    pub(crate) fn unprogrammed_count(&self, provider: &'static str, reason: &'static str) -> i64 {
        self.unprogrammed.get_or_create(&ByReason { provider, reason }).get()
    }

    #[cfg(test)]
    pub(crate) fn degraded_count(&self, provider: &'static str, reason: &'static str) -> i64 {
        self.degraded.get_or_create(&ByReason { provider, reason }).get()
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    fn condition(kind: &str, status: &str) -> Condition {
        Condition {
            kind: kind.to_owned(),
            status: status.to_owned(),
            reason: String::new(),
            message: String::new(),
            observed_generation: None,
        }
    }

    #[test]
    fn each_load_balancer_counts_once_for_each_condition() {
        let metrics = ConditionMetrics::default();
        metrics.begin("edge");
        let mut service = Service::new(Key::new("default", "web"));
        service.conditions = vec![condition(names::SERVING, "False"), condition(names::PROGRAMMED, "True")];
        let old = ConditionStatuses::new(&service, &[condition(names::PROGRAMMED, "False")]);
        assert_eq!(
            old,
            ConditionStatuses { statuses: ["False", "False", "Unknown"], degraded: None, unprogrammed: None },
            "desired before published"
        );
        let new = [condition(names::PROGRAMMED, "True"), condition(names::DEGRADED, "odd")];
        let new = ConditionStatuses::new(&service, &new);
        assert_eq!(
            new,
            ConditionStatuses { statuses: ["True", "False", "Unknown"], degraded: None, unprogrammed: None }
        );
        let counts = || {
            let programmed = STATUSES.map(|status| metrics.count("edge", "Programmed", status));
            (programmed, STATUSES.map(|status| metrics.count("edge", "Serving", status)))
        };
        metrics.replace("edge", None, Some(old));
        assert_eq!(counts(), ([0, 1, 0], [0, 1, 0]));
        metrics.replace("edge", Some(old), Some(new));
        assert_eq!(counts(), ([1, 0, 0], [0, 1, 0]));
        metrics.replace("edge", Some(new), None);
        assert_eq!(counts(), ([0; 3], [0; 3]));
    }
    #[test]
    fn degraded_load_balancer_counts_for_its_reason_until_it_is_fixed() {
        let metrics = ConditionMetrics::default();
        metrics.begin("aws");
        let service = Service::new(Key::new("default", "web"));
        let of = |status: &str, reason: &str| {
            let degraded = Condition { reason: reason.to_owned(), ..condition(names::DEGRADED, status) };
            ConditionStatuses::new(&service, &[degraded])
        };
        let counts = || {
            [reasons::PARTLY_PROGRAMMED, reasons::PAUSED, reasons::AS_EXPECTED]
                .map(|reason| metrics.degraded_count("aws", reason))
        };
        let all = [
            (of("True", reasons::PARTLY_PROGRAMMED), [1, 0, 0]),
            (of("True", reasons::PAUSED), [0, 1, 0]),
            (of("False", reasons::AS_EXPECTED), [0, 0, 0]),
            (of("True", "Unheard"), [0, 0, 0]),
        ];
        let mut before = None;
        for (statuses, expected) in all {
            metrics.replace("aws", before, Some(statuses));
            assert_eq!(counts(), expected, "{statuses:?}");
            before = Some(statuses);
        }
    }
}

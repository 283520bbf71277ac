// SPDX-License-Identifier: Apache-2.0
//! The health of targets: thresholds and weights, from the results of single probes. Pure; `prober` makes the probes.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheck, TargetState};

/// An address and how it is probed. Load balancers with equal checks share the probes of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Probe {
    pub(crate) address: IpAddr,
    pub(crate) check: HealthCheck,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// With the weight that the response asks for, if it does.
    Passed(Option<u32>),
    /// The target answered otherwise, with the reason.
    Failed(String),
    /// The connection was refused, broke, or brought no answer in time, with the reason.
    Unanswered(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TargetHealth {
    /// Never `Refused`.
    pub(crate) state: TargetState,
    /// Why it is not healthy; empty when it is.
    pub(crate) reason: String,
    /// The weight that its responses ask for, if they do.
    pub(crate) weight: Option<u32>,
}

impl Default for TargetHealth {
    fn default() -> Self {
        Self {
            state: TargetState::Initial,
            reason: "no probe has been answered yet".to_owned(),
            weight: None,
        }
    }
}

pub(crate) type HealthByProbe = HashMap<Probe, TargetHealth>;

/// The least time between two changes of a weight: each change moves connections.
const WEIGHT_INTERVAL: Duration = Duration::from_secs(5);

/// How long unanswered probes leave a target in its initial state: a node opens the health-check port of a new Service when its
/// service proxy has read it.
const INITIAL_LIMIT: Duration = Duration::from_secs(10);
/// The first delay after such a probe; the next ones double, up to the interval.
const INITIAL_DELAY: Duration = Duration::from_millis(100);

/// Follows the probes of one target.
#[derive(Debug, Default)]
pub(crate) struct HealthTracker {
    health: TargetHealth,
    /// When the first probe was not answered, and how many were not, in the initial state.
    unanswered: Option<(Instant, u32)>,
    /// Probes in a row that contradict the state.
    contrary: u32,
    weight_changed: Option<Instant>,
}

impl HealthTracker {
    pub(crate) fn health(&self) -> &TargetHealth {
        &self.health
    }

    /// Whether the health has changed.
    pub(crate) fn record(&mut self, check: &HealthCheck, result: ProbeResult, now: Instant) -> bool {
        let before = self.health.clone();
        match result {
            ProbeResult::Passed(weight) => {
                self.count_towards(TargetState::Healthy, check.healthy_threshold);
                self.set_weight(weight, now);
                if self.health.state == TargetState::Healthy {
                    self.health.reason.clear();
                }
            }
            ProbeResult::Unanswered(_) if self.is_undecided(now) => {}
            ProbeResult::Failed(reason) | ProbeResult::Unanswered(reason) => {
                self.count_towards(TargetState::Unhealthy, check.unhealthy_threshold);
                if self.health.state == TargetState::Unhealthy {
                    self.health.reason = reason;
                }
            }
        }
        self.health != before
    }

    /// The delay until the next probe while no probe has decided.
    pub(crate) fn initial_delay(&self, interval: Duration) -> Option<Duration> {
        let (_, count) = self.unanswered.filter(|_| self.health.state == TargetState::Initial)?;
        Some(INITIAL_DELAY.saturating_mul(1 << (count - 1).min(10)).min(interval))
    }

    /// Counts an unanswered probe in the initial state; whether it says nothing yet.
    fn is_undecided(&mut self, now: Instant) -> bool {
        if self.health.state != TargetState::Initial {
            return false;
        }
        let (since, count) = self.unanswered.get_or_insert((now, 0));
        *count += 1;
        now.duration_since(*since) < INITIAL_LIMIT
    }

    fn count_towards(&mut self, to: TargetState, threshold: u32) {
        if self.health.state == to {
            self.contrary = 0;
            return;
        }
        // The first answer decides alone: until then the target is not used unless all targets are.
        let needed = if self.health.state == TargetState::Initial { 1 } else { threshold.max(1) };
        self.contrary += 1;
        if self.contrary >= needed {
            self.health.state = to;
            self.contrary = 0;
        }
    }

    fn set_weight(&mut self, weight: Option<u32>, now: Instant) {
        let due = self.weight_changed.is_none_or(|last| now.duration_since(last) >= WEIGHT_INTERVAL);
        // A weight of zero contradicts status 200; the status wins.
        let weight = weight.map(|weight| weight.clamp(1, crate::slot_table::MAX_WEIGHT));
        if weight != self.health.weight && due {
            self.health.weight = weight;
            self.weight_changed = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steerage_edge_api::HealthCheckProtocol;

    fn check() -> HealthCheck {
        HealthCheck {
            protocol: HealthCheckProtocol::Http,
            port: 1,
            path: None,
            interval_milliseconds: 100,
            timeout_milliseconds: 100,
            healthy_threshold: 2,
            unhealthy_threshold: 3,
        }
    }

    fn states(results: &str) -> String {
        let mut tracker = HealthTracker::default();
        let now = Instant::now();
        let state = |result| {
            let result = if result == '+' {
                ProbeResult::Passed(None)
            } else {
                ProbeResult::Failed("refused".to_owned())
            };
            tracker.record(&check(), result, now);
            match tracker.health().state {
                TargetState::Healthy => 'h',
                TargetState::Unhealthy => 'u',
                _ => '?',
            }
        };
        results.chars().map(state).collect()
    }

    #[test]
    fn thresholds_count_consecutive_probes() {
        assert_eq!(states("+--+---"), "hhhhhhu");
        assert_eq!(states("-+-++"), "uuuuh");
    }

    #[test]
    fn first_probe_decides() {
        assert_eq!(states("+"), "h");
        assert_eq!(states("-"), "u");
    }

    #[test]
    fn unanswered_probes_are_repeated_soon_and_decide_late() {
        let (mut tracker, start) = (HealthTracker::default(), Instant::now());
        let (mut now, mut delays) = (start, Vec::new());
        let refused = || ProbeResult::Unanswered("refused".to_owned());
        while !tracker.record(&check(), refused(), now) {
            let delay = tracker.initial_delay(Duration::from_hours(1)).expect("soon");
            delays.push(delay.as_millis());
            now += delay;
        }
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400]);
        assert_eq!(tracker.health().state, TargetState::Unhealthy);
        assert_eq!(tracker.initial_delay(Duration::from_hours(1)), None, "the interval counts now");

        let mut opened = HealthTracker::default();
        assert!(!opened.record(&check(), refused(), start));
        assert_eq!(opened.initial_delay(Duration::from_millis(30)), Some(Duration::from_millis(30)));
        assert!(opened.record(&check(), ProbeResult::Passed(None), start));
        assert_eq!(opened.health().state, TargetState::Healthy);
        for state in [TargetState::Healthy, TargetState::Healthy, TargetState::Unhealthy] {
            opened.record(&check(), refused(), start);
            assert_eq!(opened.health().state, state, "after an answer the threshold counts");
        }
    }

    #[test]
    fn reason_is_set_while_unhealthy() {
        let (mut tracker, now) = (HealthTracker::default(), Instant::now());
        assert!(tracker.record(&check(), ProbeResult::Failed("status 503".to_owned()), now));
        assert_eq!(tracker.health().reason, "status 503");
        assert!(!tracker.record(&check(), ProbeResult::Failed("status 503".to_owned()), now), "nothing new");
        tracker.record(&check(), ProbeResult::Passed(None), now);
        assert!(tracker.record(&check(), ProbeResult::Passed(None), now));
        assert_eq!(tracker.health().reason, "");
    }

    #[test]
    fn weights_are_bounded_and_rate_limited() {
        let (mut tracker, start) = (HealthTracker::default(), Instant::now());
        let mut weight = |weight, seconds| {
            tracker.record(&check(), ProbeResult::Passed(weight), start + Duration::from_secs(seconds));
            tracker.health().weight
        };
        assert_eq!(weight(Some(3), 0), Some(3));
        assert_eq!(weight(Some(4), 1), Some(3), "too soon");
        assert_eq!(weight(Some(4), 6), Some(4));
        assert_eq!(weight(Some(1_000_000), 12), Some(100));
        assert_eq!(weight(Some(0), 18), Some(1));
        assert_eq!(weight(None, 24), None);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! From single probes to health: thresholds and weights. Pure, told the time; `prober` makes the probes.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheck, TargetState};

/// What is probed: load balancers with equal checks share the probes of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Probe {
    /// The node's address.
    pub(crate) address: IpAddr,
    /// How.
    pub(crate) check: HealthCheck,
}

/// What one probe brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// It answered as it should; with the number of its endpoints, if it told.
    Passed(Option<u32>),
    /// It did not, and why.
    Failed(String),
}

/// What is known of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TargetHealth {
    /// The state; never `Refused`.
    pub(crate) state: TargetState,
    /// Why it is unhealthy.
    pub(crate) reason: String,
    /// The weight that it asks for, if it does.
    pub(crate) weight: Option<u32>,
}

impl Default for TargetHealth {
    fn default() -> Self {
        Self { state: TargetState::Initial, reason: "not probed often enough yet".to_owned(), weight: None }
    }
}

/// What is known of all targets.
pub(crate) type HealthByProbe = HashMap<Probe, TargetHealth>;

/// A weight that changes is used at most so often: each change moves connections.
const WEIGHT_PACE: Duration = Duration::from_secs(5);

/// The history of one target.
#[derive(Debug, Default)]
pub(crate) struct HealthTracker {
    health: TargetHealth,
    /// Probes in a row that disagree with the state.
    against: u32,
    weighed: Option<Instant>,
}

impl HealthTracker {
    /// What is known now.
    pub(crate) fn health(&self) -> &TargetHealth {
        &self.health
    }

    /// Takes a probe's outcome in; whether anything that others see has changed.
    pub(crate) fn record(&mut self, check: &HealthCheck, outcome: ProbeResult, now: Instant) -> bool {
        let before = self.health.clone();
        match outcome {
            ProbeResult::Passed(weight) => {
                self.count(TargetState::Healthy, check.healthy_threshold);
                self.weigh(weight, now);
                if self.health.state == TargetState::Healthy {
                    self.health.reason.clear();
                }
            }
            ProbeResult::Failed(reason) => {
                self.count(TargetState::Unhealthy, check.unhealthy_threshold);
                if self.health.state == TargetState::Unhealthy {
                    self.health.reason = reason;
                }
            }
        }
        self.health != before
    }

    fn count(&mut self, to: TargetState, threshold: u32) {
        if self.health.state == to {
            self.against = 0;
            return;
        }
        // From the start one probe decides: until then the target is not used at all, or all are.
        let needed = if self.health.state == TargetState::Initial { 1 } else { threshold.max(1) };
        self.against += 1;
        if self.against >= needed {
            self.health.state = to;
            self.against = 0;
        }
    }

    fn weigh(&mut self, weight: Option<u32>, now: Instant) {
        let due = self.weighed.is_none_or(|last| now.duration_since(last) >= WEIGHT_PACE);
        // Zero endpoints and yet 200 is a contradiction: healthy counts.
        let weight = weight.map(|weight| weight.clamp(1, crate::slot_table::MAX_WEIGHT));
        if weight != self.health.weight && due {
            self.health.weight = weight;
            self.weighed = Some(now);
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

    fn states(outcomes: &str) -> String {
        let mut tracker = HealthTracker::default();
        let now = Instant::now();
        let state = |outcome| {
            let outcome = if outcome == '+' {
                ProbeResult::Passed(None)
            } else {
                ProbeResult::Failed("refused".to_owned())
            };
            tracker.record(&check(), outcome, now);
            match tracker.health().state {
                TargetState::Healthy => 'h',
                TargetState::Unhealthy => 'u',
                _ => '?',
            }
        };
        outcomes.chars().map(state).collect()
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

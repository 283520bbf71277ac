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
pub(crate) enum Outcome {
    /// It answered as it should; with the number of its endpoints, if it told.
    Good(Option<u32>),
    /// It did not, and why.
    Bad(String),
}

/// What is known of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The state; never `Refused`.
    pub(crate) state: TargetState,
    /// Why it is unhealthy.
    pub(crate) reason: String,
    /// The weight that it asks for, if it does.
    pub(crate) weight: Option<u32>,
}

impl Default for Seen {
    fn default() -> Self {
        Self { state: TargetState::Initial, reason: "not probed often enough yet".to_owned(), weight: None }
    }
}

/// What is known of all targets.
pub(crate) type Health = HashMap<Probe, Seen>;

/// A weight that changes is used at most so often: each change moves connections.
const WEIGHT_PACE: Duration = Duration::from_secs(5);

/// The history of one target.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    seen: Seen,
    /// Probes in a row that disagree with the state.
    against: u32,
    weighed: Option<Instant>,
}

impl Judge {
    /// What is known now.
    pub(crate) fn seen(&self) -> &Seen {
        &self.seen
    }

    /// Takes a probe's outcome in; whether anything that others see has changed.
    pub(crate) fn judge(&mut self, check: &HealthCheck, outcome: Outcome, now: Instant) -> bool {
        let before = self.seen.clone();
        match outcome {
            Outcome::Good(weight) => {
                self.count(TargetState::Healthy, check.healthy_threshold);
                self.weigh(weight, now);
                if self.seen.state == TargetState::Healthy {
                    self.seen.reason.clear();
                }
            }
            Outcome::Bad(reason) => {
                self.count(TargetState::Unhealthy, check.unhealthy_threshold);
                if self.seen.state == TargetState::Unhealthy {
                    self.seen.reason = reason;
                }
            }
        }
        self.seen != before
    }

    fn count(&mut self, to: TargetState, threshold: u32) {
        if self.seen.state == to {
            self.against = 0;
            return;
        }
        // From the start one probe decides: until then the target is not used at all, or all are.
        let needed = if self.seen.state == TargetState::Initial { 1 } else { threshold.max(1) };
        self.against += 1;
        if self.against >= needed {
            self.seen.state = to;
            self.against = 0;
        }
    }

    fn weigh(&mut self, weight: Option<u32>, now: Instant) {
        let due = self.weighed.is_none_or(|last| now.duration_since(last) >= WEIGHT_PACE);
        // Zero endpoints and yet 200 is a contradiction: healthy counts.
        let weight = weight.map(|weight| weight.clamp(1, crate::table::MAX_WEIGHT));
        if weight != self.seen.weight && due {
            self.seen.weight = weight;
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
        let mut judge = Judge::default();
        let now = Instant::now();
        let state = |outcome| {
            let outcome =
                if outcome == '+' { Outcome::Good(None) } else { Outcome::Bad("refused".to_owned()) };
            judge.judge(&check(), outcome, now);
            match judge.seen().state {
                TargetState::Healthy => 'h',
                TargetState::Unhealthy => 'u',
                _ => '?',
            }
        };
        outcomes.chars().map(state).collect()
    }

    #[test]
    fn thresholds_count_probes_in_a_row() {
        assert_eq!(states("+--+---"), "hhhhhhu");
        assert_eq!(states("-+-++"), "uuuuh");
    }

    #[test]
    fn one_probe_decides_at_the_start() {
        assert_eq!(states("+"), "h");
        assert_eq!(states("-"), "u");
    }

    #[test]
    fn reasons_come_with_the_state_and_go_with_it() {
        let (mut judge, now) = (Judge::default(), Instant::now());
        assert!(judge.judge(&check(), Outcome::Bad("status 503".to_owned()), now));
        assert_eq!(judge.seen().reason, "status 503");
        assert!(!judge.judge(&check(), Outcome::Bad("status 503".to_owned()), now), "nothing new");
        judge.judge(&check(), Outcome::Good(None), now);
        assert!(judge.judge(&check(), Outcome::Good(None), now));
        assert_eq!(judge.seen().reason, "");
    }

    #[test]
    fn weights_are_bounded_and_change_slowly() {
        let (mut judge, start) = (Judge::default(), Instant::now());
        let mut weight = |weight, seconds| {
            judge.judge(&check(), Outcome::Good(weight), start + Duration::from_secs(seconds));
            judge.seen().weight
        };
        assert_eq!(weight(Some(3), 0), Some(3));
        assert_eq!(weight(Some(4), 1), Some(3), "too soon");
        assert_eq!(weight(Some(4), 6), Some(4));
        assert_eq!(weight(Some(1_000_000), 12), Some(100));
        assert_eq!(weight(Some(0), 18), Some(1));
        assert_eq!(weight(None, 24), None);
    }
}

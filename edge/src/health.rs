// SPDX-License-Identifier: Apache-2.0
//! The health of targets: thresholds and weights, from the results of single probes, or what their nodes state. Pure; `prober` makes
//! the probes and asks for the statements.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_api::{HealthCheck, TargetState};

mod by_probe;

pub(crate) use by_probe::{HealthByProbe, ProbeRequest};

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
    /// The node has no local endpoint of the Service, as its service proxy says.
    NoEndpoint,
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
    /// It is unhealthy, and has no local endpoint of the Service by the last answer that told. Other failures since change nothing
    /// of that.
    pub(crate) lacks_endpoint: bool,
    /// The node's statement has decided it. Of a node that states nothing any more that counts until its first probe has ended.
    pub(crate) is_stated: bool,
}

impl Default for TargetHealth {
    fn default() -> Self {
        Self {
            state: TargetState::Initial,
            reason: "no probe has been answered yet".to_owned(),
            weight: None,
            lacks_endpoint: false,
            is_stated: false,
        }
    }
}

impl TargetHealth {
    pub(crate) fn is_healthy(&self) -> bool {
        self.state == TargetState::Healthy
    }

    /// Of a target whose node states so, and nothing else.
    pub(crate) fn without_endpoint() -> Self {
        Self {
            state: TargetState::Unhealthy,
            reason: NO_ENDPOINT.to_owned(),
            weight: None,
            lacks_endpoint: true,
            is_stated: true,
        }
    }

    /// Whether the two differ in nothing but whether a statement has decided them.
    pub(crate) fn says_as(&self, other: &Self) -> bool {
        Self { is_stated: other.is_stated, ..self.clone() } == *other
    }
}

/// Why a target is unhealthy, in its status.
const NO_ENDPOINT: &str = "no local endpoint";

/// The least time between two changes of a weight: each change moves connections.
const WEIGHT_INTERVAL: Duration = Duration::from_secs(5);

/// An unanswered probe that ends sooner leaves a target in its initial state: a node opens the health-check port of a new Service
/// when its service proxy has read the Service.
const INITIAL_LIMIT: Duration = Duration::from_secs(10);
/// The first delay after such a probe; the next ones double, up to the interval and to the end of the limit.
const INITIAL_DELAY: Duration = Duration::from_millis(100);

/// Follows the probes of one target.
#[derive(Debug)]
pub(crate) struct HealthTracker {
    health: TargetHealth,
    started: Instant,
    /// Probes without an answer in the initial state.
    unanswered: u32,
    was_healthy: bool,
    /// Probes in a row that contradict the state.
    contrary: u32,
    weight_changed: Option<Instant>,
    /// Until when the next probe that passes decides alone.
    expected_until: Option<Instant>,
}

impl HealthTracker {
    /// Before the first probe, which begins now, of a target whose health may be known from earlier probes.
    pub(crate) fn new(known: Option<TargetHealth>, now: Instant) -> Self {
        let health = known.unwrap_or_default();
        Self {
            was_healthy: health.state == TargetState::Healthy,
            health,
            started: now,
            unanswered: 0,
            contrary: 0,
            weight_changed: None,
            expected_until: None,
        }
    }

    /// The first probe that passes before this time decides alone, whatever the threshold: another signal says the same. `None`: it
    /// does not, or no more.
    pub(crate) fn expect(&mut self, until: Option<Instant>) {
        self.expected_until = until;
    }

    pub(crate) fn health(&self) -> &TargetHealth {
        &self.health
    }

    /// Whether the health has changed. The first probe always changes it.
    pub(crate) fn record(&mut self, check: &HealthCheck, result: ProbeResult, now: Instant) -> bool {
        let before = self.health.clone();
        self.health.is_stated = false;
        match result {
            ProbeResult::Passed(weight) => {
                let is_expected = self.expected_until.take().is_some_and(|until| now < until);
                let threshold = if is_expected { 1 } else { check.healthy_threshold };
                self.count_towards(TargetState::Healthy, threshold);
                self.set_weight(weight, now);
                if self.health.state == TargetState::Healthy {
                    self.health.reason.clear();
                    self.health.lacks_endpoint = false;
                    self.was_healthy = true;
                }
            }
            ProbeResult::Unanswered(reason) if self.is_undecided(now) => {
                self.unanswered += 1;
                if self.unanswered == 1 {
                    self.health.reason = reason;
                }
            }
            ProbeResult::NoEndpoint => {
                self.count_towards(TargetState::Unhealthy, check.unhealthy_threshold);
                self.say(NO_ENDPOINT.to_owned(), true);
            }
            ProbeResult::Failed(reason) | ProbeResult::Unanswered(reason) => {
                self.count_towards(TargetState::Unhealthy, check.unhealthy_threshold);
                self.say(reason, false);
            }
        }
        self.health != before
    }

    /// The node itself has said so: no threshold counts. Whether the health has changed.
    pub(crate) fn obey(&mut self, result: ProbeResult, now: Instant) -> bool {
        let before = self.health.clone();
        self.contrary = 0;
        self.health.is_stated = true;
        match result {
            ProbeResult::Passed(weight) => {
                self.health.state = TargetState::Healthy;
                self.health.reason.clear();
                self.health.lacks_endpoint = false;
                self.was_healthy = true;
                self.set_weight(weight, now);
            }
            ProbeResult::NoEndpoint => {
                self.health.state = TargetState::Unhealthy;
                self.say(NO_ENDPOINT.to_owned(), true);
            }
            ProbeResult::Failed(reason) | ProbeResult::Unanswered(reason) => {
                self.health.state = TargetState::Unhealthy;
                self.say(reason, false);
            }
        }
        self.health != before
    }

    /// Why it is unhealthy, if it is.
    fn say(&mut self, reason: String, lacks_endpoint: bool) {
        if self.health.state == TargetState::Unhealthy {
            self.health.reason = reason;
            self.health.lacks_endpoint |= lacks_endpoint;
        }
    }

    /// Whether the weight is this one, and not an earlier one that has to stay for a moment.
    pub(crate) fn has_weight(&self, wanted: Option<u32>) -> bool {
        self.health.weight == bounded(wanted)
    }

    /// The delay until the next probe while no probe has decided.
    pub(crate) fn initial_delay(&self, interval: Duration, now: Instant) -> Option<Duration> {
        if self.health.state != TargetState::Initial || self.unanswered == 0 {
            return None;
        }
        let delay = INITIAL_DELAY.saturating_mul(1 << (self.unanswered - 1).min(10));
        let rest = INITIAL_LIMIT.saturating_sub(now.duration_since(self.started));
        Some(delay.min(interval).min(rest))
    }

    /// Whether an unanswered probe that ends now says nothing yet.
    fn is_undecided(&self, now: Instant) -> bool {
        self.health.state == TargetState::Initial && now.duration_since(self.started) < INITIAL_LIMIT
    }

    fn count_towards(&mut self, to: TargetState, threshold: u32) {
        if self.health.state == to {
            self.contrary = 0;
            return;
        }
        // The first answer decides alone: until then the target is not used unless all targets are. So does the first pass: a new
        // Service's node answers 503 until a pod is ready.
        let is_first =
            self.health.state == TargetState::Initial || to == TargetState::Healthy && !self.was_healthy;
        let needed = if is_first { 1 } else { threshold.max(1) };
        self.contrary += 1;
        if self.contrary >= needed {
            self.health.state = to;
            self.contrary = 0;
        }
    }

    fn set_weight(&mut self, weight: Option<u32>, now: Instant) {
        let due = self.weight_changed.is_none_or(|last| now.duration_since(last) >= WEIGHT_INTERVAL);
        let weight = bounded(weight);
        if weight != self.health.weight && due {
            self.health.weight = weight;
            self.weight_changed = Some(now);
        }
    }
}

/// A weight of zero contradicts status 200; the status wins.
fn bounded(weight: Option<u32>) -> Option<u32> {
    weight.map(|weight| weight.clamp(1, steerage_edge_dataplane::maglev::MAX_WEIGHT))
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
        let now = Instant::now();
        let mut tracker = HealthTracker::new(None, now);
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
        assert_eq!(states("+---+-++"), "hhhuuuuh");
    }

    #[test]
    fn first_probe_decides() {
        assert_eq!(states("+"), "h");
        assert_eq!(states("-"), "u");
    }

    #[test]
    fn first_pass_decides_and_later_ones_count() {
        assert_eq!(states("----+"), "uuuuh");
        assert_eq!(states("-+---+-++"), "uhhhuuuuh");
    }

    #[test]
    fn unanswered_probes_are_repeated_soon_and_decide_late() {
        let start = Instant::now();
        let mut tracker = HealthTracker::new(None, start);
        let (mut now, mut delays) = (start, Vec::new());
        let refused = || ProbeResult::Unanswered("refused".to_owned());
        while tracker.health().state == TargetState::Initial {
            let is_first = now == start;
            assert_eq!(tracker.record(&check(), refused(), now), is_first, "sent once");
            assert_eq!(tracker.health().reason, "refused");
            let delay = tracker.initial_delay(Duration::from_hours(1), now).expect("soon");
            delays.push(delay.as_millis());
            now += delay;
            if now >= start + INITIAL_LIMIT {
                assert!(tracker.record(&check(), refused(), now));
            }
        }
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 3700]);
        assert_eq!(tracker.health().state, TargetState::Unhealthy);
        assert_eq!(tracker.initial_delay(Duration::from_hours(1), now), None, "the interval counts now");

        let mut opened = HealthTracker::new(None, start);
        assert!(opened.record(&check(), refused(), start));
        let interval = Duration::from_millis(30);
        assert_eq!(opened.initial_delay(interval, start), Some(interval));
        assert!(opened.record(&check(), ProbeResult::Passed(None), start));
        assert_eq!(opened.health().state, TargetState::Healthy);
        for state in [TargetState::Healthy, TargetState::Healthy, TargetState::Unhealthy] {
            opened.record(&check(), refused(), start);
            assert_eq!(opened.health().state, state, "after an answer the threshold counts");
        }
    }

    #[test]
    fn first_pass_that_is_expected_decides_alone() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let known = TargetHealth { state: TargetState::Healthy, ..TargetHealth::default() };
        let mut tracker = HealthTracker::new(Some(known), start);
        let probe = |tracker: &mut HealthTracker, passes: bool, seconds| {
            let result = if passes { ProbeResult::Passed(None) } else { ProbeResult::NoEndpoint };
            tracker.record(&check(), result, at(seconds));
            tracker.health().is_healthy()
        };
        let fail = |tracker: &mut HealthTracker| [0; 3].map(|_| probe(tracker, false, 0));
        assert_eq!(fail(&mut tracker), [true, true, false]);
        tracker.expect(Some(at(30)));
        assert!(!probe(&mut tracker, false, 1));
        assert!(probe(&mut tracker, true, 2), "one is enough");
        assert_eq!(fail(&mut tracker), [true, true, false], "to fail takes as many as ever");
        assert_eq!(
            [3, 4].map(|seconds| probe(&mut tracker, true, seconds)),
            [false, true],
            "only the first one"
        );
        fail(&mut tracker);
        tracker.expect(Some(at(30)));
        assert_eq!([30, 31].map(|seconds| probe(&mut tracker, true, seconds)), [false, true], "too late");
        fail(&mut tracker);
        tracker.expect(Some(at(60)));
        tracker.expect(None);
        assert_eq!([32, 33].map(|seconds| probe(&mut tracker, true, seconds)), [false, true], "no more");
    }

    #[test]
    fn health_says_whether_a_statement_has_decided_it() {
        let now = Instant::now();
        let mut tracker = HealthTracker::new(None, now);
        assert!(tracker.obey(ProbeResult::Passed(None), now) && tracker.health().is_stated);
        let stated = tracker.health().clone();
        assert!(tracker.record(&check(), ProbeResult::Passed(None), now), "the first probe is news");
        assert!(!tracker.health().is_stated && tracker.health().says_as(&stated));
        assert!(!tracker.record(&check(), ProbeResult::Passed(None), now), "the next one is none");
    }

    #[test]
    fn slow_first_probe_decides_if_it_ends_after_the_limit() {
        let start = Instant::now();
        let mut tracker = HealthTracker::new(None, start);
        let result = ProbeResult::Unanswered("no response within 20s".to_owned());
        assert!(tracker.record(&check(), result, start + Duration::from_secs(20)));
        assert_eq!(tracker.health().state, TargetState::Unhealthy);
    }

    #[test]
    fn reason_is_set_while_unhealthy() {
        let now = Instant::now();
        let mut tracker = HealthTracker::new(None, now);
        assert!(tracker.record(&check(), ProbeResult::Failed("status 503".to_owned()), now));
        assert_eq!(tracker.health().reason, "status 503");
        assert!(!tracker.record(&check(), ProbeResult::Failed("status 503".to_owned()), now), "nothing new");
        assert!(tracker.record(&check(), ProbeResult::Passed(None), now));
        assert_eq!(tracker.health().reason, "");
        for (result, reason) in [("-", ""), ("-", ""), ("-", "status 503"), ("+", "status 503"), ("+", "")] {
            let result = match result {
                "+" => ProbeResult::Passed(None),
                _ => ProbeResult::Failed("status 503".to_owned()),
            };
            tracker.record(&check(), result, now);
            assert_eq!(tracker.health().reason, reason);
        }
    }

    #[test]
    fn known_health_counts_as_earlier_probes() {
        let now = Instant::now();
        let known = |state| TargetHealth { state, reason: String::new(), ..TargetHealth::default() };
        let mut tracker = HealthTracker::new(Some(known(TargetState::Healthy)), now);
        for state in [TargetState::Healthy, TargetState::Healthy, TargetState::Unhealthy] {
            tracker.record(&check(), ProbeResult::Unanswered("refused".to_owned()), now);
            assert_eq!(tracker.health().state, state);
        }
        let mut tracker = HealthTracker::new(Some(known(TargetState::Unhealthy)), now);
        assert!(!tracker.record(&check(), ProbeResult::Failed(String::new()), now), "nothing new");
        assert!(tracker.record(&check(), ProbeResult::Passed(None), now));
    }

    #[test]
    fn weights_are_bounded_and_rate_limited() {
        let start = Instant::now();
        let mut tracker = HealthTracker::new(None, start);
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

    #[test]
    fn statement_is_obeyed_at_once_but_for_its_weight() {
        let start = Instant::now();
        let mut tracker = HealthTracker::new(None, start);
        let failed = || ProbeResult::Failed("no local endpoint".to_owned());
        let mut steps = Vec::new();
        for (result, seconds) in [
            (failed(), 0),
            (ProbeResult::Passed(Some(3)), 0),
            (failed(), 0),
            (ProbeResult::Passed(Some(200)), 4),
            (ProbeResult::Passed(Some(200)), 4),
            (ProbeResult::Passed(Some(200)), 5),
        ] {
            let changed = tracker.obey(result, start + Duration::from_secs(seconds));
            let TargetHealth { state, weight, .. } = tracker.health().clone();
            steps.push((changed, state, weight, tracker.has_weight(Some(200))));
        }
        let (healthy, unhealthy) = (TargetState::Healthy, TargetState::Unhealthy);
        let expected = [
            (true, unhealthy, None, false),
            (true, healthy, Some(3), false),
            (true, unhealthy, Some(3), false),
            (true, healthy, Some(3), false),
            (false, healthy, Some(3), false),
            (true, healthy, Some(100), true),
        ];
        assert_eq!(steps, expected);
    }
}

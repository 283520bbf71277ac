// SPDX-License-Identifier: Apache-2.0
//! Decisions about a group, one after the other.

use super::*;

/// A group of which each target is a letter: `h` healthy, `u` unhealthy, `n` without an endpoint, `i` not probed yet; a capital letter if
/// its node drains.
struct Group {
    rules: UseRules,
    memory: Memory,
    now: Instant,
    next_change: Option<Instant>,
}

impl Group {
    fn new(panic_threshold: u32, slow_start: Duration) -> Self {
        let rules = UseRules { panic_threshold, slow_start };
        Self { rules, memory: Memory::default(), now: Instant::now(), next_change: None }
    }

    /// The share of each target in digits; a draining one without a share is `d`.
    fn decide(&mut self, targets: &str) -> String {
        let known = |(number, letter): (u8, char)| Known {
            address: IpAddr::from([10, 0, 0, number]),
            state: match letter.to_ascii_lowercase() {
                'h' => TargetState::Healthy,
                'i' => TargetState::Initial,
                _ => TargetState::Unhealthy,
            },
            lacks_endpoint: letter.eq_ignore_ascii_case(&'n'),
            drain: letter.is_ascii_uppercase().then_some("the node is cordoned"),
        };
        let known: Vec<_> = (0..).zip(targets.chars()).map(known).collect();
        let usage = decide(&known, 0, self.rules, &self.memory, self.now);
        (self.memory, self.next_change) = (usage.memory, usage.next_change);
        let shown = |used: &Used| match used.usage {
            TargetUse::Draining => "d".to_owned(),
            _ => used.share.to_string(),
        };
        usage.used.iter().map(shown).collect()
    }

    fn after(&mut self, time: Duration, targets: &str) -> String {
        self.now += time;
        self.decide(targets)
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn once(panic_threshold: u32, targets: &str) -> String {
    Group::new(panic_threshold, Duration::ZERO).decide(targets)
}

#[test]
fn panic_threshold_counts_what_should_serve() {
    for (threshold, targets, used) in [
        (0, "huuu", "8000"),
        (25, "huuu", "8000"),
        (26, "huuu", "8888"),
        // Without an endpoint, not probed, draining: they say nothing of the others.
        (50, "hnnnn", "80000"),
        (50, "hiiii", "80000"),
        (50, "hUUUU", "8dddd"),
        (50, "huunH", "8880d"),
        (100, "hhhu", "8888"),
        (100, "hhhh", "8888"),
        (100, "nnnn", "8888"),
    ] {
        assert_eq!(once(threshold, targets), used, "{threshold} {targets}");
    }
}

#[test]
fn draining_targets_are_used_if_no_other_is_healthy() {
    for (targets, used) in
        [("hH", "8d"), ("uH", "08"), ("HH", "88"), ("nUn", "080"), ("U", "8"), ("UN", "8d"), ("NN", "88")]
    {
        assert_eq!(once(0, targets), used, "{targets}");
    }
}

/// A Service without an endpoint, of whichever tenant, must not keep nodes from being drained.
#[test]
fn draining_targets_are_no_guess_beside_others() {
    for (targets, used) in [("uU", "8d"), ("nN", "8d"), ("iI", "8d"), ("nuN", "08d"), ("uuN", "88d")] {
        assert_eq!(once(0, targets), used, "{targets}");
    }
}

#[test]
fn target_that_begins_to_drain_was_no_failure() {
    let mut group = Group::new(100, Duration::ZERO);
    assert_eq!(group.decide("hhh"), "888");
    assert_eq!(group.decide("hhH"), "88d");
    assert_eq!(group.decide("hhU"), "88d");
    assert_eq!(group.decide("hh"), "88");
}

#[test]
fn target_that_becomes_healthy_beside_others_gets_its_share_step_by_step() {
    let mut group = Group::new(0, 7 * SECOND);
    assert_eq!(group.decide("hu"), "80");
    assert_eq!((group.decide("hh"), group.next_change), ("81".to_owned(), Some(group.now + SECOND)));
    let shares: Vec<_> = (0..7).map(|_| group.after(SECOND, "hh")).collect();
    assert_eq!(shares, ["82", "83", "84", "85", "86", "87", "88"]);
    assert_eq!(group.next_change, None);
    // It fails in the middle, and begins again.
    assert_eq!([group.decide("hu"), group.decide("hh")], ["80", "81"]);
    assert_eq!(group.after(3 * SECOND, "hh"), "84");
    assert_eq!([group.decide("hu"), group.decide("hh")], ["80", "81"]);
}

#[test]
fn nothing_fills_at_first_and_nothing_that_serves_alone() {
    let mut group = Group::new(0, 7 * SECOND);
    assert_eq!(group.decide("ii"), "88");
    assert_eq!(group.decide("hi"), "80", "the first answer");
    assert_eq!(group.after(SECOND, "hh"), "88", "the health of all was never known before");
    assert_eq!(group.decide("nn"), "88", "the last ones");
    assert_eq!(group.after(SECOND, "nh"), "08", "alone");
    assert_eq!(group.after(SECOND, "hh"), "18");
    assert_eq!(group.after(SECOND, "hn"), "80", "nobody else serves");
    assert_eq!(group.after(SECOND, "hn"), "80");
    assert_eq!(group.decide("hnh"), "801", "a new target");
}

#[test]
fn failing_checks_of_all_are_no_reason_to_fill() {
    let mut group = Group::new(50, 7 * SECOND);
    assert_eq!(group.decide("hhhh"), "8888");
    assert_eq!(group.decide("huuu"), "8888", "too few are healthy");
    assert_eq!(group.decide("hhuu"), "8100");
}

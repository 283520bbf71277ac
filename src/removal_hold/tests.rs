// SPDX-License-Identifier: Apache-2.0
//! What is held, and for how long.

use std::collections::BTreeSet;

use proptest::prelude::*;
use steerage_provider_api::SharedSet;

use super::*;

const HOLD: Duration = LONGEST_HOLD;

fn target(node: &str) -> Arc<Target> {
    Arc::new(Target {
        node: node.to_owned(),
        addresses: Vec::new(),
        provider_id: None,
        zone: None,
        pod_cidrs: Vec::new(),
        weight: 1,
    })
}

fn targets(nodes: &str) -> Arc<[Arc<Target>]> {
    nodes.chars().map(|node| target(&node.to_string())).collect()
}

fn names(targets: &[Arc<Target>]) -> String {
    targets.iter().map(|target| target.node.as_str()).collect()
}

/// Updates a hold with steps of seconds, wanted nodes, and nodes that are gone. Returns the targets after each.
fn history(steps: &[(u64, &str, &str)]) -> Vec<String> {
    let (mut hold, start) = (RemovalHold::default(), Instant::now());
    let update = |(seconds, wanted, gone): &(u64, &str, &str)| {
        let staying = |node: &str| (!gone.contains(node)).then(|| target(node));
        names(&hold.update(&targets(wanted), staying, HOLD, start + Duration::from_secs(*seconds)))
    };
    steps.iter().map(update).collect()
}

#[test]
fn more_than_a_third_is_held_for_thirty_seconds() {
    let all = "abcdef";
    // A third is not held.
    assert_eq!(history(&[(0, all, ""), (1, "abcd", "")]), [all, "abcd"]);
    // More is, together, and no longer than 30 s.
    let steps = [(0, all, ""), (1, "abc", ""), (30, "abc", ""), (31, "abc", "")];
    assert_eq!(history(&steps), [all, all, all, "abc"]);
    // All at once.
    assert_eq!(history(&[(0, all, ""), (1, "", ""), (31, "", "")]), [all, all, ""]);
}

#[test]
fn removals_one_by_one_count_together() {
    let steps = [
        (0, "abcdef", ""),
        (1, "abcde", ""),
        (20, "abcd", ""),
        (40, "abc", ""),
        (69, "abc", ""),
        (70, "abc", ""),
    ];
    // The third one is too much, also when the first one is a minute ago.
    assert_eq!(history(&steps), ["abcdef", "abcde", "abcd", "abcd", "abcd", "abc"]);
    let steps = [(0, "abcdef", ""), (1, "abcd", ""), (62, "abc", ""), (123, "ab", "")];
    assert_eq!(history(&steps), ["abcdef", "abcd", "abc", "ab"], "slowly, all may leave");
    // Each is held from its own time on.
    let steps = [(0, "abcdef", ""), (1, "abc", ""), (11, "ab", ""), (31, "ab", ""), (41, "ab", "")];
    assert_eq!(history(&steps), ["abcdef", "abcdef", "abcdef", "abc", "ab"]);
}

#[test]
fn a_removal_that_is_taken_back_never_happens() {
    let steps = [(0, "abcdef", ""), (1, "abc", ""), (20, "abcdef", ""), (40, "abcde", "")];
    assert_eq!(history(&steps), ["abcdef", "abcdef", "abcdef", "abcde"]);
    // The last one does not leave because the others are back: they come back one by one.
    let steps = [(0, "abcdef", ""), (1, "abc", ""), (20, "abcde", ""), (30, "abcde", ""), (31, "abcde", "")];
    assert_eq!(history(&steps)[2..], ["abcdef", "abcdef", "abcde"]);
    // The time of a node that leaves again begins again.
    let steps = [(0, "abcd", ""), (1, "ab", ""), (20, "abcd", ""), (25, "ab", ""), (40, "ab", "")];
    assert_eq!(history(&steps)[4], "abcd");
}

#[test]
fn nodes_that_must_leave_do_so_at_once_and_do_not_count() {
    assert_eq!(history(&[(0, "abcdef", ""), (1, "a", "bcdef")]), ["abcdef", "a"]);
    assert_eq!(history(&[(0, "abcdef", ""), (1, "ab", "cde")]), ["abcdef", "ab"], "one of three can stay");
    assert_eq!(
        history(&[(0, "abcdef", ""), (1, "abc", ""), (2, "abc", "ef")])[2],
        "abcd",
        "one of four can stay, and is held already"
    );
}

#[test]
fn additions_are_never_held() {
    assert_eq!(
        history(&[(0, "abcdef", ""), (1, "abcx", ""), (31, "abcx", "")]),
        ["abcdef", "abcdefx", "abcx"]
    );
}

#[test]
fn small_sets_are_not_held() {
    assert_eq!(history(&[(0, "ab", ""), (1, "a", ""), (2, "", "")]), ["ab", "a", ""]);
    assert_eq!(history(&[(0, "abc", ""), (1, "ab", "")])[1], "ab", "a third of three");
    assert_eq!(history(&[(0, "abc", ""), (1, "a", "")])[1], "abc");
    // What has just left belongs to the set still.
    assert_eq!(history(&[(0, "abc", ""), (1, "ab", ""), (2, "a", "")])[2], "ab");
}

#[test]
fn nodes_that_leave_after_a_hold_are_reported_once() {
    let (mut hold, start) = (RemovalHold::default(), Instant::now());
    let mut left = |seconds, wanted, gone: &str| {
        let before = hold.clone();
        let staying = |node: &str| (!gone.contains(node)).then(|| target(node));
        hold.update(&targets(wanted), staying, HOLD, start + Duration::from_secs(seconds));
        hold.left_after(&before).join("")
    };
    let seen = [
        left(0, "abcdef", ""),
        left(1, "abc", ""),
        // One is back, and one is deleted.
        left(2, "abcd", "e"),
        left(31, "abcd", "e"),
        left(40, "abcd", "e"),
    ];
    assert_eq!(seen, ["", "", "", "f", ""], "also the only one that is left of a mass waits");
    let seen = [left(100, "abcdef", ""), left(101, "ab", ""), left(131, "ab", ""), left(132, "ab", "")];
    assert_eq!(seen, ["", "", "cdef", ""]);
}

#[test]
fn zero_disables() {
    let (mut hold, now) = (RemovalHold::default(), Instant::now());
    hold.update(&targets("abcdef"), |node| Some(target(node)), Duration::ZERO, now);
    let left = hold.update(&targets(""), |node| Some(target(node)), Duration::ZERO, now);
    assert_eq!((names(&left), hold.next_release()), (String::new(), None));
}

#[test]
fn a_held_node_is_the_target_that_it_is_now() {
    let (mut hold, now) = (RemovalHold::default(), Instant::now());
    hold.update(&targets("abc"), |_| None, HOLD, now);
    let moved = |node: &str| Some(Arc::new(Target { weight: 7, ..(*target(node)).clone() }));
    let held = hold.update(&targets("a"), moved, HOLD, now);
    assert_eq!(held.iter().map(|target| target.weight).collect::<Vec<_>>(), [1, 7, 7]);
    assert_eq!((hold.held().len(), hold.next_release()), (2, Some(now + HOLD)));
}

#[tokio::test(start_paused = true)]
async fn metrics_count_each_held_removal_once_and_show_the_sets_that_hold() {
    let metrics = HoldMetrics::default();
    let breaker = RemovalBreaker::new(HOLD, metrics.clone());
    let (set, mut hold) = (HoldingSet::Shared(SharedSet::Eligible), RemovalHold::default());
    let mut update = |wanted| {
        breaker.update(set, &mut hold, &targets(wanted), |node| Some(target(node)));
        metrics.held(set)
    };
    let mut seen = vec![update("abcdef"), update("abc"), update("abc"), update("ab")];
    tokio::time::advance(HOLD).await;
    seen.push(update("ab"));
    assert_eq!(seen, [(0, 0), (3, 1), (3, 1), (4, 1), (4, 0)]);
}

proptest! {
    #[test]
    fn every_history_keeps_the_promises(
        steps in proptest::collection::vec((0u64..40, any::<u16>(), any::<u8>()), 1..60),
    ) {
        const NODES: u32 = 12;
        let (mut hold, mut now) = (RemovalHold::default(), Instant::now());
        let (mut before, mut all_removals) = (BTreeSet::<String>::new(), Vec::<(Instant, String)>::new());
        // Since when each present node is not wanted.
        let mut unwanted = BTreeMap::<String, Instant>::new();
        for (seconds, wanted, gone) in steps {
            now += Duration::from_secs(seconds);
            let name = |number: u32| format!("{number:02}");
            // Nodes seldom go.
            let is_gone = |number: u32| gone > 200 && u32::from(gone) % NODES == number;
            let is_wanted = |number: u32| wanted & (1 << number) != 0 && !is_gone(number);
            let wanted: Arc<[Arc<Target>]> = (0..NODES).filter(|n| is_wanted(*n)).map(|n| target(&name(n))).collect();
            for number in 0..NODES {
                if is_wanted(number) || is_gone(number) || !before.contains(&name(number)) {
                    unwanted.remove(&name(number));
                } else {
                    unwanted.entry(name(number)).or_insert(now);
                }
            }
            let gone: BTreeSet<String> = (0..NODES).filter(|n| is_gone(*n)).map(name).collect();
            let staying = |node: &str| (!gone.contains(node)).then(|| target(node));
            let result = hold.update(&wanted, staying, HOLD, now);
            let after: BTreeSet<String> = result.iter().map(|target| target.node.clone()).collect();
            prop_assert!(result.is_sorted_by(|a, b| a.node < b.node));
            for target in wanted.iter() {
                prop_assert!(after.contains(&target.node), "{} is wanted", target.node);
            }
            for node in after.iter().filter(|node| !wanted.iter().any(|target| target.node == **node)) {
                prop_assert!(before.contains(node), "{node} was not there before");
                prop_assert!(!gone.contains(node), "{node} is gone");
                prop_assert!(now < unwanted[node] + HOLD, "{node} is held too long");
                prop_assert!(hold.held.contains_key(node) && hold.next_release().is_some_and(|at| at > now));
            }
            let lost: Vec<&String> = before.iter().filter(|node| unwanted.contains_key(*node)).collect();
            let members = lost.len() + wanted.len();
            if members >= SMALLEST_SET && lost.len() * 3 > members {
                for node in lost.into_iter().filter(|node| now < unwanted[*node] + HOLD) {
                    prop_assert!(after.contains(node), "{node} is not held");
                }
            }
            // Those that left before their time, within a minute, are a third at most.
            all_removals.retain(|(_, node)| !after.contains(node));
            let left: Vec<&String> = before.difference(&after).filter(|node| !gone.contains(*node)).collect();
            let early = left.iter().any(|node| now < unwanted[*node] + HOLD);
            all_removals.extend(left.into_iter().map(|node| (now, node.clone())));
            let recent = all_removals.iter().filter(|(at, _)| now < *at + WINDOW).count();
            let members = after.len() + recent;
            prop_assert!(!early || members < SMALLEST_SET || recent * 3 <= members, "{recent} of {members}");
            before = after;
        }
    }
}

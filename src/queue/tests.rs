// SPDX-License-Identifier: Apache-2.0
//! The queue's rules one by one, and a property over random histories.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// Numbered requests, so that a lost one is noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tickets(BTreeSet<u32>, bool);

impl Request for Tickets {
    fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
        self.1 |= other.1;
    }

    fn is_urgent(&self) -> bool {
        self.1
    }

    fn is_quick(&self) -> bool {
        self.1 && !self.0.contains(&CHANGE)
    }

    /// One of two.
    fn group(&self) -> &str {
        if self.0.first().is_some_and(|number| *number >= FLOOD) { "flood" } else { "usual" }
    }
}

fn ticket(number: u32) -> Tickets {
    Tickets([number].into(), false)
}

fn urgent(number: u32) -> Tickets {
    Tickets([number].into(), true)
}

const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_mins(1));
const SECOND: Duration = Duration::from_secs(1);

fn queue() -> (Queue<Tickets>, Instant) {
    (Queue::new(BACKOFF), Instant::now() + Duration::from_hours(1))
}

fn key(taken: Option<(String, Tickets)>) -> Option<String> {
    taken.map(|(key, _)| key)
}

/// A request with this ticket changes more than targets.
const CHANGE: u32 = 999;

/// Tickets from here on are of another group.
const FLOOD: u32 = 1000;

/// A tenant's thousand load balancers, or changes of endpoints, delay another tenant by one.
#[test]
fn groups_take_turns() {
    for is_urgent in [false, true] {
        let (mut queue, now) = queue();
        let request = |number: u32| Tickets([number].into(), is_urgent);
        for number in 0..FLOOD {
            queue.add(&format!("flood-{number:04}"), request(FLOOD + number), false, now);
        }
        let started = |queue: &mut Queue<Tickets>, at| queue.start_next(Which::All, at).unwrap().0;
        assert_eq!(started(&mut queue, now), "flood-0000");
        let later = now + SECOND;
        queue.add("a", request(1), false, later);
        queue.add("b", request(2), false, later);
        let mut order: Vec<_> = (0..5).map(|_| started(&mut queue, later)).collect();
        assert!(order.iter().take(3).any(|key| key == "a"), "{order:?}");
        order.sort_unstable();
        assert_eq!(order, ["a", "b", "flood-0001", "flood-0002", "flood-0003"]);
        assert_eq!(queue.depth(), 996);
    }
}

/// Tasks of a tenant that take long hold their workers. The next ones are of others until these have as many.
#[test]
fn group_with_few_running_tasks_is_next() {
    for is_urgent in [false, true] {
        let (mut queue, now) = queue();
        let request = |number: u32| Tickets([number].into(), is_urgent);
        for number in 0..FLOOD {
            queue.add(&format!("flood-{number:04}"), request(FLOOD + number), false, now);
        }
        for _ in 0..12 {
            queue.start_next(Which::All, now).expect("due");
        }
        let later = now + SECOND;
        for number in 0..20 {
            queue.add(&format!("usual-{number:02}"), request(number), false, later);
        }
        let groups: Vec<_> = (0..14).map(|_| queue.start_next(Which::All, later).expect("due").0).collect();
        assert!(groups[..12].iter().all(|key| key.starts_with("usual")), "{groups:?}");
        assert_eq!(
            groups[12..].iter().filter(|key| key.starts_with("usual")).count(),
            1,
            "as many: in turns"
        );
        // One that ends makes room for its group.
        queue.finish("flood-0000", ReconcileOutcome::Done, later, 1.0);
        queue.finish("flood-0001", ReconcileOutcome::Done, later, 1.0);
        assert!(queue.start_next(Which::All, later).expect("due").0.starts_with("flood"));
    }
}

/// An outage of the provider that lasted long must not keep a dead node for minutes after its end.
#[test]
fn backoff_of_urgent_requests_is_short() {
    let (mut queue, mut now) = queue();
    for (name, ticket, longest) in [("a", ticket(1), 60), ("b", urgent(2), 30)] {
        queue.add(name, ticket, false, now);
        for _ in 0..20 {
            let (_, request) = queue.start_next(Which::All, now).expect("due");
            queue.finish(name, ReconcileOutcome::Failed(None, request), now, 1.0);
            let due = queue.next_due(Which::All).expect("waits");
            assert!(due - now <= longest * SECOND, "{name}: {:?}", due - now);
            now = due;
        }
        let (_, request) = queue.start_next(Which::All, now).expect("due");
        queue.finish(name, ReconcileOutcome::Failed(None, request), now, 1.0);
        assert_eq!(queue.next_due(Which::All).map(|due| due - now), Some(longest * SECOND));
        let (name, _) = queue.start_next(Which::All, now + longest * SECOND).expect("due");
        queue.finish(&name, ReconcileOutcome::Done, now, 1.0);
    }
}

#[test]
fn a_key_runs_once_at_a_time_and_later_requests_run_after_it() {
    let (mut queue, now) = queue();
    queue.add("a", ticket(1), false, now);
    queue.add("a", ticket(2), false, now);
    assert_eq!(queue.start_next(Which::All, now), Some(("a".to_owned(), Tickets([1, 2].into(), false))));
    queue.add("a", ticket(3), false, now);
    assert_eq!(queue.start_next(Which::All, now), None, "it is running");
    queue.finish("a", ReconcileOutcome::Done, now, 1.0);
    assert_eq!(queue.start_next(Which::All, now), Some(("a".to_owned(), ticket(3))));
    queue.finish("a", ReconcileOutcome::Done, now, 1.0);
    assert_eq!(
        (queue.start_next(Which::All, now), queue.next_due(Which::All), queue.depth()),
        (None, None, 0)
    );
}

#[test]
fn failures_back_off_and_success_resets_the_backoff() {
    let (mut queue, mut now) = queue();
    queue.add("a", ticket(1), false, now);
    for expected in [100, 200, 400, 800] {
        let (_, request) = queue.start_next(Which::All, now).expect("due");
        queue.finish("a", ReconcileOutcome::Failed(None, request), now, 1.0);
        let due = queue.next_due(Which::All).expect("waits");
        assert_eq!(due - now, Duration::from_millis(expected));
        assert_eq!(queue.start_next(Which::All, due - Duration::from_millis(1)), None);
        now = due;
    }
    queue.start_next(Which::All, now).expect("due");
    queue.finish("a", ReconcileOutcome::Done, now, 1.0);
    queue.add("a", ticket(2), false, now);
    let (_, request) = queue.start_next(Which::All, now).expect("due");
    queue.finish("a", ReconcileOutcome::Failed(None, request), now, 0.0);
    assert_eq!(
        queue.next_due(Which::All),
        Some(now + Duration::from_millis(50)),
        "from the start, with minimal jitter"
    );
}

/// A provider takes a change, and says later that it failed: each try begins with a success.
#[test]
fn failures_after_a_success_that_was_not_the_end_back_off() {
    let (mut queue, mut now) = queue();
    queue.add("a", ticket(1), false, now);
    let next =
        |queue: &mut Queue<_>, now: &mut Instant, outcome: fn(Tickets) -> ReconcileOutcome<Tickets>| {
            let (_, request) = queue.start_next(Which::All, *now).expect("due");
            queue.finish("a", outcome(request), *now, 1.0);
            let due = queue.next_due(Which::All).expect("waits");
            (due - std::mem::replace(now, due)).as_millis()
        };
    let taken: fn(_) -> _ = |request| ReconcileOutcome::RequeueAfter(SECOND, request);
    let failed: fn(_) -> _ = |request| ReconcileOutcome::Failed(None, request);
    let unanswered: fn(_) -> _ = ReconcileOutcome::Unanswered;
    for (number, expected) in
        [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 25_600].into_iter().enumerate()
    {
        assert_eq!((next(&mut queue, &mut now, taken), next(&mut queue, &mut now, taken)), (1000, 1000));
        let outcome = if number % 2 == 0 { failed } else { unanswered };
        assert_eq!(next(&mut queue, &mut now, outcome), expected);
    }
    // A request does not wait for longer than the provider asked for.
    assert_eq!(next(&mut queue, &mut now, taken), 1000);
    queue.add("a", ticket(2), false, now - SECOND);
    assert_eq!(next(&mut queue, &mut now, failed), 25_600);
    // Another Service spec may be right.
    assert_eq!(next(&mut queue, &mut now, taken), 1000);
    queue.add("a", ticket(3), true, now);
    assert_eq!(next(&mut queue, &mut now, failed), 100);
    // And what failed long ago says nothing.
    for _ in 0..3 {
        next(&mut queue, &mut now, failed);
    }
    assert_eq!(next(&mut queue, &mut now, taken), 1000);
    now += REMEMBERED_FOR;
    assert_eq!(next(&mut queue, &mut now, failed), 100);
}

#[test]
fn waits_that_tasks_ask_for_do_not_add_to_the_backoff() {
    let (mut queue, mut now) = queue();
    queue.add("a", ticket(1), false, now);
    for after in std::iter::repeat_n(Some(SECOND), 20).chain([None]) {
        let (_, request) = queue.start_next(Which::All, now).expect("due");
        queue.finish("a", ReconcileOutcome::Failed(after, request), now, 1.0);
        let due = queue.next_due(Which::All).expect("waits");
        assert_eq!(due - now, after.unwrap_or(Duration::from_millis(200)));
        now = due;
    }
}

/// A new load balancer whose comparison was throttled for long must not keep a dead node; nor may each change of its endpoints cost a
/// call of a provider that refuses calls.
#[test]
fn a_request_that_becomes_urgent_is_tried_once_soon() {
    for wait in [None, Some(10 * SECOND)] {
        let (mut queue, now) = queue();
        queue.add("a", ticket(1), false, now);
        for _ in 0..10 {
            let (_, request) = queue.start_next(Which::All, now + 60 * SECOND).expect("due");
            queue.finish("a", ReconcileOutcome::Failed(wait, request), now, 1.0);
        }
        let due = queue.next_due(Which::All).expect("waits");
        assert!(due >= now + 10 * SECOND);
        queue.add("a", ticket(2), false, now);
        assert_eq!(queue.next_due(Which::All), Some(due), "not urgent");
        queue.add("a", urgent(3), false, now);
        assert_eq!(queue.next_due(Which::All), Some(now + SECOND));
        let (_, request) = queue.start_next(Which::All, now + SECOND).expect("due");
        queue.finish("a", ReconcileOutcome::Failed(Some(10 * SECOND), request), now, 1.0);
        queue.add("a", urgent(4), false, now);
        assert_eq!(queue.next_due(Which::All), Some(now + 10 * SECOND), "it was urgent before");
    }
}

#[test]
fn only_a_reset_ends_a_backoff_early() {
    let (mut queue, now) = queue();
    queue.add("a", urgent(1), false, now);
    let (_, request) = queue.start_next(Which::All, now).expect("due");
    queue.finish("a", ReconcileOutcome::Failed(Some(SECOND), request), now, 1.0);
    queue.add("a", urgent(2), false, now);
    assert_eq!(
        queue.start_next(Which::All, now),
        None,
        "a moved endpoint does not end the provider's throttling"
    );
    queue.add("a", ticket(3), true, now);
    assert_eq!(queue.start_next(Which::All, now), Some(("a".to_owned(), Tickets([1, 2, 3].into(), true))));
    queue.add("a", ticket(4), true, now);
    queue.finish("a", ReconcileOutcome::Failed(None, ticket(3)), now, 1.0);
    assert_eq!(
        queue.start_next(Which::All, now),
        Some(("a".to_owned(), Tickets([3, 4].into(), false))),
        "reset while it ran"
    );
}

#[test]
fn requeued_key_waits_unless_another_request_arrives() {
    let (mut queue, now) = queue();
    queue.add("a", ticket(1), false, now);
    let (_, request) = queue.start_next(Which::All, now).expect("due");
    queue.finish("a", ReconcileOutcome::RequeueAfter(SECOND, request), now, 1.0);
    assert_eq!(queue.next_due(Which::All), Some(now + SECOND));
    queue.add("a", ticket(2), false, now);
    assert_eq!(queue.start_next(Which::All, now), Some(("a".to_owned(), Tickets([1, 2].into(), false))));
}

#[test]
fn urgent_requests_pass_any_backlog_but_starve_no_other() {
    let (mut queue, now) = queue();
    for number in 0..100 {
        queue.add(&format!("slow{number}"), ticket(number), false, now);
    }
    let later = now + Duration::from_mins(10);
    for number in 0..100 {
        queue.add(&format!("fast{number}"), urgent(number), false, later);
    }
    let started: Vec<_> = (0..114).map(|_| key(queue.start_next(Which::All, later)).expect("due")).collect();
    let slow: Vec<_> =
        (0..).zip(&started).filter(|(_, key)| key.starts_with("slow")).map(|(turn, _)| turn).collect();
    assert_eq!(slow, (1..=14).map(|turn| turn * 8 - 1).collect::<Vec<_>>(), "{started:?}");
}

#[test]
fn others_wait_while_only_urgent_requests_may_start() {
    let (mut queue, now) = queue();
    queue.add("slow", ticket(0), false, now);
    assert_eq!((queue.start_next(Which::Quick, now), queue.next_due(Which::Quick)), (None, None));
    queue.add("slow", urgent(1), false, now);
    assert_eq!(queue.next_due(Which::Quick), Some(now));
    assert_eq!(key(queue.start_next(Which::Quick, now)).as_deref(), Some("slow"), "it became urgent");
    queue.add("later", ticket(2), false, now);
    let (_, request) = queue.start_next(Which::All, now).expect("due");
    queue.finish("later", ReconcileOutcome::RequeueAfter(SECOND, request), now, 1.0);
    assert_eq!(queue.next_due(Which::Quick), Some(now + SECOND), "nobody knows yet that it is not urgent");
    assert_eq!(queue.start_next(Which::Quick, now + SECOND), None);
    assert_eq!(queue.next_due(Which::Quick), None);
}

/// Fails all of these keys until they wait for a minute.
fn wait_for_provider(queue: &mut Queue<Tickets>, now: Instant, keys: &[(&str, u32)]) -> Instant {
    let mut now = now;
    for (key, number) in keys {
        queue.add(key, ticket(*number), false, now);
    }
    for _ in 0..12 {
        while let Some((key, request)) = queue.start_next(Which::All, now) {
            queue.finish(&key, ReconcileOutcome::Unanswered(request), now, 1.0);
        }
        now += 60 * SECOND;
    }
    while let Some((key, request)) = queue.start_next(Which::All, now) {
        queue.finish(&key, ReconcileOutcome::Unanswered(request), now, 1.0);
    }
    assert_eq!(queue.next_due(Which::All), Some(now + 60 * SECOND));
    now
}

/// Each success of one brings two others, of which a tenant's many are not first.
#[test]
fn provider_that_answers_again_ends_waits_in_growing_numbers_and_in_turns() {
    let (mut queue, now) = queue();
    let keys: Vec<(String, u32)> = (0..100)
        .map(|number| (format!("flood-{number:03}"), FLOOD + number))
        .chain([("usual-0".to_owned(), 0), ("usual-1".to_owned(), 1)])
        .collect();
    let keys: Vec<(&str, u32)> = keys.iter().map(|(key, number)| (key.as_str(), *number)).collect();
    let mut now = wait_for_provider(&mut queue, now, &keys);
    queue.provider_answers(1, now, || 0.5);
    let mut all = Vec::new();
    for expected in [2, 4, 8, 16, 32, 40, 0] {
        assert_eq!(key(queue.start_next(Which::All, now)), None, "spread");
        now += SECOND;
        let started: Vec<String> = std::iter::from_fn(|| key(queue.start_next(Which::All, now))).collect();
        assert_eq!(started.len(), expected, "{all:?}");
        for key in &started {
            queue.finish(key, ReconcileOutcome::Done, now, 1.0);
        }
        queue.provider_answers(started.len(), now, || 0.5);
        all.extend(started);
    }
    assert!(all[..4].contains(&"usual-0".to_owned()) && all[..4].contains(&"usual-1".to_owned()), "{all:?}");
}

/// One that is released and fails waits as long as before, and so do failures of other kinds.
#[test]
fn wait_that_ended_early_is_not_shorter_the_next_time() {
    let (mut queue, now) = queue();
    let now = wait_for_provider(&mut queue, now, &[("a", 1), ("b", 2), ("c", 3)]);
    queue.add("other", ticket(4), false, now);
    let (_, request) = queue.start_next(Which::All, now).expect("due");
    queue.finish("other", ReconcileOutcome::Failed(Some(30 * SECOND), request), now, 1.0);
    queue.provider_answers(1, now, || 0.0);
    for expected in ["a", "b"] {
        let (found, request) = queue.start_next(Which::All, now).expect("released");
        assert_eq!(found, expected);
        let later = now + SECOND;
        queue.finish(&found, ReconcileOutcome::Unanswered(request), later, 1.0);
        let due = queue.slots.get(&found).map(|slot| match slot.state {
            SlotState::Waiting { due, .. } => due,
            SlotState::Running { .. } => later,
        });
        // It began when the provider seemed to answer, so it is tried once more.
        assert_eq!(due, Some(later + RELEASE_SPREAD));
    }
    assert_eq!(key(queue.start_next(Which::All, now)), None);
    let now = now + 3 * SECOND;
    for expected in ["a", "b"] {
        let (found, request) = queue.start_next(Which::All, now).expect("tried once more");
        assert_eq!(found, expected);
        queue.finish(&found, ReconcileOutcome::Unanswered(request), now, 1.0);
    }
    assert_eq!(queue.next_due(Which::All), Some(now + 27 * SECOND), "the other failure");
}

/// In a partial outage others are answered all the time, which does not help one that never is.
#[test]
fn one_that_is_never_answered_keeps_its_backoff_while_others_are() {
    let (mut queue, start) = queue();
    let mut now = start;
    queue.add("down", ticket(1), false, now);
    let mut tries = 0;
    while now < start + 600 * SECOND {
        if let Some((key, request)) = queue.start_next(Which::All, now) {
            tries += 1;
            queue.provider_answers(0, now, || 0.5);
            queue.finish(&key, ReconcileOutcome::Unanswered(request), now, 1.0);
        }
        now += SECOND;
    }
    assert!((10..30).contains(&tries), "{tries} tries in ten minutes");
    queue.add("down", ticket(1), true, now);
    let (key, request) = queue.start_next(Which::All, now).expect("due");
    queue.finish(&key, ReconcileOutcome::RequeueAfter(SECOND, request), now, 1.0);
    let (key, request) = queue.start_next(Which::All, now + SECOND).expect("due");
    queue.provider_answers(0, now + SECOND, || 0.5);
    queue.finish(&key, ReconcileOutcome::Unanswered(request), now + SECOND, 1.0);
    assert_eq!(queue.next_due(Which::All), Some(now + SECOND + RELEASE_SPREAD), "it succeeded in between");
}

#[derive(Clone, Debug)]
enum Step {
    Add { key: u8, urgent: bool, reset: bool },
    Take,
    Answer,
    Finish { index: u8, outcome: u8 },
    Pass { milliseconds: u16 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u8..4, any::<bool>(), any::<bool>()).prop_map(|(key, urgent, reset)| Step::Add {
            key,
            urgent,
            reset
        }),
        Just(Step::Take),
        Just(Step::Answer),
        (any::<u8>(), 0u8..4).prop_map(|(index, outcome)| Step::Finish { index, outcome }),
        (0u16..500).prop_map(|milliseconds| Step::Pass { milliseconds }),
    ]
}

proptest! {
    #[test]
    fn no_key_runs_twice_at_once_and_no_request_is_lost(steps in proptest::collection::vec(step(), 1..200)) {
        let (mut queue, mut now) = queue();
        let mut running: Vec<(String, Tickets)> = Vec::new();
        let (mut asked, mut done) = (BTreeSet::new(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Add { key, urgent, reset } => {
                    let number = u32::try_from(asked.len()).expect("few");
                    asked.insert(number);
                    queue.add(&key.to_string(), Tickets([number].into(), urgent), reset, now);
                }
                Step::Take => if let Some((key, request)) = queue.start_next(Which::All, now) {
                    prop_assert!(running.iter().all(|(other, _)| *other != key), "{key} runs twice");
                    running.push((key, request));
                },
                Step::Answer => queue.provider_answers(1, now, || 0.5),
                Step::Finish { index, outcome } => {
                    if running.is_empty() { continue }
                    let (key, request) = running.swap_remove(usize::from(index) % running.len());
                    let outcome = match outcome {
                        0 => { done.extend(request.0); ReconcileOutcome::Done }
                        1 => ReconcileOutcome::RequeueAfter(SECOND, request),
                        2 => ReconcileOutcome::Unanswered(request),
                        _ => ReconcileOutcome::Failed(None, request),
                    };
                    queue.finish(&key, outcome, now, 0.5);
                }
                Step::Pass { milliseconds } => now += Duration::from_millis(u64::from(milliseconds)),
            }
        }
        for (key, request) in running.drain(..) {
            done.extend(request.0);
            queue.finish(&key, ReconcileOutcome::Done, now, 0.5);
        }
        while let Some(due) = queue.next_due(Which::All) {
            now = now.max(due);
            let (key, request) = queue.start_next(Which::All, now).expect("due");
            done.extend(request.0);
            queue.finish(&key, ReconcileOutcome::Done, now, 0.5);
        }
        prop_assert_eq!(asked, done);
        prop_assert_eq!(queue.depth(), 0);
    }
}

/// A tenant whose endpoints move all the time must not keep the dead nodes of a Service that is changed.
#[test]
fn urgent_changes_take_turns_with_quick_requests() {
    let (mut queue, now) = queue();
    for number in 0..100 {
        queue.add(&format!("quick{number}"), urgent(number), false, now);
    }
    let later = now + SECOND;
    queue.add("change", urgent(CHANGE), false, later);
    let started: Vec<_> = (0..4).map(|_| key(queue.start_next(Which::All, later)).expect("due")).collect();
    assert!(started.contains(&"change".to_owned()), "{started:?}");
}

/// Those that change more than targets may hang: they pass others, and leave workers to those that do not.
#[test]
fn urgent_changes_start_before_others_and_on_no_reserved_worker() {
    let (mut queue, now) = queue();
    queue.add("normal", ticket(1), false, now);
    queue.add("change", urgent(CHANGE), false, now);
    assert_eq!((queue.start_next(Which::Quick, now), queue.next_due(Which::Quick)), (None, None));
    queue.add("quick", urgent(2), false, now + SECOND);
    queue.add("becomes", urgent(3), false, now);
    queue.add("becomes", ticket(CHANGE), false, now);
    assert_eq!(queue.depth(), 4);
    assert_eq!(key(queue.start_next(Which::Quick, now + SECOND)).as_deref(), Some("quick"));
    assert_eq!(queue.start_next(Which::Quick, now + SECOND), None);
    let rest: Vec<_> = std::iter::from_fn(|| key(queue.start_next(Which::All, now + SECOND))).collect();
    assert_eq!(rest, ["becomes", "change", "normal"]);
}

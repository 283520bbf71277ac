// SPDX-License-Identifier: Apache-2.0
//! The rules one by one, and a property over random histories.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// Numbers of what was asked for, so that nothing can get lost unseen.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tickets(BTreeSet<u32>, bool);

impl QueueItem for Tickets {
    fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
        self.1 |= other.1;
    }

    fn urgent(&self) -> bool {
        self.1
    }
}

fn ticket(number: u32) -> Tickets {
    Tickets([number].into(), false)
}

fn urgent(number: u32) -> Tickets {
    Tickets([number].into(), true)
}

const BACKOFF: Backoff = Backoff { least: Duration::from_millis(100), most: Duration::from_mins(1) };
const SECOND: Duration = Duration::from_secs(1);

fn queue() -> (Queue<Tickets>, Instant) {
    (Queue::new(BACKOFF), Instant::now() + Duration::from_hours(1))
}

fn unit(taken: Option<(String, Tickets)>) -> Option<String> {
    taken.map(|(unit, _)| unit)
}

#[test]
fn a_unit_runs_once_at_a_time_and_what_comes_meanwhile_runs_after() {
    let (mut queue, now) = queue();
    queue.add("a", ticket(1), false, now);
    queue.add("a", ticket(2), false, now);
    assert_eq!(queue.take(now), Some(("a".to_owned(), Tickets([1, 2].into(), false))));
    queue.add("a", ticket(3), false, now);
    assert_eq!(queue.take(now), None, "it is running");
    queue.finish("a", TaskOutcome::Done, now, 1.0);
    assert_eq!(queue.take(now), Some(("a".to_owned(), ticket(3))));
    queue.finish("a", TaskOutcome::Done, now, 1.0);
    assert_eq!((queue.take(now), queue.next_due(), queue.waiting()), (None, None, 0));
}

#[test]
fn failures_back_off_and_success_forgets_them() {
    let (mut queue, mut now) = queue();
    queue.add("a", ticket(1), false, now);
    for expected in [100, 200, 400, 800] {
        let (_, work) = queue.take(now).expect("due");
        queue.finish("a", TaskOutcome::Failed(None, work), now, 1.0);
        let due = queue.next_due().expect("waits");
        assert_eq!(due - now, Duration::from_millis(expected));
        assert_eq!(queue.take(due - Duration::from_millis(1)), None);
        now = due;
    }
    queue.take(now).expect("due");
    queue.finish("a", TaskOutcome::Done, now, 1.0);
    queue.add("a", ticket(2), false, now);
    let (_, work) = queue.take(now).expect("due");
    queue.finish("a", TaskOutcome::Failed(None, work), now, 0.0);
    assert_eq!(
        queue.next_due(),
        Some(now + Duration::from_millis(50)),
        "from the start, with the least jitter"
    );
}

#[test]
fn only_fresh_work_breaks_into_a_wait() {
    let (mut queue, now) = queue();
    queue.add("a", ticket(1), false, now);
    let (_, work) = queue.take(now).expect("due");
    queue.finish("a", TaskOutcome::Failed(Some(SECOND), work), now, 1.0);
    queue.add("a", urgent(2), false, now);
    assert_eq!(queue.take(now), None, "an endpoint that moves does not make a provider's throttling go away");
    queue.add("a", ticket(3), true, now);
    assert_eq!(queue.take(now), Some(("a".to_owned(), Tickets([1, 2, 3].into(), true))));
    queue.add("a", ticket(4), true, now);
    queue.finish("a", TaskOutcome::Failed(None, ticket(3)), now, 1.0);
    assert_eq!(queue.take(now), Some(("a".to_owned(), Tickets([3, 4].into(), false))), "fresh while it ran");
}

#[test]
fn what_asks_to_come_again_waits_unless_there_is_more() {
    let (mut queue, now) = queue();
    queue.add("a", ticket(1), false, now);
    let (_, work) = queue.take(now).expect("due");
    queue.finish("a", TaskOutcome::Again(SECOND, work), now, 1.0);
    assert_eq!(queue.next_due(), Some(now + SECOND));
    queue.add("a", ticket(2), false, now);
    assert_eq!(queue.take(now), Some(("a".to_owned(), Tickets([1, 2].into(), false))));
}

#[test]
fn the_urgent_goes_first_but_starves_nobody() {
    let (mut queue, now) = queue();
    queue.add("slow", ticket(0), false, now);
    queue.add("fast", urgent(1), false, now);
    assert_eq!(unit(queue.take(now)).as_deref(), Some("fast"));
    queue.finish("fast", TaskOutcome::Done, now, 1.0);
    for number in 2.. {
        let later = now + Duration::from_millis(100) * number;
        queue.add("fast", urgent(number), false, later);
        let taken = unit(queue.take(later)).expect("due");
        queue.finish(&taken, TaskOutcome::Done, later, 1.0);
        if taken == "slow" {
            break;
        }
        assert!(later < now + PATIENCE * 2, "starved");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add { unit: u8, urgent: bool, fresh: bool },
    Take,
    Finish { index: u8, outcome: u8 },
    Pass { milliseconds: u16 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u8..4, any::<bool>(), any::<bool>()).prop_map(|(unit, urgent, fresh)| Step::Add {
            unit,
            urgent,
            fresh
        }),
        Just(Step::Take),
        (any::<u8>(), 0u8..3).prop_map(|(index, outcome)| Step::Finish { index, outcome }),
        (0u16..500).prop_map(|milliseconds| Step::Pass { milliseconds }),
    ]
}

proptest! {
    #[test]
    fn nothing_runs_twice_at_once_and_nothing_is_lost(steps in proptest::collection::vec(step(), 1..200)) {
        let (mut queue, mut now) = queue();
        let mut running: Vec<(String, Tickets)> = Vec::new();
        let (mut asked, mut done) = (BTreeSet::new(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Add { unit, urgent, fresh } => {
                    let number = u32::try_from(asked.len()).expect("few");
                    asked.insert(number);
                    queue.add(&unit.to_string(), Tickets([number].into(), urgent), fresh, now);
                }
                Step::Take => if let Some((unit, work)) = queue.take(now) {
                    prop_assert!(running.iter().all(|(other, _)| *other != unit), "{unit} runs twice");
                    running.push((unit, work));
                },
                Step::Finish { index, outcome } => {
                    if running.is_empty() { continue }
                    let (unit, work) = running.swap_remove(usize::from(index) % running.len());
                    let outcome = match outcome {
                        0 => { done.extend(work.0); TaskOutcome::Done }
                        1 => TaskOutcome::Again(SECOND, work),
                        _ => TaskOutcome::Failed(None, work),
                    };
                    queue.finish(&unit, outcome, now, 0.5);
                }
                Step::Pass { milliseconds } => now += Duration::from_millis(u64::from(milliseconds)),
            }
        }
        for (unit, work) in running.drain(..) {
            done.extend(work.0);
            queue.finish(&unit, TaskOutcome::Done, now, 0.5);
        }
        while let Some(due) = queue.next_due() {
            now = now.max(due);
            let (unit, work) = queue.take(now).expect("due");
            done.extend(work.0);
            queue.finish(&unit, TaskOutcome::Done, now, 0.5);
        }
        prop_assert_eq!(asked, done);
        prop_assert_eq!(queue.waiting(), 0);
    }
}

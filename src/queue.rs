// SPDX-License-Identifier: Apache-2.0
//! The keyed queue of requests: at most one task per key, requests for the same key are merged, failures back off.
//!
//! Pure: the caller passes the time and the jitter. [`crate::request_queue`] shares it between the watches and the workers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_watch::Backoff;
use tokio::time::Instant;

use self::turns::Turns;

mod turns;

/// A request that becomes urgent waits no longer than this for a repetition, however long the one that was not was to wait.
const URGENT_WAIT: Duration = Duration::from_secs(1);
/// An urgent request that failed waits no longer than this.
const URGENT_BACKOFF: Duration = Duration::from_secs(30);
/// What fails only some time after the provider has taken it begins with a success each time. So failures still count for this time
/// after such a success,
const REMEMBERED_FOR: Duration = Duration::from_mins(5);
/// and so many of them at most: half a minute, since they may have been of another kind.
const MOST_REMEMBERED: u32 = 8;
/// Of so many tasks that start while others wait too, one is not urgent: nothing starves.
const NORMAL_EVERY: u32 = 8;
/// Of keys that wait for a provider that answers again, each is tried within this time, at random.
const RELEASE_SPREAD: Duration = Duration::from_secs(2);
/// Keys that are released by each call that the provider answers again.
const RELEASED_BY_EACH: usize = 2;

/// What the queue holds for a key.
pub(crate) trait Request {
    /// Adds another request for the same key, so that this one stands for both.
    fn merge(&mut self, other: Self);
    /// Whether this request passes those that are not urgent.
    fn is_urgent(&self) -> bool;
    /// Whether it is urgent and changes only targets. What else changes can wait for the provider for long.
    fn is_quick(&self) -> bool;
    /// Requests of different groups take turns.
    fn group(&self) -> &str;
}

/// Which requests may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// Only those that are [quick](Request::is_quick).
    Quick,
}

/// The result of a task, with the request to repeat where there is one.
#[derive(Debug)]
pub(crate) enum ReconcileOutcome<R> {
    Done,
    /// Not complete; repeat after this time.
    RequeueAfter(Duration, R),
    /// Failed; repeat after this time, or after the backoff if none is given.
    Failed(Option<Duration>, R),
    /// Failed because the provider does not answer; repeat after the backoff, or when it answers again.
    Unanswered(R),
}

/// Failures before the last task, which did not fail and was not complete.
#[derive(Clone, Copy, Debug)]
struct EarlierFailures {
    count: u32,
    until: Instant,
}

#[derive(Debug)]
struct Slot<R> {
    group: String,
    state: SlotState<R>,
    failures: u32,
    earlier: Option<EarlierFailures>,
    /// Whether it waits for the provider to answer.
    is_unanswered: bool,
    /// Whether it was tried soon after a failure, because the provider answered others. Until it succeeds, that is no reason any more.
    is_hurried: bool,
}

#[derive(Debug)]
enum SlotState<R> {
    Waiting { due: Instant, request: R },
    Running { next: Option<R>, reset_backoff: bool, began: Instant },
}

/// What a slot that waits is made of.
struct Waiting<R> {
    group: String,
    due: Instant,
    request: R,
    failures: u32,
    earlier: Option<EarlierFailures>,
    is_unanswered: bool,
    is_hurried: bool,
}

#[derive(Debug)]
pub(crate) struct Queue<R> {
    slots: BTreeMap<String, Slot<R>>,
    /// What is urgent and quick.
    quick: Turns,
    /// What else is urgent.
    urgent: Turns,
    normal: Turns,
    /// The number of running tasks of each group that has some.
    running: BTreeMap<String, usize>,
    /// What is not due yet, when it was added.
    delayed: BTreeSet<(Instant, String)>,
    /// What of it waits for the provider to answer.
    unanswered: Turns,
    /// When the provider last answered again.
    answered: Option<Instant>,
    /// Urgent tasks that started since one that is not, while such a one waited.
    passed: u32,
    /// Whether the last task that was urgent was quick, while one that was not waited. They take turns: dead nodes are targets of both.
    was_quick: bool,
    backoff: Backoff,
    /// The same for urgent requests: clients use their targets, which nothing else changes meanwhile.
    urgent_backoff: Backoff,
}

/// Where a request waits that is due.
fn turns_of<'a>(
    request: &impl Request,
    quick: &'a mut Turns,
    urgent: &'a mut Turns,
    normal: &'a mut Turns,
) -> &'a mut Turns {
    match (request.is_quick(), request.is_urgent()) {
        (true, _) => quick,
        (false, true) => urgent,
        (false, false) => normal,
    }
}

impl<R: Request> Queue<R> {
    pub(crate) fn new(backoff: Backoff) -> Self {
        let (slots, quick, urgent, normal, unanswered) = Default::default();
        let (running, delayed, answered) = Default::default();
        let urgent_backoff = backoff.at_most(URGENT_BACKOFF);
        Self {
            slots,
            quick,
            urgent,
            normal,
            running,
            delayed,
            unanswered,
            answered,
            passed: 0,
            was_quick: false,
            backoff,
            urgent_backoff,
        }
    }

    /// The number of keys that are due and wait for a worker.
    pub(crate) fn depth(&self) -> usize {
        self.quick.len() + self.urgent.len() + self.normal.len()
    }

    /// Removes what waits. Only for a queue without running tasks.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.backoff);
    }

    /// Adds a request. A key in backoff keeps its delay unless `reset_backoff`, since the cause of the failure may be gone, or unless the
    /// request becomes urgent: then it is tried once soon.
    pub(crate) fn add(&mut self, key: &str, request: R, reset_backoff: bool, now: Instant) {
        match self.slots.get_mut(key).map(|slot| &mut slot.state) {
            Some(SlotState::Running { next, reset_backoff: reset, .. }) => {
                *reset |= reset_backoff;
                match next {
                    Some(next) => next.merge(request),
                    None => *next = Some(request),
                }
            }
            Some(SlotState::Waiting { .. }) => {
                let Some(mut waiting) = self.remove_waiting(key) else { return };
                let was_urgent = waiting.request.is_urgent();
                waiting.request.merge(request);
                if reset_backoff {
                    waiting.earlier = None;
                }
                if reset_backoff || waiting.failures == 0 {
                    (waiting.due, waiting.failures) = (waiting.due.min(now), 0);
                } else if !was_urgent && waiting.request.is_urgent() {
                    waiting.due = waiting.due.min(now + URGENT_WAIT);
                }
                self.insert_waiting(key, waiting, now);
            }
            None => {
                let group = request.group().to_owned();
                let waiting = Waiting {
                    group,
                    due: now,
                    request,
                    failures: 0,
                    earlier: None,
                    is_unanswered: false,
                    is_hurried: false,
                };
                self.insert_waiting(key, waiting, now);
            }
        }
    }

    /// The next key that is due, of those that `which` allows. It counts as running until [`Queue::finish`].
    pub(crate) fn start_next(&mut self, which: Which, now: Instant) -> Option<(String, R)> {
        self.promote(now);
        let of_all = |turns: &Turns| which == Which::All && turns.first().is_some();
        let (has_urgent, has_normal) = (of_all(&self.urgent), of_all(&self.normal));
        let has_quick = self.quick.first().is_some();
        let is_passed = has_normal && (has_urgent || has_quick);
        let turns = if has_normal && (!is_passed || self.passed + 1 >= NORMAL_EVERY) {
            self.passed = 0;
            &mut self.normal
        } else {
            self.passed += u32::from(is_passed);
            let is_quicks_turn = has_quick && !(has_urgent && self.was_quick);
            if has_quick && has_urgent {
                self.was_quick = is_quicks_turn;
            }
            if is_quicks_turn || !has_urgent { &mut self.quick } else { &mut self.urgent }
        };
        let key = turns.first()?.to_owned();
        turns.end_turn();
        let Waiting { group, request, failures, earlier, is_hurried, .. } = self.remove_waiting(&key)?;
        let state = SlotState::Running { next: None, reset_backoff: false, began: now };
        self.count_running(&group, |running| running + 1);
        let slot = Slot { group, state, failures, earlier, is_unanswered: false, is_hurried };
        self.slots.insert(key.clone(), slot);
        Some((key, request))
    }

    fn count_running(&mut self, group: &str, change: impl FnOnce(usize) -> usize) {
        let running = change(self.running_of(group));
        if running == 0 {
            self.running.remove(group);
        } else {
            self.running.insert(group.to_owned(), running);
        }
        self.quick.set_running(group, running);
        self.urgent.set_running(group, running);
        self.normal.set_running(group, running);
        self.unanswered.set_running(group, running);
    }

    fn running_of(&self, group: &str) -> usize {
        self.running.get(group).copied().unwrap_or_default()
    }

    /// Records the end of a key's task.
    pub(crate) fn finish(&mut self, key: &str, outcome: ReconcileOutcome<R>, now: Instant, jitter: f64) {
        let Some(slot) = self.slots.remove(key) else { return };
        let Slot { group, state, failures, earlier, mut is_hurried, .. } = slot;
        let SlotState::Running { next, reset_backoff, began } = state else { return };
        let remembered = earlier.filter(|earlier| earlier.until > now && !reset_backoff);
        let is_progress = matches!(outcome, ReconcileOutcome::RequeueAfter(..)) && !reset_backoff;
        let earlier = if is_progress && failures > 0 {
            Some(EarlierFailures { count: failures.min(MOST_REMEMBERED), until: now + REMEMBERED_FOR })
        } else {
            remembered
        };
        let failures = remembered.map_or(failures, |earlier| failures.max(earlier.count));
        self.count_running(&group, |running| running.saturating_sub(1));
        let is_unanswered = matches!(outcome, ReconcileOutcome::Unanswered(_));
        let (mut request, delay, failures) = match (outcome, next.is_some()) {
            (ReconcileOutcome::Done, _) => {
                if let Some(next) = next {
                    let waiting = Waiting {
                        group,
                        due: now,
                        request: next,
                        failures: 0,
                        earlier: None,
                        is_unanswered,
                        is_hurried: false,
                    };
                    self.insert_waiting(key, waiting, now);
                }
                return;
            }
            (ReconcileOutcome::RequeueAfter(after, request), has_next) => {
                is_hurried = false;
                (request, if has_next { Duration::ZERO } else { after }, 0)
            }
            (ReconcileOutcome::Failed(_, request) | ReconcileOutcome::Unanswered(request), true)
                if reset_backoff =>
            {
                (request, Duration::ZERO, 0)
            }
            // It began before the provider answered others again.
            (ReconcileOutcome::Unanswered(request), _)
                if !is_hurried && self.answered.is_some_and(|at| at >= began) =>
            {
                is_hurried = true;
                (request, RELEASE_SPREAD.mul_f64(jitter), failures.saturating_add(1))
            }
            (ReconcileOutcome::Failed(after, request), _) => {
                // A wait that the task asks for says nothing about the next failure.
                let failures = if after.is_some() { failures.max(1) } else { failures.saturating_add(1) };
                let delay = after.unwrap_or_else(|| self.delay(&request, failures, jitter));
                (request, delay, failures)
            }
            (ReconcileOutcome::Unanswered(request), _) => {
                let failures = failures.saturating_add(1);
                let delay = self.delay(&request, failures, jitter);
                (request, delay, failures)
            }
        };
        if let Some(next) = next {
            request.merge(next);
        }
        let due = now + delay;
        let waiting = Waiting { group, due, request, failures, earlier, is_unanswered, is_hurried };
        self.insert_waiting(key, waiting, now);
    }

    fn delay(&self, request: &R, failures: u32, jitter: f64) -> Duration {
        let backoff = if request.is_urgent() { self.urgent_backoff } else { self.backoff };
        backoff.delay(failures, jitter)
    }

    /// The provider answers so many calls of which the last try had no answer. Ends the waits of two keys for each: if they succeed,
    /// others follow.
    pub(crate) fn provider_answers(&mut self, calls: usize, now: Instant, mut jitter: impl FnMut() -> f64) {
        self.answered = Some(now);
        for _ in 0..calls.saturating_mul(RELEASED_BY_EACH) {
            let Some(key) = self.unanswered.first().map(str::to_owned) else { return };
            self.unanswered.end_turn();
            let Some(mut waiting) = self.remove_waiting(&key) else { return };
            waiting.is_unanswered = false;
            waiting.due = waiting.due.min(now + RELEASE_SPREAD.mul_f64(jitter()));
            self.insert_waiting(&key, waiting, now);
        }
    }

    /// When the next key is due, of those that `which` allows, or may be.
    pub(crate) fn next_due(&self, which: Which) -> Option<Instant> {
        let others = [&self.urgent, &self.normal].into_iter().filter(|_| which == Which::All);
        let due = [&self.quick].into_iter().chain(others).filter_map(Turns::first_due);
        due.chain(self.delayed.first().map(|(due, _)| *due)).min()
    }

    /// Moves what has become due to the others that wait for a worker.
    fn promote(&mut self, now: Instant) {
        while let Some((due, key)) = self.delayed.pop_first() {
            if due > now {
                self.delayed.insert((due, key));
                return;
            }
            let Some(Slot { group, state: SlotState::Waiting { request, .. }, .. }) = self.slots.get(&key)
            else {
                continue;
            };
            let turns = turns_of(request, &mut self.quick, &mut self.urgent, &mut self.normal);
            let running = self.running.get(group).copied().unwrap_or_default();
            turns.insert(group, running, due, &key);
            self.unanswered.remove(group, due, &key);
        }
    }

    fn insert_waiting(&mut self, key: &str, waiting: Waiting<R>, now: Instant) {
        let Waiting { group, due, request, failures, earlier, is_unanswered, is_hurried } = waiting;
        let running = self.running_of(&group);
        if due > now {
            self.delayed.insert((due, key.to_owned()));
            if is_unanswered {
                self.unanswered.insert(&group, running, due, key);
            }
        } else {
            let turns = turns_of(&request, &mut self.quick, &mut self.urgent, &mut self.normal);
            turns.insert(&group, running, due, key);
        }
        let state = SlotState::Waiting { due, request };
        let slot = Slot { group, state, failures, earlier, is_unanswered, is_hurried };
        self.slots.insert(key.to_owned(), slot);
    }

    fn remove_waiting(&mut self, key: &str) -> Option<Waiting<R>> {
        let Slot { group, state, failures, earlier, is_unanswered, is_hurried } = self.slots.remove(key)?;
        let SlotState::Waiting { due, request } = state else { return None };
        let turns = turns_of(&request, &mut self.quick, &mut self.urgent, &mut self.normal);
        let _ = turns.remove(&group, due, key) || self.delayed.remove(&(due, key.to_owned()));
        self.unanswered.remove(&group, due, key);
        Some(Waiting { group, due, request, failures, earlier, is_unanswered, is_hurried })
    }
}

#[cfg(test)]
mod tests;

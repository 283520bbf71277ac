// SPDX-License-Identifier: Apache-2.0
//! The keyed queue of requests: at most one task per key, requests for the same key are merged, failures back off.
//!
//! Pure: the caller passes the time and the jitter. [`crate::request_queue`] shares it between the watches and the workers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_watch::Backoff;
use tokio::time::Instant;

/// Of so many tasks that start while others wait too, one is not urgent: nothing starves.
const NORMAL_EVERY: u32 = 8;

/// What the queue holds for a key.
pub(crate) trait Request {
    /// Adds another request for the same key, so that this one stands for both.
    fn merge(&mut self, other: Self);
    /// Whether this request passes those that are not urgent.
    fn is_urgent(&self) -> bool;
}

/// Which requests may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    Urgent,
}

/// The result of a task, with the request to repeat where there is one.
#[derive(Debug)]
pub(crate) enum ReconcileOutcome<R> {
    Done,
    /// Not complete; repeat after this time.
    RequeueAfter(Duration, R),
    /// Failed; repeat after this time, or after the backoff if none is given.
    Failed(Option<Duration>, R),
}

#[derive(Debug)]
struct Slot<R> {
    state: SlotState<R>,
    failures: u32,
}

#[derive(Debug)]
enum SlotState<R> {
    Waiting { due: Instant, request: R },
    Running { next: Option<R>, reset_backoff: bool },
}

#[derive(Debug)]
pub(crate) struct Queue<R> {
    slots: BTreeMap<String, Slot<R>>,
    urgent: BTreeSet<(Instant, String)>,
    normal: BTreeSet<(Instant, String)>,
    /// What is not due yet, when it was added.
    delayed: BTreeSet<(Instant, String)>,
    /// Urgent tasks that started since one that is not, while such a one waited.
    passed: u32,
    backoff: Backoff,
}

impl<R: Request> Queue<R> {
    pub(crate) fn new(backoff: Backoff) -> Self {
        let (urgent, normal, delayed) = Default::default();
        Self { slots: BTreeMap::new(), urgent, normal, delayed, passed: 0, backoff }
    }

    /// The number of keys that are due and wait for a worker.
    pub(crate) fn depth(&self) -> usize {
        self.urgent.len() + self.normal.len()
    }

    /// Removes what waits. Only for a queue without running tasks.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.backoff);
    }

    /// Adds a request. A key in backoff keeps its delay unless `reset_backoff`: the cause of the failure may be gone.
    pub(crate) fn add(&mut self, key: &str, request: R, reset_backoff: bool, now: Instant) {
        match self.slots.get_mut(key).map(|slot| &mut slot.state) {
            Some(SlotState::Running { next, reset_backoff: reset }) => {
                *reset |= reset_backoff;
                match next {
                    Some(next) => next.merge(request),
                    None => *next = Some(request),
                }
            }
            Some(SlotState::Waiting { .. }) => {
                let Some((due, mut merged, failures)) = self.remove_waiting(key) else { return };
                merged.merge(request);
                let (due, failures) = match (reset_backoff, failures) {
                    (false, 1..) => (due, failures),
                    _ => (due.min(now), 0),
                };
                self.insert_waiting(key, due, merged, failures, now);
            }
            None => self.insert_waiting(key, now, request, 0, now),
        }
    }

    /// The next key that is due, of those that `which` allows. It counts as running until [`Queue::finish`].
    pub(crate) fn start_next(&mut self, which: Which, now: Instant) -> Option<(String, R)> {
        self.promote(now);
        let due = |set: &BTreeSet<(Instant, String)>| set.first().filter(|(due, _)| *due <= now).cloned();
        let normal = due(&self.normal).filter(|_| which == Which::All);
        let (_, key) = match (due(&self.urgent), normal) {
            (Some(urgent), Some(_)) if self.passed + 1 < NORMAL_EVERY => {
                self.passed += 1;
                urgent
            }
            (_, Some(normal)) => {
                self.passed = 0;
                normal
            }
            (urgent, None) => urgent?,
        };
        let (_, request, failures) = self.remove_waiting(&key)?;
        let state = SlotState::Running { next: None, reset_backoff: false };
        self.slots.insert(key.clone(), Slot { state, failures });
        Some((key, request))
    }

    /// Records the end of a key's task.
    pub(crate) fn finish(&mut self, key: &str, outcome: ReconcileOutcome<R>, now: Instant, jitter: f64) {
        let Some(Slot { state: SlotState::Running { next, reset_backoff }, failures }) =
            self.slots.remove(key)
        else {
            return;
        };
        let (mut request, delay, failures) = match (outcome, next.is_some()) {
            (ReconcileOutcome::Done, _) => {
                if let Some(next) = next {
                    self.insert_waiting(key, now, next, 0, now);
                }
                return;
            }
            (ReconcileOutcome::RequeueAfter(_, request), true) => (request, Duration::ZERO, 0),
            (ReconcileOutcome::RequeueAfter(after, request), false) => (request, after, 0),
            (ReconcileOutcome::Failed(_, request), true) if reset_backoff => (request, Duration::ZERO, 0),
            (ReconcileOutcome::Failed(after, request), _) => {
                // A wait that the task asks for says nothing about the next failure.
                let failures = if after.is_some() { failures.max(1) } else { failures.saturating_add(1) };
                (request, after.unwrap_or_else(|| self.backoff.delay(failures, jitter)), failures)
            }
        };
        if let Some(next) = next {
            request.merge(next);
        }
        self.insert_waiting(key, now + delay, request, failures, now);
    }

    /// When the next key is due, of those that `which` allows, or may be.
    pub(crate) fn next_due(&self, which: Which) -> Option<Instant> {
        let normal = (which == Which::All).then_some(&self.normal);
        let sets = [&self.urgent, &self.delayed].into_iter().chain(normal);
        sets.filter_map(|set| set.first()).map(|(due, _)| *due).min()
    }

    /// Moves what has become due to the others that wait for a worker.
    fn promote(&mut self, now: Instant) {
        while let Some((due, key)) = self.delayed.pop_first() {
            if due > now {
                self.delayed.insert((due, key));
                return;
            }
            let is_urgent = self.slots.get(&key).is_some_and(
                |slot| matches!(&slot.state, SlotState::Waiting { request, .. } if request.is_urgent()),
            );
            let set = if is_urgent { &mut self.urgent } else { &mut self.normal };
            set.insert((due, key));
        }
    }

    fn insert_waiting(&mut self, key: &str, due: Instant, request: R, failures: u32, now: Instant) {
        let set = if due > now {
            &mut self.delayed
        } else if request.is_urgent() {
            &mut self.urgent
        } else {
            &mut self.normal
        };
        set.insert((due, key.to_owned()));
        self.slots.insert(key.to_owned(), Slot { state: SlotState::Waiting { due, request }, failures });
    }

    fn remove_waiting(&mut self, key: &str) -> Option<(Instant, R, u32)> {
        let Slot { state: SlotState::Waiting { due, request }, failures } = self.slots.remove(key)? else {
            return None;
        };
        let place = (due, key.to_owned());
        let set = if request.is_urgent() { &mut self.urgent } else { &mut self.normal };
        let _ = set.remove(&place) || self.delayed.remove(&place);
        Some((due, request, failures))
    }
}

#[cfg(test)]
mod tests;

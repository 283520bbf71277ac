// SPDX-License-Identifier: Apache-2.0
//! What is to be done, by unit: at most one task a unit, what comes meanwhile is merged, failures back off. Pure: time and chance
//! are what the caller says. Driven by [`crate::workers`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// How long the others may be passed over for what is urgent.
const PATIENCE: Duration = Duration::from_secs(2);

/// QueueItem on one unit.
pub(crate) trait QueueItem {
    /// Takes in more work on the same unit.
    fn merge(&mut self, other: Self);
    /// Whether it goes before what is not.
    fn urgent(&self) -> bool;
}

/// What came of a task.
#[derive(Debug)]
pub(crate) enum TaskOutcome<W> {
    /// All done.
    Done,
    /// To be gone on with after this time.
    Again(Duration, W),
    /// Failed; to be tried again, after this time if one is given.
    Failed(Option<Duration>, W),
}

/// The waits after failures in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    /// After the first.
    pub(crate) least: Duration,
    /// At most.
    pub(crate) most: Duration,
}

impl Backoff {
    /// The wait after so many failures; `jitter` from 0 to 1 chooses within the upper half.
    fn after(self, failures: u32, jitter: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        self.least.saturating_mul(1 << doublings).min(self.most).mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
    }
}

#[derive(Debug)]
struct Slot<W> {
    state: SlotState<W>,
    failures: u32,
}

#[derive(Debug)]
enum SlotState<W> {
    Waiting { due: Instant, work: W },
    Running { next: Option<W>, fresh: bool },
}

/// The queue.
#[derive(Debug)]
pub(crate) struct Queue<W> {
    slots: BTreeMap<String, Slot<W>>,
    urgent: BTreeSet<(Instant, String)>,
    normal: BTreeSet<(Instant, String)>,
    backoff: Backoff,
}

impl<W: QueueItem> Queue<W> {
    /// An empty queue.
    pub(crate) fn new(backoff: Backoff) -> Self {
        Self { slots: BTreeMap::new(), urgent: BTreeSet::new(), normal: BTreeSet::new(), backoff }
    }

    /// How many units wait.
    pub(crate) fn waiting(&self) -> usize {
        self.urgent.len() + self.normal.len()
    }

    /// Adds work. A unit that failed keeps its wait, unless the work is `fresh`: what failed may succeed now.
    pub(crate) fn add(&mut self, unit: &str, work: W, fresh: bool, now: Instant) {
        match self.slots.get_mut(unit).map(|slot| &mut slot.state) {
            Some(SlotState::Running { next, fresh: next_fresh }) => {
                *next_fresh |= fresh;
                match next {
                    Some(next) => next.merge(work),
                    None => *next = Some(work),
                }
            }
            Some(SlotState::Waiting { .. }) => {
                let Some((due, mut old, failures)) = self.unwait(unit) else { return };
                old.merge(work);
                let (due, failures) = match (fresh, failures) {
                    (false, 1..) => (due, failures),
                    _ => (due.min(now), 0),
                };
                self.wait(unit, due, old, failures);
            }
            None => self.wait(unit, now, work, 0),
        }
    }

    /// The next unit that is due, marked as running until [`Queue::finish`].
    pub(crate) fn take(&mut self, now: Instant) -> Option<(String, W)> {
        let due = |set: &BTreeSet<(Instant, String)>| set.first().filter(|(due, _)| *due <= now).cloned();
        let (_, unit) = match (due(&self.urgent), due(&self.normal)) {
            (Some(urgent), Some(normal)) if normal.0 + PATIENCE >= urgent.0 => urgent,
            (Some(_), Some(normal)) => normal,
            (urgent, normal) => urgent.or(normal)?,
        };
        let (_, work, failures) = self.unwait(&unit)?;
        self.slots
            .insert(unit.clone(), Slot { state: SlotState::Running { next: None, fresh: false }, failures });
        Some((unit, work))
    }

    /// The task of a unit has ended.
    pub(crate) fn finish(&mut self, unit: &str, outcome: TaskOutcome<W>, now: Instant, jitter: f64) {
        let Some(Slot { state: SlotState::Running { next, fresh }, failures }) = self.slots.remove(unit)
        else {
            return;
        };
        let (rest, wait, failures) = match outcome {
            TaskOutcome::Done => match next {
                Some(next) => return self.wait(unit, now, next, 0),
                None => return,
            },
            TaskOutcome::Again(after, rest) => (rest, if next.is_some() { Duration::ZERO } else { after }, 0),
            TaskOutcome::Failed(..) if fresh => match (outcome, next) {
                (TaskOutcome::Failed(_, mut rest), Some(next)) => {
                    rest.merge(next);
                    return self.wait(unit, now, rest, 0);
                }
                _ => return,
            },
            TaskOutcome::Failed(after, rest) => {
                let failures = failures.saturating_add(1);
                (rest, after.unwrap_or_else(|| self.backoff.after(failures, jitter)), failures)
            }
        };
        let mut work = rest;
        if let Some(next) = next {
            work.merge(next);
        }
        self.wait(unit, now + wait, work, failures);
    }

    /// When something is due next.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        [&self.urgent, &self.normal].into_iter().filter_map(|set| set.first()).map(|(due, _)| *due).min()
    }

    fn wait(&mut self, unit: &str, due: Instant, work: W, failures: u32) {
        let set = if work.urgent() { &mut self.urgent } else { &mut self.normal };
        set.insert((due, unit.to_owned()));
        self.slots.insert(unit.to_owned(), Slot { state: SlotState::Waiting { due, work }, failures });
    }

    fn unwait(&mut self, unit: &str) -> Option<(Instant, W, u32)> {
        let Slot { state: SlotState::Waiting { due, work }, failures } = self.slots.remove(unit)? else {
            return None;
        };
        let set = if work.urgent() { &mut self.urgent } else { &mut self.normal };
        set.remove(&(due, unit.to_owned()));
        Some((due, work, failures))
    }
}

#[cfg(test)]
mod tests;

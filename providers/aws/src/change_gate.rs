// SPDX-License-Identifier: Apache-2.0
//! How many Services may change or compare their load balancers while AWS does not answer: each such call occupies a worker of the
//! controller for half a minute, in which targets of others do not follow. `provider` asks. No I/O.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use steerage_provider_api::Error;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// Services that change at a time while changes hang: of those whose own last change failed, and of others, for which these leave a
/// place.
const PLACES: (usize, usize) = (3, 1);
/// A failure that took this long is one without an answer.
const HANGS_AFTER: Duration = Duration::from_secs(5);
/// So long after the last one, a change may hang.
const SUSPECTED_FOR: Duration = Duration::from_mins(1);
/// A Service that finds no place comes again after this time. Its targets follow meanwhile.
pub(crate) const COMES_AGAIN: Duration = Duration::from_secs(5);

/// The changes of all Services.
#[derive(Debug)]
pub(crate) struct ChangeGate {
    failed: Semaphore,
    others: Semaphore,
    hung: Mutex<Option<Instant>>,
}

impl Default for ChangeGate {
    fn default() -> Self {
        let (failed, others) = (Semaphore::new(PLACES.0), Semaphore::new(PLACES.1));
        Self { failed, others, hung: Mutex::default() }
    }
}

/// One change, from its begin to its end.
#[must_use]
pub(crate) struct EnteredChange<'a> {
    gate: &'a ChangeGate,
    began: Instant,
    /// Whether it ended, or failed in another way than without an answer.
    is_answered: bool,
    _place: Option<SemaphorePermit<'a>>,
}

impl ChangeGate {
    fn may_hang(&self) -> bool {
        let hung = *self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        hung.is_some_and(|at| at.elapsed() < SUSPECTED_FOR)
    }

    /// Begins a change. `None` if it may hang, because the last one of this Service failed or another one hung a moment ago, and there are
    /// enough of those.
    pub(crate) fn enter(&self, has_failed: bool) -> Option<EnteredChange<'_>> {
        let place = match (has_failed, self.may_hang()) {
            (false, false) => None,
            (true, _) => Some(self.failed.try_acquire().ok()?),
            (false, true) => Some(self.others.try_acquire().or_else(|_| self.failed.try_acquire()).ok()?),
        };
        Some(EnteredChange { gate: self, began: Instant::now(), is_answered: false, _place: place })
    }
}

impl EnteredChange<'_> {
    /// The change ended in this way. One that is given up is dropped instead.
    pub(crate) fn end<T>(mut self, result: &Result<T, Error>) {
        self.is_answered = !matches!(result, Err(Error::Unavailable(_)));
    }
}

impl Drop for EnteredChange<'_> {
    fn drop(&mut self) {
        if !self.is_answered && self.began.elapsed() >= HANGS_AFTER {
            *self.gate.hung.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn few_changes_begin_after_one_hung() {
        let gate = ChangeGate::default();
        let failed = || Err::<(), _>(Error::Unavailable(String::new()));
        let count = |has_failed| {
            let entered: Vec<_> =
                std::iter::repeat_with(|| gate.enter(has_failed)).take(20).flatten().collect();
            let count = entered.len();
            for entered in entered {
                entered.end(&Ok(()));
            }
            count
        };
        let all = PLACES.0 + PLACES.1;
        assert_eq!((count(false), count(true)), (20, PLACES.0));
        gate.enter(false).unwrap().end(&failed());
        assert_eq!(count(false), 20, "it failed at once");
        for (answer, expected) in [(Ok(()), 20), (Err(Error::Denied(String::new())), 20), (failed(), all)] {
            let entered = gate.enter(false).unwrap();
            tokio::time::advance(Duration::from_secs(30)).await;
            entered.end(&answer);
            assert_eq!(count(false), expected, "{answer:?}");
        }
        tokio::time::advance(SUSPECTED_FOR).await;
        assert_eq!(count(false), 20);
        let given_up = gate.enter(false);
        tokio::time::advance(SUSPECTED_FOR).await;
        drop(given_up);
        assert_eq!(count(false), all);
        let failing: Vec<_> = std::iter::repeat_with(|| gate.enter(true)).take(20).flatten().collect();
        assert_eq!(count(false), PLACES.1, "those that fail leave a place to others");
        drop(failing);
    }
}

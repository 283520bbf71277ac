// SPDX-License-Identifier: Apache-2.0
//! How long AWS takes for the calls of one piece of work. The waits for the budgets of calls are not in it: they say nothing of AWS. `paced`
//! notes each call, `group_pass` and `change_gate` ask. A clock of a part hides that of the whole: target groups say nothing of changes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

tokio::task_local! {
    static CLOCK: Arc<CallClock>;
}

/// The calls of one piece of work.
#[derive(Debug, Default)]
pub(crate) struct CallClock {
    times: Mutex<CallTimes>,
    has_changed: Notify,
}

#[derive(Debug, Default)]
struct CallTimes {
    /// Calls that run now, and since when there are some.
    running: usize,
    since: Option<Instant>,
    /// For how long some ran before.
    before: Duration,
    /// The longest one that failed.
    longest_failure: Duration,
}

impl CallTimes {
    fn total(&self) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// A call that runs. Without an end, it was given up, which is a failure.
#[must_use]
pub(crate) struct RunningCall {
    clock: Option<Arc<CallClock>>,
    began: Instant,
    has_failed: bool,
}

impl RunningCall {
    /// AWS answered, or the call has failed.
    pub(crate) fn end(mut self, has_failed: bool) {
        self.has_failed = has_failed;
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        if let Some(clock) = &self.clock {
            clock.note_end(self.began, self.has_failed);
        }
    }
}

impl CallClock {
    /// Runs work whose calls this clock measures.
    pub(crate) async fn measure<T>(self: Arc<Self>, work: impl Future<Output = T>) -> T {
        CLOCK.scope(self, work).await
    }

    /// The longest call that failed or was given up.
    pub(crate) fn longest_failure(&self) -> Duration {
        self.times().longest_failure
    }

    /// Ends when calls have run for this time.
    pub(crate) async fn has_taken(&self, time: Duration) {
        loop {
            let mut changed = std::pin::pin!(self.has_changed.notified());
            changed.as_mut().enable();
            let (left, is_running) = {
                let times = self.times();
                (time.saturating_sub(times.total()), times.running > 0)
            };
            if left.is_zero() {
                return;
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = tokio::time::sleep(left), if is_running => {}
            }
        }
    }

    /// A call begins.
    pub(crate) fn begin(self: &Arc<Self>) -> RunningCall {
        let began = Instant::now();
        let mut times = self.times();
        times.running += 1;
        times.since.get_or_insert(began);
        drop(times);
        self.has_changed.notify_waiters();
        RunningCall { clock: Some(Arc::clone(self)), began, has_failed: true }
    }

    fn note_end(&self, began: Instant, has_failed: bool) {
        let mut times = self.times();
        times.running = times.running.saturating_sub(1);
        if times.running == 0 {
            times.before = times.total();
            times.since = None;
        }
        if has_failed {
            times.longest_failure = times.longest_failure.max(began.elapsed());
        }
        drop(times);
        self.has_changed.notify_waiters();
    }

    fn times(&self) -> MutexGuard<'_, CallTimes> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call begins, which has its turn. The clock of the present work measures it, if it has one.
pub(crate) fn begin() -> RunningCall {
    CLOCK.try_with(CallClock::begin).unwrap_or_else(|_| RunningCall {
        clock: None,
        began: Instant::now(),
        has_failed: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn call(time: Duration, has_failed: bool) {
        let call = begin();
        tokio::time::sleep(time).await;
        call.end(has_failed);
    }

    #[tokio::test(start_paused = true)]
    async fn only_calls_count() {
        let clock = Arc::new(CallClock::default());
        let work = async {
            tokio::time::sleep(60 * SECOND).await;
            call(2 * SECOND, true).await;
            tokio::time::sleep(60 * SECOND).await;
            call(4 * SECOND, false).await;
        };
        let began = Instant::now();
        let (watched, before) = (Arc::clone(&clock), Arc::clone(&clock));
        let three = async {
            watched.has_taken(3 * SECOND).await;
            began.elapsed()
        };
        let ((), at) = tokio::join!(before.measure(work), three);
        assert_eq!((at, clock.longest_failure()), (123 * SECOND, 2 * SECOND));
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_is_given_up_has_failed_and_that_of_a_part_does_not_count() {
        let clock = Arc::new(CallClock::default());
        let part = Arc::new(CallClock::default());
        let work = Arc::clone(&part).measure(call(9 * SECOND, true));
        Arc::clone(&clock).measure(work).await;
        let hangs = Arc::clone(&clock).measure(call(30 * SECOND, false));
        assert!(tokio::time::timeout(5 * SECOND, hangs).await.is_err());
        assert_eq!((clock.longest_failure(), part.longest_failure()), (5 * SECOND, 9 * SECOND));
    }
}

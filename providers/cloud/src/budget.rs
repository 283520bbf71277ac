// SPDX-License-Identifier: Apache-2.0
//! How many calls of one kind a cloud takes, and how many of them may be without an answer. A cloud shares its limits between all programs of
//! an account, and an account may have other limits than the documented ones. So a budget begins with these, and learns from what the cloud
//! refuses.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use self::turns::CallTurns;

mod metered;
mod turns;

pub use self::metered::MeteredBudget;

/// The share of the documented rate that is added in a second in which a call had to wait for it, and none was throttled.
const GROWTH: f64 = 1.0 / 20.0;
/// The learned rate stays between these shares of the documented one.
const LEAST: f64 = 1.0 / 16.0;
const MOST: f64 = 8.0;
/// Calls that were sent together are throttled together: that is one sign, not many.
const THROTTLE_WINDOW: Duration = Duration::from_secs(1);

/// A documented limit: so many calls after a quiet time, and then so many per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Calls at once after a quiet time.
    pub burst: u32,
    /// Calls per second.
    pub per_second: f64,
}

/// A caller that would have to wait longer does something else meanwhile.
const MAX_BUDGET_WAIT: Duration = Duration::from_secs(10);
/// When to ask again for a call that waited for the answers to others.
const AFTER_OTHERS: Duration = Duration::from_secs(1);
/// A timer that is so late says that the process was stopped meanwhile: it may no longer be the one that makes changes.
const MAX_TIMER_DELAY: Duration = Duration::from_secs(2);

/// No call may be made for longer than a caller waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedUp {
    /// After which time a call probably may be made.
    pub after: Duration,
    /// What it would wait for.
    pub limit: CallLimit,
}

/// A limit of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallLimit {
    /// Calls per second.
    Rate,
    /// Calls without an answer.
    InFlight,
}

/// The calls of one kind. Groups of callers take turns, and in each whoever asked first is first.
#[derive(Debug)]
pub struct Budget {
    bucket: Mutex<Bucket>,
    turns: Mutex<CallTurns>,
    /// Another caller is next.
    next_changed: Notify,
}

/// A call that may be made. Kept until it has its answer.
#[derive(Debug)]
pub struct CallPermit<'a> {
    budget: &'a Budget,
    group: String,
}

impl Drop for CallPermit<'_> {
    fn drop(&mut self) {
        if self.budget.turns().end(&self.group) {
            self.budget.next_changed.notify_waiters();
        }
    }
}

/// A caller that waits, until it is dropped.
struct WaitingCaller<'a> {
    budget: &'a Budget,
    id: u64,
}

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        if self.budget.turns().remove(self.id) {
            self.budget.next_changed.notify_waiters();
        }
    }
}

impl WaitingCaller<'_> {
    /// Waits until the caller is next.
    async fn be_next(&self) {
        loop {
            let mut changed = std::pin::pin!(self.budget.next_changed.notified());
            changed.as_mut().enable();
            if self.budget.turns().is_next(self.id) {
                return;
            }
            changed.await;
        }
    }
}

impl Budget {
    /// A budget that begins with the documented rate.
    pub fn new(documented: Rate) -> Self {
        let bucket = Mutex::new(Bucket::new(documented, Instant::now()));
        Self { bucket, turns: Mutex::default(), next_changed: Notify::new() }
    }

    /// The same, with at most so many calls without an answer at the same time: a cloud that is slow refuses nothing, and only gets slower.
    /// A group has at most as many of them as it leaves to others.
    #[must_use]
    pub fn with_max_in_flight(self, calls: usize) -> Self {
        Self { turns: Mutex::new(CallTurns::with_max_in_flight(calls)), ..self }
    }

    fn turns(&self) -> MutexGuard<'_, CallTurns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until one call of the group may be made, ten seconds at most. A caller that goes away or is refused uses up nothing.
    pub async fn take(&self, group: &str) -> Result<CallPermit<'_>, UsedUp> {
        let (id, before) = self.turns().add(group);
        let waiting = WaitingCaller { budget: self, id };
        let expected = self.bucket().expected(before, Instant::now());
        if expected > MAX_BUDGET_WAIT {
            return Err(UsedUp { after: expected, limit: CallLimit::Rate });
        }
        let asked = Instant::now();
        let later = UsedUp { after: MAX_BUDGET_WAIT, limit: CallLimit::Rate };
        let turn = async {
            waiting.be_next().await;
            // A wait for turns or answers says nothing about the rate.
            let mut has_waited = false;
            loop {
                // Again after each wait: the rate may be another one by then.
                if asked.elapsed() > MAX_BUDGET_WAIT + MAX_TIMER_DELAY {
                    return Err(later);
                }
                let Some(wait) = self.bucket().take(has_waited, Instant::now()) else {
                    self.turns().begin(group);
                    return Ok(CallPermit { budget: self, group: group.to_owned() });
                };
                let due = Instant::now() + wait;
                tokio::time::sleep_until(due).await;
                if due.elapsed() > MAX_TIMER_DELAY {
                    return Err(later);
                }
                has_waited = true;
            }
        };
        let in_time = tokio::time::timeout(MAX_BUDGET_WAIT, turn).await;
        in_time.unwrap_or_else(|_| {
            let by_rate = self.bucket().expected(0, Instant::now());
            let turns = self.turns();
            if !turns.limits_in_flight() {
                return Err(later);
            }
            let is_by_rate = turns.may_begin(group) && !by_rate.is_zero();
            let limit = if is_by_rate { CallLimit::Rate } else { CallLimit::InFlight };
            // Where the answers to others were lacking, one may come at any time.
            Err(UsedUp { after: by_rate.max(AFTER_OTHERS), limit })
        })
    }

    /// The cloud refused a call because there were too many.
    pub fn throttled(&self) {
        self.bucket().throttled(Instant::now());
    }

    /// As after a long time in which the cloud refused calls: at first not even one may be made.
    pub fn slow_down(&self) {
        let mut bucket = self.bucket();
        bucket.refill(Instant::now());
        (bucket.rate, bucket.tokens) = (bucket.documented.per_second * LEAST, -1.0);
    }

    /// Calls per second, as far as it is known now.
    pub fn per_second(&self) -> f64 {
        self.bucket().rate
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of a budget. No clock.
#[derive(Debug)]
struct Bucket {
    documented: Rate,
    /// Calls per second.
    rate: f64,
    /// Calls that may be made at once.
    tokens: f64,
    /// When `tokens` was that.
    at: Instant,
    /// When the last call was made.
    made: Instant,
    throttled: Option<Instant>,
}

impl Bucket {
    fn new(documented: Rate, now: Instant) -> Self {
        let (rate, tokens) = (documented.per_second, f64::from(documented.burst));
        Self { documented, rate, tokens, at: now, made: now, throttled: None }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.tokens = (self.tokens + passed * self.rate).min(f64::from(self.documented.burst));
    }

    /// Makes a call, or returns after which time one may be made.
    fn take(&mut self, has_waited: bool, now: Instant) -> Option<Duration> {
        self.refill(now);
        // A timer is a little early or late, and sums of fractions are not exact.
        if self.tokens < 0.999 {
            return Some(Duration::from_secs_f64((1.0 - self.tokens) / self.rate));
        }
        self.tokens = (self.tokens - 1.0).max(0.0);
        if has_waited {
            let passed = now.saturating_duration_since(self.made).as_secs_f64().min(1.0);
            let grown = self.rate + self.documented.per_second * GROWTH * passed;
            self.rate = grown.min(self.documented.per_second * MOST);
        }
        self.made = now;
        None
    }

    /// After which time a call behind so many others may be made.
    fn expected(&mut self, before: u32, now: Instant) -> Duration {
        self.refill(now);
        let missing = f64::from(before) + 1.0 - self.tokens;
        Duration::from_secs_f64(missing.max(0.0) / self.rate)
    }

    fn throttled(&mut self, now: Instant) {
        let is_same = |at: Instant| now.saturating_duration_since(at) < THROTTLE_WINDOW;
        if self.throttled.is_some_and(is_same) {
            return;
        }
        self.refill(now);
        self.throttled = Some(now);
        self.rate = (self.rate / 2.0).max(self.documented.per_second * LEAST);
        // The cloud has no burst left either.
        self.tokens = self.tokens.min(1.0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::prelude::*;

    use super::*;

    const RATE: Rate = Rate { burst: 3, per_second: 10.0 };
    const SECOND: Duration = Duration::from_secs(1);

    /// Makes so many calls as soon as each may be made. Returns when, in milliseconds.
    fn made(bucket: &mut Bucket, calls: usize, mut now: Instant) -> Vec<u128> {
        let (start, mut made) = (now, Vec::new());
        while made.len() < calls {
            match bucket.take(false, now) {
                Some(wait) => now += wait,
                None => made.push((now - start).as_millis()),
            }
        }
        made
    }

    #[test]
    fn a_burst_passes_and_later_calls_are_spaced() {
        let now = Instant::now();
        let mut bucket = Bucket::new(RATE, now);
        assert_eq!(made(&mut bucket, 5, now), [0, 0, 0, 100, 200]);
        let later = now + 60 * SECOND;
        assert_eq!(made(&mut bucket, 4, later), [0, 0, 0, 100], "a quiet time saves a burst");
    }

    #[test]
    fn calls_that_are_throttled_together_halve_the_rate_once() {
        let now = Instant::now();
        let mut bucket = Bucket::new(RATE, now);
        for _ in 0..16 {
            bucket.throttled(now);
        }
        assert_eq!(made(&mut bucket, 2, now), [0, 200], "no burst, and half of the rate");
        bucket.throttled(now + SECOND);
        assert!((bucket.rate - 2.5).abs() < 0.1, "{}", bucket.rate);
        for second in 2..100 {
            bucket.throttled(now + SECOND * second);
        }
        assert!((bucket.rate - 10.0 / 16.0).abs() < 0.01, "{}", bucket.rate);
    }

    /// A cloud with a limit of its own, asked by so many callers, each again as soon as it has an answer. Returns the calls that it took
    /// and those that it refused in ten minutes, as shares of what it allows.
    async fn shares(real: f64, callers: usize) -> (f64, f64) {
        const TIME: Duration = Duration::from_mins(10);
        let (budget, cloud) = (Arc::new(Budget::new(RATE)), Arc::new(Mutex::new((3.0_f64, Instant::now()))));
        let counts = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..callers {
            let (budget, cloud, counts) = (Arc::clone(&budget), Arc::clone(&cloud), Arc::clone(&counts));
            tasks.spawn(async move {
                loop {
                    if let Err(UsedUp { after, .. }) = budget.take("").await {
                        tokio::time::sleep(after).await;
                        continue;
                    }
                    let is_refused = {
                        let (tokens, at) = &mut *cloud.lock().unwrap();
                        *tokens = (*tokens + at.elapsed().as_secs_f64() * real).min(3.0);
                        *at = Instant::now();
                        let is_refused = *tokens < 1.0;
                        *tokens -= if is_refused { 0.0 } else { 1.0 };
                        is_refused
                    };
                    tokio::time::sleep(Duration::from_millis(80)).await;
                    counts[usize::from(is_refused)].fetch_add(1, Ordering::Relaxed);
                    if is_refused {
                        budget.throttled();
                    }
                }
            });
        }
        tokio::time::sleep(TIME).await;
        tasks.shutdown().await;
        let share =
            |index: usize| f64::from(counts[index].load(Ordering::Relaxed)) / (real * TIME.as_secs_f64());
        (share(0), share(1))
    }

    /// An account with twice the limit: the budget finds it, and a smaller one too.
    #[tokio::test(start_paused = true)]
    async fn learned_rate_follows_the_real_limit() {
        // One caller alone is limited by the time that its calls take.
        for (callers, limits) in [(1, &[4.0, 10.0][..]), (16, &[4.0, 10.0, 20.0]), (64, &[4.0, 10.0, 20.0])] {
            for real in limits {
                let (served, refused) = shares(*real, callers).await;
                assert!(served > 0.6, "{callers} callers: {served} of {real}");
                assert!(refused < 0.1, "{callers} callers: {refused} of {real} refused");
            }
        }
    }

    /// Another program uses everything up for two minutes. Callers that give up take nothing with them.
    #[tokio::test(start_paused = true)]
    async fn calls_are_made_soon_after_throttling_ends() {
        let budget = Arc::new(Budget::new(RATE));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let budget = Arc::clone(&budget);
            tasks.spawn(async move {
                loop {
                    let call = async {
                        while budget.take("").await.is_ok() {
                            budget.throttled();
                        }
                    };
                    let _ = tokio::time::timeout(Duration::from_secs(7), call).await;
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
        }
        tokio::time::sleep(Duration::from_mins(2)).await;
        tasks.shutdown().await;
        assert!(budget.per_second() < 1.0, "{}", budget.per_second());
        let start = Instant::now();
        for _ in 0..5 {
            budget.take("").await.unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn who_would_wait_for_long_is_told_when_to_come_again() {
        let budget = Arc::new(Budget::new(RATE));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..120 {
            let budget = Arc::clone(&budget);
            tasks.spawn(async move { (budget.take("").await.map(drop), Instant::now()) });
        }
        let start = Instant::now();
        let all = tasks.join_all().await;
        let refused: Vec<_> = all.iter().filter_map(|(taken, _)| taken.err()).collect();
        assert!((15..=20).contains(&refused.len()), "{refused:?}");
        let is_by_rate =
            |used_up: &UsedUp| used_up.after > MAX_BUDGET_WAIT && used_up.limit == CallLimit::Rate;
        assert!(refused.iter().all(is_by_rate), "{refused:?}");
        assert!(all.iter().all(|(_, at)| *at <= start + MAX_BUDGET_WAIT));
        assert!(budget.turns().is_empty());
    }

    /// One group asks for more than there is all the time, and another one now and then.
    #[tokio::test(start_paused = true)]
    async fn groups_take_turns() {
        let budget = Arc::new(Budget::new(Rate { burst: 1, per_second: 4.0 }));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..30 {
            let budget = Arc::clone(&budget);
            tasks.spawn(async move {
                loop {
                    if let Err(UsedUp { after, .. }) = budget.take("many").await {
                        tokio::time::sleep(after).await;
                    }
                }
            });
        }
        for group in ["one", "other", "one"] {
            tokio::time::sleep(Duration::from_secs(10)).await;
            let asked = Instant::now();
            for call in 1..=5 {
                budget.take(group).await.unwrap();
                // The one that is next stays so, and one of the many comes between two of the group.
                let most = Duration::from_millis(500 * call + 10);
                assert!(asked.elapsed() <= most, "{group}: {call} calls in {:?}", asked.elapsed());
            }
        }
        tasks.shutdown().await;
        assert!(budget.turns().is_empty());
    }

    /// The process is stopped for half a minute while callers wait: none of them makes its call then.
    #[tokio::test(start_paused = true)]
    async fn a_process_that_was_stopped_makes_no_call_that_it_waited_for() {
        let budget = Arc::new(Budget::new(RATE));
        budget.slow_down();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..5 {
            let budget = Arc::clone(&budget);
            tasks.spawn(async move { budget.take("").await.map(drop) });
        }
        tokio::task::yield_now().await;
        tokio::time::advance(Duration::from_secs(30)).await;
        assert!(tasks.join_all().await.iter().all(Result::is_err));
        assert_eq!(budget.take("").await.map(drop), Ok(()), "who asks later");
    }

    /// The cloud needs 25 seconds for a call. One group makes fifty at once, and another one a few, one after the other.
    #[tokio::test(start_paused = true)]
    async fn calls_in_flight_are_limited_and_groups_leave_room_to_others() {
        let rate = Rate { burst: 100, per_second: 20.0 };
        let budget = Arc::new(Budget::new(rate).with_max_in_flight(8));
        let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let (budget, running, most) = (Arc::clone(&budget), Arc::clone(&running), Arc::clone(&most));
            tasks.spawn(async move {
                loop {
                    match budget.take("many").await {
                        Ok(_permit) => {
                            most.fetch_max(running.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                            tokio::time::sleep(25 * SECOND).await;
                            running.fetch_sub(1, Ordering::Relaxed);
                        }
                        // The rate is not what it waits for.
                        Err(UsedUp { after, limit }) => {
                            assert_eq!((after, limit), (SECOND, CallLimit::InFlight));
                            tokio::time::sleep(after).await;
                        }
                    }
                }
            });
        }
        for _ in 0..10 {
            tokio::time::sleep(7 * SECOND).await;
            let asked = Instant::now();
            let permit = budget.take("one").await.unwrap();
            assert_eq!(asked.elapsed(), Duration::ZERO);
            tokio::time::sleep(25 * SECOND).await;
            drop(permit);
        }
        assert_eq!(most.load(Ordering::Relaxed), 4);
        assert!(
            (budget.per_second() - 20.0).abs() < 0.1,
            "nothing waited for the rate: {}",
            budget.per_second()
        );
        tasks.shutdown().await;
        assert!(budget.turns().is_empty(), "nothing is kept");
    }

    /// The rate gets slower while two callers wait, and the second one has no time left. Nothing else is without an answer.
    #[tokio::test(start_paused = true)]
    async fn waiting_for_the_rate_is_told_although_calls_in_flight_are_limited() {
        let budget = Budget::new(Rate { burst: 1, per_second: 2.0 }).with_max_in_flight(8);
        {
            let mut bucket = budget.bucket();
            (bucket.rate, bucket.tokens) = (0.25, 0.0);
        }
        let slow_down = async {
            tokio::time::sleep(SECOND).await;
            budget.throttled();
        };
        let (first, second, ()) = tokio::join!(budget.take("one"), budget.take("one"), slow_down);
        assert!(first.is_ok(), "{first:?}");
        assert_eq!(second.unwrap_err().limit, CallLimit::Rate);
    }

    proptest! {
        #[test]
        fn rate_stays_within_bounds(steps in prop::collection::vec((0_u64..5_000, any::<bool>()), 1..200)) {
            let mut now = Instant::now();
            let mut bucket = Bucket::new(RATE, now);
            for (pause, is_throttled) in steps {
                now += Duration::from_millis(pause);
                if is_throttled {
                    bucket.throttled(now);
                } else {
                    bucket.take(true, now);
                }
                prop_assert!((10.0 * LEAST..=10.0 * MOST).contains(&bucket.rate));
                prop_assert!(bucket.tokens <= 3.0);
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! How many calls of one kind a cloud takes. A cloud shares its limits between all programs of an account, and an account may have other
//! limits than the documented ones. So a budget begins with these, and learns from what the cloud refuses.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The share of the documented rate that is added in a second in which a call had to wait, and none was throttled.
const GROWTH: f64 = 1.0 / 20.0;
/// The learned rate stays between these shares of the documented one.
const LEAST: f64 = 1.0 / 16.0;
const MOST: f64 = 8.0;
/// Calls that were sent together are throttled together: that is one sign, not many.
const SAME_SIGN: Duration = Duration::from_secs(1);

/// A documented limit: so many calls after a quiet time, and then so many per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Calls at once after a quiet time.
    pub burst: u32,
    /// Calls per second.
    pub per_second: f64,
}

/// The calls of one kind. Callers get their turn in the order in which they ask.
#[derive(Debug)]
pub struct Budget(Mutex<Bucket>);

impl Budget {
    /// A budget that begins with the documented rate.
    pub fn new(documented: Rate) -> Self {
        Self(Mutex::new(Bucket::new(documented, Instant::now())))
    }

    /// Waits until one call may be made, and returns how long that took.
    pub async fn take(&self) -> Duration {
        let wait = self.0.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        wait
    }

    /// The cloud refused a call because there were too many.
    pub fn throttled(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).throttled(Instant::now());
    }

    /// Calls per second, as far as it is known now.
    pub fn per_second(&self) -> f64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rate
    }
}

/// The state of a budget. No clock.
#[derive(Debug)]
struct Bucket {
    documented: Rate,
    /// Calls per second.
    rate: f64,
    /// Calls that may be made at once; negative while calls wait.
    tokens: f64,
    /// When `tokens` was that.
    at: Instant,
    throttled: Option<Instant>,
}

impl Bucket {
    fn new(documented: Rate, now: Instant) -> Self {
        let (rate, tokens) = (documented.per_second, f64::from(documented.burst));
        Self { documented, rate, tokens, at: now, throttled: None }
    }

    /// After which time the call may be made. It counts as made.
    fn take(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.tokens = (self.tokens + passed * self.rate).min(f64::from(self.documented.burst)) - 1.0;
        if self.tokens >= 0.0 {
            return Duration::ZERO;
        }
        let grown = self.rate + self.documented.per_second * GROWTH * passed.min(1.0);
        self.rate = grown.min(self.documented.per_second * MOST);
        Duration::from_secs_f64(-self.tokens / self.rate)
    }

    fn throttled(&mut self, now: Instant) {
        let is_same = |at: Instant| now.saturating_duration_since(at) < SAME_SIGN;
        if self.throttled.is_some_and(is_same) {
            return;
        }
        self.throttled = Some(now);
        self.rate = (self.rate / 2.0).max(self.documented.per_second * LEAST);
        // The cloud has no burst left either.
        self.tokens = self.tokens.min(0.0);
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATE: Rate = Rate { burst: 3, per_second: 10.0 };
    const SECOND: Duration = Duration::from_secs(1);

    fn millis(waits: impl Iterator<Item = Duration>) -> Vec<u128> {
        waits.map(|wait| wait.as_millis()).collect()
    }

    #[test]
    fn a_burst_passes_and_later_calls_are_spaced() {
        let now = Instant::now();
        let mut bucket = Bucket::new(RATE, now);
        assert_eq!(millis((0..5).map(|_| bucket.take(now))), [0, 0, 0, 100, 200]);
        let later = now + 60 * SECOND;
        assert_eq!(millis((0..4).map(|_| bucket.take(later))), [0, 0, 0, 100], "a quiet time saves a burst");
    }

    #[test]
    fn calls_that_are_throttled_together_halve_the_rate_once() {
        let now = Instant::now();
        let mut bucket = Bucket::new(RATE, now);
        for _ in 0..16 {
            bucket.throttled(now);
        }
        assert_eq!(bucket.take(now).as_millis(), 200, "no burst, and half of the rate");
        bucket.throttled(now + SECOND);
        assert!((bucket.rate - 2.5).abs() < 0.1, "{}", bucket.rate);
        for second in 2..100 {
            bucket.throttled(now + SECOND * second);
        }
        assert!((bucket.rate - 10.0 / 16.0).abs() < 0.01, "{}", bucket.rate);
    }

    /// An account with twice the limit: the budget finds it, and a smaller one too.
    #[test]
    fn learned_rate_follows_the_real_limit() {
        for real in [4.0, 20.0] {
            let mut now = Instant::now();
            let (mut bucket, mut cloud, mut late) = (Bucket::new(RATE, now), 3.0_f64, 0);
            let start = now;
            let mut served = 0;
            while now < start + 600 * SECOND {
                let wait = bucket.take(now);
                now += wait;
                cloud = (cloud + wait.as_secs_f64() * real).min(3.0);
                if cloud < 1.0 {
                    bucket.throttled(now);
                    late += 1;
                    continue;
                }
                cloud -= 1.0;
                served += 1;
            }
            let per_second = f64::from(served) / 600.0;
            assert!(per_second > real * 0.6, "{per_second} of {real}");
            assert!(f64::from(late) < f64::from(served) * 0.05, "{late} throttled, {served} served");
        }
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
                    bucket.take(now);
                }
                prop_assert!((10.0 * LEAST..=10.0 * MOST).contains(&bucket.rate));
                prop_assert!(bucket.tokens <= 3.0);
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The backoff of all programs: delays after failures in a row. It never sleeps; its user does.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};

/// Delays that double from `min` up to `max`. Each lies between half and the whole of that, at random, so that clients that
/// failed together do not retry together.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    builder: ExponentialBuilder,
    max: Duration,
    failures: u32,
}

/// More would exceed any `max`.
const MAX_DOUBLINGS: u32 = 63;

impl Backoff {
    /// A backoff after no failure.
    pub const fn new(min: Duration, max: Duration) -> Self {
        let builder = ExponentialBuilder::new().with_min_delay(min).with_max_delay(max).without_max_times();
        Self { builder, max, failures: 0 }
    }

    /// The same with delays of at most `max`.
    #[must_use]
    pub fn at_most(self, max: Duration) -> Self {
        let max = self.max.min(max);
        Self { builder: self.builder.with_max_delay(max), max, ..self }
    }

    /// The delay after this many failures in a row; `jitter` from 0 to 1 chooses within its upper half. Pure, for users that count
    /// the failures of many keys.
    pub fn delay(&self, failures: u32, jitter: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(MAX_DOUBLINGS);
        let whole = self.builder.build().nth(doublings as usize).unwrap_or(self.max).min(self.max);
        // backon counts in single precision: to the nearest millisecond.
        let milliseconds = (whole + Duration::from_micros(500)).as_millis();
        let whole = Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::MAX));
        whole.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
    }

    /// The delay after one more failure.
    pub fn next_delay(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        self.delay(self.failures, fastrand::f64())
    }

    /// Starts from `min` again, after a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_start_again_after_a_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
        for _ in 0..2 {
            for whole in [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000] {
                let (whole, delay) = (Duration::from_millis(whole), backoff.next_delay());
                // backon counts in single precision.
                let slack = Duration::from_millis(1);
                assert!(delay + slack >= whole / 2 && delay <= whole + slack, "{delay:?} of {whole:?}");
            }
            backoff.reset();
        }
    }

    #[test]
    fn delay_depends_on_failures_and_jitter_alone() {
        let backoff = Backoff::new(Duration::from_millis(250), Duration::from_mins(5));
        for (failures, milliseconds) in
            [(0, 250), (1, 250), (2, 500), (3, 1000), (11, 256_000), (12, 300_000), (u32::MAX, 300_000)]
        {
            let whole = Duration::from_millis(milliseconds);
            assert_eq!(backoff.delay(failures, 1.0), whole);
            assert_eq!(backoff.delay(failures, 0.0), whole / 2);
        }
    }

    #[test]
    fn longest_delay_can_be_lowered_only() {
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_mins(1));
        let longest = |backoff: Backoff| backoff.delay(100, 1.0);
        assert_eq!(longest(backoff.at_most(Duration::from_secs(30))), Duration::from_secs(30));
        assert_eq!(longest(backoff.at_most(Duration::from_mins(5))), Duration::from_mins(1));
        assert_eq!(backoff.at_most(Duration::from_secs(30)).delay(3, 1.0), Duration::from_secs(4));
    }

    #[test]
    fn delays_differ_between_clients() {
        let delay = || Backoff::new(Duration::from_secs(1), Duration::from_secs(10)).next_delay();
        let first = delay();
        assert!((0..20).any(|_| delay() != first));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The backoff of all programs: delays after failures in a row. It never sleeps; its user does.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// Delays that double from `min` up to `max`. Each lies between half and the whole of that, at random, so that clients that
/// failed together do not retry together.
#[derive(Debug)]
pub struct Backoff {
    builder: ExponentialBuilder,
    delays: ExponentialBackoff,
    max: Duration,
}

impl Backoff {
    /// A backoff after no failure.
    pub fn new(min: Duration, max: Duration) -> Self {
        // The jitter of backon adds up to the delay itself: hence half of each limit.
        let builder = ExponentialBuilder::new()
            .with_jitter()
            .with_min_delay(min / 2)
            .with_max_delay(max / 2)
            .without_max_times();
        Self { builder, delays: builder.build(), max }
    }

    /// The delay after one more failure.
    pub fn next_delay(&mut self) -> Duration {
        self.delays.next().unwrap_or(self.max).min(self.max)
    }

    /// Starts from `min` again, after a success.
    pub fn reset(&mut self) {
        self.delays = self.builder.build();
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
    fn delays_differ_between_clients() {
        let delay = || Backoff::new(Duration::from_secs(1), Duration::from_secs(10)).next_delay();
        let first = delay();
        assert!((0..20).any(|_| delay() != first));
    }
}

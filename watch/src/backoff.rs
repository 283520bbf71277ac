// SPDX-License-Identifier: Apache-2.0
//! How long to wait after a failure.

use std::time::Duration;

/// The wait after the `failures`-th failure in a row: doubling from `least` up to `most`, of which a random part between a half
/// and the whole is taken (`jitter` from 0 to 1), so that those who failed together do not come back together.
pub(crate) fn wait(failures: u32, least: Duration, most: Duration, jitter: f64) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    let whole = least.saturating_mul(1 << doublings).min(most);
    whole.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_up_to_its_limit() {
        let (least, most) = (Duration::from_millis(200), Duration::from_secs(10));
        let whole = |failures| wait(failures, least, most, 1.0).as_millis();
        assert_eq!([1, 2, 3, 6, 7, u32::MAX].map(whole), [200, 400, 800, 6400, 10_000, 10_000]);
        assert_eq!(wait(1, least, most, 0.0).as_millis(), 100);
    }
}

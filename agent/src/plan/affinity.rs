// SPDX-License-Identifier: Apache-2.0
//! The classes of affinity timeouts. Pure.

/// The timeouts in use, in seconds, up to the longest that Kubernetes allows, a day. Each has a map and rules of its own, which every
/// packet of a client passes, and a new one rewrites the whole table. A class is at most a quarter longer than what was asked.
const CLASSES: [u32; 64] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 18, 20, 25, 30, 35, 40, 45, 50, 60, 75, 90, 105, 120, 150, 180,
    210, 240, 300, 360, 420, 480, 540, 600, 720, 900, 1080, 1200, 1500, 1800, 2100, 2400, 2700, 3000, 3600,
    4500, 5400, 6300, 7200, 9000, 10_800, 12_600, 14_400, 18_000, 21_600, 25_200, 28_800, 36_000, 43_200,
    54_000, 64_800, 75_600, 86_400,
];

/// The class for a timeout in seconds: never shorter.
pub(super) fn timeout_class(seconds: u64) -> u32 {
    let at = CLASSES.partition_point(|class| u64::from(*class) < seconds);
    CLASSES.get(at).or(CLASSES.last()).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn class_is_never_shorter_and_at_most_a_quarter_longer(seconds in 1_u32..=86_400) {
            let class = timeout_class(seconds.into());
            prop_assert!(class >= seconds && f64::from(class) <= f64::from(seconds) * 1.25, "{class}");
            prop_assert_eq!(timeout_class(class.into()), class);
        }
    }

    #[test]
    fn usual_timeouts_are_exact() {
        for seconds in (1..=10).chain([15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 86_400]) {
            assert_eq!(timeout_class(seconds.into()), seconds);
        }
        assert!(CLASSES.is_sorted());
    }
}

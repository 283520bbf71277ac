// SPDX-License-Identifier: Apache-2.0
//! The timeouts of affinity. Pure.

/// The timeouts that rules have, in seconds, up to the longest that Kubernetes allows, a day. The rules are asked one after the other:
/// the usual ones come first.
pub const AFFINITY_TIMEOUTS: [u32; 18] =
    [10_800, 3600, 1800, 600, 300, 60, 30, 10, 5, 20, 120, 240, 900, 7200, 21_600, 28_800, 43_200, 86_400];

/// The timeout for a requested one in seconds: never shorter.
pub(super) fn affinity_timeout(seconds: u64) -> u32 {
    let fits = |timeout: &u32| u64::from(*timeout) >= seconds;
    AFFINITY_TIMEOUTS
        .into_iter()
        .filter(fits)
        .min()
        .or(AFFINITY_TIMEOUTS.into_iter().max())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_is_never_shorter_and_at_most_twice_as_long() {
        for seconds in 1..=86_400 {
            let timeout = affinity_timeout(seconds.into());
            assert!(timeout >= seconds && (timeout <= 2 * seconds || timeout == 5), "{seconds}: {timeout}");
        }
    }

    #[test]
    fn usual_timeouts_are_exact() {
        for seconds in [5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 43_200, 86_400] {
            assert_eq!(affinity_timeout(seconds.into()), seconds);
        }
        assert_eq!(affinity_timeout(u64::MAX), 86_400);
    }
}

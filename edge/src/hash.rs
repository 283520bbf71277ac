// SPDX-License-Identifier: Apache-2.0
//! Hashes that are the same on every host and in every version: all edge hosts compute the same slot tables from them.
//!
//! They have no seed and must never change: hosts of two versions would send the same client to different nodes.

/// FNV-1a of 64 bits, finished by [`mix`], which spreads what FNV leaves in the low bits.
pub(crate) fn bytes(bytes: &[u8]) -> u64 {
    let folded = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mix(folded)
}

/// The finisher of `SplitMix64`: every bit of the input changes half of the output's.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// `-log2((hash + 1) / 2^64)` in units of 2^-32; it never rises with the hash. By integers, because floating-point logarithms of
/// two C libraries differ in the last place.
pub(crate) fn negative_log2(hash: u64) -> u64 {
    const FRACTION: u32 = 32;
    let hash = hash | 1;
    let exponent = hash.ilog2();
    // The mantissa without its leading one, as a fraction of 2^32.
    let mantissa = (hash << (63 - exponent) << 1) >> FRACTION;
    let log = (u64::from(exponent) << FRACTION) + log2_of_mantissa(mantissa);
    (64 << FRACTION) - log
}

/// `log2(1 + m / 2^32)` in units of 2^-32: a line and a parabola above it. The error is below 0.01, which shifts shares by less
/// than 1 %; it must rise with `m` and be the same everywhere.
fn log2_of_mantissa(mantissa: u64) -> u64 {
    // 0.3431 · m · (1 − m), the coefficient that meets log2(1.5) at m = 1/2 to three places.
    let parabola = (mantissa * ((1 << 32) - mantissa)) >> 32;
    mantissa + ((parabola * 351) >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hash_values_are_stable() {
        assert_eq!(bytes(b"a"), mix(0xaf63_dc4c_8601_ec8c), "FNV-1a of `a`");
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf, "the first value of SplitMix64 from zero");
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4, "its second");
    }

    #[test]
    fn logarithm_is_close_to_the_exact_one() {
        for hash in [1_u64, 3, 1 << 20, 0x1234_5678_9abc_def0, 1 << 63, u64::MAX, u64::MAX / 3 * 2] {
            #[allow(clippy::cast_precision_loss, reason = "a tolerance follows")]
            let (real, ours) = (64.0 - (hash as f64).log2(), negative_log2(hash) as f64 / 4_294_967_296.0);
            assert!((real - ours).abs() < 0.01, "{hash:#x}: {real} {ours}");
        }
    }

    proptest! {
        #[test]
        fn logarithm_is_monotonic(a: u64, b: u64) {
            let (low, high) = (a.min(b), a.max(b));
            prop_assert!(negative_log2(low) >= negative_log2(high));
        }
    }
}

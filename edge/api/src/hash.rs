// SPDX-License-Identifier: Apache-2.0
//! Hashes that are the same on every host and in every version: all edge hosts compute the same tables and shards from them, and the
//! controller the same shards. Pure.
//!
//! They have no seed and must never change: hosts of two versions would send the same client to different nodes.

pub use steerage_edge_packet::hash::mix64;

/// FNV-1a of 64 bits, finished by [`mix64`], which spreads what FNV leaves in the low bits.
pub fn bytes(bytes: &[u8]) -> u64 {
    let folded = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mix64(folded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_values_are_stable() {
        assert_eq!(bytes(b"a"), mix64(0xaf63_dc4c_8601_ec8c), "FNV-1a of `a`");
        assert_eq!(mix64(0), 0xe220_a839_7b1d_cdaf, "the first value of SplitMix64 from zero");
        assert_eq!(mix64(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4, "its second");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Hashes that program and daemon compute alike.

use crate::Address;

/// The finisher of `SplitMix64`: every bit of the input changes half of the output's.
#[inline(always)]
pub fn mix64(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The upper half of [`mix64`].
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "32 bits are left")]
pub fn mix(value: u64) -> u32 {
    (mix64(value) >> 32) as u32
}

/// The slot of a hash in a table of `size` slots: a multiplication instead of a division.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "less than `size`")]
pub fn slot(hash: u32, size: u32) -> u32 {
    ((u64::from(hash) * u64::from(size)) >> 32) as u32
}

/// The number of bits in the gate is two to the power of this.
pub const GATE_BITS: u32 = 19;
/// The number of words in the gate.
pub const GATE_WORDS: u32 = 1 << (GATE_BITS - 6);

/// Where the gate has the bit of an address: the word and the bit in it. A packet whose destination
/// has no bit there is for no VIP.
#[inline(always)]
pub fn gate<A: Address>(address: A) -> (u32, u64) {
    let bit = address.fold().wrapping_mul(0x9e37_79b1) >> (32 - GATE_BITS);
    (bit >> 6, 1 << (bit & 63))
}

/// A short mark of a link-layer address. A flow has the mark of the sender that was checked last.
#[inline(always)]
pub fn mac_mark(mac: [u8; 6]) -> u16 {
    let word = |at| u16::from_be_bytes([mac[at], mac[at + 1]]);
    word(0) ^ word(2).rotate_left(5) ^ word(4).rotate_left(10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::V4;

    #[test]
    fn slots_are_within_the_table_and_even() {
        let size = 251;
        let mut counts = vec![0; size];
        for client in 0..251_000_u32 {
            let hash = V4(client.to_be()).flow_hash(0);
            counts[slot(hash, 251) as usize] += 1;
        }
        // 1,000 expected; the standard deviation is 32.
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn slot_is_within_the_smallest_and_the_largest_table() {
        assert_eq!(slot(u32::MAX, 1), 0);
        assert_eq!(slot(u32::MAX, u32::MAX), u32::MAX - 1);
    }

    #[test]
    fn addresses_of_one_network_have_distinct_bits_in_the_gate() {
        let bits: std::collections::BTreeSet<_> =
            (0..20_000_u32).map(|host| gate(V4((0x0a00_0000 | host).to_be()))).collect();
        assert!(bits.len() > 19_000, "{}", bits.len());
        assert!(bits.iter().all(|(word, _)| *word < GATE_WORDS));
    }
}

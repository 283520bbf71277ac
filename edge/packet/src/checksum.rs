// SPDX-License-Identifier: Apache-2.0
//! The Internet checksum (RFC 1071), and its change with a word (RFC 1624).

/// The sum of all words of two bytes. The last one of an odd number of bytes is padded.
pub fn sum(bytes: &[u8]) -> u32 {
    let mut sum = 0;
    let mut pairs = bytes.chunks_exact(2);
    for pair in &mut pairs {
        sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        sum += u32::from(u16::from_be_bytes([*last, 0]));
    }
    sum
}

/// The checksum of a sum.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "folded to 16 bits")]
pub fn finish(sum: u32) -> u16 {
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

/// The checksum after one word of the data has changed.
#[inline(always)]
pub fn changed(checksum: u16, old: u16, new: u16) -> u16 {
    finish(u32::from(!checksum) + u32::from(!old) + u32::from(new))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn example_of_rfc_1071() {
        assert_eq!(finish(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7])), !0xddf2);
        assert_eq!(finish(sum(&[0xff])), 0x00ff);
    }

    proptest! {
        /// Both forms of zero are equal on the wire.
        #[test]
        fn change_equals_a_new_sum(mut bytes in prop::collection::vec(any::<u8>(), 4..80), new in any::<u16>(), at in 0..40_usize) {
            bytes.truncate(bytes.len() & !1);
            let at = at * 2 % bytes.len();
            let before = finish(sum(&bytes));
            let old = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
            bytes[at..at + 2].copy_from_slice(&new.to_be_bytes());
            let (after, expected) = (changed(before, old, new), finish(sum(&bytes)));
            prop_assert!(after == expected || (after ^ expected == 0xffff && (after == 0 || expected == 0)));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Ethernet headers, with VLAN tags that the kernel has left in the frame.

use crate::Packet;
use crate::read::be16;

/// Type of IPv4.
pub const IPV4: u16 = 0x0800;
/// Type of ARP.
pub const ARP: u16 = 0x0806;
/// Type of IPv6.
pub const IPV6: u16 = 0x86dd;
/// Type of a VLAN tag (IEEE 802.1Q).
pub const VLAN: u16 = 0x8100;
/// Type of the outer one of two VLAN tags (IEEE 802.1ad).
pub const VLAN_OUTER: u16 = 0x88a8;
/// Length of a header without a tag.
pub const LENGTH: usize = 14;
const TAG_LENGTH: usize = 4;
/// The VLAN's number in a tag; the other bits are the priority.
pub const VLAN_MASK: u16 = 0x0fff;

/// A frame's Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Sender.
    pub source: [u8; 6],
    /// Type of the payload.
    pub kind: u16,
    /// Offset of the payload.
    pub payload: usize,
}

/// Parses the header. `None` if the frame belongs to a VLAN, has two tags, or is too short. A tag
/// that only has a priority belongs to no VLAN (IEEE 802.1Q, 6.9.1).
#[inline(always)]
pub fn ethernet<P: Packet + ?Sized>(packet: &P) -> Option<Ethernet> {
    let header: &[u8; LENGTH] = packet.at(0)?;
    let source = [header[6], header[7], header[8], header[9], header[10], header[11]];
    let kind = be16(header, 12);
    if kind != VLAN {
        return Some(Ethernet { source, kind, payload: LENGTH });
    }
    let tag: &[u8; TAG_LENGTH] = packet.at(LENGTH)?;
    let is_priority_only = be16(tag, 0) & VLAN_MASK == 0;
    is_priority_only.then(|| Ethernet { source, kind: be16(tag, 2), payload: LENGTH + TAG_LENGTH })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(tail: &[u8]) -> Vec<u8> {
        [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2][..], tail].concat()
    }

    #[test]
    fn untagged_frame_and_priority_tag_are_parsed() {
        let source = [2, 0, 0, 0, 0, 2];
        let parsed = ethernet(&frame(&[8, 0, 1])[..]);
        assert_eq!(parsed, Some(Ethernet { source, kind: IPV4, payload: 14 }));
        let parsed = ethernet(&frame(&[0x81, 0, 0xe0, 0, 0x86, 0xdd])[..]);
        assert_eq!(parsed, Some(Ethernet { source, kind: IPV6, payload: 18 }));
    }

    #[test]
    fn frame_of_a_vlan_and_truncated_frames_are_not() {
        assert_eq!(ethernet(&frame(&[0x81, 0, 0, 5, 8, 0])[..]), None);
        for length in 0..14 {
            assert_eq!(ethernet(&frame(&[8, 0])[..length]), None);
        }
        assert_eq!(ethernet(&frame(&[0x81, 0, 0, 0, 8])[..]), None);
    }
}

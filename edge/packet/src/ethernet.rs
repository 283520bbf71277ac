// SPDX-License-Identifier: Apache-2.0
//! Ethernet headers.

use crate::Packet;
use crate::read::be16;

/// Type of IPv4.
pub const IPV4: u16 = 0x0800;
/// Type of ARP.
pub const ARP: u16 = 0x0806;
/// Type of IPv6.
pub const IPV6: u16 = 0x86dd;
/// Type of a VLAN tag (IEEE 802.1Q). The kernel removes the outermost tag before the program sees a
/// frame, so a frame with one had two: it belongs to another network, and no parser looks behind it.
pub const VLAN: u16 = 0x8100;
/// The VLAN's number in a tag. A tag that only has a priority belongs to no VLAN (IEEE 802.1Q, 6.9.1).
pub const VLAN_MASK: u32 = 0x0fff;
/// Length of the header.
pub const LENGTH: usize = 14;

/// A frame's Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Sender.
    pub source: [u8; 6],
    /// Type of the payload.
    pub kind: u16,
}

/// Parses the header. `None` if the frame is too short.
#[inline(always)]
pub fn ethernet<P: Packet + ?Sized>(packet: &P) -> Option<Ethernet> {
    let header: &[u8; LENGTH] = packet.at(0)?;
    let source = [header[6], header[7], header[8], header[9], header[10], header[11]];
    Some(Ethernet { source, kind: be16(header, 12) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_parsed() {
        let frame = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 1];
        assert_eq!(ethernet(&frame[..]), Some(Ethernet { source: [2, 0, 0, 0, 0, 2], kind: IPV4 }));
        for length in 0..LENGTH {
            assert_eq!(ethernet(&frame[..length]), None);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The ARP and neighbour discovery frames that the edge sends and reads: announcements and address probes. Pure.
//!
//! Sources: RFC 826 and RFC 5227 (ARP), RFC 4861 and RFC 4862 (neighbour discovery).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::groups::solicited_node;
use crate::link::mac::Mac;

pub(crate) const ARP: u16 = 0x0806;
pub(crate) const IPV6: u16 = 0x86dd;
const BROADCAST: Mac = [0xff; 6];
/// Types of `ICMPv6`.
const NEIGHBOUR_SOLICITATION: u8 = 135;
pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// Announces to the whole link that `vip` is at `mac`.
pub(crate) fn announcement(mac: Mac, vip: IpAddr) -> Vec<u8> {
    match vip {
        IpAddr::V4(vip) => arp(mac, vip, vip),
        IpAddr::V6(vip) => {
            let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
            // Flags: override, not solicited.
            let mut body = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, 0x20, 0, 0, 0];
            body.extend_from_slice(&vip.octets());
            body.extend_from_slice(&[2, 1]);
            body.extend_from_slice(&mac);
            icmp6(mac, vip, all, body)
        }
    }
}

/// Asks whether a host on the link has `vip`, without claiming it.
pub(crate) fn probe(mac: Mac, vip: IpAddr) -> Vec<u8> {
    match vip {
        IpAddr::V4(vip) => arp(mac, Ipv4Addr::UNSPECIFIED, vip),
        IpAddr::V6(vip) => {
            let mut body = vec![NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
            body.extend_from_slice(&vip.octets());
            icmp6(mac, Ipv6Addr::UNSPECIFIED, solicited_node(vip), body)
        }
    }
}

/// The address that the frame's sender claims, and the sender.
pub(crate) fn announced_address(frame: &[u8]) -> Option<(IpAddr, Mac)> {
    let ethertype = u16::from_be_bytes(frame.get(12..14)?.try_into().ok()?);
    match ethertype {
        ARP => {
            let body = frame.get(14..42)?;
            let sender: [u8; 4] = body[14..18].try_into().ok()?;
            let known = body[..6] == [0, 1, 8, 0, 6, 4] && sender != [0; 4];
            known.then(|| Some((IpAddr::from(sender), body[8..14].try_into().ok()?)))?
        }
        IPV6 => {
            let (head, body) = (frame.get(14..54)?, frame.get(54..)?);
            // Hop limit 255 (RFC 4861): no router has forwarded it.
            if head[6] != 58 || head[7] != 255 || *body.first()? != NEIGHBOUR_ADVERTISEMENT {
                return None;
            }
            let target: [u8; 16] = body.get(8..24)?.try_into().ok()?;
            let sender: Mac = frame.get(6..12)?.try_into().ok()?;
            Some((IpAddr::from(target), sender))
        }
        _ => None,
    }
}

fn ethernet(to: Mac, from: Mac, ethertype: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(96);
    frame.extend_from_slice(&to);
    frame.extend_from_slice(&from);
    frame.extend_from_slice(&ethertype.to_be_bytes());
    frame
}

/// A request, also for announcements (RFC 5227, section 3).
fn arp(mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, ARP);
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend_from_slice(&mac);
    frame.extend_from_slice(&sender.octets());
    frame.extend_from_slice(&[0; 6]);
    frame.extend_from_slice(&target.octets());
    frame
}

fn icmp6(mac: Mac, from: Ipv6Addr, to: Ipv6Addr, mut body: Vec<u8>) -> Vec<u8> {
    let group = to.octets();
    let length = u16::try_from(body.len()).unwrap_or(0);
    let mut pseudo = Vec::with_capacity(40 + body.len());
    pseudo.extend_from_slice(&from.octets());
    pseudo.extend_from_slice(&group);
    pseudo.extend_from_slice(&u32::from(length).to_be_bytes());
    pseudo.extend_from_slice(&[0, 0, 0, 58]);
    pseudo.extend_from_slice(&body);
    body[2..4].copy_from_slice(&checksum(&pseudo).to_be_bytes());
    let mut frame = ethernet([0x33, 0x33, group[12], group[13], group[14], group[15]], mac, IPV6);
    frame.extend_from_slice(&[0x60, 0, 0, 0]);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&[58, 255]);
    frame.extend_from_slice(&from.octets());
    frame.extend_from_slice(&group);
    frame.extend_from_slice(&body);
    frame
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 1];

    #[test]
    fn announcements_are_parsed_and_probes_are_not() {
        for vip in ["10.0.0.100", "fd00::100"] {
            let vip: IpAddr = vip.parse().expect("address");
            assert_eq!(announced_address(&announcement(MAC, vip)), Some((vip, MAC)));
            assert_eq!(announced_address(&probe(MAC, vip)), None);
        }
    }

    #[test]
    fn forwarded_advertisement_is_ignored() {
        let mut frame = announcement(MAC, "fd00::100".parse().expect("address"));
        frame[21] = 254;
        assert_eq!(announced_address(&frame), None);
    }

    #[test]
    fn checksum_verifies() {
        let frame = announcement(MAC, "fd00::100".parse().expect("address"));
        let mut pseudo = frame[22..54].to_vec();
        pseudo.extend_from_slice(&[0, 0, 0, 32, 0, 0, 0, 58]);
        pseudo.extend_from_slice(&frame[54..]);
        assert_eq!(checksum(&pseudo), 0);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(frame in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = announced_address(&frame);
        }
    }
}

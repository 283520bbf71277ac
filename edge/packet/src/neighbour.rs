// SPDX-License-Identifier: Apache-2.0
//! ARP requests (RFC 826) and neighbour solicitations (RFC 4861), and the frames that answer them.

use crate::checksum;
use crate::ethernet::{ARP, IPV6, LENGTH};
use crate::read::{MAX_HEADERS, be16, word};
use crate::{Packet, V4, V6};

/// Length of an ARP packet for Ethernet and IPv4.
pub const ARP_LENGTH: usize = 28;
const HARDWARE: u16 = 1;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// An ARP request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpRequest {
    /// Who asks.
    pub mac: [u8; 6],
    /// The asking host's address.
    pub sender: V4,
    /// The address that is asked for.
    pub target: V4,
}

/// Parses an ARP request at `offset`. Announcements, which ask for the sender's own address, are
/// none.
#[inline(always)]
pub fn arp_request<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<ArpRequest> {
    let arp: &[u8; ARP_LENGTH] = packet.at(offset)?;
    let is_request = be16(arp, 0) == HARDWARE
        && be16(arp, 2) == crate::ethernet::IPV4
        && be16(arp, 4) == 0x0604
        && be16(arp, 6) == REQUEST;
    let mac = [arp[8], arp[9], arp[10], arp[11], arp[12], arp[13]];
    let (sender, target) = (V4(word(arp, 14)), V4(word(arp, 24)));
    (is_request && sender != target).then_some(ArpRequest { mac, sender, target })
}

/// A frame with an ARP reply.
pub const ARP_REPLY: usize = LENGTH + ARP_LENGTH;

/// Answers that `mac` has the address, in place of the request: the program's own memory has no room for
/// bytes at odd places.
#[inline(always)]
pub fn arp_reply(frame: &mut [u8; ARP_REPLY], request: &ArpRequest, mac: [u8; 6]) {
    put(frame, 0, request.mac);
    put(frame, 6, mac);
    put(frame, 12, ARP.to_be_bytes());
    put(frame, 14, [0, 1, 8, 0, 6, 4]);
    put(frame, 20, REPLY.to_be_bytes());
    put(frame, 22, mac);
    put(frame, 28, request.target.0.to_ne_bytes());
    put(frame, 32, request.mac);
    put(frame, 38, request.sender.0.to_ne_bytes());
}

const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
const ALL_NODES: V6 = V6([u32::from_be(0xff02_0000), 0, 0, u32::from_be(1)]);

/// A neighbour solicitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation {
    /// Who asks.
    pub mac: [u8; 6],
    /// The asking host's address; unspecified if the host only tries whether the target is free.
    pub sender: V6,
    /// The address that is asked for.
    pub target: V6,
}

/// Parses a neighbour solicitation in the IPv6 packet at `offset`, whose Ethernet sender is `mac`.
/// It must come from this link: hop limit 255.
#[inline(always)]
pub fn solicitation<P: Packet + ?Sized>(packet: &P, offset: usize, mac: [u8; 6]) -> Option<Solicitation> {
    let header: &[u8; 64] = packet.at(offset)?;
    let is_solicitation = header[0] >> 4 == 6
        && header[6] == crate::protocol::ICMP6
        && header[7] == 255
        && header[40] == SOLICITATION
        && header[41] == 0;
    let address =
        |at| V6([word(header, at), word(header, at + 4), word(header, at + 8), word(header, at + 12)]);
    is_solicitation.then(|| Solicitation { mac, sender: address(8), target: address(48) })
}

const ADVERTISEMENT_LENGTH: u16 = 32;
/// A frame with a neighbour advertisement.
pub const ADVERTISEMENT_FRAME: usize = LENGTH + 40 + ADVERTISEMENT_LENGTH as usize;

/// Answers that `mac` has the address, in place of the solicitation.
#[inline(always)]
pub fn advertisement(frame: &mut [u8; ADVERTISEMENT_FRAME], solicitation: &Solicitation, mac: [u8; 6]) {
    let is_trial = solicitation.sender == V6::default();
    let (to, to_mac, flags) = if is_trial {
        (ALL_NODES, [0x33, 0x33, 0, 0, 0, 1], OVERRIDE)
    } else {
        (solicitation.sender, solicitation.mac, SOLICITED | OVERRIDE)
    };
    put(frame, 0, to_mac);
    put(frame, 6, mac);
    put(frame, 12, IPV6.to_be_bytes());
    put(frame, 14, [0x60, 0, 0, 0]);
    put(frame, 18, ADVERTISEMENT_LENGTH.to_be_bytes());
    put(frame, 20, [crate::protocol::ICMP6, 255]);
    put_address(frame, 22, solicitation.target);
    put_address(frame, 38, to);
    put(frame, 54, [ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0]);
    put_address(frame, 62, solicitation.target);
    // Option: the target's link-layer address, of one unit of eight bytes.
    put(frame, 78, [2, 1]);
    put(frame, 80, mac);
    let mut sum = u32::from(crate::protocol::ICMP6) + u32::from(ADVERTISEMENT_LENGTH);
    let mut at = 22;
    while at < ADVERTISEMENT_FRAME {
        sum += u32::from(be16(frame, at));
        at += 2;
    }
    put(frame, 56, checksum::finish(sum).to_be_bytes());
}

#[inline(always)]
fn put<const N: usize, const M: usize>(frame: &mut [u8; N], at: usize, bytes: [u8; M]) {
    let mut index = 0;
    while index < M {
        frame[at + index] = bytes[index];
        index += 1;
    }
}

#[inline(always)]
fn put_address<const N: usize>(frame: &mut [u8; N], at: usize, address: V6) {
    put(frame, at, address.0[0].to_ne_bytes());
    put(frame, at + 4, address.0[1].to_ne_bytes());
    put(frame, at + 8, address.0[2].to_ne_bytes());
    put(frame, at + 12, address.0[3].to_ne_bytes());
}

const _: () = assert!(ADVERTISEMENT_FRAME <= MAX_HEADERS);

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};

    const CLIENT: [u8; 6] = [2, 0, 0, 0, 0, 9];
    const EDGE: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn v4(text: &str) -> V4 {
        text.parse::<Ipv4Addr>().expect("address").into()
    }

    fn v6(text: &str) -> V6 {
        text.parse::<Ipv6Addr>().expect("address").into()
    }

    fn request(sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        let mut frame = vec![0xff; 6];
        frame.extend(CLIENT);
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(CLIENT);
        frame.extend(sender);
        frame.extend([0; 6]);
        frame.extend(target);
        frame
    }

    #[test]
    fn arp_request_is_answered() {
        let frame = request([10, 0, 0, 9], [10, 0, 0, 100]);
        let parsed = arp_request(&frame[..], 14).expect("a request");
        assert_eq!(parsed, ArpRequest { mac: CLIENT, sender: v4("10.0.0.9"), target: v4("10.0.0.100") });
        let mut reply = [1; ARP_REPLY];
        arp_reply(&mut reply, &parsed, EDGE);
        assert_eq!(reply[..14], [&CLIENT[..], &EDGE, &[8, 6]].concat());
        assert_eq!(reply[14..22], [0, 1, 8, 0, 6, 4, 0, 2]);
        assert_eq!(reply[22..32], [&EDGE[..], &[10, 0, 0, 100]].concat());
        assert_eq!(reply[32..], [&CLIENT[..], &[10, 0, 0, 9]].concat());
    }

    #[test]
    fn announcements_replies_and_truncated_requests_are_none() {
        assert_eq!(arp_request(&request([10, 0, 0, 100], [10, 0, 0, 100])[..], 14), None);
        let mut reply = request([10, 0, 0, 9], [10, 0, 0, 100]);
        reply[21] = 2;
        assert_eq!(arp_request(&reply[..], 14), None);
        let frame = request([10, 0, 0, 9], [10, 0, 0, 100]);
        for length in 0..frame.len() {
            assert_eq!(arp_request(&frame[..length], 14), None);
        }
    }

    fn solicit(sender: &str, hop_limit: u8) -> Vec<u8> {
        let mut frame = vec![0x33, 0x33, 0xff, 0, 1, 0];
        frame.extend(CLIENT);
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, 58, hop_limit]);
        frame.extend(sender.parse::<Ipv6Addr>().expect("address").octets());
        frame.extend("ff02::1:ff00:100".parse::<Ipv6Addr>().expect("address").octets());
        frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend("fd00::100".parse::<Ipv6Addr>().expect("address").octets());
        frame
    }

    #[test]
    fn solicitation_is_answered() {
        let parsed = solicitation(&solicit("fd00::9", 255)[..], 14, CLIENT).expect("a solicitation");
        assert_eq!(parsed, Solicitation { mac: CLIENT, sender: v6("fd00::9"), target: v6("fd00::100") });
        let mut frame = [1; ADVERTISEMENT_FRAME];
        advertisement(&mut frame, &parsed, EDGE);
        assert_eq!(frame[..6], CLIENT);
        assert_eq!(frame[58], 0x60);
        assert_eq!(frame[80..], EDGE);
        // The sum over the pseudo-header and the message is correct.
        let pseudo = u32::from(crate::protocol::ICMP6) + 32;
        assert_eq!(checksum::finish(checksum::sum(&frame[22..]) + pseudo), 0);
    }

    #[test]
    fn a_host_that_tries_an_address_is_answered_through_all_nodes() {
        let parsed = solicitation(&solicit("::", 255)[..], 14, CLIENT).expect("a solicitation");
        let mut frame = [1; ADVERTISEMENT_FRAME];
        advertisement(&mut frame, &parsed, EDGE);
        assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(frame[58], 0x20, "not solicited");
        let to: [u8; 16] = frame[38..54].try_into().expect("16 bytes");
        assert_eq!(Ipv6Addr::from(to), "ff02::1".parse::<Ipv6Addr>().expect("address"));
    }

    #[test]
    fn forwarded_and_truncated_solicitations_are_none() {
        assert_eq!(solicitation(&solicit("fd00::9", 64)[..], 14, CLIENT), None);
        let frame = solicit("fd00::9", 255);
        for length in 0..frame.len() {
            assert_eq!(solicitation(&frame[..length], 14, CLIENT), None);
        }
    }
}

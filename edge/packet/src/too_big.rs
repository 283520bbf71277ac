// SPDX-License-Identifier: Apache-2.0
//! The ICMP error that tells a client the longest packet for a tunnel (RFC 1191, RFC 8201). It takes
//! the place of the packet in its frame.

use crate::ethernet::LENGTH;
use crate::read::{be16, word};
use crate::{Packet, checksum, protocol};

const HEADER4: usize = 20;
const HEADER6: usize = 40;
const ICMP: usize = 8;
/// Bytes of the payload that an error quotes: the ports, and TCP's sequence number.
const QUOTED_PAYLOAD: usize = 8;
/// A frame with the error, of IPv4.
pub const FRAME4: usize = LENGTH + HEADER4 + ICMP + HEADER4 + QUOTED_PAYLOAD;
/// A frame with the error, of IPv6.
pub const FRAME6: usize = LENGTH + HEADER6 + ICMP + HEADER6 + QUOTED_PAYLOAD;
/// The length fields of both.
const TOTAL4: u16 = 56;
const PAYLOAD6: u16 = 56;
const _: () = assert!(LENGTH + 56 == FRAME4 && LENGTH + HEADER6 + 56 == FRAME6);
const DONT_FRAGMENT: u16 = 0x4000;
const HOP_LIMIT: u8 = 64;

/// The first bytes of an IP packet, as words: what an error quotes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote<const WORDS: usize>([u32; WORDS]);

/// A quote of IPv4.
pub type Quote4 = Quote<7>;
/// A quote of IPv6.
pub type Quote6 = Quote<12>;

impl Quote4 {
    /// `None` if the packet may be fragmented, or has options: its ports would not be in the quote.
    #[inline(always)]
    pub fn read<P: Packet + ?Sized>(packet: &P) -> Option<Self> {
        let bytes: &[u8; HEADER4 + QUOTED_PAYLOAD] = packet.at(LENGTH)?;
        let can_answer = bytes[0] == 0x45 && be16(bytes, 6) & DONT_FRAGMENT != 0;
        can_answer.then(|| Self(words(bytes)))
    }

    /// Writes the error over the packet's frame, whose Ethernet header must still be there.
    #[inline(always)]
    pub fn answer(&self, frame: &mut [u8; FRAME4], mtu: u16) {
        exchange_link(frame);
        put16(frame, LENGTH, 0x4500);
        put16(frame, LENGTH + 2, TOTAL4);
        put_word(frame, LENGTH + 4, 0);
        put16(frame, LENGTH + 8, u16::from(HOP_LIMIT) << 8 | u16::from(protocol::ICMP));
        put16(frame, LENGTH + 10, 0);
        put_word(frame, LENGTH + 12, self.0[4]);
        put_word(frame, LENGTH + 16, self.0[3]);
        let sum = checksum::finish(sum(frame, LENGTH, LENGTH + HEADER4));
        put16(frame, LENGTH + 10, sum);
        // Unreachable: fragmentation needed.
        let message = LENGTH + HEADER4;
        put16(frame, message, 0x0304);
        put_word(frame, message + 2, 0);
        put16(frame, message + 6, mtu);
        let mut index = 0;
        while index < self.0.len() {
            put_word(frame, message + ICMP + index * 4, self.0[index]);
            index += 1;
        }
        let sum = checksum::finish(sum_all(frame, message));
        put16(frame, message + 2, sum);
    }
}

impl Quote6 {
    /// `None` if the packet is too short.
    #[inline(always)]
    pub fn read<P: Packet + ?Sized>(packet: &P) -> Option<Self> {
        packet.at::<{ HEADER6 + QUOTED_PAYLOAD }>(LENGTH).map(|bytes| Self(words(bytes)))
    }

    /// Writes the error over the packet's frame, whose Ethernet header must still be there.
    #[inline(always)]
    pub fn answer(&self, frame: &mut [u8; FRAME6], mtu: u16) {
        exchange_link(frame);
        put_word(frame, LENGTH, u32::from_ne_bytes([0x60, 0, 0, 0]));
        put16(frame, LENGTH + 4, PAYLOAD6);
        put16(frame, LENGTH + 6, u16::from(protocol::ICMP6) << 8 | u16::from(HOP_LIMIT));
        let mut index = 0;
        while index < 4 {
            put_word(frame, LENGTH + 8 + index * 4, self.0[6 + index]);
            put_word(frame, LENGTH + 24 + index * 4, self.0[2 + index]);
            index += 1;
        }
        // Packet too big.
        let message = LENGTH + HEADER6;
        put_word(frame, message, u32::from_ne_bytes([2, 0, 0, 0]));
        put16(frame, message + 4, 0);
        put16(frame, message + 6, mtu);
        let mut index = 0;
        while index < self.0.len() {
            put_word(frame, message + ICMP + index * 4, self.0[index]);
            index += 1;
        }
        let pseudo = u32::from(protocol::ICMP6) + u32::from(PAYLOAD6);
        let sum = checksum::finish(pseudo + sum_all(frame, LENGTH + 8));
        put16(frame, message + 2, sum);
    }
}

#[inline(always)]
fn words<const BYTES: usize, const WORDS: usize>(bytes: &[u8; BYTES]) -> [u32; WORDS] {
    let mut words = [0; WORDS];
    let mut index = 0;
    while index < WORDS {
        words[index] = word(bytes, index * 4);
        index += 1;
    }
    words
}

#[inline(always)]
fn exchange_link<const N: usize>(frame: &mut [u8; N]) {
    let mut index = 0;
    while index < 6 {
        frame.swap(index, index + 6);
        index += 1;
    }
}

#[inline(always)]
fn put16<const N: usize>(frame: &mut [u8; N], at: usize, value: u16) {
    [frame[at], frame[at + 1]] = value.to_be_bytes();
}

#[inline(always)]
fn put_word<const N: usize>(frame: &mut [u8; N], at: usize, value: u32) {
    [frame[at], frame[at + 1], frame[at + 2], frame[at + 3]] = value.to_ne_bytes();
}

#[inline(always)]
fn sum<const N: usize>(frame: &[u8; N], mut at: usize, end: usize) -> u32 {
    let mut sum = 0;
    while at < end {
        sum += u32::from(be16(frame, at));
        at += 2;
    }
    sum
}

#[inline(always)]
fn sum_all<const N: usize>(frame: &[u8; N], at: usize) -> u32 {
    sum(frame, at, N)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::Frame;
    use core::net::IpAddr;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("address")
    }

    #[test]
    fn error_of_ipv4_quotes_the_packet() {
        let (client, vip) = (address("192.0.2.7"), address("10.0.0.100"));
        let mut packet = Frame::tcp((client, 40_000), (vip, 443), 16);
        packet.to = [2, 0, 0, 0, 0, 1];
        assert_eq!(Quote4::read(&packet.bytes()[..]), None, "may be fragmented");
        packet.fragment = [0, 7, 0x40, 0];
        let bytes = packet.bytes();
        let quote = Quote4::read(&bytes[..]).expect("a quote");
        let mut frame = [1; FRAME4];
        frame[..14].copy_from_slice(&bytes[..14]);
        quote.answer(&mut frame, 1450);
        let mut body = vec![0, 0, 5, 0xaa];
        body.extend(&packet.packet()[..28]);
        let mut expected = Frame::icmp(vip, client, 3, 4, &body);
        (expected.to, expected.from) = (packet.from, packet.to);
        assert_eq!(frame[..], expected.bytes()[..]);
        packet.options = vec![1; 4];
        assert_eq!(Quote4::read(&packet.bytes()[..]), None, "has options");
    }

    #[test]
    fn error_of_ipv6_quotes_the_packet() {
        let (client, vip) = (address("2001:db8::7"), address("fd00::100"));
        let packet = Frame::tcp((client, 40_000), (vip, 443), 16);
        let bytes = packet.bytes();
        let quote = Quote6::read(&bytes[..]).expect("a quote");
        let mut frame = [1; FRAME6];
        frame[..14].copy_from_slice(&bytes[..14]);
        quote.answer(&mut frame, 1450);
        let mut body = vec![0, 0, 5, 0xaa];
        body.extend(&packet.packet()[..48]);
        let mut expected = Frame::icmp(vip, client, 2, 0, &body);
        (expected.to, expected.from) = (packet.from, packet.to);
        assert_eq!(frame[..], expected.bytes()[..]);
    }
}

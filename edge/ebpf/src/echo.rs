// SPDX-License-Identifier: Apache-2.0
//! ICMP to a VIP: echo requests are answered, errors follow the flow that they are about.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::bpf_csum_update;
use steerage_edge_packet::ethernet::LENGTH;
use steerage_edge_packet::maps::Event;
use steerage_edge_packet::{TcpFlags, checksum, hash, icmp, protocol, quoted_flow};

use crate::flow::now;
use crate::frame::Frame;
use crate::maps::{Family, VIPS, drop_if_vip};
use crate::neighbour::send_back;
use crate::open::{Opening, open};
use crate::unusual::parse;
use crate::{DROP, PASS, send};

/// The hop limit of echo replies.
const HOP_LIMIT: u8 = 64;

/// An error goes to the target of the flow that it quotes.
#[inline(never)]
pub fn error<A: Family>(skb: *mut __sk_buff) -> i32 {
    let Some((frame, link, datagram)) = parse::<A>(skb) else { return PASS };
    let Some(message) = icmp(&frame, &datagram) else { return PASS };
    let Some(key) = quoted_flow(&frame, message, datagram.destination) else {
        return drop_if_vip(datagram.destination.mapped(), Event::UnknownIcmp);
    };
    let opening = Opening {
        source: datagram.source.mapped(),
        mac: link.source,
        sender: hash::mac_mark(link.source),
        now: now(),
        flags: TcpFlags(0),
        is_error: true,
        reserved: 0,
    };
    send::send(&frame, &datagram, open(&key, &opening))
}

/// Turns the request into its reply.
#[inline(never)]
pub fn echo<A: Family>(skb: *mut __sk_buff) -> i32 {
    let Some((frame, _, datagram)) = parse::<A>(skb) else { return PASS };
    // SAFETY: only whether the element exists matters.
    if unsafe { VIPS.get(datagram.destination.mapped()) }.is_none() {
        return PASS;
    }
    let is_v4 = A::ICMP == protocol::ICMP;
    let turned = if is_v4 { turn4(&frame) } else { turn6(&frame, datagram.hop_limit) };
    match turned {
        Some(()) => send_back(frame.skb, Event::Echo),
        None => DROP,
    }
}

const ECHO_REPLY4: u8 = 0;
const ECHO_REPLY6: u8 = 129;

#[inline(always)]
fn turn4(frame: &Frame) -> Option<()> {
    turn_link(frame)?;
    let header = frame.at_mut::<28>(LENGTH)?;
    swap::<4>(header, 12, 16);
    let word = |bytes: &[u8; 28], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let old = word(header, 8);
    header[8] = HOP_LIMIT;
    let sum = checksum::changed(word(header, 10), old, word(header, 8));
    [header[10], header[11]] = sum.to_be_bytes();
    let old = word(header, 20);
    header[20] = ECHO_REPLY4;
    let sum = checksum::changed(word(header, 22), old, word(header, 20));
    [header[22], header[23]] = sum.to_be_bytes();
    Some(())
}

#[inline(always)]
fn turn6(frame: &Frame, hop_limit: u8) -> Option<()> {
    turn_link(frame)?;
    let header = frame.at_mut::<48>(LENGTH)?;
    swap::<16>(header, 8, 24);
    header[7] = HOP_LIMIT;
    let word = |bytes: &[u8; 48], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let old = word(header, 40);
    header[40] = ECHO_REPLY6;
    let sum = checksum::changed(word(header, 42), old, word(header, 40));
    [header[42], header[43]] = sum.to_be_bytes();
    // The device's checksum over the packet: the hop limit is the upper byte of its word in memory.
    let (old, new) = (u32::from(hop_limit) << 8, u32::from(HOP_LIMIT) << 8);
    let difference = u64::from(new) + u64::from(!old);
    // SAFETY: the program's own context.
    unsafe { bpf_csum_update(frame.skb, (difference as u32).wrapping_add((difference >> 32) as u32)) };
    Some(())
}

#[inline(always)]
fn turn_link(frame: &Frame) -> Option<()> {
    swap::<6>(frame.at_mut::<14>(0)?, 0, 6);
    Some(())
}

/// Exchanges two fields of `N` bytes.
#[inline(always)]
fn swap<const N: usize>(bytes: &mut [u8], first: usize, second: usize) {
    let mut index = 0;
    while index < N {
        bytes.swap(first + index, second + index);
        index += 1;
    }
}

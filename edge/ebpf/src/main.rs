// SPDX-License-Identifier: Apache-2.0
//! The edge's program in the kernel: at tc ingress of the link it forwards packets to VIPs to their
//! targets, and answers for the VIPs while the daemon's lease lasts. Some time after a daemon that other
//! hosts can stand in for is gone, it does nothing.
//!
//! `edge/dataplane` loads it, and is the only writer of its maps but for flows and counters. What is
//! not for a VIP is left to the kernel as it is.
//!
//! The path of an established flow has four look-ups: the gate, the flow, its Service and its
//! target, of which only the flow's is in a hash table. All else is in functions of its own, which
//! keeps that path short and the stack small.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod echo;
mod flow;
mod fragment;
mod frame;
mod maps;
mod neighbour;
mod open;
mod send;
mod unusual;

use aya_ebpf::bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use steerage_edge_packet::ethernet::{ARP, IPV4, IPV6, LENGTH, VLAN_MASK, ethernet};
use steerage_edge_packet::maps::seconds;
use steerage_edge_packet::{Fragment, TcpFlags, Transport, V4, V6, hash, transport};

use frame::Frame;
use maps::Family;

/// The next program, or the kernel, continues with the packet.
pub const PASS: i32 = TC_ACT_UNSPEC;
/// The packet ends here.
pub const DROP: i32 = TC_ACT_SHOT;
/// The frame is addressed to this host.
pub const PACKET_HOST: u32 = 0;

/// Returned by functions of the program, never to the kernel: another function has the packet.
pub const UNDECIDED: i32 = i32::MIN;

/// The function with the usual path has a stack of its own, so that those after it have room.
#[classifier]
pub fn edge(ctx: TcContext) -> i32 {
    let skb = ctx.skb.skb;
    let Some(frame) = Frame::open(skb) else { return PASS };
    let Some(link) = ethernet(&frame) else { return PASS };
    if frame.vlan() & VLAN_MASK != 0 {
        return PASS;
    }
    match link.kind {
        IPV4 => match usual::<V4>(skb) {
            UNDECIDED => unusual::ip::<V4>(skb),
            action => action,
        },
        IPV6 => match usual::<V6>(skb) {
            UNDECIDED => unusual::ip::<V6>(skb),
            action => action,
        },
        ARP => neighbour::arp(skb),
        _ => PASS,
    }
}

/// Packets of established flows without extension headers, and all that is for no VIP.
#[inline(never)]
fn usual<A: Family>(skb: *mut __sk_buff) -> i32 {
    let frame = Frame::again(skb);
    let Some(link) = ethernet(&frame) else { return PASS };
    let Some(vip) = A::destination(&frame, LENGTH) else { return PASS };
    let (word, bit) = hash::gate(vip);
    if maps::GATE.get(word).is_none_or(|bits| bits & bit == 0) {
        return if unusual::is_icmp6::<A>(&frame) { UNDECIDED } else { PASS };
    }
    let clock = flow::clock();
    if maps::is_over(clock) {
        return PASS;
    }
    if frame.kind() == PACKET_HOST
        && let Some(datagram) = A::plain(&frame, LENGTH)
        && datagram.fragment == Fragment::Whole
    {
        let (ports, flags) = match transport(&frame, &datagram) {
            Some(Transport::Tcp(ports, flags)) => (ports, flags),
            Some(Transport::Udp(ports)) => (ports, TcpFlags(0)),
            _ => return UNDECIDED,
        };
        let key = datagram.flow(ports);
        if let Some(decision) = flow::established(&key, hash::mac_mark(link.source), flags, seconds(clock)) {
            return send::send(&frame, &datagram, decision);
        }
    }
    UNDECIDED
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier refuses a program that can come here.
    loop {}
}

/// No helper that the program calls is for programs under the GPL only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 11] = *b"Apache-2.0\0";

// SPDX-License-Identifier: Apache-2.0
//! Packets to VIPs off the usual path: new flows, fragments, extension headers, ICMP, malformed ones. Each kind
//! has a function of its own that parses the packet from the beginning: the usual path stays short,
//! and the stack of all functions together small.

use aya_ebpf::bindings::__sk_buff;
use steerage_edge_packet::ethernet::{Ethernet, LENGTH, ethernet};
use steerage_edge_packet::maps::Event;
use steerage_edge_packet::{Datagram, Fragment, IcmpKind, Packet, Transport, icmp, protocol, transport};

use crate::frame::Frame;
use crate::maps::{Family, drop_if_vip};
use crate::{PACKET_HOST, PASS, UNDECIDED, echo, flow, fragment, neighbour, send};

/// A neighbour solicitation goes to a group of addresses, which is no VIP.
#[inline(always)]
pub fn is_icmp6<A: Family>(frame: &Frame) -> bool {
    A::ICMP == protocol::ICMP6 && frame.at::<40>(LENGTH).is_some_and(|header| header[6] == protocol::ICMP6)
}

/// The frame, its link-layer header and its IP header.
#[inline(always)]
pub fn parse<A: Family>(skb: *mut __sk_buff) -> Option<(Frame, Ethernet, Datagram<A>)> {
    let frame = Frame::again(skb);
    Some((frame, ethernet(&frame)?, A::datagram(&frame, LENGTH)?))
}

/// Any packet whose destination has a bit in the gate. Not all functions nest: the stack of those
/// that do is limited.
#[inline(always)]
pub fn ip<A: Family>(skb: *mut __sk_buff) -> i32 {
    match kind::<A>(skb) {
        WITH_PORTS => with_ports::<A>(skb),
        FIRST_FRAGMENT => fragment::first::<A>(skb),
        LATER_FRAGMENT => fragment::later::<A>(skb),
        ECHO => echo::echo::<A>(skb),
        ERROR => echo::error::<A>(skb),
        action => action,
    }
}

const WITH_PORTS: i32 = UNDECIDED + 1;
const LATER_FRAGMENT: i32 = UNDECIDED + 2;
const ECHO: i32 = UNDECIDED + 3;
const ERROR: i32 = UNDECIDED + 4;
const FIRST_FRAGMENT: i32 = UNDECIDED + 5;

/// One of the kinds above, or the action for the packet.
#[inline(never)]
fn kind<A: Family>(skb: *mut __sk_buff) -> i32 {
    let frame = Frame::again(skb);
    if is_icmp6::<A>(&frame) {
        let answered = neighbour::icmp6(skb);
        if answered != UNDECIDED {
            return answered;
        }
    }
    // Read again: the packet may have moved.
    let frame = Frame::again(skb);
    let Some(vip) = A::destination(&frame, LENGTH) else { return PASS };
    if frame.kind() != PACKET_HOST {
        return PASS;
    }
    let event = match parse::<A>(skb) {
        None => Event::Malformed,
        Some((_, _, Datagram { fragment: Fragment::Later(_), .. })) => return LATER_FRAGMENT,
        Some((frame, _, datagram)) => match transport(&frame, &datagram) {
            Some(Transport::Tcp(..) | Transport::Udp(_)) => {
                return if datagram.fragment == Fragment::Whole { WITH_PORTS } else { FIRST_FRAGMENT };
            }
            Some(Transport::Icmp) => match icmp(&frame, &datagram) {
                _ if datagram.fragment != Fragment::Whole => Event::UnknownIcmp,
                None => Event::Malformed,
                Some(message) => match message.kind {
                    IcmpKind::Neighbour => return PASS,
                    IcmpKind::Echo if datagram.payload == LENGTH + A::HEADER => return ECHO,
                    IcmpKind::Error => return ERROR,
                    _ => Event::UnknownIcmp,
                },
            },
            Some(Transport::Other) => Event::NoListener,
            None => Event::Malformed,
        },
    };
    drop_if_vip(vip.mapped(), event)
}

/// Packets of new flows, and packets with extension headers.
#[inline(never)]
fn with_ports<A: Family>(skb: *mut __sk_buff) -> i32 {
    let Some((frame, link, datagram)) = parse::<A>(skb) else { return PASS };
    match flow::decide(&frame, link.source, &datagram, flow::now()) {
        Some(decision) => send::send(&frame, &datagram, decision),
        None => PASS,
    }
}

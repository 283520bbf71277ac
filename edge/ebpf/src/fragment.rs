// SPDX-License-Identifier: Apache-2.0
//! Packets in fragments: only the first has ports, and the later ones follow it.

use aya_ebpf::bindings::__sk_buff;
use steerage_edge_packet::maps::{Event, FORWARDER, FRAGMENT_TIME, FragmentFlow, FragmentKey};
use steerage_edge_packet::{Address, Datagram, Fragment, protocol};

use crate::flow::now;
use crate::maps::{FRAGMENTS, Family, drop_if_vip};
use crate::open::Decision;
use crate::unusual::parse;
use crate::{PASS, flow, open, send};

/// Forwards the first fragment of a packet, and notes where it goes. The packet is parsed again
/// after the decision: on Linux 6.1, what the parser had found did not survive the call in a register,
/// and first fragments of IPv6 were not noted.
#[inline(never)]
pub fn first<A: Family>(skb: *mut __sk_buff) -> i32 {
    let Some((frame, link, datagram)) = parse::<A>(skb) else { return PASS };
    let now = now();
    let Some(decision) = flow::decide(&frame, link.source, &datagram, now) else { return PASS };
    let Some((frame, _, datagram)) = parse::<A>(skb) else { return PASS };
    let Fragment::First(id) = datagram.fragment else { return PASS };
    if let Ok((service, target)) = decision.split() {
        // Without memory the later fragments are dropped.
        let first = FragmentFlow { target, service, seen: now, reserved: 0 };
        let _ = FRAGMENTS.insert(&key(&datagram, id), &first, 0);
    }
    send::send(&frame, &datagram, decision)
}

/// Forwards a later fragment.
#[inline(never)]
pub fn later<A: Family>(skb: *mut __sk_buff) -> i32 {
    let Some((frame, link, datagram)) = parse::<A>(skb) else { return PASS };
    let Fragment::Later(id) = datagram.fragment else { return PASS };
    // SAFETY: the element of a packet is used again only after an eviction.
    let first = unsafe { FRAGMENTS.get(&key(&datagram, id)) };
    match first {
        Some(first) if now().wrapping_sub(first.seen) <= FRAGMENT_TIME => {
            send::send(&frame, &datagram, Decision::forward(first.service, first.target))
        }
        _ if open::sender(link.source) == Some(FORWARDER) => PASS,
        _ => drop_if_vip(datagram.destination.mapped(), Event::UnknownFragment),
    }
}

#[inline(always)]
fn key<A: Address>(datagram: &Datagram<A>, id: u32) -> FragmentKey {
    let is_v4 = A::ICMP == protocol::ICMP;
    FragmentKey {
        client: datagram.source.mapped(),
        vip: datagram.destination.mapped(),
        id,
        protocol: if is_v4 { u32::from(datagram.protocol) } else { 0 },
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Answers ARP requests and neighbour solicitations for VIPs, while the VIP's lease lasts: a host
//! whose daemon is dead leaves the VIPs to others.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::{bpf_ktime_get_boot_ns, bpf_redirect, bpf_skb_change_tail};
use steerage_edge_packet::ethernet::{LENGTH, ethernet};
use steerage_edge_packet::maps::Event;
use steerage_edge_packet::neighbour::{
    ADVERTISEMENT_FRAME, advertisement, arp_reply, arp_request, solicitation,
};
use steerage_edge_packet::{Address, V6};

use crate::frame::Frame;
use crate::maps::{CONFIG, LEASES, VIPS, count, is_over};
use crate::{DROP, PASS, UNDECIDED, flow};

/// All ARP packets.
#[inline(never)]
pub fn arp(skb: *mut __sk_buff) -> i32 {
    let frame = Frame::again(skb);
    let Some(request) = arp_request(&frame, LENGTH) else { return PASS };
    let Some(Some(mac)) = answerer(request.target.mapped()) else { return PASS };
    let Some(reply) = frame.at_mut(0) else { return PASS };
    arp_reply(reply, &request, mac);
    send_back(skb, Event::Arp)
}

/// All packets of `ICMPv6` without extension headers. Undecided are those that are no solicitation for
/// a VIP.
#[inline(never)]
pub fn icmp6(skb: *mut __sk_buff) -> i32 {
    let frame = Frame::again(skb);
    let Some(link) = ethernet(&frame) else { return UNDECIDED };
    let Some(asked) = solicitation(&frame, LENGTH, link.source) else { return UNDECIDED };
    let Some(mac) = answerer(asked.target) else { return UNDECIDED };
    let Some(mac) = mac else { return PASS };
    // SAFETY: the program's own context. All pointers into the packet are read again.
    if unsafe { bpf_skb_change_tail(skb, ADVERTISEMENT_FRAME as u32, 0) } != 0 {
        return DROP;
    }
    let frame = Frame::again(skb);
    let Some(reply) = frame.at_mut(0) else { return DROP };
    advertisement(reply, &asked, mac);
    send_back(skb, Event::Neighbour)
}

/// Whether the address is a VIP, and the link-layer address that answers for it: none once its lease
/// has ended. Where the program is to do nothing, no address is a VIP.
#[inline(always)]
fn answerer(address: V6) -> Option<Option<[u8; 6]>> {
    // SAFETY: the value is one word.
    let vip = unsafe { VIPS.get(address) }?;
    if is_over(flow::clock()) {
        return None;
    }
    // SAFETY: reads a clock.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    let lasts = LEASES.get(vip.lease).is_some_and(|until| now <= *until);
    let config = CONFIG.get(0).filter(|_| lasts);
    if config.is_none() {
        count(Event::LeaseEnded);
    }
    Some(config.map(|config| config.mac))
}

/// Sends the frame out of the interface that it came from.
#[inline(always)]
pub fn send_back(skb: *mut __sk_buff, event: Event) -> i32 {
    count(event);
    // SAFETY: the program's own context.
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

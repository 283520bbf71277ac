// SPDX-License-Identifier: Apache-2.0
//! Sends a packet to its target.

use core::mem::offset_of;

use aya_ebpf::bindings::{
    __sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX, bpf_redir_neigh, bpf_tunnel_key,
};
use aya_ebpf::helpers::{
    bpf_csum_update, bpf_redirect, bpf_redirect_neigh, bpf_skb_change_tail, bpf_skb_set_tunnel_key,
};
use steerage_edge_packet::ethernet::LENGTH;
use steerage_edge_packet::maps::{Event, INET, LOCAL, TUNNEL, Target};
use steerage_edge_packet::too_big::{FRAME4, FRAME6, Quote4, Quote6};
use steerage_edge_packet::{Address, Datagram, Packet, protocol};

use crate::frame::Frame;
use crate::maps::{CONFIG, Family, SERVICE_COUNTERS, TARGET_COUNTERS, TARGETS, count};
use crate::open::Decision;
use crate::{DROP, PASS, UNDECIDED};

/// The hop limit inside a tunnel's own packets.
const TUNNEL_HOP_LIMIT: u8 = 64;
/// Size of a tunnel's key without the local address. Linux before 6.0 lacks that field and refuses a longer key; newer kernels accept both
/// sizes.
const TUNNEL_KEY: u32 = offset_of!(bpf_tunnel_key, __bindgen_anon_3) as u32;

#[inline(always)]
pub fn send<A: Family>(frame: &Frame, datagram: &Datagram<A>, decision: Decision) -> i32 {
    let (service, number) = match decision.split() {
        Ok(forward) => forward,
        Err(action) => return action,
    };
    let Some(target) = TARGETS.get(number).filter(|target| target.family != 0) else {
        count(Event::NoTarget);
        return DROP;
    };
    let is_local = target.flags & LOCAL != 0;
    if !is_local && !decrement_hop_limit::<A>(frame, datagram.hop_limit) {
        count(Event::HopLimit);
        return DROP;
    }
    let (packets, bytes) = (frame.segments(), frame.length() as u64);
    for counters in [SERVICE_COUNTERS.get_ptr_mut(service), TARGET_COUNTERS.get_ptr_mut(number)] {
        if let Some(counters) = counters {
            // SAFETY: the value is this CPU's own.
            unsafe {
                (*counters).packets += packets;
                (*counters).bytes += bytes;
            }
        }
    }
    if target.flags & (LOCAL | TUNNEL) != 0 {
        return if is_local { PASS } else { through_tunnel::<A>(frame.skb, target) };
    }
    let next_hop = core::ptr::from_ref(target).cast::<bpf_redir_neigh>().cast_mut();
    // SAFETY: a target begins with the fields of the next hop, and the kernel only reads them.
    unsafe { bpf_redirect_neigh(frame.interface(), next_hop, size_of::<bpf_redir_neigh>() as i32, 0) as i32 }
}

/// So that a loop ends. Returns whether a hop is left.
#[inline(always)]
fn decrement_hop_limit<A: Address>(frame: &Frame, hop_limit: u8) -> bool {
    if hop_limit <= 1 {
        return false;
    }
    // Read again: the packet may have moved.
    let frame = Frame::again(frame.skb);
    if A::ICMP == protocol::ICMP {
        let Some(header) = frame.at_mut::<20>(LENGTH) else { return false };
        header[8] = hop_limit - 1;
        // RFC 1624, for a word that is less by 0x0100: what the kernel's `ip_decrease_ttl` does.
        let sum = u32::from(u16::from_be_bytes([header[10], header[11]])) + 0x0100;
        let sum = (sum + (sum >= 0xffff) as u32) as u16;
        [header[10], header[11]] = sum.to_be_bytes();
    } else {
        let Some(header) = frame.at_mut::<40>(LENGTH) else { return false };
        header[7] = hop_limit - 1;
        // No checksum in the header covers it, but that of the device over the whole packet: the difference of the two words.
        // SAFETY: the program's own context.
        unsafe { bpf_csum_update(frame.skb, !0x0100) };
    }
    true
}

/// Encapsulates a packet for a target that is no neighbour.
#[inline(never)]
fn through_tunnel<A: Family>(skb: *mut __sk_buff, target: &Target) -> i32 {
    let Some(config) = CONFIG.get(0).filter(|config| config.tunnel != 0) else {
        count(Event::NoTarget);
        return DROP;
    };
    let frame = Frame::again(skb);
    if longest_packet::<A>(&frame) > u32::from(target.mtu) {
        let is_v4 = A::ICMP == protocol::ICMP;
        let answer = if is_v4 { answer4(skb, target.mtu) } else { answer6(skb, target.mtu) };
        if answer != UNDECIDED {
            count(Event::TooBig);
            return answer;
        }
    }
    // SAFETY: plain data.
    let mut key: bpf_tunnel_key = unsafe { core::mem::zeroed() };
    key.tunnel_id = target.vni;
    key.tunnel_ttl = TUNNEL_HOP_LIMIT;
    let flags = if target.family == INET {
        key.__bindgen_anon_1.remote_ipv4 = u32::from_be(target.address[0]);
        BPF_F_ZERO_CSUM_TX
    } else {
        key.__bindgen_anon_1.remote_ipv6 = target.address;
        BPF_F_TUNINFO_IPV6
    };
    let frame = Frame::again(skb);
    let Some(link) = frame.at_mut::<12>(0) else { return DROP };
    let mut index = 0;
    while index < 6 {
        link[index] = target.mac[index];
        link[6 + index] = config.mac[index];
        index += 1;
    }
    // SAFETY: the program's own context; the kernel reads the key.
    unsafe {
        if bpf_skb_set_tunnel_key(skb, &raw mut key, TUNNEL_KEY, u64::from(flags)) != 0 {
            count(Event::NoTarget);
            return DROP;
        }
        bpf_redirect(config.tunnel, 0) as i32
    }
}

/// The length of the IP packet, or of the longest one that was merged into it.
#[inline(always)]
fn longest_packet<A: Family>(frame: &Frame) -> u32 {
    let length = (frame.length() - LENGTH) as u32;
    let merged = frame.segment_size();
    if merged == 0 {
        return length;
    }
    let Some(datagram) = A::plain(frame, LENGTH) else { return length };
    let headers = (datagram.payload - LENGTH) as u32;
    match frame.at_found::<20>(datagram.payload) {
        Some(header) if datagram.protocol == protocol::TCP => {
            headers + u32::from(header[12] >> 4) * 4 + merged
        }
        _ => headers + 8 + merged,
    }
}

/// Tells the client. Undecided are packets that the tunnel may fragment.
#[inline(always)]
fn answer4(skb: *mut __sk_buff, mtu: u16) -> i32 {
    let Some(quote) = Quote4::read(&Frame::again(skb)) else { return UNDECIDED };
    // SAFETY: the program's own context. All pointers into the packet are read again.
    if unsafe { bpf_skb_change_tail(skb, FRAME4 as u32, 0) } != 0 {
        return DROP;
    }
    let frame = Frame::again(skb);
    let Some(bytes) = frame.at_mut(0) else { return DROP };
    quote.answer(bytes, mtu);
    // SAFETY: the program's own context.
    unsafe { bpf_redirect(frame.interface(), 0) as i32 }
}

/// Tells the client.
#[inline(always)]
fn answer6(skb: *mut __sk_buff, mtu: u16) -> i32 {
    let Some(quote) = Quote6::read(&Frame::again(skb)) else { return DROP };
    // SAFETY: the program's own context. All pointers into the packet are read again.
    if unsafe { bpf_skb_change_tail(skb, FRAME6 as u32, 0) } != 0 {
        return DROP;
    }
    let frame = Frame::again(skb);
    let Some(bytes) = frame.at_mut(0) else { return DROP };
    quote.answer(bytes, mtu);
    // SAFETY: the program's own context.
    unsafe { bpf_redirect(frame.interface(), 0) as i32 }
}

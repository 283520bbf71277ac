// SPDX-License-Identifier: Apache-2.0
//! The path of established flows.

use aya_ebpf::helpers::bpf_ktime_get_coarse_ns;
use steerage_edge_packet::maps::{CLOSING, Flow, FlowKey, TOUCH, seconds};
use steerage_edge_packet::{Datagram, TcpFlags, Transport, hash, transport};

use crate::frame::Frame;
use crate::maps::{Family, SERVICES, TARGETS};
use crate::open::{Decision, Opening, open};

/// Nanoseconds since the start of the kernel, without suspended time. This clock needs no reading of the
/// hardware, and is a few milliseconds behind at most.
#[inline(always)]
pub fn clock() -> u64 {
    // SAFETY: reads a clock.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// The time in the units of flows.
#[inline(always)]
pub fn now() -> u32 {
    seconds(clock())
}

/// The target of an established flow for which nothing has changed since it was checked. `flags` of
/// UDP are zero.
#[inline(always)]
pub fn established<A: Family>(key: &FlowKey<A>, sender: u16, flags: TcpFlags, now: u32) -> Option<Decision> {
    if flags.opens() {
        return None;
    }
    // SAFETY: the element is used again for another flow only after an eviction, which takes those that were not looked up lately, or
    // after its deletion by a scan, long after it has ended. Other CPUs may write the same element: each field is whole, and `seen` may be late.
    let flow = unsafe { &mut *A::flows().get_ptr_mut(key)? };
    let (service, target) = (SERVICES.get(flow.service)?, TARGETS.get(flow.target)?);
    let is_current = flow.version == Flow::version(service.version, target.version) && flow.sender == sender;
    if !is_current || !flow.is_alive(key.protocol, now) {
        return None;
    }
    if flags.closes() {
        flow.seen = now | CLOSING;
    } else if flow.idle(now) >= TOUCH {
        flow.seen = now | (flow.seen & CLOSING);
    }
    Some(Decision::forward(flow.service, flow.target))
}

/// The target of a packet of TCP or UDP. `None` if it is neither.
#[inline(always)]
pub fn decide<A: Family>(frame: &Frame, mac: [u8; 6], datagram: &Datagram<A>, now: u32) -> Option<Decision> {
    let (ports, flags) = match transport(frame, datagram)? {
        Transport::Tcp(ports, flags) => (ports, flags),
        Transport::Udp(ports) => (ports, TcpFlags(0)),
        _ => return None,
    };
    let (key, sender) = (datagram.flow(ports), hash::mac_mark(mac));
    let source = datagram.source.mapped();
    let opening = Opening { mac, sender, source, now, flags, is_error: false, reserved: 0 };
    Some(open(&key, &opening))
}

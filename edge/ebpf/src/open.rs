// SPDX-License-Identifier: Apache-2.0
//! The target of a flow that is new, or that something has changed for.

use steerage_edge_packet::maps::{
    CLOSING, Event, FORWARDER, Flow, FlowKey, Mac, Member, SLOTS_PER_ELEMENT, Service, TCP_CLOSING,
};
use steerage_edge_packet::{TcpFlags, V6, hash, protocol};

use crate::maps::{
    Family, LISTENERS, MEMBERS, SENDERS, SERVICE_COUNTERS, SERVICES, SLOTS, TARGETS, contains, count,
    drop_if_vip,
};
use crate::{DROP, PASS};

/// What the packet says besides its flow.
#[repr(C)]
pub struct Opening {
    /// Who sent the packet: the client, or the router that an ICMP error comes from.
    pub source: V6,
    pub mac: [u8; 6],
    /// The mark of `mac`.
    pub sender: u16,
    pub now: u32,
    pub flags: TcpFlags,
    /// The packet is an ICMP error about the flow: nothing is remembered.
    pub is_error: bool,
    pub reserved: u16,
}

/// A Service and a target, or what else to do with the packet. One number: functions of the program
/// return nothing else.
#[derive(Clone, Copy)]
pub struct Decision(u64);

impl Decision {
    const ACTION: u64 = 1 << 63;

    #[inline(always)]
    pub fn forward(service: u32, target: u32) -> Self {
        Self(u64::from(service) << 32 | u64::from(target))
    }

    #[inline(always)]
    pub fn action(action: i32) -> Self {
        Self(Self::ACTION | u64::from(action as u32))
    }

    /// The Service and the target, or the action.
    #[inline(always)]
    pub fn split(self) -> Result<(u32, u32), i32> {
        if self.0 & Self::ACTION == 0 {
            Ok(((self.0 >> 32) as u32, self.0 as u32))
        } else {
            Err(self.0 as i32)
        }
    }
}

#[inline(never)]
pub fn open<A: Family>(key: &FlowKey<A>, opening: &Opening) -> Decision {
    let sender = sender(opening.mac);
    if sender == Some(FORWARDER) {
        return Decision::action(PASS);
    }
    let listener = key.listener();
    // SAFETY: the value is one word.
    let found = unsafe { LISTENERS.get(&listener) }.copied();
    // The element may have been used again for another listener meanwhile.
    let service =
        found.and_then(|number| SERVICES.get(number)).filter(|service| service.listener == listener);
    let (Some(number), Some(service)) = (found, service) else {
        let event = if opening.is_error { Event::UnknownIcmp } else { Event::NoListener };
        return Decision::action(drop_if_vip(listener.vip, event));
    };
    if sender.is_some_and(|set| !contains(set, opening.source)) {
        return refuse(number, Event::ForeignSource);
    }
    if service.ranges != 0 && !contains(service.ranges, key.client.mapped()) {
        return refuse(number, Event::OutsideSourceRanges);
    }
    let kept = if opening.flags.opens() { None } else { kept(key, number, service, opening.now) };
    let (chosen, is_established) = match kept {
        Some(kept) => kept,
        None => (slot(key, service), false),
    };
    let Some(target) = TARGETS.get(chosen).filter(|target| chosen != 0 && target.family != 0) else {
        return refuse(number, Event::NoTarget);
    };
    if opening.is_error {
        return Decision::forward(number, chosen);
    }
    let is_new = kept.is_none();
    if !(is_new && opening.flags.resets()) {
        let closing = if opening.flags.closes() { CLOSING } else { 0 };
        let flow = Flow {
            target: chosen,
            service: number,
            version: Flow::version(service.version, target.version),
            sender: opening.sender,
            seen: opening.now | closing,
        };
        remember(key, flow, is_new, is_established);
    }
    let opens = opening.flags.opens() || key.protocol == u32::from(protocol::UDP);
    if is_new
        && opens
        && let Some(counters) = SERVICE_COUNTERS.get_ptr_mut(number)
    {
        // SAFETY: the value is this CPU's own.
        unsafe { (*counters).flows += 1 };
    }
    Decision::forward(number, chosen)
}

/// The number of the set of addresses that a node or an edge host may send from, or [`FORWARDER`].
#[inline(always)]
pub fn sender(mac: [u8; 6]) -> Option<u32> {
    // SAFETY: the value is one word.
    unsafe { SENDERS.get(&Mac { mac, pad: 0 }) }.copied()
}

/// The target that the flow has, if it may keep it, and whether the flow is established.
#[inline(always)]
fn kept<A: Family>(key: &FlowKey<A>, number: u32, service: &Service, now: u32) -> Option<(u32, bool)> {
    // SAFETY: see `flow`.
    let established = unsafe { A::flows().get(key) }.filter(|flow| flow.is_alive(key.protocol, now));
    let (flow, is_established) = match established {
        Some(flow) => (flow, true),
        // SAFETY: see `flow`.
        None => (unsafe { A::recent().get(key) }.filter(|flow| flow.idle(now) <= TCP_CLOSING)?, false),
    };
    let target = flow.target;
    if flow.service != number {
        return None;
    }
    let is_usable = if key.protocol == u32::from(protocol::TCP) {
        TARGETS.get(target).is_some_and(|target| target.family != 0)
    } else {
        // Datagrams leave a target that has no slots: no other sign says that an exchange is over.
        // SAFETY: only whether the element exists matters.
        unsafe { MEMBERS.get(&Member { table: service.table, target }) }.is_some()
    };
    is_usable.then_some((target, is_established))
}

/// The target of the client's slot; zero if there is none.
#[inline(always)]
fn slot<A: Family>(key: &FlowKey<A>, service: &Service) -> u32 {
    let slots = service.slots;
    let slot = hash::slot(key.hash(service.flags), slots as u32);
    let slot = slot.wrapping_add((slots >> 32) as u32);
    if slots as u32 == 0 {
        return 0;
    }
    match SLOTS.get(slot / SLOTS_PER_ELEMENT) {
        Some(element) => element[(slot % SLOTS_PER_ELEMENT) as usize],
        None => 0,
    }
}

/// The first packet of a flow only makes an entry among the recent ones. The second packet makes the
/// flow established.
#[inline(always)]
fn remember<A: Family>(key: &FlowKey<A>, flow: Flow, is_new: bool, is_established: bool) {
    // A client's port may be used again: then the old connection is among the established flows.
    if let Some(old) = A::flows().get_ptr_mut(key) {
        // SAFETY: see `flow`.
        unsafe { *old = flow };
    } else if is_new || is_established {
        // A full table evicts another flow; without memory the flow follows its slot.
        let _ = A::recent().insert(key, &flow, 0);
    } else {
        let _ = A::flows().insert(key, &flow, 0);
    }
}

#[inline(always)]
fn refuse(service: u32, event: Event) -> Decision {
    count(event);
    if let Some(counters) = SERVICE_COUNTERS.get_ptr_mut(service) {
        // SAFETY: the value is this CPU's own.
        unsafe { (*counters).drops += 1 };
    }
    Decision::action(DROP)
}

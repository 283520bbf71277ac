// SPDX-License-Identifier: Apache-2.0
//! Flows: their keys, what is remembered of each, and for how long.

use crate::maps::{AFFINITY, ListenerKey};
use crate::{Address, V4, V6, protocol, transport};

/// A flow from a client to a VIP.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey<A> {
    /// The client.
    pub client: A,
    /// The VIP.
    pub vip: A,
    /// The client's port and the VIP's, as in the packet.
    pub ports: u32,
    /// Protocol number.
    pub protocol: u32,
}

/// The target of a flow.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Number of the target.
    pub target: u32,
    /// Number of the Service.
    pub service: u32,
    /// What [`Flow::version`] was when the flow was checked last.
    pub version: u16,
    /// The mark of the link-layer sender that was checked last.
    pub sender: u16,
    /// Time of a recent packet, in the units of [`seconds`], with [`CLOSING`].
    pub seen: u32,
}

/// Set in [`Flow::seen`] once either side has closed the connection.
pub const CLOSING: u32 = 1 << 31;

impl Flow {
    /// Changes when the Service changes in a way that concerns its flows, and when the target leaves
    /// a table: the flow is then checked again.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "a flow is idle for less than 65,536 changes")]
    pub fn version(service: u32, target: u32) -> u16 {
        service.wrapping_add(target) as u16
    }

    /// How long no packet was seen, in the units of [`seconds`]. 0 if the last packet is later than `now`: a scan reads the clock once,
    /// before it reads the flows. The clock wraps, so half of all times count as later.
    #[inline(always)]
    pub fn idle(&self, now: u32) -> u32 {
        let idle = now.wrapping_sub(self.seen) & !CLOSING;
        if idle < CLOSING / 2 { idle } else { 0 }
    }

    /// Whether the flow still has its target.
    #[inline(always)]
    pub fn is_alive(&self, protocol: u32, now: u32) -> bool {
        let limit = if protocol != u32::from(protocol::TCP) {
            UDP_IDLE
        } else if self.seen & CLOSING == 0 {
            TCP_IDLE
        } else {
            TCP_CLOSING
        };
        self.idle(now) <= limit
    }
}

/// A time in units of 2^30 ns, about 1.07 s: what fits 31 bits without a division.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "wraps after 73 years")]
pub const fn seconds(nanoseconds: u64) -> u32 {
    (nanoseconds >> 30) as u32 & !CLOSING
}

/// How long an idle connection keeps its target: an hour.
pub const TCP_IDLE: u32 = seconds(3_600_000_000_000);
/// How long after either side has closed the connection: a minute.
pub const TCP_CLOSING: u32 = seconds(61_000_000_000);
/// How long an idle exchange of datagrams keeps its target: two minutes.
pub const UDP_IDLE: u32 = seconds(121_000_000_000);
/// A flow's time is written again once it is so old: each write takes the cache line from other CPUs.
pub const TOUCH: u32 = 4;

impl FlowKey<V4> {
    /// The same as a key of IPv6.
    pub fn mapped(self) -> FlowKey<V6> {
        let Self { client, vip, ports, protocol } = self;
        FlowKey { client: client.mapped(), vip: vip.mapped(), ports, protocol }
    }
}

impl<A: Address> FlowKey<A> {
    /// The listener that the client talks to.
    #[inline(always)]
    pub fn listener(&self) -> ListenerKey {
        let [_, _, a, b] = self.ports.to_ne_bytes();
        ListenerKey {
            vip: self.vip.mapped(),
            port: u32::from_ne_bytes([0, 0, a, b]),
            protocol: self.protocol,
        }
    }

    /// The hash that selects the slot.
    #[inline(always)]
    pub fn hash(&self, flags: u32) -> u32 {
        let port = if flags & AFFINITY == 0 { transport::source_port(self.ports) } else { 0 };
        self.client.flow_hash(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_flows_lose_their_target() {
        let flow = |seen| Flow { seen, ..Flow::default() };
        let (tcp, udp) = (6, 17);
        assert!(flow(100).is_alive(tcp, 100 + TCP_IDLE));
        assert!(!flow(100).is_alive(tcp, 101 + TCP_IDLE));
        assert!(!flow(0x64 | CLOSING).is_alive(tcp, 101 + TCP_CLOSING));
        assert!(flow(100).is_alive(udp, 100 + UDP_IDLE));
        assert!(!flow(100).is_alive(udp, 101 + UDP_IDLE));
        // A packet has come since the clock was read.
        assert_eq!((flow(103).idle(100), flow(0x67 | CLOSING).idle(100)), (0, 0));
        assert!(flow(103).is_alive(tcp, 100) && flow(0).is_alive(udp, !CLOSING));
        // The clock wraps.
        assert!(flow(!CLOSING).is_alive(udp, 3));
        assert_eq!(seconds(3_600_000_000_000), 3352);
    }

    #[test]
    fn listener_of_a_flow_is_found() {
        let vip: core::net::Ipv4Addr = "10.0.0.1".parse().expect("address");
        let ports = crate::transport::ports(40_000, 443);
        let key = FlowKey { client: V4(1), vip: V4::from(vip), ports, protocol: 6 };
        assert_eq!(key.listener(), ListenerKey::new(vip.into(), 6, 443));
        assert_eq!(key.listener().port_number(), 443);
    }
}

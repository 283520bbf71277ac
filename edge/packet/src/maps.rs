// SPDX-License-Identifier: Apache-2.0
//! Keys and values of the maps that program and daemon share.
//!
//! Addresses and ports are in the order of their bytes in a packet. All types are without padding,
//! because the kernel compares keys byte by byte, and are aligned to eight bytes: the program builds
//! them on its stack, where the verifier refuses a word at an odd place. A change of any of them changes [`LAYOUT`].

use crate::{V4, V6, transport};

pub use crate::counters::{Counters, Event};
pub use crate::flow::{CLOSING, Flow, FlowKey, TCP_CLOSING, TCP_IDLE, TOUCH, UDP_IDLE, seconds};

/// The version of all types and maps. A daemon adopts only maps of its own layout.
pub const LAYOUT: u32 = 1;

/// A VIP's listener.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerKey {
    /// The VIP.
    pub vip: V6,
    /// The port, in the upper half, as in a packet's ports; the lower half is zero.
    pub port: u32,
    /// Protocol number.
    pub protocol: u32,
}

/// How packets to a listener are forwarded. The value of a listener is the number of its Service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Its key. An element of the hash table may be used again while a packet looks at it.
    pub listener: ListenerKey,
    /// The first slot in the upper half, the number of slots in the lower: both are read at once.
    pub slots: u64,
    /// Changes with the listener, the source ranges and the table.
    pub version: u32,
    /// [`AFFINITY`].
    pub flags: u32,
    /// Number of the table, the key of its members.
    pub table: u32,
    /// Number of the set of source ranges; zero if all clients may connect.
    pub ranges: u32,
}

/// Only the client's address selects the slot.
pub const AFFINITY: u32 = 1;

impl Service {
    /// The slots `base..base + size`.
    pub const fn slots(base: u32, size: u32) -> u64 {
        ((base as u64) << 32) | size as u64
    }
}

/// Slots in one element of their array: an element has at least eight bytes in the kernel.
pub const SLOTS_PER_ELEMENT: u32 = 16;
/// Slots: the number of each one's target, zero for none.
pub type Slots = [u32; SLOTS_PER_ELEMENT as usize];

/// A target: a node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Family of the next hop, `AF_INET` or `AF_INET6`; zero if there is no such target. This and
    /// the next field are `struct bpf_redir_neigh`.
    pub family: u32,
    /// The node's address: IPv4 in the first word.
    pub address: [u32; 4],
    /// Changes when the target leaves a table.
    pub version: u32,
    /// [`LOCAL`] or [`TUNNEL`].
    pub flags: u32,
    /// Through a tunnel: the node's link-layer address there.
    pub mac: [u8; 6],
    /// Through a tunnel: the longest IP packet.
    pub mtu: u16,
    /// Through a tunnel: the number of the virtual network.
    pub vni: u32,
    /// Fills the element up to a cache line.
    pub reserved: [u32; 6],
}

/// The target is this host.
pub const LOCAL: u32 = 1;
/// The target is reached through the tunnel.
pub const TUNNEL: u32 = 2;
/// `AF_INET`.
pub const INET: u32 = 2;
/// `AF_INET6`.
pub const INET6: u32 = 10;

/// A target that has slots in a table.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    /// Number of the table.
    pub table: u32,
    /// Number of the target.
    pub target: u32,
}

/// A prefix of addresses in a set: of source ranges, or of a node's own addresses.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    /// Number of bits of the other fields that count.
    pub length: u32,
    /// Number of the set.
    pub set: u32,
    /// The address.
    pub address: V6,
}

impl Prefix {
    /// The bits of a whole key.
    pub const FULL: u32 = 32 + 128;

    /// One address in a set.
    #[inline(always)]
    pub const fn of(set: u32, address: V6) -> Self {
        Self { length: Self::FULL, set, address }
    }
}

/// A link-layer address, of a node or of another edge host.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac {
    /// The address.
    pub mac: [u8; 6],
    /// Zero.
    pub pad: u16,
}

/// In place of the number of a sender's set of addresses: the sender is another edge host, and this host is a node. What it sends to a
/// VIP has been forwarded to this node, whose Service proxy serves it.
pub const FORWARDER: u32 = 0;

/// The element of the array of leases that says until when the program forwards: by the clock without suspended time, in nanoseconds;
/// zero for no end. No lease has this number, and daemons of earlier versions leave zero there.
pub const FORWARDING: u32 = 1023;

/// A packet in fragments.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FragmentKey {
    /// The client.
    pub client: V6,
    /// The VIP.
    pub vip: V6,
    /// The packet's id.
    pub id: u32,
    /// Protocol number; zero for IPv6, where only the first fragment may have it.
    pub protocol: u32,
}

/// Where the fragments of a packet go.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentFlow {
    /// Number of the target.
    pub target: u32,
    /// Number of the Service.
    pub service: u32,
    /// Time of the first fragment, in the units of [`seconds`].
    pub seen: u32,
    /// Zero.
    pub reserved: u32,
}

/// How long fragments of a packet are awaited: as long as Linux does for IPv4.
pub const FRAGMENT_TIME: u32 = seconds(31_000_000_000);

/// A VIP.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vip {
    /// The number of the lease under which this host answers for the VIP.
    pub lease: u32,
}

/// What the program needs of the link, and the layout of the maps.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// [`LAYOUT`].
    pub layout: u32,
    /// The link's own address.
    pub mac: [u8; 6],
    /// Zero.
    pub pad: u16,
    /// Index of the tunnel's device; zero for none.
    pub tunnel: u32,
}

impl ListenerKey {
    /// A listener of a VIP.
    pub fn new(vip: core::net::IpAddr, protocol: u8, port: u16) -> Self {
        Self { vip: vip.into(), port: transport::ports(0, port), protocol: u32::from(protocol) }
    }

    /// The port's number.
    pub fn port_number(self) -> u16 {
        transport::destination_port(self.port)
    }
}

/// No padding: the sizes are the sums of the fields.
const _: () = {
    assert!(size_of::<FlowKey<V4>>() == 16 && size_of::<FlowKey<V6>>() == 40);
    assert!(size_of::<Flow>() == 16 && size_of::<ListenerKey>() == 24);
    assert!(size_of::<Service>() == 48 && size_of::<Target>() == 64);
    assert!(size_of::<Prefix>() == 24 && size_of::<Mac>() == 8);
    assert!(size_of::<FragmentKey>() == 40 && size_of::<FragmentFlow>() == 16);
    assert!(size_of::<Config>() == 16 && size_of::<Member>() == 8);
};

#[cfg(feature = "aya")]
#[allow(unsafe_code, reason = "plain old data without padding, as asserted above")]
mod pod {
    use super::{
        Config, Counters, Flow, FlowKey, FragmentFlow, FragmentKey, ListenerKey, Mac, Member, Prefix,
        Service, Target, V4, V6, Vip,
    };

    // SAFETY: each type is `repr(C)`, has only integers, and has no padding.
    unsafe impl aya::Pod for V6 {}
    unsafe impl aya::Pod for FlowKey<V4> {}
    unsafe impl aya::Pod for FlowKey<V6> {}
    unsafe impl aya::Pod for Flow {}
    unsafe impl aya::Pod for ListenerKey {}
    unsafe impl aya::Pod for Service {}
    unsafe impl aya::Pod for Target {}
    unsafe impl aya::Pod for Member {}
    unsafe impl aya::Pod for Prefix {}
    unsafe impl aya::Pod for Mac {}
    unsafe impl aya::Pod for FragmentKey {}
    unsafe impl aya::Pod for FragmentFlow {}
    unsafe impl aya::Pod for Vip {}
    unsafe impl aya::Pod for Config {}
    unsafe impl aya::Pod for Counters {}
}

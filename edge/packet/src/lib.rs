// SPDX-License-Identifier: Apache-2.0
//! What the edge's program in the kernel and its daemon share: the parsing of packets, the types of
//! the maps, and the hashes.
//!
//! `edge/ebpf` compiles this crate into the program, `edge/dataplane` into the daemon. It has no
//! state, allocates nothing and does no I/O. A parser sees a packet only through [`Packet`], which
//! checks every read. The feature `model` adds the program's decisions over plain values, which
//! tests compare the program with.
#![cfg_attr(not(any(test, feature = "model")), no_std)]
#![allow(
    clippy::inline_always,
    reason = "calls cost the program more, and hide the bounds of values from the verifier"
)]

mod address;
pub mod checksum;
mod counters;
pub mod ethernet;
mod flow;
#[cfg(any(test, feature = "model"))]
pub mod frames;
pub mod hash;
mod icmp;
mod ipv4;
mod ipv6;
pub mod maps;
#[cfg(any(test, feature = "model"))]
pub mod model;
pub mod neighbour;
mod read;
pub mod too_big;
pub mod transport;

#[cfg(test)]
mod tests;

pub use address::{Address, V4, V6};
pub use icmp::{Icmp, IcmpKind, icmp, quoted_flow};
pub use read::{MAX_HEADERS, Packet};
pub use transport::{TcpFlags, Transport, transport};

/// A packet's IP header, with its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Protocol of the payload.
    pub protocol: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Offset of the payload in the frame.
    pub payload: usize,
    /// Which part of its packet the datagram is.
    pub fragment: Fragment,
}

impl<A: Address> Datagram<A> {
    /// The flow from this datagram's source.
    #[inline(always)]
    pub fn flow(&self, ports: u32) -> maps::FlowKey<A> {
        maps::FlowKey {
            client: self.source,
            vip: self.destination,
            ports,
            protocol: u32::from(self.protocol),
        }
    }
}

/// Which part of its packet a datagram is. The number identifies the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// The whole packet.
    Whole,
    /// The first fragment, which has the ports.
    First(u32),
    /// Another fragment, which has no ports.
    Later(u32),
}

/// IP protocol numbers.
pub mod protocol {
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// ICMP for IPv6.
    pub const ICMP6: u8 = 58;
}

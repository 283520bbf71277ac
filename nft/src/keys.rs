// SPDX-License-Identifier: Apache-2.0
//! The kernel's numbers for what an expression can load: header bases, `meta` keys, `ct` keys, `fib` flags.

use crate::table::Family;

/// The header at which a payload offset starts (enum `nft_payload_bases`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadBase {
    /// The link-layer header.
    Link = 0,
    /// The IP header.
    Network = 1,
    /// The transport header. The rule does not match fragments other than the first.
    Transport = 2,
}

/// What the kernel knows about a packet besides its bytes (enum `nft_meta_keys`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meta {
    /// Ethertype: 2 bytes in network order.
    Protocol = 1,
    /// Packet mark: 4 bytes in host order.
    Mark = 3,
    /// Index of the input interface: 4 bytes in host order.
    Iif = 4,
    /// Index of the output interface: 4 bytes in host order.
    Oif = 5,
    /// Name of the input interface: 16 bytes, padded with zeros.
    IifName = 6,
    /// Name of the output interface: 16 bytes, padded with zeros.
    OifName = 7,
    /// User of the socket that sends the packet: 4 bytes in host order. The rule does not match what the kernel itself sends.
    SkUid = 10,
    /// NFPROTO_*: 1 byte.
    NfProto = 15,
    /// IPPROTO_*: 1 byte.
    L4Proto = 16,
    /// `PACKET_HOST` 0, `PACKET_BROADCAST` 1, `PACKET_MULTICAST` 2, `PACKET_OTHERHOST` 3: 1 byte.
    PktType = 19,
    /// Number of the CPU: 4 bytes in host order.
    Cpu = 20,
}

impl Meta {
    pub(crate) fn length(self) -> u32 {
        match self {
            Self::Protocol => 2,
            Self::Mark | Self::Iif | Self::Oif | Self::SkUid | Self::Cpu => 4,
            Self::IifName | Self::OifName => 16,
            Self::NfProto | Self::L4Proto | Self::PktType => 1,
        }
    }
}

/// A direction of a connection (enum `ip_conntrack_dir`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The direction of the first packet.
    Original = 0,
    /// The opposite direction.
    Reply = 1,
}

/// What connection tracking knows about a packet (enum `nft_ct_keys`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ct {
    /// State of the packet: a bit mask in host order, see [`Ct::NEW`] and its siblings.
    State,
    /// Direction of the packet: 1 byte.
    Direction,
    /// Status of the connection: a bit mask in host order, see [`Ct::DNAT`].
    Status,
    /// Mark of the connection: 4 bytes in host order.
    Mark,
    /// Source address in one direction.
    Source(Family, Direction),
    /// Destination address in one direction.
    Destination(Family, Direction),
    /// Source port in one direction.
    SourcePort(Direction),
    /// Destination port in one direction.
    DestinationPort(Direction),
    /// IPPROTO_*: 1 byte.
    Protocol(Direction),
}

impl Ct {
    /// Bit of [`Ct::State`]: the packet belongs to no connection.
    pub const INVALID: u32 = 1;
    /// Bit of [`Ct::State`]: the packet belongs to a known connection.
    pub const ESTABLISHED: u32 = 2;
    /// Bit of [`Ct::State`]: the packet is related to a known connection, as an ICMP error is.
    pub const RELATED: u32 = 4;
    /// Bit of [`Ct::State`]: the packet opens a connection.
    pub const NEW: u32 = 8;
    /// Bit of [`Ct::Status`]: packets went both ways (`IPS_SEEN_REPLY`).
    pub const SEEN_REPLY: u32 = 1 << 1;
    /// Bit of [`Ct::Status`]: packets went both ways, and the client's answered those of the server (`IPS_ASSURED`).
    pub const ASSURED: u32 = 1 << 2;
    /// Bit of [`Ct::Status`]: the source was translated (`IPS_SRC_NAT`).
    pub const SNAT: u32 = 1 << 4;
    /// Bit of [`Ct::Status`]: the destination was translated (`IPS_DST_NAT`).
    pub const DNAT: u32 = 1 << 5;

    /// Key number, direction and length in bytes.
    pub(crate) fn wire(self) -> (u32, Option<Direction>, u32) {
        match self {
            Self::State => (0, None, 4),
            Self::Direction => (1, None, 1),
            Self::Status => (2, None, 4),
            Self::Mark => (3, None, 4),
            Self::Source(Family::Ip6, direction) => (21, Some(direction), 16),
            Self::Source(_, direction) => (19, Some(direction), 4),
            Self::Destination(Family::Ip6, direction) => (22, Some(direction), 16),
            Self::Destination(_, direction) => (20, Some(direction), 4),
            Self::SourcePort(direction) => (11, Some(direction), 2),
            Self::DestinationPort(direction) => (12, Some(direction), 2),
            Self::Protocol(direction) => (10, Some(direction), 1),
        }
    }
}

/// The address that [`crate::Expression::FibType`] looks up (`NFTA_FIB_F`_*).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FibAddress {
    /// The source address.
    Source = 1,
    /// The destination address.
    Destination = 2,
    /// The destination address, on the input interface only.
    DestinationHere = 2 | 8,
}

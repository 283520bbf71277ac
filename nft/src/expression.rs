// SPDX-License-Identifier: Apache-2.0
//! Expressions: the values that a rule can load into registers, such as packet fields, conntrack fields, hashes and map
//! lookups.
//!
//! An [`Expression`] is a plain value. `Rule` and `load` encode it. A list of expressions is a concatenation: each starts
//! a new word, as the fields of [`crate::concat`] do.

use crate::field::{DataType, Field, concat, length};
use crate::keys::{Ct, FibAddress, Meta, PayloadBase};
use crate::table::Family;

/// A value that a rule loads into registers. Numbers are in host order unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expression {
    /// Bytes of the packet.
    Payload {
        /// Header at which `offset` starts.
        base: PayloadBase,
        /// First byte.
        offset: u32,
        /// Number of bytes.
        length: u32,
    },
    /// Metadata of the packet.
    Meta(Meta),
    /// Conntrack data. The rule does not match a packet that has no conntrack entry.
    Ct(Ct),
    /// Type of an address of the packet in this host's routing tables (RTN_*, see [`Expression::LOCAL`]).
    FibType(FibAddress),
    /// Index of the interface by which the packet came, if packets to its source leave by it; otherwise 0. In prerouting only.
    ReversePath,
    /// A random number.
    Random {
        /// Number of values.
        modulus: u32,
        /// Lowest value.
        offset: u32,
    },
    /// A counter that wraps around.
    Increment {
        /// Number of values.
        modulus: u32,
        /// Lowest value.
        offset: u32,
    },
    /// Jenkins hash of a concatenation, scaled to `modulus` values from `offset` on. The seed is explicit: without one the
    /// kernel chooses a seed for each load of the rule, which would move every flow.
    Jhash {
        /// Input.
        of: Vec<Expression>,
        /// Number of values.
        modulus: u32,
        /// Seed.
        seed: u32,
        /// Lowest value.
        offset: u32,
    },
    /// The kernel's symmetric hash of the flow, 0 ≤ hash < modulus. Its seed changes with every boot.
    Symhash {
        /// Number of values.
        modulus: u32,
    },
    /// A constant.
    Value(Field),
    /// `(of & mask) ^ xor`. All three have the same length.
    Bitwise {
        /// Operand.
        of: Box<Expression>,
        /// Bits to keep.
        mask: Vec<u8>,
        /// Bits to flip afterwards.
        xor: Vec<u8>,
    },
    /// A number of 2 or 4 bytes, converted from network to host order.
    ToHost(Box<Expression>),
    /// The data that a map of the same table has for a key. The rule does not match if the map lacks the key. `nft` 1.0.6
    /// aborts when it lists a rule with this expression inside a key; use [`Expression::MapWord`] there.
    Map {
        /// Name of the map.
        map: String,
        /// Key.
        key: Vec<Expression>,
        /// Type of the map's data.
        data: Vec<DataType>,
    },
    /// The 4 bytes of data that a map has for a key, for use as the first part of another lookup's key. The result passes
    /// through the packet mark, which the rule restores: `nft` 1.0.6 aborts on a direct nested lookup.
    MapWord {
        /// Name of the map.
        map: String,
        /// Key.
        key: Vec<Expression>,
    },
}

impl Expression {
    /// The value of [`Expression::FibType`] for an address of this host (`RTN_LOCAL`).
    pub const LOCAL: Field = Field::Number(2);

    /// The source address of an IPv4 or IPv6 packet.
    pub fn saddr(family: Family) -> Self {
        match family {
            Family::Ip6 => Self::network(8, 16),
            _ => Self::network(12, 4),
        }
    }

    /// The destination address of an IPv4 or IPv6 packet.
    pub fn daddr(family: Family) -> Self {
        match family {
            Family::Ip6 => Self::network(24, 16),
            _ => Self::network(16, 4),
        }
    }

    /// The TTL or hop limit of an IPv4 or IPv6 packet, 1 byte.
    pub fn hop_limit(family: Family) -> Self {
        match family {
            Family::Ip6 => Self::network(7, 1),
            _ => Self::network(8, 1),
        }
    }

    /// The source port of TCP, UDP and SCTP.
    pub fn sport() -> Self {
        Self::transport(0, 2)
    }

    /// The destination port of TCP, UDP and SCTP.
    pub fn dport() -> Self {
        Self::transport(2, 2)
    }

    /// The transport protocol (IPPROTO_*), 1 byte.
    pub fn l4proto() -> Self {
        Self::Meta(Meta::L4Proto)
    }

    /// The flags of a TCP header, 1 byte: FIN 1, SYN 2, RST 4, PSH 8, ACK 16.
    pub fn tcp_flags() -> Self {
        Self::transport(13, 1)
    }

    /// Bytes of the IP header.
    pub fn network(offset: u32, length: u32) -> Self {
        Self::Payload { base: PayloadBase::Network, offset, length }
    }

    /// Bytes of the transport header.
    pub fn transport(offset: u32, length: u32) -> Self {
        Self::Payload { base: PayloadBase::Transport, offset, length }
    }

    /// Bytes of the link-layer header.
    pub fn link(offset: u32, length: u32) -> Self {
        Self::Payload { base: PayloadBase::Link, offset, length }
    }

    /// Keeps only the bits of `mask`.
    #[must_use]
    pub fn masked(self, mask: Vec<u8>) -> Self {
        let xor = vec![0; mask.len()];
        Self::Bitwise { of: Box::new(self), mask, xor }
    }

    /// Length in bytes.
    pub fn length(&self) -> u32 {
        match self {
            Self::Payload { length, .. } => *length,
            Self::Meta(key) => key.length(),
            Self::Ct(key) => key.wire().2,
            Self::FibType(_)
            | Self::ReversePath
            | Self::Random { .. }
            | Self::Increment { .. }
            | Self::Jhash { .. }
            | Self::Symhash { .. }
            | Self::MapWord { .. } => 4,
            Self::Value(field) => u32::try_from(concat(&[*field]).len()).unwrap_or(0),
            Self::Bitwise { of, .. } | Self::ToHost(of) => of.length(),
            Self::Map { data, .. } => length(data),
        }
    }
}

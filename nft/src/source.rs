// SPDX-License-Identifier: Apache-2.0
//! What a rule can load into registers: parts of the packet, what the kernel knows of it, numbers, hashes, map lookups.
//!
//! A [`Source`] is a plain value; `Rule` places it in registers. A list of sources is a concatenation: each starts a new
//! word, as the keys of [`crate::concat`] do.

use crate::set::{DataType, Field, concat, length};
use crate::table::Family;
use crate::wire::Writer;

/// Something loadable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Bytes of the packet.
    Payload {
        /// Where counting starts.
        base: Base,
        /// From where, in bytes.
        offset: u32,
        /// How many bytes.
        length: u32,
    },
    /// What the kernel notes about the packet.
    Meta(Meta),
    /// What connection tracking knows. The rule does not match where there is no entry.
    Ct(Ct),
    /// What kind of address the packet's address is here (RTN_*, see [`Source::LOCAL`]).
    FibType(FibAddress),
    /// A random number, in host order.
    Random {
        /// How many values.
        modulus: u32,
        /// The least of them.
        offset: u32,
    },
    /// A counter that runs through its values and starts again, in host order.
    Increment {
        /// How many values.
        modulus: u32,
        /// The least of them.
        offset: u32,
    },
    /// Jenkins hash of a concatenation, scaled down below the modulus, in host order. The seed is always fixed: without
    /// one the kernel takes a new one on each load, and what the hash had spread moves.
    Jhash {
        /// What is hashed.
        of: Vec<Source>,
        /// How many values.
        modulus: u32,
        /// The seed.
        seed: u32,
    },
    /// The kernel's symmetric hash of the flow, below the modulus, in host order. Its seed is new with every boot.
    Symhash {
        /// How many values.
        modulus: u32,
    },
    /// A constant.
    Value(Field),
    /// `(source & mask) ^ xor`; mask and xor are as long as the source.
    Bitwise {
        /// The source.
        of: Box<Source>,
        /// Bits to keep.
        mask: Vec<u8>,
        /// Bits to flip then.
        xor: Vec<u8>,
    },
    /// A number of 2 or 4 bytes turned from network to host order.
    ToHost(Box<Source>),
    /// What a map of this table holds for a concatenation. The rule does not match where it holds nothing. `nft` 1.0.6
    /// aborts on a rule with such a result in a key: see [`Source::MapWord`].
    Map {
        /// The map's name.
        map: String,
        /// The key.
        key: Vec<Source>,
        /// The type of the map's data.
        data: Vec<DataType>,
    },
    /// What a map holds for a concatenation, 4 bytes, for use in the key of another lookup; it must come first there. It
    /// passes through the packet's mark, which has its old value again when the rule goes on: without that detour `nft` 1.0.6
    /// aborts on the rule.
    MapWord {
        /// The map's name.
        map: String,
        /// The key.
        key: Vec<Source>,
    },
}

/// Where a payload's offset counts from (enum `nft_payload_bases`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The link layer's header.
    Link = 0,
    /// The IP header.
    Network = 1,
    /// The header of TCP, UDP and the like. The rule does not match on later fragments.
    Transport = 2,
}

/// enum `nft_meta_keys`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meta {
    /// Ethertype, 2 bytes in network order.
    Protocol = 1,
    /// The packet's mark.
    Mark = 3,
    /// Index of the interface it came in by.
    Iif = 4,
    /// Index of the interface it leaves by.
    Oif = 5,
    /// Name of the interface it came in by, 16 bytes filled up with zeros.
    IifName = 6,
    /// Name of the interface it leaves by.
    OifName = 7,
    /// NFPROTO_*, 1 byte.
    NfProto = 15,
    /// IPPROTO_*, 1 byte.
    L4Proto = 16,
    /// `PACKET_HOST` 0, `PACKET_BROADCAST` 1, `PACKET_MULTICAST` 2, `PACKET_OTHERHOST` 3; 1 byte.
    PktType = 19,
    /// The processor.
    Cpu = 20,
}

impl Meta {
    fn length(self) -> u32 {
        match self {
            Self::Protocol => 2,
            Self::Mark | Self::Iif | Self::Oif | Self::Cpu => 4,
            Self::IifName | Self::OifName => 16,
            Self::NfProto | Self::L4Proto | Self::PktType => 1,
        }
    }
}

/// A direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// As its first packet.
    Original = 0,
    /// As the answers to it.
    Reply = 1,
}

/// enum `nft_ct_keys`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ct {
    /// The packet's state, a bit mask in host order: see [`Ct::NEW`] and the others.
    State,
    /// The packet's direction, 1 byte.
    Direction,
    /// The connection's status, a bit mask in host order: see [`Ct::DNAT`].
    Status,
    /// The connection's mark.
    Mark,
    /// An address of the connection in one direction.
    Source(Family, Direction),
    /// An address of the connection in one direction.
    Destination(Family, Direction),
    /// A port of the connection in one direction.
    SourcePort(Direction),
    /// A port of the connection in one direction.
    DestinationPort(Direction),
    /// Its protocol, 1 byte.
    Protocol(Direction),
}

impl Ct {
    /// Bit of [`Ct::State`]: belongs to no connection.
    pub const INVALID: u32 = 1;
    /// Bit of [`Ct::State`]: belongs to a known connection.
    pub const ESTABLISHED: u32 = 2;
    /// Bit of [`Ct::State`]: belongs with a known connection.
    pub const RELATED: u32 = 4;
    /// Bit of [`Ct::State`]: opens a connection.
    pub const NEW: u32 = 8;
    /// Bit of [`Ct::Status`]: its source was translated (`IPS_SRC_NAT`).
    pub const SNAT: u32 = 1 << 4;
    /// Bit of [`Ct::Status`]: its destination was translated (`IPS_DST_NAT`).
    pub const DNAT: u32 = 1 << 5;

    /// Key, direction and length.
    fn wire(self) -> (u32, Option<Direction>, u32) {
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

/// Which address [`Source::FibType`] judges (`NFTA_FIB_F`_*).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FibAddress {
    /// The packet's source.
    Source = 1,
    /// The packet's destination.
    Destination = 2,
    /// The packet's destination, on the interface it came in by.
    DestinationHere = 2 | 8,
}

impl Source {
    /// What [`Source::FibType`] gives for an address of this host (`RTN_LOCAL`), to compare with.
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

    /// The source port of TCP, UDP and SCTP.
    pub fn sport() -> Self {
        Self::transport(0, 2)
    }

    /// The destination port of TCP, UDP and SCTP.
    pub fn dport() -> Self {
        Self::transport(2, 2)
    }

    /// The protocol above IP, 1 byte.
    pub fn l4proto() -> Self {
        Self::Meta(Meta::L4Proto)
    }

    /// The flags of a TCP header, 1 byte: FIN 1, SYN 2, RST 4, PSH 8, ACK 16.
    pub fn tcp_flags() -> Self {
        Self::transport(13, 1)
    }

    /// Bytes of the IP header.
    pub fn network(offset: u32, length: u32) -> Self {
        Self::Payload { base: Base::Network, offset, length }
    }

    /// Bytes of the transport header.
    pub fn transport(offset: u32, length: u32) -> Self {
        Self::Payload { base: Base::Transport, offset, length }
    }

    /// Bytes of the link-layer header.
    pub fn link(offset: u32, length: u32) -> Self {
        Self::Payload { base: Base::Link, offset, length }
    }

    /// This source with only the bits of `mask`.
    #[must_use]
    pub fn masked(self, mask: Vec<u8>) -> Self {
        let xor = vec![0; mask.len()];
        Self::Bitwise { of: Box::new(self), mask, xor }
    }

    /// Its length in bytes.
    pub fn length(&self) -> u32 {
        match self {
            Self::Payload { length, .. } => *length,
            Self::Meta(key) => key.length(),
            Self::Ct(key) => key.wire().2,
            Self::FibType(_)
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

    /// The words it fills.
    pub(crate) fn words(&self) -> u32 {
        self.length().div_ceil(4)
    }

    /// Writes the expressions that load it into the registers from `at` on. Inputs of hashes and lookups pass through the
    /// same registers, which the result then overwrites.
    pub(crate) fn load(&self, at: Register, out: &mut Writer) {
        match self {
            Self::Payload { base, offset, length } => expression(out, "payload", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, *base as u32);
                e.attr_u32(3, *offset);
                e.attr_u32(4, *length);
            }),
            Self::Meta(key) => expression(out, "meta", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, *key as u32);
            }),
            Self::Ct(key) => {
                let (number, direction, _) = key.wire();
                expression(out, "ct", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, number);
                    if let Some(direction) = direction {
                        e.attr_u8(3, direction as u8);
                    }
                });
            }
            Self::FibType(address) => expression(out, "fib", |e| {
                e.attr_u32(1, at.wire());
                e.attr_u32(2, 3);
                e.attr_u32(3, *address as u32);
            }),
            Self::Random { modulus, offset } => numgen(out, at, *modulus, 1, *offset),
            Self::Increment { modulus, offset } => numgen(out, at, *modulus, 0, *offset),
            Self::Jhash { of, modulus, seed } => {
                let words = load_all(of, at, out);
                expression(out, "hash", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, at.wire());
                    e.attr_u32(3, words * 4);
                    e.attr_u32(4, *modulus);
                    e.attr_u32(5, *seed);
                    e.attr_u32(7, 0);
                });
            }
            Self::Symhash { modulus } => expression(out, "hash", |e| {
                e.attr_u32(2, at.wire());
                e.attr_u32(4, *modulus);
                e.attr_u32(7, 1);
            }),
            Self::Value(field) => immediate(out, at, &concat(&[*field])),
            Self::Bitwise { of, mask, xor } => {
                of.load(at, out);
                expression(out, "bitwise", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, at.wire());
                    e.attr_u32(3, of.length());
                    e.nest(4, |value| value.attr(1, mask));
                    e.nest(5, |value| value.attr(1, xor));
                });
            }
            Self::ToHost(of) => {
                of.load(at, out);
                expression(out, "byteorder", |e| {
                    e.attr_u32(1, at.wire());
                    e.attr_u32(2, at.wire());
                    e.attr_u32(3, 0);
                    e.attr_u32(4, of.length());
                    e.attr_u32(5, of.length());
                });
            }
            Self::Map { map, key, .. } => lookup(out, at, map, key),
            Self::MapWord { map, key } => {
                let mark = Self::Meta(Meta::Mark);
                mark.load(Register::LAST, out);
                lookup(out, at, map, key);
                set_mark(out, at);
                mark.load(at, out);
                set_mark(out, Register::LAST);
            }
        }
    }
}

/// Loads a concatenation from register `at` on; returns the words it fills.
pub(crate) fn load_all(sources: &[Source], at: Register, out: &mut Writer) -> u32 {
    let mut words = 0;
    for source in sources {
        source.load(at.plus(words), out);
        words += source.words();
    }
    words
}

/// One of the sixteen registers of 4 bytes (`NFT_REG32_00` and following).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Register(u32);

impl Register {
    pub(crate) const FIRST: Self = Self(0);
    const LAST: Self = Self(15);

    /// The register `words` further on. One past the last is refused by the kernel when the rule is loaded (ERANGE).
    pub(crate) fn plus(self, words: u32) -> Self {
        Self(self.0 + words)
    }

    pub(crate) fn wire(self) -> u32 {
        8 + self.0
    }
}

/// Writes one expression: its name and what `body` writes.
pub(crate) fn expression(out: &mut Writer, name: &str, body: impl FnOnce(&mut Writer)) {
    out.nest(1, |e| {
        e.attr_str(1, name);
        e.nest(2, body);
    });
}

/// Writes a constant into registers.
pub(crate) fn immediate(out: &mut Writer, at: Register, bytes: &[u8]) {
    expression(out, "immediate", |e| {
        e.attr_u32(1, at.wire());
        e.nest(2, |data| data.attr(1, bytes));
    });
}

/// Sets the packet's mark from a register.
pub(crate) fn set_mark(out: &mut Writer, from: Register) {
    expression(out, "meta", |e| {
        e.attr_u32(2, Meta::Mark as u32);
        e.attr_u32(3, from.wire());
    });
}

fn lookup(out: &mut Writer, at: Register, map: &str, key: &[Source]) {
    load_all(key, at, out);
    expression(out, "lookup", |e| {
        e.attr_str(1, map);
        e.attr_u32(2, at.wire());
        e.attr_u32(3, at.wire());
    });
}

fn numgen(out: &mut Writer, at: Register, modulus: u32, mode: u32, offset: u32) {
    expression(out, "numgen", |e| {
        e.attr_u32(1, at.wire());
        e.attr_u32(2, modulus);
        e.attr_u32(3, mode);
        e.attr_u32(4, offset);
    });
}

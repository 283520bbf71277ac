// SPDX-License-Identifier: Apache-2.0
//! The fields of keys and data: their types, their values, and their layout in the kernel's registers.
//!
//! Everything else that handles elements or rules builds on this file. It depends on no other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The type of a key or of data, or of one field of a concatenation. The kernel checks lengths only. It stores the type's
/// number for the `nft` command, which needs the number to print the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// 4 bytes.
    Ipv4Addr,
    /// 16 bytes.
    Ipv6Addr,
    /// 6 bytes.
    EtherAddr,
    /// IPPROTO_*, 1 byte.
    InetProto,
    /// A port: 2 bytes in network order.
    InetService,
    /// A number: 4 bytes in host order. Also for numbers that have no type of their own, such as slots.
    Mark,
    /// An interface index: 4 bytes in host order.
    Iface,
}

impl DataType {
    /// The number of the type in the `nft` command (its enum `datatypes`), and the length in bytes.
    fn wire(self) -> (u32, u32) {
        match self {
            Self::Ipv4Addr => (7, 4),
            Self::Ipv6Addr => (8, 16),
            Self::EtherAddr => (9, 6),
            Self::InetProto => (12, 1),
            Self::InetService => (13, 2),
            Self::Mark => (19, 4),
            Self::Iface => (20, 4),
        }
    }
}

/// Bits per field in the number of a concatenated type.
const TYPE_BITS: u32 = 6;

/// The number of a concatenated type, as the `nft` command builds it.
pub(crate) fn type_number(fields: &[DataType]) -> u32 {
    fields.iter().fold(0, |number, field| number << TYPE_BITS | field.wire().0)
}

/// The length in registers. Each field of a concatenation fills whole words; a single field is not padded.
pub(crate) fn length(fields: &[DataType]) -> u32 {
    match fields {
        [one] => one.wire().1,
        many => many.iter().map(|field| field.wire().1.next_multiple_of(4)).sum(),
    }
}

pub(crate) fn field_lengths(fields: &[DataType]) -> impl Iterator<Item = u32> + '_ {
    fields.iter().map(|field| field.wire().1)
}

/// The value of one field of a key or of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Field {
    /// An IPv4 address.
    V4(Ipv4Addr),
    /// An IPv6 address.
    V6(Ipv6Addr),
    /// An IP protocol.
    Proto(u8),
    /// A port.
    Port(u16),
    /// A number of 4 bytes in host order: `DataType::Mark`, `DataType::Iface`.
    Number(u32),
}

impl From<IpAddr> for Field {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => Self::V6(address),
        }
    }
}

/// The bytes of a concatenation in registers: each field starts a new word. A single field is not padded.
pub fn concat(fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(24);
    concat_into(&mut bytes, fields);
    bytes
}

/// Appends a concatenation to `bytes`, see [`concat()`].
pub(crate) fn concat_into(bytes: &mut Vec<u8>, fields: &[Field]) {
    let start = bytes.len();
    for field in fields {
        match field {
            Field::V4(address) => bytes.extend_from_slice(&address.octets()),
            Field::V6(address) => bytes.extend_from_slice(&address.octets()),
            Field::Proto(number) => bytes.push(*number),
            Field::Port(port) => bytes.extend_from_slice(&port.to_be_bytes()),
            Field::Number(number) => bytes.extend_from_slice(&number.to_ne_bytes()),
        }
        if fields.len() > 1 {
            bytes.resize(start + (bytes.len() - start).next_multiple_of(4), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fields_of_a_concatenation_are_padded_to_words() {
        let key = concat(&[Field::V4([10, 0, 0, 1].into()), Field::Proto(6), Field::Port(80)]);
        assert_eq!(key, [10, 0, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(concat(&[Field::Port(80)]), [0, 80]);
        let fields = [DataType::Ipv4Addr, DataType::InetProto, DataType::InetService];
        assert_eq!(length(&fields), 12);
        assert_eq!(type_number(&fields), 0x7 << 12 | 0xc << 6 | 0xd);
    }
}

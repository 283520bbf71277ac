// SPDX-License-Identifier: Apache-2.0
//! Sets, maps and their elements. Plain values, given to a `Batch` and returned by dumps.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crate::rows::RowShape;
use crate::rule::Verdict;

/// The type of a key or datum, or of one field of a concatenated one. The kernel keeps the number for `nft`, which needs
/// it to print the set; the lengths are what the kernel itself cares for.
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
    /// A port, 2 bytes in network order.
    InetService,
    /// A number of 4 bytes in host order; for all numbers without a type of their own (slots, indexes).
    Mark,
    /// An interface's index, 4 bytes in host order.
    Iface,
}

impl DataType {
    /// The number of `nft`'s datatype (enum datatypes of its source) and the length in bytes.
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

/// Bits per field in the number of a concatenated datatype.
const TYPE_BITS: u32 = 6;

/// The number of a concatenated type as `nft` builds it.
pub(crate) fn type_number(fields: &[DataType]) -> u32 {
    fields.iter().fold(0, |number, field| number << TYPE_BITS | field.wire().0)
}

/// The length of each field as it lies in registers: whole words. A single field keeps its own length.
pub(crate) fn length(fields: &[DataType]) -> u32 {
    match fields {
        [one] => one.wire().1,
        many => many.iter().map(|field| field.wire().1.next_multiple_of(4)).sum(),
    }
}

pub(crate) fn field_lengths(fields: &[DataType]) -> impl Iterator<Item = u32> + '_ {
    fields.iter().map(|field| field.wire().1)
}

/// What a map's elements hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MapData {
    Value(Vec<DataType>),
    Verdict,
}

/// A set or a map to create. Maps are sets whose elements carry data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    pub(crate) name: String,
    pub(crate) key: Vec<DataType>,
    pub(crate) data: Option<MapData>,
    pub(crate) expiring: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) dynamic: bool,
    pub(crate) interval: bool,
    pub(crate) size: Option<u32>,
}

impl Set {
    /// A set of keys; several fields are concatenated.
    pub fn new(name: impl Into<String>, key: &[DataType]) -> Self {
        Self {
            name: name.into(),
            key: key.to_vec(),
            data: None,
            expiring: false,
            timeout: None,
            dynamic: false,
            interval: false,
            size: None,
        }
    }

    /// Makes it a map to a value. The kernel never looks at such data when rules change, however large the map is.
    #[must_use]
    pub fn maps_to(mut self, data: &[DataType]) -> Self {
        self.data = Some(MapData::Value(data.to_vec()));
        self
    }

    /// Makes it a verdict map. The kernel walks every element of it whenever any rule of the table changes.
    #[must_use]
    pub fn maps_to_verdict(mut self) -> Self {
        self.data = Some(MapData::Verdict);
        self
    }

    /// Lets elements expire; `default` is for those that bring no timeout.
    #[must_use]
    pub fn expiring(mut self, default: Option<Duration>) -> Self {
        self.expiring = true;
        self.timeout = default;
        self
    }

    /// Lets rules add elements. Give it a `size` too: packets fill it.
    #[must_use]
    pub fn dynamic(mut self) -> Self {
        self.dynamic = true;
        self
    }

    /// Lets elements be ranges (`Element::range`); a concatenated one is the kernel's `pipapo`, whose commits cost time in
    /// proportion to its size.
    #[must_use]
    pub fn interval(mut self) -> Self {
        self.interval = true;
        self
    }

    /// The lengths of its elements.
    pub fn row_shape(&self) -> RowShape {
        let bytes = |fields: &[DataType]| usize::try_from(length(fields)).unwrap_or(usize::MAX);
        let data = match &self.data {
            Some(MapData::Value(fields)) => bytes(fields),
            Some(MapData::Verdict) | None => 0,
        };
        RowShape { key: bytes(&self.key), range: self.interval, data }
    }

    /// Bounds the number of elements; a set with a bound that is not dynamic has a table of fixed size, quicker to fill.
    #[must_use]
    pub fn size(mut self, elements: u32) -> Self {
        self.size = Some(elements);
        self
    }
}

/// What an element of a map holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Data {
    /// A value as it lies in registers, see [`concat()`].
    Value(Vec<u8>),
    /// A verdict.
    Verdict(Verdict),
}

/// One element of a set or map.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Element {
    /// The key as it lies in registers, see [`concat()`]; of a range, its first key.
    pub key: Vec<u8>,
    /// The last key of a range, inclusive.
    pub key_end: Option<Vec<u8>>,
    /// What the map gives for the key.
    pub data: Option<Data>,
    /// How long it lives; `None`: as the set says. Of the listings, only that of expiring elements tells it.
    pub timeout: Option<Duration>,
}

impl Element {
    /// A member of a set.
    pub fn key(key: Vec<u8>) -> Self {
        Self { key, key_end: None, data: None, timeout: None }
    }

    /// A range of a concatenated interval set: per field from `first` to `last`, both inclusive.
    pub fn range(first: Vec<u8>, last: Vec<u8>) -> Self {
        Self { key_end: Some(last), ..Self::key(first) }
    }

    /// An entry of a map.
    pub fn entry(key: Vec<u8>, value: Vec<u8>) -> Self {
        Self { data: Some(Data::Value(value)), ..Self::key(key) }
    }

    /// An entry of a verdict map.
    pub fn verdict(key: Vec<u8>, verdict: Verdict) -> Self {
        Self { data: Some(Data::Verdict(verdict)), ..Self::key(key) }
    }

    /// Lets it expire.
    #[must_use]
    pub fn expires(mut self, after: Duration) -> Self {
        self.timeout = Some(after);
        self
    }
}

/// One field of a key or datum.
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

/// The bytes of a concatenation as they lie in registers: each field starts a new word. One field alone is not padded.
pub fn concat(fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(24);
    concat_into(&mut bytes, fields);
    bytes
}

/// Appends a concatenation, see [`concat()`].
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
    fn a_concatenation_is_padded_to_words_and_a_lone_field_is_not() {
        let key = concat(&[Field::V4([10, 0, 0, 1].into()), Field::Proto(6), Field::Port(80)]);
        assert_eq!(key, [10, 0, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(concat(&[Field::Port(80)]), [0, 80]);
        let fields = [DataType::Ipv4Addr, DataType::InetProto, DataType::InetService];
        assert_eq!(length(&fields), 12);
        assert_eq!(type_number(&fields), 0x7 << 12 | 0xc << 6 | 0xd);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Sets, maps and their elements. Plain values, given to a `Batch` and returned by listings.

use std::time::Duration;

use crate::field::{DataType, length};
use crate::info::SetInfo;
use crate::rows::RowShape;
use crate::verdict::Verdict;

/// The data of a map's elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MapDataType {
    Value(Vec<DataType>),
    Verdict,
}

/// A set or a map to create. A map is a set whose elements carry data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    pub(crate) name: String,
    pub(crate) key: Vec<DataType>,
    pub(crate) data: Option<MapDataType>,
    pub(crate) expiring: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) dynamic: bool,
    pub(crate) interval: bool,
    pub(crate) size: Option<u32>,
}

impl Set {
    /// Whether its elements have values.
    pub fn is_map(&self) -> bool {
        self.data.is_some()
    }

    /// A set of keys. Several fields form a concatenation.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes it a map to values. A change of rules costs the same however many elements such a map has.
    #[must_use]
    pub fn maps_to(mut self, data: &[DataType]) -> Self {
        self.data = Some(MapDataType::Value(data.to_vec()));
        self
    }

    /// Makes it a verdict map. The kernel walks all its elements whenever a rule of the table changes.
    #[must_use]
    pub fn maps_to_verdict(mut self) -> Self {
        self.data = Some(MapDataType::Verdict);
        self
    }

    /// Lets elements expire. `default` applies to elements without a timeout of their own.
    #[must_use]
    pub fn expiring(mut self, default: Option<Duration>) -> Self {
        self.expiring = true;
        self.timeout = default;
        self
    }

    /// Lets rules add elements. Set a `size` too, because packets then decide how many there are.
    #[must_use]
    pub fn dynamic(mut self) -> Self {
        self.dynamic = true;
        self
    }

    /// Allows ranges ([`Element::range`]). A concatenation of ranges is the kernel's `pipapo` set, whose commits take time
    /// in proportion to its size.
    #[must_use]
    pub fn interval(mut self) -> Self {
        self.interval = true;
        self
    }

    /// The lengths of the set's keys and data.
    pub fn row_shape(&self) -> RowShape {
        let bytes = |fields: &[DataType]| usize::try_from(length(fields)).unwrap_or(usize::MAX);
        let data = match &self.data {
            Some(MapDataType::Value(fields)) => bytes(fields),
            Some(MapDataType::Verdict) | None => 0,
        };
        RowShape { key: bytes(&self.key), range: self.interval, data }
    }

    /// Whether a set of the kernel has keys and data of these lengths, and room for as many elements.
    pub fn fits(&self, info: &SetInfo) -> bool {
        let data = match &self.data {
            Some(MapDataType::Value(fields)) => length(fields),
            Some(MapDataType::Verdict) => info.data,
            None => 0,
        };
        (info.key, info.data, info.size) == (length(&self.key), data, self.size)
    }

    /// Limits the number of elements. A limited set that is not dynamic has a hash table of fixed size, which fills faster.
    #[must_use]
    pub fn size(mut self, elements: u32) -> Self {
        self.size = Some(elements);
        self
    }
}

/// The data of a map's element.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Data {
    /// A value in the layout of registers, see [`crate::concat`].
    Value(Vec<u8>),
    /// A verdict.
    Verdict(Verdict),
}

/// An element of a set or map.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Element {
    /// Key in the layout of registers, see [`crate::concat`]. Of a range, the first key.
    pub key: Vec<u8>,
    /// Last key of a range, inclusive.
    pub key_end: Option<Vec<u8>>,
    /// Data, in a map.
    pub data: Option<Data>,
    /// Lifetime; `None` means the set's default. Only `Nft::expiring` lists it, as the remaining time.
    pub timeout: Option<Duration>,
}

impl Element {
    /// A member of a set.
    pub fn key(key: Vec<u8>) -> Self {
        Self { key, key_end: None, data: None, timeout: None }
    }

    /// A range of a concatenated interval set: each field ranges from `first` to `last`, both inclusive.
    pub fn range(first: Vec<u8>, last: Vec<u8>) -> Self {
        Self { key_end: Some(last), ..Self::key(first) }
    }

    /// An entry of a map to values.
    pub fn entry(key: Vec<u8>, value: Vec<u8>) -> Self {
        Self { data: Some(Data::Value(value)), ..Self::key(key) }
    }

    /// An entry of a verdict map.
    pub fn verdict(key: Vec<u8>, verdict: Verdict) -> Self {
        Self { data: Some(Data::Verdict(verdict)), ..Self::key(key) }
    }

    /// Sets the lifetime.
    #[must_use]
    pub fn expires(mut self, after: Duration) -> Self {
        self.timeout = Some(after);
        self
    }
}

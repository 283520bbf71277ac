// SPDX-License-Identifier: Apache-2.0
//! Many elements of one set in one allocation, to fill, list and compare sets of a hundred thousand elements.
//!
//! All elements of a set have keys and data of the same lengths, so they are stored as rows without gaps. `Batch` writes
//! rows and `Nft` lists them. For few elements, and for verdicts and timeouts, use `Element`.

use std::cmp::Ordering;

use crate::field::{Field, concat_into};

/// The lengths of the elements of a set, in bytes, in the layout of registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowShape {
    /// Length of a key.
    pub key: usize,
    /// Whether elements are ranges, with a second key.
    pub range: bool,
    /// Length of the data; 0 in a set.
    pub data: usize,
}

impl RowShape {
    /// Length of what identifies an element: the key, or both keys of a range.
    fn identity_len(self) -> usize {
        if self.range { 2 * self.key } else { self.key }
    }

    fn row_len(self) -> usize {
        self.identity_len() + self.data
    }
}

/// Elements of one set or map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    shape: RowShape,
    bytes: Vec<u8>,
}

/// An element of [`Rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row<'a> {
    /// Key. Of a range, the first key.
    pub key: &'a [u8],
    /// Last key of a range, inclusive.
    pub end: Option<&'a [u8]>,
    /// Data, in a map.
    pub data: Option<&'a [u8]>,
}

impl Rows {
    /// No rows, of this shape.
    pub fn new(shape: RowShape) -> Self {
        Self { shape, bytes: Vec::new() }
    }

    /// Appends a member of a set.
    pub fn push_key(&mut self, key: &[Field]) {
        self.push(key, &[], &[]);
    }

    /// Appends a range: each field ranges from `first` to `last`, both inclusive.
    pub fn push_range(&mut self, first: &[Field], last: &[Field]) {
        self.push(first, last, &[]);
    }

    /// Appends an entry of a map.
    pub fn push_entry(&mut self, key: &[Field], data: &[Field]) {
        self.push(key, &[], data);
    }

    fn push(&mut self, key: &[Field], end: &[Field], data: &[Field]) {
        let start = self.bytes.len();
        for fields in [key, end, data] {
            concat_into(&mut self.bytes, fields);
        }
        debug_assert_eq!(self.bytes.len() - start, self.shape.row_len(), "fields of another set");
        self.bytes.resize(start + self.shape.row_len(), 0);
    }

    /// Appends a row, as of other rows or as the kernel listed it. Ignores one of another shape.
    pub fn push_row(&mut self, row: Row<'_>) {
        let shape =
            RowShape { key: row.key.len(), range: row.end.is_some(), data: row.data.map_or(0, <[u8]>::len) };
        if shape == self.shape && row.end.is_none_or(|end| end.len() == shape.key) {
            for part in [Some(row.key), row.end, row.data].into_iter().flatten() {
                self.bytes.extend_from_slice(part);
            }
        }
    }

    /// The lengths of the elements.
    pub fn shape(&self) -> RowShape {
        self.shape
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.shape.row_len().max(1)
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Iterates over the rows.
    pub fn iter(&self) -> impl Iterator<Item = Row<'_>> {
        let shape = self.shape;
        self.chunks().map(move |chunk| {
            let (identity, data) = chunk.split_at(shape.identity_len());
            let (key, end) = identity.split_at(shape.key);
            Row { key, end: shape.range.then_some(end), data: (shape.data > 0).then_some(data) }
        })
    }

    /// Sorts the rows by key. Of rows with the same key, keeps the last.
    pub fn sort(&mut self) {
        let identity = self.shape.identity_len();
        if self.chunks().is_sorted_by(|a, b| a[..identity] < b[..identity]) {
            return;
        }
        let mut rows: Vec<&[u8]> = self.chunks().collect();
        rows.sort_by(|a, b| a[..identity].cmp(&b[..identity]));
        rows.reverse();
        rows.dedup_by(|a, b| a[..identity] == b[..identity]);
        rows.reverse();
        self.bytes = rows.concat();
    }

    /// The rows to delete and the rows to add in order to turn `self` into `new`. A row whose data change is in both results.
    /// `self` and `new` must be sorted.
    pub fn difference(&self, new: &Self) -> (Self, Self) {
        let (mut delete, mut add) = (Self::new(self.shape), Self::new(new.shape));
        let identity = self.shape.identity_len();
        let (mut old_rows, mut new_rows) = (self.chunks().peekable(), new.chunks().peekable());
        loop {
            let order = match (old_rows.peek(), new_rows.peek()) {
                (None, None) => return (delete, add),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(old), Some(new)) => old[..identity].cmp(&new[..identity]),
            };
            let old = if order.is_le() { old_rows.next() } else { None };
            let new = if order.is_ge() { new_rows.next() } else { None };
            if old != new {
                delete.bytes.extend_from_slice(old.unwrap_or_default());
                add.bytes.extend_from_slice(new.unwrap_or_default());
            }
        }
    }

    fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(self.shape.row_len().max(1))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const MAP: RowShape = RowShape { key: 4, range: false, data: 2 };

    fn rows(entries: &[(u8, u16)]) -> Rows {
        let mut rows = Rows::new(MAP);
        for (key, data) in entries {
            rows.push_entry(&[Field::V4([10, 0, 0, *key].into())], &[Field::Port(*data)]);
        }
        rows.sort();
        rows
    }

    fn by_key(rows: &Rows) -> BTreeMap<Vec<u8>, Vec<u8>> {
        rows.iter().map(|row| (row.key.to_vec(), row.data.unwrap_or_default().to_vec())).collect()
    }

    #[test]
    fn sort_keeps_last_row_of_equal_keys() {
        assert_eq!(rows(&[(2, 1), (1, 1), (2, 2), (2, 3)]), rows(&[(1, 1), (2, 3)]));
    }

    #[test]
    fn ranges_have_two_keys_and_no_data() {
        let mut rows = Rows::new(RowShape { key: 4, range: true, data: 0 });
        let addr = |n: u8| [Field::V4([10, 0, 0, n].into())];
        rows.push_range(&addr(1), &addr(9));
        rows.push_row(Row { key: &[10, 0, 0, 1], end: None, data: None });
        let all: Vec<_> = rows.iter().collect();
        assert_eq!(all, [Row { key: &[10, 0, 0, 1], end: Some(&[10, 0, 0, 9]), data: None }]);
    }

    proptest! {
        #[test]
        fn applied_difference_yields_new_rows(
            old in proptest::collection::vec((0_u8..20, 0_u16..3), 0..30),
            new in proptest::collection::vec((0_u8..20, 0_u16..3), 0..30),
        ) {
            let (old, new) = (rows(&old), rows(&new));
            let (delete, add) = old.difference(&new);
            let mut state = by_key(&old);
            for (key, data) in by_key(&delete) {
                prop_assert_eq!(state.remove(&key), Some(data), "deleted row existed");
            }
            for (key, data) in by_key(&add) {
                prop_assert_eq!(state.insert(key, data), None, "added row did not exist");
            }
            prop_assert_eq!(state, by_key(&new));
            prop_assert!(new.difference(&new).0.is_empty());
            prop_assert_eq!(new.iter().count(), new.len());
        }
    }
}

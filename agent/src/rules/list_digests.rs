// SPDX-License-Identifier: Apache-2.0
//! Digests of long lists, which the kernel has beside them in the map `digests`: a transaction that changes a list changes its digest.
//! So a new process knows lists without reading them. Pure.
//!
//! The order of the endpoints, which depends on a list's history, is not in its digest.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use steerage_nft::{Field, Rows, concat};

use super::layout::long_class;
use crate::hash::jhash;

/// Seeds of an endpoint's two hashes.
const SEEDS: [u32; 2] = [0x6c69_7374, 0x6469_6765];

/// Identifies the endpoints of a list in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ListDigest {
    /// Their number.
    pub length: u32,
    /// The sums of their hashes with each of the seeds.
    hashes: [u32; 2],
}

impl ListDigest {
    /// The digest of these endpoints.
    pub(super) fn of(endpoints: &[SocketAddr]) -> Self {
        let mut hashes = [0_u32; 2];
        for endpoint in endpoints {
            let bytes = concat(&[endpoint.ip().into(), Field::Port(endpoint.port())]);
            for (sum, seed) in hashes.iter_mut().zip(SEEDS) {
                *sum = sum.wrapping_add(jhash(&bytes, seed));
            }
        }
        Self { length: u32::try_from(endpoints.len()).unwrap_or(u32::MAX), hashes }
    }

    /// As the data of an element.
    pub(super) fn fields(self) -> [Field; 3] {
        let [first, second] = self.hashes;
        [self.length, first, second].map(Field::Number)
    }

    /// Reads the data of an element.
    pub(crate) fn decode(data: &[u8]) -> Option<Self> {
        let (words, []) = data.as_chunks::<4>() else { return None };
        let [length, hashes @ ..] = <[[u8; 4]; 3]>::try_from(words).ok()?.map(u32::from_ne_bytes);
        Some(Self { length, hashes })
    }

    /// As people compare it.
    pub(crate) fn hash_text(self) -> String {
        let [first, second] = self.hashes;
        format!("{first:08x}{second:08x}")
    }

    /// The slots of a list of this length that packets look at, also beyond its end.
    pub fn slots(self) -> u32 {
        long_class(usize::try_from(self.length).unwrap_or(usize::MAX))
    }
}

/// The digests in elements of [`SetId::Digests`](super::SetId::Digests), by the numbers of the lists.
pub fn list_digests(rows: &Rows) -> BTreeMap<u32, ListDigest> {
    let digest = |row: steerage_nft::Row<'_>| {
        Some((u32::from_ne_bytes(row.key.try_into().ok()?), ListDigest::decode(row.data?)?))
    };
    rows.iter().filter_map(digest).collect()
}

/// The number of the list of an element of [`SetId::Endpoints`](super::SetId::Endpoints), by the element's key.
pub fn list_of_key(key: &[u8]) -> Option<u32> {
    key.first_chunk().map(|number| u32::from_ne_bytes(*number))
}

/// The number of the list of an element of [`SetId::Lists`](super::SetId::Lists), by the element's data.
pub fn list_of_frontend(data: &[u8]) -> Option<u32> {
    data.try_into().ok().map(u32::from_ne_bytes)
}

/// The keys of the first slots of a list.
pub fn slot_keys(list: u32, slots: u32) -> impl Iterator<Item = Vec<u8>> {
    (0..slots).map(move |slot| concat(&[Field::Number(list), Field::Number(slot)]))
}

/// The lists of which elements of [`SetId::Endpoints`](super::SetId::Endpoints) differ.
pub fn differing_lists(old: &Rows, new: &Rows) -> BTreeSet<u32> {
    let (delete, add) = old.difference(new);
    delete.iter().chain(add.iter()).filter_map(|row| list_of_key(row.key)).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::super::SetId;
    use super::*;

    fn endpoints(numbers: &[u16]) -> Vec<SocketAddr> {
        let v6 = |n: u16| SocketAddr::new(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n]), 80);
        let v4 = |n: u16| {
            SocketAddr::new(IpAddr::from([10, 0, n.to_be_bytes()[0], n.to_be_bytes()[1]]), 80 + n % 3)
        };
        numbers.iter().map(|n| if n % 2 == 0 { v6(*n) } else { v4(*n) }).collect()
    }

    proptest! {
        #[test]
        fn digests_ignore_the_order_and_tell_lists_apart(
            numbers in proptest::collection::btree_set(any::<u16>(), 1..40), rotate in 0_usize..40, gone in 0_usize..40,
        ) {
            let ordered: Vec<u16> = numbers.into_iter().collect();
            let mut rotated = ordered.clone();
            rotated.rotate_left(rotate % ordered.len());
            let digest = ListDigest::of(&endpoints(&ordered));
            prop_assert_eq!(digest, ListDigest::of(&endpoints(&rotated)));
            let mut other = ordered.clone();
            let gone = gone % ordered.len();
            other[gone] = other[gone].wrapping_add(1);
            if !ordered.contains(&other[gone]) {
                prop_assert_ne!(digest, ListDigest::of(&endpoints(&other)));
            }
            other.remove(gone);
            prop_assert_ne!(digest, ListDigest::of(&endpoints(&other)));
        }

        #[test]
        fn digests_survive_the_kernel(number: u32, length: u32, hashes: [u32; 2]) {
            let digest = ListDigest { length, hashes };
            let mut rows = Rows::new(SetId::Digests.row_shape(steerage_model::Family::V4));
            rows.push_entry(&[Field::Number(number)], &digest.fields());
            prop_assert_eq!(list_digests(&rows), [(number, digest)].into());
        }
    }
}

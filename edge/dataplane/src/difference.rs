// SPDX-License-Identifier: Apache-2.0
//! The differences between two sorted maps, in one walk over both. Pure, used by `writer`.

use std::collections::BTreeMap;

/// Calls `each` with the old and the new value of every key for which they differ.
pub(crate) fn each_difference<'a, K: Ord, V>(
    old: &'a BTreeMap<K, V>,
    new: &'a BTreeMap<K, V>,
    is_same: impl Fn(&V, &V) -> bool,
    mut each: impl FnMut(&'a K, Option<&'a V>, Option<&'a V>),
) {
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    loop {
        match (old.peek(), new.peek()) {
            (None, None) => return,
            (Some((old_key, _)), Some((new_key, _))) if old_key == new_key => {
                if let (Some((key, before)), Some((_, after))) = (old.next(), new.next())
                    && !is_same(before, after)
                {
                    each(key, Some(before), Some(after));
                }
            }
            (Some((old_key, _)), Some((new_key, _))) if old_key > new_key => {
                if let Some((key, after)) = new.next() {
                    each(key, None, Some(after));
                }
            }
            (Some(_), _) => {
                if let Some((key, before)) = old.next() {
                    each(key, Some(before), None);
                }
            }
            (None, Some(_)) => {
                if let Some((key, after)) = new.next() {
                    each(key, None, Some(after));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn differences_make_the_new_map_of_the_old(
            old in prop::collection::btree_map(0..30_u8, 0..3_u8, 0..30),
            new in prop::collection::btree_map(0..30_u8, 0..3_u8, 0..30),
        ) {
            let mut made = old.clone();
            let mut count = 0;
            each_difference(&old, &new, |a, b| a == b, |key, before, after| {
                count += 1;
                assert_ne!(before, after);
                match after {
                    Some(after) => made.insert(*key, *after),
                    None => made.remove(key),
                };
            });
            prop_assert_eq!(&made, &new);
            let keys: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
            prop_assert_eq!(count, keys.into_iter().filter(|key| old.get(key) != new.get(key)).count());
        }
    }
}

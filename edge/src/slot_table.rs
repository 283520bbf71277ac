// SPDX-License-Identifier: Apache-2.0
//! Slot tables: which target has which slot of the hash. Pure, called by `plan`.
//!
//! Weighted rendezvous hashing: each slot goes to the target with the best score for it. An added target takes slots only for
//! itself, and a removed one gives up only its own, each to the next best target. All hosts compute the same table.

use crate::hash;

/// The size of each class. Few, because each class has its own rules in the kernel.
pub(crate) const SIZES: [u32; 4] = [128, 2048, 16_384, 65_536];
/// At least, up to the largest size.
const SLOTS_PER_TARGET: usize = 16;
/// Larger weights count as this one: it bounds the harm of a wrong number.
pub(crate) const MAX_WEIGHT: u32 = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WeightedTarget {
    /// The id of the target in the table; not zero.
    pub(crate) id: u32,
    /// The hash of the node's name.
    pub(crate) hash: u64,
    /// The share relative to the others.
    pub(crate) weight: u32,
}

/// The index in [`SIZES`] for this number of targets. It counts unhealthy ones too: health must not resize a table.
pub(crate) fn class(targets: usize) -> usize {
    let wanted = targets.saturating_mul(SLOTS_PER_TARGET);
    SIZES
        .iter()
        .position(|size| usize::try_from(*size).is_ok_and(|size| size >= wanted))
        .unwrap_or(SIZES.len() - 1)
}

/// The id of each slot's target; empty without targets.
pub(crate) fn fill(size: u32, members: &[WeightedTarget]) -> Vec<u32> {
    if members.is_empty() {
        return Vec::new();
    }
    let equal = members.iter().all(|member| member.weight == members[0].weight);
    (0..size)
        .map(|slot| {
            let slot = hash::mix(u64::from(slot));
            let score = |member: &WeightedTarget| {
                let hash = hash::mix(slot ^ member.hash);
                let cost = if equal { 0 } else { cost(hash, member.weight) };
                (cost, !hash, member.hash)
            };
            members.iter().min_by_key(|member| score(member)).map_or(0, |member| member.id)
        })
        .collect()
}

/// Exponentially distributed with the weight as rate: the share of targets with the lowest cost is proportional to their weights.
fn cost(hash: u64, weight: u32) -> u64 {
    (hash::negative_log2(hash) << 16) / u64::from(weight.clamp(1, MAX_WEIGHT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, btree_set};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn members(weights: &BTreeMap<u32, u32>) -> Vec<WeightedTarget> {
        let member = |(id, weight): (&u32, &u32)| WeightedTarget {
            id: *id,
            hash: hash::bytes(format!("node-{id}").as_bytes()),
            weight: *weight,
        };
        weights.iter().map(member).collect()
    }

    fn alike(count: u32) -> Vec<WeightedTarget> {
        members(&(1..=count).map(|id| (id, 1)).collect())
    }

    fn share(table: &[u32], id: u32) -> usize {
        table.iter().filter(|slot| **slot == id).count()
    }

    #[test]
    fn size_class_follows_the_number_of_targets() {
        let sizes = [0, 1, 8, 9, 128, 129, 1024, 1025, 5000, 100_000].map(|targets| SIZES[class(targets)]);
        assert_eq!(sizes, [128, 128, 128, 2048, 2048, 16_384, 16_384, 65_536, 65_536, 65_536]);
    }

    #[test]
    fn no_targets_give_an_empty_table() {
        assert!(fill(128, &[]).is_empty());
    }

    #[test]
    fn slot_table_of_three_targets_is_stable() {
        let text: String = fill(128, &alike(3)).iter().map(u32::to_string).collect();
        assert_eq!(hash::bytes(text.as_bytes()), GOLDEN, "{text}");
    }

    #[test]
    fn equal_weights_give_equal_shares() {
        for (size, count) in [(128, 3), (128, 8), (2048, 100), (16_384, 1000)] {
            let table = fill(size, &alike(count));
            let mean = f64::from(size) / f64::from(count);
            for id in 1..=count {
                let held = f64::from(u32::try_from(share(&table, id)).unwrap());
                assert!((held - mean).abs() <= 5.0 * mean.sqrt(), "{id} of {count} holds {held} of {size}");
            }
        }
    }

    #[test]
    fn shares_follow_weights() {
        let table = fill(16_384, &members(&[(1, 1), (2, 2), (3, 5)].into()));
        for (id, weight) in [(1, 1.0), (2, 2.0), (3, 5.0)] {
            let held = f64::from(u32::try_from(share(&table, id)).unwrap());
            let expected = 16_384.0 * weight / 8.0;
            assert!((held - expected).abs() < expected * 0.1, "{id}: {held}, expected {expected}");
        }
    }

    const GOLDEN: u64 = 968_406_054_879_033_779;

    proptest! {
        #[test]
        fn order_of_targets_does_not_matter(weights in btree_map(1_u32..500, 1_u32..20, 1..20)) {
            let straight = members(&weights);
            let turned: Vec<_> = straight.iter().rev().cloned().collect();
            prop_assert_eq!(fill(128, &straight), fill(128, &turned));
        }

        #[test]
        fn removed_target_gives_up_only_its_own_slots(weights in btree_map(1_u32..500, 1_u32..20, 2..20), pick: prop::sample::Index) {
            let before = fill(2048, &members(&weights));
            let gone = *pick.get(&weights.keys().copied().collect::<Vec<_>>());
            let mut rest = weights.clone();
            rest.remove(&gone);
            let after = fill(2048, &members(&rest));
            for (old, new) in before.iter().zip(&after) {
                prop_assert!(old == new || *old == gone);
            }
        }

        #[test]
        fn raised_weight_moves_slots_only_to_its_target(weights in btree_map(1_u32..500, 1_u32..20, 2..20), pick: prop::sample::Index) {
            let before = fill(2048, &members(&weights));
            let risen = *pick.get(&weights.keys().copied().collect::<Vec<_>>());
            let mut heavier = weights.clone();
            heavier.entry(risen).and_modify(|weight| *weight += 3);
            // Weights that were equal may become unequal: the two ways of scoring must agree.
            let after = fill(2048, &members(&heavier));
            for (old, new) in before.iter().zip(&after) {
                prop_assert!(old == new || *new == risen);
            }
        }

        #[test]
        fn every_slot_has_a_target(ids in btree_set(1_u32..500, 1..20)) {
            let weights = ids.iter().map(|id| (*id, 1)).collect();
            prop_assert!(fill(128, &members(&weights)).iter().all(|id| ids.contains(id)));
        }
    }
}

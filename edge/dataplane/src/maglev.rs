// SPDX-License-Identifier: Apache-2.0
//! Weighted Maglev tables: which target has which slot of the hash. Pure; called by the plan.
//!
//! Each target has its own order of all slots and takes the first free one of it, by turns that are
//! in proportion to the weights ("Maglev: A Fast and Reliable Software Network Load Balancer", 3.4).
//! A table follows from its size and its members alone, so all hosts compute the same. A member that
//! leaves gives up its slots to all others, and few slots move besides.

use steerage_edge_packet::hash::mix64;

/// The sizes of tables: primes, so that every target's order visits every slot.
pub const SIZES: [u32; 12] =
    [251, 509, 1021, 2039, 4093, 8191, 16_381, 32_749, 65_521, 131_071, 262_139, 524_287];
/// Slots for the target with the lowest weight, at least: one slot more or less is then 2 %.
const SLOTS_PER_TARGET: u64 = 50;
/// Larger weights count as this one: it bounds the harm of a wrong number.
pub const MAX_WEIGHT: u32 = 100;

/// A target that gets slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Number of the target: what the slots hold. Not zero.
    pub target: u32,
    /// Hash of the node's name.
    pub seed: u64,
    /// Share relative to the other members; zero counts as one.
    pub weight: u32,
}

/// The size of a table for these members. A table keeps the size that it has while that suffices and
/// is not far too large, because another size moves nearly all slots. All hosts must be told the same
/// `current` size, or start without one.
pub fn size(current: Option<u32>, members: &[Member]) -> u32 {
    let needed = needed(members);
    if let Some(current) = current
        && SIZES.contains(&current)
        && (needed..=needed * 16).contains(&u64::from(current))
    {
        return current;
    }
    // Somewhat more, so that one member more does not need the next size at once.
    let wanted = needed + needed / 4;
    let found = SIZES.into_iter().find(|size| u64::from(*size) >= wanted);
    found.unwrap_or(SIZES[SIZES.len() - 1])
}

/// The largest size that has no more slots than `most`; the smallest one if all have more.
pub fn largest_size(most: u64) -> u32 {
    SIZES.into_iter().rev().find(|size| u64::from(*size) <= most).unwrap_or(SIZES[0])
}

fn needed(members: &[Member]) -> u64 {
    let weights = || members.iter().map(|member| u64::from(weight(member)));
    let lowest = weights().min().unwrap_or(1);
    let needed = (weights().sum::<u64>() * SLOTS_PER_TARGET).div_ceil(lowest);
    needed.min(u64::from(SIZES[SIZES.len() - 1]))
}

fn weight(member: &Member) -> u32 {
    member.weight.clamp(1, MAX_WEIGHT)
}

/// The target of each slot; empty without members. `size` is one of [`SIZES`].
pub fn fill(size: u32, members: &[Member]) -> Vec<u32> {
    if members.is_empty() {
        return Vec::new();
    }
    let mut turns: Vec<_> = members.iter().map(|member| Turns::new(member, size)).collect();
    turns.sort_unstable_by_key(|turns| turns.seed);
    let heaviest = turns.iter().map(|turns| turns.weight).max().unwrap_or(1);
    let mut slots = vec![0; usize::try_from(size).unwrap_or(0)];
    let mut free = slots.len();
    while free > 0 {
        for turns in &mut turns {
            turns.credit += turns.weight;
            if turns.credit < heaviest {
                continue;
            }
            turns.credit -= heaviest;
            turns.take(&mut slots);
            free -= 1;
            if free == 0 {
                break;
            }
        }
    }
    slots
}

/// A member while a table is filled.
struct Turns {
    seed: u64,
    target: u32,
    weight: u32,
    /// Below the heaviest weight.
    credit: u32,
    /// The next slot of the member's order.
    next: u32,
    skip: u32,
    size: u32,
}

impl Turns {
    fn new(member: &Member, size: u32) -> Self {
        let below = |hash: u64, limit: u32| u32::try_from(hash % u64::from(limit.max(1))).unwrap_or(0);
        Self {
            seed: member.seed,
            target: member.target,
            weight: weight(member),
            credit: 0,
            next: below(mix64(member.seed), size),
            skip: below(mix64(member.seed ^ SKIP), size - 1) + 1,
            size,
        }
    }

    fn take(&mut self, slots: &mut [u32]) {
        loop {
            let slot = usize::try_from(self.next).ok().and_then(|next| slots.get_mut(next));
            self.next = (self.next + self.skip) % self.size;
            match slot {
                Some(slot) if *slot == 0 => {
                    *slot = self.target;
                    return;
                }
                Some(_) => {}
                None => return,
            }
        }
    }
}

/// Makes the second hash of a seed differ from the first.
const SKIP: u64 = 0x5354_4545_5241_4745;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn members(weights: impl IntoIterator<Item = u32>) -> Vec<Member> {
        let member = |(number, weight): (u32, u32)| Member {
            target: number + 1,
            seed: mix64(u64::from(number)),
            weight,
        };
        (0..).zip(weights).map(member).collect()
    }

    fn counts(slots: &[u32]) -> BTreeMap<u32, u32> {
        let mut counts = BTreeMap::new();
        for slot in slots {
            *counts.entry(*slot).or_default() += 1;
        }
        counts
    }

    /// The largest deviation of a member's share from its weight's.
    fn imbalance(slots: &[u32], members: &[Member]) -> f64 {
        let counts = counts(slots);
        let total: u32 = members.iter().map(|member| member.weight).sum();
        let size = f64::from(u32::try_from(slots.len()).unwrap());
        let deviation = |member: &Member| {
            let ideal = size * f64::from(member.weight) / f64::from(total);
            (f64::from(counts.get(&member.target).copied().unwrap_or(0)) - ideal).abs() / ideal
        };
        members.iter().map(deviation).fold(0.0, f64::max)
    }

    #[test]
    fn sizes_are_primes() {
        for size in SIZES {
            let root = (2..size).find(|factor| factor * factor > size).unwrap();
            assert!((2..root).all(|factor| size % factor != 0), "{size}");
        }
    }

    #[test]
    fn no_members_give_an_empty_table() {
        assert!(fill(251, &[]).is_empty());
    }

    #[test]
    fn table_of_three_members_never_changes() {
        let slots = fill(251, &members([1, 1, 1]));
        let hash = slots.iter().fold(0, |hash, slot| mix64(hash ^ u64::from(*slot)));
        assert_eq!(hash, GOLDEN);
    }

    const GOLDEN: u64 = 2_490_913_609_456_184_591;

    #[test]
    fn equal_members_differ_by_one_slot() {
        for count in [1, 2, 3, 5, 8, 9, 20, 100, 1000, 5000] {
            let members = members(vec![1; count]);
            let slots = fill(size(None, &members), &members);
            let counts = counts(&slots);
            let (least, most) = (counts.values().min().unwrap(), counts.values().max().unwrap());
            assert!(most - least <= 1, "{count}: {least} to {most}");
            let imbalance = imbalance(&slots, &members);
            assert!(imbalance <= 0.02, "{count}: {imbalance}");
        }
    }

    #[test]
    fn shares_follow_weights() {
        for weights in [vec![1, 5], vec![100, 1], vec![1, 2, 3], vec![3, 5, 7, 11, 13], vec![10; 30]] {
            let members = members(weights.clone());
            let slots = fill(size(None, &members), &members);
            let imbalance = imbalance(&slots, &members);
            assert!(imbalance <= 0.02, "{weights:?}: {imbalance}");
        }
    }

    #[test]
    fn size_has_hysteresis() {
        let size = |current, count| size(current, &members(vec![1; count]));
        assert_eq!([1, 4, 5, 8, 9, 100].map(|count| size(None, count)), [251, 251, 509, 509, 1021, 8191]);
        assert_eq!(size(Some(509), 9), 509, "one member more");
        assert_eq!(size(Some(509), 10), 509);
        assert_eq!(size(Some(509), 11), 1021);
        assert_eq!(size(Some(1021), 8), 1021, "and fewer again");
        assert_eq!(size(Some(1021), 1), 251, "far too large");
        assert_eq!(size(Some(1000), 1), 251, "none of the sizes");
        assert_eq!(size(None, 100_000), 524_287);
    }

    /// Slots that move although neither their old nor their new target has changed.
    fn moved(before: &[u32], after: &[u32], changed: u32) -> usize {
        let is_moved = |(old, new): &(&u32, &u32)| old != new && **old != changed && **new != changed;
        before.iter().zip(after).filter(is_moved).count()
    }

    #[test]
    fn removal_and_addition_move_few_other_slots() {
        for count in [2, 3, 8, 9, 50, 100, 1000] {
            let all = members(vec![1; count + 1]);
            let size = size(None, &all);
            let added = u32::try_from(count + 1).unwrap();
            let (before, after) = (fill(size, &all[..count]), fill(size, &all));
            let others = moved(&before, &after, added);
            let share = f64::from(u32::try_from(others).unwrap()) / f64::from(size);
            println!("{count} + 1 members, {size} slots: {others} other slots move, {:.2} %", 100.0 * share);
            assert!(share <= 0.04, "{count}: {share}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_slot_has_a_member(weights in prop::collection::vec(0..200_u32, 1..40)) {
            let members = members(weights);
            let slots = fill(size(None, &members), &members);
            prop_assert!(slots.iter().all(|slot| members.iter().any(|member| member.target == *slot)));
        }

        #[test]
        fn table_does_not_depend_on_the_order(weights in prop::collection::vec(1..9_u32, 1..20), turn in 0..20_usize) {
            let members = members(weights);
            let mut turned = members.clone();
            turned.rotate_left(turn % members.len());
            let size = size(None, &members);
            prop_assert_eq!(size, super::size(None, &turned));
            prop_assert_eq!(fill(size, &members), fill(size, &turned));
        }

        #[test]
        fn imbalance_is_below_two_percent(weights in prop::collection::vec(1..20_u32, 1..30)) {
            let members = members(weights);
            let slots = fill(size(None, &members), &members);
            prop_assert!(imbalance(&slots, &members) <= 0.02);
        }
    }
}

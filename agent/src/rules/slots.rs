// SPDX-License-Identifier: Apache-2.0
//! Assigns endpoints to the slots of a frontend's table.
//!
//! Up to eight endpoints: one slot each. More: a larger table in the manner of Maglev (NSDI 2016, section 3.4): each endpoint
//! has a preference order of slots from its own hash, and they take turns. The table depends on the endpoints alone, is even to
//! one slot, and changes little when one of them comes or goes, so that the kernel has little to replace.

use std::net::{IpAddr, SocketAddr};

use super::hash::jhash;
use super::layout::{EXACT, LARGE};

/// The number of slots for this many endpoints: at least eight each, up to the largest table.
pub(crate) fn class(endpoints: usize) -> u32 {
    let count = u32::try_from(endpoints).unwrap_or(u32::MAX);
    if count <= EXACT {
        return count;
    }
    let [.., largest] = LARGE;
    LARGE.into_iter().find(|slots| slots / 8 >= count).unwrap_or(largest)
}

/// The endpoint of each slot. Beyond eight targets their order does not matter.
pub(crate) fn table(targets: &[SocketAddr]) -> Vec<SocketAddr> {
    let class = class(targets.len());
    if class <= EXACT {
        return targets.to_vec();
    }
    let mut targets = targets.to_vec();
    targets.sort_unstable();
    targets.truncate(usize::try_from(class).unwrap_or(usize::MAX));
    let mut turns: Vec<_> = targets.iter().map(|target| Preference::new(*target, class)).collect();
    let mut slots = vec![None; usize::try_from(class).unwrap_or_default()];
    let mut free = slots.len();
    'full: loop {
        for (target, turn) in targets.iter().zip(&mut turns) {
            if free == 0 {
                break 'full;
            }
            // The order runs through all slots, and one is free.
            while let Some(slot) = slots.get_mut(turn.next_slot()) {
                if slot.is_none() {
                    *slot = Some(*target);
                    free -= 1;
                    break;
                }
            }
        }
    }
    slots.into_iter().flatten().collect()
}

/// An endpoint's order of slots: from a start, in steps. The number of slots is a power of two and the step odd, so it meets
/// every slot.
struct Preference {
    next: u32,
    step: u32,
    slots: u32,
}

impl Preference {
    fn new(target: SocketAddr, slots: u32) -> Self {
        let mut bytes = match target.ip() {
            IpAddr::V4(addr) => addr.octets().to_vec(),
            IpAddr::V6(addr) => addr.octets().to_vec(),
        };
        bytes.extend_from_slice(&target.port().to_be_bytes());
        Self { next: jhash(&bytes, 1) % slots, step: (jhash(&bytes, 2) % slots) | 1, slots }
    }

    fn next_slot(&mut self) -> usize {
        let slot = self.next;
        self.next = (self.next + self.step) % self.slots;
        usize::try_from(slot).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn target(n: u32) -> SocketAddr {
        SocketAddr::new(IpAddr::from(n.to_be_bytes()), 80)
    }

    #[test]
    fn few_endpoints_have_a_slot_each() {
        let targets: Vec<_> = (0..8).map(target).collect();
        assert_eq!(table(&targets), targets);
        assert_eq!(table(&[]), []);
        assert_eq!([9, 16, 17, 128, 129, 5000].map(class), [128, 128, 1024, 1024, 8192, 8192]);
    }

    proptest! {
        #[test]
        fn tables_are_even_and_do_not_depend_on_the_order(
            numbers in proptest::collection::btree_set(any::<u32>(), 9..200)
        ) {
            let targets: Vec<_> = numbers.into_iter().map(target).collect();
            let slots = table(&targets);
            prop_assert_eq!(slots.len(), usize::try_from(class(targets.len())).unwrap());
            let mut shares = BTreeMap::new();
            for slot in &slots {
                *shares.entry(*slot).or_insert(0) += 1;
            }
            prop_assert_eq!(shares.keys().copied().collect::<BTreeSet<_>>(), targets.iter().copied().collect());
            prop_assert!(shares.values().max().unwrap() - shares.values().min().unwrap() <= 1);
            let reversed: Vec<_> = targets.into_iter().rev().collect();
            prop_assert_eq!(table(&reversed), slots);
        }

        #[test]
        fn one_endpoint_less_moves_few_of_the_others_slots(first in 0_u32..1_000_000) {
            let targets: Vec<_> = (first..first + 60).map(target).collect();
            let (before, after) = (table(&targets), table(&targets[1..]));
            let kept = before.iter().zip(&after).filter(|(old, new)| **old == targets[0] || old == new).count();
            prop_assert!(kept * 100 >= before.len() * 75, "{kept} of {}", before.len());
        }
    }
}

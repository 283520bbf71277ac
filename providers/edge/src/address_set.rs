// SPDX-License-Identifier: Apache-2.0
//! Sets of addresses, kept as ranges. Pure: pools and the allocation use them. The load balancers of a cluster mostly have consecutive
//! addresses, so thousands of them are one range, and the lowest free address is found in one step.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// A set of addresses of both families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressSet {
    /// The last address of each range, by the first. Ranges neither overlap nor adjoin.
    ranges: BTreeMap<IpAddr, IpAddr>,
}

impl AddressSet {
    /// Whether `address` is in the set.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.range_of(address).is_some()
    }

    /// Adds an address.
    pub fn insert(&mut self, address: IpAddr) {
        self.insert_range(address, address);
    }

    /// Adds all addresses from `first` to `last`, which must be of one family.
    pub fn insert_range(&mut self, mut first: IpAddr, mut last: IpAddr) {
        let touches = |(_, end): &(&IpAddr, &IpAddr)| **end >= first || next(**end) == Some(first);
        if let Some((start, _)) = self.ranges.range(..first).next_back().filter(touches) {
            first = *start;
        }
        let limit = next(last).unwrap_or(last);
        while let Some((&start, &end)) = self.ranges.range(first..=limit).next() {
            self.ranges.remove(&start);
            last = last.max(end);
        }
        self.ranges.insert(first, last);
    }

    /// Removes an address.
    pub fn remove(&mut self, address: IpAddr) {
        let Some((first, last)) = self.range_of(address) else { return };
        self.ranges.remove(&first);
        if let Some(before) = previous(address).filter(|before| *before >= first) {
            self.ranges.insert(first, before);
        }
        if let Some(after) = next(address).filter(|after| *after <= last) {
            self.ranges.insert(after, last);
        }
    }

    /// The lowest address from `from` on, of its family, that is not in the set.
    pub fn free_from(&self, from: IpAddr) -> Option<IpAddr> {
        self.range_of(from).map_or(Some(from), |(_, last)| next(last))
    }

    /// The number of addresses; at most the largest `u64`.
    pub fn count(&self) -> u64 {
        self.ranges.iter().map(|(&first, &last)| length(first, last)).fold(0, u64::saturating_add)
    }

    /// The number of addresses that both sets have; at most the largest `u64`.
    pub fn count_common(&self, other: &Self) -> u64 {
        let common = other.ranges.iter().map(|(&first, &last)| {
            let from = self.range_of(first).map_or(first, |(start, _)| start);
            let overlaps = self.ranges.range(from..=last);
            overlaps
                .map(|(&start, &end)| length(start.max(first), end.min(last)))
                .fold(0, u64::saturating_add)
        });
        common.fold(0, u64::saturating_add)
    }

    /// Whether `other` has all addresses of this set.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.ranges.iter().all(|(first, last)| other.range_of(*first).is_some_and(|(_, end)| end >= *last))
    }

    /// First and last address of the range that contains `address`.
    fn range_of(&self, address: IpAddr) -> Option<(IpAddr, IpAddr)> {
        let (first, last) = self.ranges.range(..=address).next_back()?;
        (address <= *last).then_some((*first, *last))
    }
}

impl FromIterator<IpAddr> for AddressSet {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        let mut set = Self::default();
        for address in addresses {
            set.insert(address);
        }
        set
    }
}

/// The next address of the family.
pub(crate) fn next(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => v4.to_bits().checked_add(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(v6) => v6.to_bits().checked_add(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

fn previous(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => v4.to_bits().checked_sub(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(v6) => v6.to_bits().checked_sub(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

/// The number of addresses from `first` to `last`.
fn length(first: IpAddr, last: IpAddr) -> u64 {
    let difference = match (first, last) {
        (IpAddr::V4(first), IpAddr::V4(last)) => u128::from(last.to_bits().saturating_sub(first.to_bits())),
        (IpAddr::V6(first), IpAddr::V6(last)) => last.to_bits().saturating_sub(first.to_bits()),
        _ => return 0,
    };
    u64::try_from(difference).unwrap_or(u64::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The first and last addresses of both families, and some between.
    fn address() -> impl Strategy<Value = IpAddr> {
        (any::<bool>(), 0..12_u8, any::<bool>()).prop_map(|(v6, n, at_end)| {
            let (v4_bits, v6_bits) = (u32::from(n), u128::from(n));
            match (v6, at_end) {
                (false, false) => IpAddr::V4(v4_bits.into()),
                (false, true) => IpAddr::V4((u32::MAX - v4_bits).into()),
                (true, false) => IpAddr::V6(v6_bits.into()),
                (true, true) => IpAddr::V6((u128::MAX - v6_bits).into()),
            }
        })
    }

    proptest! {
        #[test]
        fn set_is_that_of_its_addresses(
            steps in prop::collection::vec((any::<bool>(), address(), 0..4_u8), 0..60),
            other in prop::collection::btree_set(address(), 0..20),
        ) {
            let (mut set, mut model) = (AddressSet::default(), BTreeSet::new());
            for (add, first, more) in steps {
                let mut last = first;
                for _ in 0..more {
                    last = next(last).unwrap_or(last);
                }
                if add {
                    set.insert_range(first, last);
                    let all = std::iter::successors(Some(first), |a| next(*a).filter(|a| *a <= last));
                    model.extend(all);
                } else {
                    set.remove(first);
                    model.remove(&first);
                }
                prop_assert_eq!(&set, &model.iter().copied().collect::<AddressSet>());
                prop_assert_eq!(set.contains(first), model.contains(&first));
                let mut free = Some(first);
                while let Some(address) = free.filter(|address| model.contains(address)) {
                    free = next(address);
                }
                prop_assert_eq!(set.free_from(first), free);
            }
            let others: AddressSet = other.iter().copied().collect();
            let common = u64::try_from(model.intersection(&other).count()).expect("few");
            prop_assert_eq!((set.count_common(&others), others.count_common(&set)), (common, common));
            prop_assert_eq!(others.is_subset(&set), other.is_subset(&model));
            prop_assert_eq!(set.count(), u64::try_from(model.len()).expect("few"));
        }
    }

    #[test]
    fn consecutive_addresses_are_one_range() {
        let mut set: AddressSet = (0..10_000_u32).rev().map(|n| IpAddr::V4(n.into())).collect();
        assert_eq!(set.ranges.len(), 1);
        set.remove(IpAddr::V4(5_000.into()));
        assert_eq!(set.free_from(IpAddr::V4(0.into())), Some(IpAddr::V4(5_000.into())));
    }

    #[test]
    fn all_of_ipv6_is_counted_as_far_as_possible() {
        let mut all = AddressSet::default();
        all.insert_range(IpAddr::V6(0.into()), IpAddr::V6(u128::MAX.into()));
        assert_eq!((all.count_common(&all), all.count()), (u64::MAX, u64::MAX));
        assert_eq!(all.free_from(IpAddr::V6(7.into())), None);
    }
}

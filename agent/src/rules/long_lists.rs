// SPDX-License-Identifier: Apache-2.0
//! Lists of more than [`SHORT`] endpoints. The kernel has each of them once, under a number of its own, for all frontends of a
//! Service's port. Pure.
//!
//! The slots of a list depend on its history: an endpoint keeps its slot as long as it can, so that a change of one endpoint
//! costs three elements, and two for the list's digest. A new process takes the slots over from the kernel, see [`LongLists::adopt`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use steerage_model::{Family, Key, Protocol};
use steerage_nft::{Row, Rows};

use super::layout::{LONGEST, SHORT};
use super::list_digests::ListDigest;
use super::numbers::Numbers;
use crate::plan::{Action, Endpoints, Frontend, Selection, ServicePlan};

/// The slots of lists in the kernel, by the numbers of the lists. `None` is a slot without an endpoint.
pub type KernelLists = BTreeMap<u32, Vec<Option<SocketAddr>>>;

/// The lists in elements of [`SetId::Endpoints`](super::SetId::Endpoints).
pub fn kernel_lists(endpoints: &Rows) -> KernelLists {
    let mut lists = KernelLists::new();
    for row in endpoints.iter() {
        let Some((number, slot, endpoint)) = decode(row) else { continue };
        let slots = lists.entry(number).or_default();
        if slots.len() <= slot {
            slots.resize(slot + 1, None);
        }
        slots[slot] = Some(endpoint);
    }
    lists
}

fn decode(row: Row<'_>) -> Option<(u32, usize, SocketAddr)> {
    let (number, slot) = row.key.split_first_chunk()?;
    let slot = u32::from_ne_bytes(slot.try_into().ok()?);
    let (addr, port) = row.data?.split_last_chunk::<4>()?;
    let v4 = <[u8; 4]>::try_from(addr).map(IpAddr::from);
    let addr = v4.or_else(|_| <[u8; 16]>::try_from(addr).map(IpAddr::from)).ok()?;
    let endpoint = SocketAddr::new(addr, u16::from_be_bytes([port[0], port[1]]));
    let slot = usize::try_from(slot).ok().filter(|_| slot < LONGEST)?;
    Some((u32::from_ne_bytes(*number), slot, endpoint))
}

/// Which endpoints of a Service a list has: their family, the port of the Service, and the selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ListId {
    family: Family,
    protocol: Protocol,
    port: u16,
    selection: Selection,
}

impl ListId {
    fn new(frontend: &Frontend, action: &Action, endpoints: &Endpoints) -> Self {
        let (family, protocol) = (frontend.family(), frontend.protocol);
        Self { family, protocol, port: action.port, selection: endpoints.selection }
    }
}

/// A list as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LongList {
    /// Identifies it among all lists.
    pub(super) number: u32,
    /// The endpoint of each slot.
    pub(super) slots: Vec<SocketAddr>,
    /// Of these endpoints.
    pub(super) digest: ListDigest,
}

/// All long lists, by Service.
#[derive(Debug, Clone, Default)]
pub(super) struct LongLists {
    services: BTreeMap<Key, BTreeMap<ListId, LongList>>,
    numbers: Numbers,
}

impl LongLists {
    /// The lists of a Service and family.
    pub(super) fn of(&self, service: &Key, family: Family) -> impl Iterator<Item = &LongList> {
        let lists = self.services.get(service).into_iter().flatten();
        lists.filter(move |(id, _)| id.family == family).map(|(_, list)| list)
    }

    /// All lists of a family.
    pub(super) fn all(&self, family: Family) -> impl Iterator<Item = &LongList> {
        self.services.keys().flat_map(move |service| self.of(service, family))
    }

    /// The list with these endpoints of a Service's action; `None` if they are few.
    pub(super) fn get(
        &self,
        service: &Key,
        frontend: &Frontend,
        action: &Action,
        endpoints: &Endpoints,
    ) -> Option<&LongList> {
        if !is_long(endpoints) {
            return None;
        }
        self.services.get(service)?.get(&ListId::new(frontend, action, endpoints))
    }

    /// The numbers of the lists of a family that these plans change. Not those that end: they are deleted by the keys of their slots,
    /// whatever the order of their endpoints is.
    pub(super) fn changed_by(&self, updates: &BTreeMap<Key, ServicePlan>, family: Family) -> BTreeSet<u32> {
        let mut changed = BTreeSet::new();
        for (service, plan) in updates {
            let Some(lists) = self.services.get(service) else { continue };
            let wanted = wanted(plan);
            for (id, list) in lists.iter().filter(|(id, _)| id.family == family) {
                if wanted.get(id).is_some_and(|endpoints| ListDigest::of(endpoints) != list.digest) {
                    changed.insert(list.number);
                }
            }
        }
        changed
    }

    /// Replaces the lists of some Services.
    pub(super) fn update(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        // Free from the next update on: this one may be written in steps.
        let mut freed = Vec::new();
        for (service, plan) in updates {
            let wanted = wanted(plan);
            let mut old = self.services.remove(service).unwrap_or_default();
            freed.extend(old.extract_if(.., |id, _| !wanted.contains_key(id)).map(|(_, list)| list.number));
            for (id, endpoints) in wanted {
                let list = old.entry(id).or_insert_with(|| LongList {
                    number: self.numbers.take(&format!("{service} {id:?}")),
                    slots: Vec::new(),
                    digest: ListDigest::default(),
                });
                let slots: Vec<_> = list.slots.iter().copied().map(Some).collect();
                list.slots = rearranged(&slots, endpoints);
                list.digest = ListDigest::of(&list.slots);
            }
            if !old.is_empty() {
                self.services.insert(service.clone(), old);
            }
        }
        for number in freed {
            self.numbers.give_back(number);
        }
    }

    /// Takes over the slots that the kernel has, so that there is little to write.
    pub(super) fn adopt(&mut self, family: Family, kernel: &KernelLists) {
        let lists = self.services.values_mut().flatten();
        for (_, list) in lists.filter(|(id, _)| id.family == family) {
            if let Some(slots) = kernel.get(&list.number) {
                list.slots = rearranged(slots, &list.slots);
            }
        }
    }
}

/// The long lists that a plan needs.
fn wanted(plan: &ServicePlan) -> BTreeMap<ListId, &Endpoints> {
    let mut wanted = BTreeMap::new();
    for (frontend, action) in &plan.frontends {
        for endpoints in [Some(&action.targets), action.local.as_ref()].into_iter().flatten() {
            if is_long(endpoints) {
                wanted.insert(ListId::new(frontend, action, endpoints), endpoints);
            }
        }
    }
    wanted
}

fn is_long(endpoints: &[SocketAddr]) -> bool {
    u32::try_from(endpoints.len()).is_ok_and(|count| count > SHORT)
}

/// Puts `wanted` into as many slots, starting from `old`: an endpoint that stays keeps its slot where it can, so a change of one
/// endpoint changes at most two slots, and few flows. `None` is a slot without an endpoint.
fn rearranged(old: &[Option<SocketAddr>], wanted: &[SocketAddr]) -> Vec<SocketAddr> {
    let longest = usize::try_from(LONGEST).unwrap_or(usize::MAX);
    let mut missing: BTreeSet<SocketAddr> = wanted.iter().copied().take(longest).collect();
    let count = missing.len();
    let (kept, beyond) = old.split_at(old.len().min(count));
    let mut slots: Vec<_> = kept.iter().map(|slot| slot.filter(|at| missing.remove(at))).collect();
    slots.resize(count, None);
    // Those that lose their slot, because there are fewer now, come before new ones: nothing depends on it but tidiness.
    let moved: Vec<_> = beyond.iter().flatten().copied().filter(|at| missing.remove(at)).collect();
    let mut fill = moved.into_iter().chain(missing);
    slots.into_iter().filter_map(|slot| slot.or_else(|| fill.next())).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn endpoint(n: u8) -> SocketAddr {
        SocketAddr::new(IpAddr::from([10, 244, 0, n]), 80)
    }

    fn endpoints(numbers: &BTreeSet<u8>) -> Vec<SocketAddr> {
        numbers.iter().copied().map(endpoint).collect()
    }

    proptest! {
        #[test]
        fn every_endpoint_has_one_slot_and_keeps_it_where_it_can(
            lists in proptest::collection::vec(proptest::collection::btree_set(any::<u8>(), 0..40), 1..6)
        ) {
            let mut slots: Vec<SocketAddr> = Vec::new();
            for numbers in lists {
                let wanted = endpoints(&numbers);
                let old: Vec<_> = slots.iter().copied().map(Some).collect();
                slots = rearranged(&old, &wanted);
                let mut sorted = slots.clone();
                sorted.sort_unstable();
                prop_assert_eq!(&sorted, &wanted);
                for (old, new) in old.iter().flatten().zip(&slots) {
                    prop_assert!(old == new || !wanted.contains(old), "{} lost its slot", old);
                }
            }
        }

        #[test]
        fn one_endpoint_more_or_less_changes_at_most_two_slots(count in 1_u8..200, gone in any::<u8>()) {
            let all: Vec<_> = (0..count).map(endpoint).collect();
            let full: Vec<_> = all.iter().copied().map(Some).collect();
            let mut fewer = all.clone();
            fewer.remove(usize::from(gone % count));
            let slots = rearranged(&full, &fewer);
            let changed = slots.iter().zip(&all).filter(|(new, old)| new != old).count();
            prop_assert!(changed <= 1, "{changed}, and the last slot is gone");
            let again = rearranged(&slots.iter().copied().map(Some).collect::<Vec<_>>(), &all);
            prop_assert_eq!(&again[..slots.len()], &slots[..]);
        }
    }

    #[test]
    fn slots_without_an_endpoint_are_filled() {
        let slots = rearranged(&[None, Some(endpoint(2)), None], &[endpoint(1), endpoint(2)]);
        assert_eq!(slots, [endpoint(1), endpoint(2)]);
        assert_eq!(rearranged(&[Some(endpoint(1)), Some(endpoint(1))], &[endpoint(1)]), [endpoint(1)]);
    }
}

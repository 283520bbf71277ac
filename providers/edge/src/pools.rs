// SPDX-License-Identifier: Apache-2.0
//! The use and the status of address pools. Pure.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use steerage_edge_api::{AddressPoolSpec, AddressPoolStatus, ReleasedAddress};
use steerage_model::Family;

use crate::kept::{Kept, KeptReason};
use crate::{AddressSet, Pool, Range};

/// Kept addresses that a status names, of each kind.
const SHOWN: usize = 3;

/// How many addresses of a family a pool has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolUsage {
    pub(crate) family: Family,
    /// At most the largest `u64`, as [`assigned`](Self::assigned).
    pub(crate) addresses: u64,
    /// Those that are in use.
    pub(crate) assigned: u64,
}

/// Addresses that a pool must have so that few free ones are a warning: of a pool of one address, all are meant to be assigned.
const LEAST_WARNED: u64 = 10;

impl PoolUsage {
    /// Whether a tenth of the addresses or less is free, as the alert has it.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.addresses >= LEAST_WARNED && self.free() <= self.addresses / 10
    }

    fn free(&self) -> u64 {
        self.addresses.saturating_sub(self.assigned)
    }

    /// What to tell of a pool that is nearly full.
    pub(crate) fn report(&self) -> String {
        format!(
            "{} of {} {} addresses are free. New Services wait when none is left. Add addresses, or another pool.",
            self.free(),
            self.addresses,
            self.family
        )
    }
}

/// The use of a pool, for each family of which it has addresses, given all addresses that are in use.
pub(crate) fn usage(pool: &Pool, used: &AddressSet) -> Vec<PoolUsage> {
    let of_family = |family| {
        let set = pool.addresses(family);
        PoolUsage { family, addresses: set.count(), assigned: used.count_common(&set) }
    };
    [Family::V4, Family::V6].map(of_family).into_iter().filter(|usage| usage.addresses > 0).collect()
}

/// The status of a pool, given all addresses that are in use, and those that are kept although no pool would give them. An operator who looks
/// at any pool sees those that no pool has, because nobody knows which pool they were in.
pub(crate) fn status(
    name: &str,
    spec: &AddressPoolSpec,
    used: &AddressSet,
    kept: &BTreeSet<Kept>,
    released: Vec<ReleasedAddress>,
) -> AddressPoolStatus {
    let pool = Pool::new(name, spec);
    let usages = usage(&pool, used);
    let assigned = usages.iter().map(|usage| usage.assigned).fold(0, u64::saturating_add);
    let mut problems = pool.problems.clone();
    problems.extend(usages.iter().filter(|usage| usage.is_nearly_full()).map(PoolUsage::report));
    problems.extend(report(kept, &pool.ranges));
    AddressPoolStatus { assigned, problem: problems.join(" "), released }
}

/// The labels of namespaces are not known.
pub(crate) const NAMESPACES_MISSING: &str = "The Namespaces are not listed, so namespaceSelector matches none, and the pool is for no other \
    Services than those that have its addresses. Permit the controller to list and watch Namespaces.";

/// Adds a sentence to what is wrong with the pool.
pub(crate) fn add_problem(status: &mut AddressPoolStatus, problem: &str) {
    if !status.problem.is_empty() {
        status.problem.push(' ');
    }
    status.problem.push_str(problem);
}

/// The merge patch that leads to this status. What is empty must be taken away.
pub(crate) fn status_patch(status: &AddressPoolStatus) -> Value {
    json!({
        "assigned": status.assigned,
        "problem": (!status.problem.is_empty()).then_some(&status.problem),
        "released": (!status.released.is_empty()).then_some(&status.released),
    })
}

/// What to tell of kept addresses: of all that are in no pool, and of those of this pool's ranges.
fn report(kept: &BTreeSet<Kept>, ranges: &[Range]) -> Vec<String> {
    let is_of_pool = |one: &&Kept| ranges.iter().any(|range| range.contains(one.address));
    let outside = list(kept.iter().filter(|one| one.why == KeptReason::Outside)).map(|list| {
        format!(
            "Assigned addresses are in no AddressPool: {list}. Their load balancers keep them. Add them to a pool, or request others."
        )
    });
    let refused = list(kept.iter().filter(|one| one.why == KeptReason::NotAdmitted).filter(is_of_pool)).map(|list| {
        format!(
            "Services that the pool is not for have addresses of it: {list}. Their load balancers keep them. Admit the Services, or \
             let them request others."
        )
    });
    outside.into_iter().chain(refused).collect()
}

fn list<'a>(kept: impl Iterator<Item = &'a Kept> + Clone) -> Option<String> {
    let name = |Kept { holder, address, .. }: &Kept| format!("{address} ({holder})");
    let shown: Vec<String> = kept.clone().take(SHOWN).map(name).collect();
    let more = kept.count().saturating_sub(shown.len());
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!shown.is_empty()).then(|| format!("{}{rest}", shown.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_counts_own_addresses_and_lists_problems() {
        let addresses = vec!["10.0.0.0/30".to_owned(), "oops".to_owned()];
        let spec = AddressPoolSpec { addresses, ..AddressPoolSpec::default() };
        let used = ["10.0.0.1", "10.0.0.2", "10.9.0.1"].map(|a| a.parse().expect("ip")).into_iter().collect();
        let status = status("p", &spec, &used, &BTreeSet::new(), Vec::new());
        assert_eq!(status.assigned, 2);
        assert!(status.problem.contains("oops"), "{}", status.problem);
    }

    #[test]
    fn families_of_a_pool_are_counted_apart_and_overlaps_once() {
        let addresses = ["10.0.0.0/29", "10.0.0.2-10.0.0.9", "fd00::/64", "oops"].map(str::to_owned).into();
        let pool = Pool::new("p", &AddressPoolSpec { addresses, ..AddressPoolSpec::default() });
        let used = ["10.0.0.1", "10.0.0.9", "10.9.0.1", "fd00::1", "fd01::1"].map(|a| a.parse().expect("ip"));
        let usages = usage(&pool, &used.into_iter().collect());
        let expected = [
            PoolUsage { family: Family::V4, addresses: 9, assigned: 2 },
            // Without the routers' address.
            PoolUsage { family: Family::V6, addresses: u64::MAX, assigned: 1 },
        ];
        assert_eq!(usages, expected);
        assert_eq!(usage(&Pool { ranges: Vec::new(), ..pool }, &AddressSet::default()), []);
    }

    #[test]
    fn addresses_outside_all_pools_are_named() {
        let spec =
            AddressPoolSpec { addresses: vec!["10.0.0.0/30".to_owned()], ..AddressPoolSpec::default() };
        let outside = |n: u8| Kept {
            holder: format!("Service shop/{n}"),
            address: [10, 9, 0, n].into(),
            why: KeptReason::Outside,
            owner: None,
        };
        let problem = |count| {
            status("p", &spec, &AddressSet::default(), &(0..count).map(outside).collect(), Vec::new()).problem
        };
        assert_eq!(problem(0), "");
        let one = "Assigned addresses are in no AddressPool: 10.9.0.0 (Service shop/0). ";
        assert!(problem(1).starts_with(one), "{}", problem(1));
        assert!(problem(5).contains("10.9.0.2 (Service shop/2) and 2 more. "), "{}", problem(5));
    }
}

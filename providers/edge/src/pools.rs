// SPDX-License-Identifier: Apache-2.0
//! The use and the status of address pools. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use steerage_edge_api::{AddressPoolSpec, AddressPoolStatus};
use steerage_model::Family;

use crate::{AddressSet, Pool};

/// Addresses outside all pools that a status names.
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

/// The use of a pool, for each family of which it has addresses, given all addresses that are in use.
pub(crate) fn usage(pool: &Pool, used: &AddressSet) -> Vec<PoolUsage> {
    let of_family = |family| {
        let set = pool.addresses(family);
        PoolUsage { family, addresses: set.count(), assigned: used.count_common(&set) }
    };
    [Family::V4, Family::V6].map(of_family).into_iter().filter(|usage| usage.addresses > 0).collect()
}

/// An address that is in no pool, and the load balancer that keeps it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Outside {
    /// The kind and name of the Service, or of the object if it names no Service.
    pub(crate) holder: String,
    pub(crate) address: IpAddr,
}

/// The status of a pool, given all addresses that are in use, and those that no pool has: an operator who looks at any pool sees them,
/// because nobody knows which pool they were in.
pub(crate) fn status(
    name: &str,
    spec: &AddressPoolSpec,
    used: &AddressSet,
    outside: &BTreeSet<Outside>,
) -> AddressPoolStatus {
    let pool = Pool::new(name, spec);
    let assigned = usage(&pool, used).iter().map(|usage| usage.assigned).fold(0, u64::saturating_add);
    let mut problems = pool.problems;
    problems.extend(report(outside));
    AddressPoolStatus { assigned, problem: problems.join(" ") }
}

fn report(outside: &BTreeSet<Outside>) -> Option<String> {
    let name = |Outside { holder, address }: &Outside| format!("{address} ({holder})");
    let shown: Vec<String> = outside.iter().take(SHOWN).map(name).collect();
    let more = outside.len().saturating_sub(shown.len());
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!shown.is_empty()).then(|| {
        format!(
            "Assigned addresses are in no AddressPool: {}{rest}. Their load balancers keep them. Add them to a pool, or request others.",
            shown.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_counts_own_addresses_and_lists_problems() {
        let addresses = vec!["10.0.0.0/30".to_owned(), "oops".to_owned()];
        let spec = AddressPoolSpec { addresses, ..AddressPoolSpec::default() };
        let used = ["10.0.0.1", "10.0.0.2", "10.9.0.1"].map(|a| a.parse().expect("ip")).into_iter().collect();
        let status = status("p", &spec, &used, &BTreeSet::new());
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
        let outside = |n: u8| Outside { holder: format!("Service shop/{n}"), address: [10, 9, 0, n].into() };
        let problem =
            |count| status("p", &spec, &AddressSet::default(), &(0..count).map(outside).collect()).problem;
        assert_eq!(problem(0), "");
        let one = "Assigned addresses are in no AddressPool: 10.9.0.0 (Service shop/0). ";
        assert!(problem(1).starts_with(one), "{}", problem(1));
        assert!(problem(5).contains("10.9.0.2 (Service shop/2) and 2 more. "), "{}", problem(5));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The status of address pools. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use steerage_edge_api::{AddressPoolSpec, AddressPoolStatus};

use crate::{AddressSet, Pool};

/// Addresses outside all pools that a status names.
const SHOWN: usize = 3;

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
    let assigned = used.count_common(&pool.addresses());
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
        let spec = AddressPoolSpec { addresses, auto_assign: true };
        let used = ["10.0.0.1", "10.0.0.2", "10.9.0.1"].map(|a| a.parse().expect("ip")).into_iter().collect();
        let status = status("p", &spec, &used, &BTreeSet::new());
        assert_eq!(status.assigned, 2);
        assert!(status.problem.contains("oops"), "{}", status.problem);
    }

    #[test]
    fn addresses_outside_all_pools_are_named() {
        let spec = AddressPoolSpec { addresses: vec!["10.0.0.0/30".to_owned()], auto_assign: true };
        let outside = |n: u8| Outside { holder: format!("Service shop/{n}"), address: [10, 9, 0, n].into() };
        let problem =
            |count| status("p", &spec, &AddressSet::default(), &(0..count).map(outside).collect()).problem;
        assert_eq!(problem(0), "");
        let one = "Assigned addresses are in no AddressPool: 10.9.0.0 (Service shop/0). ";
        assert!(problem(1).starts_with(one), "{}", problem(1));
        assert!(problem(5).contains("10.9.0.2 (Service shop/2) and 2 more. "), "{}", problem(5));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The status of address pools. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use steerage_edge_api::{AddressPoolSpec, AddressPoolStatus};

use crate::Pool;

/// The status of a pool, given all addresses that are in use.
pub(crate) fn status(name: &str, spec: &AddressPoolSpec, taken: &BTreeSet<IpAddr>) -> AddressPoolStatus {
    let pool = Pool::new(name, spec);
    let assigned = taken.iter().filter(|address| pool.contains(**address)).count();
    AddressPoolStatus {
        assigned: u64::try_from(assigned).unwrap_or(u64::MAX),
        problem: pool.problems.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_counts_own_addresses_and_lists_problems() {
        let addresses = vec!["10.0.0.0/30".to_owned(), "oops".to_owned()];
        let spec = AddressPoolSpec { addresses, auto_assign: true };
        let taken = ["10.0.0.1", "10.0.0.2", "10.9.0.1"].map(|a| a.parse().expect("ip")).into();
        let status = status("p", &spec, &taken);
        assert_eq!(status.assigned, 2);
        assert!(status.problem.contains("oops"), "{}", status.problem);
    }
}

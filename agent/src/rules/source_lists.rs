// SPDX-License-Identifier: Apache-2.0
//! Lists of allowed sources. The kernel has each list once, under a number, for all frontends of all Services with these networks.
//! Pure.
//!
//! A network is an element of a plain set for its prefix length, which the rules try one after the other. A set of ranges
//! (`pipapo`) would be one look-up, but each of its commits copies the ranges of all tenants, and until Linux 6.17 it finds new
//! ranges only some time after the rest of their transaction.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::Key;

use super::numbers::Numbers;
use crate::plan::ServicePlan;

/// The steps of prefix lengths, of IPv4 and of IPv6. A network of another length is several networks of the next one.
const STEPS: [u8; 2] = [2, 4];
/// Lengths that are tried first, of IPv4 and of IPv6.
const USUAL: [[u8; 5]; 2] = [[32, 24, 16, 28, 8], [64, 128, 48, 32, 56]];

/// The prefix lengths of networks in the kernel, in the order in which the rules try them.
pub(super) fn prefix_lengths(is_v6: bool) -> impl Iterator<Item = u8> {
    let (step, last, usual) = if is_v6 { (STEPS[1], 128, USUAL[1]) } else { (STEPS[0], 32, USUAL[0]) };
    let mut lengths: Vec<u8> = (0..=last).step_by(step.into()).skip(1).collect();
    lengths.sort_by_key(|length| {
        (usual.iter().position(|usual| usual == length).unwrap_or(usual.len()), *length)
    });
    lengths.into_iter()
}

/// The prefix length that a network has in the kernel.
pub(super) fn kernel_length(net: IpNet) -> u8 {
    let step = if net.addr().is_ipv6() { STEPS[1] } else { STEPS[0] };
    net.prefix_len().max(1).next_multiple_of(step)
}

/// A network as the kernel has it: one network or several.
pub(super) fn kernel_networks(net: IpNet) -> impl Iterator<Item = IpNet> {
    let length = kernel_length(net);
    let v4 = if let IpNet::V4(net) = net { net.subnets(length).ok() } else { None };
    let v6 = if let IpNet::V6(net) = net { net.subnets(length).ok() } else { None };
    v4.into_iter().flatten().map(IpNet::from).chain(v6.into_iter().flatten().map(IpNet::from))
}

/// Networks that Services allow, in order and without overlaps.
pub(super) type Networks = Arc<[IpNet]>;

/// A list in use.
#[derive(Debug, Clone)]
struct SourceList {
    /// Identifies it. No two lists have one number, or the sources of one would be allowed by the other.
    number: u32,
    /// The number of Services that use it.
    users: usize,
}

/// All lists, with the Services that use them.
#[derive(Debug, Clone, Default)]
pub(super) struct SourceLists {
    lists: BTreeMap<Networks, SourceList>,
    numbers: Numbers,
    services: BTreeMap<Key, BTreeSet<Networks>>,
}

impl SourceLists {
    /// The number of a list in use.
    pub(super) fn number(&self, networks: &[IpNet]) -> Option<u32> {
        self.lists.get(networks).map(|list| list.number)
    }

    /// All lists with their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = (u32, &Networks)> {
        self.lists.iter().map(|(networks, list)| (list.number, networks))
    }

    /// The lists that [`SourceLists::update`] with the same plans may add or remove.
    pub(super) fn affected_by(&self, updates: &BTreeMap<Key, ServicePlan>) -> BTreeSet<Networks> {
        let of = |(key, plan): (&Key, &ServicePlan)| {
            let old = self.services.get(key).into_iter().flatten().cloned();
            wanted(plan).into_iter().chain(old).collect::<Vec<_>>()
        };
        updates.iter().flat_map(of).collect()
    }

    /// Replaces the lists of some Services.
    pub(super) fn update(&mut self, updates: &BTreeMap<Key, ServicePlan>) {
        // Free from the next update on: this one may be written in steps.
        let mut left = Vec::new();
        for (service, plan) in updates {
            let wanted = wanted(plan);
            for networks in &wanted {
                self.add_user(networks);
            }
            let old = if wanted.is_empty() {
                self.services.remove(service)
            } else {
                self.services.insert(service.clone(), wanted)
            };
            left.extend(old.into_iter().flatten());
        }
        // Last: a list that passes from one Service to another keeps its number.
        let freed: Vec<_> = left.iter().filter_map(|networks| self.remove_user(networks)).collect();
        for number in freed {
            self.numbers.give_back(number);
        }
    }

    fn add_user(&mut self, networks: &Networks) {
        let numbers = &mut self.numbers;
        let list = self
            .lists
            .entry(Arc::clone(networks))
            .or_insert_with(|| SourceList { number: numbers.take(&format!("{networks:?}")), users: 0 });
        list.users += 1;
    }

    /// Returns the number of the list if nobody uses it any more.
    fn remove_user(&mut self, networks: &Networks) -> Option<u32> {
        let list = self.lists.get_mut(networks)?;
        list.users -= 1;
        (list.users == 0).then(|| self.lists.remove(networks).map(|list| list.number)).flatten()
    }
}

fn wanted(plan: &ServicePlan) -> BTreeSet<Networks> {
    plan.source_lists().cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn usual_lengths_are_tried_first() {
        let lengths: Vec<_> = prefix_lengths(false).collect();
        assert_eq!((lengths.len(), &lengths[..3]), (16, &[32, 24, 16][..]));
        let lengths: Vec<_> = prefix_lengths(true).collect();
        assert_eq!((lengths.len(), &lengths[..3]), (32, &[64, 128, 48][..]));
    }

    proptest! {
        #[test]
        fn networks_in_the_kernel_are_the_same_addresses(v4: u32, v6: u128, length in 0_u8..=128, is_v6: bool) {
            let net = if is_v6 {
                IpNet::new(IpAddr::V6(Ipv6Addr::from(v6)), length).expect("a length")
            } else {
                IpNet::new(IpAddr::V4(Ipv4Addr::from(v4)), length % 33).expect("a length")
            };
            let net = net.trunc();
            let parts: Vec<_> = kernel_networks(net).collect();
            prop_assert_eq!(IpNet::aggregate(&parts), [net]);
            prop_assert!(parts.iter().all(|part| part.prefix_len() == kernel_length(net)));
            prop_assert!(parts.iter().all(|part| prefix_lengths(is_v6).any(|length| length == part.prefix_len())));
            prop_assert!(parts.len() <= 1 << 4);
        }
    }
}

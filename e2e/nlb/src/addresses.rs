// SPDX-License-Identifier: Apache-2.0
//! The addresses of the load balancers, out of one subnet, and their host names. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// AWS keeps the first four addresses of each subnet, and the last, for itself.
const RESERVED: usize = 4;

/// The address of each load balancer, by its host name.
#[derive(Debug)]
pub struct Addresses {
    subnet: Ipv4Net,
    assigned: BTreeMap<String, Ipv4Addr>,
    last: Ipv4Addr,
}

impl Addresses {
    /// No load balancer has an address yet.
    pub fn new(subnet: Ipv4Net) -> Self {
        Self { subnet, assigned: BTreeMap::new(), last: Ipv4Addr::UNSPECIFIED }
    }

    /// The subnet.
    pub fn subnet(&self) -> Ipv4Net {
        self.subnet
    }

    /// Gives each new load balancer an address, and takes those back that are gone. An address that was used is the last to be used
    /// again, so that no packet for an earlier load balancer reaches a later one.
    pub fn update<'a>(&mut self, hostnames: impl IntoIterator<Item = &'a str>) {
        let wanted: BTreeSet<&str> = hostnames.into_iter().collect();
        self.assigned.retain(|hostname, _| wanted.contains(hostname.as_str()));
        for hostname in wanted {
            if self.assigned.contains_key(hostname) {
                continue;
            }
            let taken: BTreeSet<_> = self.assigned.values().copied().collect();
            // These hosts are without the first address and the last.
            let free = || self.subnet.hosts().skip(RESERVED - 1).filter(|address| !taken.contains(address));
            let Some(address) = free().find(|address| *address > self.last).or_else(|| free().next()) else {
                return;
            };
            self.last = address;
            self.assigned.insert(hostname.to_owned(), address);
        }
    }

    /// The address of a load balancer; `None` also if the subnet has no free one.
    pub fn of(&self, hostname: &str) -> Option<Ipv4Addr> {
        self.assigned.get(hostname).copied()
    }

    /// All of them in the format of hosts(5).
    pub fn hosts(&self) -> String {
        self.assigned.iter().fold(String::new(), |mut text, (hostname, address)| {
            let _ = writeln!(text, "{address} {hostname}");
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses() -> Addresses {
        Addresses::new("10.77.200.0/29".parse().unwrap())
    }

    #[test]
    fn load_balancers_get_the_addresses_that_aws_leaves_free() {
        let mut addresses = addresses();
        addresses.update(["b", "a", "c", "d"]);
        assert_eq!(addresses.hosts(), "10.77.200.4 a\n10.77.200.5 b\n10.77.200.6 c\n");
        assert_eq!(addresses.of("d"), None, "the subnet is full");
    }

    #[test]
    fn address_stays_and_is_used_again_last() {
        let mut addresses = addresses();
        addresses.update(["a", "b"]);
        addresses.update(["b", "c"]);
        assert_eq!(addresses.hosts(), "10.77.200.5 b\n10.77.200.6 c\n");
        addresses.update(["b", "d"]);
        assert_eq!(addresses.hosts(), "10.77.200.5 b\n10.77.200.4 d\n");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Address pools as ranges of numbers. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use steerage_edge_api::{AddressPoolSpec, AddressSharing, LabelSelector, Labels};
use steerage_model::Family;

use crate::AddressSet;

/// Consecutive addresses of one family, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    family: Family,
    first: u128,
    last: u128,
}

/// A pool of addresses for load balancers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Whether a Service that names no pool may get an address from it.
    pub auto_assign: bool,
    /// The namespaces whose Services may use it; none for all.
    pub namespaces: Vec<String>,
    /// The labels of namespaces whose Services may use it.
    pub namespace_selector: Option<LabelSelector>,
    /// The labels of Services that may use it.
    pub service_selector: Option<LabelSelector>,
    /// The most addresses of each family that Services of one namespace may have.
    pub max_addresses_per_namespace: Option<u32>,
    /// After this time a released address may be given to another Service.
    pub reuse_delay: Duration,
    /// Pools of a higher priority come first.
    pub priority: i32,
    /// Which Services with one key share an address.
    pub sharing: AddressSharing,
    /// Its ranges without the excluded addresses, in the order of its entries.
    pub ranges: Vec<Range>,
    /// The invalid entries, each with the reason.
    pub problems: Vec<String>,
}

/// The Service that asks for an address, as far as it says which pools it may use.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// The labels of its namespace; `None` if they are not known.
    pub namespace_labels: Option<&'a Labels>,
    /// Its labels.
    pub labels: &'a Labels,
}

impl Pool {
    /// Parses a pool; invalid entries are left out and listed in [`Pool::problems`].
    pub fn new(name: impl Into<String>, spec: &AddressPoolSpec) -> Self {
        let (mut ranges, mut problems) = (Vec::new(), Vec::new());
        for entry in &spec.addresses {
            match entry.parse().and_then(Range::usable) {
                Ok(range) => ranges.push(range),
                Err(problem) => problems.push(format!("`{entry}` is invalid: {problem}. It is ignored.")),
            }
        }
        for entry in &spec.excluded {
            match Range::excluded(entry) {
                Ok(excluded) => ranges = ranges.into_iter().flat_map(|range: Range| range.without(excluded)).collect(),
                Err(problem) => problems.push(format!(
                    "`{entry}` of excluded is invalid: {problem}. It is ignored: the addresses may be assigned."
                )),
            }
        }
        for (field, selector) in
            [("namespaceSelector", &spec.namespace_selector), ("serviceSelector", &spec.service_selector)]
        {
            if let Some(problem) = selector.as_ref().and_then(LabelSelector::problem) {
                problems.push(format!(
                    "{field} is invalid: {problem}. The pool is for no other Services than those that have its addresses. Correct it."
                ));
            }
        }
        Self {
            name: name.into(),
            auto_assign: spec.auto_assign,
            namespaces: spec.namespaces.clone(),
            namespace_selector: spec.namespace_selector.clone(),
            service_selector: spec.service_selector.clone(),
            max_addresses_per_namespace: spec.max_addresses_per_namespace,
            reuse_delay: Duration::from_secs(spec.reuse_delay_seconds.unwrap_or(0).into()),
            priority: spec.priority,
            sharing: spec.sharing,
            ranges,
            problems,
        }
    }

    /// Whether this Service may use it. Unknown labels of a namespace match no selector.
    pub fn admits(&self, requester: Requester<'_>) -> bool {
        let is_named = |list: &Vec<String>| list.iter().any(|admitted| admitted == requester.namespace);
        let selects = |selector: &LabelSelector| {
            requester.namespace_labels.is_some_and(|labels| selector.matches(labels))
        };
        (self.namespaces.is_empty() || is_named(&self.namespaces))
            && self.namespace_selector.as_ref().is_none_or(selects)
            && self.service_selector.as_ref().is_none_or(|selector| selector.matches(requester.labels))
    }

    /// The addresses of this family in its ranges, which may overlap.
    pub fn addresses(&self, family: Family) -> AddressSet {
        let mut set = AddressSet::default();
        for range in self.ranges.iter().filter(|range| range.family == family) {
            set.insert_range(range.first(), range.last());
        }
        set
    }

    /// Whether the pool may assign `address`. The network and broadcast address of a CIDR are excluded.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(address))
    }
}

impl Range {
    /// The family of its addresses.
    pub fn family(self) -> Family {
        self.family
    }

    /// Whether `address` lies in it.
    pub fn contains(self, address: IpAddr) -> bool {
        Family::of(address) == self.family && (self.first..=self.last).contains(&number(address))
    }

    /// The range, unless it has an address that the edge refuses: a Service would get it, and would not be served.
    fn usable(self) -> Result<Self, String> {
        const REFUSED: [(IpAddr, IpAddr); 6] = [
            (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), IpAddr::V4(Ipv4Addr::new(127, 255, 255, 255))),
            (IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), IpAddr::V4(Ipv4Addr::new(239, 255, 255, 255))),
            (IpAddr::V4(Ipv4Addr::BROADCAST), IpAddr::V4(Ipv4Addr::BROADCAST)),
            // `::1` follows `::`.
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::LOCALHOST)),
            (
                IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)),
                IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)),
            ),
        ];
        let overlaps = |(first, last): &(IpAddr, IpAddr)| {
            Family::of(*first) == self.family && number(*first) <= self.last && self.first <= number(*last)
        };
        match REFUSED.iter().find(|refused| overlaps(refused)) {
            Some((first, _)) => {
                let address = address(self.family, number(*first).max(self.first));
                Err(format!("{address} is a loopback, multicast, broadcast or unspecified address"))
            }
            None => Ok(self),
        }
    }

    /// What an entry of excluded addresses says: of a CIDR all addresses.
    fn excluded(text: &str) -> Result<Self, String> {
        match text.trim().parse::<IpNet>() {
            Ok(net) => Ok(Self {
                family: Family::of(net.addr()),
                first: number(net.network()),
                last: number(net.broadcast()),
            }),
            Err(_) => text.parse(),
        }
    }

    /// The range without these addresses: none, one or two ranges.
    fn without(self, excluded: Self) -> impl Iterator<Item = Self> {
        let is_apart =
            self.family != excluded.family || excluded.last < self.first || self.last < excluded.first;
        let whole = is_apart.then_some(self);
        let is_before = !is_apart && self.first < excluded.first;
        let before = is_before.then(|| Self { last: excluded.first - 1, ..self });
        let is_after = !is_apart && excluded.last < self.last;
        let after = is_after.then(|| Self { first: excluded.last + 1, ..self });
        [whole, before, after].into_iter().flatten()
    }

    /// Its lowest address.
    pub fn first(self) -> IpAddr {
        address(self.family, self.first)
    }

    /// Its highest address.
    pub fn last(self) -> IpAddr {
        address(self.family, self.last)
    }
}

impl std::str::FromStr for Range {
    type Err = String;

    /// `10.0.0.0/24`, `10.0.0.1-10.0.0.9` or `10.0.0.1`.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let ip =
            |text: &str| text.trim().parse::<IpAddr>().map_err(|_| format!("`{text}` is not an address"));
        if text.contains('/') {
            let net: IpNet = text.parse().map_err(|_| "not a CIDR".to_owned())?;
            return Ok(Self::of_net(net));
        }
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (ip(first)?, ip(last)?),
            None => (ip(text)?, ip(text)?),
        };
        if Family::of(first) != Family::of(last) {
            return Err("first and last address have different families".to_owned());
        }
        if first > last {
            return Err("the last address is lower than the first".to_owned());
        }
        Ok(Self { family: Family::of(first), first: number(first), last: number(last) })
    }
}

impl Range {
    /// A CIDR without the addresses that no host can have: network and broadcast address in IPv4, the routers' anycast address in
    /// IPv6 (RFC 4291, 2.6.1).
    fn of_net(net: IpNet) -> Self {
        let (mut first, mut last) = (number(net.network()), number(net.broadcast()));
        match net {
            IpNet::V4(net) if net.prefix_len() < 31 => {
                first += 1;
                last -= 1;
            }
            IpNet::V6(net) if net.prefix_len() < 127 => first += 1,
            _ => {}
        }
        Self { family: Family::of(net.addr()), first, last }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

fn address(family: Family, number: u128) -> IpAddr {
    match (family, u32::try_from(number)) {
        (Family::V4, Ok(number)) => IpAddr::V4(Ipv4Addr::from(number)),
        _ => IpAddr::V6(Ipv6Addr::from(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address_set::next;

    fn all(text: &str) -> Vec<String> {
        let range = text.parse::<Range>().expect(text);
        let all = std::iter::successors(Some(range.first()), |a| next(*a).filter(|a| *a <= range.last()));
        all.map(|a| a.to_string()).collect()
    }

    #[test]
    fn entries_are_parsed() {
        assert_eq!(all("10.0.0.7"), ["10.0.0.7"]);
        assert_eq!(all("10.0.0.254 - 10.0.1.1"), ["10.0.0.254", "10.0.0.255", "10.0.1.0", "10.0.1.1"]);
        assert_eq!(all("10.0.0.1/30"), ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(all("10.0.0.4/31"), ["10.0.0.4", "10.0.0.5"]);
        assert_eq!(all("10.0.0.4/32"), ["10.0.0.4"]);
        assert_eq!(all("fd00::/126"), ["fd00::1", "fd00::2", "fd00::3"]);
        assert_eq!(all("fd00::9-fd00::a"), ["fd00::9", "fd00::a"]);
        assert!("::/0".parse::<Range>().expect("all of IPv6").contains("fd00::1".parse().expect("ip")));
    }

    #[test]
    fn excluded_addresses_are_in_no_range() {
        let spec = |excluded: &[&str]| AddressPoolSpec {
            addresses: ["10.0.0.0/28", "fd00::1-fd00::9"].map(str::to_owned).into(),
            excluded: excluded.iter().map(ToString::to_string).collect(),
            ..AddressPoolSpec::default()
        };
        let ranges = |excluded: &[&str]| -> Vec<String> {
            let pool = Pool::new("p", &spec(excluded));
            assert_eq!(pool.problems, [""; 0]);
            pool.ranges.iter().map(|range| format!("{}-{}", range.first(), range.last())).collect()
        };
        assert_eq!(ranges(&["10.0.1.0/24", "fd01::1"]), ["10.0.0.1-10.0.0.14", "fd00::1-fd00::9"]);
        assert_eq!(
            ranges(&["10.0.0.4/30", "fd00::9"]),
            ["10.0.0.1-10.0.0.3", "10.0.0.8-10.0.0.14", "fd00::1-fd00::8"]
        );
        assert_eq!(
            ranges(&["10.0.0.1", "10.0.0.14", "10.0.0.5-10.0.0.6", "fd00::/64"]),
            ["10.0.0.2-10.0.0.4", "10.0.0.7-10.0.0.13"]
        );
        let pool = Pool::new("p", &spec(&["10.0.0.300"]));
        assert!(pool.problems[0].contains("excluded is invalid"), "{:?}", pool.problems);
        assert_eq!(pool.ranges.len(), 2);
    }

    #[test]
    fn invalid_entries_are_reported_and_left_out() {
        let addresses = ["10.0.0.1", "10.0.0.300", "10.0.0.9-10.0.0.1", "10.0.0.1-fd00::1", "10.0.0.0/33"];
        let spec =
            AddressPoolSpec { addresses: addresses.map(str::to_owned).into(), ..AddressPoolSpec::default() };
        let pool = Pool::new("p", &spec);
        assert_eq!(pool.ranges.len(), 1);
        assert_eq!(pool.problems.len(), 4, "{:?}", pool.problems);
    }

    #[test]
    fn addresses_that_the_edge_refuses_are_reported() {
        for (entry, found) in [
            ("127.0.0.5", "127.0.0.5"),
            ("126.0.0.0-128.0.0.0", "127.0.0.0"),
            ("224.0.0.9", "224.0.0.9"),
            ("0.0.0.0", "0.0.0.0"),
            ("255.255.255.255", "255.255.255.255"),
            ("::/120", "::1"),
            ("ff02::1", "ff02::1"),
        ] {
            let pool = Pool::new(
                "p",
                &AddressPoolSpec { addresses: vec![entry.to_owned()], ..AddressPoolSpec::default() },
            );
            assert!(
                pool.ranges.is_empty() && pool.problems[0].contains(&format!(": {found} is")),
                "{pool:?}"
            );
        }
        let addresses = ["10.0.0.0/8", "fd00::/8", "223.255.255.255", "128.0.0.0"].map(str::to_owned).into();
        let pool = Pool::new("p", &AddressPoolSpec { addresses, ..AddressPoolSpec::default() });
        assert_eq!(pool.problems, [""; 0]);
    }
}

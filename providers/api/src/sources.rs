// SPDX-License-Identifier: Apache-2.0
//! Who may connect to a load balancer whose Service is refused: what the Service requests of this alone, and what is in force.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ipnet::IpNet;

/// Who may connect, as a Service requests it, whatever else it requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedSources {
    /// The field `spec.loadBalancerSourceRanges`.
    pub ranges: Vec<IpNet>,
    /// The annotations that the provider reads for it ([`Provider::source_annotations`](crate::Provider::source_annotations)).
    pub annotations: BTreeMap<String, String>,
}

/// Who may connect, as far as Steerage decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmittedSources {
    /// Every client that reaches the load balancer.
    Everybody,
    /// Clients from these ranges, or what else names clients at the provider; nobody if there are none.
    Only(BTreeSet<String>),
    /// The same, but they contain clients that the Service does not admit: there is no room for narrower ones.
    Wider(BTreeSet<String>),
    /// The same, and whom others admit beside Steerage.
    WithOthers(BTreeSet<String>),
    /// Others decide, such as the owners of security groups that an annotation names.
    Foreign,
    /// Steerage's own rules, which the credentials may not read or change: they may admit clients that the Service does not admit.
    NotPermitted,
}

impl fmt::Display for AdmittedSources {
    /// A sentence for users, without its full stop.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Sources that a message names.
        const SHOWN: usize = 10;
        let list = |sources: &BTreeSet<String>| {
            let shown: Vec<&str> = sources.iter().take(SHOWN).map(String::as_str).collect();
            match sources.len() - shown.len() {
                0 => shown.join(", "),
                more => format!("{} and {more} more ranges", shown.join(", ")),
            }
        };
        match self {
            Self::Everybody => f.write_str("Every client may connect"),
            Self::Foreign => f.write_str("Rules that are not Steerage's decide which clients may connect"),
            Self::NotPermitted => f.write_str(
                "The credentials may not read or change the firewall rules of the Service, so clients that these admit may still connect",
            ),
            Self::Only(sources) if sources.is_empty() => f.write_str("No client may connect"),
            Self::Only(sources) => write!(f, "Only clients from {} may connect", list(sources)),
            Self::Wider(sources) => {
                write!(f, "Clients from {} may connect, more than the Service requests", list(sources))
            }
            Self::WithOthers(sources) if sources.is_empty() => {
                f.write_str("Only clients that rules of others admit may connect")
            }
            Self::WithOthers(sources) => {
                write!(f, "Clients from {} may connect, and those that rules of others admit", list(sources))
            }
        }
    }
}

/// The addresses that are in a range of both lists. An empty list has no address.
pub fn intersection(one: &[IpNet], other: &[IpNet]) -> BTreeSet<IpNet> {
    // Two ranges are nested or disjoint: what both lists have is the ranges of each that the other one contains.
    let contained = |list: &[IpNet], other: &[IpNet]| -> BTreeSet<IpNet> {
        let other: Ranges = other.iter().copied().collect();
        list.iter().map(IpNet::trunc).filter(|range| other.contains(range)).collect()
    };
    &contained(one, other) | &contained(other, one)
}

/// A list of ranges, to look ranges up in it.
#[derive(Clone, Debug, Default)]
pub struct Ranges(Vec<IpNet>);

impl FromIterator<IpNet> for Ranges {
    fn from_iter<I: IntoIterator<Item = IpNet>>(ranges: I) -> Self {
        let mut all: Vec<IpNet> = ranges.into_iter().map(|range| range.trunc()).collect();
        all.sort_unstable();
        let mut widest: Vec<IpNet> = Vec::new();
        for range in all {
            if !widest.last().is_some_and(|last| last.contains(&range)) {
                widest.push(range);
            }
        }
        Self(widest)
    }
}

impl Ranges {
    /// The parts of a range that the list contains, without those that others contain.
    pub fn within<'a>(&'a self, range: &'a IpNet) -> &'a [IpNet] {
        if self.contains(range) {
            return std::slice::from_ref(range);
        }
        let rest = &self.0[self.after(range)..];
        &rest[..rest.partition_point(|known| range.contains(known))]
    }

    /// Whether a range of the list contains all of this one.
    fn contains(&self, range: &IpNet) -> bool {
        self.0[..self.after(range)].last().is_some_and(|known| known.contains(range))
    }

    /// How many of the ranges sort before this one or are the same. A range sorts before what it contains.
    fn after(&self, range: &IpNet) -> usize {
        self.0.partition_point(|known| known <= range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect("range")).collect()
    }

    #[test]
    fn intersection_has_what_both_lists_have() {
        for (one, other, expected) in [
            (&["10.0.0.0/8"][..], &["10.1.0.0/16"][..], &["10.1.0.0/16"][..]),
            (&["10.1.0.0/16"], &["0.0.0.0/0"], &["10.1.0.0/16"]),
            (&["10.0.0.0/8", "192.0.2.0/24"], &["192.0.2.0/24", "198.51.100.0/24"], &["192.0.2.0/24"]),
            (&["10.0.0.0/8", "2001:db8::/32"], &["2001:db8:1::/48"], &["2001:db8:1::/48"]),
            (&["10.0.0.0/8"], &["192.0.2.0/24"], &[]),
            (&["0.0.0.0/0"], &["::/0"], &[]),
            (&["10.0.0.0/8"], &[], &[]),
            (&["10.0.0.0/8", "10.1.0.0/16"], &["10.0.0.0/8", "10.1.0.0/16"], &["10.0.0.0/8", "10.1.0.0/16"]),
        ] {
            for (one, other) in [(one, other), (other, one)] {
                let expected: BTreeSet<IpNet> = nets(expected).into_iter().collect();
                assert_eq!(intersection(&nets(one), &nets(other)), expected, "{one:?} {other:?}");
            }
        }
    }

    /// Against all pairs, in lists that nest and overlap.
    #[test]
    fn sweep_finds_what_pairs_have() {
        let mut random = 1_u32;
        let mut next = |below: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % below
        };
        for round in 0..500 {
            let mut list = || -> Vec<IpNet> {
                let net = |next: &mut dyn FnMut(u32) -> u32| match next(2) {
                    0 => format!("10.0.{}.{}/{}", next(2), next(256), 20 + next(13)),
                    _ => format!("2001:db8::{:x}/{}", next(256), 116 + next(13)),
                };
                (0..next(9)).map(|_| net(&mut next).parse().expect("range")).collect()
            };
            let (one, other) = (list(), list());
            let of_pair = |a: &IpNet, b: &IpNet| match (a.contains(b), b.contains(a)) {
                (true, _) => Some(b.trunc()),
                (_, true) => Some(a.trunc()),
                (false, false) => None,
            };
            let pairs: BTreeSet<IpNet> =
                one.iter().flat_map(|a| other.iter().filter_map(move |b| of_pair(a, b))).collect();
            assert_eq!(intersection(&one, &other), pairs, "{round}: {one:?} {other:?}");
            let ranges: Ranges = other.iter().copied().collect();
            for range in one.iter().map(IpNet::trunc) {
                let parts: BTreeSet<IpNet> = ranges.within(&range).iter().copied().collect();
                let all = other.iter().filter_map(|b| of_pair(&range, b));
                let widest: Ranges = all.collect();
                assert_eq!(parts, widest.0.iter().copied().collect(), "{round}: {range} {other:?}");
            }
        }
    }

    /// Three lists of this length in a test are seconds by pairs, whatever the machine; sorted they are milliseconds.
    #[test]
    fn long_lists_are_intersected() {
        let list = |step: u32| -> Vec<IpNet> {
            let net =
                |i: u32| IpNet::new(std::net::Ipv4Addr::from(i * step * 256).into(), 24).expect("range");
            (0..25_600).map(net).collect()
        };
        assert_eq!(intersection(&list(1), &list(2)).len(), 12_800);
    }

    #[test]
    fn message_names_ten_sources() {
        let all: BTreeSet<String> = (10..22).map(|i| format!("10.{i}.0.0/16")).collect();
        let text = AdmittedSources::Only(all).to_string();
        assert!(text.ends_with("10.19.0.0/16 and 2 more ranges may connect"), "{text}");
        assert_eq!(AdmittedSources::Only(BTreeSet::new()).to_string(), "No client may connect");
        let others = AdmittedSources::WithOthers(BTreeSet::new()).to_string();
        assert_eq!(others, "Only clients that rules of others admit may connect");
    }
}

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
    /// The Service's annotations; each provider reads its own.
    pub annotations: BTreeMap<String, String>,
}

/// Who may connect, as far as Steerage decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmittedSources {
    /// Every client that reaches the load balancer.
    Everybody,
    /// Clients from these ranges, or what else names clients at the provider; nobody if there are none.
    Only(BTreeSet<String>),
    /// Others decide, such as the owners of security groups that an annotation names.
    Foreign,
}

impl fmt::Display for AdmittedSources {
    /// A sentence for users, without its full stop.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Sources that a message names.
        const SHOWN: usize = 10;
        match self {
            Self::Everybody => f.write_str("Every client may connect"),
            Self::Foreign => f.write_str("Rules that are not Steerage's decide which clients may connect"),
            Self::Only(sources) if sources.is_empty() => f.write_str("No client may connect"),
            Self::Only(sources) => {
                let shown: Vec<&str> = sources.iter().take(SHOWN).map(String::as_str).collect();
                write!(f, "Only clients from {} may connect", shown.join(", "))?;
                match sources.len() - shown.len() {
                    0 => Ok(()),
                    more => write!(f, ", and from {more} more ranges"),
                }
            }
        }
    }
}

/// The addresses that are in a range of both lists. An empty list has no address.
pub fn intersection(one: &[IpNet], other: &[IpNet]) -> BTreeSet<IpNet> {
    let of_pair = |a: &IpNet, b: &IpNet| match (a.contains(b), b.contains(a)) {
        (true, _) => Some(b.trunc()),
        (_, true) => Some(a.trunc()),
        (false, false) => None,
    };
    one.iter().flat_map(|a| other.iter().filter_map(move |b| of_pair(a, b))).collect()
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

    #[test]
    fn message_names_ten_sources() {
        let all: BTreeSet<String> = (10..22).map(|i| format!("10.{i}.0.0/16")).collect();
        let text = AdmittedSources::Only(all).to_string();
        assert!(text.ends_with("10.19.0.0/16 may connect, and from 2 more ranges"), "{text}");
        assert_eq!(AdmittedSources::Only(BTreeSet::new()).to_string(), "No client may connect");
    }
}

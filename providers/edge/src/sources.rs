// SPDX-License-Identifier: Apache-2.0
//! The source ranges of an object whose Service is refused. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use steerage_provider_api::{AdmittedSources, intersection};

/// Ranges that no client has. An empty list would admit everybody.
const NOBODY: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// The source ranges of an object without the clients that `requested` does not admit. An empty list admits everybody, and a range that
/// cannot be read nobody.
pub(crate) fn restricted(present: &[String], requested: &[IpNet]) -> Vec<String> {
    if requested.is_empty() {
        return present.to_vec();
    }
    let readable: BTreeSet<IpNet> = present.iter().filter_map(|range| range.parse().ok()).collect();
    let left = if present.is_empty() {
        requested.iter().copied().collect()
    } else {
        intersection(&readable.iter().copied().collect::<Vec<_>>(), requested)
    };
    if left == readable && !left.is_empty() {
        return present.to_vec();
    }
    if left.is_empty() {
        return NOBODY.map(|address| IpNet::from(address).to_string()).to_vec();
    }
    left.iter().map(ToString::to_string).collect()
}

/// Whom the source ranges of an object admit.
pub(crate) fn admitted(ranges: &[String]) -> AdmittedSources {
    let nobody = NOBODY.map(IpNet::from);
    let is_somebody = |range: &&String| !range.parse::<IpNet>().is_ok_and(|range| nobody.contains(&range));
    if ranges.is_empty() {
        return AdmittedSources::Everybody;
    }
    AdmittedSources::Only(ranges.iter().filter(is_somebody).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_a_refused_service_only_leave() {
        let nobody = &["0.0.0.0/32", "::/128"][..];
        let both = &["192.0.2.0/24", "10.0.0.0/8"][..];
        for (present, requested, left, told) in [
            (both, &["192.0.2.0/24"][..], &["192.0.2.0/24"][..], "Only clients from 192.0.2.0/24 may"),
            (&["192.0.2.0/24"], both, &["192.0.2.0/24"], "Only clients from 192.0.2.0/24 may"),
            (both, &["0.0.0.0/0"], both, "Only clients from 10.0.0.0/8, 192.0.2.0/24 may"),
            (&["10.0.0.0/8"], &["10.9.0.0/16"], &["10.9.0.0/16"], "Only clients from 10.9.0.0/16 may"),
            (&[], &["10.9.0.0/16"], &["10.9.0.0/16"], "Only clients from 10.9.0.0/16 may"),
            (&["10.9.0.0/16"], &[], &["10.9.0.0/16"], "Only clients from 10.9.0.0/16 may"),
            (&[], &[], &[], "Every client may"),
            (&["10.0.0.0/8"], &["192.0.2.0/24"], nobody, "No client may"),
            (&["wrong"], &["192.0.2.0/24"], nobody, "No client may"),
            (nobody, &["0.0.0.0/0", "::/0"], nobody, "No client may"),
        ] {
            let present: Vec<String> = present.iter().map(ToString::to_string).collect();
            let requested: Vec<IpNet> = requested.iter().map(|range| range.parse().expect("range")).collect();
            let found = restricted(&present, &requested);
            assert_eq!(found, left, "{present:?} {requested:?}");
            let text = admitted(&found).to_string();
            assert!(text.starts_with(told), "{text}");
        }
    }
}

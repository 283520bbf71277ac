// SPDX-License-Identifier: Apache-2.0
//! The source ranges that a Service requests, and those that its object keeps while the Service is refused. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use steerage_edge_api::MAX_SOURCE_RANGES;
use steerage_provider_api::{AdmittedSources, Error, intersection};
use steerage_provider_cloud::{PeerAnnotations, annotation};

/// Ranges that no client has. An empty list would admit everybody.
const NOBODY: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// The annotations that the edge reads, and their typing errors, which would leave a Service open to all clients.
const ANNOTATIONS: PeerAnnotations =
    PeerAnnotations { prefix: "service.beta.kubernetes.io/", own: None, unread: &[] };
/// The annotations that say who may connect.
pub(crate) const READ: &[&str] = &[annotation::SOURCE_RANGES];

/// The source ranges that a Service requests by its field or, without it, by the annotation.
pub(crate) fn requested(
    field: &[IpNet],
    annotations: &BTreeMap<String, String>,
) -> Result<Vec<IpNet>, Error> {
    if field.is_empty() { annotation::source_ranges(annotations) } else { Ok(field.to_vec()) }
}

/// The same of a Service that is to be served.
pub(crate) fn checked(field: &[IpNet], annotations: &BTreeMap<String, String>) -> Result<Vec<IpNet>, Error> {
    ANNOTATIONS.check(annotations, READ)?;
    requested(field, annotations)
}

/// The source ranges of an object without the clients that `requested` does not admit, if a load balancer of the edge can have so many,
/// and whom they admit. An empty list admits everybody, and a range that cannot be read nobody.
pub(crate) fn restricted(present: &[String], requested: &[IpNet]) -> (Vec<String>, AdmittedSources) {
    let narrowed = narrowed(present, requested);
    if too_many(narrowed.iter().filter_map(|range| range.parse().ok())).is_some() {
        let admitted = match admitted(present) {
            AdmittedSources::Only(ranges) => AdmittedSources::Wider(ranges),
            other => other,
        };
        return (present.to_vec(), admitted);
    }
    let admitted = admitted(&narrowed);
    (narrowed, admitted)
}

fn narrowed(present: &[String], requested: &[IpNet]) -> Vec<String> {
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

/// The family of which the ranges are more than a load balancer of the edge has, and their number after merging.
pub(crate) fn too_many(ranges: impl Iterator<Item = IpNet>) -> Option<(&'static str, usize)> {
    let merged = IpNet::aggregate(&ranges.collect());
    let of_ipv6 = merged.iter().filter(|range| range.addr().is_ipv6()).count();
    let counts = [("IPv4", merged.len() - of_ipv6), ("IPv6", of_ipv6)];
    counts.into_iter().find(|(_, count)| *count > MAX_SOURCE_RANGES)
}

/// Whom the source ranges of an object admit.
fn admitted(ranges: &[String]) -> AdmittedSources {
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
            let (found, admitted) = restricted(&present, &requested);
            assert_eq!(found, left, "{present:?} {requested:?}");
            let text = admitted.to_string();
            assert!(text.starts_with(told), "{text}");
        }
    }

    #[test]
    fn ranges_come_from_the_field_or_the_annotation() {
        let range = |text: &str| vec![text.parse::<IpNet>().expect("range")];
        let of = |field: &[IpNet], name: &str, value: &str| {
            checked(field, &BTreeMap::from([(name.to_owned(), value.to_owned())]))
                .map_err(|error| error.reason().to_owned())
        };
        let name = annotation::SOURCE_RANGES;
        let field = range("192.0.2.0/24");
        assert_eq!(of(&field, name, "10.0.0.0/8"), Ok(field.clone()), "the field wins");
        assert_eq!(of(&[], name, "10.0.0.0/8"), Ok(range("10.0.0.0/8")));
        assert_eq!(of(&[], name, " "), Ok(Vec::new()));
        assert_eq!(of(&[], name, "10.0.0.0/33"), Err("InvalidAnnotation".to_owned()));
        for typo in ["load-balancer-source-range", "loadbalancer-source-ranges"] {
            let name = format!("service.beta.kubernetes.io/{typo}");
            assert_eq!(of(&field, &name, "10.0.0.0/8"), Err("UnknownAnnotation".to_owned()), "{typo}");
        }
        for other in ["aws-load-balancer-scheme", "azure-load-balancer-internal", "external-traffic"] {
            let name = format!("service.beta.kubernetes.io/{other}");
            assert_eq!(of(&[], &name, "10.0.0.0/8"), Ok(Vec::new()), "{other}");
        }
    }

    /// Narrower ones would be more than a load balancer has.
    #[test]
    fn too_many_requested_ranges_narrow_nothing() {
        let address = |number: u32| IpNet::from(IpAddr::from((0x0a00_0000 + 2 * number).to_be_bytes()));
        let requested: Vec<IpNet> = (0..1001).map(address).collect();
        let present = vec!["10.0.0.0/8".to_owned()];
        let (left, admitted) = restricted(&present, &requested);
        assert_eq!(left, present);
        assert!(matches!(admitted, AdmittedSources::Wider(_)), "{admitted}");
        let (left, admitted) = restricted(&[], &requested);
        assert_eq!((left, admitted), (Vec::new(), AdmittedSources::Everybody));
        let (left, _) = restricted(&present, &requested[1..]);
        assert_eq!(left.len(), 1000);
    }
}

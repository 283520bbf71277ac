// SPDX-License-Identifier: Apache-2.0
//! The annotations of AWS's other controllers, and which of them Steerage accepts. Pure. `desired` checks each Service with it.
//!
//! `docs/reference/annotations.md` lists the table.

use std::collections::BTreeMap;

use steerage_provider_api::Error;
use steerage_provider_cloud::{PeerAnnotation, PeerAnnotations};

use crate::annotations;

/// All names in [`PEER_ANNOTATIONS`] start with it.
pub const PREFIX: &str = "service.beta.kubernetes.io/";
/// All annotations of AWS's other controllers.
const PEERS: PeerAnnotations =
    PeerAnnotations { prefix: PREFIX, own: "aws-load-balancer-", unread: PEER_ANNOTATIONS };

const fn peer(suffix: &'static str, accepted: &'static [&'static str], why: &'static str) -> PeerAnnotation {
    PeerAnnotation { suffix, accepted, why }
}

const IPV6_ADDRESSES: &str = "AWS chooses the IPv6 addresses.";
const CLASSIC: &str = "It concerns classic load balancers, which Steerage does not create.";
const QUIC: &str = "QUIC is not supported.";

/// Every annotation of the AWS Load Balancer Controller and of AWS's cloud controller manager for network load balancers, except
/// those in [`annotations::ALL`].
pub const PEER_ANNOTATIONS: &[PeerAnnotation] = &[
    peer("actions.", &[], "Weighted target groups are not supported yet."),
    peer("aws-load-balancer-access-log-emit-interval", &[], CLASSIC),
    peer("aws-load-balancer-connection-draining-enabled", &[], CLASSIC),
    peer("aws-load-balancer-connection-draining-timeout", &[], CLASSIC),
    peer("aws-load-balancer-connection-idle-timeout", &[], CLASSIC),
    peer(
        "aws-load-balancer-enable-tcp-udp-listener",
        &["true"],
        "A port with TCP and UDP always has one TCP_UDP listener.",
    ),
    peer("aws-load-balancer-extra-security-groups", &[], CLASSIC),
    peer("aws-load-balancer-healthcheck-success-codes", &["200"], "Only status 200 is healthy."),
    peer(
        "aws-load-balancer-inbound-sg-rules-on-private-link-traffic",
        &["on"],
        "Rules always apply to traffic of PrivateLink, which is AWS's default.",
    ),
    peer("aws-load-balancer-ipv6-addresses", &[], IPV6_ADDRESSES),
    peer("aws-load-balancer-listener-attributes.", &[], "Attributes of listeners are not supported yet."),
    peer("aws-load-balancer-minimum-load-balancer-capacity", &[], "Reserved capacity is not supported."),
    peer(
        "aws-load-balancer-multi-cluster-target-group",
        &["false"],
        "Target groups of several clusters are not supported.",
    ),
    peer(
        "aws-load-balancer-name",
        &[],
        "Steerage chooses the name, so that it finds the load balancer again.",
    ),
    peer(
        "aws-load-balancer-proxy-protocol-per-target-group",
        &[],
        "Use aws-load-balancer-proxy-protocol for all ports, or another Service for the others.",
    ),
    peer("aws-load-balancer-quic-enabled-containers", &[], QUIC),
    peer("aws-load-balancer-quic-enabled-ports", &[], QUIC),
    peer(
        "aws-load-balancer-type",
        &["nlb", "external"],
        "Steerage creates network load balancers. For pods as targets, set aws-load-balancer-nlb-target-type to ip.",
    ),
];

/// Refuses an annotation that another controller would obey, or whose name nobody knows.
pub(crate) fn check(of_service: &BTreeMap<String, String>) -> Result<(), Error> {
    let read: Vec<&'static str> = annotations::ALL.iter().map(|known| known.name).collect();
    PEERS.check(of_service, &read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(suffix: &str, value: &str) -> Result<(), (&'static str, String)> {
        let annotations = BTreeMap::from([(format!("{PREFIX}{suffix}"), value.to_owned())]);
        check(&annotations).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn table_is_sorted_and_without_supported_annotations() {
        let names: Vec<_> = PEER_ANNOTATIONS.iter().map(|peer| peer.suffix).collect();
        assert!(names.is_sorted_by(|a, b| a < b));
        for known in annotations::ALL {
            assert!(names.iter().all(|suffix| format!("{PREFIX}{suffix}") != known.name), "{}", known.name);
        }
        assert!(PEER_ANNOTATIONS.iter().all(|peer| peer.why.ends_with('.')));
    }

    #[test]
    fn every_peer_annotation_is_refused_by_name_unless_it_requests_what_is_done_anyway() {
        for peer in PEER_ANNOTATIONS {
            let suffix = if peer.suffix.ends_with('.') {
                format!("{}TCP-80", peer.suffix)
            } else {
                peer.suffix.to_owned()
            };
            for value in peer.accepted {
                assert_eq!(checked(&suffix, value), Ok(()), "{suffix}");
            }
            let (_, message) = checked(&suffix, "surprise").unwrap_err();
            assert!(message.contains(&suffix), "{message}");
        }
        let (reason, message) = checked("aws-load-balancer-type", "nlb-ip").unwrap_err();
        assert_eq!(reason, "AnnotationNotSupported");
        assert!(message.contains("target-type to ip") && message.contains("or set it to nlb"), "{message}");
    }

    #[test]
    fn unknown_annotation_is_refused_with_the_nearest_name() {
        for (typo, nearest) in [
            ("aws-load-balancer-schema", "aws-load-balancer-scheme."),
            ("aws-load-balancer-intrenal", "aws-load-balancer-internal."),
            ("aws-load-balancer-security-group", "aws-load-balancer-security-groups."),
        ] {
            let (reason, message) = checked(typo, "true").unwrap_err();
            assert_eq!(reason, "UnknownAnnotation");
            assert!(
                message.contains(typo) && message.contains(&format!("is {PREFIX}{nearest}")),
                "{message}"
            );
        }
    }

    #[test]
    fn annotations_of_others_are_accepted() {
        assert_eq!(checked("aws-load-balancer-scheme", "internal"), Ok(()));
        assert_eq!(checked("azure-load-balancer-internal", "true"), Ok(()));
        assert_eq!(checked("external-traffic", "OnlyLocal"), Ok(()));
    }
}

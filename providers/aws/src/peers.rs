// SPDX-License-Identifier: Apache-2.0
//! The annotations of AWS's other controllers, and which of them Steerage accepts. Pure. `desired` checks each Service with it, so
//! that an annotation is never ignored: a load balancer that looks configured would be more open than its owner believes.
//!
//! `docs/reference/annotations.md` lists the table.

use std::collections::BTreeMap;

use steerage_provider_api::Error;

use crate::{annotations, reasons};

/// All names in [`PEER_ANNOTATIONS`] start with it.
pub const PREFIX: &str = "service.beta.kubernetes.io/";
/// Every annotation that starts with it concerns a load balancer of AWS.
const AWS_PREFIX: &str = "service.beta.kubernetes.io/aws-load-balancer-";

/// An annotation that another controller reads, and Steerage does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAnnotation {
    /// The name after [`PREFIX`]. If it ends with a dot, more follows in the annotation.
    pub suffix: &'static str,
    /// Values that are accepted, because they request what Steerage does anyway.
    pub accepted: &'static [&'static str],
    /// Why other values are refused, or what to use instead: a sentence.
    pub why: &'static str,
}

const fn peer(suffix: &'static str, accepted: &'static [&'static str], why: &'static str) -> PeerAnnotation {
    PeerAnnotation { suffix, accepted, why }
}

const IPV6: &str = "IPv6 is not supported yet.";
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
    peer("aws-load-balancer-enable-prefix-for-ipv6-source-nat", &["off"], IPV6),
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
    peer("aws-load-balancer-ip-address-type", &["ipv4"], IPV6),
    peer("aws-load-balancer-ipv6-addresses", &[], IPV6),
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
    peer("aws-load-balancer-source-nat-ipv6-prefixes", &[], IPV6),
    peer(
        "aws-load-balancer-type",
        &["nlb", "external"],
        "Steerage creates network load balancers. For pods as targets, set aws-load-balancer-nlb-target-type to ip.",
    ),
];

/// Refuses an annotation that another controller would obey, or whose name nobody knows.
pub(crate) fn check(annotations: &BTreeMap<String, String>) -> Result<(), Error> {
    for (name, value) in annotations {
        let Some(suffix) = name.strip_prefix(PREFIX) else { continue };
        if annotations::ALL.iter().any(|known| known.name == name) {
            continue;
        }
        let is_it = |peer: &&PeerAnnotation| {
            suffix == peer.suffix || (peer.suffix.ends_with('.') && suffix.starts_with(peer.suffix))
        };
        match PEER_ANNOTATIONS.iter().find(is_it) {
            Some(peer) if peer.accepted.contains(&value.trim()) => {}
            Some(peer) => return Err(refused(name, peer)),
            None if name.starts_with(AWS_PREFIX) => return Err(unknown(name)),
            None => {}
        }
    }
    Ok(())
}

fn refused(name: &str, peer: &PeerAnnotation) -> Error {
    let PeerAnnotation { accepted, why, .. } = peer;
    let or =
        if accepted.is_empty() { String::new() } else { format!(", or set it to {}", accepted.join(" or ")) };
    let what = if accepted.is_empty() { "is not supported" } else { "has an unsupported value" };
    let message = format!(
        "Annotation {name} {what}. {why} No load balancer is created or changed. Remove the annotation{or}."
    );
    Error::invalid(reasons::ANNOTATION_NOT_SUPPORTED, message)
}

fn unknown(name: &str) -> Error {
    let known = PEER_ANNOTATIONS.iter().map(|peer| format!("{PREFIX}{}", peer.suffix));
    let known = known.chain(annotations::ALL.iter().map(|known| known.name.to_owned()));
    let nearest = known.min_by_key(|known| strsim::levenshtein(name, known)).unwrap_or_default();
    let message = format!(
        "Annotation {name} is unknown. The nearest known one is {nearest}. No load balancer is created or changed. Correct or \
         remove the annotation."
    );
    Error::invalid(reasons::UNKNOWN_ANNOTATION, message)
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

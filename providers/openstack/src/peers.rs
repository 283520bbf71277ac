// SPDX-License-Identifier: Apache-2.0
//! The annotations of cloud-provider-openstack, and which of them are accepted. Pure. None is ignored: a load balancer that looks
//! configured would be more open than its owner believes.

use std::collections::BTreeMap;

use steerage_provider_api::Error;
use steerage_provider_cloud::{PeerAnnotation, PeerAnnotations};

use crate::annotations;

const fn peer(suffix: &'static str, accepted: &'static [&'static str], why: &'static str) -> PeerAnnotation {
    PeerAnnotation { suffix, accepted, why }
}

/// All names of the vendor start with it.
pub const PREFIX: &str = "loadbalancer.openstack.org/";

const CHECK: &str = "Use the annotations steerage.dev/health-check-….";

/// Every annotation of cloud-provider-openstack for load balancers, except those in [`annotations::ALL`].
pub const PEER_ANNOTATIONS: &[PeerAnnotation] = &[
    peer("class", &[], "Classes of a cloud configuration are not supported: use the other annotations."),
    peer(
        "default-tls-container-ref",
        &[],
        "Load balancers forward TCP and UDP. Let an ingress controller or Gateway terminate TLS: its certificates are Secrets, and need no Barbican.",
    ),
    peer("enable-health-monitor", &["true"], "Every pool has a health monitor."),
    peer("floating-subnet", &[], "Use floating-subnet-id."),
    peer("floating-subnet-tags", &[], "Use floating-subnet-id."),
    peer("health-monitor-delay", &[], CHECK),
    peer("health-monitor-max-retries", &[], CHECK),
    peer("health-monitor-max-retries-down", &[], CHECK),
    peer("health-monitor-timeout", &[], CHECK),
    peer(
        "hostname",
        &[],
        "With PROXY protocol the address is published with ipMode Proxy, which needs no host name.",
    ),
    peer(
        "keep-floatingip",
        &["false"],
        "To keep an address, create a floating IP and request its address by steerage.dev/addresses: Steerage never deletes it.",
    ),
    peer(
        "port-id",
        &[],
        "Octavia creates the VIP's port. To keep an address, request it by steerage.dev/addresses.",
    ),
    peer(
        "x-forwarded-for",
        &["false"],
        "Load balancers forward TCP and UDP, and read no HTTP. Use proxy-protocol, or an ingress controller that adds the header.",
    ),
];

const VENDOR: PeerAnnotations = PeerAnnotations { prefix: PREFIX, own: Some(""), unread: PEER_ANNOTATIONS };

/// Those under Kubernetes' own prefix.
const KUBERNETES: PeerAnnotations =
    PeerAnnotations { prefix: "service.beta.kubernetes.io/", own: Some("openstack-"), unread: &[] };

/// Refuses an annotation that cloud-provider-openstack would obey, or whose name nobody knows.
pub(crate) fn check(of_service: &BTreeMap<String, String>) -> Result<(), Error> {
    let read: Vec<&'static str> = annotations::ALL.iter().map(|known| known.name).collect();
    VENDOR.check(of_service, &read)?;
    KUBERNETES.check(of_service, &read)
}

#[cfg(test)]
mod tests {
    use steerage_provider_conformance::{check_peer_table, check_peers_are_refused};

    use super::*;

    fn checked(name: &str, value: &str) -> Result<(), (&'static str, String)> {
        let annotations = BTreeMap::from([(name.to_owned(), value.to_owned())]);
        check(&annotations).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn table_is_sorted_and_without_supported_annotations() {
        check_peer_table(PREFIX, PEER_ANNOTATIONS, annotations::ALL).unwrap();
    }

    #[test]
    fn nothing_of_the_vendor_is_ignored() {
        check_peers_are_refused(PREFIX, PEER_ANNOTATIONS, check).unwrap();
        for (typo, nearest) in [
            ("loadbalancer.openstack.org/proxy-protocl", annotations::PROXY_PROTOCOL),
            ("service.beta.kubernetes.io/openstack-internal-loadbalancer", annotations::INTERNAL),
        ] {
            let (reason, message) = checked(typo, "true").unwrap_err();
            assert!(
                reason == "UnknownAnnotation" && message.contains(&format!("is {nearest}.")),
                "{message}"
            );
        }
        // Far from every known name: whoever writes one believes that it restricts the load balancer.
        for name in ["allowed-cidrs", "x"] {
            let (reason, message) = checked(&format!("{PREFIX}{name}"), "10.0.0.0/8").unwrap_err();
            assert_eq!(reason, "UnknownAnnotation", "{message}");
        }
        assert_eq!(checked(annotations::SOURCE_RANGES, "10.0.0.0/8"), Ok(()));
        assert_eq!(checked("service.beta.kubernetes.io/external-traffic", "OnlyLocal"), Ok(()));
        assert_eq!(checked(annotations::INTERNAL, "true"), Ok(()));
    }

    #[test]
    fn typing_errors_of_source_ranges_are_refused() {
        for name in ["load-balancer-source-range", "loadbalancer-source-ranges"] {
            let (reason, message) = checked(&format!("service.beta.kubernetes.io/{name}"), "").unwrap_err();
            assert_eq!(reason, "UnknownAnnotation", "{message}");
            assert!(message.contains("io/load-balancer-source-ranges."), "{message}");
        }
        for name in ["aws-load-balancer-scheme", "azure-load-balancer-internal", "external-traffic"] {
            assert_eq!(checked(&format!("service.beta.kubernetes.io/{name}"), ""), Ok(()), "{name}");
        }
    }
}

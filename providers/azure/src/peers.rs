// SPDX-License-Identifier: Apache-2.0
//! The annotations of cloud-provider-azure, and which of them are accepted. Pure. None is ignored: a load balancer that looks configured
//! would be more open than its owner believes.

use std::collections::BTreeMap;

use steerage_provider_api::Error;
use steerage_provider_cloud::{PeerAnnotation, PeerAnnotations};

use crate::annotations;

const fn peer(suffix: &'static str, accepted: &'static [&'static str], why: &'static str) -> PeerAnnotation {
    PeerAnnotation { suffix, accepted, why }
}

/// All names start with it.
pub const PREFIX: &str = "service.beta.kubernetes.io/";

const CHECK: &str =
    "Probes ask the node, not the pod: use steerage.dev/health-check-interval and …-unhealthy-threshold.";
const PRIVATE_LINK: &str = "Private Link services are not supported yet.";

/// Every annotation of cloud-provider-azure for load balancers, except those in [`annotations::ALL`].
pub const PEER_ANNOTATIONS: &[PeerAnnotation] = &[
    peer(
        "azure-additional-public-ips",
        &[],
        "It only adds addresses to rules of the network security group, which the owner of these addresses writes.",
    ),
    peer(
        "azure-deny-all-except-load-balancer-source-ranges",
        &["true"],
        "Steerage always denies all others where a Service has ranges.",
    ),
    peer(
        "azure-disable-load-balancer-floating-ip",
        &["false"],
        "Nodes know the load balancer's address, so packets arrive with it.",
    ),
    peer(
        "azure-disable-load-balancer-nsg-rule",
        &["false"],
        "Steerage writes rules for all Services or for none: see --azure-network-security-group.",
    ),
    peer(
        "azure-load-balancer-configurations",
        &[],
        "There is one load balancer for external and one for internal Services.",
    ),
    peer(
        "azure-load-balancer-enable-high-availability-ports",
        &["false"],
        "Rules are for the Service's ports.",
    ),
    peer("azure-load-balancer-health-probe-interval", &[], CHECK),
    peer("azure-load-balancer-health-probe-num-of-probe", &[], CHECK),
    peer("azure-load-balancer-health-probe-protocol", &[], CHECK),
    peer("azure-load-balancer-health-probe-request-path", &[], CHECK),
    peer("azure-load-balancer-mode", &[], "It concerns Basic load balancers, which Azure has retired."),
    peer("azure-pip-ip-tags", &[], "IP tags of public IPs are not supported yet."),
    peer("azure-pls-auto-approval", &[], PRIVATE_LINK),
    peer("azure-pls-create", &["false"], PRIVATE_LINK),
    peer("azure-pls-fqdns", &[], PRIVATE_LINK),
    peer("azure-pls-ip-configuration-ip-address", &[], PRIVATE_LINK),
    peer("azure-pls-ip-configuration-ip-address-count", &[], PRIVATE_LINK),
    peer("azure-pls-ip-configuration-subnet", &[], PRIVATE_LINK),
    peer("azure-pls-name", &[], PRIVATE_LINK),
    peer("azure-pls-proxy-protocol", &["false"], PRIVATE_LINK),
    peer("azure-pls-resource-group", &[], PRIVATE_LINK),
    peer("azure-pls-visibility", &[], PRIVATE_LINK),
    peer(
        "azure-shared-securityrule",
        &["true"],
        "Rules that are equal for several Services are always shared.",
    ),
];

const VENDOR: PeerAnnotations =
    PeerAnnotations { prefix: PREFIX, own: Some("azure-"), unread: PEER_ANNOTATIONS };

/// `port_80_no_lb_rule` and the like: of a port, as the number says.
const OF_PORTS: &str = "port_";

/// Refuses an annotation that cloud-provider-azure would obey, or whose name nobody knows.
pub(crate) fn check(of_service: &BTreeMap<String, String>) -> Result<(), Error> {
    let of_port = of_service.keys().find(|name| {
        let rest = name.strip_prefix(PREFIX).and_then(|name| name.strip_prefix(OF_PORTS));
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    if let Some(name) = of_port {
        let message = format!(
            "Annotation {name} is not supported. {CHECK} Every port has a rule. No load balancer is created or changed. Remove the \
             annotation."
        );
        return Err(Error::invalid(crate::reasons::ANNOTATION_NOT_SUPPORTED, message));
    }
    let read: Vec<&'static str> = annotations::ALL.iter().map(|known| known.name).collect();
    VENDOR.check(of_service, &read)
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
        for name in ["port_80_no_lb_rule", "port_443_health-probe_request-path"] {
            let name = format!("{PREFIX}{name}");
            assert_eq!(checked(&name, "true").unwrap_err().0, "AnnotationNotSupported");
        }
        let (reason, message) = checked(&format!("{PREFIX}azure-load-balancer-intern"), "true").unwrap_err();
        assert!(reason == "UnknownAnnotation" && message.contains(annotations::INTERNAL), "{message}");
        for others in ["aws-load-balancer-scheme", "external-traffic", "openstack-internal-load-balancer"] {
            assert_eq!(checked(&format!("{PREFIX}{others}"), ""), Ok(()), "{others}");
        }
    }
}

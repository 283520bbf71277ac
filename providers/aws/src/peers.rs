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
    PeerAnnotations { prefix: PREFIX, own: Some("aws-load-balancer-"), unread: PEER_ANNOTATIONS };

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
    use steerage_provider_conformance::{check_peer_table, check_peers_are_refused};

    use super::*;

    fn checked(suffix: &str, value: &str) -> Result<(), (&'static str, String)> {
        let annotations = BTreeMap::from([(format!("{PREFIX}{suffix}"), value.to_owned())]);
        check(&annotations).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn table_is_sorted_and_without_supported_annotations() {
        check_peer_table(PREFIX, PEER_ANNOTATIONS, annotations::ALL).unwrap();
    }

    #[test]
    fn every_peer_annotation_is_refused_by_name_unless_it_requests_what_is_done_anyway() {
        check_peers_are_refused(PREFIX, PEER_ANNOTATIONS, check).unwrap();
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

    /// Without the refusal, the Service would be open to all clients, or public.
    #[test]
    fn typing_errors_before_and_in_the_name_are_refused() {
        for (typo, nearest) in [
            ("load-balancer-source-range", "load-balancer-source-ranges."),
            ("load-balancer-sources-ranges", "load-balancer-source-ranges."),
            ("loadbalancer-source-ranges", "load-balancer-source-ranges."),
            ("load_balancer_source_ranges", "load-balancer-source-ranges."),
            ("loadBalancerSourceRanges", "load-balancer-source-ranges."),
            ("laod-balancer-source-ranges", "load-balancer-source-ranges."),
            ("aws-loadbalancer-internal", "aws-load-balancer-internal."),
            ("aws-loadbalancer-scheme", "aws-load-balancer-scheme."),
            ("aws-loadbalancer-security-group-prefix-list", "aws-load-balancer-security-group-prefix-lists."),
            ("awsload-balancer-sheme", "aws-load-balancer-scheme."),
            ("AWS-load-balancer-scheme", "aws-load-balancer-scheme."),
            ("asw-load-balancer-scheme", "aws-load-balancer-scheme."),
        ] {
            let (reason, message) = checked(typo, "true").unwrap_err();
            assert_eq!(reason, "UnknownAnnotation", "{typo}");
            assert!(
                message.contains(typo) && message.contains(&format!("is {PREFIX}{nearest}")),
                "{message}"
            );
        }
    }

    /// A Service may carry them for several clouds, or for other programs.
    #[test]
    fn annotations_of_other_clouds_and_programs_are_never_refused() {
        let of_kubernetes = [
            "azure-load-balancer-internal",
            "azure-load-balancer-internal-subnet",
            "azure-load-balancer-ipv4",
            "azure-load-balancer-mode",
            "azure-load-balancer-resource-group",
            "azure-load-balancer-tcp-idle-timeout",
            "azure-load-balancer-health-probe-protocol",
            "azure-load-balancer-health-probe-interval",
            "azure-load-balancer-disable-tcp-reset",
            "azure-additional-public-ips",
            "azure-allowed-ip-ranges",
            "azure-allowed-service-tags",
            "azure-deny-all-except-load-balancer-source-ranges",
            "azure-dns-label-name",
            "azure-pip-name",
            "azure-pls-create",
            "azure-shared-securityrule",
            "openstack-internal-load-balancer",
            "ibm-load-balancer-cloud-provider-ip-type",
            "ibm-load-balancer-cloud-provider-enable-features",
            "ibm-load-balancer-cloud-provider-vpc-subnets",
            "oci-load-balancer-internal",
            "oci-load-balancer-shape",
            "oci-load-balancer-subnet1",
            "oci-load-balancer-backend-protocol",
            "oci-load-balancer-connection-idle-timeout",
            "oci-load-balancer-connection-proxy-protocol-version",
            "oci-load-balancer-ssl-ports",
            "oci-load-balancer-tls-secret",
            "oci-network-load-balancer-internal",
            "do-loadbalancer-name",
            "do-loadbalancer-type",
            "do-loadbalancer-protocol",
            "do-loadbalancer-size-unit",
            "do-loadbalancer-enable-proxy-protocol",
            "do-loadbalancer-healthcheck-path",
            "do-loadbalancer-healthcheck-port",
            "do-loadbalancer-healthcheck-protocol",
            "linode-loadbalancer-throttle",
            "linode-loadbalancer-check-path",
            "vultr-loadbalancer-protocol",
            "vultr-loadbalancer-proxy-protocol",
            "vultr-loadbalancer-healthcheck-path",
            "vultr-loadbalancer-ssl",
            "exoscale-loadbalancer-name",
            "exoscale-loadbalancer-service-healthcheck-interval",
            "scw-loadbalancer-type",
            "scw-loadbalancer-zone",
            "scw-loadbalancer-protocol-http",
            "scw-loadbalancer-proxy-protocol-v2",
            "scw-loadbalancer-health-check-type",
            "brightbox-load-balancer-policy",
            "brightbox-load-balancer-healthcheck-interval",
            "alibaba-cloud-loadbalancer-address-type",
            "alicloud-loadbalancer-address-type",
            "external-traffic",
            "healthcheck-nodeport",
        ];
        for suffix in of_kubernetes {
            assert_eq!(checked(suffix, "true"), Ok(()), "{suffix}");
        }
        let of_others = [
            "cloud.google.com/load-balancer-type",
            "cloud.google.com/neg",
            "cloud.google.com/backend-config",
            "networking.gke.io/load-balancer-type",
            "networking.gke.io/internal-load-balancer-allow-global-access",
            "networking.gke.io/load-balancer-ip-addresses",
            "loadbalancer.openstack.org/proxy-protocol",
            "loadbalancer.openstack.org/keep-floatingip",
            "load-balancer.hetzner.cloud/location",
            "load-balancer.hetzner.cloud/use-private-ip",
            "metallb.universe.tf/address-pool",
            "metallb.io/loadBalancerIPs",
            "metallb.io/allow-shared-ip",
            "kube-vip.io/loadbalancerIPs",
            "io.cilium/lb-ipam-ips",
            "lbipam.cilium.io/ips",
            "purelb.io/service-group",
            "external-dns.alpha.kubernetes.io/hostname",
            "external-dns.alpha.kubernetes.io/ttl",
            "external-dns.alpha.kubernetes.io/access",
            "service.kubernetes.io/topology-mode",
            "service.kubernetes.io/local-svc-only-bind-node-with-pod",
            "service.cloud.tencent.com/direct-access",
            "service.alpha.kubernetes.io/tolerate-unready-endpoints",
            "alb.ingress.kubernetes.io/scheme",
            "prometheus.io/scrape",
            "meta.helm.sh/release-name",
            "kubectl.kubernetes.io/last-applied-configuration",
            "argocd.argoproj.io/sync-wave",
        ];
        for name in of_others {
            let annotations = BTreeMap::from([(name.to_owned(), "true".to_owned())]);
            assert!(check(&annotations).is_ok(), "{name}");
        }
    }

    #[test]
    fn annotations_of_others_are_accepted() {
        assert_eq!(checked("aws-load-balancer-scheme", "internal"), Ok(()));
        assert_eq!(checked("azure-load-balancer-internal", "true"), Ok(()));
        assert_eq!(checked("external-traffic", "OnlyLocal"), Ok(()));
    }
}

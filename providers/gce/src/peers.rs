// SPDX-License-Identifier: Apache-2.0
//! The annotations of Google's own controllers (cloud-provider-gcp and ingress-gce), and which of them are accepted. Pure. None that
//! concerns load balancers of Services is ignored: a load balancer that looks configured would be more open than its owner believes.

use std::collections::BTreeMap;

use steerage_provider_api::Error;
use steerage_provider_cloud::{PeerAnnotation, PeerAnnotations};

use crate::annotations;

const fn peer(suffix: &'static str, accepted: &'static [&'static str], why: &'static str) -> PeerAnnotation {
    PeerAnnotation { suffix, accepted, why }
}

/// What follows a prefix of Google's in annotations about load balancers alone.
const OWN: &str = "load-balancer-";

/// An annotation's prefix, and what follows it in those that are not read.
type Peers = (&'static str, &'static [PeerAnnotation]);

/// Every annotation of Google's controllers for load balancers of Services, except those in [`annotations::ALL`], by prefix.
pub const PEER_ANNOTATIONS: [Peers; 3] = [
    (
        "networking.gke.io/",
        &[
            peer("custom-forwarding-rule", &[], "Forwarding rules that others made are not taken over."),
            peer("ip-collection-v6", &[], "IPv6 addresses come from the subnet, or are reserved by name."),
            peer(
                "l4-strong-session-affinity",
                &[],
                "Strong session affinity is not supported: sessionAffinity ClientIP is GCE's CLIENT_IP.",
            ),
            peer(
                "l4lb-config",
                &[],
                "Logging of load balancers is not configured by Steerage; what others set stays.",
            ),
        ],
    ),
    (
        "cloud.google.com/",
        &[peer("l4-rbs", &["enabled"], "All load balancers have a regional backend service.")],
    ),
    (
        "alpha.cloud.google.com/",
        &[peer("load-balancer-backend-share", &[], "Each Service has a backend service of its own.")],
    ),
];

/// Refuses an annotation that Google's controllers would obey, or whose name is almost a known one.
pub(crate) fn check(of_service: &BTreeMap<String, String>) -> Result<(), Error> {
    let read: Vec<&'static str> = annotations::ALL.iter().map(|known| known.name).collect();
    for (prefix, unread) in PEER_ANNOTATIONS {
        PeerAnnotations { prefix, own: Some(OWN), unread }.check(of_service, &read)?;
    }
    // The one under Kubernetes' own prefix.
    let read = [annotations::SOURCE_RANGES];
    PeerAnnotations { prefix: "service.beta.kubernetes.io/", own: None, unread: &[] }.check(of_service, &read)
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
        for (prefix, peers) in PEER_ANNOTATIONS {
            check_peer_table(prefix, peers, annotations::ALL).unwrap();
        }
    }

    #[test]
    fn nothing_about_load_balancers_is_ignored() {
        for (prefix, peers) in PEER_ANNOTATIONS {
            check_peers_are_refused(prefix, peers, check).unwrap();
            for peer in peers {
                let name = format!("{prefix}{}", peer.suffix);
                assert!(steerage_model::names::is_kept(&name), "it is never seen: {name}");
            }
        }
        for (typo, nearest) in [
            ("networking.gke.io/load-balancer-typ", annotations::LOAD_BALANCER_TYPE),
            ("cloud.google.com/network-tiers", annotations::NETWORK_TIER),
            ("networking.gke.io/loadbalancer-ip-addresses", annotations::ADDRESSES),
            ("service.beta.kubernetes.io/load-balancer-source-range", annotations::SOURCE_RANGES),
            ("alpha.cloud.google.com/load-balancer-type", annotations::OLD_LOAD_BALANCER_TYPE),
            ("alpha.cloud.google.com/network-tier", annotations::NETWORK_TIER),
            ("alpha.networking.gke.io/load-balancer-type", annotations::LOAD_BALANCER_TYPE),
            ("beta.networking.gke.io/weighted-load-balancing", annotations::WEIGHTED),
            ("alpha.cloud.google.com/l4-rbs", "cloud.google.com/l4-rbs"),
        ] {
            assert!(steerage_model::names::is_kept(typo), "it is never seen: {typo}");
            let (reason, message) = checked(typo, "x").unwrap_err();
            assert!(
                reason == "UnknownAnnotation" && message.contains(&format!("is {nearest}.")),
                "{message}"
            );
        }
        // Ignored, the Service would be open to all.
        let ranges = Some(annotations::SOURCE_RANGES);
        for (name, nearest) in [
            ("load-balancer-sourceranges", ranges),
            ("load-balancer-whatever", None),
            ("load-balancer-mode", None),
            ("loadbalancer-sources", None),
        ] {
            let name = format!("networking.gke.io/{name}");
            assert!(steerage_model::names::is_kept(&name), "it is never seen: {name}");
            let (reason, message) = checked(&name, "10.0.0.0/8").unwrap_err();
            assert_eq!(reason, "UnknownAnnotation", "{name}");
            let told = nearest.map(|nearest| message.contains(&format!("nearest known one is {nearest}.")));
            assert!(told.unwrap_or(!message.contains("nearest")), "{message}");
        }
        // Of other controllers, about other things.
        for name in [
            "cloud.google.com/neg",
            "cloud.google.com/backend-config",
            "networking.gke.io/max-rate-per-endpoint",
        ] {
            assert_eq!(checked(name, "{}"), Ok(()), "{name}");
        }
    }

    #[test]
    fn what_is_read_reaches_the_provider() {
        for known in annotations::ALL {
            assert!(steerage_model::names::is_kept(known.name), "{}", known.name);
            assert_eq!(checked(known.name, "x"), Ok(()), "another part of the crate reads its value");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The controller's reasons for events and conditions, in one table: name and meaning. Reasons are stable, because alerts use them.
//!
//! `docs/annotations.md` must name each; a test compares the two.

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal;)+) => {
        $($(#[doc = $doc])+ pub(crate) const $name: &str = $text;)+

        /// Every reason with its meaning.
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, &str)] = &[$(($text, concat!($($doc),+))),+];
    };
}

reasons! {
    // Of the condition `steerage.dev/Programmed`.
    /// The load balancer is as requested.
    PROGRAMMED = "Programmed";
    /// The provider has not completed the change yet.
    PROGRESSING = "Progressing";
    /// The annotation `steerage.dev/steering` has an unknown value.
    UNKNOWN_STEERING = "UnknownSteering";
    /// The provider does not support the requested steering.
    STEERING_NOT_SUPPORTED = "SteeringNotSupported";
    /// An annotation of Steerage has an invalid value.
    INVALID_ANNOTATION = "InvalidAnnotation";
    /// `spec.loadBalancerIP` or `steerage.dev/addresses` contains something that is not an IP address.
    INVALID_REQUESTED_ADDRESS = "InvalidRequestedAddress";
    /// The Service has no ports.
    NO_PORTS = "NoPorts";
    /// A port has a protocol that the provider does not support.
    PROTOCOL_NOT_SUPPORTED = "ProtocolNotSupported";
    /// The provider reaches nodes by node port, and a port has none.
    NO_NODE_PORT = "NoNodePort";
    /// The Service requests an IP family that the provider does not support.
    IP_FAMILY_NOT_SUPPORTED = "IPFamilyNotSupported";
    /// The Service has no cluster IP and therefore no IP family.
    NO_IP_FAMILY = "NoIPFamily";
    /// The policy is Local, but `spec.healthCheckNodePort` is not set.
    NO_HEALTH_CHECK_NODE_PORT = "NoHealthCheckNodePort";

    // Of the condition `steerage.dev/Serving`.
    /// At least one target passes its health check.
    SERVING = "TargetsHealthy";
    /// The Service has no endpoint that is ready, or serving while it terminates.
    NO_ENDPOINTS = "NoEndpoints";
    /// No node is eligible as a target.
    NO_TARGETS = "NoTargets";
    /// No target passes its health check.
    TARGETS_UNHEALTHY = "TargetsUnhealthy";
    /// The provider has not reported the health of the targets yet.
    HEALTH_UNKNOWN = "HealthUnknown";

    // Of the condition `steerage.dev/Degraded`.
    /// No problem is known.
    AS_EXPECTED = "AsExpected";
    /// The provider cannot use some targets; it uses the others.
    TARGETS_REFUSED = "TargetsRefused";
    /// The Service is labelled for the agent, and some nodes have no agent.
    NODES_WITHOUT_AGENT = "NodesWithoutAgent";
    /// All nodes with an endpoint are ineligible; they stay targets.
    ONLY_INELIGIBLE_NODES = "OnlyIneligibleNodes";
    /// The provider does not support `sessionAffinity: ClientIP`.
    AFFINITY_NOT_SUPPORTED = "AffinityNotSupported";
    /// A watch is stale; the last targets are kept.
    TARGETS_FROZEN = "TargetsFrozen";
    /// The requested configuration is unsupported; the previous load balancer is kept.
    UNSUPPORTED_CHANGE = "UnsupportedChange";

    // Of events only.
    /// The load balancer is being created.
    ENSURING = "EnsuringLoadBalancer";
    /// The load balancer is programmed.
    ENSURED = "EnsuredLoadBalancer";
    /// The load balancer is being deleted.
    DELETING = "DeletingLoadBalancer";
    /// The load balancer was deleted.
    DELETED = "DeletedLoadBalancer";
    /// Legacy annotations request the policy Local, which the spec does not have.
    LEGACY_ANNOTATIONS = "LegacyAnnotations";
    /// The spec was patched once to what the legacy annotations request.
    LEGACY_MIGRATED = "LegacyAnnotationsMigrated";
    /// A legacy annotation has an invalid value and is ignored.
    INVALID_LEGACY_ANNOTATION = "InvalidLegacyAnnotation";
    /// The API server rejected the patch that the legacy annotations request.
    LEGACY_MIGRATION_FAILED = "LegacyMigrationFailed";
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../docs/annotations.md");

    #[test]
    fn the_page_names_every_reason() {
        let of_edge = steerage_provider_edge::REASONS.iter();
        for (reason, meaning) in ALL.iter().chain(of_edge) {
            assert!(PAGE.contains(&format!("`{reason}`")), "docs/annotations.md lacks `{reason}`: {meaning}");
        }
    }

    #[test]
    fn the_page_names_every_metric_and_annotation() {
        let mut registry = prometheus_client::registry::Registry::with_prefix("steerage_controller");
        let metrics = crate::metrics::Metrics::new(&mut registry);
        metrics.reconciled("done");
        metrics.called("ensure", "ok", std::time::Duration::ZERO);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
        for line in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
            let name = line.split(' ').next().expect("a name");
            assert!(PAGE.contains(&format!("`{name}")), "docs/annotations.md lacks {name}");
        }
        for annotation in steerage_model::annotations::ALL {
            let name = annotation.name;
            assert!(PAGE.contains(&format!("`{name}`")), "docs/annotations.md lacks {name}");
        }
    }
}

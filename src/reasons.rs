// SPDX-License-Identifier: Apache-2.0
//! Every reason that the controller itself gives in events and conditions, with its meaning. The page `docs/annotations.md` must name
//! each one; a test holds it to that. Reasons are stable: people alert on them.

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal;)+) => {
        $($(#[doc = $doc])+ pub(crate) const $name: &str = $text;)+

        /// All of them, each with its meaning.
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, &str)] = &[$(($text, concat!($($doc),+))),+];
    };
}

reasons! {
    // Of `steerage.dev/Programmed`.
    /// The load balancer is as the Service asks.
    PROGRAMMED = "Programmed";
    /// The provider is still at work.
    PROGRESSING = "Progressing";
    /// The annotation `steerage.dev/steering` has a value that is not known.
    UNKNOWN_STEERING = "UnknownSteering";
    /// The provider cannot steer in the way that was asked for.
    STEERING_NOT_SUPPORTED = "SteeringNotSupported";
    /// An annotation of ours has a value that cannot be read.
    INVALID_ANNOTATION = "InvalidAnnotation";
    /// `spec.loadBalancerIP` or `steerage.dev/addresses` is not an address.
    INVALID_REQUESTED_ADDRESS = "InvalidRequestedAddress";
    /// The Service has no ports.
    NO_PORTS = "NoPorts";
    /// A port has a protocol that the provider does not serve.
    PROTOCOL_NOT_SUPPORTED = "ProtocolNotSupported";
    /// The provider reaches nodes by node port, and a port has none.
    NO_NODE_PORT = "NoNodePort";
    /// The Service asks for IPv6, which the provider does not serve.
    IP_FAMILY_NOT_SUPPORTED = "IPFamilyNotSupported";
    /// The Service has neither a cluster IP nor a family.
    NO_IP_FAMILY = "NoIPFamily";
    /// The policy is Local and there is no `spec.healthCheckNodePort`.
    NO_HEALTH_CHECK_NODE_PORT = "NoHealthCheckNodePort";

    // Of `steerage.dev/Serving`.
    /// At least one target answers.
    SERVING = "TargetsHealthy";
    /// The Service has no endpoint that is ready, or that is shutting down and still serving.
    NO_ENDPOINTS = "NoEndpoints";
    /// There is no node that the load balancer may use.
    NO_TARGETS = "NoTargets";
    /// No target answers its health check.
    TARGETS_UNHEALTHY = "TargetsUnhealthy";
    /// The provider has not yet told how the targets are doing.
    HEALTH_UNKNOWN = "HealthUnknown";

    // Of `steerage.dev/Degraded`.
    /// Nothing is amiss.
    AS_EXPECTED = "AsExpected";
    /// Some targets cannot be used; the others are in place.
    TARGETS_REFUSED = "TargetsRefused";
    /// The Service is served by the agent, and some nodes have none.
    NODES_WITHOUT_AGENT = "NodesWithoutAgent";
    /// All nodes with an endpoint are ineligible; they are used all the same, so that the Service goes on.
    ONLY_INELIGIBLE_NODES = "OnlyIneligibleNodes";
    /// The provider does not keep a client on its target, as `sessionAffinity: ClientIP` asks.
    AFFINITY_NOT_SUPPORTED = "AffinityNotSupported";
    /// A watch has been silent for too long: targets stay as they were last known to be good.
    TARGETS_FROZEN = "TargetsFrozen";
    /// The load balancer was left as it was, because what the Service asks for now cannot be had.
    UNSUPPORTED_CHANGE = "UnsupportedChange";

    // Of events only.
    /// The load balancer is being made.
    ENSURING = "EnsuringLoadBalancer";
    /// The load balancer is in place.
    ENSURED = "EnsuredLoadBalancer";
    /// The load balancer is being deleted.
    DELETING = "DeletingLoadBalancer";
    /// The load balancer is gone.
    DELETED = "DeletedLoadBalancer";
    /// The Service carries old annotations that ask for the policy Local, which its spec does not have.
    LEGACY_ANNOTATIONS = "LegacyAnnotations";
    /// The Service was changed once to what its old annotations ask for.
    LEGACY_MIGRATED = "LegacyAnnotationsMigrated";
    /// An old annotation has a value that cannot be read.
    INVALID_LEGACY_ANNOTATION = "InvalidLegacyAnnotation";
    /// The API server refused the change that the old annotations ask for.
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
        for annotation in crate::plan::ANNOTATIONS {
            assert!(PAGE.contains(&format!("`{annotation}`")), "docs/annotations.md lacks {annotation}");
        }
    }
}

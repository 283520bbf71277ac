// SPDX-License-Identifier: Apache-2.0
//! The controller's reasons for events and conditions, in one table: name and meaning. Reasons are stable, because alerts use them.
//!
//! `docs/reference/conditions.md` is generated from it.

macro_rules! reasons {
    ($($group:literal { $($(#[doc = $doc:literal])+ $name:ident = $text:literal;)+ })+) => {
        $($($(#[doc = $doc])+ pub(crate) const $name: &str = $text;)+)+

        /// All reasons by condition or kind of event, each with its meaning.
        pub(crate) const ALL: &[(&str, &[(&str, &str)])] =
            &[$(($group, &[$(($text, concat!($($doc),+))),+])),+];
    };
}

reasons! {
    "steerage.dev/Programmed" {
        /// The load balancer is as requested.
        PROGRAMMED = "Programmed";
        /// The provider has not completed the change yet.
        PROGRESSING = "Progressing";
        /// The annotation `steerage.dev/steering` has an unknown value.
        UNKNOWN_STEERING = "UnknownSteering";
        /// The provider does not support the requested steering.
        STEERING_NOT_SUPPORTED = "SteeringNotSupported";
        /// An annotation has an invalid value.
        INVALID_ANNOTATION = "InvalidAnnotation";
        /// `spec.loadBalancerIP` or `steerage.dev/addresses` contains something that is not an IP address.
        INVALID_REQUESTED_ADDRESS = "InvalidRequestedAddress";
        /// An address that the Service requests, or that the provider gave it, belongs to a node, its pods, an API server or another Service's
        /// cluster IP. It is not published: nodes and pods would send to the Service what is for its owner.
        CLUSTER_ADDRESS = "ClusterAddress";
        /// The Service asks to share a load balancer, which the provider does not support.
        SHARED_LOAD_BALANCERS_NOT_SUPPORTED = "SharedLoadBalancersNotSupported";
        /// The Service has the annotation `steerage.dev/address-sharing-key`, but the provider cannot share an address.
        SHARED_ADDRESSES_NOT_SUPPORTED = "SharedAddressesNotSupported";
        /// The Service has no ports.
        NO_PORTS = "NoPorts";
        /// The Service has no address yet, and more than 10,000 pairs of a port and a source range of `spec.loadBalancerSourceRanges`, which a
        /// service proxy may write on every node. The provider may allow less, and gives the same reason.
        TOO_MANY_SOURCE_RANGES = "TooManySourceRanges";
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
    }

    "steerage.dev/Serving" {
        /// At least one target passes its health check. The message names ports and IP families for which none does.
        SERVING = "TargetsHealthy";
        /// The Service has no endpoint that is ready, or serving while it terminates.
        NO_ENDPOINTS = "NoEndpoints";
        /// No node is eligible as a target, or no endpoint has a port of the Service.
        NO_TARGETS = "NoTargets";
        /// The Service publishes no address, because its load balancer is refused or cannot be completed: `Programmed` says why. No port is served.
        NOT_PROGRAMMED = "NotProgrammed";
        /// No target passes its health check.
        TARGETS_UNHEALTHY = "TargetsUnhealthy";
        /// The provider does not report the health of the targets (Azure never does), or has not yet; or it could not be read for three intervals, 3m at least. In the last case the message says since when. On the edge: no host's `activeShards` has the shard of an address, its report is not written yet, or a shared report is missing.
        HEALTH_UNKNOWN = "HealthUnknown";
    }

    "steerage.dev/Degraded" {
        /// No problem is known.
        AS_EXPECTED = "AsExpected";
        /// A part of the Service is not in place, such as one of its ports, and the rest works; or the provider denies a change, or a quota has no room for it. The message
        /// names the part and what to do.
        PARTLY_PROGRAMMED = "PartlyProgrammed";
        /// The provider cannot use some targets; it uses the others.
        TARGETS_REFUSED = "TargetsRefused";
        /// Some ports, or an IP family, have no healthy target, while others have one. The message names them, and those whose `targetPort` no pod has.
        PARTLY_UNHEALTHY = "PartlyUnhealthy";
        /// The Service is labelled for the agent, and some nodes that are older than 5m have no agent.
        NODES_WITHOUT_AGENT = "NodesWithoutAgent";
        /// No eligible node can serve the Service; ineligible nodes stay targets.
        ONLY_INELIGIBLE_NODES = "OnlyIneligibleNodes";
        /// No node with the labels that the Service asks for can serve it; those that had them, or else other nodes, are targets.
        NO_NODE_WITH_LABELS = "NoNodeWithLabels";
        /// The provider does not support `sessionAffinity: ClientIP`.
        AFFINITY_NOT_SUPPORTED = "AffinityNotSupported";
        /// A watch is stale; the last targets are kept.
        TARGETS_FROZEN = "TargetsFrozen";
        /// The requested configuration is unsupported; the previous load balancer is kept, without source ranges that the Service no longer has as far as narrower ones have room. The message says who may connect. One of another controller is not adopted.
        UNSUPPORTED_CHANGE = "UnsupportedChange";
        /// An annotation `steerage.dev/…`, or of another domain `steerage.…`, is unknown, and ignored.
        ANNOTATION_IGNORED = "AnnotationIgnored";
        /// The annotation `steerage.dev/paused` is `true`.
        PAUSED = "Paused";
    }

    "steerage.dev/load-balancer-ready" {
        /// The pod is healthy in every load balancer that has it as a target.
        TARGET_HEALTHY = "TargetHealthy";
        /// The pod waits until its load balancers have registered it and find it healthy. The first minute is not reported further.
        REGISTERING = "Registering";
        /// The pod is registered with all its load balancers, and one of them does not find it healthy a minute after the wait began.
        TARGET_NOT_HEALTHY = "TargetNotHealthy";
        /// No Service of Steerage has the pod as a target.
        NO_LOAD_BALANCER = "NoLoadBalancer";
        /// The pod was not healthy within 10 minutes, and becomes ready all the same. Also a Warning event of the pod.
        GATE_TIMED_OUT = "TimedOut";
    }

    "Normal" {
        /// The load balancer is being created.
        ENSURING = "EnsuringLoadBalancer";
        /// The load balancer is programmed.
        ENSURED = "EnsuredLoadBalancer";
        /// The published addresses are others than before.
        ADDRESSES_CHANGED = "AddressesChanged";
        /// The load balancer is being deleted.
        DELETING = "DeletingLoadBalancer";
        /// The load balancer was deleted.
        DELETED = "DeletedLoadBalancer";
        /// The spec was patched once to what the legacy annotations request.
        LEGACY_MIGRATED = "LegacyAnnotationsMigrated";
    }

    "Warning" {
        /// Legacy annotations request the policy Local, which the spec does not have.
        LEGACY_ANNOTATIONS = "LegacyAnnotations";
        /// A legacy annotation has an invalid value and is ignored.
        INVALID_LEGACY_ANNOTATION = "InvalidLegacyAnnotation";
        /// The API server rejected the patch that the legacy annotations request.
        LEGACY_MIGRATION_FAILED = "LegacyMigrationFailed";
        /// The API server rejects what Steerage writes to the Service, so that its conditions and addresses may be out of date. Its load balancer is not.
        STATUS_NOT_WRITTEN = "StatusNotWritten";
    }
}

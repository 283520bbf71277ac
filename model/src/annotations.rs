// SPDX-License-Identifier: Apache-2.0
//! The annotations on Services that users and other programs rely on, in one table: name, value and meaning.
//!
//! `docs/reference/annotations.md` is generated from it.

/// One annotation, as documented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// The full name.
    pub name: &'static str,
    /// The values that it takes, in Markdown.
    pub value: &'static str,
    /// The meaning, one or two sentences.
    pub meaning: &'static str,
}

/// Declares a constant for each annotation's name, and `ALL`, the table.
#[macro_export]
macro_rules! annotations {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal, $value:literal;)+) => {
        $($(#[doc = $doc])+ pub const $name: &str = $text;)+

        /// All annotations of this table.
        pub const ALL: &[$crate::annotations::Annotation] = &[$($crate::annotations::Annotation {
            name: $text,
            value: $value,
            meaning: concat!($($doc),+),
        }),+];
    };
}

annotations! {
    /// Steering of the Service; without it the controller's `--default-steering` applies. `fused` is only on the edge.
    STEERING = "steerage.dev/steering", "`api`, `health-check` or `fused`";
    /// Requested addresses of the load balancer; takes precedence over `spec.loadBalancerIP`.
    ADDRESSES = "steerage.dev/addresses", "one address, or one per IP family separated by a comma";
    /// AddressPool to take addresses from. A pool with `autoAssign: false` serves only Services that name the pool or one of its addresses.
    ADDRESS_POOL = "steerage.dev/address-pool", "name of an AddressPool";
    /// Services with the same key share an address, if their ports differ: Services of one namespace, or of all namespaces if the AddressPool has `sharing: Cluster`. Only on the edge.
    ADDRESS_SHARING_KEY = "steerage.dev/address-sharing-key", "at most 63 letters, digits, dots, hyphens and underscores";
    /// Time between two health checks of a target, within the provider's range.
    HEALTH_CHECK_INTERVAL = "steerage.dev/health-check-interval", "duration, such as `500ms` or `10s`";
    /// Time after which a health check fails; at most the interval.
    HEALTH_CHECK_TIMEOUT = "steerage.dev/health-check-timeout", "duration, such as `500ms` or `2s`";
    /// Consecutive successful checks that make a target healthy.
    HEALTH_CHECK_HEALTHY_THRESHOLD = "steerage.dev/health-check-healthy-threshold", "1 to 100";
    /// Consecutive failed checks that make a target unhealthy.
    HEALTH_CHECK_UNHEALTHY_THRESHOLD = "steerage.dev/health-check-unhealthy-threshold", "1 to 100";
    /// If fewer of a Service's targets than this share are healthy, all of them are used; without it only if none is. Targets without an endpoint of the Service do not count. On the edge; clouds ignore it.
    PANIC_THRESHOLD = "steerage.dev/panic-threshold", "percent, 0 to 100";
    /// Time in which a target that becomes healthy beside others gets its whole share of new connections, in seven steps. On the edge; clouds ignore it.
    SLOW_START = "steerage.dev/slow-start", "duration from `1s` to `15m`, such as `30s`";
    /// Nodes with all of these labels are targets; others only while none with them can serve, and `Degraded` says so. At most 10 labels. Refused if pods are targets.
    TARGET_NODE_LABELS = "steerage.dev/target-node-labels", "`key=value`, separated by commas";
    /// Shares one load balancer with the other Services that name it. The operator of Steerage lists the names, and the namespaces that may use each (`--aws-shared-load-balancers`, `--openstack-shared-load-balancers`). Each port is the first Service's that requests it. Decided when the load balancer is created: a later change is refused.
    SHARED_LOAD_BALANCER = "steerage.dev/shared-load-balancer", "name of a shared load balancer";
    /// `true` pauses Steerage for the Service: its load balancer and its own targets are neither created, changed nor deleted.
    PAUSED = "steerage.dev/paused", "`true` or `false`";
    /// Legacy form of `spec.externalTrafficPolicy`; takes precedence over the alpha annotation.
    BETA_EXTERNAL_TRAFFIC = "service.beta.kubernetes.io/external-traffic", "`OnlyLocal` or `Global`";
    /// Legacy form of `spec.externalTrafficPolicy`.
    ALPHA_EXTERNAL_TRAFFIC = "service.alpha.kubernetes.io/external-traffic", "`OnlyLocal` or `Global`";
    /// Legacy form of `spec.healthCheckNodePort`; takes precedence over the alpha annotation.
    BETA_HEALTH_CHECK_NODE_PORT = "service.beta.kubernetes.io/healthcheck-nodeport", "port number";
    /// Legacy form of `spec.healthCheckNodePort`.
    ALPHA_HEALTH_CHECK_NODE_PORT = "service.alpha.kubernetes.io/healthcheck-nodeport", "port number";
    /// Written by the controller: the provider whose load balancer the finalizer protects. Do not edit.
    PROVIDER = "steerage.dev/provider", "name of a provider";
    /// Written by the controller: the class of another controller for which Steerage manages the Service (`--serve-classes`). Without the flag, the load balancer stays as it is. Do not edit.
    SERVED_CLASS = "steerage.dev/served-class", "a `spec.loadBalancerClass`";
    /// Written by the controller: the legacy annotations were applied to the spec once. Do not edit.
    LEGACY_ANNOTATIONS_MIGRATED = "steerage.dev/legacy-annotations-migrated", "`true`";
}

/// Whether the controller itself writes the annotation, so that it requests nothing.
pub fn is_written_by_controller(name: &str) -> bool {
    [PROVIDER, SERVED_CLASS, LEGACY_ANNOTATIONS_MIGRATED].contains(&name)
}

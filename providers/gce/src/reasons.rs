// SPDX-License-Identifier: Apache-2.0
//! The reasons of this provider's errors. Stable, because alerts use them; `docs/reference/conditions.md` lists them.

pub(crate) use steerage_provider_cloud::reasons::{
    ANNOTATION_NOT_SUPPORTED, CONFLICTING_ANNOTATIONS, INVALID_ANNOTATION, OBJECT_NOT_OWNED, QUOTA_EXCEEDED,
    REJECTED_BY_PROVIDER, UNKNOWN_ANNOTATION,
};

/// A requested pool, of which this provider has none.
pub(crate) const ADDRESS_POOL_NOT_SUPPORTED: &str = "AddressPoolNotSupported";
/// A requested address that this provider cannot use.
pub(crate) const ADDRESS_NOT_AVAILABLE: &str = "AddressNotAvailable";
/// Firewall rules of a network that is another project's.
pub(crate) const FIREWALL_NOT_PERMITTED: &str = "FirewallNotPermitted";
/// Weights where health checks do not report numbers of endpoints.
pub(crate) const WEIGHTS_NOT_AVAILABLE: &str = "WeightsNotAvailable";

/// Every reason that this provider's errors carry besides those of all providers: name, meaning, what to do.
pub const REASONS: &[(&str, &str, &str)] = &[
    (ADDRESS_POOL_NOT_SUPPORTED, "The Service names an AddressPool.", "Remove `steerage.dev/address-pool`."),
    (
        ADDRESS_NOT_AVAILABLE,
        "A requested address is not reserved in the region, is of another type, tier or IP family, or something else uses it.",
        "Reserve the address as the message says, or request another one.",
    ),
    (
        FIREWALL_NOT_PERMITTED,
        "The credentials may not change firewall rules of the network, which may be a Shared VPC's. All else is in place. The message says whether packets may not arrive, or clients outside the source ranges may still connect.",
        "Run the command in the message, or grant the permission.",
    ),
    (
        WEIGHTS_NOT_AVAILABLE,
        "The Service asks for weights by `networking.gke.io/weighted-load-balancing`, but its health checks do not report numbers of endpoints. The load balancer works without weights.",
        "Set `externalTrafficPolicy: Local` and `steerage.dev/steering: health-check`, or remove the annotation.",
    ),
    (
        CONFLICTING_ANNOTATIONS,
        "Two annotations contradict each other, or one contradicts the rest of the Service; or two addresses of a family are requested, or one of a family that the Service lacks.",
        "As the message says.",
    ),
    (
        INVALID_ANNOTATION,
        "An annotation has a value that GCE or Steerage does not accept. The controller gives the same reason for its own annotations.",
        "Use a value that the message names.",
    ),
    (
        ANNOTATION_NOT_SUPPORTED,
        "An annotation of Google's controllers requests what Steerage does not do.",
        "Remove the annotation, or set a value that the message names.",
    ),
    (
        UNKNOWN_ANNOTATION,
        "The Service has an annotation that Steerage does not know, and whose author may believe that it has an effect: one \
         `networking.gke.io/load-balancer-…` or `cloud.google.com/load-balancer-…`, or one whose name is almost a known one, with \
         another domain (`alpha.networking.gke.io/…`) or some wrong letters.",
        "Correct or remove the annotation. The message has the nearest known name, if one is close.",
    ),
    (
        OBJECT_NOT_OWNED,
        "A resource with a name that the Service needs exists, but its description is not that of the Service. The usual cause is a cluster that was set up again: its UID is another one.",
        "As the message says: set another `--gce-cluster-name`; or correct the description if this cluster replaces the old one, and GCE can change it (not that of forwarding rules and addresses). Delete the resource only if nothing uses it.",
    ),
    (
        QUOTA_EXCEEDED,
        "A quota of the project is used up, or a subnet has no free address. Or the Service waits with a new forwarding rule until Steerage has replaced a rule of another Service, because the quota may be full.",
        "Raise the quota that the message names, or expand the subnet; or delete what is no longer needed. While the Service only waits: nothing.",
    ),
    (
        REJECTED_BY_PROVIDER,
        "GCE rejects a request. What it accepted before stays as it is.",
        "Correct the annotation or the `--gce-…` flag that names the rejected value.",
    ),
];

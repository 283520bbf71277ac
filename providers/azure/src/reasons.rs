// SPDX-License-Identifier: Apache-2.0
//! The reasons of this provider's errors. Stable, because alerts use them; `docs/reference/conditions.md` lists them.

pub(crate) use steerage_provider_cloud::reasons::{
    ANNOTATION_NOT_SUPPORTED, CONFLICTING_ANNOTATIONS, INVALID_ANNOTATION, NO_SECURITY_GROUP,
    OBJECT_NOT_OWNED, OPERATION_NOT_PERMITTED, QUOTA_EXCEEDED, REJECTED_BY_PROVIDER, TOO_MANY_PORTS,
    TOO_MANY_SOURCE_RANGES, UNKNOWN_ANNOTATION,
};

/// A requested pool, of which this provider has none.
pub(crate) const ADDRESS_POOL_NOT_SUPPORTED: &str = "AddressPoolNotSupported";
/// A requested address that this provider cannot give.
pub(crate) const ADDRESS_NOT_AVAILABLE: &str = "AddressNotAvailable";
/// An internal load balancer with IPv6, for which Azure has no floating IP.
pub(crate) const INTERNAL_IPV6_NOT_SUPPORTED: &str = "InternalIPv6NotSupported";
/// A namespace that has its part of a load balancer.
pub(crate) const NAMESPACE_LIMIT_EXCEEDED: &str = "NamespaceLimitExceeded";

/// A load balancer or network security group in the state `Failed` that Azure refuses as it is.
pub(crate) const LOAD_BALANCER_FAILED: &str = "LoadBalancerFailed";
/// A public IP that is in use, and whose last change failed or runs: Azure takes no change of the load balancer.
pub(crate) const PUBLIC_IP_NOT_READY: &str = "PublicIPNotReady";

/// Every reason that this provider's errors carry besides those of all providers: name, meaning, what to do.
pub const REASONS: &[(&str, &str, &str)] = &[
    (ADDRESS_POOL_NOT_SUPPORTED, "The Service names an AddressPool.", "Remove `steerage.dev/address-pool`."),
    (
        ADDRESS_NOT_AVAILABLE,
        "The requested address or public IP does not exist, is in use, or is of another kind, IP family or prefix than the Service needs; or the Service is internal, and no subnet is known.",
        "As the message says.",
    ),
    (
        LOAD_BALANCER_FAILED,
        "The load balancer, or the network security group that the message names, is in the state `Failed`, and Azure refuses it as it is. \
         The changes of each Service are tried alone, and probably refused.",
        "Correct in Azure what the message names. Then write the resource again, or wait: Steerage writes it every five minutes.",
    ),
    (
        PUBLIC_IP_NOT_READY,
        "Azure's last change of the public IP that the message names failed, or has not ended, while the load balancer uses the public IP. Until \
         that is corrected, Azure refuses every change of the load balancer, for all Services.",
        "If you created the public IP, write it again by the command in the message: `az network public-ip update --ids ID`. If Steerage \
         created it, Steerage writes it again. Where the message names a DNS label or tags, correct the Service's annotations \
         `azure-dns-label-name` or `azure-pip-tags`.",
    ),
    (
        INTERNAL_IPV6_NOT_SUPPORTED,
        "The Service is internal and has IPv6. Azure has no floating IP there, so packets would not arrive with the address of the load balancer.",
        "Set `spec.ipFamilies: [IPv4]`.",
    ),
    (
        NO_SECURITY_GROUP,
        "The Service limits its clients, and Steerage does not know the network security group of the nodes; or the group of the flag does not exist.",
        "Set or correct `--azure-network-security-group`, or remove the ranges.",
    ),
    (
        TOO_MANY_PORTS,
        "The Service has more ports, counted for each IP family, than Steerage allows one: all Services share what Azure allows.",
        "Split the Service.",
    ),
    (
        TOO_MANY_SOURCE_RANGES,
        "The Service has more source ranges or service tags than Steerage allows one: all Services share what Azure allows.",
        "Merge source ranges, or split the Service.",
    ),
    (
        NAMESPACE_LIMIT_EXCEEDED,
        "The Services of the namespace have as much of the load balancer or of the network security group as Steerage allows a namespace: all Services share what Azure allows.",
        "Delete Services or ports of the namespace, or use another namespace.",
    ),
    (
        CONFLICTING_ANNOTATIONS,
        "Two annotations contradict each other, or one contradicts the rest of the Service; or two addresses of a family are requested, or one of a family that the Service lacks.",
        "As the message says.",
    ),
    (
        INVALID_ANNOTATION,
        "An annotation has a value that Azure or Steerage does not accept. The controller gives the same reason for its own annotations.",
        "Use a value that the message names.",
    ),
    (
        ANNOTATION_NOT_SUPPORTED,
        "An annotation of cloud-provider-azure requests what Steerage does not do.",
        "Remove the annotation, or set a value that the message names.",
    ),
    (
        UNKNOWN_ANNOTATION,
        "An annotation `service.beta.kubernetes.io/azure-…` has a name that no controller knows, or the name of one under \
         `service.beta.kubernetes.io/` is almost one that Steerage knows.",
        "Correct the name; the message has the nearest known one, if one is close.",
    ),
    (
        OBJECT_NOT_OWNED,
        "A load balancer or public IP with the name that Steerage needs exists, but does not have its tags. The usual cause is a cluster that was set up again: its UID is another one.",
        "As the message says: set another `--azure-cluster-name`, or correct the tags if this cluster replaces the old one. Delete it only if nothing uses it.",
    ),
    (
        OPERATION_NOT_PERMITTED,
        "A lock or a policy of Azure forbids the change.",
        "Remove the lock, or exempt the resource group from the policy.",
    ),
    (
        QUOTA_EXCEEDED,
        "A quota of the subscription is used up, or the load balancer or the network security group has no room for the Service.",
        "Raise the quota, or delete what is no longer needed.",
    ),
    (
        REJECTED_BY_PROVIDER,
        "Azure rejects a change because of this Service. What it accepted before stays as it is. Other Services are not concerned.",
        "Correct the annotation or the `--azure-…` flag that names the rejected value.",
    ),
];

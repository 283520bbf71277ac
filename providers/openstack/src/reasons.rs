// SPDX-License-Identifier: Apache-2.0
//! The reasons of this provider's errors. Stable, because alerts use them; `docs/reference/conditions.md` lists them.

pub(crate) use steerage_provider_api::ADOPTION_REFUSED;
pub(crate) use steerage_provider_cloud::reasons::{
    ANNOTATION_NOT_SUPPORTED, CONFLICTING_ANNOTATIONS, INVALID_ANNOTATION, NO_SECURITY_GROUP,
    OBJECT_NOT_OWNED, PORT_IN_USE, QUOTA_EXCEEDED, REJECTED_BY_PROVIDER, SHARED_LOAD_BALANCER_IMMUTABLE,
    SHARED_LOAD_BALANCER_NOT_PERMITTED, UNKNOWN_ANNOTATION,
};

/// A requested pool, of which this provider has none.
pub(crate) const ADDRESS_POOL_NOT_SUPPORTED: &str = "AddressPoolNotSupported";
/// A requested address that this provider cannot give.
pub(crate) const ADDRESS_NOT_AVAILABLE: &str = "AddressNotAvailable";
/// A change of the VIP or its subnet, which Octavia does not make.
pub(crate) const ADDRESS_IMMUTABLE: &str = "AddressImmutable";
/// A Service with two IP families, and a load balancer that has one.
pub(crate) const DUAL_STACK_NOT_SUPPORTED: &str = "DualStackNotSupported";
/// An option that the provider driver lacks.
pub(crate) const DRIVER_LACKS_OPTION: &str = "DriverLacksOption";
/// More rules of the nodes' security group than one Service may have.
pub(crate) const TOO_MANY_SECURITY_GROUP_RULES: &str = "TooManySecurityGroupRules";
/// No external network for a floating IP.
pub(crate) const NO_FLOATING_NETWORK: &str = "NoFloatingNetwork";
/// A subnet of another IP family.
pub(crate) const SUBNET_FAMILY_DIFFERS: &str = "SubnetFamilyDiffers";

/// Every reason that this provider's errors carry besides those of all providers: name, meaning, what to do.
pub const REASONS: &[(&str, &str, &str)] = &[
    (ADDRESS_POOL_NOT_SUPPORTED, "The Service names an AddressPool.", "Remove `steerage.dev/address-pool`."),
    (
        ADDRESS_NOT_AVAILABLE,
        "The requested address is no floating IP of the project, is reserved for another namespace, or something else uses it; or the subnet of VIPs does not give it; or a floating IP that is not Steerage's is on the load balancer; or the Service requests a floating IP and has no IPv4.",
        "As the message says: create the floating IP in the cluster's project, request another address, or detach the floating IP that the message names.",
    ),
    (
        ADDRESS_IMMUTABLE,
        "The Service requests another VIP, subnet, flavor or availability zone than its load balancer has, or the flag another Octavia provider, which Octavia cannot change.",
        "Restore the request, or create the Service again.",
    ),
    (
        DUAL_STACK_NOT_SUPPORTED,
        "The Service has two IP families, and its load balancer has an address of one only: no subnet of the missing family is known or in the network that the Service names, Octavia's API is older than version 2.26, or the load balancer is older than the second family. Clients of the family that it has are served.",
        "As the message says, or set `spec.ipFamilyPolicy: SingleStack`.",
    ),
    (
        DRIVER_LACKS_OPTION,
        "The Service requests what the Octavia provider `ovn` does not have: PROXY protocol, limits, another algorithm, a flavor, or an availability zone.",
        "Remove the request, or use the Octavia provider `amphora`.",
    ),
    (
        NO_SECURITY_GROUP,
        "The Service limits its clients. The Octavia provider `ovn` needs rules of the nodes' security group for that, and the group is not known.",
        "Set `--openstack-node-security-group-id`, remove the ranges, or use the Octavia provider `amphora`.",
    ),
    (
        TOO_MANY_SECURITY_GROUP_RULES,
        "The Service needs more than 100 rules of the nodes' security group.",
        "Use fewer ports or source ranges, or split the Service.",
    ),
    (
        ADOPTION_REFUSED,
        "The Service has a load balancer that Steerage did not create for it: the address in its status says so, or its annotation \
         `loadbalancer.openstack.org/load-balancer-id`. Steerage does not take that over, nor changes it, and creates no second one. Or no \
         load balancer has the ID of the annotation. A Service that Steerage serves already keeps its load balancer, and the annotation has \
         no effect.",
        "The message says why. To keep the address, correct what the message names, such as `--openstack-adopt` or the annotation. For a new \
         load balancer with another address, remove the annotation and clear the Service's status: `kubectl patch service -n NAMESPACE \
         NAME --subresource=status --type=merge -p '{\"status\":{\"loadBalancer\":null}}'`. If Steerage serves the Service already, \
         remove the annotation.",
    ),
    (
        SHARED_LOAD_BALANCER_NOT_PERMITTED,
        "The Service names a shared load balancer that does not exist, or that its namespace may not use.",
        "Ask the operator of Steerage to permit it (`--openstack-shared-load-balancers`), or remove `steerage.dev/shared-load-balancer`.",
    ),
    (
        SHARED_LOAD_BALANCER_IMMUTABLE,
        "The annotation `steerage.dev/shared-load-balancer` was set, changed or removed. The Service keeps the load balancer and the address that it has.",
        "Set the annotation as it was, or create the Service again.",
    ),
    (
        PORT_IN_USE,
        "Another Service of the shared load balancer has the port. The Service is tried again when this controller has seen a port of the load balancer become free.",
        "Use another port, or another load balancer.",
    ),
    (
        NO_FLOATING_NETWORK,
        "The Service needs a floating IP, or keeps the one that it has, and neither the flag nor an annotation names the external network.",
        "Set `--openstack-floating-network-id`, or the annotation that the message names.",
    ),
    (
        SUBNET_FAMILY_DIFFERS,
        "The VIP's subnet is of another IP family than the Service.",
        "Name a subnet of the family by `loadbalancer.openstack.org/subnet-id`, or change `spec.ipFamilies`.",
    ),
    (
        CONFLICTING_ANNOTATIONS,
        "Two annotations contradict each other, or one contradicts the rest of the Service; or two addresses of a family are requested, or one of a family that the Service lacks.",
        "As the message says.",
    ),
    (
        INVALID_ANNOTATION,
        "An annotation has a value that OpenStack or Steerage does not accept. The controller gives the same reason for its own annotations.",
        "Use a value that the message names.",
    ),
    (
        ANNOTATION_NOT_SUPPORTED,
        "An annotation of cloud-provider-openstack requests what Steerage does not do.",
        "Remove the annotation, or set a value that the message names.",
    ),
    (
        UNKNOWN_ANNOTATION,
        "An annotation `loadbalancer.openstack.org/…` or `service.beta.kubernetes.io/openstack-…` has a name that no controller knows, or \
         the name of one under `service.beta.kubernetes.io/` is almost one that Steerage knows.",
        "Correct the name; the message has the nearest known one, if one is close.",
    ),
    (
        OBJECT_NOT_OWNED,
        "A listener on a port that the Service needs exists in its load balancer, but is not Steerage's; or the load balancer whose address the \
         Service publishes has Steerage's name for it, and lacks a tag that says whose it is. Nothing is changed, and no second load balancer is created.",
        "As the message says: delete the listener, or use another port; or restore the tags if the load balancer is the Service's.",
    ),
    (
        QUOTA_EXCEEDED,
        "A quota of the project is used up, also that of security group rules, or a network has no free address.",
        "Raise the quota that the message names, or add a subnet or addresses to the network; or delete what is no longer needed.",
    ),
    (
        REJECTED_BY_PROVIDER,
        "OpenStack rejects a request. What it accepted before stays as it is.",
        "Correct the annotation or the `--openstack-…` flag that names the rejected value.",
    ),
];

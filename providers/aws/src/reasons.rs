// SPDX-License-Identifier: Apache-2.0
//! The reasons of this provider's errors. Stable, because alerts use them; `docs/reference/conditions.md` lists them.

pub(crate) use steerage_provider_api::ADOPTION_REFUSED;
pub(crate) use steerage_provider_cloud::reasons::{
    ALL_TARGETS_REFUSED, ANNOTATION_NOT_SUPPORTED, CONFLICTING_ANNOTATIONS, INVALID_ANNOTATION,
    OBJECT_NOT_OWNED, OPERATION_NOT_PERMITTED, PORT_IN_USE, QUOTA_EXCEEDED, REJECTED_BY_PROVIDER,
    SHARED_LOAD_BALANCER_IMMUTABLE, SHARED_LOAD_BALANCER_NOT_PERMITTED, TOO_MANY_PORTS,
    TOO_MANY_SOURCE_RANGES, UNKNOWN_ANNOTATION,
};

/// A requested address, which this provider cannot give.
pub(crate) const ADDRESS_NOT_SUPPORTED: &str = "AddressNotSupported";
/// A requested pool, of which this provider has none.
pub(crate) const ADDRESS_POOL_NOT_SUPPORTED: &str = "AddressPoolNotSupported";
/// A scheme that AWS does not have.
pub(crate) const UNKNOWN_SCHEME: &str = "UnknownScheme";
/// A change of the scheme, which AWS refuses.
pub(crate) const SCHEME_IMMUTABLE: &str = "SchemeImmutable";
/// Another subnet in a zone that the load balancer has.
pub(crate) const SUBNETS_IMMUTABLE: &str = "SubnetsImmutable";
/// No subnets of a name, or none that tags offer.
pub(crate) const SUBNETS_NOT_FOUND: &str = "SubnetsNotFound";
/// No security groups of a name.
pub(crate) const SECURITY_GROUPS_NOT_FOUND: &str = "SecurityGroupsNotFound";
/// A change of the addresses, which AWS refuses.
pub(crate) const ADDRESSES_IMMUTABLE: &str = "AddressesImmutable";
/// AWS neither adds the first security group of a load balancer nor removes the last.
pub(crate) const SECURITY_GROUP_IMMUTABLE: &str = "SecurityGroupImmutable";
/// A security group that AWS does not delete, because something uses it.
pub(crate) const SECURITY_GROUP_IN_USE: &str = "SecurityGroupInUse";
/// A target group that AWS does not delete, because something else uses it.
pub(crate) const TARGET_GROUP_IN_USE: &str = "TargetGroupInUse";
/// No target yet for a group to which a listener is to switch.
pub(crate) const NO_TARGETS_YET: &str = "NoTargetsYet";
/// Two node ports for one listener.
pub(crate) const NODE_PORTS_DIFFER: &str = "NodePortsDiffer";
/// Two groups of pods for one listener.
pub(crate) const TARGET_PORTS_DIFFER: &str = "TargetPortsDiffer";
/// AWS gave up creating the load balancer.
pub(crate) const LOAD_BALANCER_FAILED: &str = "LoadBalancerFailed";

// The controller's plan has it too, and checks it first: it reaches no user through this provider.
pub(crate) const PROTOCOL_NOT_SUPPORTED: &str = "ProtocolNotSupported";

/// Every reason that this provider's errors carry besides those of all providers: name, meaning, what to do.
pub const REASONS: &[(&str, &str, &str)] = &[
    (
        SHARED_LOAD_BALANCER_NOT_PERMITTED,
        "The Service names a shared load balancer that does not exist, or that its namespace may not use.",
        "Ask the operator of Steerage to permit it (`--aws-shared-load-balancers`), or remove `steerage.dev/shared-load-balancer`.",
    ),
    (
        SHARED_LOAD_BALANCER_IMMUTABLE,
        "The annotation `steerage.dev/shared-load-balancer` was set, changed or removed. The Service keeps the load balancer and the hostname that it has.",
        "Set the annotation as it was, or create the Service again.",
    ),
    (
        PORT_IN_USE,
        "Another Service of the shared load balancer has a port that this one requests. No port of this one is created or changed. It is tried again when the port becomes free.",
        "Use another port, or another load balancer.",
    ),
    (
        ADDRESS_NOT_SUPPORTED,
        "The Service requests an address.",
        "Remove `spec.loadBalancerIP` and `steerage.dev/addresses`.",
    ),
    (ADDRESS_POOL_NOT_SUPPORTED, "The Service names an AddressPool.", "Remove `steerage.dev/address-pool`."),
    (
        UNKNOWN_SCHEME,
        "An annotation for the scheme has an unknown value.",
        "Use a value that the message names.",
    ),
    (
        CONFLICTING_ANNOTATIONS,
        "Two annotations contradict each other, or one contradicts the rest of the Service.",
        "As the message says.",
    ),
    (
        INVALID_ANNOTATION,
        "An annotation has a value that AWS or Steerage does not accept. The controller gives the same reason for its own annotations.",
        "Use a value that the message names.",
    ),
    (
        ANNOTATION_NOT_SUPPORTED,
        "An annotation of AWS's own controllers requests what Steerage does not do.",
        "Remove the annotation, or set a value that the message names.",
    ),
    (
        UNKNOWN_ANNOTATION,
        "An annotation `service.beta.kubernetes.io/aws-load-balancer-…` has a name that no controller knows, or the name of one under \
         `service.beta.kubernetes.io/` is almost one that Steerage knows.",
        "Correct the name; the message has the nearest known one, if one is close.",
    ),
    (
        SCHEME_IMMUTABLE,
        "AWS cannot change the scheme of an existing load balancer.",
        "Create the Service again, or restore the annotation.",
    ),
    (
        SUBNETS_IMMUTABLE,
        "An annotation names another subnet in a zone that the load balancer has. AWS takes it only after the present one is removed.",
        "As the message says: name the present subnet again, or remove the zone first and then add it.",
    ),
    (
        SUBNETS_NOT_FOUND,
        "No subnet has the name in the annotation, or several have it; or no subnet has the tags for load balancers of the scheme.",
        "As the message says: correct the name, or tag subnets.",
    ),
    (
        SECURITY_GROUPS_NOT_FOUND,
        "No security group has the name in the annotation, or several have it.",
        "Correct the name, or use the ID.",
    ),
    (
        ADDRESSES_IMMUTABLE,
        "An annotation requests another address in a subnet that the load balancer has, which AWS cannot change.",
        "Restore or remove the annotation, or create the Service again, which changes its hostname.",
    ),
    (
        SECURITY_GROUP_IMMUTABLE,
        "The Service restricts its sources, or names security groups, but its load balancer has none; or `…-disable-nlb-sg` is `true`, \
         but the load balancer has one. AWS changes neither.",
        "Remove the source ranges or the annotation, or create the Service again, which changes its hostname.",
    ),
    (
        SECURITY_GROUP_IN_USE,
        "AWS does not delete the load balancer's security group, because a rule of another group or a network interface uses it.",
        "Remove that use; the message has commands that find it.",
    ),
    (
        TARGET_GROUP_IN_USE,
        "AWS does not delete a target group of a deleted Service, because a load balancer of somebody else uses it.",
        "Remove the listeners and rules that forward to it; the message has a command that finds their load balancer.",
    ),
    (
        TOO_MANY_SOURCE_RANGES,
        "A security group would need more rules than AWS allows: one for each port, protocol and source range.",
        "Merge source ranges, or split the Service.",
    ),
    (
        NODE_PORTS_DIFFER,
        "A port with TCP and UDP has two node ports, and its listener can have one.",
        "Set the same `nodePort` for both.",
    ),
    (
        ALL_TARGETS_REFUSED,
        "AWS refuses all targets of a changed port, or all pods after a change to pods as targets. The present targets stay.",
        "As the message says: pods need addresses of the VPC.",
    ),
    (
        NO_TARGETS_YET,
        "No endpoint has the new target port of a port, which keeps its present targets. The other ports change.",
        "Check `targetPort`, and the ports of the pods.",
    ),
    (
        TARGET_PORTS_DIFFER,
        "Pods are targets, and a port has TCP and UDP with different target ports.",
        "Set the same number as `targetPort` of both.",
    ),
    (TOO_MANY_PORTS, "The Service has more ports than a load balancer has listeners.", "Split the Service."),
    (
        OBJECT_NOT_OWNED,
        "A resource or listener that Steerage needs exists, but is not of this Service.",
        "As the message says: put back the tags that it names, set another `--aws-cluster-name` if this cluster is a copy, or hand the resource over to this cluster. Do not delete what Steerage made.",
    ),
    (
        ADOPTION_REFUSED,
        "The load balancer that the Service has in its status is another controller's. It cannot be adopted without a loss, or `--aws-adopt` \
         does not name that controller. Nothing is changed in AWS, and its targets do not follow the endpoints.",
        "As the message says. If a new load balancer with another host name is wanted, clear the status: `kubectl patch service -n NAMESPACE \
         NAME --subresource=status --type=merge -p '{\"status\":{\"loadBalancer\":null}}'`.",
    ),
    (
        LOAD_BALANCER_FAILED,
        "AWS could not create the load balancer.",
        "Read AWS's reason in the message; create the Service again.",
    ),
    (
        OPERATION_NOT_PERMITTED,
        "AWS forbids the call, for example because of deletion protection.",
        "As the message says.",
    ),
    (
        QUOTA_EXCEEDED,
        "A quota of the account is used up.",
        "Raise the quota, delete resources, or merge source ranges.",
    ),
    (
        REJECTED_BY_PROVIDER,
        "AWS rejects a request. What it accepted before stays as it is.",
        "Correct the annotation or the `--aws-…` flag that names the rejected value.",
    ),
];

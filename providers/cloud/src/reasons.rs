// SPDX-License-Identifier: Apache-2.0
//! Reasons of errors that several clouds have, or whose name must be the same where another one gets them. Stable, because alerts use them;
//! each provider says in its table what they mean there.

/// An annotation with a value that cannot be right.
pub const INVALID_ANNOTATION: &str = "InvalidAnnotation";
/// Two annotations that exclude each other.
pub const CONFLICTING_ANNOTATIONS: &str = "ConflictingAnnotations";
/// An annotation of another controller, which the provider would not obey.
pub const ANNOTATION_NOT_SUPPORTED: &str = "AnnotationNotSupported";
/// An annotation about the cloud's load balancers that no controller knows.
pub const UNKNOWN_ANNOTATION: &str = "UnknownAnnotation";
/// The cloud forbids the call for this resource.
pub const OPERATION_NOT_PERMITTED: &str = "OperationNotPermitted";
/// The cloud refuses all targets of a changed port, or of a changed kind.
pub const ALL_TARGETS_REFUSED: &str = "AllTargetsRefused";
/// A quota is used up.
pub const QUOTA_EXCEEDED: &str = "QuotaExceeded";
/// The cloud finds the request invalid.
pub const REJECTED_BY_PROVIDER: &str = "RejectedByProvider";
/// A shared load balancer that is unknown, or that the Service's namespace may not use.
pub const SHARED_LOAD_BALANCER_NOT_PERMITTED: &str = "SharedLoadBalancerNotPermitted";
/// A Service cannot move between load balancers.
pub const SHARED_LOAD_BALANCER_IMMUTABLE: &str = "SharedLoadBalancerImmutable";
/// A port of a shared load balancer that another Service has.
pub const PORT_IN_USE: &str = "PortInUse";
/// A resource of a name or port that Steerage needs is not Steerage's.
pub const OBJECT_NOT_OWNED: &str = "ObjectNotOwned";
/// More ports than one load balancer may have.
pub const TOO_MANY_PORTS: &str = "TooManyPorts";
/// More source ranges than one load balancer may have.
pub const TOO_MANY_SOURCE_RANGES: &str = "TooManySourceRanges";
/// Source ranges without a known security group to write them to.
pub const NO_SECURITY_GROUP: &str = "NoSecurityGroup";

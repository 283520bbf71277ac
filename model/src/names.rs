// SPDX-License-Identifier: Apache-2.0
//! The names that users and other programs rely on: annotations, labels, finalizers, classes, conditions.

/// Prefix of every annotation, class and condition that is ours.
pub const PREFIX: &str = "steerage.dev/";
pub use crate::annotations::{ADDRESS_POOL, ADDRESSES, STEERING};

/// Node annotation with which the agent says that it serves the node: a name of [`crate::AgentMode`].
pub const AGENT_MODE: &str = "steerage.dev/agent-mode";
/// Node annotation with the version of that agent.
pub const AGENT_VERSION: &str = "steerage.dev/agent-version";

/// Finalizer that we set on Services of our class.
pub const FINALIZER: &str = "steerage.dev/load-balancer";
/// Upstream's finalizer, which we set on Services without a class (a cloud-controller-manager would strip it from the others).
pub const UPSTREAM_FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Service label that takes a Service away from kube-proxy and gives it to another service proxy.
pub const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// The value of [`PROXY_NAME_LABEL`] that gives a Service to our agent.
pub const PROXY_NAME: &str = "steerage";
/// `EndpointSlice` label that names its Service.
pub const SLICE_SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// `EndpointSlice` annotation by which its controller says when that began which the last change reflects.
pub const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Label of headless Services and of their slices, which no service proxy serves.
pub const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Node label that keeps a node out of every load balancer, unless its value parses as false.
pub const EXCLUDE_LABEL: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// Taint by which the cluster autoscaler says that it is about to delete the node.
pub const AUTOSCALER_TAINT: &str = "ToBeDeletedByClusterAutoscaler";
/// Node label that names the node's zone.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Old-style annotations for the external traffic policy (`OnlyLocal` or `Global`), newest first.
pub const LEGACY_EXTERNAL_TRAFFIC: [&str; 2] =
    [crate::annotations::BETA_EXTERNAL_TRAFFIC, crate::annotations::ALPHA_EXTERNAL_TRAFFIC];
/// Old-style annotations for the health-check node port, newest first.
pub const LEGACY_HEALTH_CHECK_NODE_PORT: [&str; 2] =
    [crate::annotations::BETA_HEALTH_CHECK_NODE_PORT, crate::annotations::ALPHA_HEALTH_CHECK_NODE_PORT];

/// Condition: the load balancer's structure and targets are as planned.
pub const PROGRAMMED: &str = "steerage.dev/Programmed";
/// Condition: at least one target answers.
pub const SERVING: &str = "steerage.dev/Serving";
/// Condition: something that the user asked for is not met, while the rest works.
pub const DEGRADED: &str = "steerage.dev/Degraded";

/// Prefixes of the annotations that projections use.
pub const KEPT_ANNOTATIONS: [&str; 4] =
    [PREFIX, "service.alpha.kubernetes.io/", "service.beta.kubernetes.io/", TRIGGER_TIME];

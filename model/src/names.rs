// SPDX-License-Identifier: Apache-2.0
//! Public names: annotations, labels, finalizers, classes, conditions.

/// Prefix of Steerage's annotations, classes and conditions.
pub const PREFIX: &str = "steerage.dev/";
pub use crate::annotations::{ADDRESS_POOL, ADDRESSES, STEERING};

/// Node annotation with which the agent says that it serves the node: a name of [`crate::AgentMode`].
pub const AGENT_MODE: &str = "steerage.dev/agent-mode";
/// Node annotation with the version of that agent.
pub const AGENT_VERSION: &str = "steerage.dev/agent-version";

/// Node annotation with which an operator drains a node: with the value `true`, load balancers send it no new connections.
pub const DRAIN: &str = "steerage.dev/drain";

/// Finalizer on Services of Steerage's classes.
pub const FINALIZER: &str = "steerage.dev/load-balancer";
/// Kubernetes' finalizer, set on Services without a class. A cloud-controller-manager removes it from all others.
pub const UPSTREAM_FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Service label that names the service proxy; kube-proxy ignores Services that have it.
pub const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// The value of [`PROXY_NAME_LABEL`] for the agent.
pub const PROXY_NAME: &str = "steerage";
/// `EndpointSlice` label that names its Service.
pub const SLICE_SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// `EndpointSlice` annotation: time of the change that triggered the last update.
pub const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Label of headless Services and of their slices. Service proxies ignore them.
pub const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Node label that excludes a node from load balancers, unless its value parses as false.
pub const EXCLUDE_LABEL: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// Taint of the cluster autoscaler on a node that it will delete.
pub const AUTOSCALER_TAINT: &str = "ToBeDeletedByClusterAutoscaler";
/// Node label: the zone.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Pod label: with the value `true`, the controller looks at the pod's readiness gate.
pub const POD_GATE_LABEL: &str = "steerage.dev/readiness-gate";
/// Readiness gate and condition of a pod: it is healthy in every load balancer that has it as a target.
pub const POD_GATE: &str = "steerage.dev/load-balancer-ready";

/// Condition: the load balancer and its targets are as planned.
pub const PROGRAMMED: &str = "steerage.dev/Programmed";
/// Condition: at least one target is healthy.
pub const SERVING: &str = "steerage.dev/Serving";
/// Condition: the load balancer works, but a request of the user is not met.
pub const DEGRADED: &str = "steerage.dev/Degraded";

/// Prefixes of the annotations that projections keep in any case.
const KEPT_PREFIXES: [&str; 6] = [
    "service.alpha.kubernetes.io/",
    "service.beta.kubernetes.io/",
    "loadbalancer.openstack.org/",
    "networking.gke.io/",
    "cloud.google.com/",
    TRIGGER_TIME,
];

/// Whether an annotation is of Steerage, or was meant to be: its domain begins with `steerage`, as that of `steerage.io/paused`.
pub fn is_of_steerage(annotation: &str) -> bool {
    annotation.split_once('/').is_some_and(|(domain, _)| domain.split('.').next() == Some("steerage"))
}

/// The name of an annotation after its domain, if that is one of Kubernetes, such as `service.kubernetes.io`.
pub fn name_at_kubernetes(annotation: &str) -> Option<&str> {
    let (domain, name) = annotation.split_once('/')?;
    (domain == "kubernetes.io" || domain.ends_with(".kubernetes.io")).then_some(name)
}

/// An annotation without the stage of an API before its domain, such as that of `alpha.cloud.google.com`.
pub fn without_stage(annotation: &str) -> &str {
    let stages = ["alpha.", "beta."];
    stages.iter().find_map(|stage| annotation.strip_prefix(stage)).unwrap_or(annotation)
}

/// Whether projections keep an annotation: those that something reads, and those that look as if something did.
pub fn is_kept(annotation: &str) -> bool {
    KEPT_PREFIXES.iter().any(|prefix| without_stage(annotation).starts_with(prefix))
        || is_of_steerage(annotation)
        || name_at_kubernetes(annotation).is_some_and(|name| name.contains("load-balancer"))
}

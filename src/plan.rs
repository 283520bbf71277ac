// SPDX-License-Identifier: Apache-2.0
//! Plans a Service's load balancer and its targets from a snapshot of the cluster. Pure: no I/O and no clock.

mod cluster_addresses;
mod error;
mod health_check;
mod legacy;
mod load_balancer;
mod managed;
mod node_change;
mod node_labels;
mod node_targets;
mod pods;
mod steering;
mod targets;
mod unknown;

pub(crate) use cluster_addresses::{AddressHolder, address_holder};
pub(crate) use error::PlanError;
pub(crate) use health_check::{HealthCheckDefaults, nonzero_duration, with_last_resort};
pub(crate) use legacy::{LegacyRequest, kubectl_patch, legacy_request};
pub(crate) use load_balancer::{fingerprint, load_balancer};
pub(crate) use managed::{
    ManagedClasses, finalizer, has_managed_class, is_managed, is_paused, is_unmanaged_by_flag,
    owned_finalizers, served_class,
};
pub(crate) use node_change::{NodeChange, NodeDependence};
pub(crate) use node_labels::{NodeLabels, node_labels};
pub(crate) use node_targets::NodeTargets;
pub(crate) use pods::{
    PodTargets, has_pod_targets, may_have_pod_targets, pod_targets, slices_of_targets, waiting_pods,
};
pub(crate) use steering::steering;
pub(crate) use targets::{EndpointSummary, TargetPlan, staying_target, target_reasons, targets};

pub(crate) use unknown::ignored_annotations;

use steerage_provider_api::{Capabilities, Steering};

/// What all plans depend on besides the cluster.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) capabilities: Capabilities,
    /// The steering of Services without the annotation.
    pub(crate) default_steering: Steering,
    pub(crate) classes: ManagedClasses,
    /// The healthz port of the service proxy on every node.
    pub(crate) proxy_healthz_port: u16,
    /// The healthz port of an agent beside kube-proxy.
    pub(crate) agent_healthz_port: u16,
    pub(crate) health: HealthCheckDefaults,
    /// Whether pods may wait for their load balancers.
    pub(crate) pod_readiness_gates: bool,
    /// Whether cordoned nodes drain.
    pub(crate) drain_cordoned_nodes: bool,
}

#[cfg(test)]
impl Config {
    /// The defaults of the flags, with the classes of the edge.
    pub(crate) fn with_defaults(capabilities: Capabilities, default_steering: Steering) -> Self {
        Self {
            capabilities,
            default_steering,
            classes: ManagedClasses { provider: "edge", serve_unset: false, others: Vec::new() },
            proxy_healthz_port: 10256,
            agent_healthz_port: 10356,
            health: HealthCheckDefaults {
                interval: None,
                timeout: None,
                healthy_threshold: 2,
                unhealthy_threshold: 2,
            },
            pod_readiness_gates: false,
            drain_cordoned_nodes: false,
        }
    }
}

#[cfg(test)]
mod tests;

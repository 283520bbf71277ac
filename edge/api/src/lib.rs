// SPDX-License-Identifier: Apache-2.0
//! The edge's API: what the edge is to the controller what ELBv2 is for AWS.
//!
//! Owns the custom resources of group `steerage.dev/v1alpha1`, all namespaced and kept in the system namespace. The controller's edge
//! provider writes [`EdgeLoadBalancer`] and [`EdgeNodeSet`]; each edge host writes only objects of its own, [`EdgeHost`] and
//! [`EdgeTargetHealth`]; operators write [`AddressPool`]. The chart's CRDs are printed from these types by the binary `crds`.

mod health;
mod host;
mod load_balancer;
mod pool;
#[cfg(test)]
mod reference;

pub use health::{EdgeTargetHealth, EdgeTargetHealthSpec, TargetState, TargetStatus};
pub use host::{EdgeHost, EdgeHostSpec};
pub use load_balancer::{
    Affinity, EdgeLoadBalancer, EdgeLoadBalancerSpec, EdgeNodeSet, EdgeNodeSetSpec, EdgeTarget, HealthCheck,
    HealthCheckProtocol, Listener, ListenerProtocol, ServiceReference,
};
pub use pool::{AddressPool, AddressPoolSpec, AddressPoolStatus};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

/// All custom resource definitions, as the chart installs them.
pub fn crds() -> [CustomResourceDefinition; 5] {
    [
        AddressPool::crd(),
        EdgeHost::crd(),
        EdgeLoadBalancer::crd(),
        EdgeNodeSet::crd(),
        EdgeTargetHealth::crd(),
    ]
}

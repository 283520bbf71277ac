// SPDX-License-Identifier: Apache-2.0
//! The edge's API: the custom resources of `steerage.dev/v1alpha1`, all in the system namespace.
//!
//! The controller's edge provider writes [`EdgeLoadBalancer`] and [`EdgeNodeSet`]. Each edge host writes only its own [`EdgeHost`]
//! and [`EdgeTargetHealth`] objects. Operators write [`AddressPool`]. The binary `crds` prints the chart's CRDs from these types.

pub mod hash;
mod health;
mod host;
mod load_balancer;
mod pool;
#[cfg(test)]
mod reference;
mod selector;
mod shards;

pub use health::{
    EdgeTargetHealth, EdgeTargetHealthSpec, HOST_LABEL, IpFamily, SharedTargets, TargetCounts, TargetState,
    TargetStatus, TargetUse,
};
pub use host::{DrainingNode, EdgeHost, EdgeHostSpec, field_manager};
pub use load_balancer::{
    Affinity, EdgeLoadBalancer, EdgeLoadBalancerSpec, EdgeNodeSet, EdgeNodeSetSpec, EdgeTarget, HealthCheck,
    HealthCheckProtocol, Listener, ListenerProtocol, MAX_SOURCE_RANGES, ServiceReference,
};
pub use pool::{AddressPool, AddressPoolSpec, AddressPoolStatus, AddressSharing, ReleasedAddress};
pub use selector::{LabelOperator, LabelRequirement, LabelSelector, Labels};
pub use shards::{ParseShardsError, Shard, Shards};

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

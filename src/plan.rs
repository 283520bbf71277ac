// SPDX-License-Identifier: Apache-2.0
//! What a Service's load balancer should be. Pure: called by the workers with what the index says, and never does I/O.

mod error;
mod health_check;
mod legacy;
mod load_balancer;
mod managed;
mod steering;
mod targets;

pub(crate) use error::PlanError;
pub(crate) use health_check::{Defaults as HealthDefaults, duration};
pub(crate) use legacy::{Legacy, MIGRATED, command as legacy_command, legacy};
pub(crate) use load_balancer::{fingerprint, load_balancer};
pub(crate) use managed::{
    ManagedClasses, PROVIDER, finalizer, has_managed_class, is_managed, owned_finalizers,
};
pub(crate) use steering::steering;
pub(crate) use targets::{NodeTargets, TargetPlan, reasons as target_reasons, targets};

use steerage_provider_api::{Capabilities, Steering};

/// What all plans depend on besides the cluster.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// What the provider can do.
    pub(crate) capabilities: Capabilities,
    /// The steering of Services that choose none.
    pub(crate) default_steering: Steering,
    /// Which classes we serve.
    pub(crate) classes: ManagedClasses,
    /// The port of the service proxy's own health on every node.
    pub(crate) proxy_healthz_port: u16,
    /// The same of our agent, where it lives beside kube-proxy.
    pub(crate) agent_healthz_port: u16,
    /// The health check of Services that do not change it.
    pub(crate) health: HealthDefaults,
}

/// Every annotation of ours that the controller reads or writes on a Service.
#[cfg(test)]
pub(crate) const ANNOTATIONS: [&str; 9] = [
    steerage_model::names::STEERING,
    steerage_model::names::ADDRESSES,
    steerage_model::names::ADDRESS_POOL,
    health_check::INTERVAL,
    health_check::TIMEOUT,
    health_check::HEALTHY,
    health_check::UNHEALTHY,
    PROVIDER,
    MIGRATED,
];

#[cfg(test)]
mod tests;

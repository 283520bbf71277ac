// SPDX-License-Identifier: Apache-2.0
//! The interface between the controller and the providers of load balancers.
//!
//! The controller plans a plain value, a [`LoadBalancer`] with its [`TargetGroup`]s, and passes it to a [`Provider`], which makes the
//! cloud match it. This crate owns those values, the trait, its errors, and for which namespace a call is ([`call_namespace`]). It knows no
//! cloud and does no I/O.

pub mod call_namespace;
mod capabilities;
mod error;
mod load_balancer;
mod notice;
mod provider;
mod sources;
mod target_group;
mod targets;

pub use capabilities::{Addressing, Capabilities, Steering, TargetsAnnotation};
pub use error::{ADOPTION_REFUSED, Error};
pub use load_balancer::{Listener, LoadBalancer, Owner};
pub use notice::{NoticeSubject, ProviderNotice};
pub use provider::{Compare, Health, Outcome, Progress, Provider};
pub use sources::{AdmittedSources, Ranges, RequestedSources, intersection};
pub use target_group::{GroupKey, HealthCheck, HealthProtocol, PodPort, TargetGroup};
pub use targets::{
    DrainingTarget, GroupTargets, HealthState, PartHealth, PodTarget, SharedSet, Target, TargetHealth,
    TargetSet, Targets,
};

// SPDX-License-Identifier: Apache-2.0
//! The AWS provider: `ELBv2` network load balancers, whose targets are instances or pods.
//!
//! [`AwsArgs`] holds the controller's flags, [`Config`] the validated settings. [`Aws`] is the provider. These decide and do no I/O:
//! `desired` with `annotations`, `attributes`, `health_check`, `labels`, `list`, `named_groups`, `names`, `peers`, `placement`,
//! `security_group`, `shared`, `subnets`, `tls` and `wanted_targets` what is wanted; `diff`, `registered`, `shared_use`, `state`, `tried` and `zones` what is missing. `client`
//! makes the calls, and `api_metrics` counts them. `provider` combines them: `inventory`, `first_look` and `observe` read what exists,
//! `lookup` finds subnets and security groups by their names, `restructure` and `apply` bring the structure in place, `finish`, `targets`
//! and `health` do what follows, `security_group_sync` with `security_group_rules` and `named_groups_sync` looks after the security
//! groups, `subnet_sync` after the subnets, `shared_sync` after load balancers of several Services, `delete` removes everything. No other crate sees an AWS type, and this crate uses nothing of
//! Kubernetes.

mod adopt;
mod adoption;
pub mod annotations;
mod api_metrics;
mod apply;
mod attributes;
mod client;
mod config;
mod delete;
mod desired;
mod diff;
mod finish;
mod first_look;
mod health;
mod health_check;
#[cfg(test)]
mod iam_policy;
mod inventory;
mod labels;
mod list;
mod lookup;
mod named_groups;
mod named_groups_sync;
mod names;
mod observe;
pub mod peers;
mod placement;
mod provider;
mod reasons;
mod registered;
mod restructure;
mod security_group;
mod security_group_rules;
mod security_group_sync;
mod shared;
mod shared_sync;
mod shared_use;
#[cfg(test)]
mod standin;
mod state;
mod subnet_sync;
mod subnets;
mod target_id;
mod targets;
mod tls;
mod tried;
mod wanted_targets;
mod zones;

pub use api_metrics::ApiMetrics;
pub use config::{AwsArgs, ClusterId, Config, ConfigError, Peer, Scheme};
pub use provider::Aws;
pub use reasons::REASONS;
pub use shared::{SharedLoadBalancer, SharedLoadBalancers};

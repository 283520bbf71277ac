// SPDX-License-Identifier: Apache-2.0
//! The AWS provider: `ELBv2` network load balancers, whose targets are instances or pods.
//!
//! [`AwsArgs`] holds the controller's flags, [`Config`] the validated settings. [`Aws`] is the provider. These decide and do no I/O:
//! `desired` with `annotations`, `attributes`, `health_check`, `ip_address_type`, `labels`, `named_groups`, `names`, `peers`, `placement`,
//! `security_group`, `shared`, `subnets`, `tls` and `wanted_targets` what is wanted; `diff`, `failing_groups`, `last_known`, `refused_listeners`, `registered`, `shared_use`, `state`, `tries` and `zones` what is missing. `client`
//! makes and counts the calls, `paced` at the rate that AWS takes, in which the namespaces take turns that `steerage_provider_api::call_namespace` names. `provider` combines them: `inventory`, `first_look` and `observe` read what exists,
//! `lookup` finds subnets and security groups by their names, `restructure` and `apply` with `change_listeners` and `put_back` bring the structure in place, `finish`, `follow`, `targets`
//! and `health` do what follows, `security_group_sync` with `security_group_rules` and `named_groups_sync` looks after the security
//! groups, `subnet_sync` after the subnets, `ip_address_type_sync` after the IP families of clients, `leaving_sources` after sources that must go at once, `shared_sync` after load balancers of several Services, `delete` removes everything. No other crate sees an AWS type, and this crate uses nothing of
//! Kubernetes.

mod adopt;
mod adoption;
pub mod annotations;
mod apply;
mod attributes;
mod call_clock;
mod change_gate;
mod change_listeners;
mod client;
mod config;
mod delete;
mod desired;
mod diff;
mod entry;
mod failing_groups;
mod finish;
mod first_look;
mod follow;
mod group_pass;
mod groups_in_use;
mod health;
mod health_check;
mod health_parts;
#[cfg(test)]
mod iam_policy;
mod instance;
mod inventory;
mod ip_address_type;
mod ip_address_type_sync;
mod labels;
mod last_known;
mod leaving_sources;
mod lookup;
mod named_groups;
mod named_groups_sync;
mod names;
mod new_balancers;
mod observe;
mod paced;
mod partial_read;
pub mod peers;
mod placement;
mod provider;
mod put_back;
mod reasons;
mod refused_answers;
mod refused_listeners;
mod registered;
mod restrict;
mod restructure;
mod security_group;
mod security_group_rules;
mod security_group_sync;
mod shared;
mod shared_sync;
mod shared_use;
mod source_nat;
mod source_nat_sync;
mod spare_groups;
#[cfg(any(test, feature = "stand-in"))]
#[cfg_attr(not(test), allow(dead_code, reason = "this crate's own tests use all of it"))]
mod standin;
mod state;
mod step_ports;
mod subnet_sync;
mod subnets;
mod target_id;
mod targets;
mod tls;
mod tries;
mod try_change;
mod wanted_targets;
mod zones;

use prometheus_client::registry::Registry;
use steerage_provider_cloud::Cloud;
pub use steerage_provider_cloud::{ApiMetrics, ClusterId};

pub use config::{AwsArgs, Config, ConfigError, Peer, Scheme};
pub use provider::Aws;
pub use reasons::REASONS;
#[cfg(any(test, feature = "stand-in"))]
pub use standin::SimulatedAws;
pub use steerage_provider_cloud::shared::{SharedLoadBalancer, SharedLoadBalancers};

/// AWS in text, flags and metrics.
const AWS: Cloud = Cloud { title: "AWS", name: "aws" };

/// Registers the metrics of requests to AWS.
pub fn api_metrics(registry: &mut Registry) -> ApiMetrics {
    ApiMetrics::new(registry, AWS, client::APIS.map(|api| api.api), &paced::initial_rates())
}

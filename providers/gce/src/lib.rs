// SPDX-License-Identifier: Apache-2.0
//! The provider for Google Compute Engine: passthrough network load balancers, with a regional backend service of zonal endpoint groups
//! for each Service, and forwarding rules for each protocol on one reserved address.
//!
//! [`GceArgs`] holds the controller's flags, [`Config`] the validated settings, and `discover` fills flags that are not set from the
//! metadata server. [`Gce`] is the provider. These decide and do no I/O: `desired` with `annotations`, `checks`, `options` and `peers` what
//! is wanted, `instances` which VM is an endpoint of which group, `given` whether a requested address can be used, `diff` with `compare`
//! and `tree` what is missing, `step` one change of it, `object` where each kind of resource lies, `marks` whose a resource is. `client`
//! makes and counts the requests, with the tokens of Google's own library; `paced` keeps to the rate that Google takes; `permissions` says
//! which right each request needs. `provider` combines them: `observe` reads what exists, `apply` brings a load balancer in place, `send`
//! makes changes, `operations` follows their operations, and `unknown` those of which nothing is remembered; `shared` with `known` keeps
//! what Services share, `rule_quota` says whose a freed place in the quota of forwarding rules is, `leaving` keeps the last endpoints,
//! `restrict` takes sources away, `health` reads the state of endpoints, and `delete` removes everything. `denied` remembers changes of
//! firewall rules that the credentials may not make, `firewall_command` words them for an administrator, `unset_fields` has the fields of
//! such a rule that are taken back from others, `leftovers` lists what deletions left, `unended` reports operations that do not end, and `state` has what is
//! remembered of a Service. No other crate sees a type of GCE, and this crate uses nothing of Kubernetes.

pub mod annotations;
mod apply;
mod checks;
mod client;
mod compare;
mod config;
mod delete;
mod denied;
mod desired;
mod diff;
mod discover;
mod error;
mod firewall_command;
mod given;
mod health;
mod instances;
mod known;
mod leaving;
mod leftovers;
mod marks;
mod object;
mod observe;
mod operations;
mod options;
mod paced;
pub mod peers;
pub mod permissions;
mod provider;
mod reasons;
mod restrict;
mod rule_quota;
#[cfg(any(test, feature = "stand-in"))]
#[allow(clippy::unwrap_used, reason = "only tests use it")]
mod scripted;
mod send;
mod shared;
#[cfg(any(test, feature = "stand-in"))]
mod simulated;
mod state;
mod step;
mod tree;
mod unended;
mod unknown;
mod unset_fields;

use prometheus_client::registry::Registry;
#[cfg(any(test, feature = "stand-in"))]
pub use simulated::SimulatedGce;
use steerage_provider_cloud::Cloud;
pub use steerage_provider_cloud::{ApiMetrics, ClusterId};

pub use config::{Config, ConfigError, GceArgs};
pub use provider::Gce;
pub use reasons::REASONS;

/// GCE in text, flags and metrics.
const GCE: Cloud = Cloud { title: "GCE", name: "gce" };

/// Registers the metrics of requests to GCE.
pub fn api_metrics(registry: &mut Registry) -> ApiMetrics {
    ApiMetrics::new(registry, GCE, [client::COMPUTE], &paced::initial_rates())
}

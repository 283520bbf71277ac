// SPDX-License-Identifier: Apache-2.0
//! The OpenStack provider: load balancers of Octavia, whose members are nodes, and floating IPs of Neutron.
//!
//! [`OpenStackArgs`] holds the controller's flags, [`Config`] the validated settings, [`Credentials`] where to log in and as whom.
//! [`OpenStack`] is the provider. These decide and do no I/O: `desired` with `annotations`, `options`, `vips` and `peers` what is wanted,
//! `sources` which ranges, `shared` which annotations of a shared load balancer; `diff` what is missing, `step` one change of it, `marks`
//! whose a resource is. `client` makes and counts the requests with the tokens of `keystone`; `paced` keeps to the rate that the cloud
//! takes. `provider` combines them: `observe` reads what exists, `apply` brings a load balancer in place, one change at a time, `create`
//! makes it, `adopt` takes over another controller's that `adoption` permits, `replacement` replaces one that failed, `floating` brings its
//! address in place, which `address` plans, `node_rules_sync` makes the rules of the nodes' security group that `node_rules` names,
//! `restrict` takes sources away, `health` reads the members' state, and `delete` removes everything. `shared_sync` has what differs for a
//! shared load balancer, `shared_users` says which Services name which, and `port_waiters` which wait for a port there. `reads` makes one
//! list of what several Services read, `insist` repeats a throttled request that completes a change, and `state` has what is remembered of
//! a Service. No other crate sees a type of OpenStack, and this crate uses nothing of Kubernetes.

mod address;
mod adopt;
mod adoption;
pub mod annotations;
mod apply;
mod client;
mod config;
mod create;
mod credentials;
mod delete;
mod desired;
mod diff;
mod error;
mod floating;
mod health;
mod insist;
mod keystone;
mod marks;
mod node_rules;
mod node_rules_sync;
mod observe;
mod options;
mod paced;
pub mod peers;
mod pools;
mod port_waiters;
mod provider;
mod reads;
mod reasons;
mod replacement;
mod replacement_turns;
mod restrict;
#[cfg(any(test, feature = "stand-in"))]
#[allow(clippy::unwrap_used, clippy::panic, reason = "only tests use it")]
#[cfg_attr(not(test), allow(dead_code, reason = "this crate's own tests use all of it"))]
mod scripted;
mod shared;
mod shared_sync;
mod shared_users;
#[cfg(any(test, feature = "stand-in"))]
mod simulated;
mod sources;
mod state;
mod step;
mod types;
mod vips;

use prometheus_client::registry::Registry;
#[cfg(any(test, feature = "stand-in"))]
pub use simulated::SimulatedOpenStack;
use steerage_provider_cloud::Cloud;
pub use steerage_provider_cloud::{ApiMetrics, ClusterId};

pub use config::{Config, ConfigError, OpenStackArgs};
pub use credentials::{Credentials, CredentialsError};
pub use provider::OpenStack;
pub use reasons::REASONS;

/// OpenStack in text, flags and metrics.
const OPENSTACK: Cloud = Cloud { title: "OpenStack", name: "openstack" };

/// Registers the metrics of requests to OpenStack.
pub fn api_metrics(registry: &mut Registry) -> ApiMetrics {
    ApiMetrics::new(registry, OPENSTACK, client::APIS, &paced::initial_rates())
}

// SPDX-License-Identifier: Apache-2.0
//! The provider for Azure: one Standard load balancer for all external Services of a cluster and one for all internal ones, public IPs,
//! and rules of the nodes' network security group.
//!
//! [`AzureArgs`] holds the controller's flags, [`Config`] the validated settings, [`Credentials`] as whom to log in. [`Azure`] is the
//! provider. These decide and do no I/O: `desired` with `annotations`, `options` and `peers` what a Service needs, `merge` what that
//! changes in a load balancer, `admission` what in a security group, `limits` how much a Service and a namespace may have, `marks` whose a
//! part is, `types` which fields Azure has. `client` makes and counts the requests with the tokens of `token`; `paced` keeps to the rate
//! that Azure takes. `shared` writes a resource for all Services at once, with what `document` knows of its kind and whom
//! `named_in_refusal` finds in a refusal; `operation` follows a change that Azure has accepted. `provider` combines them: `public_ips`
//! brings addresses in place, `apply` a Service, `retire` removes the addresses that it had before, `release` gives up those that a refused
//! one requested, `kept_address` publishes the address of a refused one, `service_state` has what is remembered of a Service, and `delete` removes
//! everything. No other crate sees a type of Azure, and this crate uses nothing of Kubernetes.

mod admission;
pub mod annotations;
mod apply;
mod client;
mod config;
mod credentials;
mod delete;
mod desired;
mod document;
mod error;
mod kept_address;
mod limits;
mod marks;
mod merge;
mod named_in_refusal;
mod operation;
mod options;
mod paced;
pub mod peers;
#[cfg(test)]
mod permissions;
mod provider;
mod public_ips;
mod reasons;
mod release;
mod retire;
#[cfg(any(test, feature = "stand-in"))]
#[allow(clippy::unwrap_used, clippy::panic, reason = "only tests use it")]
#[cfg_attr(not(test), allow(dead_code, reason = "this crate's own tests use all of it"))]
mod scripted;
mod service_state;
mod shared;
#[cfg(any(test, feature = "stand-in"))]
mod simulated;
#[cfg(test)]
mod tests;
mod token;
mod types;

use prometheus_client::registry::Registry;
#[cfg(any(test, feature = "stand-in"))]
pub use simulated::SimulatedAzure;
use steerage_provider_cloud::Cloud;
pub use steerage_provider_cloud::{ApiMetrics, ClusterId};

pub use config::{AzureArgs, Config, ConfigError};
pub use credentials::{Credentials, CredentialsError};
pub use provider::Azure;
pub use reasons::REASONS;

/// Azure in text, flags and metrics.
const AZURE: Cloud = Cloud { title: "Azure", name: "azure" };

/// Registers the metrics of requests to Azure.
pub fn api_metrics(registry: &mut Registry) -> ApiMetrics {
    ApiMetrics::new(registry, AZURE, client::APIS, &paced::initial_rates())
}

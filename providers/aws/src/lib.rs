// SPDX-License-Identifier: Apache-2.0
//! The AWS provider: `ELBv2` network load balancers with instance targets.
//!
//! [`AwsArgs`] are the controller's flags, [`Config`] what they mean, [`Aws`] the provider. Decisions are pure
//! (`names`, `desired`, `diff`); `client` makes the calls; `provider` joins the two. Nothing outside this crate sees an AWS type, and this
//! crate sees nothing of Kubernetes.

mod client;
mod config;
mod desired;
mod diff;
mod inventory;
mod names;
mod observe;
mod provider;
mod targets;

pub use config::{AwsArgs, Config, ConfigError, Scheme};
pub use provider::Aws;

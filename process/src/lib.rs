// SPDX-License-Identifier: Apache-2.0
//! The shape that every Steerage process has: flags, logs, metrics, probes, shutdown.
//!
//! Owns what controller, agent and edge would otherwise each do in their own way. Their `main.rs` parse flags and call [`run`];
//! all else reaches them through [`Process`]. It knows nothing of Kubernetes, clouds or packets.

pub mod admin;
mod args;
pub mod duration;
mod logging;
mod metrics;
mod ready;
mod run;
mod termination;

pub use args::{AdminArgs, LogArgs, LogFormat, ProcessArgs};
pub use metrics::Metrics;
pub use prometheus_client;
pub use ready::{Pending, Readiness};
pub use run::{Component, EXIT_FAILED, EXIT_FORCED, Process, run};

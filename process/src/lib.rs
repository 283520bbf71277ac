// SPDX-License-Identifier: Apache-2.0
//! The shape that every Steerage process has: flags, logs, metrics, probes, shutdown.
//!
//! The `main.rs` of controller, agent and edge parse flags and call [`run`]; the rest of a program uses [`Process`]. It depends on
//! no Kubernetes client, no cloud and no packet code.

pub mod admin;
mod args;
pub mod connection_limiter;
pub mod duration;
mod logging;
mod metrics;
mod ready;
mod run;
mod termination;

pub use args::{AdminArgs, LogArgs, LogFormat, ProcessArgs};
pub use logging::init as init_logging;
pub use metrics::Metrics;
pub use prometheus_client;
pub use ready::{Pending, Readiness};
pub use run::{Component, EXIT_FAILED, EXIT_FORCED, EXIT_USAGE, Process, run};

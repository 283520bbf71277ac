// SPDX-License-Identifier: Apache-2.0
//! What Steerage promises, shown on a real cluster.
//!
//! The binary `steerage-e2e` is a thin shell over this. It speaks to a running cluster through [`cluster::Cluster`] only, from
//! inside a client's network namespace, and starts and ends no cluster: `hack/e2e` does.

pub mod args;
pub mod boot;
mod cases;
pub mod cluster;
pub mod demo;
pub mod dump;
pub mod edge;
pub mod events;
pub mod meter;
pub mod net;
pub mod pods;
pub mod report;
pub mod scene;
mod self_test;
pub mod services;
mod session;
pub mod sniff;
pub mod suite;
pub mod system;
pub mod wait;

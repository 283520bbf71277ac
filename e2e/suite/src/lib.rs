// SPDX-License-Identifier: Apache-2.0
//! The end-to-end suite: cases that test Steerage on a running cluster.
//!
//! The binary `steerage-e2e` calls [`args`]. The suite uses a running cluster through [`cluster::Cluster`] only, from inside a
//! client's network namespace. It starts and ends no cluster; `hack/e2e` does.

pub mod args;
pub mod aws;
mod cases;
pub mod client;
pub mod cluster;
pub mod demo;
pub mod dump;
pub mod edge;
pub mod events;
pub mod net;
pub mod off_link;
pub mod openstack;
pub mod passthrough;
pub mod path_mtu;
pub mod pods;
pub mod report;
mod self_test;
pub mod service_proxy;
pub mod services;
mod session;
pub mod sniff;
pub mod suite;
pub mod system;
pub mod test_context;
pub mod wait;

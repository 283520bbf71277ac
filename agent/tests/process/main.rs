// SPDX-License-Identifier: Apache-2.0
//! The agent as a process, on a node of namespaces with a real API server, under traffic: killed, cut off, meddled with, doubled,
//! replaced. Needs root, the commands `ip`, `nft`, `nsenter` and `setpriv`, and what `hack/prepare` builds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod alone;
mod faults;
mod foreign;
mod scene;
mod service_cidrs;
mod traffic;
mod upgrade;
#[allow(dead_code, reason = "shared with the packet tests, which use all of it")]
#[path = "../packets/world.rs"]
mod world;

// SPDX-License-Identifier: Apache-2.0
//! The agent's integration tests, in one program: every program links the agent and the Kubernetes client again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod agent_rules_page;
mod kernel;
mod packets;
mod process;
mod thousand_ports;
mod world;

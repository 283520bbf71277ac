// SPDX-License-Identifier: Apache-2.0
//! The controller's program against real API servers.
#![allow(clippy::expect_used, clippy::panic, reason = "a test")]

mod adoption;
mod aws;
mod aws_policy;
mod bad_input;
mod cloud_policies;
mod dry_run;
mod life_cycle;
mod pod_gates;
mod support;

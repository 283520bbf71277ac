// SPDX-License-Identifier: Apache-2.0
//! The edge with real packets, in network namespaces. Needs root and the command `ip`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod announcements;
mod exchange;
mod fence;
mod forwarding;
mod fused;
mod left_behind;
mod routed_flows;
mod routes;
mod several_hosts;
mod statements;
mod takeover;
mod testbed;
mod tunnel;

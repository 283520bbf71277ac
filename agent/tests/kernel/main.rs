// SPDX-License-Identifier: Apache-2.0
//! What the agent's writer leaves in a real kernel: that `nft` can list all of it, that updates come to the same as a full load,
//! and that what is refused changes nothing. Each test in a network namespace of its own. Needs root and the `nft` command.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod cluster;
mod dumping;
mod listing;
mod ruleset;
mod updates;

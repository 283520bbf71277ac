// SPDX-License-Identifier: Apache-2.0
//! The crate on the real kernel. Each test runs in its own network namespace and needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod nft_command;
mod notifications;
mod transactions;

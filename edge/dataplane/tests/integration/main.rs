// SPDX-License-Identifier: Apache-2.0
//! The program in the kernel: packets through `BPF_PROG_TEST_RUN`, and over real links in network
//! namespaces. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod bed;
mod capabilities;
mod differential;
mod exceptions;
mod flows;
mod links;
mod measure;
mod neighbours;
mod packets;
mod writes;

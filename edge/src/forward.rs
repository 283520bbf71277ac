// SPDX-License-Identifier: Apache-2.0
//! Forwarding in the kernel: one nftables table on the link's ingress hook.
//!
//! `rules` is the skeleton, of a constant size; `state` is what varies, all of it elements of sets and maps; `kernel` writes and
//! reads both. The engine owns the one [`Kernel`]; nobody else writes to the table.

mod elements;
mod kernel;
mod rules;
mod state;

pub(crate) use kernel::{Device, Kernel, remove};
pub(crate) use state::{Mac, NUMBER_MASK, SELF, Slots, State, TARGET, table_id};

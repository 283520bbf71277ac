// SPDX-License-Identifier: Apache-2.0
//! Forwarding in the kernel: one nftables table on the link's ingress hook.
//!
//! `rules` has the constant chains and rules; `state` has what varies, all of it elements of sets and maps; `writer` writes and
//! reads both. The engine owns the one [`NftWriter`], and nothing else writes to the table.

mod elements;
mod interval_sets;
mod rules;
mod state;
mod writer;

pub(crate) use state::{
    ForwardingState, LOCAL_TARGET, Mac, NUMBER_MASK, SlotTable, TARGET, display_mac, slot_table_id,
};
pub(crate) use writer::{Device, NftWriter, remove};

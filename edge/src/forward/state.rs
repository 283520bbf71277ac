// SPDX-License-Identifier: Apache-2.0
//! What the kernel should know, as plain values: made by `plan`, compared and written by `kernel`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

/// A link-layer address.
pub(crate) type Mac = [u8; 6];

/// Set in every target's id, so that none is taken for the id of a table.
pub(crate) const TARGET: u32 = 1 << 31;
/// The id of this host as a target: accepted instead of forwarded.
pub(crate) const LOCAL_TARGET: u32 = TARGET;
/// Where the class lies in a table's id, and the bit that says that the hash is over the address alone.
const CLASS_SHIFT: u32 = 28;
const AFFINITY: u32 = 1 << 27;

/// The id of a table: the rules tell from it in which map its slots are, and what to hash.
pub(crate) fn slot_table_id(number: u32, class: usize, affinity: bool) -> u32 {
    let class = u32::try_from(class).unwrap_or(0) & 7;
    (class << CLASS_SHIFT) | (u32::from(affinity) * AFFINITY) | (number & NUMBER_MASK)
}

/// The part of a table's id that is its number.
pub(crate) const NUMBER_MASK: u32 = AFFINITY - 1;
/// The part that is its class.
pub(crate) const CLASS_MASK: u32 = 7 << CLASS_SHIFT;
/// The part that is its class and what it hashes.
pub(crate) const KIND_MASK: u32 = CLASS_MASK | AFFINITY;

/// The class in a table's id.
pub(crate) fn class_of(table: u32) -> usize {
    usize::try_from((table & CLASS_MASK) >> CLASS_SHIFT).unwrap_or(0)
}

/// The slots of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotTable {
    /// The target's id of each slot; empty, or zero in a slot, where there is none.
    pub(crate) slots: Vec<u32>,
    /// The targets that datagrams may go to.
    pub(crate) usable: BTreeSet<u32>,
}

/// All that varies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ForwardingState {
    /// The virtual addresses: what comes for them is ours to judge.
    pub(crate) vips: BTreeSet<IpAddr>,
    /// The table of each address, protocol and port.
    pub(crate) listeners: BTreeMap<(IpAddr, u8, u16), u32>,
    /// The table for fragments of datagrams, which show no port, to an address.
    pub(crate) fragments: BTreeMap<IpAddr, u32>,
    /// The tables by id.
    pub(crate) tables: BTreeMap<u32, Arc<SlotTable>>,
    /// The address of each target.
    pub(crate) targets: BTreeMap<u32, IpAddr>,
    /// Virtual addresses for which this host is a target itself.
    pub(crate) local: BTreeSet<IpAddr>,
    /// Whose packets may come in, for virtual addresses that are not for everybody. Disjoint.
    pub(crate) ranges: BTreeMap<IpAddr, BTreeSet<IpNet>>,
    /// Link-layer addresses of other edge hosts.
    pub(crate) peers: BTreeSet<Mac>,
    /// Link-layer addresses of targets.
    pub(crate) nodes: BTreeSet<Mac>,
    /// The source addresses that may come from these link-layer addresses. Disjoint for each.
    pub(crate) sources: BTreeMap<Mac, BTreeSet<IpNet>>,
}

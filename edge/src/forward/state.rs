// SPDX-License-Identifier: Apache-2.0
//! What varies in the ruleset, as plain values: `plan` makes them, `writer` compares and writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

/// A link-layer address.
pub(crate) type Mac = [u8; 6];

/// In the usual notation.
pub(crate) fn display_mac(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Set in every target's id, and in no slot table's: a packet's mark holds either.
pub(crate) const TARGET: u32 = 1 << 31;
/// The id of this host as a target: its packets are accepted, not forwarded.
pub(crate) const LOCAL_TARGET: u32 = TARGET;
/// The position of the size class in a slot table's id.
const CLASS_SHIFT: u32 = 28;
/// Set in the id of a slot table whose hash is over the client's address alone.
const AFFINITY: u32 = 1 << 27;

/// The rules read from the id in which map the slots are, and what to hash.
pub(crate) fn slot_table_id(number: u32, class: usize, affinity: bool) -> u32 {
    let class = u32::try_from(class).unwrap_or(0) & 7;
    (class << CLASS_SHIFT) | (u32::from(affinity) * AFFINITY) | (number & NUMBER_MASK)
}

/// The number in a slot table's id.
pub(crate) const NUMBER_MASK: u32 = AFFINITY - 1;
/// The size class in a slot table's id.
pub(crate) const CLASS_MASK: u32 = 7 << CLASS_SHIFT;
/// The size class and the affinity in a slot table's id.
pub(crate) const KIND_MASK: u32 = CLASS_MASK | AFFINITY;

pub(crate) fn class_of(table: u32) -> usize {
    usize::try_from((table & CLASS_MASK) >> CLASS_SHIFT).unwrap_or(0)
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotTable {
    /// The id of each slot's target, zero for none; empty without targets.
    pub(crate) slots: Vec<u32>,
    /// The targets that have slots. Flows of UDP leave all others.
    pub(crate) usable: BTreeSet<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ForwardingState {
    /// All packets to these addresses are the edge's to forward or drop.
    pub(crate) vips: BTreeSet<IpAddr>,
    /// The slot table of each VIP, IP protocol and port.
    pub(crate) listeners: BTreeMap<(IpAddr, u8, u16), u32>,
    /// The slot table of a VIP for fragments of datagrams, which have no port.
    pub(crate) fragments: BTreeMap<IpAddr, u32>,
    /// By id.
    pub(crate) slot_tables: BTreeMap<u32, Arc<SlotTable>>,
    /// The address of each target, by id.
    pub(crate) targets: BTreeMap<u32, IpAddr>,
    /// VIPs for which this host is a target.
    pub(crate) local: BTreeSet<IpAddr>,
    /// The source ranges of VIPs that have any. Disjoint.
    pub(crate) ranges: BTreeMap<IpAddr, BTreeSet<IpNet>>,
    /// Other edge hosts.
    pub(crate) peers: BTreeSet<Mac>,
    /// Nodes that are targets.
    pub(crate) nodes: BTreeSet<Mac>,
    /// The source addresses that frames of peers and nodes may carry. Disjoint for each.
    pub(crate) sources: BTreeMap<Mac, BTreeSet<IpNet>>,
}

// SPDX-License-Identifier: Apache-2.0
//! What the program should do, as plain values: the plan makes them, `writer` writes the differences.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_packet::maps::{ListenerKey, SLOTS_PER_ELEMENT};

use crate::regions::elements;

/// A link-layer address.
pub type MacAddress = [u8; 6];

/// All that the daemon writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The VIPs, and the lease of each.
    pub vips: BTreeMap<IpAddr, u32>,
    /// The listeners of VIPs.
    pub listeners: BTreeMap<ListenerKey, Listener>,
    /// The tables, by number. Zero is no number.
    pub tables: BTreeMap<u32, Arc<Table>>,
    /// The targets, by number. Zero is no number; the lowest numbers are best, because they index an
    /// array. A number may be used again for another node only after the longest idle time of flows.
    pub targets: BTreeMap<u32, TargetState>,
    /// What frames of nodes and of other edge hosts may be.
    pub senders: BTreeMap<MacAddress, Sender>,
}

/// A node or another edge host, as a sender of frames to VIPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sender {
    /// Its frames may have these source addresses. It forwards no clients' packets to this host.
    Own(Arc<BTreeSet<IpNet>>),
    /// It is another edge host, and this host is a node: its frames have been forwarded to this node, and pass to the kernel.
    Forwarder,
}

impl Sender {
    /// The source addresses that its frames may have.
    pub(crate) fn nets(&self) -> Option<&BTreeSet<IpNet>> {
        match self {
            Self::Own(nets) => Some(nets),
            Self::Forwarder => None,
        }
    }
}

/// How packets to a listener are forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Number of the table.
    pub table: u32,
    /// Whether only the client's address selects the slot.
    pub has_affinity: bool,
    /// The source ranges, if there are any.
    pub ranges: Option<Arc<BTreeSet<IpNet>>>,
}

/// A table of slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The number of each slot's target, of [`crate::maglev::fill`]; empty without targets.
    pub slots: Vec<u32>,
    /// The targets that have slots. Exchanges of datagrams leave all others.
    pub members: BTreeSet<u32>,
}

impl Table {
    /// A table of these members.
    pub fn new(size: u32, members: &[crate::maglev::Member]) -> Self {
        let slots = crate::maglev::fill(size, members);
        Self { slots, members: members.iter().map(|member| member.target).collect() }
    }

    /// How many of the map's slots a table of this size takes: it is rounded up, so that tables can
    /// make place for each other. States can always be written while the sum is at most half of the
    /// map, because old and new tables stand side by side during a write.
    pub fn room(size: u32) -> u32 {
        if size == 0 { 0 } else { elements(size).next_power_of_two().saturating_mul(SLOTS_PER_ELEMENT) }
    }
}

/// A node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// Its address.
    pub address: IpAddr,
    /// How it is reached.
    pub path: Path,
}

/// How a node is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// It is a neighbour on the link.
    Neighbour,
    /// It is this host.
    Local,
    /// Through the tunnel.
    Tunnel {
        /// The node's link-layer address there.
        mac: MacAddress,
        /// The longest IP packet.
        mtu: u16,
        /// The number of the virtual network.
        vni: u32,
    },
}

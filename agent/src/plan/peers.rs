// SPDX-License-Identifier: Apache-2.0
//! Peers: nodes that take packets of clients outside from a node without a local endpoint (`--forward-without-local-endpoints`). Which
//! of them has an endpoint, and which flow goes to which. Pure.
//!
//! A frontend has [`PEER_SLOTS`] slots, and a flow's hash chooses one. Each slot ranks all nodes by a hash, and takes the first that has
//! an endpoint: when a node comes or goes, only flows of its own slots move. Each node ranks in its own way, so that nodes with
//! endpoints have equal shares of what all others forward.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use steerage_model::{Backend, Family};

/// The slots of a frontend.
pub const PEER_SLOTS: u32 = 8;

/// Where packets are sent so that they reach a node, by family: its own address, or one behind a tunnel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerAddresses {
    /// For IPv4.
    pub v4: Option<IpAddr>,
    /// For IPv6.
    pub v6: Option<IpAddr>,
}

impl PeerAddresses {
    /// That of a family.
    pub fn of(self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }

    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// The other nodes of the cluster that this node can forward to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerNodes {
    /// Another one on each node.
    seed: u32,
    nodes: BTreeMap<String, PeerAddresses>,
}

impl PeerNodes {
    /// None yet. Nodes with different seeds choose independently.
    pub fn new(seed: u32) -> Self {
        Self { seed, nodes: BTreeMap::new() }
    }

    /// Where a node is reached.
    pub fn get(&self, node: &str) -> PeerAddresses {
        self.nodes.get(node).copied().unwrap_or_default()
    }

    /// Notes where a node is reached; nowhere, if it is gone.
    pub fn set(&mut self, node: &str, addresses: PeerAddresses) {
        if addresses.is_empty() {
            self.nodes.remove(node);
        } else {
            self.nodes.insert(node.to_owned(), addresses);
        }
    }

    /// The node of each slot, among those with endpoints that serve: ready ones, else those that serve while they terminate. `None` if no
    /// such node can be reached.
    pub fn slots(&self, all: &[Backend<'_>], family: Family) -> Option<Arc<[IpAddr]>> {
        let reached = |serves: fn(&Backend<'_>) -> bool| -> BTreeSet<(&str, IpAddr)> {
            let nodes = all.iter().filter(|b| serves(b)).filter_map(|b| b.endpoint.node.as_deref());
            nodes.filter_map(|node| Some((node, self.get(node).of(family)?))).collect()
        };
        let mut nodes = reached(|b| b.endpoint.ready);
        if nodes.is_empty() {
            nodes = reached(|b| b.endpoint.is_serving_terminating());
        }
        let hashes: Vec<_> = nodes.into_iter().map(|(node, addr)| (hash(node), addr)).collect();
        let first = |slot: u32| {
            let rank = |node: u64| mixed(node ^ mixed(u64::from(self.seed) << 32 | u64::from(slot)));
            hashes.iter().max_by_key(|(node, _)| rank(*node)).map(|(_, addr)| *addr)
        };
        (0..PEER_SLOTS).map(first).collect()
    }
}

/// FNV-1a, for the names of nodes: the same in each process.
fn hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Spreads each bit over all others (the finaliser of `SplitMix64`).
fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;
    use steerage_model::Endpoint;

    use super::*;

    fn addr(n: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, n).into()
    }

    fn endpoints(nodes: &[u8]) -> Vec<Endpoint> {
        nodes
            .iter()
            .map(|n| Endpoint::ready(Ipv4Addr::new(10, 244, *n, 1).into(), &format!("node-{n}")))
            .collect()
    }

    fn slots(peers: &PeerNodes, endpoints: &[Endpoint]) -> Option<Vec<IpAddr>> {
        let all: Vec<_> = endpoints.iter().map(|endpoint| Backend { endpoint, port: 80 }).collect();
        peers.slots(&all, Family::V4).map(|slots| slots.to_vec())
    }

    fn peers(nodes: impl IntoIterator<Item = u8>, seed: u32) -> PeerNodes {
        let mut peers = PeerNodes::new(seed);
        for n in nodes {
            peers.set(&format!("node-{n}"), PeerAddresses { v4: Some(addr(n)), v6: None });
        }
        peers
    }

    proptest! {
        #[test]
        fn only_flows_of_a_node_that_leaves_move(
            nodes in proptest::collection::btree_set(any::<u8>(), 2..40),
            seed: u32,
            at: proptest::sample::Index,
        ) {
            let all: Vec<_> = nodes.iter().copied().collect();
            let gone = *at.get(&all);
            let fewer: Vec<_> = all.iter().copied().filter(|n| *n != gone).collect();
            let peers = peers(0..=255, seed);
            let (before, after) = (slots(&peers, &endpoints(&all)), slots(&peers, &endpoints(&fewer)));
            for (before, after) in before.unwrap().iter().zip(&after.unwrap()) {
                prop_assert!(before == after || *before == addr(gone));
                prop_assert!(*after != addr(gone));
            }
        }
    }

    #[test]
    fn nodes_with_endpoints_have_equal_shares_of_what_others_forward() {
        let endpoints = endpoints(&[1, 2, 3, 4]);
        let mut shares = BTreeMap::new();
        for seed in 0..1000 {
            for addr in slots(&peers(1..=4, seed), &endpoints).unwrap() {
                *shares.entry(addr).or_insert(0) += 1;
            }
        }
        assert!(shares.len() == 4 && shares.values().all(|share| (1850..2150).contains(share)), "{shares:?}");
    }

    #[test]
    fn terminating_endpoints_are_a_last_resort_and_unreachable_nodes_get_nothing() {
        let peers = peers([1, 2], 7);
        let terminating = |n| {
            let mut endpoint = endpoints(&[n]).remove(0);
            (endpoint.ready, endpoint.terminating) = (false, true);
            endpoint
        };
        let of = |endpoints: &[Endpoint]| {
            slots(&peers, endpoints).map(|slots| slots.into_iter().collect::<BTreeSet<_>>())
        };
        let ready = |n| endpoints(&[n]).remove(0);
        assert_eq!(of(&[terminating(1), ready(2)]), Some([addr(2)].into()));
        assert_eq!(of(&[terminating(1), ready(3)]), Some([addr(1)].into()), "node 3 cannot be reached");
        assert_eq!(of(&[ready(3)]), None);
        let nowhere = Endpoint { node: None, ..ready(1) };
        assert_eq!(of(&[nowhere]), None, "an endpoint of no node");
    }
}

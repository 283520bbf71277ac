// SPDX-License-Identifier: Apache-2.0
//! The source addresses of the nodes that groups have as targets, by Ethernet address, kept while groups come and go. Pure, used by the
//! plan.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_dataplane::Sender;

use super::reachable::ReachableTargets;
use crate::host::HostNetwork;
use crate::link::mac::Mac;

#[derive(Debug, Default)]
pub(super) struct SenderNets {
    /// How many times each network is among the sources.
    nets: BTreeMap<Mac, HashMap<IpNet, usize>>,
    /// Nodes whose networks have changed since [`changed`](Self::changed) was called.
    dirty: BTreeSet<Mac>,
}

impl SenderNets {
    /// These targets are among those of groups.
    pub(super) fn add(&mut self, reachable: &ReachableTargets) {
        for (mac, nets) in &reachable.sources {
            let of_mac = self.nets.entry(*mac).or_default();
            for net in nets {
                let number = of_mac.entry(*net).or_default();
                *number += 1;
                if *number == 1 {
                    self.dirty.insert(*mac);
                }
            }
        }
    }

    /// They are no longer.
    pub(super) fn remove(&mut self, reachable: &ReachableTargets) {
        for (mac, nets) in &reachable.sources {
            let Some(of_mac) = self.nets.get_mut(mac) else { continue };
            for net in nets {
                let Some(number) = of_mac.get_mut(net) else { continue };
                *number -= 1;
                if *number == 0 {
                    of_mac.remove(net);
                    self.dirty.insert(*mac);
                }
            }
            if of_mac.is_empty() {
                self.nets.remove(mac);
            }
        }
    }

    /// What frames of nodes and of other edge hosts may be. If this host is a node, other edge hosts forward to it.
    pub(super) fn all(&mut self, host: &HostNetwork, is_node: bool) -> BTreeMap<Mac, Sender> {
        self.dirty.clear();
        let peers = Peers::new(host);
        let macs: BTreeSet<Mac> = self.nets.keys().copied().chain(peers.nets.keys().copied()).collect();
        macs.into_iter().filter_map(|mac| Some((mac, self.sender(mac, &peers, is_node)?))).collect()
    }

    /// The same of those that have changed; `None` of a sender that is no longer one.
    pub(super) fn changed(&mut self, host: &HostNetwork, is_node: bool) -> BTreeMap<Mac, Option<Sender>> {
        let dirty = std::mem::take(&mut self.dirty);
        if dirty.is_empty() {
            return BTreeMap::new();
        }
        let peers = Peers::new(host);
        dirty.into_iter().map(|mac| (mac, self.sender(mac, &peers, is_node))).collect()
    }

    fn sender(&self, mac: Mac, peers: &Peers, is_node: bool) -> Option<Sender> {
        let (own, of_peer) = (self.nets.get(&mac), peers.nets.get(&mac));
        if is_node && of_peer.is_some() {
            return Some(Sender::Forwarder);
        }
        if own.is_none() && of_peer.is_none() {
            return None;
        }
        let nets: Vec<IpNet> =
            own.into_iter().flat_map(HashMap::keys).chain(of_peer.into_iter().flatten()).copied().collect();
        Some(Sender::Own(Arc::new(IpNet::aggregate(&nets).into_iter().collect())))
    }
}

/// The own addresses of other edge hosts.
struct Peers {
    nets: BTreeMap<Mac, Vec<IpNet>>,
}

impl Peers {
    fn new(host: &HostNetwork) -> Self {
        // Heartbeats can be forged, and packets that a router forwards are of any source.
        let routers = host.default_gateways();
        let mut nets = BTreeMap::<Mac, Vec<IpNet>>::new();
        for peer in host.peers.iter().filter(|peer| !routers.contains(&peer.mac)) {
            nets.entry(peer.mac).or_default().extend(peer.addresses.iter().copied().map(IpNet::from));
        }
        Self { nets }
    }
}

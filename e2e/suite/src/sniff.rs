// SPDX-License-Identifier: Apache-2.0
//! Which node the edge sends packets to, seen on the nodes' own interfaces and so before every service proxy.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Result;

use crate::cluster::Host;
use steerage_meter::capture::Capture;
use steerage_meter::packet::Content;

/// One packet's arrival: when, since the Unix epoch, and at which node by its index.
pub type Arrival = (Duration, usize);

/// Listens on nodes for datagrams to one address until it is dropped.
pub struct Sniffer {
    vip: Ipv4Addr,
    captures: Vec<Capture>,
}

impl Sniffer {
    /// Starts to listen on the nodes.
    pub fn start(nodes: &[Host], vip: Ipv4Addr) -> Result<Self> {
        let captures = nodes.iter().map(|node| Capture::start(&node.netns, &[vip.into()], &[]));
        Ok(Self { vip, captures: captures.collect::<Result<_>>()? })
    }

    /// The arrivals since some time, in order.
    pub fn since(&self, time: Duration) -> Vec<Arrival> {
        let mut arrivals = Vec::new();
        for (node, capture) in self.captures.iter().enumerate() {
            let to_vip = capture
                .since(time)
                .into_iter()
                .filter(|packet| packet.to.ip() == self.vip && matches!(packet.content, Content::Udp(_)));
            arrivals.extend(to_vip.map(|packet| (packet.at, node)));
        }
        arrivals.sort_unstable();
        arrivals
    }
}

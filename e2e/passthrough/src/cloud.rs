// SPDX-License-Identifier: Apache-2.0
//! What an API says about traffic: forwarding rules, the pools behind them, and who may connect. Values only.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use ipnet::IpNet;
use steerage_nlb::cloud::{Group, Groups, Transport};

/// Everything of the cloud that concerns traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cloud {
    /// What is forwarded.
    pub rules: Vec<Rule>,
    /// The pools of targets, by name. All are used by a rule.
    pub pools: BTreeMap<String, Pool>,
    /// Who may connect; the first filter that matches a packet decides. Without one it is dropped.
    pub filters: Vec<Filter>,
}

impl Cloud {
    /// The pools, as their targets' health is judged.
    pub fn groups(&self) -> Groups<'_> {
        self.pools.iter().map(|(name, pool)| (name.as_str(), &pool.group)).collect()
    }

    /// Whether a packet that opens a flow may pass.
    pub fn admits(&self, source: IpAddr, to: SocketAddr, transport: Transport) -> bool {
        let mut filters = self.filters.iter();
        filters.find(|filter| filter.matches(source, to, transport)).is_some_and(|filter| filter.allows)
    }
}

/// A rule that forwards packets to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The VIP.
    pub vip: IpAddr,
    /// The protocol.
    pub transport: Transport,
    /// The ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// The name of the pool.
    pub pool: String,
    /// By what the target of a flow is chosen.
    pub affinity: Affinity,
    /// Whether targets get as many flows as the weight says that they answered to their check.
    pub is_weighted: bool,
    /// Whether all targets get flows if none is healthy, or else none.
    pub fails_open: bool,
}

/// By what the target of a flow is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affinity {
    /// Addresses and ports.
    Flow,
    /// The client's address.
    Client,
}

/// Targets of one IP family that are checked in one way. The port of a target is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The targets and their check.
    pub group: Group,
    /// What checks are addressed to; `None`: the target itself.
    pub checked_at: Option<IpAddr>,
    /// The address from which targets are checked.
    pub prober: IpAddr,
}

/// A rule of a firewall. Empty lists match everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Whether it admits, or denies.
    pub allows: bool,
    /// The sources.
    pub sources: Vec<IpNet>,
    /// The destinations.
    pub destinations: Vec<IpNet>,
    /// The protocol.
    pub transport: Option<Transport>,
    /// The destination's ports.
    pub ports: Vec<RangeInclusive<u16>>,
}

impl Filter {
    fn matches(&self, source: IpAddr, to: SocketAddr, transport: Transport) -> bool {
        let has = |nets: &[IpNet], address: IpAddr| {
            nets.is_empty() || nets.iter().any(|net| net.contains(&address))
        };
        has(&self.sources, source)
            && has(&self.destinations, to.ip())
            && self.transport.is_none_or(|own| own == transport)
            && (self.ports.is_empty() || self.ports.iter().any(|range| range.contains(&to.port())))
    }
}

/// `80`, `80-90`; `None` if it is neither.
pub(crate) fn range(text: &str) -> Option<RangeInclusive<u16>> {
    match text.split_once('-') {
        Some((first, last)) => Some(first.parse().ok()?..=last.parse().ok()?),
        None => text.parse().ok().map(|port| port..=port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(allows: bool, source: &str, ports: &[RangeInclusive<u16>]) -> Filter {
        Filter {
            allows,
            sources: vec![source.parse().unwrap()],
            destinations: vec!["198.18.0.7/32".parse().unwrap()],
            transport: Some(Transport::Tcp),
            ports: ports.to_vec(),
        }
    }

    #[test]
    fn first_filter_that_matches_decides_and_the_default_is_to_drop() {
        let filters =
            vec![filter(false, "10.78.1.2/32", &[80..=80]), filter(true, "10.78.0.0/16", &[80..=81])];
        let cloud = Cloud { filters, ..Cloud::default() };
        let admits = |source: &str, to: &str, transport| {
            cloud.admits(source.parse().unwrap(), to.parse().unwrap(), transport)
        };
        assert!(admits("10.78.1.1", "198.18.0.7:80", Transport::Tcp));
        assert!(!admits("10.78.1.2", "198.18.0.7:80", Transport::Tcp), "denied");
        assert!(admits("10.78.1.2", "198.18.0.7:81", Transport::Tcp), "another port");
        assert!(!admits("10.78.1.1", "198.18.0.7:82", Transport::Tcp));
        assert!(!admits("10.78.1.1", "198.18.0.8:80", Transport::Tcp));
        assert!(!admits("10.78.1.1", "198.18.0.7:80", Transport::Udp));
        assert!(!admits("fd78::1", "198.18.0.7:80", Transport::Tcp));
        let everything =
            Cloud { filters: vec![Filter { allows: true, ..Filter::default() }], ..Cloud::default() };
        assert!(everything.admits([10, 0, 0, 1].into(), ([10, 0, 0, 2], 1).into(), Transport::Udp));
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!(range("80"), Some(80..=80));
        assert_eq!(range("80-90"), Some(80..=90));
        assert_eq!(range("a"), None);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the API says: load balancers, their listeners, target groups and registered targets. Values only.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use ipnet::Ipv4Net;

/// Everything in the account that concerns traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cloud {
    /// The load balancers.
    pub balancers: Vec<Balancer>,
    /// The target groups, by ARN.
    pub groups: BTreeMap<String, Group>,
}

impl Cloud {
    /// The target groups that a listener uses.
    pub fn used_groups(&self) -> Groups<'_> {
        let listeners = self.balancers.iter().flat_map(|balancer| &balancer.listeners);
        listeners
            .filter_map(|listener| self.groups.get_key_value(&listener.group))
            .map(|(arn, group)| (arn.as_str(), group))
            .collect()
    }
}

/// Target groups, by ARN or another name.
pub type Groups<'a> = BTreeMap<&'a str, &'a Group>;

/// A load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balancer {
    /// Its host name.
    pub hostname: String,
    /// What its security groups admit; without a group, `None`: everybody.
    pub admitted: Option<Vec<Admission>>,
    /// Its listeners.
    pub listeners: Vec<Listener>,
}

impl Balancer {
    /// The sources that may open flows to a port; `None` means all.
    pub fn sources(&self, transport: Transport, port: u16) -> Option<Vec<Ipv4Net>> {
        let rules = self.admitted.as_ref()?.iter();
        let fits = rules.filter(|rule| rule.transports.contains(&transport) && rule.ports.contains(&port));
        let sources = Ipv4Net::aggregate(&fits.map(|rule| rule.source).collect());
        (!sources.iter().any(|source| source.prefix_len() == 0)).then_some(sources)
    }
}

/// An inbound rule of a security group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The protocols, one or both.
    pub transports: Vec<Transport>,
    /// The clients' ports.
    pub ports: RangeInclusive<u16>,
    /// The clients.
    pub source: Ipv4Net,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The clients' port.
    pub port: u16,
    /// The protocols, one or both.
    pub transports: Vec<Transport>,
    /// The ARN of its target group.
    pub group: String,
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The name in nftables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }

    /// The number in the IP header.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }
}

/// What the targets of a group are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// `instance`
    Instance,
    /// `ip`
    Address,
}

/// A target group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// How its targets are checked.
    pub check: Check,
    /// Its attributes.
    pub attributes: Attributes,
    /// Where the registered targets are, by id.
    pub targets: BTreeMap<String, SocketAddr>,
}

/// A health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The path that must answer 200; `None` means that a TCP connection suffices.
    pub path: Option<String>,
    /// The port; `None` means the port of the target.
    pub port: Option<u16>,
    /// Time from one check to the next.
    pub interval: Duration,
    /// A check that takes longer has failed.
    pub timeout: Duration,
    /// Consecutive successes that make an unhealthy target healthy.
    pub healthy_threshold: u32,
    /// Consecutive failures that make a target unhealthy.
    pub unhealthy_threshold: u32,
}

impl Check {
    /// Where a target is checked.
    pub fn address(&self, target: SocketAddr) -> SocketAddr {
        SocketAddr::new(target.ip(), self.port.unwrap_or(target.port()))
    }
}

/// The attributes of a target group that concern traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// `preserve_client_ip.enabled`
    pub keeps_client_address: bool,
    /// `stickiness.enabled`, of type `source_ip`
    pub is_sticky: bool,
    /// `deregistration_delay.timeout_seconds`
    pub deregistration_delay: Duration,
    /// `deregistration_delay.connection_termination.enabled`
    pub ends_flows_after_delay: bool,
    /// After which time as unhealthy a target's flows end; `None` means never. AWS ends them at once by default, unless
    /// `target_health_state.unhealthy.connection_termination.enabled` is false: then after
    /// `target_health_state.unhealthy.draining_interval_seconds`, where 0 means never. Groups with UDP have neither.
    pub unhealthy_flows_end_after: Option<Duration>,
}

impl Attributes {
    /// The attributes from the API's names and values. An absent one has AWS's default for a group of this kind and these protocols.
    pub fn of(values: &BTreeMap<String, String>, kind: TargetKind, transports: &[Transport]) -> Self {
        let has_udp = transports.contains(&Transport::Udp);
        let shows_client = kind == TargetKind::Instance || has_udp;
        let is = |name: &str, default: bool| values.get(name).map_or(default, |value| value == "true");
        let seconds = |name: &str, default: u64| {
            let value = values.get(name).and_then(|value| value.parse().ok());
            Duration::from_secs(value.unwrap_or(default))
        };
        let unhealthy_flows_end_after = if has_udp {
            None
        } else if is("target_health_state.unhealthy.connection_termination.enabled", true) {
            Some(Duration::ZERO)
        } else {
            let interval = seconds("target_health_state.unhealthy.draining_interval_seconds", 0);
            (!interval.is_zero()).then_some(interval)
        };
        Self {
            keeps_client_address: is("preserve_client_ip.enabled", shows_client),
            is_sticky: is("stickiness.enabled", false),
            deregistration_delay: seconds("deregistration_delay.timeout_seconds", 300),
            ends_flows_after_delay: is("deregistration_delay.connection_termination.enabled", has_udp),
            unhealthy_flows_end_after,
        }
    }
}

/// Flows that end: their entries in connection tracking are deleted, and the next packet of a TCP flow is answered by a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The load balancer's address.
    pub address: Ipv4Addr,
    /// The clients' port.
    pub port: u16,
    /// The protocol.
    pub transport: Transport,
    /// Only flows to this target end; `None` means all. Pods may be targets of several load balancers.
    pub target: Option<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &[Transport] = &[Transport::Tcp];
    const BOTH: &[Transport] = &[Transport::Tcp, Transport::Udp];

    fn attributes(pairs: &[(&str, &str)], transports: &[Transport]) -> Attributes {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Attributes::of(&pairs.collect(), TargetKind::Instance, transports)
    }

    #[test]
    fn absent_attributes_have_the_defaults_of_aws() {
        let of_tcp = attributes(&[], TCP);
        assert!(of_tcp.keeps_client_address && !of_tcp.is_sticky && !of_tcp.ends_flows_after_delay);
        assert_eq!(of_tcp.deregistration_delay, Duration::from_mins(5));
        assert_eq!(of_tcp.unhealthy_flows_end_after, Some(Duration::ZERO));
        let of_both = attributes(&[], BOTH);
        assert!(of_both.ends_flows_after_delay);
        assert_eq!(of_both.unhealthy_flows_end_after, None);
        let of_addresses = |transports| Attributes::of(&BTreeMap::new(), TargetKind::Address, transports);
        assert!(!of_addresses(TCP).keeps_client_address && of_addresses(BOTH).keeps_client_address);
    }

    #[test]
    fn attributes_are_read_by_name() {
        let read = attributes(
            &[
                ("preserve_client_ip.enabled", "false"),
                ("stickiness.enabled", "true"),
                ("deregistration_delay.timeout_seconds", "7"),
                ("deregistration_delay.connection_termination.enabled", "true"),
            ],
            TCP,
        );
        assert!(!read.keeps_client_address && read.is_sticky && read.ends_flows_after_delay);
        assert_eq!(read.deregistration_delay, Duration::from_secs(7));
    }

    #[test]
    fn flows_of_unhealthy_targets_end_at_once_later_or_never() {
        let ends = "target_health_state.unhealthy.connection_termination.enabled";
        let interval = "target_health_state.unhealthy.draining_interval_seconds";
        for (pairs, transports, expected) in [
            (&[(ends, "true"), (interval, "0")][..], TCP, Some(0)),
            (&[(ends, "false"), (interval, "300")], TCP, Some(300)),
            (&[(ends, "false"), (interval, "0")], TCP, None),
            (&[(ends, "true")], BOTH, None),
        ] {
            let found = attributes(pairs, transports).unhealthy_flows_end_after;
            assert_eq!(found, expected.map(Duration::from_secs), "{pairs:?} {transports:?}");
        }
    }

    #[test]
    fn sources_are_those_of_the_rules_that_fit() {
        let rule = |transports: &[Transport], ports: RangeInclusive<u16>, source: &str| Admission {
            transports: transports.to_vec(),
            ports,
            source: source.parse().unwrap(),
        };
        let tcp = [Transport::Tcp];
        let rules = vec![
            rule(&tcp, 80..=80, "192.0.2.0/25"),
            rule(&tcp, 80..=80, "192.0.2.128/25"),
            rule(&tcp, 80..=80, "192.0.2.7/32"),
            rule(&tcp, 81..=90, "198.51.100.7/32"),
            rule(&[Transport::Tcp, Transport::Udp], 443..=443, "0.0.0.0/0"),
        ];
        let balancer = |admitted| Balancer { hostname: String::new(), admitted, listeners: Vec::new() };
        let of = |transport, port| balancer(Some(rules.clone())).sources(transport, port);
        let nets = |texts: &[&str]| Some(texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>());
        assert_eq!(of(Transport::Tcp, 80), nets(&["192.0.2.0/24"]), "no range is in another");
        assert_eq!(of(Transport::Tcp, 85), nets(&["198.51.100.7/32"]));
        assert_eq!(of(Transport::Udp, 80), nets(&[]));
        assert_eq!(of(Transport::Udp, 443), None);
        assert_eq!(balancer(None).sources(Transport::Tcp, 80), None);
    }

    #[test]
    fn check_goes_to_its_own_port_or_the_targets() {
        let mut check = Check {
            path: None,
            port: Some(10256),
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(4),
            healthy_threshold: 2,
            unhealthy_threshold: 2,
        };
        let target = SocketAddr::from(([10, 77, 1, 1], 30080));
        assert_eq!(check.address(target).port(), 10256);
        check.port = None;
        assert_eq!(check.address(target), target);
    }
}

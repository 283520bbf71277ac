// SPDX-License-Identifier: Apache-2.0
//! The rules that a security group of the nodes needs, so that members are reached. Pure.
//!
//! An amphora connects from an address in the member subnet, so all Services share a few rules with the subnet as their source. OVN keeps
//! the client's address, so each Service has rules of its own, with its source ranges.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Deserialize;
use serde_json::{Value, json};
use steerage_model::Family;
use steerage_provider_api::{Owner, intersection};
use steerage_provider_cloud::ClusterId;

use crate::config::OVN;
use crate::desired::Desired;
use crate::marks;

/// What a rule admits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeRule {
    pub(crate) protocol: &'static str,
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) source: IpNet,
}

impl fmt::Display for NodeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}-{} from {}", self.protocol, self.first, self.last, self.source)
    }
}

/// A rule of a security group in Neutron.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct PresentRule {
    pub(crate) id: String,
    direction: String,
    ethertype: Option<String>,
    protocol: Option<String>,
    port_range_min: Option<u16>,
    port_range_max: Option<u16>,
    remote_ip_prefix: Option<String>,
    remote_group_id: Option<String>,
    #[serde(default)]
    remote_address_group_id: Option<String>,
    #[serde(default)]
    pub(crate) description: Option<String>,
}

/// The names of protocols, by name and by number.
const PROTOCOLS: [(&str, &str); 2] = [("tcp", "6"), ("udp", "17")];

/// Every address of a family.
fn everybody(family: Family) -> IpNet {
    match family {
        Family::V4 => Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0).into(),
        Family::V6 => Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

impl PresentRule {
    /// What it admits; `None` if Steerage makes no such rules.
    pub(crate) fn rule(&self) -> Option<NodeRule> {
        let protocol = self.protocol.as_deref()?.to_ascii_lowercase();
        let (protocol, _) =
            PROTOCOLS.into_iter().find(|(name, number)| protocol == *name || protocol == *number)?;
        let family = if self.ethertype.as_deref() == Some("IPv6") { Family::V6 } else { Family::V4 };
        let is_by_address = self.remote_group_id.is_none() && self.remote_address_group_id.is_none();
        let source = match &self.remote_ip_prefix {
            Some(prefix) => prefix.parse().ok()?,
            None => everybody(family),
        };
        (self.direction == "ingress" && is_by_address).then_some(())?;
        Some(NodeRule { protocol, first: self.port_range_min?, last: self.port_range_max?, source })
    }
}

impl NodeRule {
    pub(crate) fn body(&self, group: &str, description: &str) -> Value {
        let ethertype = match Family::of(self.source.addr()) {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        json!({ "security_group_rule": {
            "security_group_id": group,
            "direction": "ingress",
            "ethertype": ethertype,
            "protocol": self.protocol,
            "port_range_min": self.first,
            "port_range_max": self.last,
            "remote_ip_prefix": self.source.to_string(),
            "description": description,
        }})
    }

    /// Whether both are about the same ports.
    fn has_ports_of(&self, other: &Self) -> bool {
        (self.protocol, self.first, self.last) == (other.protocol, other.first, other.last)
    }

    /// The rules that admit the clients of this one which are requested; itself if all are.
    pub(crate) fn narrowed(&self, requested: &[IpNet]) -> BTreeSet<Self> {
        let sources = intersection(&[self.source], requested);
        sources.into_iter().map(|source| Self { source, ..self.clone() }).collect()
    }
}

/// Most rules that a Service has of its own.
pub(crate) const MAX_RULES: usize = 100;

/// The rules that a Service needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needed {
    /// Those that all Services of the cluster share.
    pub(crate) shared: BTreeSet<NodeRule>,
    /// Those of ports that no other Service has.
    pub(crate) own: BTreeSet<NodeRule>,
}

/// A subnet through which members are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberSubnet {
    pub(crate) cidr: IpNet,
    /// Whether the operator names it. One that a Service names is admitted to the Service's own ports.
    pub(crate) is_operators: bool,
}

/// The rules that a Service needs. `subnets` are those through which its members are reached.
pub(crate) fn needed(wanted: &Desired, node_ports: &RangeInclusive<u16>, subnets: &[MemberSubnet]) -> Needed {
    let mut rules = Needed::default();
    for listener in &wanted.listeners {
        let Some(ports) = marks::pool_ports(&listener.pool.tags) else { continue };
        let protocol = if listener.protocol == "UDP" { "udp" } else { "tcp" };
        let exact = |protocol, port, source| NodeRule { protocol, first: port, last: port, source };
        if wanted.provider == OVN {
            let families = wanted.vips.iter().map(|vip| vip.family);
            let everybody: Vec<IpNet> = families.map(everybody).collect();
            let clients = if wanted.sources.is_empty() { &everybody } else { &wanted.sources };
            // OVN checks members from an address in their subnet.
            let sources = clients.iter().chain(subnets.iter().map(|subnet| &subnet.cidr));
            let sources: BTreeSet<IpNet> = sources.map(IpNet::trunc).collect();
            let is_covered =
                |source: &IpNet| sources.iter().any(|other| other != source && other.contains(source));
            let sources = sources.iter().filter(|source| !is_covered(source));
            rules.own.extend(sources.map(|source| exact(protocol, ports.node_port, *source)));
            continue;
        }
        for MemberSubnet { cidr, is_operators } in subnets {
            let source = cidr.trunc();
            let range =
                |protocol| NodeRule { protocol, first: *node_ports.start(), last: *node_ports.end(), source };
            match (is_operators, node_ports.contains(&ports.node_port)) {
                (true, true) => rules.shared.insert(range(protocol)),
                (true, false) => rules.shared.insert(exact(protocol, ports.node_port, source)),
                (false, _) => rules.own.insert(exact(protocol, ports.node_port, source)),
            };
            let Some(port) = ports.check_port else { continue };
            // The proxy's port may be in the range of node ports, and is no Service's.
            match (is_operators, node_ports.contains(&port)) {
                (true, true) => rules.shared.insert(range("tcp")),
                (false, true) if listener.pool.is_own_check => rules.own.insert(exact("tcp", port, source)),
                // That of the node's proxy, which all Services have.
                _ => rules.shared.insert(exact("tcp", port, source)),
            };
        }
    }
    rules.own.retain(|rule| !rules.shared.contains(rule));
    rules
}

/// What of a group changes, as the identifiers of rules that go, and rules that come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleChanges {
    /// Rules that admit clients who are no longer admitted.
    pub(crate) narrowed: Vec<String>,
    pub(crate) created: Vec<NodeRule>,
    /// Rules of other Services of the cluster with exactly these ports: they had the node port before, and admit their clients to it.
    pub(crate) stale: Vec<(String, NodeRule)>,
    /// Rules of ports that nothing uses any more: they go when the load balancer is complete.
    pub(crate) unused: Vec<String>,
}

/// Whether a rule is of another Service of the cluster.
fn is_of_another(cluster: &ClusterId, owner: &Owner, rule: &PresentRule) -> bool {
    let of = rule.description.as_deref().and_then(|text| marks::floating_owner(cluster, text));
    of.is_some_and(|of| of != *owner)
}

/// The changes of the rules that have this description. A rule of others that admits the same does as well: Neutron takes no second one.
/// With the owner, whose node ports nobody else has, those of the cluster's other Services do not.
pub(crate) fn changes(
    present: &[PresentRule],
    needed: &BTreeSet<NodeRule>,
    description: &str,
    of: Option<(&ClusterId, &Owner)>,
) -> RuleChanges {
    let mut changes = RuleChanges::default();
    let mut known = BTreeSet::new();
    for rule in present {
        let Some(admits) = rule.rule() else { continue };
        let is_stale = of.is_some_and(|(cluster, owner)| is_of_another(cluster, owner, rule))
            && needed.iter().any(|one| one.has_ports_of(&admits));
        if is_stale {
            changes.stale.push((rule.id.clone(), admits));
        } else {
            known.insert(admits);
        }
    }
    changes.created = needed.difference(&known).cloned().collect();
    for rule in present.iter().filter(|rule| rule.description.as_deref() == Some(description)) {
        match rule.rule() {
            Some(admits) if needed.contains(&admits) => {}
            Some(admits) if needed.iter().any(|one| one.has_ports_of(&admits)) => {
                changes.narrowed.push(rule.id.clone());
            }
            _ => changes.unused.push(rule.id.clone()),
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use steerage_model::Protocol;
    use steerage_provider_api::LoadBalancer;

    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::planned;
    use crate::options::tests::config;

    const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);
    const DNS: (Protocol, u16, u16) = (Protocol::Udp, 53, 30053);

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn rules(provider: &str, check_port: u16, sources: &[&str]) -> Vec<String> {
        let mut lb = LoadBalancer { source_ranges: nets(sources), ..planned(&[WEB, DNS], &[1]) };
        for group in &mut lb.groups {
            group.health_check.port = Some(check_port);
        }
        let mut config = config(provider);
        config.security_group = Some("nodes".to_owned());
        let wanted = desired(&lb, &config).unwrap();
        let subnet = MemberSubnet { cidr: nets(&["10.0.0.0/16"])[0], is_operators: true };
        let needed = needed(&wanted, &(30_000..=32_767), &[subnet]);
        assert!(needed.own.is_empty() || needed.shared.is_empty());
        needed.own.iter().chain(&needed.shared).map(ToString::to_string).collect()
    }

    #[test]
    fn amphorae_need_few_rules_whatever_the_sources() {
        let shared = ["tcp 30000-32767 from 10.0.0.0/16", "udp 30000-32767 from 10.0.0.0/16"];
        assert_eq!(rules("amphora", 32_000, &[]), shared);
        assert_eq!(rules("amphora", 32_000, &["192.0.2.0/24"]), shared);
        let proxy = ["tcp 10256-10256 from 10.0.0.0/16"];
        assert_eq!(rules("amphora", 10_256, &[]), [&proxy[..], &shared].concat());
    }

    /// A tenant's annotation opens nothing of others.
    #[test]
    fn subnet_of_a_service_is_admitted_to_its_own_ports() {
        let wanted = desired(&planned(&[WEB], &[1]), &config("amphora")).unwrap();
        let subnet = MemberSubnet { cidr: nets(&["10.9.0.0/16"])[0], is_operators: false };
        let found = needed(&wanted, &(30_000..=32_767), &[subnet]);
        let own: Vec<String> = found.own.iter().map(ToString::to_string).collect();
        assert_eq!(own, ["tcp 30080-30080 from 10.9.0.0/16", "tcp 32000-32000 from 10.9.0.0/16"]);
        assert!(found.shared.is_empty());
    }

    /// Each Service would take the other's rule for one of a node port that it has now.
    #[test]
    fn proxys_port_in_the_range_of_node_ports_is_shared() {
        let mut lb = planned(&[WEB], &[1]);
        let check = &mut lb.groups[0].health_check;
        (check.port, check.is_of_service) = (Some(10_256), false);
        let wanted = desired(&lb, &config("amphora")).unwrap();
        let subnet = MemberSubnet { cidr: nets(&["10.9.0.0/16"])[0], is_operators: false };
        let found = needed(&wanted, &(1..=65_535), &[subnet]);
        let texts = |rules: &BTreeSet<NodeRule>| rules.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&found.own), ["tcp 30080-30080 from 10.9.0.0/16"]);
        assert_eq!(texts(&found.shared), ["tcp 10256-10256 from 10.9.0.0/16"]);
    }

    #[test]
    fn rule_of_the_service_that_had_the_node_port_before_does_not_count() {
        let cluster = ClusterId { name: "prod".to_owned(), uid: "c1".to_owned() };
        let owner =
            |name: &str| Owner { service: steerage_model::Key::new("shop", name), uid: "u".to_owned() };
        let (a, b) = (marks::floating(&cluster, &owner("a")), marks::floating(&cluster, &owner("b")));
        let rule = NodeRule { protocol: "tcp", first: 1, last: 1, source: "10.0.0.0/8".parse().unwrap() };
        let needed = BTreeSet::from([rule.clone()]);
        let all = [
            present("same", 1, Some("10.0.0.0/8"), &a),
            present("wide", 1, Some("0.0.0.0/0"), &a),
            present("another", 2, Some("0.0.0.0/0"), &a),
        ];
        let found = changes(&all, &needed, &b, Some((&cluster, &owner("b"))));
        assert_eq!(found.created, [rule]);
        assert_eq!(found.stale.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["same", "wide"]);
        assert_eq!(changes(&all, &needed, &a, Some((&cluster, &owner("a")))).stale, []);
    }

    #[test]
    fn ovn_needs_rules_for_the_clients_of_each_service() {
        assert_eq!(
            rules("ovn", 32_000, &[]),
            ["tcp 30080-30080 from 0.0.0.0/0", "udp 30053-30053 from 0.0.0.0/0"]
        );
        assert_eq!(
            rules("ovn", 32_000, &["192.0.2.7/24", "10.0.5.0/24"]),
            [
                "tcp 30080-30080 from 10.0.0.0/16",
                "tcp 30080-30080 from 192.0.2.0/24",
                "udp 30053-30053 from 10.0.0.0/16",
                "udp 30053-30053 from 192.0.2.0/24",
            ]
        );
    }

    fn present(id: &str, port: u16, prefix: Option<&str>, description: &str) -> PresentRule {
        serde_json::from_value(json!({
            "id": id, "direction": "ingress", "ethertype": "IPv4", "protocol": "tcp", "port_range_min": port,
            "port_range_max": port, "remote_ip_prefix": prefix, "remote_group_id": null, "description": description,
        }))
        .unwrap()
    }

    #[test]
    fn rules_of_others_stay_and_do_as_well() {
        let rule = |port, source: &str| NodeRule {
            protocol: "tcp",
            first: port,
            last: port,
            source: source.parse().unwrap(),
        };
        let needed = BTreeSet::from([rule(1, "10.0.0.0/8"), rule(2, "10.0.0.0/8"), rule(3, "0.0.0.0/0")]);
        let all = [
            present("same", 1, Some("10.0.0.0/8"), "ours"),
            present("wide", 2, Some("0.0.0.0/0"), "ours"),
            present("old", 9, Some("10.0.0.0/8"), "ours"),
            present("theirs", 3, None, ""),
            present("other", 9, Some("10.0.0.0/8"), "theirs"),
        ];
        let found = changes(&all, &needed, "ours", None);
        assert_eq!(found.narrowed, ["wide"]);
        assert_eq!(found.created, [rule(2, "10.0.0.0/8")]);
        assert_eq!(found.unused, ["old"]);
        let group = json!({ "id": "g", "direction": "ingress", "ethertype": "IPv4", "protocol": "tcp", "port_range_min": 3,
            "port_range_max": 3, "remote_ip_prefix": null, "remote_group_id": "nodes" });
        assert_eq!(serde_json::from_value::<PresentRule>(group).unwrap().rule(), None);
    }

    #[test]
    fn narrowed_rule_admits_what_both_admit() {
        let rule = NodeRule { protocol: "tcp", first: 1, last: 1, source: "0.0.0.0/0".parse().unwrap() };
        let found = rule.narrowed(&nets(&["10.0.0.0/8", "2001:db8::/32"]));
        assert_eq!(found.iter().map(|rule| rule.source.to_string()).collect::<Vec<_>>(), ["10.0.0.0/8"]);
    }
}

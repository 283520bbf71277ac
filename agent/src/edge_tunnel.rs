// SPDX-License-Identifier: Apache-2.0
//! The node's side of the edge's tunnel, as values: which packets may come by it. Pure; [`crate::kernel::EdgeTunnelKeeper`] writes the
//! tables and keeps the devices.
//!
//! A packet that comes out of the tunnel looks as if a client had sent it to this node, whoever it was. So the tables admit edge hosts
//! alone, and of what these send only packets to load balancers' addresses that a Service proxy of this node translates: nothing
//! reaches a pod or the host by another address than through the load balancer. Their tables stand beside the agent's others, which follow
//! Services, and change with the flags alone.

use std::net::IpAddr;

use ipnet::IpNet;
use steerage_nft::{
    Batch, Chain, ChainType, Ct, Expression, Family, FibAddress, Field, Hook, Meta, Rule, Table,
};
use steerage_tunnel::RECEIVERS;

/// The name of the tables.
pub const TABLE: &str = "steerage-edge-tunnel";

/// `IPPROTO_UDP`
const UDP: u8 = 17;
/// Whole datagrams, as connection tracking defragments at -400; before other programs' rules, which begin at -300.
const EARLY: i32 = -310;
/// After all translation of sources, at 100.
const AFTER_NAT: i32 = 300;

/// What flags say of the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeTunnelSettings {
    /// The number of the virtual network.
    pub vni: u32,
    /// The UDP port.
    pub port: u16,
    /// The edge hosts.
    pub sources: Vec<IpNet>,
    /// The load balancers' addresses.
    pub vips: Vec<IpNet>,
}

/// Why a packet is dropped, and the name of its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelDrop {
    /// No edge host has sent it, or not by the interface that leads there.
    NoEdgeHost,
    /// It came by the tunnel, to another address than a load balancer's.
    NoVip,
    /// It came by the tunnel, and no Service proxy has translated it.
    NotTranslated,
    /// A process of this node, or a pod, sends to the tunnel's port with the address of an edge host.
    Forged,
}

impl TunnelDrop {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::NoEdgeHost, Self::NoVip, Self::NotTranslated, Self::Forged];

    /// Name of the counter.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoEdgeHost => "no-edge-host",
            Self::NoVip => "no-vip",
            Self::NotTranslated => "not-translated",
            Self::Forged => "forged",
        }
    }
}

impl EdgeTunnelSettings {
    /// The number of rules in the table of a family.
    pub fn rule_count(&self, family: Family) -> usize {
        self.chains(family).iter().map(|(_, _, rules)| rules.len()).sum()
    }

    /// What makes the table of a family hold its rules and nothing else.
    pub fn write_table(&self, family: Family, batch: &mut Batch) {
        let table = Table::new(family, TABLE);
        batch.destroy_table(&table).add_table(&table, None);
        for reason in TunnelDrop::ALL {
            batch.add_counter(&table, reason.name());
        }
        let chains = self.chains(family);
        for (chain, _, _) in &chains {
            batch.add_chain(&table, chain);
        }
        for (_, name, rules) in &chains {
            for rule in rules {
                batch.add_rule(&table, name, rule);
            }
        }
    }

    fn chains(&self, family: Family) -> [(Chain, &'static str, Vec<Rule>); 7] {
        let base =
            |name, hook, priority, rules| (Chain::base(name, ChainType::Filter, hook, priority), name, rules);
        let regular = |name, rules| (Chain::regular(name), name, rules);
        [
            regular("underlay", self.underlay(family)),
            regular("decapsulated", self.decapsulated(family)),
            regular("translated", translated()),
            base("prerouting", Hook::Prerouting, EARLY, self.prerouting(family)),
            base("input", Hook::Input, 0, self.input()),
            base("forward", Hook::Forward, 0, from_tunnel("translated")),
            base("postrouting", Hook::Postrouting, AFTER_NAT, self.postrouting(family)),
        ]
    }

    /// The kernel's device takes also what is sent to many, such as 255.255.255.255, and to anycast addresses. So all is judged that is
    /// not forwarded to another host.
    fn prerouting(&self, family: Family) -> Vec<Rule> {
        const UNICAST: Field = Field::Number(1);
        let destination = Expression::FibType(FibAddress::Destination);
        let mut rules = from_tunnel("decapsulated");
        // On its way to another node, too, which could not tell it from an edge host's.
        let forged = within(family, Expression::saddr(family), &self.sources).map(|rule| {
            let rule = self.to_port(rule).equals(&Expression::ReversePath, Field::Number(0));
            dropped(rule, TunnelDrop::Forged)
        });
        rules.extend(forged);
        rules.push(self.to_port(Rule::new()).not_equals(&destination, UNICAST).goto("underlay"));
        rules
    }

    /// A Service of a tenant may lead to the port of a node: that is translated after prerouting.
    fn input(&self) -> Vec<Rule> {
        let translated = self.to_port(Rule::new()).has_any(Expression::Ct(Ct::Status), Ct::DNAT);
        let mut rules = from_tunnel("translated");
        rules.push(dropped(translated, TunnelDrop::NoEdgeHost));
        rules
    }

    fn to_port(&self, rule: Rule) -> Rule {
        let rule = rule.equals(&Expression::l4proto(), Field::Proto(UDP));
        rule.equals(&Expression::dport(), Field::Port(self.port))
    }

    /// What is about to come out of the tunnel. A pod that forges the address of an edge host sends by another interface, and a process
    /// of the host by the loopback interface, by which every source may come.
    fn underlay(&self, family: Family) -> Vec<Rule> {
        let forged = Rule::new().equals(&Expression::ReversePath, Field::Number(0));
        let allowed = within(family, Expression::saddr(family), &self.sources).map(Rule::return_);
        let mut rules =
            vec![dropped(arrived_by("lo"), TunnelDrop::NoEdgeHost), dropped(forged, TunnelDrop::NoEdgeHost)];
        rules.extend(allowed);
        rules.push(dropped(Rule::new(), TunnelDrop::NoEdgeHost));
        rules
    }

    fn decapsulated(&self, family: Family) -> Vec<Rule> {
        let allowed = within(family, Expression::daddr(family), &self.vips).map(Rule::return_);
        allowed.chain([dropped(Rule::new(), TunnelDrop::NoVip)]).collect()
    }

    /// If this node is an edge host, others believe its address: neither a pod that is masqueraded to it nor a process of the host's
    /// network may send to the port. What the kernel's own device sends has no user, and is not translated.
    fn postrouting(&self, family: Family) -> Vec<Rule> {
        const NOBODY: Field = Field::Number(u32::MAX);
        let sources = || within(family, Expression::saddr(family), &self.sources);
        let translated =
            sources().map(|rule| self.to_port(rule).has_any(Expression::Ct(Ct::Status), Ct::SNAT));
        let by_processes =
            sources().map(|rule| self.to_port(rule).not_equals(&Expression::Meta(Meta::SkUid), NOBODY));
        translated.chain(by_processes).map(|rule| dropped(rule, TunnelDrop::Forged)).collect()
    }
}

/// What has come by the tunnel goes to a chain.
fn from_tunnel(chain: &'static str) -> Vec<Rule> {
    RECEIVERS.map(|device| arrived_by(device).goto(chain)).into()
}

fn arrived_by(device: &str) -> Rule {
    let mut name = device.as_bytes().to_vec();
    name.resize(16, 0);
    Rule::new().equals_bytes(&Expression::Meta(Meta::IifName), &name)
}

fn translated() -> Vec<Rule> {
    vec![
        Rule::new().has_any(Expression::Ct(Ct::Status), Ct::DNAT).return_(),
        dropped(Rule::new(), TunnelDrop::NotTranslated),
    ]
}

fn dropped(rule: Rule, reason: TunnelDrop) -> Rule {
    rule.count(reason.name()).drop()
}

fn within(family: Family, address: Expression, nets: &[IpNet]) -> impl Iterator<Item = Rule> {
    let v6 = family == Family::Ip6;
    nets.iter().filter(move |net| net.addr().is_ipv6() == v6).map(move |net| {
        let network = address.clone().masked(octets(net.netmask()));
        Rule::new().equals_bytes(&network, &octets(net.network()))
    })
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The sets, chains and rules of the table: constant, whatever is served. Pure.
//!
//! A packet's mark carries the id of its listener's slot table, and then the id of its target. It is zero again when this host
//! accepts the packet.

use std::time::Duration;

use steerage_nft::{
    Batch, Chain, ChainType, DataType, DynamicOp, Expression, Family, Field, Hook, Meta, Rule, Set, Table,
};

use super::interval_sets::{IntervalSet, interval_sets};
use super::state::{CLASS_MASK, KIND_MASK, LOCAL_TARGET, TARGET, slot_table_id};
use crate::hash;
use crate::slot_table::SIZES;

/// The seed of the hash over source address and port. It must be the same on all hosts and never change.
const SEED: u32 = 0x5354_4545;
/// The size of each family's flow map. While it is full, new flows follow the hash alone.
const FLOWS: u32 = 524_288;
/// How long an idle connection stays on its target.
const TCP_IDLE: Duration = Duration::from_hours(1);
/// How long after its first packet, and after it was closed.
const TCP_BRIEF: Duration = Duration::from_mins(1);
/// How long an idle exchange of datagrams stays on its target.
const UDP_IDLE: Duration = Duration::from_mins(2);

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP6: u8 = 58;
const FRAGMENT_HEADER: u8 = 44;
const PACKET_HOST: u8 = 0;

pub(crate) fn table() -> Table {
    Table::new(Family::Netdev, "steerage-edge")
}

/// The map with the slots of a size class.
pub(crate) fn slot_map(class: usize) -> String {
    format!("slots{}", SIZES.get(class).copied().unwrap_or(0))
}

/// What differs between IPv4 and IPv6.
#[derive(Clone, Copy)]
pub(crate) struct IpFamily {
    pub(crate) family: Family,
    pub(crate) address: DataType,
    number: char,
}

pub(crate) const IP_FAMILIES: [IpFamily; 2] = [
    IpFamily { family: Family::Ip, address: DataType::Ipv4Addr, number: '4' },
    IpFamily { family: Family::Ip6, address: DataType::Ipv6Addr, number: '6' },
];

impl IpFamily {
    /// The name of this family's set, map or chain.
    pub(crate) fn name(self, of: &str) -> String {
        format!("{of}{}", self.number)
    }
}

/// Where a packet of a client has its addresses and ports.
struct FlowFields {
    saddr: Expression,
    sport: Expression,
    daddr: Expression,
    proto: Expression,
    dport: Expression,
}

impl FlowFields {
    /// In the packet itself.
    fn of_packet(family: Family) -> Self {
        Self {
            saddr: Expression::saddr(family),
            sport: Expression::sport(),
            daddr: Expression::daddr(family),
            proto: Expression::l4proto(),
            dport: Expression::dport(),
        }
    }

    /// In the packet that an ICMP error quotes. It is a target's reply to the client, so source and destination are swapped.
    fn of_quoted(family: Family) -> Self {
        // Offsets after the eight bytes of the error's own header.
        let (saddr, daddr, length, proto, ports) =
            if family == Family::Ip6 { (16, 32, 16, 14, 48) } else { (20, 24, 4, 17, 28) };
        Self {
            saddr: Expression::transport(daddr, length),
            sport: Expression::transport(ports + 2, 2),
            daddr: Expression::transport(saddr, length),
            proto: Expression::transport(proto, 1),
            dport: Expression::transport(ports, 2),
        }
    }

    fn listener(&self) -> Vec<Expression> {
        vec![self.daddr.clone(), self.proto.clone(), self.dport.clone()]
    }

    fn flow(&self) -> Vec<Expression> {
        let mut flow = vec![self.saddr.clone(), self.sport.clone()];
        flow.extend(self.listener());
        flow
    }
}

fn mark() -> Expression {
    Expression::Meta(Meta::Mark)
}

fn mark_of(map: &str, key: Vec<Expression>) -> Expression {
    Expression::Map { map: map.to_owned(), key, data: vec![DataType::Mark] }
}

pub(super) fn mac() -> Expression {
    Expression::link(6, 6)
}

/// Creates the table for a device, and replaces one that exists.
pub(crate) fn build(batch: &mut Batch, device: &str, index: u32) {
    let table = table();
    batch.destroy_table(&table).add_table(&table, Some(&comment(device, index)));
    for set in sets() {
        batch.add_set(&table, &set);
    }
    for ip in IP_FAMILIES {
        for chain in ["fragment", "error", "icmp", "open", "tcp", "udp", "out", "vip"] {
            batch.add_chain(&table, &Chain::regular(ip.name(chain)));
        }
    }
    for set in interval_sets() {
        set.add_chain(batch);
    }
    let hook = Hook::Ingress(vec![device.to_owned()]);
    batch.add_chain(&table, &Chain::base("ingress", ChainType::Filter, hook, 0));
    for (chain, rule) in rules(index) {
        batch.add_rule(&table, &chain, &rule);
    }
}

/// Identifies the device and everything that [`build`] makes but comments: a table with another comment is replaced.
pub(crate) fn comment(device: &str, index: u32) -> String {
    format!("steerage-edge on {device}, shape {:016x}", shape(rules(index)))
}

/// Rules that differ in their comments only have the same shape.
fn shape(rules: Vec<(String, Rule)>) -> u64 {
    let rules: Vec<_> = rules.into_iter().map(|(chain, rule)| (chain, rule.comment(""))).collect();
    hash::bytes(format!("{:?}{rules:?}", sets()).as_bytes())
}

pub(crate) fn rule_count() -> usize {
    rules(0).len()
}

fn sets() -> Vec<Set> {
    let mark = DataType::Mark;
    let mut sets = vec![
        Set::new("usable", &[mark, mark]),
        Set::new("peers", &[DataType::EtherAddr]),
        Set::new("nodes", &[DataType::EtherAddr]),
    ];
    for class in 0..SIZES.len() {
        sets.push(Set::new(slot_map(class), &[mark, mark]).maps_to(&[mark]));
    }
    for ip in IP_FAMILIES {
        let address = ip.address;
        let listener = [address, DataType::InetProto, DataType::InetService];
        let flow = [address, DataType::InetService, address, DataType::InetProto, DataType::InetService];
        sets.extend([
            Set::new(ip.name("vips"), &[address]),
            Set::new(ip.name("local"), &[address]),
            Set::new(ip.name("ranged"), &[address]),
            Set::new(ip.name("listeners"), &listener).maps_to(&[mark]),
            Set::new(ip.name("fragments"), &[address]).maps_to(&[mark]),
            Set::new(ip.name("targets"), &[mark]).maps_to(&[address]),
            Set::new(ip.name("flows"), &flow).maps_to(&[mark]).expiring(None).dynamic().size(FLOWS),
            Set::new(ip.name("closing"), &flow).expiring(Some(TCP_BRIEF)).dynamic().size(FLOWS),
        ]);
    }
    sets.extend(interval_sets().map(IntervalSet::first_definition));
    sets
}

pub(crate) fn rules(index: u32) -> Vec<(String, Rule)> {
    let mut all = Vec::new();
    for ip in IP_FAMILIES {
        let ethertype = if ip.family == Family::Ip6 { 0x86dd_u16 } else { 0x0800 };
        let gate = Rule::new()
            .equals_bytes(&Expression::Meta(Meta::Protocol), &ethertype.to_be_bytes())
            .in_set(&ip.name("vips"), &[Expression::daddr(ip.family)])
            .goto(&ip.name("vip"));
        all.push(("ingress".to_owned(), gate));
        let chains = [
            ("vip", vip(ip)),
            ("fragment", fragment(ip)),
            ("icmp", icmp(ip)),
            ("error", error(ip)),
            ("tcp", tcp(ip)),
            ("open", open(ip)),
            ("udp", udp(ip)),
            ("out", out(ip, index)),
        ];
        for (chain, rules) in chains {
            all.extend(rules.into_iter().map(|rule| (ip.name(chain), rule)));
        }
    }
    for set in interval_sets() {
        all.extend(set.first_rules().into_iter().map(|rule| (set.chain(), rule)));
    }
    all
}

/// All packets to a VIP.
fn vip(ip: IpFamily) -> Vec<Rule> {
    let family = ip.family;
    let fields = FlowFields::of_packet(family);
    let icmp = if family == Family::Ip6 { ICMP6 } else { ICMP };
    let fragment = if family == Family::Ip6 {
        Rule::new().equals(&Expression::network(6, 1), Field::Proto(FRAGMENT_HEADER))
    } else {
        // The flag "more fragments", or an offset.
        let fragmented = Expression::network(6, 2).masked(vec![0x3f, 0xff]);
        Rule::new().not_equals(&fragmented, Field::Port(0))
    };
    let mut rules = vec![
        // A bridge may flood frames to other hosts here; those hosts forward them.
        Rule::new().not_equals(&Expression::Meta(Meta::PktType), Field::Proto(PACKET_HOST)).drop(),
        Rule::new().set_mark(&Expression::Value(Field::Number(0))),
        Rule::new().equals(&Expression::l4proto(), Field::Proto(icmp)).goto(&ip.name("icmp")),
    ];
    rules.extend([
        Rule::new().jump(&ip.name("check_sources")),
        Rule::new().in_set(&ip.name("ranged"), &[Expression::daddr(family)]).jump(&ip.name("check_ranges")),
        fragment.goto(&ip.name("fragment")),
        Rule::new().set_mark(&mark_of(&ip.name("listeners"), fields.listener())),
        Rule::new().equals(&mark(), Field::Number(0)).drop().comment("no such listener"),
        Rule::new().equals(&Expression::l4proto(), Field::Proto(TCP)).goto(&ip.name("tcp")),
        Rule::new().goto(&ip.name("udp")),
    ]);
    rules
}

/// Fragments of datagrams. All fragments of one must reach the same target, and only the first has ports.
fn fragment(ip: IpFamily) -> Vec<Rule> {
    let mut rules = vec![
        Rule::new().not_equals(&Expression::l4proto(), Field::Proto(UDP)).drop(),
        Rule::new().set_mark(&mark_of(&ip.name("fragments"), vec![Expression::daddr(ip.family)])),
    ];
    for class in 0..SIZES.len() {
        let hash = vec![Expression::saddr(ip.family)];
        rules.push(slot(class, CLASS_MASK, slot_table_id(0, class, false), hash));
    }
    rules.push(Rule::new().goto(&ip.name("out")));
    rules
}

fn icmp(ip: IpFamily) -> Vec<Rule> {
    // Echo and neighbour discovery for this host; errors for a target.
    let (own, errors): (&[u8], &[u8]) =
        if ip.family == Family::Ip6 { (&[128, 135, 136], &[1, 2, 3, 4]) } else { (&[8], &[3, 11, 12]) };
    let kind = Expression::transport(0, 1);
    let mut rules: Vec<_> =
        own.iter().map(|number| Rule::new().equals(&kind, Field::Proto(*number)).accept()).collect();
    rules.extend(
        errors.iter().map(|number| Rule::new().equals(&kind, Field::Proto(*number)).goto(&ip.name("error"))),
    );
    rules.push(Rule::new().drop());
    rules
}

fn error(ip: IpFamily) -> Vec<Rule> {
    let fields = FlowFields::of_quoted(ip.family);
    let mut rules = vec![
        Rule::new().jump(&ip.name("check_sources")),
        Rule::new().set_mark(&mark_of(&ip.name("listeners"), fields.listener())),
        Rule::new().equals(&mark(), Field::Number(0)).drop(),
        Rule::new().set_mark(&mark_of(&ip.name("flows"), fields.flow())),
    ];
    rules.extend(by_hash(&fields));
    rules.push(Rule::new().goto(&ip.name("out")));
    rules
}

fn tcp(ip: IpFamily) -> Vec<Rule> {
    const FIN: u8 = 1;
    const SYN: u8 = 2;
    const RST: u8 = 4;
    const ACK: u8 = 16;
    let (flows, closing) = (ip.name("flows"), ip.name("closing"));
    let fields = FlowFields::of_packet(ip.family);
    let flags = |mask: u8| Expression::tcp_flags().masked(vec![mask]);
    let remember =
        |timeout| Rule::new().dynamic(DynamicOp::Update, &flows, &fields.flow(), &[mark()], Some(timeout));
    let mut rules = vec![
        Rule::new().equals(&flags(FIN | SYN | RST | ACK), Field::Proto(SYN)).goto(&ip.name("open")),
        Rule::new().not_equals(&flags(FIN | RST), Field::Proto(0)).dynamic(
            DynamicOp::Update,
            &closing,
            &fields.flow(),
            &[],
            Some(TCP_BRIEF),
        ),
        Rule::new().set_mark(&mark_of(&flows, fields.flow())),
    ];
    rules.extend(by_hash(&fields));
    rules.extend([
        remember(TCP_IDLE),
        // After the line above, because the last timeout counts.
        Rule::new().in_set(&closing, &fields.flow()).dynamic(
            DynamicOp::Update,
            &flows,
            &fields.flow(),
            &[mark()],
            Some(TCP_BRIEF),
        ),
        Rule::new().goto(&ip.name("out")),
    ]);
    rules
}

/// The first packet of a connection: it always chooses a target by the hash, even if the client has used the port before.
fn open(ip: IpFamily) -> Vec<Rule> {
    let (flows, closing) = (ip.name("flows"), ip.name("closing"));
    let fields = FlowFields::of_packet(ip.family);
    let mut rules = vec![
        forget(&flows, &fields),
        Rule::new().dynamic(DynamicOp::Delete, &closing, &fields.flow(), &[], None),
    ];
    rules.extend(by_hash(&fields));
    rules.extend([
        Rule::new().dynamic(DynamicOp::Update, &flows, &fields.flow(), &[mark()], Some(TCP_BRIEF)),
        Rule::new().goto(&ip.name("out")),
    ]);
    rules
}

fn forget(flows: &str, fields: &FlowFields) -> Rule {
    forget_if(Rule::new(), flows, fields)
}

fn forget_if(matched: Rule, flows: &str, fields: &FlowFields) -> Rule {
    // The kernel requires data even to delete from a map, and ignores it.
    matched.dynamic(DynamicOp::Delete, flows, &fields.flow(), &[mark()], None)
}

/// Datagrams stay on their target only while it has slots: there is no other sign that an exchange is over.
fn udp(ip: IpFamily) -> Vec<Rule> {
    let flows = ip.name("flows");
    let fields = FlowFields::of_packet(ip.family);
    let held = || vec![Expression::MapWord { map: flows.clone(), key: fields.flow() }, mark()];
    let mut rules = vec![
        forget_if(Rule::new().not_in_set("usable", &held()), &flows, &fields),
        Rule::new().set_mark(&mark_of(&flows, fields.flow())),
    ];
    rules.extend(by_hash(&fields));
    rules.extend([
        Rule::new().dynamic(DynamicOp::Update, &flows, &fields.flow(), &[mark()], Some(UDP_IDLE)),
        Rule::new().goto(&ip.name("out")),
    ]);
    rules
}

/// Replaces a slot table's id in the mark by a target's, and leaves a target's id unchanged.
fn by_hash(fields: &FlowFields) -> Vec<Rule> {
    let mut rules = Vec::new();
    for class in 0..SIZES.len() {
        let both = vec![fields.saddr.clone(), fields.sport.clone()];
        rules.push(slot(class, KIND_MASK | TARGET, slot_table_id(0, class, false), both));
        rules.push(slot(
            class,
            KIND_MASK | TARGET,
            slot_table_id(0, class, true),
            vec![fields.saddr.clone()],
        ));
    }
    rules
}

fn slot(class: usize, mask: u32, kind: u32, hashed: Vec<Expression>) -> Rule {
    let hash = Expression::Jhash {
        of: hashed,
        modulus: SIZES.get(class).copied().unwrap_or(1),
        seed: SEED,
        offset: 0,
    };
    Rule::new()
        .equals(&mark().masked((mask | TARGET).to_ne_bytes().to_vec()), Field::Number(kind))
        .set_mark(&mark_of(&slot_map(class), vec![mark(), hash]))
}

fn out(ip: IpFamily, index: u32) -> Vec<Rule> {
    vec![
        Rule::new()
            .equals(&mark(), Field::Number(LOCAL_TARGET))
            .set_mark(&Expression::Value(Field::Number(0)))
            .accept(),
        // The kernel decrements the hop limit, so a loop ends.
        Rule::new().map(&ip.name("targets"), &[mark()]).forward(ip.family, index),
        Rule::new().drop().comment("no target"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table that is replaced forgets its flows.
    #[test]
    fn reworded_comment_keeps_the_table() {
        let reworded = rules(1).into_iter().map(|(chain, rule)| (chain, rule.comment("reworded"))).collect();
        assert_eq!(shape(reworded), shape(rules(1)));
        assert_ne!(shape(rules(2)), shape(rules(1)), "the index of the device");
    }
}

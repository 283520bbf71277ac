// SPDX-License-Identifier: Apache-2.0
//! The skeleton of the table: sets, chains and rules, the same whatever is served. Pure.
//!
//! A packet's mark carries what has been found so far: the id of its listener's table, then the id of its target. It is zero
//! again when a packet goes on to this host.

use std::time::Duration;

use steerage_nft::{
    Batch, Chain, ChainType, DataType, DynamicOp, Expression, Family, Field, Hook, Meta, Rule, Set, Table,
};

use super::state::{CLASS_MASK, KIND_MASK, LOCAL_TARGET, TARGET, slot_table_id};
use crate::hash;
use crate::slot_table::SIZES;

/// The seed of the hash over source address and port: the same for all hosts and for ever.
const SEED: u32 = 0x5354_4545;
/// Flows that each family's map can hold. Full, new flows follow the hash alone.
const FLOWS: u32 = 524_288;
/// How long a connection that says nothing is kept on its target.
const TCP_IDLE: Duration = Duration::from_hours(1);
/// How long after its first packet, and after its client closed it.
const TCP_BRIEF: Duration = Duration::from_mins(1);
/// How long an exchange of datagrams is kept on its target.
const UDP_IDLE: Duration = Duration::from_mins(2);

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP6: u8 = 58;
const FRAGMENT_HEADER: u8 = 44;
const PACKET_HOST: u8 = 0;

/// The table.
pub(crate) fn table() -> Table {
    Table::new(Family::Netdev, "steerage-edge")
}

/// The map that holds the slots of a class.
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

/// IPv4 and IPv6.
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

/// Where the addresses and ports of a client's packet lie.
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

    /// In the packet that an ICMP error quotes, which is a target's answer to the client: its ends are the other way round.
    fn of_quoted(family: Family) -> Self {
        // Behind the eight bytes of the error's own header.
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

fn mac() -> Expression {
    Expression::link(6, 6)
}

/// Everything that creates the table, with the device's name and index in it.
pub(crate) fn build(batch: &mut Batch, device: &str, index: u32) {
    let table = table();
    batch.destroy_table(&table).add_table(&table, Some(&comment(device, index)));
    for set in sets() {
        batch.add_set(&table, &set);
    }
    for side in IP_FAMILIES {
        for chain in ["fragment", "error", "icmp", "open", "tcp", "udp", "out", "vip"] {
            batch.add_chain(&table, &Chain::regular(side.name(chain)));
        }
    }
    let hook = Hook::Ingress(vec![device.to_owned()]);
    batch.add_chain(&table, &Chain::base("ingress", ChainType::Filter, hook, 0));
    for (chain, rule) in rules(index) {
        batch.add_rule(&table, &chain, &rule);
    }
}

/// Names the device and all that [`build`] makes: a table with another comment is made anew.
pub(crate) fn comment(device: &str, index: u32) -> String {
    let shape = format!("{:?}{:?}", sets(), rules(index));
    format!("steerage-edge on {device}, shape {:016x}", hash::bytes(shape.as_bytes()))
}

/// The number of rules of the table.
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
    for side in IP_FAMILIES {
        let address = side.address;
        let listener = [address, DataType::InetProto, DataType::InetService];
        let flow = [address, DataType::InetService, address, DataType::InetProto, DataType::InetService];
        sets.extend([
            Set::new(side.name("vips"), &[address]),
            Set::new(side.name("local"), &[address]),
            Set::new(side.name("ranged"), &[address]),
            Set::new(side.name("ranges"), &[address, address]).interval(),
            Set::new(side.name("sources"), &[DataType::EtherAddr, address]).interval(),
            Set::new(side.name("listeners"), &listener).maps_to(&[mark]),
            Set::new(side.name("fragments"), &[address]).maps_to(&[mark]),
            Set::new(side.name("targets"), &[mark]).maps_to(&[address]),
            Set::new(side.name("flows"), &flow).maps_to(&[mark]).expiring(None).dynamic().size(FLOWS),
            Set::new(side.name("closing"), &flow).expiring(Some(TCP_BRIEF)).dynamic().size(FLOWS),
        ]);
    }
    sets
}

pub(crate) fn rules(index: u32) -> Vec<(String, Rule)> {
    let mut all = Vec::new();
    for side in IP_FAMILIES {
        let ethertype = if side.family == Family::Ip6 { 0x86dd_u16 } else { 0x0800 };
        let gate = Rule::new()
            .equals_bytes(&Expression::Meta(Meta::Protocol), &ethertype.to_be_bytes())
            .in_set(&side.name("vips"), &[Expression::daddr(side.family)])
            .goto(&side.name("vip"));
        all.push(("ingress".to_owned(), gate));
        let chains = [
            ("vip", vip(side)),
            ("fragment", fragment(side)),
            ("icmp", icmp(side)),
            ("error", error(side)),
            ("tcp", tcp(side)),
            ("open", open(side)),
            ("udp", udp(side)),
            ("out", out(side, index)),
        ];
        for (chain, rules) in chains {
            all.extend(rules.into_iter().map(|rule| (side.name(chain), rule)));
        }
    }
    all
}

/// All that comes for a virtual address.
fn vip(side: IpFamily) -> Vec<Rule> {
    let family = side.family;
    let ends = FlowFields::of_packet(family);
    let daddr = || vec![Expression::daddr(family)];
    let icmp = if family == Family::Ip6 { ICMP6 } else { ICMP };
    let fragment = if family == Family::Ip6 {
        Rule::new().equals(&Expression::network(6, 1), Field::Proto(FRAGMENT_HEADER))
    } else {
        // More fragments, or not the first.
        let fragmented = Expression::network(6, 2).masked(vec![0x3f, 0xff]);
        Rule::new().not_equals(&fragmented, Field::Port(0))
    };
    let mut rules = vec![
        // A bridge also floods frames for others; the host that they are for forwards them.
        Rule::new().not_equals(&Expression::Meta(Meta::PktType), Field::Proto(PACKET_HOST)).drop(),
        Rule::new().set_mark(&Expression::Value(Field::Number(0))),
        Rule::new().equals(&Expression::l4proto(), Field::Proto(icmp)).goto(&side.name("icmp")),
    ];
    rules.extend(guards(side));
    rules.extend([
        Rule::new()
            .in_set(&side.name("ranged"), &daddr())
            .not_in_set(&side.name("ranges"), &[Expression::daddr(family), Expression::saddr(family)])
            .drop()
            .comment("outside the source ranges"),
        fragment.goto(&side.name("fragment")),
        Rule::new().set_mark(&mark_of(&side.name("listeners"), ends.listener())),
        Rule::new().equals(&mark(), Field::Number(0)).drop().comment("no such listener"),
        Rule::new().equals(&Expression::l4proto(), Field::Proto(TCP)).goto(&side.name("tcp")),
        Rule::new().goto(&side.name("udp")),
    ]);
    rules
}

/// What has been spread already is not spread again.
fn guards(side: IpFamily) -> Vec<Rule> {
    let daddr = || vec![Expression::daddr(side.family)];
    let from = || vec![mac(), Expression::saddr(side.family)];
    vec![
        Rule::new()
            .in_set("peers", &[mac()])
            .not_in_set(&side.name("sources"), &from())
            .in_set(&side.name("local"), &daddr())
            .accept()
            .comment("another edge host chose this one"),
        Rule::new()
            .in_set("peers", &[mac()])
            .not_in_set(&side.name("sources"), &from())
            .drop()
            .comment("never spread twice"),
        Rule::new()
            .in_set("nodes", &[mac()])
            .not_in_set(&side.name("sources"), &from())
            .drop()
            .comment("bounced by a node"),
    ]
}

/// Fragments of datagrams: all parts of one must meet, and only the first shows ports.
fn fragment(side: IpFamily) -> Vec<Rule> {
    let mut rules = vec![
        Rule::new().not_equals(&Expression::l4proto(), Field::Proto(UDP)).drop(),
        Rule::new().set_mark(&mark_of(&side.name("fragments"), vec![Expression::daddr(side.family)])),
    ];
    for class in 0..SIZES.len() {
        let hash = vec![Expression::saddr(side.family)];
        rules.push(slot(class, CLASS_MASK, slot_table_id(0, class, false), hash));
    }
    rules.push(Rule::new().goto(&side.name("out")));
    rules
}

fn icmp(side: IpFamily) -> Vec<Rule> {
    // Echo and neighbour discovery for this host; errors for a target.
    let (own, errors): (&[u8], &[u8]) =
        if side.family == Family::Ip6 { (&[128, 135, 136], &[1, 2, 3, 4]) } else { (&[8], &[3, 11, 12]) };
    let kind = Expression::transport(0, 1);
    let mut rules: Vec<_> =
        own.iter().map(|number| Rule::new().equals(&kind, Field::Proto(*number)).accept()).collect();
    rules.extend(
        errors
            .iter()
            .map(|number| Rule::new().equals(&kind, Field::Proto(*number)).goto(&side.name("error"))),
    );
    rules.push(Rule::new().drop());
    rules
}

fn error(side: IpFamily) -> Vec<Rule> {
    let ends = FlowFields::of_quoted(side.family);
    let mut rules = guards(side);
    rules.extend([
        Rule::new().set_mark(&mark_of(&side.name("listeners"), ends.listener())),
        Rule::new().equals(&mark(), Field::Number(0)).drop(),
        Rule::new().set_mark(&mark_of(&side.name("flows"), ends.flow())),
    ]);
    rules.extend(by_hash(&ends));
    rules.push(Rule::new().goto(&side.name("out")));
    rules
}

fn tcp(side: IpFamily) -> Vec<Rule> {
    const FIN: u8 = 1;
    const SYN: u8 = 2;
    const RST: u8 = 4;
    const ACK: u8 = 16;
    let (flows, closing) = (side.name("flows"), side.name("closing"));
    let ends = FlowFields::of_packet(side.family);
    let flags = |mask: u8| Expression::tcp_flags().masked(vec![mask]);
    let remember =
        |timeout| Rule::new().dynamic(DynamicOp::Update, &flows, &ends.flow(), &[mark()], Some(timeout));
    let mut rules = vec![
        Rule::new().equals(&flags(FIN | SYN | RST | ACK), Field::Proto(SYN)).goto(&side.name("open")),
        Rule::new().not_equals(&flags(FIN | RST), Field::Proto(0)).dynamic(
            DynamicOp::Update,
            &closing,
            &ends.flow(),
            &[],
            Some(TCP_BRIEF),
        ),
        Rule::new().set_mark(&mark_of(&flows, ends.flow())),
    ];
    rules.extend(by_hash(&ends));
    rules.extend([
        remember(TCP_IDLE),
        // After it: the last word counts.
        Rule::new().in_set(&closing, &ends.flow()).dynamic(
            DynamicOp::Update,
            &flows,
            &ends.flow(),
            &[mark()],
            Some(TCP_BRIEF),
        ),
        Rule::new().goto(&side.name("out")),
    ]);
    rules
}

/// A first packet: chooses anew even where its client has used the port before.
fn open(side: IpFamily) -> Vec<Rule> {
    let (flows, closing) = (side.name("flows"), side.name("closing"));
    let ends = FlowFields::of_packet(side.family);
    let mut rules = vec![
        forget(&flows, &ends),
        Rule::new().dynamic(DynamicOp::Delete, &closing, &ends.flow(), &[], None),
    ];
    rules.extend(by_hash(&ends));
    rules.extend([
        Rule::new().dynamic(DynamicOp::Update, &flows, &ends.flow(), &[mark()], Some(TCP_BRIEF)),
        Rule::new().goto(&side.name("out")),
    ]);
    rules
}

/// Deletes a flow.
fn forget(flows: &str, ends: &FlowFields) -> Rule {
    forget_if(Rule::new(), flows, ends)
}

fn forget_if(matched: Rule, flows: &str, ends: &FlowFields) -> Rule {
    // The kernel wants data even to delete from a map; it does not look at them.
    matched.dynamic(DynamicOp::Delete, flows, &ends.flow(), &[mark()], None)
}

/// Datagrams stay on their target only while it is usable: nothing but its health tells when an exchange is over.
fn udp(side: IpFamily) -> Vec<Rule> {
    let flows = side.name("flows");
    let ends = FlowFields::of_packet(side.family);
    let held = || vec![Expression::MapWord { map: flows.clone(), key: ends.flow() }, mark()];
    let mut rules = vec![
        forget_if(Rule::new().not_in_set("usable", &held()), &flows, &ends),
        Rule::new().set_mark(&mark_of(&flows, ends.flow())),
    ];
    rules.extend(by_hash(&ends));
    rules.extend([
        Rule::new().dynamic(DynamicOp::Update, &flows, &ends.flow(), &[mark()], Some(UDP_IDLE)),
        Rule::new().goto(&side.name("out")),
    ]);
    rules
}

/// From a table's id in the mark to a target's; leaves a target's id alone.
fn by_hash(ends: &FlowFields) -> Vec<Rule> {
    let mut rules = Vec::new();
    for class in 0..SIZES.len() {
        let both = vec![ends.saddr.clone(), ends.sport.clone()];
        rules.push(slot(class, KIND_MASK | TARGET, slot_table_id(0, class, false), both));
        rules.push(slot(class, KIND_MASK | TARGET, slot_table_id(0, class, true), vec![ends.saddr.clone()]));
    }
    rules
}

fn slot(class: usize, mask: u32, kind: u32, hashed: Vec<Expression>) -> Rule {
    let hash = Expression::Jhash { of: hashed, modulus: SIZES.get(class).copied().unwrap_or(1), seed: SEED };
    Rule::new()
        .equals(&mark().masked((mask | TARGET).to_ne_bytes().to_vec()), Field::Number(kind))
        .set_mark(&mark_of(&slot_map(class), vec![mark(), hash]))
}

fn out(side: IpFamily, index: u32) -> Vec<Rule> {
    vec![
        Rule::new()
            .equals(&mark(), Field::Number(LOCAL_TARGET))
            .set_mark(&Expression::Value(Field::Number(0)))
            .accept(),
        // The kernel takes one from the hop limit, and drops what has none left: no frame goes round for ever.
        Rule::new().map(&side.name("targets"), &[mark()]).forward(side.family, index),
        Rule::new().drop().comment("no target"),
    ]
}

// SPDX-License-Identifier: Apache-2.0
//! Follows a live packet through all tables of the host: `steerage-agent explain --trace`. The command does this itself, and not the
//! agent.
//!
//! A table of its own marks packets before any other chain sees them. The kernel deletes it with its owner's socket, however the
//! process ends.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_model::{Family, Protocol};
use steerage_nft::{
    Batch, Chain, ChainType, Error, Expression, Field, Hook, Nft, Rule, Table, TraceEvent, TraceStep, Tracer,
};

use super::FAMILIES;
use crate::explain::{KnownRules, PacketQuery, TracedPacket};

/// How the names of the tables begin that mark packets.
const NAME: &str = "steerage-trace";
/// Before all others: the lowest priority is the kernel's own.
const FIRST: i32 = i32::MIN + 1;
/// Packets that are marked in a second, and at once: each may take hundreds of messages.
const RATE: (u64, u32) = (10, 5);
/// A packet of which nothing came for this long has left the rules.
const QUIET: Duration = Duration::from_millis(500);
/// SYN and ACK among the flags of TCP: a packet with SYN alone opens a connection.
const FLAGS: u8 = 0x12;
const SYN: u8 = 0x02;

/// Waits for the next packet of the query, and follows it. `None` if none came in time. A packet of TCP is one that opens a
/// connection: the others pass no rule that translates.
pub fn trace_packet(query: PacketQuery, timeout: Duration) -> Result<Option<TracedPacket>, Error> {
    let end = Instant::now() + timeout;
    let mut tracer = Tracer::open()?;
    // The table goes with this socket.
    let mut owner = Nft::open()?;
    owner.commit(marking(query))?;
    let mut packets: BTreeMap<u32, (Vec<TraceStep>, Instant)> = BTreeMap::new();
    loop {
        let now = Instant::now();
        let is_done = |(steps, last): &(Vec<TraceStep>, Instant)| {
            steps.last().is_some_and(TracedPacket::is_end) || now.duration_since(*last) >= QUIET
        };
        if let Some(id) = packets.iter().find(|(_, packet)| is_done(packet)).map(|(id, _)| *id) {
            let steps = packets.remove(&id).map(|(steps, _)| steps).unwrap_or_default();
            let rules = known_rules(&mut owner, &steps)?;
            return Ok(Some(TracedPacket { steps, rules, interfaces: interfaces() }));
        }
        if packets.is_empty() && now >= end {
            return Ok(None);
        }
        let wait = if packets.is_empty() { end - now } else { QUIET / 4 };
        if !tracer.wait(wait)? {
            continue;
        }
        for step in tracer.receive()?.unwrap_or_default() {
            if !step.table.name.starts_with(NAME) {
                let packet = packets.entry(step.packet).or_insert_with(|| (Vec::new(), now));
                packet.0.push(step);
                packet.1 = Instant::now();
            }
        }
    }
}

/// Creates the table that marks packets of the query.
fn marking(query: PacketQuery) -> Batch {
    let family = family(query);
    let table = Table::new(family, format!("{NAME}-{}", std::process::id()));
    let address = |addr: IpAddr| Field::from(addr);
    let mut rule = Rule::new()
        .equals(&Expression::daddr(family), address(query.frontend.addr))
        .equals(&Expression::l4proto(), Field::Proto(query.frontend.protocol.number()))
        .equals(&Expression::dport(), Field::Port(query.frontend.port));
    if let Some(from) = query.from {
        rule = rule.equals(&Expression::saddr(family), address(from));
    }
    if query.frontend.protocol == Protocol::Tcp {
        rule = rule.equals_bytes(&Expression::tcp_flags().masked(vec![FLAGS]), &[SYN]);
    }
    let rule = rule.limit_per_second(RATE.0, RATE.1).trace();
    let mut batch = Batch::new();
    batch.add_owned_table(&table);
    for (name, hook) in [("received", Hook::Prerouting), ("sent", Hook::Output)] {
        batch
            .add_chain(&table, &Chain::base(name, ChainType::Filter, hook, FIRST))
            .add_rule(&table, name, &rule);
    }
    batch
}

fn family(query: PacketQuery) -> steerage_nft::Family {
    let [(_, v4), (_, v6)] = FAMILIES;
    if query.frontend.family() == Family::V4 { v4 } else { v6 }
}

/// The rules of all tables that a packet met. One that has gone since is not known.
fn known_rules(nft: &mut Nft, steps: &[TraceStep]) -> Result<KnownRules, Error> {
    let mut known = KnownRules::default();
    for step in steps {
        if let TraceEvent::Rule(handle, _) = step.event
            && !known.contains(&step.table, handle)
        {
            known.add(&step.table, nft.rules(&step.table)?);
        }
    }
    Ok(known)
}

/// The names of the interfaces of the network namespace.
fn interfaces() -> BTreeMap<u32, String> {
    let all = nix::net::if_::if_nameindex();
    let named = all
        .iter()
        .flatten()
        .map(|interface| (interface.index(), interface.name().to_string_lossy().into_owned()));
    named.collect()
}

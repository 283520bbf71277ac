// SPDX-License-Identifier: Apache-2.0
//! The sets and rules of session affinity: which endpoint a client had.
//!
//! The first packet of a connection makes its client a candidate: for a few seconds, so that connections which a client opens at once
//! have one endpoint. The client is remembered in the map `affinity` once the endpoint has answered and the client has gone on: a
//! flood of forged packets fills the candidates only. A namespace may add so many clients in the time of the timeout: a flood of real
//! connections to one tenant's Services takes no room from the others.

use std::time::Duration;

use steerage_nft::{
    Chain, ChainType, Ct, DataType, Direction, DynamicOp, Expression, Family, Field, Hook, Limit, Rule, Set,
};

use super::chains::RuleBuilder;
use super::layout::{SetId, Side, address_type};
use super::ruleset_chain::{RulesetChain, with_digest};
use crate::hash::{ENDPOINT_MODULUS, ENDPOINT_SEED};
use crate::plan::AFFINITY_TIMEOUTS;

/// The map that packets fill: frontend and client, to the hash of the client's endpoint.
pub(super) const AFFINITY: &str = "affinity";
/// The same for clients of connections that have just begun.
const CANDIDATES: &str = "candidates";
/// Clients that are remembered.
const AFFINITY_SIZE: u32 = 1 << 19;
/// Clients whose connections have just begun. The shortest timeout of affinity is longer than theirs.
const CANDIDATES_SIZE: u32 = 1 << 16;
const CANDIDATES_TIMEOUT: Duration = Duration::from_secs(3);
/// Clients that a namespace may add at once and in the time of a timeout: together an eighth of the map.
const NAMESPACE_CLIENTS: u32 = 1 << 15;
/// Namespaces whose clients are counted.
const NAMESPACES: u32 = 1 << 14;
/// FIN, RST and PSH: each client's connection has a packet with one of them, and few packets of a long one do.
const TCP_FLAGS: u8 = 1 | 4 | 8;
/// Before translation, so that the packet still has the address of the frontend, and after conntrack.
const BEFORE_NAT: i32 = -150;

/// The counters of a namespace's new clients, for one timeout.
fn counters(seconds: u32) -> String {
    format!("new-clients-{seconds}")
}

/// The maps and sets that packets fill.
pub(super) fn dynamic_sets(family: Family) -> Vec<(String, Set)> {
    let addr = address_type(family);
    let clients = |name: &str, size| {
        Set::new(name, &[addr, DataType::InetProto, DataType::InetService, addr])
            .maps_to(&[DataType::Mark])
            .expiring(None)
            .dynamic()
            .size(size)
    };
    let counted = |seconds: u32| {
        let set = Set::new(counters(seconds), &[DataType::Mark]).expiring(None).dynamic().size(NAMESPACES);
        (counters(seconds), set)
    };
    let maps = [(AFFINITY, AFFINITY_SIZE), (CANDIDATES, CANDIDATES_SIZE)];
    maps.map(|(name, size)| (name.to_owned(), clients(name, size)))
        .into_iter()
        .chain(AFFINITY_TIMEOUTS.map(counted))
        .collect()
}

/// The names of the base chains that only a table with affinity in use has: every packet passes them.
pub(super) const BASE_CHAINS: [(&str, Hook); 2] =
    [("remember-received", Hook::Prerouting), ("remember-sent", Hook::Output)];

impl RuleBuilder<'_> {
    /// Base chains that see the packets of established connections.
    pub(super) fn remembering_chains(&self) -> Vec<RulesetChain> {
        let chain = |(name, hook): (&str, Hook)| {
            with_digest(name, Chain::base(name, ChainType::Filter, hook, BEFORE_NAT), self.established())
        };
        BASE_CHAINS.map(chain).into()
    }

    fn client(&self) -> Vec<Expression> {
        let mut client = self.original_frontend();
        client.push(Expression::Ct(Ct::Source(self.family, Direction::Original)));
        client
    }

    /// TCP and SCTP: packets of the client of an assured connection, which a forged packet cannot open. UDP: answers, because most of
    /// its clients send one datagram from each socket.
    fn established(&self) -> Vec<Rule> {
        let protocol = |number| Rule::new().equals(&Expression::l4proto(), Field::Proto(number));
        let is_assured = |rule: Rule| {
            rule.in_set(&SetId::Affine.name(), &self.frontend())
                .has_any(Expression::Ct(Ct::Status), Ct::ASSURED)
                .goto("remember")
        };
        let reply = [Direction::Reply as u8];
        vec![
            is_assured(protocol(libc_protocol::TCP).has_any_byte(Expression::tcp_flags(), TCP_FLAGS)),
            is_assured(protocol(libc_protocol::SCTP)),
            protocol(libc_protocol::UDP)
                .has_any(Expression::Ct(Ct::Status), Ct::DNAT)
                .equals_bytes(&Expression::Ct(Ct::Direction), &reply)
                .in_set(&SetId::Affine.name(), &self.original_frontend())
                .goto("remember"),
        ]
    }

    /// Remembers the client of a connection, or keeps it for another timeout, unless its namespace has too many new ones.
    pub(super) fn remember(&self) -> Vec<Rule> {
        let frontend = self.original_frontend();
        let known = Expression::MapWord { map: AFFINITY.to_owned(), key: self.client() };
        // Each hash is below the modulus.
        let is_known = Rule::new().not_equals(&known, Field::Number(ENDPOINT_MODULUS));
        let namespace = Expression::MapWord { map: SetId::Namespaces.name(), key: frontend.clone() };
        let too_many = |seconds: u32| {
            Rule::new()
                .in_set(&SetId::AffineFor(seconds).name(), &frontend)
                .dynamic_limit(
                    &counters(seconds),
                    std::slice::from_ref(&namespace),
                    timeout(seconds),
                    limit(seconds),
                )
                .return_()
        };
        std::iter::once(is_known.goto("keep"))
            .chain(AFFINITY_TIMEOUTS.map(too_many))
            .chain([Rule::new().goto("keep")])
            .collect()
    }

    /// Records the endpoint of a connection's client, or restarts the timeout.
    pub(super) fn keep(&self) -> Vec<Rule> {
        let endpoint = Expression::Jhash {
            of: vec![
                Expression::Ct(Ct::Source(self.family, Direction::Reply)),
                Expression::Ct(Ct::SourcePort(Direction::Reply)),
            ],
            modulus: ENDPOINT_MODULUS,
            seed: ENDPOINT_SEED,
            offset: 0,
        };
        let record = |seconds: u32| {
            let endpoint = std::slice::from_ref(&endpoint);
            Rule::new()
                .in_set(&SetId::AffineFor(seconds).name(), &self.original_frontend())
                .dynamic(DynamicOp::Update, AFFINITY, &self.client(), endpoint, Some(timeout(seconds)))
                .return_()
        };
        AFFINITY_TIMEOUTS.map(record).into()
    }

    /// Makes the client of a first packet a candidate. The packet has the address of its endpoint here.
    pub(super) fn propose(&self) -> Vec<Rule> {
        let endpoint = Expression::Jhash {
            of: vec![Expression::daddr(self.family), Expression::dport()],
            modulus: ENDPOINT_MODULUS,
            seed: ENDPOINT_SEED,
            offset: 0,
        };
        let timeout = Some(CANDIDATES_TIMEOUT);
        vec![
            Rule::new()
                .dynamic(DynamicOp::Update, CANDIDATES, &self.client(), &[endpoint], timeout)
                .return_(),
        ]
    }

    /// Sends a client to its last endpoint if the frontend still has that; else forgets it.
    pub(super) fn recall(&self, side: Side) -> Vec<Rule> {
        let sticky = SetId::Sticky(side);
        let mut client = self.frontend();
        client.push(Expression::saddr(self.family));
        let mut rules = Vec::new();
        for map in [AFFINITY, CANDIDATES] {
            let mut key = vec![Expression::MapWord { map: map.to_owned(), key: client.clone() }];
            key.extend(self.frontend());
            rules.push(Rule::new().map(&sticky.name(), &key).dnat(self.family));
            let anything = [Expression::Meta(steerage_nft::Meta::Mark)];
            rules.push(Rule::new().dynamic(DynamicOp::Delete, map, &client, &anything, None));
        }
        rules.push(Rule::new().return_());
        rules
    }
}

fn timeout(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

/// More than [`NAMESPACE_CLIENTS`] at once and in so many seconds, in a unit that `nft` knows.
fn limit(seconds: u32) -> Limit {
    let unit = [86_400, 3_600, 60, 1].into_iter().find(|unit| *unit <= seconds).unwrap_or(1);
    let packets = (u64::from(NAMESPACE_CLIENTS) * u64::from(unit)).div_ceil(u64::from(seconds));
    Limit { packets, unit: u64::from(unit), burst: NAMESPACE_CLIENTS, over: true }
}

/// IPPROTO_*.
mod libc_protocol {
    pub(super) const TCP: u8 = 6;
    pub(super) const UDP: u8 = 17;
    pub(super) const SCTP: u8 = 132;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_adds_its_clients_once_in_a_timeout() {
        for seconds in AFFINITY_TIMEOUTS {
            let Limit { packets, unit, burst, over } = limit(seconds);
            assert!(over && burst == NAMESPACE_CLIENTS && [1, 60, 3600, 86_400].contains(&unit));
            let in_a_timeout = packets * u64::from(seconds) / unit;
            let excess = in_a_timeout - u64::from(NAMESPACE_CLIENTS);
            assert!(excess <= u64::from(seconds), "{seconds}: {in_a_timeout}");
        }
    }
}

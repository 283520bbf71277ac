// SPDX-License-Identifier: Apache-2.0
//! The sets and rules of session affinity: which endpoint a client had.
//!
//! The first packet of a connection makes its client a candidate: for a few seconds, so that connections which a client opens at once
//! have one endpoint. The client is remembered in the map `affinity` once the endpoint has answered and the client has gone on: a
//! flood of forged packets fills the candidates only. Most UDP clients never go on, so an answer is enough there; but forged packets
//! are answered, too, and such clients share a small part of their namespace's places.
//!
//! A namespace may add so many clients at once and in the time of a timeout, divided by the number of timeouts that it uses: a flood
//! of real connections to one tenant's Services takes no room from the others.

use std::time::Duration;

use steerage_nft::{
    Chain, ChainType, Ct, DataType, Direction, DynamicOp, Expression, Family, Field, Hook, Limit, Rule, Set,
};

use super::chains::RuleBuilder;
use super::features::Feature;
use super::layout::{SetId, Side, address_type};
use super::ruleset_chain::{RulesetChain, with_digest};
use crate::hash::{ENDPOINT_MODULUS, ENDPOINT_SEED};
use crate::plan::AFFINITY_TIMEOUTS;

/// The map that packets fill: frontend and client, to the hash of the client's endpoint.
pub(super) const AFFINITY: &str = "affinity";
/// The same for clients of connections that have just begun.
pub(super) const CANDIDATES: &str = "candidates";
/// The counter of packets that the limit of affinity concerns: their client is not remembered, because its namespace has added too
/// many. The metric is called so, too; the counter keeps its name, which is part of the layout.
pub const AFFINITY_LIMITED: &str = "not-remembered";
/// Clients that are remembered.
const AFFINITY_SIZE: u32 = 1 << 19;
/// Clients whose connections have just begun. The shortest timeout of affinity is longer than theirs.
const CANDIDATES_SIZE: u32 = 1 << 16;
const CANDIDATES_TIMEOUT: Duration = Duration::from_secs(3);
/// Clients that a namespace may add at once and in the time of its timeouts: together an eighth of the map.
const NAMESPACE_CLIENTS: u32 = 1 << 15;
/// The part of them that may be known by an answer alone.
const ANSWERED: u32 = 8;
/// By how much the places of a namespace are divided: at least the number of timeouts that its Services have.
pub(super) const SHARES: [u32; 4] = [1, 2, 4, 18];
const _: () = assert!(SHARES[3] as usize == AFFINITY_TIMEOUTS.len(), "a namespace may use all timeouts");
/// Namespaces whose clients are counted.
const NAMESPACES: u32 = 1 << 14;
/// FIN, RST and PSH: each client's connection has a packet with one of them, and few packets of a long one do.
const TCP_FLAGS: u8 = 1 | 4 | 8;
/// Before translation, so that the packet still has the address of the frontend, and after conntrack.
const BEFORE_NAT: i32 = -150;

/// Which clients are counted.
#[derive(Debug, Clone, Copy)]
enum Counted {
    /// All that are remembered.
    All,
    /// Those of which only an answer is known.
    Answered,
}

impl Counted {
    /// The counters of a namespace's new clients, for one timeout.
    fn counters(self, seconds: u32) -> String {
        match self {
            Self::All => format!("new-clients-{seconds}"),
            Self::Answered => format!("answered-{seconds}"),
        }
    }

    /// The chain for namespaces whose places are divided so.
    fn chain(self, shares: u32) -> String {
        match self {
            Self::All => format!("remember-{shares}"),
            Self::Answered => format!("answered-by-{shares}"),
        }
    }

    /// The clients of a namespace.
    fn clients(self) -> u32 {
        match self {
            Self::All => NAMESPACE_CLIENTS,
            Self::Answered => NAMESPACE_CLIENTS / ANSWERED,
        }
    }
}

/// The division of a namespace's places among this number of timeouts.
pub(super) fn shares(timeouts: usize) -> u32 {
    let enough = |shares: &u32| usize::try_from(*shares).is_ok_and(|shares| shares >= timeouts);
    SHARES.into_iter().find(enough).unwrap_or(SHARES[SHARES.len() - 1])
}

/// The maps and sets that packets fill, each with the set without which nothing fills it.
pub(super) fn dynamic_sets(family: Family) -> Vec<(SetId, Set)> {
    let addr = address_type(family);
    let clients = |name: &str, size| {
        Set::new(name, &[addr, DataType::InetProto, DataType::InetService, addr])
            .maps_to(&[DataType::Mark])
            .expiring(None)
            .dynamic()
            .size(size)
    };
    let counted = |(counted, seconds): (Counted, u32)| {
        let set = Set::new(counted.counters(seconds), &[DataType::Mark]).expiring(None).dynamic();
        (SetId::AffineFor(seconds), set.size(NAMESPACES))
    };
    let both = |seconds| [(Counted::All, seconds), (Counted::Answered, seconds)];
    let maps = [(AFFINITY, AFFINITY_SIZE), (CANDIDATES, CANDIDATES_SIZE)];
    maps.map(|(name, size)| (SetId::Affine, clients(name, size)))
        .into_iter()
        .chain(AFFINITY_TIMEOUTS.into_iter().flat_map(both).map(counted))
        .collect()
}

/// The names of its chains but for base chains and those of [`Counted::chain`].
const CHAINS: [&str; 7] =
    ["keep", "remember-used", "remember", "answered", "propose", "recall-cluster", "recall-local"];
/// The names of the base chains that only a table with affinity in use has: every packet passes them.
pub(super) const BASE_CHAINS: [(&str, Hook); 2] =
    [("remember-received", Hook::Prerouting), ("remember-sent", Hook::Output)];

/// Whether this is the name of a chain that only a table with affinity in use has.
pub(super) fn is_chain(name: &str) -> bool {
    let divided = |counted: Counted| SHARES.into_iter().any(|shares| counted.chain(shares) == name);
    CHAINS.contains(&name)
        || BASE_CHAINS.iter().any(|(base, _)| *base == name)
        || divided(Counted::All)
        || divided(Counted::Answered)
}

impl RuleBuilder<'_> {
    /// The chains that others jump to, in the order of their creation.
    pub(super) fn affinity_chains(&self) -> Vec<(String, Vec<Rule>)> {
        let mut chains = self.remembering();
        chains.push(("propose".to_owned(), self.propose()));
        let recall = [("recall-cluster", Side::Cluster), ("recall-local", Side::Local)];
        chains.extend(recall.map(|(name, side)| (name.to_owned(), self.recall(side))));
        chains
    }

    /// The timeouts that are in use.
    fn timeouts(&self) -> impl Iterator<Item = u32> {
        AFFINITY_TIMEOUTS.into_iter().filter(|seconds| self.has(SetId::AffineFor(*seconds)))
    }

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

    /// Packets of the client of an assured connection, which a forged packet cannot open. UDP is assured if it goes on for two seconds,
    /// but most of its clients send one datagram from each socket: so answers count, too.
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
            is_assured(protocol(libc_protocol::UDP)),
            protocol(libc_protocol::UDP)
                .has_any(Expression::Ct(Ct::Status), Ct::DNAT)
                .has_none(Expression::Ct(Ct::Status), Ct::ASSURED)
                .equals_bytes(&Expression::Ct(Ct::Direction), &reply)
                .in_set(&SetId::Affine.name(), &self.original_frontend())
                .goto("answered"),
        ]
    }

    /// The chains that remember the client of a connection or keep it for another timeout, in the order of their creation.
    fn remembering(&self) -> Vec<(String, Vec<Rule>)> {
        let mut chains = vec![("keep".to_owned(), self.keep())];
        for (counted, known, new) in
            [(Counted::All, "keep", "remember-used"), (Counted::Answered, "remember", "answered")]
        {
            chains.extend(
                SHARES.map(|shares| (counted.chain(shares), self.new_client(counted, shares, known))),
            );
            chains.push((new.to_owned(), self.known_or_new(counted, known)));
            if new == "remember-used" {
                chains.push(("remember".to_owned(), self.remember()));
            }
        }
        chains
    }

    /// Remembers only an endpoint that the frontend still has: else an old connection would undo the choice of a new one.
    fn remember(&self) -> Vec<Rule> {
        let mut key = vec![self.endpoint_of_connection()];
        key.extend(self.original_frontend());
        let is_used = |side| Rule::new().map(&SetId::Sticky(side).name(), &key).goto("remember-used");
        let mut rules = Side::ALL.map(is_used).to_vec();
        rules.push(Rule::new().return_());
        rules
    }

    fn known_or_new(&self, counted: Counted, known_chain: &str) -> Vec<Rule> {
        let known = Expression::MapWord { map: AFFINITY.to_owned(), key: self.client() };
        // Each hash is below the modulus.
        let is_known = Rule::new().not_equals(&known, Field::Number(ENDPOINT_MODULUS)).goto(known_chain);
        let divided = |shares: u32| {
            Rule::new()
                .in_set(&SetId::Shares(shares).name(), &[self.namespace()])
                .goto(&counted.chain(shares))
        };
        let mut rules = vec![is_known];
        rules.extend(SHARES.map(divided));
        rules.push(Rule::new().return_());
        rules
    }

    fn namespace(&self) -> Expression {
        Expression::MapWord { map: SetId::Namespaces.name(), key: self.original_frontend() }
    }

    /// Goes on unless the namespace has too many new clients.
    fn new_client(&self, counted: Counted, shares: u32, next: &str) -> Vec<Rule> {
        let too_many = |seconds: u32| {
            let rule = Rule::new()
                .in_set(&SetId::AffineFor(seconds).name(), &self.original_frontend())
                .dynamic_limit(
                    &counted.counters(seconds),
                    &[self.namespace()],
                    timeout(seconds),
                    limit(counted.clients() / shares, seconds),
                );
            self.count(rule, AFFINITY_LIMITED).return_()
        };
        let limits = self.config.features.has(Feature::Limits).then(|| self.timeouts().map(too_many));
        limits.into_iter().flatten().chain([Rule::new().goto(next)]).collect()
    }

    /// The hash of the endpoint that a connection has.
    fn endpoint_of_connection(&self) -> Expression {
        Expression::Jhash {
            of: vec![
                Expression::Ct(Ct::Source(self.family, Direction::Reply)),
                Expression::Ct(Ct::SourcePort(Direction::Reply)),
            ],
            modulus: ENDPOINT_MODULUS,
            seed: ENDPOINT_SEED,
            offset: 0,
        }
    }

    /// Records the endpoint of a connection's client, or restarts the timeout.
    fn keep(&self) -> Vec<Rule> {
        let endpoint = self.endpoint_of_connection();
        let record = |rule: &Rule, seconds: u32| {
            let endpoint = std::slice::from_ref(&endpoint);
            rule.clone()
                .in_set(&SetId::AffineFor(seconds).name(), &self.original_frontend())
                .dynamic(DynamicOp::Update, AFFINITY, &self.client(), endpoint, Some(timeout(seconds)))
                .return_()
        };
        let rules = self.if_kept(&endpoint);
        rules.iter().flat_map(|rule| self.timeouts().map(|seconds| record(rule, seconds))).collect()
    }

    /// Makes the client of a first packet a candidate. The packet has the address of its endpoint here.
    fn propose(&self) -> Vec<Rule> {
        let endpoint = Expression::Jhash {
            of: vec![Expression::daddr(self.family), Expression::dport()],
            modulus: ENDPOINT_MODULUS,
            seed: ENDPOINT_SEED,
            offset: 0,
        };
        let propose = |rule: Rule| {
            let (timeout, endpoint) = (Some(CANDIDATES_TIMEOUT), std::slice::from_ref(&endpoint));
            rule.dynamic(DynamicOp::Update, CANDIDATES, &self.client(), endpoint, timeout).return_()
        };
        self.if_kept(&endpoint).into_iter().map(propose).collect()
    }

    /// Rules that match a connection to an endpoint which may be recorded. If rules cannot delete what is recorded, only an endpoint
    /// that the frontend still has: a connection may outlive its endpoint, and the agent has searched for that already.
    fn if_kept(&self, endpoint: &Expression) -> Vec<Rule> {
        if self.config.features.has(Feature::Deletion) {
            return vec![Rule::new()];
        }
        let mut key = vec![endpoint.clone()];
        key.extend(self.original_frontend());
        Side::ALL.map(|side| Rule::new().map(&SetId::Sticky(side).name(), &key)).into()
    }

    /// Sends a client to its last endpoint if the frontend still has that; else forgets it, or leaves that to the agent.
    fn recall(&self, side: Side) -> Vec<Rule> {
        let sticky = SetId::Sticky(side);
        let mut client = self.frontend();
        client.push(Expression::saddr(self.family));
        let mut rules = Vec::new();
        for map in [AFFINITY, CANDIDATES] {
            let mut key = vec![Expression::MapWord { map: map.to_owned(), key: client.clone() }];
            key.extend(self.frontend());
            rules.push(Rule::new().map(&sticky.name(), &key).dnat(self.family));
            if self.config.features.has(Feature::Deletion) {
                let anything = [Expression::Meta(steerage_nft::Meta::Mark)];
                rules.push(Rule::new().dynamic(DynamicOp::Delete, map, &client, &anything, None));
            }
        }
        rules.push(Rule::new().return_());
        rules
    }
}

fn timeout(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

/// More than so many clients at once and in so many seconds, in a unit that `nft` knows.
fn limit(clients: u32, seconds: u32) -> Limit {
    let unit = [86_400, 3_600, 60, 1].into_iter().find(|unit| *unit <= seconds).unwrap_or(1);
    let packets = (u64::from(clients) * u64::from(unit)).div_ceil(u64::from(seconds));
    Limit { packets, unit: u64::from(unit), burst: clients, over: true }
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
            let Limit { packets, unit, burst, over } = limit(NAMESPACE_CLIENTS, seconds);
            assert!(over && burst == NAMESPACE_CLIENTS && [1, 60, 3600, 86_400].contains(&unit));
            let in_a_timeout = packets * u64::from(seconds) / unit;
            let excess = in_a_timeout - u64::from(NAMESPACE_CLIENTS);
            assert!(excess <= u64::from(seconds), "{seconds}: {in_a_timeout}");
        }
    }

    /// A namespace that uses all timeouts must not fill the map of all.
    #[test]
    fn a_namespace_has_an_eighth_of_the_map_however_many_timeouts_it_uses() {
        for timeouts in 1..=AFFINITY_TIMEOUTS.len() {
            let used = AFFINITY_TIMEOUTS.into_iter().take(timeouts);
            let at_once = |seconds| u64::from(limit(NAMESPACE_CLIENTS / shares(timeouts), seconds).burst);
            let all: u64 = used.map(at_once).sum();
            assert!(all * 16 <= u64::from(AFFINITY_SIZE), "{timeouts}: {all}");
            assert!(all * 2 > u64::from(NAMESPACE_CLIENTS) || timeouts > 4, "{timeouts}: {all}");
        }
    }
}

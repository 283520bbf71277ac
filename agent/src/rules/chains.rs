// SPDX-License-Identifier: Apache-2.0
//! The rules of the base ruleset, chain by chain.

use std::net::IpAddr;

use ipnet::IpNet;
use steerage_nft::{
    Chain, ChainType, Ct, Direction, Expression, Family, FibAddress, Field, Hook, Meta, Reject, Rule,
};

use super::drops::DropReason;
use super::features::Feature;
use super::layout::{LOCAL_OFFSET, LONG, SHORT, SetId, Side, model_family};
use super::numbers::Numbers;
use super::ruleset_chain::{RulesetChain, RulesetConfig, base_chains, with_digest};
use super::source_lists::prefix_lengths;
use crate::local_node::LocalPods;

/// The base chain of packets that connection tracking cannot place.
pub(super) const INVALID: &str = "invalid";
/// Slots of a whole class that a flow tries.
const WHOLE_TRIES: u32 = 6;
/// Slots of the first half of a class that it tries then.
const HALF_TRIES: u32 = 5;
/// Bytes of an interface's name with its final zero.
const IFNAMSIZ: usize = 16;

pub(super) struct RuleBuilder<'a> {
    pub(super) family: Family,
    pub(super) config: &'a RulesetConfig,
}

impl RuleBuilder<'_> {
    pub(super) fn chains(&self) -> Vec<RulesetChain> {
        let long = Side::ALL.into_iter().flat_map(|side| self.classes(side).map(move |class| (side, class)));
        let affinity = self.has(SetId::Affine).then(|| self.affinity_chains());
        let mut chains: Vec<_> = long
            .map(|(side, class)| (SetId::Long(side, class).name(), self.long(side, class)))
            .chain(affinity.into_iter().flatten())
            .chain(
                [
                    ("to-cluster", self.endpoints(Side::Cluster)),
                    ("to-local", self.endpoints(Side::Local)),
                    ("to-split", self.split()),
                    ("check-source", self.check_source()),
                    ("services", self.services()),
                    ("unassigned", self.unassigned()),
                    ("translated", self.translated()),
                ]
                .map(|(name, rules)| (name.to_owned(), rules)),
            )
            .map(|(name, rules)| with_digest(&name, Chain::regular(name.as_str()), rules))
            .collect();
        let names = ["prerouting", "output", "input", "postrouting"];
        let rules = [self.incoming(), self.incoming(), self.to_host(), self.outgoing()];
        for ((name, chain), rules) in names.into_iter().zip(base_chains()).zip(rules) {
            chains.push(with_digest(name, chain, rules));
        }
        if self.config.drop_invalid {
            let chain = Chain::base(INVALID, ChainType::Filter, Hook::Forward, 0);
            chains.push(with_digest(INVALID, chain, vec![self.invalid()]));
        }
        if self.has(SetId::Affine) {
            chains.extend(self.remembering_chains());
        }
        if self.config.forward_to_peers {
            chains.extend(self.chains_to_peers());
        }
        chains
    }

    /// Whether the table has this set.
    pub(super) fn has(&self, id: SetId) -> bool {
        self.config.used.has(model_family(self.family), id)
    }

    /// The classes of long lists that are in use.
    fn classes(&self, side: Side) -> impl Iterator<Item = u32> {
        LONG.into_iter().filter(move |class| self.has(SetId::Long(side, *class)))
    }

    /// A packet that connection tracking cannot place, such as one outside the window, is not translated back. With the address of its
    /// pod it would reach a client that does not know the connection, and whose reset ends it (kubernetes#74839).
    fn invalid(&self) -> Rule {
        let rule = Rule::new().has_any(Expression::Ct(Ct::State), Ct::INVALID);
        self.count(rule, DropReason::Invalid.name()).drop()
    }

    /// Counts what the rule matches, where the kernel has counters.
    pub(super) fn count(&self, rule: Rule, counter: &str) -> Rule {
        if self.config.features.has(Feature::Counters) { rule.count(counter) } else { rule }
    }

    /// The packet's destination.
    pub(super) fn frontend(&self) -> Vec<Expression> {
        vec![Expression::daddr(self.family), Expression::l4proto(), Expression::dport()]
    }

    /// The destination of the connection's first packet.
    pub(super) fn original_frontend(&self) -> Vec<Expression> {
        vec![
            Expression::Ct(Ct::Destination(self.family, Direction::Original)),
            Expression::l4proto(),
            Expression::Ct(Ct::DestinationPort(Direction::Original)),
        ]
    }

    pub(super) fn frontend_and(&self, last: Expression) -> Vec<Expression> {
        let mut key = self.frontend();
        key.push(last);
        key
    }

    /// Rules that match packets from local pods. Since Linux 5.7 the kernel knows the input interface after routing, too.
    pub(super) fn sent_by_pods(&self) -> Vec<Rule> {
        let by_interface =
            |name: &[u8]| vec![Rule::new().equals_bytes(&Expression::Meta(Meta::IifName), name)];
        match &self.config.pods {
            LocalPods::Networks(nets) => self.within(&Expression::saddr(self.family), nets).collect(),
            LocalPods::Interface(name) => {
                let mut padded = name.clone().into_bytes();
                padded.resize(IFNAMSIZ, 0);
                by_interface(&padded)
            }
            LocalPods::InterfacePrefix(prefix) => by_interface(prefix.as_bytes()),
        }
    }

    /// Rules that match an address in the networks, of this family.
    fn within(&self, address: &Expression, nets: &[IpNet]) -> impl Iterator<Item = Rule> {
        let v6 = self.family == Family::Ip6;
        nets.iter().filter(move |net| net.addr().is_ipv6() == v6).map(|net| {
            let network = address.clone().masked(octets(net.netmask()));
            Rule::new().equals_bytes(&network, &octets(net.network()))
        })
    }

    /// Matches packets from this host itself.
    pub(super) fn sent_by_host() -> Rule {
        Rule::new().equals(&Expression::FibType(FibAddress::Source), Expression::LOCAL)
    }

    /// Base chains prerouting and output: first packets of connections, from outside, from pods and from this host.
    fn incoming(&self) -> Vec<Rule> {
        vec![
            self.to_cluster_address().goto("services"),
            Rule::new().in_set(&SetId::ExternalFrontends.name(), &self.frontend()).goto("services"),
        ]
    }

    fn services(&self) -> Vec<Rule> {
        let key = self.frontend();
        vec![
            self.restricted().jump("check-source"),
            self.count(Rule::new().in_set(&SetId::Rejected.name(), &key), DropReason::NoEndpoint.name())
                .reject(Reject::PortUnreachable(self.family)),
            self.count(
                Rule::new().in_set(&SetId::DroppedClusterFrontends.name(), &key),
                DropReason::NoLocalEndpoint.name(),
            )
            .drop(),
            Rule::new().in_set(&SetId::Split.name(), &key).goto("to-split"),
            Rule::new().goto("to-cluster"),
        ]
    }

    /// The number of the frontend's list of allowed sources.
    fn source_list(&self) -> Expression {
        Expression::MapWord { map: SetId::Restricted.name(), key: self.frontend() }
    }

    fn restricted(&self) -> Rule {
        Rule::new().not_equals(&self.source_list(), Field::Number(Numbers::NONE))
    }

    /// Drops what no allowed network has sent.
    fn check_source(&self) -> Vec<Rule> {
        let is_v6 = self.family == Family::Ip6;
        let mask = |length: u8| {
            let v4 = u32::MAX.checked_shl(32_u32.saturating_sub(length.into())).unwrap_or_default();
            let v6 = u128::MAX.checked_shl(128_u32.saturating_sub(length.into())).unwrap_or_default();
            if is_v6 { v6.to_be_bytes().to_vec() } else { v4.to_be_bytes().to_vec() }
        };
        let allowed = |length: u8| {
            let source = Expression::saddr(self.family).masked(mask(length));
            Rule::new().in_set(&SetId::Sources(length).name(), &[self.source_list(), source]).return_()
        };
        // Twice: the list may have been exchanged for one that has the source's network in a set which the packet had already passed.
        let lengths: Vec<_> =
            prefix_lengths(is_v6).filter(|length| self.has(SetId::Sources(*length))).collect();
        let mut rules: Vec<_> = [&lengths, &lengths].into_iter().flatten().copied().map(allowed).collect();
        // Every source may have become allowed meanwhile.
        rules.push(self.count(self.restricted(), DropReason::SourceNotAllowed.name()).drop());
        rules.push(Rule::new().return_());
        rules
    }

    fn to_cluster_address(&self) -> Rule {
        Rule::new().in_set(&SetId::ClusterAddresses.name(), &[Expression::daddr(self.family)])
    }

    /// External policy Local: local pods and this host reach all endpoints, clients outside the local ones.
    fn split(&self) -> Vec<Rule> {
        let mut rules: Vec<_> = self.sent_by_pods().into_iter().map(|rule| rule.goto("to-cluster")).collect();
        rules.push(Self::sent_by_host().goto("to-cluster"));
        rules.push(Rule::new().goto("to-local"));
        rules
    }

    fn endpoints(&self, side: Side) -> Vec<Rule> {
        let (recall, offset) = match side {
            Side::Cluster => ("recall-cluster", 0),
            Side::Local => ("recall-local", LOCAL_OFFSET),
        };
        let mut rules = Vec::new();
        if self.has(SetId::Affine) {
            rules.push(Rule::new().in_set(&SetId::Affine.name(), &self.frontend()).jump(recall));
        }
        // Twice: a frontend may have moved to a map that the packet had already passed.
        for _ in 0..2 {
            for count in 1..=SHORT {
                let key = self.frontend_and(self.flow_hash(count, 0, offset));
                rules.push(Rule::new().map(&SetId::Slots(count).name(), &key).dnat(self.family));
            }
            for class in self.classes(side) {
                let long = SetId::Long(side, class).name();
                rules.push(Rule::new().in_set(&long, &self.frontend()).jump(&long));
            }
        }
        match side {
            // The policy has become Cluster since the packet was in to-split.
            Side::Local => {
                rules.push(Rule::new().not_in_set(&SetId::Split.name(), &self.frontend()).goto("to-cluster"));
            }
            // A port that no Service has. The sets exclude a frontend whose last endpoint was just removed.
            Side::Cluster => {
                let unknown = self
                    .to_cluster_address()
                    .not_in_set(&SetId::DroppedClusterFrontends.name(), &self.frontend())
                    .not_in_set(&SetId::ExternalFrontends.name(), &self.frontend());
                let unknown = self.count(unknown, DropReason::UnknownPort.name());
                rules.push(unknown.reject(Reject::PortUnreachable(self.family)));
            }
        }
        let reason = match side {
            Side::Local => DropReason::NoLocalEndpoint,
            Side::Cluster => DropReason::Changed,
        };
        rules.push(self.count(Rule::new(), reason.name()).drop());
        rules
    }

    /// A list of one class has endpoints in its first slots: more than a quarter of the class. A flow tries slots of the whole class,
    /// then of its first half, and last one of its first quarter, where each slot has an endpoint. Few flows come that far: no
    /// endpoint has more than 2% less than its share.
    fn long(&self, side: Side, class: u32) -> Vec<Rule> {
        let number = Expression::MapWord { map: SetId::Lists(side).name(), key: self.frontend() };
        let tries = [(class, WHOLE_TRIES), (class / 2, HALF_TRIES), (class / 4, 1)];
        let moduli = tries.into_iter().flat_map(|(modulus, tries)| (0..tries).map(move |_| modulus));
        let rule = |(attempt, modulus)| {
            let key = [number.clone(), self.flow_hash(modulus, attempt, 0)];
            Rule::new().map(&SetId::Endpoints.name(), &key).dnat(self.family)
        };
        let mut rules: Vec<_> = (1..).zip(moduli).map(rule).collect();
        // The list has become shorter since the packet was in the calling chain, which looks again.
        rules.push(Rule::new().return_());
        rules
    }

    /// A number below `modulus`, and more by `offset`, that depends on the client's address and port alone. So a flow that has lost its
    /// conntrack entry finds its endpoint again. Different attempts give independent numbers.
    pub(super) fn flow_hash(&self, modulus: u32, attempt: u32, offset: u32) -> Expression {
        let flow = vec![Expression::saddr(self.family), Expression::sport()];
        Expression::Jhash { of: flow, modulus, seed: self.config.seed.wrapping_add(attempt), offset }
    }

    /// Base chain input: first packets to an endpoint in the host's own network, which never reach postrouting.
    fn to_host(&self) -> Vec<Rule> {
        let rules: Vec<_> = self.proposing().collect();
        // A chain without rules would have no digest.
        if rules.is_empty() { vec![Rule::new().return_()] } else { rules }
    }

    /// Makes the clients of frontends with affinity candidates.
    fn proposing(&self) -> impl Iterator<Item = Rule> {
        let of_affine_frontend = || {
            Rule::new()
                .has_any(Expression::Ct(Ct::Status), Ct::DNAT)
                .in_set(&SetId::Affine.name(), &self.original_frontend())
                .jump("propose")
        };
        self.has(SetId::Affine).then(of_affine_frontend).into_iter()
    }

    /// First packets that leave untranslated by this or any other proxy. One to a load balancer's address would loop between load
    /// balancer and nodes. Dropped here, it leaves no conntrack entry. An address of this host is answered by the host.
    fn unassigned(&self) -> Vec<Rule> {
        let elsewhere = |rule: Rule| {
            let rule = rule.not_equals(&Expression::FibType(FibAddress::Destination), Expression::LOCAL);
            self.count(rule, DropReason::UnassignedAddress.name()).drop()
        };
        let mut rules: Vec<_> =
            self.within(&Expression::daddr(self.family), &self.config.unassigned).map(elsewhere).collect();
        rules.push(Rule::new().return_());
        rules
    }

    /// Base chain postrouting: first packets that leave.
    fn outgoing(&self) -> Vec<Rule> {
        let original = self.original_frontend();
        vec![
            Rule::new().has_none(Expression::Ct(Ct::Status), Ct::DNAT).goto("unassigned"),
            Rule::new().in_set(&SetId::ClusterAddresses.name(), &original[..1]).goto("translated"),
            Rule::new().in_set(&SetId::ExternalFrontends.name(), &original).goto("translated"),
        ]
    }

    /// First packets that the agent has translated.
    fn translated(&self) -> Vec<Rule> {
        let original = self.original_frontend();
        let ends = [Expression::saddr(self.family), Expression::daddr(self.family)];
        let to_itself = [Expression::daddr(self.family), Expression::daddr(self.family)];
        let mut rules: Vec<_> = self.proposing().collect();
        rules.extend([
            Rule::new().in_set(&SetId::Hairpins.name(), &ends).masquerade_random(),
            Rule::new().in_set(&SetId::Masqueraded.name(), &original).masquerade_random(),
        ]);
        let pods: Vec<_> = self.sent_by_pods().into_iter().map(Rule::return_).collect();
        // Without a way to recognise local pods, a ClusterIP keeps every client's address.
        let outsiders = (!pods.is_empty())
            .then(|| Rule::new().in_set(&SetId::ClusterAddresses.name(), &original[..1]).masquerade_random());
        rules.extend(pods);
        rules.push(Self::sent_by_host().masquerade_random());
        rules.extend(outsiders);
        // External policy Local, and still to another node: the policy was Cluster when the endpoint was chosen. That one would answer
        // the client directly.
        rules.push(
            Rule::new()
                .in_set(&SetId::ExternalFrontends.name(), &original)
                .not_in_set(&SetId::Hairpins.name(), &to_itself)
                .masquerade_random(),
        );
        rules
    }
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

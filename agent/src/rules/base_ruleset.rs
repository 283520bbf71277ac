// SPDX-License-Identifier: Apache-2.0
//! The chains and rules of one family: the part that does not depend on any Service.
//!
//! Only what tells the node's pods, the guarded networks and the affinity timeouts in use shape it; when those change, the
//! chains that name them are written anew in one transaction.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use steerage_nft::{
    Chain, ChainType, Ct, Direction, DynamicOp, Expression, Family, FibAddress, Hook, Meta, Reject, RowShape,
    Rule, Set,
};

use super::hash::{ENDPOINT_MODULUS, ENDPOINT_SEED, jhash};
use super::layout::{LOCAL_OFFSET, SetId, affinity_name, affinity_set, classes};
use crate::local_node::LocalPods;

/// Before kube-proxy (dstnat, −100), so that a frontend of ours is ours.
const BEFORE_DSTNAT: i32 = -101;
/// Before kube-proxy (srcnat, 100).
const BEFORE_SRCNAT: i32 = 99;
/// After everybody else's source translation of what comes in.
const INPUT: i32 = 100;

/// Bytes of an interface's name, with the zero at its end (`IFNAMSIZ`).
const INTERFACE_NAME: usize = 16;

/// What shapes the base ruleset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RulesetConfig {
    /// See [`LocalPods`].
    pub pods: LocalPods,
    /// Affinity timeouts in use, in seconds.
    pub timeouts: BTreeSet<u32>,
    /// Networks of which only what a Service has may be reached, both families.
    pub unserved: Vec<IpNet>,
}

/// A chain with its rules.
#[derive(Debug, Clone)]
pub struct RulesetChain {
    /// Its name.
    pub name: String,
    /// What to create.
    pub chain: Chain,
    /// Its rules. The first one's comment carries a digest of all, by which a chain written by another version is known.
    pub rules: Vec<Rule>,
    /// The comment of the first rule.
    pub digest: String,
}

/// All chains and sets of one family.
#[derive(Debug, Clone)]
pub struct BaseRuleset {
    /// The sets that the agent fills.
    pub filled: Vec<SetId>,
    /// All sets to create, with their names.
    pub sets: Vec<(String, Set)>,
    /// The maps that packets fill, with the lengths of their elements.
    pub remembering: Vec<(String, RowShape)>,
    /// The chains; those that others jump to come first.
    pub chains: Vec<RulesetChain>,
    /// Names the version of sets and base chains; the comment of the table.
    pub version: String,
}

impl BaseRuleset {
    /// The base ruleset of `Family::Ip` or `Family::Ip6`.
    pub fn new(family: Family, shape: &RulesetConfig) -> Self {
        let mut filled = vec![
            SetId::Frontends,
            SetId::Rejected,
            SetId::Dropped,
            SetId::Restricted,
            SetId::Sources,
            SetId::Split,
            SetId::Masqueraded,
            SetId::ClusterAddresses,
            SetId::Hairpins,
            SetId::Affine,
            SetId::Sticky,
            SetId::StickyLocal,
        ];
        filled.extend(classes().map(SetId::Slots));
        let constant: Vec<_> = filled.iter().map(|id| (id.name(), id.set(family))).collect();
        let version = digest("steerage layout", &(&constant, base_chains()));
        let (mut sets, mut remembering) = (constant, Vec::new());
        for seconds in &shape.timeouts {
            filled.push(SetId::AffineFor(*seconds));
            sets.push((SetId::AffineFor(*seconds).name(), SetId::AffineFor(*seconds).set(family)));
            let set = affinity_set(family, *seconds);
            remembering.push((affinity_name(*seconds), set.row_shape()));
            sets.push((affinity_name(*seconds), set));
        }
        let chains = Rules { family, shape }.chains();
        Self { filled, sets, remembering, chains, version }
    }
}

fn base_chains() -> [Chain; 4] {
    [
        Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, BEFORE_DSTNAT),
        Chain::base("output", ChainType::Nat, Hook::Output, BEFORE_DSTNAT),
        Chain::base("input", ChainType::Nat, Hook::Input, INPUT),
        Chain::base("postrouting", ChainType::Nat, Hook::Postrouting, BEFORE_SRCNAT),
    ]
}

/// Which of a frontend's two lists.
#[derive(Clone, Copy)]
enum List {
    Cluster,
    Local,
}

struct Rules<'a> {
    family: Family,
    shape: &'a RulesetConfig,
}

impl Rules<'_> {
    fn chains(&self) -> Vec<RulesetChain> {
        let mut chains: Vec<_> = [
            ("remember", self.remember()),
            ("recall-cluster", self.recall(List::Cluster)),
            ("recall-local", self.recall(List::Local)),
            ("to-cluster", self.endpoints(List::Cluster)),
            ("to-local", self.endpoints(List::Local)),
            ("to-split", self.split()),
            ("services", self.services()),
            ("unserved", self.unserved()),
            ("translated", self.translated()),
        ]
        .into_iter()
        .map(|(name, rules)| sealed(name, Chain::regular(name), rules))
        .collect();
        let names = ["prerouting", "output", "input", "postrouting"];
        let rules = [self.arriving(), self.arriving(), self.delivered(), self.leaving()];
        for ((name, chain), rules) in names.into_iter().zip(base_chains()).zip(rules) {
            chains.push(sealed(name, chain, rules));
        }
        chains
    }

    /// The frontend as the packet names it.
    fn frontend(&self) -> Vec<Expression> {
        vec![Expression::daddr(self.family), Expression::l4proto(), Expression::dport()]
    }

    /// The frontend as the connection's first packet named it.
    fn original_frontend(&self) -> Vec<Expression> {
        vec![
            Expression::Ct(Ct::Destination(self.family, Direction::Original)),
            Expression::l4proto(),
            Expression::Ct(Ct::DestinationPort(Direction::Original)),
        ]
    }

    fn frontend_and(&self, last: Expression) -> Vec<Expression> {
        let mut key = self.frontend();
        key.push(last);
        key
    }

    /// Rules that match what this node's pods send. After routing, too, the kernel knows the interface that a packet came in by
    /// (since Linux 5.7).
    fn sent_by_pods(&self) -> Vec<Rule> {
        let by_interface =
            |name: &[u8]| vec![Rule::new().equals_bytes(&Expression::Meta(Meta::IifName), name)];
        match &self.shape.pods {
            LocalPods::Networks(nets) => self.within(&Expression::saddr(self.family), nets).collect(),
            LocalPods::Interface(name) => {
                let mut padded = name.clone().into_bytes();
                padded.resize(INTERFACE_NAME, 0);
                by_interface(&padded)
            }
            LocalPods::InterfacePrefix(prefix) => by_interface(prefix.as_bytes()),
        }
    }

    /// Rules that match an address in the networks of this family.
    fn within(&self, address: &Expression, nets: &[IpNet]) -> impl Iterator<Item = Rule> {
        let v6 = self.family == Family::Ip6;
        nets.iter().filter(move |net| net.addr().is_ipv6() == v6).map(|net| {
            let network = address.clone().masked(octets(net.netmask()));
            Rule::new().equals_bytes(&network, &octets(net.network()))
        })
    }

    /// Matches what this host itself sends.
    fn sent_by_host() -> Rule {
        Rule::new().equals(&Expression::FibType(FibAddress::Source), Expression::LOCAL)
    }

    /// First packets on their way in, from outside, from pods and from this host.
    fn arriving(&self) -> Vec<Rule> {
        vec![
            self.to_cluster_address().goto("services"),
            Rule::new().in_set(&SetId::Frontends.name(), &self.frontend()).goto("services"),
        ]
    }

    fn services(&self) -> Vec<Rule> {
        let key = self.frontend();
        vec![
            Rule::new()
                .in_set(&SetId::Restricted.name(), &key)
                .not_in_set(&SetId::Sources.name(), &self.frontend_and(Expression::saddr(self.family)))
                .drop(),
            Rule::new().in_set(&SetId::Rejected.name(), &key).reject(Reject::PortUnreachable(self.family)),
            Rule::new().in_set(&SetId::Dropped.name(), &key).drop(),
            Rule::new().in_set(&SetId::Split.name(), &key).goto("to-split"),
            Rule::new().goto("to-cluster"),
        ]
    }

    fn to_cluster_address(&self) -> Rule {
        Rule::new().in_set(&SetId::ClusterAddresses.name(), &[Expression::daddr(self.family)])
    }

    /// Under external policy Local, pods and host of this node may use all endpoints; whoever comes from outside, the local ones.
    fn split(&self) -> Vec<Rule> {
        let mut rules: Vec<_> = self.sent_by_pods().into_iter().map(|rule| rule.goto("to-cluster")).collect();
        rules.push(Self::sent_by_host().goto("to-cluster"));
        rules.push(Rule::new().goto("to-local"));
        rules
    }

    fn endpoints(&self, list: List) -> Vec<Rule> {
        let (recall, offset) = match list {
            List::Cluster => ("recall-cluster", 0),
            List::Local => ("recall-local", LOCAL_OFFSET),
        };
        let mut rules = vec![Rule::new().in_set(&SetId::Affine.name(), &self.frontend()).jump(recall)];
        // Twice: the packet may have walked past a frontend that was moving from one map to another.
        for class in classes().chain(classes()) {
            let key = self.frontend_and(Expression::Random { modulus: class, offset });
            rules.push(Rule::new().map(&SetId::Slots(class).name(), &key).dnat(self.family));
        }
        match list {
            // The list went while the packet walked: the policy has become Cluster.
            List::Local => {
                rules.push(Rule::new().not_in_set(&SetId::Split.name(), &self.frontend()).goto("to-cluster"));
            }
            // A port that no Service has, unless its last endpoint here went while the packet walked.
            List::Cluster => rules.push(
                self.to_cluster_address()
                    .not_in_set(&SetId::Dropped.name(), &self.frontend())
                    .not_in_set(&SetId::Frontends.name(), &self.frontend())
                    .reject(Reject::PortUnreachable(self.family)),
            ),
        }
        rules.push(Rule::new().drop());
        rules
    }

    /// Leads a client to the endpoint that it had, if the frontend still leads there; else forgets it.
    fn recall(&self, list: List) -> Vec<Rule> {
        let sticky = match list {
            List::Cluster => SetId::Sticky,
            List::Local => SetId::StickyLocal,
        };
        let client = self.frontend_and(Expression::saddr(self.family));
        let mut rules = Vec::new();
        for seconds in &self.shape.timeouts {
            let affinity = affinity_name(*seconds);
            let mut key = vec![Expression::MapWord { map: affinity.clone(), key: client.clone() }];
            key.extend(self.frontend());
            let affine = SetId::AffineFor(*seconds).name();
            rules.push(
                Rule::new().in_set(&affine, &self.frontend()).map(&sticky.name(), &key).dnat(self.family),
            );
            let anything = [Expression::Meta(Meta::Mark)];
            rules.push(Rule::new().in_set(&affine, &self.frontend()).dynamic(
                DynamicOp::Delete,
                &affinity,
                &client,
                &anything,
                None,
            ));
        }
        rules.push(Rule::new().return_());
        rules
    }

    /// Notes which endpoint a client got, and restarts its timeout with each new connection.
    fn remember(&self) -> Vec<Rule> {
        let mut client = self.original_frontend();
        client.push(Expression::Ct(Ct::Source(self.family, Direction::Original)));
        let endpoint = Expression::Jhash {
            of: vec![Expression::daddr(self.family)],
            modulus: ENDPOINT_MODULUS,
            seed: ENDPOINT_SEED,
        };
        let note = |seconds: &u32| {
            let timeout = Some(Duration::from_secs((*seconds).into()));
            let endpoint = std::slice::from_ref(&endpoint);
            Rule::new().in_set(&SetId::AffineFor(*seconds).name(), &self.original_frontend()).dynamic(
                DynamicOp::Update,
                &affinity_name(*seconds),
                &client,
                endpoint,
                timeout,
            )
        };
        let mut rules: Vec<_> = self.shape.timeouts.iter().map(note).collect();
        rules.push(Rule::new().return_());
        rules
    }

    /// First packets to an endpoint in this host's own network: they leave by no postrouting.
    fn delivered(&self) -> Vec<Rule> {
        vec![self.of_affine_frontend().jump("remember")]
    }

    fn of_affine_frontend(&self) -> Rule {
        Rule::new()
            .has_any(Expression::Ct(Ct::Status), Ct::DNAT)
            .in_set(&SetId::Affine.name(), &self.original_frontend())
    }

    /// First packets on their way out that nobody has translated, neither we nor another proxy: what is sent to a load balancer's
    /// address and matches no Service would go round between load balancer and nodes. Dropped here, it leaves no entry in the
    /// connection table. What is an address of this host is answered by it.
    fn unserved(&self) -> Vec<Rule> {
        let elsewhere = |rule: Rule| {
            rule.not_equals(&Expression::FibType(FibAddress::Destination), Expression::LOCAL).drop()
        };
        let mut rules: Vec<_> =
            self.within(&Expression::daddr(self.family), &self.shape.unserved).map(elsewhere).collect();
        rules.push(Rule::new().return_());
        rules
    }

    /// First packets on their way out.
    fn leaving(&self) -> Vec<Rule> {
        let original = self.original_frontend();
        vec![
            Rule::new().has_none(Expression::Ct(Ct::Status), Ct::DNAT).goto("unserved"),
            Rule::new().in_set(&SetId::ClusterAddresses.name(), &original[..1]).goto("translated"),
            Rule::new().in_set(&SetId::Frontends.name(), &original).goto("translated"),
        ]
    }

    /// Of those, the ones that we have translated.
    fn translated(&self) -> Vec<Rule> {
        let original = self.original_frontend();
        let ends = [Expression::saddr(self.family), Expression::daddr(self.family)];
        let mut rules = vec![
            self.of_affine_frontend().jump("remember"),
            Rule::new().in_set(&SetId::Hairpins.name(), &ends).masquerade_random(),
            Rule::new().in_set(&SetId::Masqueraded.name(), &original).masquerade_random(),
        ];
        let pods: Vec<_> = self.sent_by_pods().into_iter().map(Rule::return_).collect();
        // Where pods can't be told from others, a ClusterIP keeps everybody's address.
        let outsiders = (!pods.is_empty())
            .then(|| Rule::new().in_set(&SetId::ClusterAddresses.name(), &original[..1]).masquerade_random());
        rules.extend(pods);
        rules.push(Self::sent_by_host().masquerade_random());
        rules.extend(outsiders);
        rules
    }
}

fn sealed(name: &str, chain: Chain, mut rules: Vec<Rule>) -> RulesetChain {
    let digest = digest(name, &rules);
    if let Some(first) = rules.first_mut() {
        *first = first.clone().comment(digest.clone());
    }
    RulesetChain { name: name.to_owned(), chain, rules, digest }
}

/// A name for a value, by its contents. Only ever compared for equality.
fn digest(what: &str, value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    format!("{what} {:08x}{:08x}", jhash(text.as_bytes(), 1), jhash(text.as_bytes(), 2))
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

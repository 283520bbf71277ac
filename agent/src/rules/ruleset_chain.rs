// SPDX-License-Identifier: Apache-2.0
//! A chain with its rules and their digest, the base chains, and what the rules depend on. [`super::chains`] makes the rules.

use ipnet::IpNet;
use steerage_nft::{Batch, Chain, ChainType, Family, Hook, Rule, Table};

use super::features::Features;
use super::used_sets::UsedSets;
use crate::hash::jhash;
use crate::local_node::LocalPods;

/// Before kube-proxy (dstnat, −100), so that the agent translates its frontends.
const BEFORE_DSTNAT: i32 = -101;
/// Before kube-proxy (srcnat, 100).
const BEFORE_SRCNAT: i32 = 99;
/// After source translation of incoming packets by others.
const INPUT: i32 = 100;

/// What the chains depend on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RulesetConfig {
    /// How traffic from local pods is recognised.
    pub pods: LocalPods,
    /// The sets that Services need, or needed.
    pub used: UsedSets,
    /// Networks of both families whose addresses serve nothing but Services.
    pub unassigned: Vec<IpNet>,
    /// Drop forwarded packets that connection tracking cannot place, as kube-proxy does.
    pub drop_invalid: bool,
    /// Forward packets that find no local endpoint to other nodes.
    pub forward_to_peers: bool,
    /// What the kernel has.
    pub features: Features,
    /// Seed of the hashes of flows that choose endpoints. Each node has its own, and keeps it.
    pub seed: u32,
}

impl RulesetConfig {
    /// Whether the base ruleset of a family is the same.
    pub fn has_same_rules(&self, other: &Self, family: steerage_model::Family) -> bool {
        let used = &other.used;
        self.used.is_same(used, family) && Self { used: used.clone(), ..self.clone() } == *other
    }
}

/// A chain with its rules.
#[derive(Debug, Clone)]
pub struct RulesetChain {
    /// Its name.
    pub name: String,
    /// The chain to create.
    pub chain: Chain,
    /// Its rules. The first one has the digest as its comment, which reveals a chain of another version.
    pub rules: Vec<Rule>,
    /// A digest of all rules.
    pub digest: String,
}

pub(super) fn base_chains() -> [Chain; 4] {
    [
        Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, BEFORE_DSTNAT),
        Chain::base("output", ChainType::Nat, Hook::Output, BEFORE_DSTNAT),
        Chain::base("input", ChainType::Nat, Hook::Input, INPUT),
        Chain::base("postrouting", ChainType::Nat, Hook::Postrouting, BEFORE_SRCNAT),
    ]
}

/// A chain whose first rule carries the digest.
pub(super) fn with_digest(name: &str, chain: Chain, mut rules: Vec<Rule>) -> RulesetChain {
    let (table, mut batch) = (Table::new(Family::Ip, ""), Batch::new());
    for rule in &rules {
        batch.add_rule(&table, name, rule);
    }
    let digest = digest(name, &batch);
    if let Some(first) = rules.first_mut() {
        *first = first.clone().comment(digest.clone());
    }
    RulesetChain { name: name.to_owned(), chain, rules, digest }
}

/// Identifies operations by what the kernel is asked for. Compared for equality only.
pub(super) fn digest(prefix: &str, batch: &Batch) -> String {
    let requests = batch.requests();
    format!("{prefix} {:08x}{:08x}", jhash(requests, 1), jhash(requests, 2))
}

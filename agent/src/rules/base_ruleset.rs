// SPDX-License-Identifier: Apache-2.0
//! The chains and sets of one family: the part that does not depend on single Services. [`super::chains`] has the rules.
//!
//! It depends on [`RulesetConfig`] alone. When that changes, the chains that mention it are rewritten in one transaction.

use std::collections::BTreeSet;

use ipnet::IpNet;
use steerage_nft::{Chain, ChainType, Family, Hook, RowShape, Rule, Set};

use super::chains::RuleBuilder;
use super::hash::jhash;
use super::layout::{SetId, affinity_name, affinity_set, classes};
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
    /// Affinity timeouts in use, in seconds.
    pub timeouts: BTreeSet<u32>,
    /// Networks of both families whose addresses serve nothing but Services.
    pub unassigned: Vec<IpNet>,
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

/// All chains and sets of one family.
#[derive(Debug, Clone)]
pub struct BaseRuleset {
    /// The sets that the agent fills.
    pub filled: Vec<SetId>,
    /// All sets to create, with their names.
    pub sets: Vec<(String, Set)>,
    /// The affinity maps, which packets fill, with the lengths of their elements.
    pub affinity_maps: Vec<(String, RowShape)>,
    /// The chains; a chain comes before those that jump to it.
    pub chains: Vec<RulesetChain>,
    /// A digest of constant sets and base chains: the comment of the table.
    pub version: String,
}

impl BaseRuleset {
    /// For `Family::Ip` or `Family::Ip6`.
    pub fn new(family: Family, config: &RulesetConfig) -> Self {
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
        let (mut sets, mut affinity_maps) = (constant, Vec::new());
        for seconds in &config.timeouts {
            filled.push(SetId::AffineFor(*seconds));
            sets.push((SetId::AffineFor(*seconds).name(), SetId::AffineFor(*seconds).set(family)));
            let set = affinity_set(family, *seconds);
            affinity_maps.push((affinity_name(*seconds), set.row_shape()));
            sets.push((affinity_name(*seconds), set));
        }
        let chains = RuleBuilder { family, config }.chains();
        Self { filled, sets, affinity_maps, chains, version }
    }
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
    let digest = digest(name, &rules);
    if let Some(first) = rules.first_mut() {
        *first = first.clone().comment(digest.clone());
    }
    RulesetChain { name: name.to_owned(), chain, rules, digest }
}

/// Identifies a value. Compared for equality only.
fn digest(prefix: &str, value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    format!("{prefix} {:08x}{:08x}", jhash(text.as_bytes(), 1), jhash(text.as_bytes(), 2))
}

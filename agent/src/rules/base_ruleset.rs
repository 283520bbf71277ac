// SPDX-License-Identifier: Apache-2.0
//! The chains and sets of one family: the part that does not depend on single Services. [`super::chains`] has the rules.
//!
//! It depends on [`RulesetConfig`] alone. When that changes, the chains that mention it are rewritten in one transaction.

use steerage_nft::{Family, RowShape, Set};

use super::chains::RuleBuilder;
use super::layout::{LONG, SHORT, SetId, Side, affinity_name, affinity_set};
use super::ruleset_chain::{RulesetChain, RulesetConfig, base_chains, digest};

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
            SetId::Endpoints,
        ];
        filled.extend((1..=SHORT).map(SetId::Slots));
        for side in Side::ALL {
            filled.extend([SetId::Sticky(side), SetId::Lists(side)]);
            filled.extend(LONG.map(|class| SetId::Long(side, class)));
        }
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

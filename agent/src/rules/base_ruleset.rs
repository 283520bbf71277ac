// SPDX-License-Identifier: Apache-2.0
//! The chains and sets of one family: the part that does not depend on single Services. [`super::chains`] has the rules.
//!
//! It depends on [`RulesetConfig`] alone. When that changes, the chains that mention it are rewritten in one transaction.

use steerage_nft::{Batch, Family, RowShape, Set, Table};

use super::affinity::NOT_REMEMBERED;
use super::affinity::{AFFINITY, BASE_CHAINS, SHARES, dynamic_sets};
use super::chains::{INVALID, RuleBuilder};
use super::drops::DropReason;
use super::features::Feature;
use super::layout::{LONG, SHORT, SetId, Side};
use super::peers::TO_PEERS;
use super::ruleset_chain::{RulesetChain, RulesetConfig, base_chains, digest};
use super::source_lists::prefix_lengths;
use crate::plan::AFFINITY_TIMEOUTS;

/// All chains and sets of one family.
#[derive(Debug, Clone)]
pub struct BaseRuleset {
    /// The sets that the agent fills.
    pub filled: Vec<SetId>,
    /// All sets to create, with their names.
    pub sets: Vec<(String, Set)>,
    /// The map of clients' endpoints, which packets fill, with the lengths of its elements.
    pub affinity: (String, RowShape),
    /// The counters that rules count into.
    pub counters: Vec<&'static str>,
    /// The chains; a chain comes before those that jump to it.
    pub chains: Vec<RulesetChain>,
    /// A digest of constant sets and base chains: the comment of the table.
    pub version: String,
}

impl BaseRuleset {
    /// Whether a table of this version may lack a chain, or have it: it is added when it is needed, and deleted when it is not.
    pub fn is_optional(chain: &str) -> bool {
        chain == INVALID || BASE_CHAINS.iter().any(|(name, _)| *name == chain)
    }

    /// For `Family::Ip` or `Family::Ip6`.
    pub fn new(family: Family, config: &RulesetConfig) -> Self {
        let mut filled = vec![
            SetId::Frontends,
            SetId::Rejected,
            SetId::Dropped,
            SetId::Restricted,
            SetId::Split,
            SetId::Masqueraded,
            SetId::ClusterAddresses,
            SetId::Hairpins,
            SetId::Affine,
            SetId::Namespaces,
            SetId::Endpoints,
            SetId::Digests,
        ];
        filled.extend(prefix_lengths(family == Family::Ip6).map(SetId::Sources));
        filled.extend(AFFINITY_TIMEOUTS.map(SetId::AffineFor));
        filled.extend(SHARES.map(SetId::Shares));
        filled.extend((1..=SHORT).map(SetId::Slots));
        for side in Side::ALL {
            filled.extend([SetId::Sticky(side), SetId::Lists(side)]);
            filled.extend(LONG.map(|class| SetId::Long(side, class)));
        }
        if config.forward_to_peers {
            filled.extend([SetId::WithoutLocal, SetId::Peers]);
        }
        let dynamic = dynamic_sets(family);
        let shape = |(name, set): &(String, Set)| (name == AFFINITY).then(|| set.row_shape());
        let affinity = dynamic.iter().find_map(shape).unwrap_or(RowShape { key: 0, range: false, data: 0 });
        let sets: Vec<_> = filled.iter().map(|id| (id.name(), id.set(family))).chain(dynamic).collect();
        let has_counter = |reason: &DropReason| {
            config.features.has(Feature::Counters)
                && (config.forward_to_peers || *reason != DropReason::AlreadyForwarded)
        };
        let mut counters: Vec<_> =
            DropReason::ALL.into_iter().filter(has_counter).map(DropReason::name).collect();
        if config.features.has(Feature::Counters) {
            counters.push(NOT_REMEMBERED);
            counters.extend(config.forward_to_peers.then_some(TO_PEERS));
        }
        let version = version(&sets, &counters);
        let chains = RuleBuilder { family, config }.chains();
        Self { filled, sets, counters, affinity: (AFFINITY.to_owned(), affinity), chains, version }
    }
}

/// Identifies the sets, counters and base chains.
fn version(sets: &[(String, Set)], counters: &[&str]) -> String {
    let (table, mut batch) = (Table::new(Family::Ip, ""), Batch::new());
    for (_, set) in sets {
        batch.add_set(&table, set);
    }
    for counter in counters {
        batch.add_counter(&table, counter);
    }
    for chain in base_chains() {
        batch.add_chain(&table, &chain);
    }
    digest("steerage layout", &batch)
}

// SPDX-License-Identifier: Apache-2.0
//! The chains and sets of one family: the part that does not depend on single Services. [`super::chains`] has the rules.
//!
//! It depends on [`RulesetConfig`] alone. When that changes, the chains that mention it are rewritten in one transaction. Sets that
//! only some Services need are in it when they are needed, see [`super::UsedSets`].

use steerage_nft::{Batch, Family, RowShape, Set, Table};

use super::affinity::AFFINITY_LIMITED;
use super::affinity::{AFFINITY, SHARES, dynamic_sets, is_chain};
use super::chains::{INVALID, RuleBuilder};
use super::drops::DropReason;
use super::features::Feature;
use super::layout::{LONG, SHORT, SetId, Side, model_family};
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
    /// The map of clients' endpoints, which packets fill, with the lengths of its elements, where Services need it.
    pub affinity: Option<(String, RowShape)>,
    /// The counters that rules count into.
    pub counters: Vec<&'static str>,
    /// The chains; a chain comes before those that jump to it.
    pub chains: Vec<RulesetChain>,
    /// A digest of all sets that a table may have, and of its constant base chains: the comment of the table.
    pub version: String,
}

#[cfg(test)]
thread_local! {
    /// How many were computed by this thread.
    pub(crate) static COMPUTED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl BaseRuleset {
    /// Whether a table of this version may lack a chain, or have it: it is added when it is needed, and deleted when it is not.
    pub fn is_optional(chain: &str) -> bool {
        let long =
            || Side::ALL.into_iter().flat_map(|side| LONG.map(|class| SetId::Long(side, class).name()));
        chain == INVALID || is_chain(chain) || long().any(|name| name == chain)
    }

    /// For `Family::Ip` or `Family::Ip6`.
    pub fn new(family: Family, config: &RulesetConfig) -> Self {
        #[cfg(test)]
        COMPUTED.set(COMPUTED.get() + 1);
        let mut filled = vec![
            SetId::ExternalFrontends,
            SetId::Rejected,
            SetId::DroppedClusterFrontends,
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
        let possible: Vec<_> =
            filled.iter().map(|id| (*id, id.set(family))).chain(dynamic_sets(family)).collect();
        let has_counter = |reason: &DropReason| {
            config.features.has(Feature::Counters)
                && (config.forward_to_peers || *reason != DropReason::AlreadyForwarded)
        };
        let mut counters: Vec<_> =
            DropReason::ALL.into_iter().filter(has_counter).map(DropReason::name).collect();
        if config.features.has(Feature::Counters) {
            counters.push(AFFINITY_LIMITED);
            counters.extend(config.forward_to_peers.then_some(TO_PEERS));
        }
        let version = version(possible.iter().map(|(_, set)| set), &counters);
        let is_used = |id: &SetId| config.used.has(model_family(family), *id);
        filled.retain(is_used);
        let sets: Vec<_> = possible
            .into_iter()
            .filter(|(id, _)| is_used(id))
            .map(|(_, set)| (set.name().to_owned(), set))
            .collect();
        let affinity = sets.iter().find(|(name, _)| name == AFFINITY);
        let affinity = affinity.map(|(name, set)| (name.clone(), set.row_shape()));
        let chains = RuleBuilder { family, config }.chains();
        Self { filled, sets, affinity, counters, chains, version }
    }
}

/// Identifies the sets, counters and base chains.
fn version<'s>(sets: impl Iterator<Item = &'s Set>, counters: &[&str]) -> String {
    let (table, mut batch) = (Table::new(Family::Ip, ""), Batch::new());
    for set in sets {
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

// SPDX-License-Identifier: Apache-2.0
//! The transaction from one base ruleset to another, where the table holds the first one. Pure: it depends on nothing that a commit of
//! another program changes.

use steerage_nft::{Batch, Table};

use super::load::add_chains;
use super::repair::rewrite;
use crate::rules::{BaseRuleset, RulesetChain};

/// `None` if the table has to be replaced. The batch is empty where nothing differs.
pub(super) fn rule_changes(table: &Table, before: &BaseRuleset, after: &BaseRuleset) -> Option<Batch> {
    if before.version != after.version {
        return None;
    }
    let of = |base_ruleset: &'_ BaseRuleset, name: &str| {
        base_ruleset.chains.iter().find(|chain| chain.name == name).map(|chain| chain.digest.clone())
    };
    let mut batch = Batch::new();
    let is_in = |base_ruleset: &BaseRuleset, set: &str| base_ruleset.sets.iter().any(|(name, _)| name == set);
    for (_, set) in after.sets.iter().filter(|(name, _)| !is_in(before, name)) {
        batch.add_set(table, set);
    }
    let is_new = |chain: &&RulesetChain| of(before, &chain.name).is_none();
    let (new, old): (Vec<_>, Vec<_>) = after.chains.iter().partition(is_new);
    add_chains(&mut batch, table, new);
    for chain in old.into_iter().filter(|chain| of(before, &chain.name).as_ref() != Some(&chain.digest)) {
        rewrite(&mut batch, table, chain);
    }
    let surplus: Vec<_> = before.chains.iter().filter(|chain| of(after, &chain.name).is_none()).collect();
    // Chains may mention each other, and sets.
    for chain in &surplus {
        batch.flush_chain(table, &chain.name);
    }
    for (name, _) in before.sets.iter().filter(|(name, _)| !is_in(after, name)) {
        batch.delete_set(table, name);
    }
    for chain in surplus {
        batch.delete_chain(table, &chain.name);
    }
    Some(batch)
}

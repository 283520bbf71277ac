// SPDX-License-Identifier: Apache-2.0
//! What makes a table of the kernel match: compares it with what is wanted, and puts the difference into a batch, or several if only
//! elements are wrong, or replaces it. Reads the kernel, and never writes; [`super::FamilyTable`] commits the batches.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_nft::{Batch, ChainInfo, Data, Element, Error, Nft, RuleInfo, SetInfo, Table, TableInfo};

use super::load::add_chains;
use super::scope::{Found, Scope, read};
use crate::plan::Frontend;
use crate::rules::{
    BaseRuleset, Changes, Elements, LARGEST_STEP, RulesetChain, SetId, deleted_udp_frontends, difference,
    repair_steps,
};

/// Remaining affinity that is still taken over. Less may round to zero ticks of the kernel's clock, and such an element would
/// never expire.
pub(super) const MIN_AFFINITY: Duration = Duration::from_secs(1);

/// How the names of the chains end that a new table has until its predecessor is gone.
const HANDOVER: &str = "-handover";

/// The rules of a table by chain, as the kernel lists them.
pub type ChainRules = BTreeMap<String, Vec<Vec<u8>>>;

/// What makes a table match.
#[derive(Default)]
pub(super) struct Repair {
    pub(super) batch: Batch,
    /// Further transactions, where only elements are wrong, and many.
    pub(super) further: Vec<Changes>,
    /// The number of elements that are written.
    pub(super) elements: usize,
    /// UDP frontends of which elements are deleted.
    pub(super) deleted: BTreeSet<Frontend>,
    /// The long lists that were not read, see [`Found::unread`].
    pub(super) unread: BTreeSet<u32>,
    /// The table is replaced: [`end_handover`] follows.
    pub(super) replaces: bool,
    /// The rules that differ, by chain, of chains that are not of another version: another program changed them.
    pub(super) replaced: BTreeMap<String, usize>,
}

/// Whether a table with these chains and sets is not repaired, but replaced.
pub(super) fn must_be_replaced(
    base_ruleset: &BaseRuleset,
    table: &TableInfo,
    chains: &[ChainInfo],
    sets: &[SetInfo],
) -> bool {
    let is_wanted = |info: &&ChainInfo| base_ruleset.chains.iter().any(|chain| chain.name == info.name);
    let is_missing = |name: &&String| !chains.iter().any(|info| info.name == **name);
    let missing = base_ruleset.chains.iter().map(|chain| &chain.name).filter(is_missing);
    let surplus = chains.iter().filter(|info| !is_wanted(info)).map(|info| &info.name);
    let mut differing = missing.chain(surplus);
    // The kernel moves no chain to another hook or priority.
    let is_moved = |chain: &RulesetChain| {
        chains.iter().any(|info| info.name == chain.name && !chain.chain.runs_as(info))
    };
    // Such as those for affinity, if its last Service has been deleted since the process before began.
    let is_repairable = differing.all(|name| BaseRuleset::is_optional(name))
        && unfit_sets(base_ruleset, sets).all(|name| name == SetId::Digests.name());
    table.comment.as_deref() != Some(base_ruleset.version.as_str())
        || !is_repairable
        || base_ruleset.chains.iter().any(is_moved)
}

/// Whether a table has the chains, the rules and the sets of this base ruleset, and no others.
pub(super) fn is_whole(nft: &mut Nft, table: &Table, base_ruleset: &BaseRuleset) -> Result<bool, Error> {
    let Some(info) = nft.table(table)? else { return Ok(false) };
    let (chains, sets) = (nft.chain_infos(table)?, nft.set_infos(table)?);
    let has_policies = |chain: &RulesetChain| {
        chains.iter().any(|info| info.name == chain.name && chain.chain.has_policy_of(info))
    };
    if info.is_dormant
        || must_be_replaced(base_ruleset, &info, &chains, &sets)
        || !base_ruleset.chains.iter().all(has_policies)
        || chains.len() != base_ruleset.chains.len()
        || sets.len() != base_ruleset.sets.len()
    {
        return Ok(false);
    }
    let rules = nft.rules(table)?;
    Ok(base_ruleset.chains.iter().all(|chain| has_rules_of(&rules, chain)))
}

/// Whether a chain has the digest and the number of rules that it should have.
fn has_rules_of(rules: &[RuleInfo], chain: &RulesetChain) -> bool {
    let mut rules = rules.iter().filter(|rule| rule.chain == chain.name).peekable();
    let digest = rules.peek().and_then(|rule| rule.comment.as_deref());
    digest == Some(chain.digest.as_str()) && rules.count() == chain.rules.len()
}

/// Replaces the rules of a chain by the wanted ones.
pub(super) fn rewrite(batch: &mut Batch, table: &Table, chain: &RulesetChain) {
    batch.flush_chain(table, &chain.name);
    for rule in &chain.rules {
        batch.add_rule(table, &chain.name, rule);
    }
}

/// Whether the rules of a chain carry the digest of others, as those of another version or configuration do. Where there is none, or the
/// wanted one, only another program can have changed them.
fn are_of_another_version(rules: &[RuleInfo], chain: &RulesetChain) -> bool {
    let prefix = format!("{} ", chain.name);
    let comments =
        rules.iter().filter(|rule| rule.chain == chain.name).filter_map(|rule| rule.comment.as_deref());
    let digests: Vec<&str> = comments.filter(|comment| comment.starts_with(&prefix)).collect();
    !digests.is_empty() && !digests.contains(&chain.digest.as_str())
}

/// How many rules of a chain are others, or in another place, or missing, or too many.
fn differing_rules(wanted: &ChainRules, found: &ChainRules, chain: &str) -> usize {
    let [wanted, found] = [wanted, found].map(|rules| rules.get(chain).map_or(&[][..], Vec::as_slice));
    let differing = wanted.iter().zip(found).filter(|(wanted, found)| wanted != found).count();
    differing + wanted.len().abs_diff(found.len())
}

/// Sets of another type or size than they should have.
pub(super) fn unfit_sets<'s>(
    base_ruleset: &'s BaseRuleset,
    sets: &'s [SetInfo],
) -> impl Iterator<Item = &'s str> {
    let is_unfit =
        |info: &&SetInfo| base_ruleset.sets.iter().any(|(name, set)| *name == info.name && !set.fits(info));
    sets.iter().filter(is_unfit).map(|info| info.name.as_str())
}

/// Reads the table, and returns what makes it match. `written`: the rules as the kernel lists them where they are right. Without them only
/// digests tell, which do not show whether a rule was replaced.
pub(super) fn repair(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    wanted: &Elements,
    written: Option<&ChainRules>,
    scope: Scope<'_>,
) -> Result<Repair, Error> {
    let mut batch = Batch::new();
    let is_left = matches!(scope, Scope::Damaged(_));
    let Some(info) = nft.table(table)? else {
        if is_left {
            return Ok(Repair::default());
        }
        create(&mut batch, table, base_ruleset, wanted);
        return Ok(Repair { batch, elements: wanted.len(), ..Repair::default() });
    };
    let (chains, infos) = (nft.chain_infos(table)?, nft.set_infos(table)?);
    let wanted_chains: Vec<_> = base_ruleset.chains.iter().map(|chain| &chain.name).collect();
    let digests = SetId::Digests.name();
    let mut sets: Vec<String> = infos.iter().map(|info| info.name.clone()).collect();
    let surplus: Vec<_> =
        chains.iter().map(|info| &info.name).filter(|name| !wanted_chains.contains(name)).collect();
    if must_be_replaced(base_ruleset, &info, &chains, &infos) {
        if is_left {
            return Ok(Repair::default());
        }
        let clients = affinity(nft, table, base_ruleset, &sets);
        tracing::info!(%table, clients = clients.len(), "table has another layout; replacing it");
        replace(&mut batch, table, base_ruleset, wanted);
        if let Some((map, _)) = &base_ruleset.affinity {
            batch.add_elements(table, map, &clients);
        }
        return Ok(Repair { batch, elements: wanted.len(), replaces: true, ..Repair::default() });
    }

    if unfit_sets(base_ruleset, &infos).next().is_some() {
        if is_left {
            return Ok(Repair::default());
        }
        // No rule keeps anybody from making it anew, with another type.
        tracing::info!(%table, map = digests, "map has another type; replacing it");
        batch.delete_set(table, &digests);
        sets.retain(|name| *name != digests);
    }
    for (name, set) in &base_ruleset.sets {
        if !sets.contains(name) {
            batch.add_set(table, set);
        }
    }
    let counters = nft.counters(table)?;
    for counter in base_ruleset.counters.iter().filter(|counter| !counters.contains_key(**counter)) {
        batch.add_counter(table, counter);
    }
    let rules = nft.rules(table)?;
    let found = by_chain(&rules);
    let info_of = |name: &String| chains.iter().find(|info| info.name == *name);
    let (existing, new): (Vec<_>, Vec<_>) =
        base_ruleset.chains.iter().partition(|chain| info_of(&chain.name).is_some());
    add_chains(&mut batch, table, new);
    if info.is_dormant {
        // The kernel takes no new base chain after this in one transaction, and before it no base chain away.
        tracing::info!(%table, "table is dormant; activating it");
        batch.add_table(table, Some(&base_ruleset.version));
    }
    let mut replaced = BTreeMap::new();
    for chain in existing {
        if info_of(&chain.name).is_some_and(|info| !chain.chain.has_policy_of(info)) {
            tracing::info!(%table, chain = chain.name, "chain has another policy; setting it");
            batch.add_chain(table, &chain.chain);
        }
        let has_digest = has_rules_of(&rules, chain);
        let differing = written.map_or(0, |written| differing_rules(written, &found, &chain.name));
        if differing > 0 && !are_of_another_version(&rules, chain) {
            replaced.insert(chain.name.clone(), differing);
        }
        if !has_digest || differing > 0 {
            tracing::info!(%table, chain = chain.name, "chain differs; rewriting it");
            rewrite(&mut batch, table, chain);
        }
    }
    let Found { elements: kernel, unread } = read(nft, table, base_ruleset, wanted, &sets, scope)?;
    let changes = difference(&kernel, wanted);
    let deleted = deleted_udp_frontends(&changes);
    let elements = changes.count();
    let is_foreign = |name: &&String| !base_ruleset.sets.iter().any(|(wanted, _)| wanted == *name);
    let foreign: Vec<_> = sets.iter().filter(is_foreign).collect();
    // Rules that come back before their elements would admit what the elements forbid.
    let is_small = batch.is_empty() && surplus.is_empty() && foreign.is_empty();
    let largest = if is_small { LARGEST_STEP } else { usize::MAX };
    let mut steps = repair_steps(&changes, largest).into_iter();
    if let Some(first) = steps.next() {
        append(&mut batch, table, &first);
    }
    // After the chains that mentioned them were rewritten. Chains may mention each other.
    for name in &surplus {
        tracing::info!(%table, chain = name, "chain is not needed any more; deleting it");
        batch.flush_chain(table, name);
    }
    // A map of another program may jump to one of these chains.
    for name in foreign {
        batch.delete_set(table, name);
    }
    for name in surplus {
        batch.delete_chain(table, name);
    }
    let further = steps.map(Cow::into_owned).collect();
    Ok(Repair { batch, further, elements, deleted, unread, replaces: false, replaced })
}

/// Affinity to take over from a table of another layout, from a map of the same name and lengths. An entry with another meaning
/// matches no endpoint, and its first lookup deletes it.
fn affinity(nft: &mut Nft, table: &Table, base_ruleset: &BaseRuleset, sets: &[String]) -> Vec<Element> {
    let Some((map, shape)) = base_ruleset.affinity.as_ref().filter(|(map, _)| sets.contains(map)) else {
        return Vec::new();
    };
    let fits = |element: &Element| {
        let length = match &element.data {
            Some(Data::Value(value)) => value.len(),
            Some(Data::Verdict(_)) | None => 0,
        };
        let lengths = (element.key.len(), element.key_end.is_some(), length);
        lengths == (shape.key, shape.range, shape.data)
            && element.timeout.is_some_and(|left| left >= MIN_AFFINITY)
    };
    match nft.expiring(table, map) {
        Ok(clients) => clients.into_iter().filter(fits).collect(),
        // Rules matter more.
        Err(error) => {
            tracing::warn!(%table, map, %error, "affinity not readable; clients may change endpoints");
            Vec::new()
        }
    }
}

/// Replaces the table in one transaction.
///
/// Of chains with one priority the kernel runs the newest first, and each chain and each look-up in a map sees by itself whether the
/// transaction has happened. A packet may pass the new chain before it and the old one after it, whose maps are then empty, and stay
/// untranslated. So the new table has each base chain twice, until [`end_handover`]: before the old one, and after it.
pub(super) fn replace(batch: &mut Batch, table: &Table, base_ruleset: &BaseRuleset, wanted: &Elements) {
    batch.destroy_table(table);
    create(batch, table, base_ruleset, wanted);
    for chain in base_ruleset.chains.iter().filter(|chain| chain.chain.is_base()) {
        let name = format!("{}{HANDOVER}", chain.name);
        batch.add_chain(table, &chain.chain.later(name.as_str()));
        for rule in &chain.rules {
            batch.add_rule(table, &name, rule);
        }
    }
}

/// Deletes the chains that only [`replace`] needs. If the process ends before, the next one finds another layout and replaces it.
pub(super) fn end_handover(table: &Table, base_ruleset: &BaseRuleset) -> Batch {
    let mut batch = Batch::new();
    for chain in base_ruleset.chains.iter().filter(|chain| chain.chain.is_base()) {
        batch.delete_chain(table, &format!("{}{HANDOVER}", chain.name));
    }
    batch
}

fn create(batch: &mut Batch, table: &Table, base_ruleset: &BaseRuleset, wanted: &Elements) {
    batch.add_table(table, Some(&base_ruleset.version));
    for (_, set) in &base_ruleset.sets {
        batch.add_set(table, set);
    }
    for counter in &base_ruleset.counters {
        batch.add_counter(table, counter);
    }
    // The kernel walks a map whenever a rule is bound to it: rules come before elements.
    add_chains(batch, table, &base_ruleset.chains);
    for (id, rows) in wanted.sets() {
        batch.add_rows(table, &id.name(), rows.iter());
    }
}

pub(super) fn append(batch: &mut Batch, table: &Table, changes: &Changes) {
    for (id, rows) in &changes.delete {
        batch.delete_rows(table, &id.name(), rows);
    }
    for (id, rows) in &changes.add {
        batch.add_rows(table, &id.name(), rows.iter());
    }
}

pub(super) fn by_chain(rules: &[RuleInfo]) -> ChainRules {
    let mut chains: ChainRules = BTreeMap::new();
    for rule in rules {
        chains.entry(rule.chain.clone()).or_default().push(rule.expressions.clone());
    }
    chains
}

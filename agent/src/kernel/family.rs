// SPDX-License-Identifier: Apache-2.0
//! The table of one address family: creates, adopts, repairs and updates it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_model::Family;
use steerage_nft::{Batch, Data, Element, Error, Nft, Rows, RuleInfo, Table};

use super::load::{add_chains, load};
use super::scope::{Found, Scope, read, read_digests, read_lists};
use crate::foreign::Damage;
use crate::rules::{
    BaseRuleset, Changes, Elements, KernelLists, ListDigest, RulesetConfig, SetId, TABLE, difference,
    kernel_lists,
};

/// Remaining affinity that is still taken over. Less may round to zero ticks of the kernel's clock, and such an element would
/// never expire.
const MIN_AFFINITY: Duration = Duration::from_secs(1);

/// How the names of the chains end that a new table has until its predecessor is gone.
const HANDOVER: &str = "-handover";

/// The rules of a table by chain, as the kernel lists them.
type ChainRules = BTreeMap<String, Vec<Vec<u8>>>;

/// The table of one family.
#[derive(Debug)]
pub struct FamilyTable {
    nft: Nft,
    model: Family,
    family: steerage_nft::Family,
    table: Table,
    /// The rules as listed right after the last write.
    written: Option<ChainRules>,
    /// The last write replaced the table, and left chains that only the replacement needs.
    has_handover: bool,
}

/// A table that was made to match.
#[derive(Debug, Default)]
pub struct Synchronised {
    /// The number of elements written.
    pub elements: usize,
    /// The generations of the ruleset before the write and, if no other program wrote, after it; 0, which no ruleset has, where that is
    /// not known.
    pub generations: (u32, u32),
    /// The long lists that were believed to hold what their digests say.
    pub believed: BTreeSet<u32>,
}

impl FamilyTable {
    /// The table of `family`; does no I/O.
    pub fn new(nft: Nft, model: Family, family: steerage_nft::Family) -> Self {
        Self { nft, model, family, table: Table::new(family, TABLE), written: None, has_handover: false }
    }

    /// Its address family.
    pub fn model(&self) -> Family {
        self.model
    }

    /// Whether nothing is left of a replacement of the table.
    pub fn is_cleaned_up(&self) -> bool {
        !self.has_handover
    }

    /// Its name.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Whether it exists in the kernel.
    pub fn exists(&mut self) -> Result<bool, Error> {
        Ok(self.nft.table(&self.table)?.is_some())
    }

    /// The netlink port that identifies this program's changes.
    pub fn port(&self) -> Result<u32, Error> {
        self.nft.port()
    }

    /// The long lists as the kernel has them; none if there is no such map, or others commit just now.
    pub fn lists(&mut self) -> Result<KernelLists, Error> {
        let endpoints = SetId::Endpoints;
        if !self.has(endpoints)? {
            return Ok(KernelLists::new());
        }
        let rows = self.nft.rows_once(&self.table, &endpoints.name(), endpoints.row_shape(self.model))?;
        Ok(rows.as_ref().map(kernel_lists).unwrap_or_default())
    }

    /// The long lists as the kernel has them whose digests are not those of `wanted`, if it has a digest of them.
    pub fn unknown_lists(&mut self, wanted: &BTreeMap<u32, ListDigest>) -> Result<KernelLists, Error> {
        if !self.has(SetId::Digests)? {
            return Ok(KernelLists::new());
        }
        let mut lists = read_digests(&mut self.nft, &self.table, self.model)?;
        lists.retain(|list, digest| wanted.get(list).is_some_and(|wanted| wanted != digest));
        Ok(kernel_lists(&self.read_lists(&lists, wanted)?))
    }

    /// Reads lists as far as packets look at them: by their digests in one of the two maps.
    pub fn read_lists(
        &mut self,
        lists: &BTreeMap<u32, ListDigest>,
        others: &BTreeMap<u32, ListDigest>,
    ) -> Result<Rows, Error> {
        read_lists(&mut self.nft, &self.table, self.model, lists, others)
    }

    fn has(&mut self, set: SetId) -> Result<bool, Error> {
        Ok(self.nft.table(&self.table)?.is_some() && self.nft.sets(&self.table)?.contains(&set.name()))
    }

    /// Writes a difference in one transaction.
    pub fn write(&mut self, changes: &Changes) -> Result<(), Error> {
        let mut batch = Batch::new();
        append(&mut batch, &self.table, changes);
        self.nft.commit(batch)
    }

    /// Makes the table match, in one transaction, and writes only what differs, as far as `scope` reads. If others commit so often that the
    /// table cannot be read, replaces it unread.
    pub fn synchronise(
        &mut self,
        config: &RulesetConfig,
        wanted: &Elements,
        scope: Scope<'_>,
    ) -> Result<Synchronised, Error> {
        let base_ruleset = BaseRuleset::new(self.family, config);
        let table = self.table.clone();
        self.has_handover = false;
        if self.nft.table(&table)?.is_none() {
            let generations = load(&mut self.nft, &table, &base_ruleset, wanted)?;
            self.written = self.listed()?;
            return Ok(Synchronised { elements: wanted.len(), generations, believed: BTreeSet::new() });
        }
        let written = self.written.as_ref();
        let (mut done, mut is_replaced) = (Synchronised::default(), false);
        let repaired = self.nft.transact(|nft| {
            let Repair { batch, elements, believed, replaces } =
                repair(nft, &table, &base_ruleset, wanted, written, scope)?;
            (done.elements, done.believed, is_replaced) = (elements, believed, replaces);
            Ok::<_, Error>(batch)
        });
        done.generations = match repaired {
            Err(error @ (Error::DumpInterrupted(_) | Error::StaleGeneration)) => {
                tracing::warn!(%table, %error, "table not readable while others commit; replacing it");
                let mut batch = Batch::new();
                replace(&mut batch, &table, &base_ruleset, wanted);
                self.nft.commit(batch)?;
                (done.elements, done.believed, is_replaced) = (wanted.len(), BTreeSet::new(), true);
                (0, 0)
            }
            repaired => repaired?,
        };
        if is_replaced {
            self.has_handover = true;
            self.nft.commit(end_handover(&table, &base_ruleset))?;
            self.has_handover = false;
            // The kernel skips generation 0.
            let after = &mut done.generations.1;
            *after = if *after == 0 { 0 } else { after.checked_add(1).unwrap_or(1) };
        }
        self.written = self.listed()?;
        Ok(done)
    }

    /// Repairs rules, and elements of damaged sets, as [`FamilyTable::synchronise`] does, but reads no other set, and those once. A
    /// listing may lack elements, so it does not replace the comparison of everything. `wanted` returns the elements of some sets.
    pub fn repair_first(
        &mut self,
        config: &RulesetConfig,
        damage: &Damage,
        wanted: impl FnOnce(&[SetId]) -> Elements,
    ) -> Result<usize, Error> {
        let base_ruleset = BaseRuleset::new(self.family, config);
        let is_damaged = |id: &SetId| damage.sets.contains_key(&id.name());
        let damaged: Vec<_> = base_ruleset.filled.iter().copied().filter(is_damaged).collect();
        let wanted = wanted(&damaged);
        let (written, scope) = (self.written.as_ref(), Scope::Damaged(&damaged));
        let (table, mut count) = (self.table.clone(), 0);
        self.nft.transact(|nft| {
            let Repair { batch, elements, .. } = repair(nft, &table, &base_ruleset, &wanted, written, scope)?;
            count = elements;
            Ok::<_, Error>(batch)
        })?;
        Ok(count)
    }

    /// The rules as the kernel lists them; `None` if others commit too often. Then only digests reveal changed rules.
    fn listed(&mut self) -> Result<Option<ChainRules>, Error> {
        match self.nft.rules(&self.table) {
            Ok(rules) => Ok(Some(by_chain(&rules))),
            Err(Error::DumpInterrupted(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The current generation of the ruleset.
    pub fn generation(&mut self) -> Result<u32, Error> {
        self.nft.generation()
    }
}

/// What makes a table match.
struct Repair {
    batch: Batch,
    /// The number of elements that are written.
    elements: usize,
    /// The long lists that were believed.
    believed: BTreeSet<u32>,
    /// The table is replaced: [`end_handover`] follows.
    replaces: bool,
}

/// Reads the table, and returns what makes it match. `written`: the rules as listed right after the last write of this process.
fn repair(
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
            return Ok(Repair { batch, elements: 0, believed: BTreeSet::new(), replaces: false });
        }
        create(&mut batch, table, base_ruleset, wanted);
        return Ok(Repair { batch, elements: wanted.len(), believed: BTreeSet::new(), replaces: false });
    };
    let mut chains = nft.chains(table)?;
    let mut wanted_chains: Vec<_> = base_ruleset.chains.iter().map(|chain| chain.name.clone()).collect();
    chains.sort_unstable();
    wanted_chains.sort_unstable();
    let sets = nft.sets(table)?;
    let missing: Vec<_> = wanted_chains.iter().filter(|name| !chains.contains(name)).collect();
    let is_addable = chains.iter().all(|name| wanted_chains.contains(name))
        && missing.iter().all(|name| BaseRuleset::is_optional(name));
    if info.comment.as_deref() != Some(base_ruleset.version.as_str()) || !is_addable {
        if is_left {
            return Ok(Repair { batch, elements: 0, believed: BTreeSet::new(), replaces: false });
        }
        let clients = affinity(nft, table, base_ruleset, &sets);
        tracing::info!(%table, clients = clients.len(), "table has another layout; replacing it");
        replace(&mut batch, table, base_ruleset, wanted);
        batch.add_elements(table, &base_ruleset.affinity.0, &clients);
        return Ok(Repair { batch, elements: wanted.len(), believed: BTreeSet::new(), replaces: true });
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
    let (new, existing): (Vec<_>, Vec<_>) =
        base_ruleset.chains.iter().partition(|chain| missing.contains(&&chain.name));
    add_chains(&mut batch, table, new);
    for chain in existing {
        let found_rules: Vec<_> = rules.iter().filter(|rule| rule.chain == chain.name).collect();
        let digest = found_rules.first().and_then(|rule| rule.comment.as_deref());
        let unchanged = written.is_none_or(|written| written.get(&chain.name) == found.get(&chain.name));
        if digest != Some(chain.digest.as_str()) || found_rules.len() != chain.rules.len() || !unchanged {
            tracing::info!(%table, chain = chain.name, "chain differs; rewriting it");
            batch.flush_chain(table, &chain.name);
            for rule in &chain.rules {
                batch.add_rule(table, &chain.name, rule);
            }
        }
    }
    let Found { elements: kernel, believed } = read(nft, table, base_ruleset, wanted, &sets, scope)?;
    let changes = difference(&kernel, wanted);
    append(&mut batch, table, &changes);
    // Sets that others added, after the chains that mentioned them were rewritten.
    for name in sets.iter().filter(|name| !base_ruleset.sets.iter().any(|(wanted, _)| wanted == *name)) {
        batch.delete_set(table, name);
    }
    Ok(Repair { batch, elements: changes.count(), believed, replaces: false })
}

/// Affinity to take over from a table of another layout, from a map of the same name and lengths. An entry with another meaning
/// matches no endpoint, and its first lookup deletes it.
fn affinity(nft: &mut Nft, table: &Table, base_ruleset: &BaseRuleset, sets: &[String]) -> Vec<Element> {
    let (map, shape) = &base_ruleset.affinity;
    if !sets.contains(map) {
        return Vec::new();
    }
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
fn replace(batch: &mut Batch, table: &Table, base_ruleset: &BaseRuleset, wanted: &Elements) {
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
fn end_handover(table: &Table, base_ruleset: &BaseRuleset) -> Batch {
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

fn append(batch: &mut Batch, table: &Table, changes: &Changes) {
    for (id, rows) in &changes.delete {
        batch.delete_rows(table, &id.name(), rows);
    }
    for (id, rows) in &changes.add {
        batch.add_rows(table, &id.name(), rows.iter());
    }
}

fn by_chain(rules: &[RuleInfo]) -> ChainRules {
    let mut chains: ChainRules = BTreeMap::new();
    for rule in rules {
        chains.entry(rule.chain.clone()).or_default().push(rule.expressions.clone());
    }
    chains
}

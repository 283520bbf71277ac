// SPDX-License-Identifier: Apache-2.0
//! The table of one address family: creates, adopts, repairs and updates it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_model::Family;
use steerage_nft::{Batch, Data, Element, Error, Nft, Rows, RuleInfo, Table};

use super::inspect::{read_elements, read_matching, read_once};
use super::load::{add_chains, load};
use crate::foreign::Damage;
use crate::plan::Frontend;
use crate::rules::{
    BaseRuleset, CLIENT_MAPS, Changes, Elements, KernelLists, RulesetConfig, SetId, TABLE,
    deleted_udp_frontends, difference, kernel_lists,
};

/// Remaining affinity that is still taken over. Less may round to zero ticks of the kernel's clock, and such an element would
/// never expire.
const MIN_AFFINITY: Duration = Duration::from_secs(1);

/// Attempts to delete all clients that have to be forgotten.
const FORGET_ATTEMPTS: usize = 4;
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
    /// This process has written the table.
    has_written: bool,
    /// The last write replaced the table, and left chains that only the replacement needs.
    has_handover: bool,
    /// The generation of the ruleset and the long lists' endpoints in it, as read for the first write.
    endpoints: Option<(u32, Rows)>,
}

impl FamilyTable {
    /// The table of `family`; does no I/O.
    pub fn new(nft: Nft, model: Family, family: steerage_nft::Family) -> Self {
        Self {
            nft,
            model,
            family,
            table: Table::new(family, TABLE),
            written: None,
            has_written: false,
            has_handover: false,
            endpoints: None,
        }
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

    /// The long lists as the predecessor left them; none if there is no such map, or others commit just now.
    pub fn lists(&mut self) -> Result<KernelLists, Error> {
        let endpoints = SetId::Endpoints;
        if self.nft.table(&self.table)?.is_none() || !self.nft.sets(&self.table)?.contains(&endpoints.name())
        {
            return Ok(KernelLists::new());
        }
        let generation = self.nft.generation()?;
        let rows = self.nft.rows_once(&self.table, &endpoints.name(), endpoints.row_shape(self.model))?;
        let lists = rows.as_ref().map(kernel_lists).unwrap_or_default();
        self.endpoints = rows.map(|rows| (generation, rows));
        Ok(lists)
    }

    /// Writes a difference in one transaction.
    pub fn write(&mut self, changes: &Changes) -> Result<(), Error> {
        let mut batch = Batch::new();
        append(&mut batch, &self.table, changes);
        self.nft.commit(batch)
    }

    /// Makes the table match, whatever it holds now, in one transaction, and writes only what differs. If others commit so often
    /// that the table cannot be read, replaces it unread.
    pub fn synchronise(&mut self, config: &RulesetConfig, wanted: &Elements) -> Result<Synchronised, Error> {
        let base_ruleset = BaseRuleset::new(self.family, config);
        let endpoints = self.endpoints.take();
        let before = Before {
            is_predecessors: !self.has_written,
            written: self.written.as_ref(),
            endpoints: endpoints.as_ref(),
            damaged: None,
        };
        self.has_written = true;
        self.has_handover = false;
        let table = self.table.clone();
        let mut done = Synchronised::default();
        if self.nft.table(&table)?.is_none() {
            let generations = load(&mut self.nft, &table, &base_ruleset, wanted)?;
            self.written = self.listed()?;
            return Ok(Synchronised { elements: wanted.len(), generations, ..done });
        }
        let mut is_replaced = false;
        let repaired = self.nft.transact(|nft| {
            let Repair { batch, elements, deleted, replaces } =
                repair(nft, &table, &base_ruleset, wanted, before)?;
            (done.elements, done.deleted, is_replaced) = (elements, deleted, replaces);
            Ok::<_, Error>(batch)
        });
        done.generations = match repaired {
            Err(error @ (Error::DumpInterrupted(_) | Error::StaleGeneration)) => {
                tracing::warn!(%table, %error, "table not readable while others commit; replacing it");
                let mut batch = Batch::new();
                replace(&mut batch, &table, &base_ruleset, wanted);
                self.nft.commit(batch)?;
                (done.elements, is_replaced) = (wanted.len(), true);
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
        let before = Before {
            is_predecessors: false,
            written: self.written.as_ref(),
            endpoints: None,
            damaged: Some(&damaged),
        };
        let (table, mut count) = (self.table.clone(), 0);
        self.nft.transact(|nft| {
            let Repair { batch, elements, .. } = repair(nft, &table, &base_ruleset, &wanted, before)?;
            count = elements;
            Ok::<_, Error>(batch)
        })?;
        Ok(count)
    }

    /// Deletes the clients of maps of affinity that are not to be kept, for rules that cannot: see [`crate::rules::is_kept`].
    pub fn forget(&mut self, is_kept: impl Fn(&Element) -> bool) -> Result<(), Error> {
        for map in CLIENT_MAPS {
            // A single listing may lack elements, and what is about to expire may be gone before it is deleted.
            for attempt in 1..=FORGET_ATTEMPTS {
                let is_gone = |client: &Element| {
                    !is_kept(client) && client.timeout.is_none_or(|left| left >= MIN_AFFINITY)
                };
                let gone: Vec<_> = self.nft.expiring(&self.table, map)?.into_iter().filter(is_gone).collect();
                if gone.is_empty() {
                    break;
                }
                let mut batch = Batch::new();
                batch.delete_elements(&self.table, map, &gone);
                match self.nft.commit(batch) {
                    Ok(()) => {
                        tracing::debug!(table = %self.table, map, clients = gone.len(), "clients of removed endpoints forgotten");
                    }
                    Err(error) if error.is_not_found() && attempt < FORGET_ATTEMPTS => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
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

/// What [`FamilyTable::synchronise`] did.
#[derive(Debug, Default)]
pub struct Synchronised {
    /// The number of elements written.
    pub elements: usize,
    /// The generations of the ruleset before the write and, if no other program wrote, after it; 0, which no ruleset has, where that
    /// is not known.
    pub generations: (u32, u32),
    /// UDP frontends of which elements were deleted. Not known where the table was replaced.
    pub deleted: BTreeSet<Frontend>,
}

/// What is known of the table before a repair reads it.
#[derive(Clone, Copy)]
struct Before<'a> {
    /// Another process wrote it last.
    is_predecessors: bool,
    /// The rules as listed right after the last write of this process.
    written: Option<&'a ChainRules>,
    /// A generation of the ruleset, and the long lists' endpoints in it.
    endpoints: Option<&'a (u32, Rows)>,
    /// The sets that may differ, if that is known. Then nothing is read or written that takes long: a table that is missing or has
    /// another layout is left as it is.
    damaged: Option<&'a [SetId]>,
}

/// What makes a table match.
struct Repair {
    batch: Batch,
    /// The number of elements that are written.
    elements: usize,
    /// UDP frontends of which elements are deleted.
    deleted: BTreeSet<Frontend>,
    /// The table is replaced: [`end_handover`] follows.
    replaces: bool,
}

/// Reads the table, and returns what makes it match.
fn repair(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    wanted: &Elements,
    before: Before<'_>,
) -> Result<Repair, Error> {
    let mut batch = Batch::new();
    let is_left = before.damaged.is_some();
    let Some(info) = nft.table(table)? else {
        if is_left {
            return Ok(Repair { batch, elements: 0, deleted: BTreeSet::new(), replaces: false });
        }
        create(&mut batch, table, base_ruleset, wanted);
        return Ok(Repair { batch, elements: wanted.len(), deleted: BTreeSet::new(), replaces: false });
    };
    let mut chains = nft.chains(table)?;
    let mut wanted_chains: Vec<_> = base_ruleset.chains.iter().map(|chain| chain.name.clone()).collect();
    chains.sort_unstable();
    wanted_chains.sort_unstable();
    let sets = nft.sets(table)?;
    let missing: Vec<_> = wanted_chains.iter().filter(|name| !chains.contains(name)).collect();
    let surplus: Vec<_> = chains.iter().filter(|name| !wanted_chains.contains(name)).collect();
    // Such as those for affinity, if the last Service with it was deleted while no agent ran.
    let is_repairable = missing.iter().chain(&surplus).all(|name| BaseRuleset::is_optional(name));
    if info.comment.as_deref() != Some(base_ruleset.version.as_str()) || !is_repairable {
        if is_left {
            return Ok(Repair { batch, elements: 0, deleted: BTreeSet::new(), replaces: false });
        }
        let clients = affinity(nft, table, base_ruleset, &sets);
        tracing::info!(%table, clients = clients.len(), "table has another layout; replacing it");
        replace(&mut batch, table, base_ruleset, wanted);
        batch.add_elements(table, &base_ruleset.affinity.0, &clients);
        return Ok(Repair { batch, elements: wanted.len(), deleted: BTreeSet::new(), replaces: true });
    }

    for name in surplus {
        tracing::info!(%table, chain = name, "chain is not needed any more; deleting it");
        batch.delete_chain(table, name);
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
        let unchanged =
            before.written.is_none_or(|written| written.get(&chain.name) == found.get(&chain.name));
        if digest != Some(chain.digest.as_str()) || found_rules.len() != chain.rules.len() || !unchanged {
            tracing::info!(%table, chain = chain.name, "chain differs; rewriting it");
            batch.flush_chain(table, &chain.name);
            for rule in &chain.rules {
                batch.add_rule(table, &chain.name, rule);
            }
        }
    }
    let known = match before.endpoints {
        Some((generation, rows)) if *generation == nft.generation()? => Some((SetId::Endpoints, rows)),
        _ => None,
    };
    // What the predecessor wrote is older than this process, so no set grows just now.
    let kernel = if let Some(damaged) = before.damaged {
        read_once(nft, table, damaged, wanted.family(), &sets)?
    } else if before.is_predecessors {
        read_matching(nft, table, base_ruleset, wanted, &sets, known)?
    } else {
        read_elements(nft, table, base_ruleset, wanted.family(), &sets)?
    };
    let changes = difference(&kernel, wanted);
    append(&mut batch, table, &changes);
    // Sets that others added, after the chains that mentioned them were rewritten.
    for name in sets.iter().filter(|name| !base_ruleset.sets.iter().any(|(wanted, _)| wanted == *name)) {
        batch.delete_set(table, name);
    }
    let deleted = deleted_udp_frontends(&changes);
    Ok(Repair { batch, elements: changes.count(), deleted, replaces: false })
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

// SPDX-License-Identifier: Apache-2.0
//! The table of one address family: creates, adopts, repairs and updates it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steerage_model::Family;
use steerage_nft::{Batch, Element, Error, Nft, Rows, Table};

use super::load::{Loaded, PAUSE, load, load_rest};
use super::repair::{
    ChainRules, MIN_AFFINITY, Repair, append, by_chain, end_handover, is_whole, must_be_replaced, repair,
    replace, unfit_sets,
};
use super::rule_changes::rule_changes;
use super::scope::{Scope, read_digests, read_lists};
use super::trial::try_rules;
use crate::foreign::Damage;
use crate::plan::Frontend;
use crate::rules::{
    BaseRuleset, CLIENT_MAPS, Changes, Elements, KernelLists, LARGEST_STEP, ListDigest, RulesetConfig, SetId,
    TABLE, UsedSets, kernel_lists, steps,
};

/// Attempts to delete all clients that have to be forgotten.
const FORGET_ATTEMPTS: usize = 4;
/// Attempts to list the order of long lists.
const LIST_ATTEMPTS: usize = 4;

/// The table of one family.
#[derive(Debug)]
pub struct FamilyTable {
    nft: Nft,
    model: Family,
    family: steerage_nft::Family,
    table: Table,
    /// The base ruleset of the last configuration.
    base: Option<(RulesetConfig, Arc<BaseRuleset>)>,
    /// The rules as listed right after the last write, or before the first one, as a trial gave them.
    written: Option<ChainRules>,
    /// They are of a trial.
    are_tried: bool,
    /// The last write replaced the table, and left chains that only the replacement needs.
    has_handover: bool,
    /// What [`FamilyTable::finish_load`] is to load.
    rest: Option<Changes>,
    /// What [`FamilyTable::take_deleted`] will return.
    deleted: BTreeSet<Frontend>,
    /// What [`FamilyTable::take_replaced`] will return.
    replaced: BTreeMap<String, usize>,
}

impl FamilyTable {
    /// The table of `family`; does no I/O.
    pub fn new(nft: Nft, model: Family, family: steerage_nft::Family) -> Self {
        let (table, deleted) = (Table::new(family, TABLE), BTreeSet::new());
        let (base, written, rest, replaced) = (None, None, None, BTreeMap::new());
        let (are_tried, has_handover) = (false, false);
        Self { nft, model, family, table, base, written, are_tried, has_handover, rest, deleted, replaced }
    }

    /// What the table has besides elements: computed once for each configuration.
    fn base_ruleset(&mut self, config: &RulesetConfig) -> Arc<BaseRuleset> {
        match &self.base {
            Some((of, base)) if of.has_same_rules(config, self.model) => Arc::clone(base),
            _ => {
                let base = Arc::new(BaseRuleset::new(self.family, config));
                self.base = Some((config.clone(), Arc::clone(&base)));
                base
            }
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

    /// The long lists as the kernel has them; none if there is no such map, or others commit all the time.
    pub fn lists(&mut self) -> Result<KernelLists, Error> {
        let endpoints = SetId::Endpoints;
        if !self.has(endpoints)? {
            return Ok(KernelLists::new());
        }
        for _ in 0..LIST_ATTEMPTS {
            let rows = self.nft.rows_once(&self.table, &endpoints.name(), endpoints.row_shape(self.model))?;
            if let Some(rows) = rows {
                return Ok(kernel_lists(&rows));
            }
        }
        Ok(KernelLists::new())
    }

    /// The long lists as the kernel has them whose digests are not those of `wanted`, if it has a digest of them. All lists, if
    /// [`Scope::Digests`] will not believe any: the table has no digests, or is going to be replaced.
    pub fn differing_lists(
        &mut self,
        config: &RulesetConfig,
        wanted: &BTreeMap<u32, ListDigest>,
    ) -> Result<KernelLists, Error> {
        let Some(info) = self.nft.table(&self.table)? else { return Ok(KernelLists::new()) };
        let (chains, sets) = (self.nft.chain_infos(&self.table)?, self.nft.set_infos(&self.table)?);
        let has_digests = sets.iter().any(|set| set.name == SetId::Digests.name());
        if !has_digests || must_be_replaced(&self.base_ruleset(config), &info, &chains, &sets) {
            return self.lists();
        }
        let mut lists = read_digests(&mut self.nft, &self.table, self.model)?;
        lists.retain(|list, digest| wanted.get(list).is_some_and(|wanted| wanted != digest));
        Ok(kernel_lists(&read_lists(&mut self.nft, &self.table, self.model, &lists, wanted)?))
    }

    /// The endpoints of lists with these digests, as far as packets look at them.
    pub fn read_lists(&mut self, lists: &BTreeMap<u32, ListDigest>) -> Result<Rows, Error> {
        read_lists(&mut self.nft, &self.table, self.model, lists, &BTreeMap::new())
    }

    fn has(&mut self, set: SetId) -> Result<bool, Error> {
        Ok(self.nft.table(&self.table)?.is_some() && self.nft.sets(&self.table)?.contains(&set.name()))
    }

    /// Writes a difference: a large one in several transactions, see [`steps`]. If one fails, those before it stay.
    pub fn write(&mut self, changes: &Changes) -> Result<(), Error> {
        for (number, step) in steps(changes, LARGEST_STEP).into_iter().enumerate() {
            if number > 0 {
                std::thread::sleep(PAUSE);
            }
            self.commit_changes(&step)?;
        }
        Ok(())
    }

    /// Makes the rules and sets of a table that is as it was written match another configuration, before elements that need them: a packet
    /// that met the old rules must not meet the new elements. Returns whether that was necessary.
    pub fn write_rules(&mut self, config: &RulesetConfig) -> Result<bool, Error> {
        let Some((of, before)) = self.base.clone() else { return Err(Error::StaleGeneration) };
        if of.has_same_rules(config, self.model) {
            return Ok(false);
        }
        let base_ruleset = self.base_ruleset(config);
        let batch = rule_changes(&self.table, &before, &base_ruleset).ok_or(Error::StaleGeneration)?;
        if batch.is_empty() {
            return Ok(false);
        }
        // Otherwise the monitor tells next, and what the table lacks comes back together with its elements. Where others commit so often that
        // it cannot be listed, no comparison would succeed either.
        if unless_interrupted(is_whole(&mut self.nft, &self.table, &before))? == Some(false) {
            return Err(Error::StaleGeneration);
        }
        self.nft.commit(batch)?;
        self.written = self.listed()?;
        Ok(true)
    }

    /// Makes rules and sets match, and reads and writes no elements. Returns the generations before and after. `None` if the table is not
    /// whole as `before`: what it lacks must come back together with its elements, since rules admit what is in no set.
    fn fit_rules(
        &mut self,
        before: &BaseRuleset,
        base_ruleset: &BaseRuleset,
    ) -> Result<Option<(u32, u32)>, Error> {
        let (table, none, written) = (self.table.clone(), Elements::new(self.model), self.written.as_ref());
        let (mut was_whole, mut replaced) = (true, BTreeMap::new());
        let generations = self.nft.transact(|nft| {
            was_whole = is_whole(nft, &table, before)?;
            if !was_whole {
                return Ok(Batch::new());
            }
            let repair = repair(nft, &table, base_ruleset, &none, written, Scope::Damaged(&[]))?;
            replaced = repair.replaced;
            Ok::<_, Error>(repair.batch)
        })?;
        if !was_whole {
            return Ok(None);
        }
        self.note_written(replaced)?;
        Ok(Some(generations))
    }

    /// Lists the rules as they should be, if this process has not written them, by a trial in a table of its own. A digest tells what the
    /// last agent wrote, and not whether another program has replaced a rule since. Returns the generations before and after.
    fn try_rules(&mut self, base_ruleset: &BaseRuleset) -> Result<(u32, u32), Error> {
        if self.written.is_some() && !self.are_tried {
            return Ok((0, 0));
        }
        self.written = None;
        let info = self.nft.table(&self.table)?;
        // One of another version is replaced with all its rules.
        if info.is_none_or(|info| info.comment.as_ref() != Some(&base_ruleset.version)) {
            return Ok((0, 0));
        }
        match try_rules(&mut self.nft, self.family, base_ruleset) {
            Ok((rules, generations)) => {
                (self.written, self.are_tried) = (Some(rules), true);
                Ok(generations)
            }
            Err(error) => {
                tracing::warn!(table = %self.table, %error, "expected rules not listed; comparing only their digests");
                Ok((0, 0))
            }
        }
    }

    /// Lists the rules after a write. `replaced`: those that it found to be others, by chain.
    fn note_written(&mut self, replaced: BTreeMap<String, usize>) -> Result<(), Error> {
        // Later the monitor tells.
        if std::mem::take(&mut self.are_tried) {
            self.replaced.extend(replaced);
        }
        self.written = self.listed()?;
        Ok(())
    }

    /// The configuration with the sets, too, that the table has and nobody needs any more: the elements in them go first. As it is where
    /// the table is going to be replaced.
    fn with_present_sets(&mut self, config: &RulesetConfig) -> Result<RulesetConfig, Error> {
        let base_ruleset = self.base_ruleset(config);
        let Some(info) = self.nft.table(&self.table)? else { return Ok(config.clone()) };
        let (chains, sets) = (self.nft.chain_infos(&self.table)?, self.nft.set_infos(&self.table)?);
        if must_be_replaced(&base_ruleset, &info, &chains, &sets) {
            return Ok(config.clone());
        }
        // One of another type is not what it is named after: it is deleted, like all that should not be there.
        let all = UsedSets::of_table(self.model, sets.iter().map(|set| set.name.as_str()));
        let all = RulesetConfig { used: all.union(&config.used), ..config.clone() };
        if all == *config {
            return Ok(all);
        }
        let unfit: Vec<_> =
            unfit_sets(&BaseRuleset::new(self.family, &all), &sets).map(str::to_owned).collect();
        let fitting =
            sets.iter().map(|set| set.name.as_str()).filter(|name| !unfit.iter().any(|u| u == name));
        let present = UsedSets::of_table(self.model, fitting);
        Ok(RulesetConfig { used: present.union(&config.used), ..config.clone() })
    }

    /// Adds the rules and sets that a table lacks, where it is whole without them. Else they have to come back together with their
    /// elements. Returns the generations before and after.
    fn grow(&mut self, config: &RulesetConfig, base_ruleset: &BaseRuleset) -> Result<(u32, u32), Error> {
        let sets = self.nft.sets(&self.table)?;
        let used = UsedSets::of_table(self.model, sets.iter().map(String::as_str));
        if used.has_all(&config.used, self.model) {
            return Ok((0, 0));
        }
        let before = BaseRuleset::new(self.family, &RulesetConfig { used, ..config.clone() });
        Ok(self.fit_rules(&before, base_ruleset)?.unwrap_or_default())
    }

    fn commit_changes(&mut self, changes: &Changes) -> Result<(), Error> {
        let mut batch = Batch::new();
        append(&mut batch, &self.table, changes);
        self.nft.commit(batch)
    }

    /// The further transactions of a repair. Returns the generation after them, if that before them is known and nobody else writes.
    fn commit_further(&mut self, further: &[Changes], mut generation: u32) -> Result<u32, Error> {
        for changes in further {
            std::thread::sleep(PAUSE);
            self.commit_changes(changes)?;
            generation = following(generation);
        }
        Ok(generation)
    }

    /// Makes the table match, and writes only what differs, as far as `scope` reads: in one transaction, or in several if only elements
    /// differ, and many. If others commit so often that the table cannot be read, replaces it unread.
    pub fn synchronise(
        &mut self,
        config: &RulesetConfig,
        wanted: &Elements,
        scope: Scope<'_>,
    ) -> Result<Synchronised, Error> {
        let base_ruleset = self.base_ruleset(config);
        (self.has_handover, self.rest) = (false, None);
        let table = self.table.clone();
        let mut done = Synchronised::default();
        if self.nft.table(&table)?.is_none() {
            let Loaded { generations, rest } = load(&mut self.nft, &table, &base_ruleset, wanted)?;
            self.rest = rest;
            self.note_written(BTreeMap::new())?;
            return Ok(Synchronised { elements: wanted.len(), generations, ..done });
        }
        let present = unless_interrupted(self.with_present_sets(config))?.unwrap_or_else(|| config.clone());
        let has_more = present != *config;
        let with_present = if has_more {
            Arc::new(BaseRuleset::new(self.family, &present))
        } else {
            Arc::clone(&base_ruleset)
        };
        let tried = self.try_rules(&with_present)?;
        let grown = unless_interrupted(self.grow(&present, &with_present))?.unwrap_or_default();
        let (written, mut is_replaced, mut steps) = (self.written.as_ref(), false, Vec::new());
        let (mut frontends, mut others) = (BTreeSet::new(), BTreeMap::new());
        let repaired = self.nft.transact(|nft| {
            let repair = repair(nft, &table, &with_present, wanted, written, scope)?;
            let Repair { batch, further, elements, deleted, unread, replaces, replaced } = repair;
            (steps, frontends, others) = (further, deleted, replaced);
            done = Synchronised { elements, unread, ..Synchronised::default() };
            is_replaced = replaces;
            Ok::<_, Error>(batch)
        });
        // Also if a further transaction fails: the next comparison does not find them any more.
        self.deleted.extend(frontends);
        done.generations = match repaired {
            Err(error @ (Error::DumpInterrupted(_) | Error::StaleGeneration)) => {
                tracing::warn!(%table, %error, "table not readable while others commit; replacing it");
                let mut batch = Batch::new();
                replace(&mut batch, &table, &with_present, wanted);
                self.nft.commit(batch)?;
                done = Synchronised { elements: wanted.len(), ..Synchronised::default() };
                (is_replaced, steps, others) = (true, Vec::new(), BTreeMap::new());
                (0, 0)
            }
            repaired => repaired?,
        };
        for before in [grown, tried].into_iter().filter(|(before, _)| *before != 0) {
            if before.1 == done.generations.0 {
                done.generations.0 = before.0;
            }
        }
        done.generations.1 = self.commit_further(&steps, done.generations.1)?;
        if is_replaced {
            self.has_handover = true;
            self.nft.commit(end_handover(&table, &with_present))?;
            self.has_handover = false;
            done.generations.1 = following(done.generations.1);
        }
        self.note_written(others)?;
        if has_more
            && let Some(Some(shrunk)) = unless_interrupted(self.fit_rules(&with_present, &base_ruleset))?
        {
            done.generations.1 = if shrunk.0 == done.generations.1 { shrunk.1 } else { 0 };
        }
        Ok(done)
    }

    /// Loads what [`FamilyTable::synchronise`] left of a new table: Services with very many endpoints. Returns the generations of the
    /// ruleset before and after it, if there was something.
    pub fn finish_load(&mut self) -> Result<Option<(u32, u32)>, Error> {
        let rest = self.rest.take();
        rest.map(|rest| load_rest(&mut self.nft, &self.table, rest)).transpose()
    }

    /// Repairs rules, and elements of damaged sets, as [`FamilyTable::synchronise`] does, but reads no other set, and those once. A
    /// listing may lack elements, so it does not replace the comparison of everything. `wanted` returns the elements of some sets.
    pub fn repair_first(
        &mut self,
        config: &RulesetConfig,
        damage: &Damage,
        wanted: impl FnOnce(&[SetId]) -> Elements,
    ) -> Result<usize, Error> {
        let base_ruleset = self.base_ruleset(config);
        let is_damaged = |id: &SetId| damage.sets.contains_key(&id.name());
        let damaged: Vec<_> = base_ruleset.filled.iter().copied().filter(is_damaged).collect();
        let wanted = wanted(&damaged);
        let (written, scope) = (self.written.as_ref(), Scope::Damaged(&damaged));
        let (table, mut count, mut steps) = (self.table.clone(), 0, Vec::new());
        let mut frontends = BTreeSet::new();
        self.nft.transact(|nft| {
            let repair = repair(nft, &table, &base_ruleset, &wanted, written, scope)?;
            let Repair { batch, further, elements, deleted, .. } = repair;
            (count, steps, frontends) = (elements, further, deleted);
            Ok::<_, Error>(batch)
        })?;
        self.deleted.extend(frontends);
        self.commit_further(&steps, 0)?;
        Ok(count)
    }

    /// The UDP frontends of which repairs deleted elements since the last call, also one that failed halfway. Not known where the table was
    /// replaced.
    pub fn take_deleted(&mut self) -> BTreeSet<Frontend> {
        std::mem::take(&mut self.deleted)
    }

    /// The rules as the kernel lists them where they are right, if that is known.
    pub fn written(&self) -> Option<&ChainRules> {
        self.written.as_ref()
    }

    /// The rules that another program had replaced before this process began, by chain, since the last call.
    pub fn take_replaced(&mut self) -> BTreeMap<String, usize> {
        std::mem::take(&mut self.replaced)
    }

    /// Deletes the clients of maps of affinity that are not to be kept, for rules that cannot: see [`crate::rules::is_kept`].
    pub fn forget(&mut self, is_kept: impl Fn(&Element) -> bool) -> Result<(), Error> {
        let sets = self.nft.sets(&self.table)?;
        // Without Services that have affinity there is none.
        for map in CLIENT_MAPS.into_iter().filter(|map| sets.iter().any(|set| set == map)) {
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

/// Nothing where others commit so often that the table cannot be read: what depends on it can wait.
fn unless_interrupted<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Err(Error::DumpInterrupted(_) | Error::StaleGeneration) => Ok(None),
        result => result.map(Some),
    }
}

/// The generation after one, if that is known. The kernel skips generation 0.
fn following(generation: u32) -> u32 {
    if generation == 0 { 0 } else { generation.checked_add(1).unwrap_or(1) }
}

/// What [`FamilyTable::synchronise`] did.
#[derive(Debug, Default)]
pub struct Synchronised {
    /// The number of elements written.
    pub elements: usize,
    /// The generations of the ruleset before the write and, if no other program wrote, after it; 0, which no ruleset has, where that
    /// is not known.
    pub generations: (u32, u32),
    /// The long lists that were not read.
    pub unread: BTreeSet<u32>,
}

#[cfg(test)]
mod tests {
    use steerage_requirements::{in_new_netns, requires};

    use super::*;
    use crate::kernel::Dataplane;
    use crate::rules::{COMPUTED, Ruleset};

    /// The sets that Services of the other family need.
    #[test]
    fn rules_of_one_family_do_not_depend_on_the_others_services() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let family = steerage_nft::Family::Ip6;
            let mut table = FamilyTable::new(Nft::open().unwrap(), Family::V6, family);
            let mut config = RulesetConfig::default();
            let (none, all) = (Elements::new(Family::V6), Scope::Everything);
            table.synchronise(&config, &none, all).unwrap();
            COMPUTED.set(0);
            for (of, set, expected) in [
                (Family::V4, "sources-24", false),
                (Family::V6, "sources-32", true),
                (Family::V4, "long-64", false),
            ] {
                config.used = UsedSets::of_table(of, [set].into_iter()).union(&config.used);
                assert_eq!(table.write_rules(&config).unwrap(), expected, "{of} {set}");
            }
            assert_eq!(COMPUTED.get(), 1, "base rulesets");
            assert_eq!(table.synchronise(&config, &none, all).unwrap().elements, 0);
        });
    }

    /// The digests of all rules take milliseconds, in which a starting process does not serve.
    #[test]
    fn base_ruleset_is_computed_once_for_each_family() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            for is_restart in [false, true] {
                COMPUTED.set(0);
                let (mut dataplane, mut ruleset) = (Dataplane::open().unwrap(), Ruleset::default());
                dataplane.write(&mut ruleset, BTreeMap::new()).unwrap();
                dataplane.mark_out_of_sync();
                dataplane.write(&mut ruleset, BTreeMap::new()).unwrap();
                assert_eq!(COMPUTED.get(), dataplane.families().len(), "restart: {is_restart}");
            }
        });
    }
}

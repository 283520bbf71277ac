// SPDX-License-Identifier: Apache-2.0
//! The writer: makes the kernel's tables hold what a [`Ruleset`] says. It decides nothing else.
//!
//! The first comparison of a process believes the digests of long lists. The agent's loop then has them read bit by bit, see
//! [`Dataplane::read_some_lists`]; those of a Service are read before it changes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_model::{Family, Key};
use steerage_nft::{CommitLog, Error, Monitor, Nft};

use super::family::Synchronised;
use super::monitor::{Notice, Noticed, OwnWrites, watch_foreign};
use super::repair::ChainRules;
use super::repair_pause::RepairPause;
use super::scope::Scope;
use super::unread_lists::{ListNumbers, UnreadLists};
use super::{FAMILIES, FamilyTable, has_ipv6};
use crate::foreign::ForeignChange;
use crate::plan::ServicePlan;
use crate::rules::{
    Changes, Difference, Elements, Feature, KernelState, Ruleset, RulesetConfig, SetId, is_kept,
};

/// The rules of a family's table, see [`Dataplane::written_rules`].
pub type WrittenRules = BTreeMap<Family, ChainRules>;

/// The slots of long lists that packets look at.
type ListSizes = BTreeMap<(Family, u32), u32>;

/// The lists that are new or have more slots now.
fn grown(new: &ListSizes, old: &ListSizes) -> ListNumbers {
    new.iter()
        .filter(|(list, slots)| old.get(list).is_none_or(|old| old < slots))
        .map(|(list, _)| *list)
        .collect()
}

/// A successful write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Elements added and deleted.
    pub elements: usize,
    /// Everything was compared with the kernel.
    pub full: bool,
    /// Long lists that were not what their digests said.
    pub wrong_lists: usize,
}

/// A write to the table of one family, successful or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilyWrite {
    /// The family.
    pub family: Family,
    /// Everything was compared with the kernel.
    pub full: bool,
    /// Its time, with the reading that it needed.
    pub took: Duration,
    /// The table holds what it should.
    pub worked: bool,
    /// Nothing of a replaced table is left.
    pub cleaned_up: bool,
}

/// The tables of this network namespace.
#[derive(Debug)]
pub struct Dataplane {
    tables: Vec<FamilyTable>,
    families: Vec<Family>,
    /// Of the last [`Dataplane::write`].
    writes: Vec<FamilyWrite>,
    state: KernelState,
    /// The next comparison believes digests: none of this process has succeeded yet, and nobody is known to have changed the tables; or
    /// what others changed is known and repaired.
    believes_digests: bool,
    /// Whether this process has written all tables.
    has_written: bool,
    /// No slot of a long list holds what another program wrote before.
    has_compared_everything: bool,
    unread: UnreadLists,
    /// Rules that another program replaced while no agent ran.
    found: ForeignChange,
    /// Of all tables.
    commits: CommitLog,
    watch: Option<ForeignWatch>,
}

/// The watch for what other programs do.
struct ForeignWatch {
    notice: Notice,
    is_running: bool,
    pause: RepairPause,
}

impl fmt::Debug for ForeignWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignWatch").field("is_running", &self.is_running).finish_non_exhaustive()
    }
}

impl Dataplane {
    /// Opens netlink sockets in the network namespace of the calling thread. Writes nothing. A family that the kernel lacks, or that
    /// is disabled on this host, is left out.
    pub fn open() -> Result<Self, Error> {
        let (mut tables, commits) = (Vec::new(), CommitLog::default());
        for (model, family) in FAMILIES {
            if model == Family::V6 && !has_ipv6() {
                tracing::info!("IPv6 is disabled on this host; its Services are not served");
                continue;
            }
            let mut nft = Nft::open()?;
            nft.log_commits(commits.clone());
            match nft.tables(family) {
                Ok(_) => tables.push(FamilyTable::new(nft, model, family)),
                Err(error) if error.is_unsupported() => {
                    tracing::warn!(family = %model, "kernel lacks this address family; its Services are not served");
                }
                Err(error) => return Err(error),
            }
        }
        let families = tables.iter().map(FamilyTable::model).collect();
        Ok(Self {
            tables,
            families,
            writes: Vec::new(),
            state: KernelState::Unknown,
            believes_digests: true,
            has_written: false,
            has_compared_everything: false,
            unread: UnreadLists::default(),
            found: ForeignChange::default(),
            commits,
            watch: None,
        })
    }

    /// Tells what other programs do, see [`Noticed`], from the first successful write on. Not earlier: while anybody listens, the
    /// kernel builds a message for each element of a load, which doubles its work.
    pub fn watch_foreign(&mut self, notice: impl Fn(Noticed) -> bool + Send + Sync + 'static) {
        self.watch =
            Some(ForeignWatch { notice: Arc::new(notice), is_running: false, pause: RepairPause::default() });
    }

    /// Takes note of a [`Noticed::Change`]: the tables are not what was written, and nobody watches them until the next write that
    /// compares them. If all of the change is known and [repaired](Dataplane::repair_first), that believes the digests of long lists,
    /// which are read afterwards, between updates: to list all of them takes the kernel seconds where they are large.
    pub fn foreign_change_noticed(&mut self, is_repaired: bool) {
        (self.state, self.believes_digests) = (KernelState::Unknown, is_repaired);
        self.has_compared_everything &= !is_repaired;
        if let Some(watch) = &mut self.watch {
            watch.is_running = false;
        }
    }

    /// Repairs what a notice names, by one listing of it alone, where the tables held all of `ruleset` before. That is some
    /// milliseconds; it does not replace the comparison of everything. Leaves deleted tables to that, which does not read them.
    /// Returns the number of elements written.
    pub fn repair_first(&mut self, ruleset: &mut Ruleset, change: &ForeignChange) -> Result<usize, Error> {
        let mut written = 0;
        for (table, damage) in change.damage().into_iter().flatten().filter(|(_, damage)| !damage.is_deleted)
        {
            let Some(ours) = self.tables.iter_mut().find(|ours| *ours.table() == *table) else { continue };
            let model = ours.model();
            if self.unread.are_of(model) && damage.sets.contains_key(&SetId::Endpoints.name()) {
                // Otherwise it would write believed lists anew, in another order.
                ruleset.adopt(model, &ours.lists()?);
            }
            let wanted = |ids: &[_]| match ids {
                [] => Elements::new(model),
                ids => ruleset.all_elements(model).only(ids),
            };
            written += ours.repair_first(ruleset.config(), damage, wanted)?;
        }
        Ok(written)
    }

    /// The families that have a table.
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// What the last [`Dataplane::write`] did. A family without differences is not written, nor one after another that failed.
    pub fn writes(&self) -> &[FamilyWrite] {
        &self.writes
    }

    /// What is known of the tables.
    pub fn state(&self) -> KernelState {
        self.state
    }

    /// Has the next write compare everything.
    pub fn mark_out_of_sync(&mut self) {
        self.state = KernelState::Unknown;
    }

    /// Replaces the plans of some Services in `ruleset`, and makes the kernel's tables hold what it then says. Compares everything where
    /// the difference or the kernel's state is not known. After an error the state is unknown; a family is written all the same if only
    /// the other one fails. No packet meets a frontend that was written in part: each family is one transaction, or several that leave
    /// each frontend as it was or as it will be, see [`crate::rules::steps`]. A new table gets its base chains last.
    pub fn write(
        &mut self,
        ruleset: &mut Ruleset,
        updates: BTreeMap<Key, ServicePlan>,
    ) -> Result<Written, Error> {
        self.writes.clear();
        let wrong_lists = self.read_lists_of(&updates, ruleset);
        let sizes = self.sizes(&updates.keys(), ruleset);
        let services: Vec<Key> = if sizes.is_some() { updates.keys().cloned().collect() } else { Vec::new() };
        let difference = ruleset.update(updates, self.state);
        // Another program may have filled slots which packets did not look at before. They are read soon after the write.
        let grown = self.sizes(&services.iter(), ruleset).zip(sizes).map(|(new, old)| grown(&new, &old));
        // Unknown until the write is known to have worked.
        let state = std::mem::replace(&mut self.state, KernelState::Unknown);
        let has_lost_endpoints = match &difference {
            Difference::Elements(changes) => changes.iter().any(Changes::removes_endpoints_with_affinity),
            Difference::Full => true,
        };
        let (written, state) = match (&difference, state) {
            (Difference::Elements(_), KernelState::InSync) => {
                (self.write_elements(ruleset.config(), &difference)?, KernelState::InSync)
            }
            (Difference::Full, _) | (_, KernelState::Unknown) => {
                self.adopt_lists(ruleset, state);
                self.write_all(ruleset)?
            }
        };
        if !ruleset.config().features.has(Feature::Deletion) && (has_lost_endpoints || written.full) {
            for table in &mut self.tables {
                table.forget(|client| is_kept(ruleset.desired(), client))?;
            }
        }
        self.state = state;
        self.unread.extend(grown.unwrap_or_default());
        Ok(Written { wrong_lists, ..written })
    }

    /// Whether [`Dataplane::read_some_lists`] has something to read: not while the kernel's state is not known, because the next write
    /// compares everything.
    pub fn has_unread_lists(&self) -> bool {
        self.state == KernelState::InSync && !self.unread.is_empty()
    }

    /// Reads some long lists that were only believed, and repairs those that are not what their digests say. Returns their number.
    pub fn read_some_lists(&mut self, ruleset: &mut Ruleset) -> usize {
        let lists = self.unread.next(ruleset);
        self.read_lists(&lists, ruleset)
    }

    /// Reads all long lists that were only believed, see [`Dataplane::read_some_lists`].
    pub fn read_all_lists(&mut self, ruleset: &mut Ruleset) -> usize {
        let lists = self.unread.all();
        self.read_lists(&lists, ruleset)
    }

    /// Reads the long lists that are about to change, see [`Dataplane::read_some_lists`].
    fn read_lists_of(&mut self, updates: &BTreeMap<Key, ServicePlan>, ruleset: &mut Ruleset) -> usize {
        let lists = self.unread.changed_by(updates, ruleset);
        self.read_lists(&lists, ruleset)
    }

    /// The slots of some Services' long lists that packets look at, as long as other slots may hold what another program wrote while no
    /// agent ran.
    fn sizes<'a>(
        &self,
        services: &(impl Iterator<Item = &'a Key> + Clone),
        ruleset: &Ruleset,
    ) -> Option<ListSizes> {
        // A comparison says itself what it has not read.
        if self.has_compared_everything || self.state != KernelState::InSync {
            return None;
        }
        let of = |family| {
            ruleset.list_sizes(services.clone(), family).map(move |(list, slots)| ((family, list), slots))
        };
        Some([Family::V4, Family::V6].into_iter().flat_map(of).collect())
    }

    /// After an error the state is unknown.
    fn read_lists(&mut self, lists: &ListNumbers, ruleset: &mut Ruleset) -> usize {
        if !self.has_unread_lists() || lists.is_empty() {
            return 0;
        }
        self.unread.read(lists, &mut self.tables, ruleset).unwrap_or_else(|error| {
            tracing::warn!(%error, "long lists not read or not repaired; comparing everything");
            self.state = KernelState::Unknown;
            0
        })
    }

    /// The rules as the kernel lists them where they are right, of each family of which that is known.
    pub fn written_rules(&self) -> WrittenRules {
        let of = |table: &FamilyTable| Some((table.model(), table.written()?.clone()));
        self.tables.iter().filter_map(of).collect()
    }

    /// What others changed in rules and long lists while nobody watched them, as far as it was found since the last call.
    pub fn take_found(&mut self) -> ForeignChange {
        let mut found = std::mem::take(&mut self.found);
        found.extend(self.unread.take_found());
        found
    }

    /// Has `ruleset` take over the long lists as the kernel has them: those of a predecessor, or what another program wrote. Without
    /// that a write changes their order, but no more.
    fn adopt_lists(&mut self, ruleset: &mut Ruleset, state: KernelState) {
        if state == KernelState::InSync && self.unread.is_empty() {
            return;
        }
        for table in &mut self.tables {
            let lists = if self.believes_digests {
                table.differing_lists(ruleset.config(), &ruleset.list_digests(table.model()))
            } else {
                table.lists()
            };
            match lists {
                Ok(lists) => ruleset.adopt(table.model(), &lists),
                Err(error) => {
                    tracing::debug!(family = %table.model(), %error, "long lists not read; their order may change");
                }
            }
        }
    }

    fn write_elements(&mut self, config: &RulesetConfig, difference: &Difference) -> Result<Written, Error> {
        let mut written = Written::default();
        let mut failed = None;
        for table in &mut self.tables {
            let begun = Instant::now();
            let changed_rules = table.write_rules(config);
            let changes = difference.of(table.model());
            let changes =
                changes.filter(|changes| changes.count() > 0 || !matches!(changed_rules, Ok(false)));
            if let Some(changes) = changes {
                let result = changed_rules.and_then(|_| table.write(changes));
                self.writes.push(FamilyWrite {
                    family: table.model(),
                    full: false,
                    took: begun.elapsed(),
                    worked: result.is_ok(),
                    cleaned_up: true,
                });
                match result {
                    Ok(()) => written.elements += changes.count(),
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
        }
        failed.map_or(Ok(written), Err)
    }

    fn write_all(&mut self, ruleset: &mut Ruleset) -> Result<(Written, KernelState), Error> {
        let mut written = Written { full: true, ..Written::default() };
        let (mut generations, mut failed) = (Vec::new(), None);
        // If it fails, the next one believes nothing.
        let believes_digests = std::mem::replace(&mut self.believes_digests, false);
        // Before the first write of this process, nobody is known to have written lately; later, somebody has.
        let is_settled = !self.has_written;
        let scope = if believes_digests { Scope::Digests { is_settled } } else { Scope::Everything };
        self.unread.clear();
        for index in self.order()? {
            let table = &mut self.tables[index];
            let wanted = ruleset.all_elements(table.model());
            let begun = Instant::now();
            let result = table.synchronise(ruleset.config(), &wanted, scope);
            self.writes.push(FamilyWrite {
                family: table.model(),
                full: true,
                took: begun.elapsed(),
                worked: result.is_ok(),
                cleaned_up: table.is_cleaned_up(),
            });
            ruleset.note_deleted(table.take_deleted());
            for (chain, count) in table.take_replaced() {
                self.found.add_rules(table.table().clone(), chain, count);
            }
            match result {
                Ok(Synchronised { elements, generations: step, unread }) => {
                    self.unread.add(table.model(), unread);
                    written.elements += elements;
                    generations.push(step);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // Of new tables: when each of them serves the Services with few endpoints.
        for table in &mut self.tables {
            match table.finish_load() {
                Ok(step) => generations.extend(step),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let state = match &self.watch {
            Some(watch) if !watch.is_running => self.start_watch(&generations)?,
            _ => KernelState::InSync,
        };
        self.has_compared_everything |= !believes_digests;
        self.has_written = true;
        // Another program has only committed something meanwhile: once more, now that its changes are noticed.
        self.believes_digests = believes_digests && state == KernelState::Unknown;
        Ok((written, state))
    }

    /// The tables' numbers, those first that do not exist: no packet is served there meanwhile.
    fn order(&mut self) -> Result<Vec<usize>, Error> {
        let mut order = Vec::new();
        for (index, table) in self.tables.iter_mut().enumerate() {
            order.push((table.exists()?, index));
        }
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, index)| index).collect())
    }

    /// Starts the watch. The kernel is in sync if no other program has written since our own writes began: then each led from one
    /// generation of the ruleset to the next.
    fn start_watch(&mut self, generations: &[(u32, u32)]) -> Result<KernelState, Error> {
        let ports = self.tables.iter().map(FamilyTable::port).collect::<Result<_, _>>()?;
        let (monitor, nft) = (Monitor::open()?, Nft::open()?);
        let Some(watch) = &mut self.watch else { return Ok(KernelState::InSync) };
        let pause = watch.pause.next(Instant::now());
        let own = OwnWrites { ports, log: self.commits.clone() };
        watch_foreign(monitor, nft, own, pause, Arc::clone(&watch.notice))?;
        watch.is_running = true;
        let Some(table) = self.tables.last_mut() else { return Ok(KernelState::InSync) };
        let now = table.generation()?;
        let unbroken = generations.is_sorted_by(|(_, after), (before, _)| after == before);
        let ours = unbroken && generations.last().is_some_and(|(_, after)| *after == now);
        Ok(if ours { KernelState::InSync } else { KernelState::Unknown })
    }
}

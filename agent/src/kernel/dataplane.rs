// SPDX-License-Identifier: Apache-2.0
//! The writer: makes the kernel's tables hold what a [`Ruleset`] says. It decides nothing else.
//!
//! The first write of a process believes the digests of long lists. The loop then has them read bit by bit, see
//! [`Dataplane::read_some_lists`], and those of a Service before it changes.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::{Family, Key};
use steerage_nft::{Error, Monitor, Nft};

use super::doubts::Doubts;
use super::family::Synchronised;
use super::scope::Scope;
use super::{FAMILIES, FamilyTable, watch_foreign};
use crate::plan::ServicePlan;
use crate::rules::{Difference, KernelState, Ruleset, SetId, differing_lists, kernel_lists};

/// Slots of long lists that are read at once. The kernel looks them up in a few ms.
const SLOTS_AT_ONCE: u32 = 2048;

/// A successful write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Elements added and deleted.
    pub elements: usize,
    /// Everything was compared with the kernel.
    pub full: bool,
    /// What was in doubt was compared with the kernel.
    pub repaired: bool,
    /// Long lists that were not what their digests said.
    pub wrong_lists: usize,
}

/// The tables of this network namespace.
#[derive(Debug)]
pub struct Dataplane {
    tables: Vec<FamilyTable>,
    state: KernelState,
    /// What may be different in the kernel, where its state is known else.
    doubts: Doubts,
    /// Long lists that were believed to hold what their digests say. Their order is not known.
    unread: BTreeSet<(Family, u32)>,
    /// The next comparison believes digests.
    believes_digests: bool,
    /// Called on foreign changes; `None` once the monitor runs, or where none is required.
    on_foreign_change: Option<ForeignChangeCallback>,
}

struct ForeignChangeCallback(Box<dyn FnMut(Doubts) -> bool + Send>);

impl std::fmt::Debug for ForeignChangeCallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ForeignChangeCallback")
    }
}

impl Dataplane {
    /// Opens netlink sockets in the network namespace of the calling thread. Writes nothing. A family that the kernel lacks is
    /// left out.
    pub fn open() -> Result<Self, Error> {
        let mut tables = Vec::new();
        for (model, family) in FAMILIES {
            let mut nft = Nft::open()?;
            match nft.tables(family) {
                Ok(_) => tables.push(FamilyTable::new(nft, model, family)),
                Err(error) if error.is_unsupported() => {
                    tracing::warn!(family = %model, "kernel lacks this address family; its Services are not served");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            tables,
            state: KernelState::Unknown,
            doubts: Doubts::default(),
            unread: BTreeSet::new(),
            believes_digests: true,
            on_foreign_change: None,
        })
    }

    /// Reports foreign changes of the tables, see [`watch_foreign`], from the first successful write on. Not earlier: while
    /// anybody listens, the kernel builds a message for each element of a load, which doubles its work.
    pub fn watch_foreign_changes(&mut self, changed: impl FnMut(Doubts) -> bool + Send + 'static) {
        self.on_foreign_change = Some(ForeignChangeCallback(Box::new(changed)));
    }

    /// What is known of the tables.
    pub fn state(&self) -> KernelState {
        self.state
    }

    /// Has the next write compare everything.
    pub fn mark_out_of_sync(&mut self) {
        self.state = KernelState::Unknown;
    }

    /// Has the next write compare what is in doubt.
    pub fn doubt(&mut self, doubts: Doubts) {
        if doubts.is_everything() {
            self.mark_out_of_sync();
        } else {
            self.doubts.merge(doubts);
        }
    }

    /// Whether the kernel may have something else than was written last.
    pub fn is_in_doubt(&self) -> bool {
        self.state == KernelState::Unknown || !self.doubts.is_empty()
    }

    /// Whether [`Dataplane::read_some_lists`] has something to read.
    pub fn has_unread_lists(&self) -> bool {
        self.state == KernelState::InSync && !self.unread.is_empty()
    }

    /// Replaces the plans of some Services in `ruleset`, and makes the kernel's tables hold what it then says. Compares what is in doubt:
    /// everything, where the kernel's state is not known. After an error it is not known. No packet meets a family that was written in
    /// part: each family is one transaction, and a new table gets its base chains last.
    pub fn write(
        &mut self,
        ruleset: &mut Ruleset,
        updates: BTreeMap<Key, ServicePlan>,
    ) -> Result<Written, Error> {
        let settled = self.settle(ruleset, updates.keys());
        let difference = ruleset.update(updates, self.state);
        // Unknown until the write is known to have worked.
        let state = std::mem::replace(&mut self.state, KernelState::Unknown);
        let (written, state) = match (&difference, state) {
            (Difference::Elements(_), KernelState::InSync) => {
                (self.write_elements(&difference)?, KernelState::InSync)
            }
            (Difference::Full, _) | (_, KernelState::Unknown) => self.write_all(ruleset, state)?,
        };
        self.state = state;
        Ok(Written { elements: written.elements + settled.elements, full: written.full, ..settled })
    }

    /// Reads some long lists that were only believed. Returns how many of them are not what their digests say: those are in doubt now.
    pub fn read_some_lists(&mut self, ruleset: &mut Ruleset) -> usize {
        let Some((first, _)) = self.unread.first().copied() else { return 0 };
        let digests = ruleset.list_digests(first);
        let mut slots = 0;
        let mut fits = |(family, list): &(Family, u32)| {
            let fits = *family == first && slots < SLOTS_AT_ONCE;
            slots += digests.get(list).map_or(0, |digest| digest.slots());
            fits
        };
        let lists = self.unread.iter().take_while(|list| fits(list)).copied().collect();
        self.read_lists(ruleset, &lists)
    }

    /// Reads all long lists that were only believed, see [`Dataplane::read_some_lists`].
    pub fn read_all_lists(&mut self, ruleset: &mut Ruleset) -> usize {
        let lists = self.unread.clone();
        self.read_lists(ruleset, &lists)
    }

    /// Has `ruleset` take over the order of some lists that were only believed. Returns the number of those that differ.
    fn read_lists(&mut self, ruleset: &mut Ruleset, lists: &BTreeSet<(Family, u32)>) -> usize {
        let mut differing = 0;
        for table in &mut self.tables {
            let family = table.model();
            let mut digests = BTreeMap::new();
            if lists.iter().any(|(of, _)| *of == family) {
                digests = ruleset.list_digests(family);
                digests.retain(|list, _| lists.contains(&(family, *list)));
            }
            if digests.is_empty() {
                continue;
            }
            let rows = match table.read_lists(&digests, &BTreeMap::new()) {
                Ok(rows) => rows,
                Err(error) => {
                    tracing::warn!(%family, %error, "long lists not read; comparing everything");
                    self.state = KernelState::Unknown;
                    return differing;
                }
            };
            ruleset.adopt(family, &kernel_lists(&rows));
            let wanted = ruleset.endpoints_of(family, &digests.into_keys().collect());
            differing += differing_lists(&rows, &wanted).len();
            let (delete, add) = rows.difference(&wanted);
            let keys: Vec<_> = delete.iter().chain(add.iter()).map(|row| row.key.to_vec()).collect();
            if !keys.is_empty() {
                self.doubts.add(family, SetId::Endpoints.name(), keys);
            }
        }
        self.unread.retain(|list| !lists.contains(list));
        differing
    }

    /// Before an update of these Services: reads their long lists where they were only believed, and repairs what is in doubt.
    fn settle<'a>(&mut self, ruleset: &mut Ruleset, services: impl IntoIterator<Item = &'a Key>) -> Written {
        let mut settled = Written::default();
        if self.has_unread_lists() {
            let services: Vec<_> = services.into_iter().collect();
            let mut lists = BTreeSet::new();
            for family in [Family::V4, Family::V6] {
                let changing = ruleset.lists_of(services.iter().copied(), family);
                let is_concerned = |(of, list): &&(Family, u32)| {
                    *of == family && (changing.contains(list) || self.doubts.has_list(family, *list))
                };
                lists.extend(self.unread.iter().filter(is_concerned).copied());
            }
            settled.wrong_lists = self.read_lists(ruleset, &lists);
        }
        let doubts = std::mem::take(&mut self.doubts);
        if self.state == KernelState::Unknown || doubts.is_empty() {
            return settled;
        }
        settled.repaired = true;
        for table in &mut self.tables {
            let Some(doubts) = doubts.of(table.model()) else { continue };
            let wanted = ruleset.all_elements(table.model());
            match table.synchronise(ruleset.config(), &wanted, Scope::Doubts(doubts)) {
                Ok(done) => settled.elements += done.elements,
                Err(error) => {
                    tracing::warn!(family = %table.model(), %error, "table not repaired; comparing everything");
                    self.state = KernelState::Unknown;
                    return settled;
                }
            }
        }
        settled
    }

    /// Has `ruleset` take over the long lists as the kernel has them: those of a predecessor, or what another program wrote. Without
    /// that a write changes their order, but no more.
    fn adopt_lists(&mut self, ruleset: &mut Ruleset, believes_digests: bool) {
        for table in &mut self.tables {
            let lists = if believes_digests {
                table.unknown_lists(&ruleset.list_digests(table.model()))
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

    fn write_elements(&mut self, difference: &Difference) -> Result<Written, Error> {
        let mut written = Written::default();
        for table in &mut self.tables {
            if let Some(changes) = difference.of(table.model()) {
                table.write(changes)?;
                written.elements += changes.count();
            }
        }
        Ok(written)
    }

    fn write_all(
        &mut self,
        ruleset: &mut Ruleset,
        state: KernelState,
    ) -> Result<(Written, KernelState), Error> {
        let mut written = Written { full: true, ..Written::default() };
        let mut generations = Vec::new();
        // If it fails, the next comparison believes nothing.
        let believes_digests = std::mem::replace(&mut self.believes_digests, false);
        let scope = if believes_digests { Scope::Digests } else { Scope::Everything };
        if state == KernelState::Unknown || !self.unread.is_empty() {
            self.adopt_lists(ruleset, believes_digests);
        }
        self.unread.clear();
        for table in &mut self.tables {
            let wanted = ruleset.all_elements(table.model());
            let Synchronised { elements, generations: step, believed } =
                table.synchronise(ruleset.config(), &wanted, scope)?;
            written.elements += elements;
            self.unread.extend(believed.into_iter().map(|list| (table.model(), list)));
            generations.push(step);
        }
        let state = match self.on_foreign_change.take() {
            None => KernelState::InSync,
            Some(callback) => self.start_monitor(callback, &generations)?,
        };
        // Others wrote before anybody listened. What they did to long lists is found when these are read.
        self.believes_digests = state == KernelState::Unknown;
        Ok((written, state))
    }

    /// Starts the monitor. The kernel is in sync if no other program has written since our own writes began: then each led from one
    /// generation of the ruleset to the next.
    fn start_monitor(
        &mut self,
        callback: ForeignChangeCallback,
        generations: &[(u32, u32)],
    ) -> Result<KernelState, Error> {
        let (monitor, ports) = match self.monitor() {
            Ok(opened) => opened,
            Err(error) => {
                self.on_foreign_change = Some(callback);
                return Err(error);
            }
        };
        watch_foreign(monitor, ports, Monitor::open, callback.0)
            .map_err(|_| Error::NoReply("start the thread of the monitor".to_owned()))?;
        let Some(table) = self.tables.last_mut() else { return Ok(KernelState::InSync) };
        let now = table.generation()?;
        let unbroken = generations.is_sorted_by(|(_, after), (before, _)| after == before);
        let ours = unbroken && generations.last().is_some_and(|(_, after)| *after == now);
        Ok(if ours { KernelState::InSync } else { KernelState::Unknown })
    }

    fn monitor(&self) -> Result<(Monitor, Vec<u32>), Error> {
        let ports = self.tables.iter().map(FamilyTable::port).collect::<Result<_, _>>()?;
        Ok((Monitor::open()?, ports))
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The writer: makes the kernel's tables hold what a [`Ruleset`] says. It decides nothing else.

use std::sync::{Arc, Mutex, PoisonError};

use steerage_nft::{Error, Monitor, Nft};

use super::family::Synchronised;
use super::{FAMILIES, FamilyTable, watch_foreign};
use crate::rules::{Difference, KernelState, Ruleset};

/// A successful write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Elements added and deleted.
    pub elements: usize,
    /// Everything was compared with the kernel.
    pub full: bool,
}

/// The tables of this network namespace.
#[derive(Debug)]
pub struct Dataplane {
    tables: Vec<FamilyTable>,
    state: KernelState,
    /// Called on foreign changes; `None` once the monitor runs, or where none is required.
    on_foreign_change: Option<ForeignChangeCallback>,
}

/// Shared with the thread of the monitor: if that cannot be started, the next write tries again.
#[derive(Clone)]
struct ForeignChangeCallback(Arc<Mutex<dyn FnMut(bool) -> bool + Send>>);

impl ForeignChangeCallback {
    fn call(&self, foreign: bool) -> bool {
        (self.0.lock().unwrap_or_else(PoisonError::into_inner))(foreign)
    }
}

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
        Ok(Self { tables, state: KernelState::Unknown, on_foreign_change: None })
    }

    /// Reports foreign changes of the tables, see [`watch_foreign`], from the first successful write on. Not earlier: while
    /// anybody listens, the kernel builds a message for each element of a load, which doubles its work.
    pub fn watch_foreign_changes(&mut self, changed: impl FnMut(bool) -> bool + Send + 'static) {
        self.on_foreign_change = Some(ForeignChangeCallback(Arc::new(Mutex::new(changed))));
    }

    /// What is known of the tables.
    pub fn state(&self) -> KernelState {
        self.state
    }

    /// Has the next write compare everything.
    pub fn mark_out_of_sync(&mut self) {
        self.state = KernelState::Unknown;
    }

    /// Writes `difference`, which led to `ruleset`; compares everything where the difference or the kernel's state is not known.
    /// After an error the state is unknown; a family is written all the same if only the other one fails. No packet meets a family that was written in part: each family is one transaction,
    /// and a new table gets its base chains last.
    pub fn write(&mut self, ruleset: &mut Ruleset, difference: &Difference) -> Result<Written, Error> {
        // Unknown until the write is known to have worked.
        let state = std::mem::replace(&mut self.state, KernelState::Unknown);
        let (written, state) = match (difference, state) {
            (Difference::Elements(_), KernelState::InSync) => {
                (self.write_elements(difference)?, KernelState::InSync)
            }
            (_, KernelState::Unknown) => {
                self.adopt_lists(ruleset);
                self.write_all(ruleset)?
            }
            (Difference::Full, KernelState::InSync) => self.write_all(ruleset)?,
        };
        self.state = state;
        Ok(written)
    }

    /// Has `ruleset` take over the long lists as the kernel has them: those of a predecessor, or what another program wrote. Without
    /// that a write changes their order, but no more.
    fn adopt_lists(&mut self, ruleset: &mut Ruleset) {
        for table in &mut self.tables {
            match table.lists() {
                Ok(lists) => ruleset.adopt(table.model(), &lists),
                Err(error) => {
                    tracing::debug!(family = %table.model(), %error, "long lists not read; their order may change");
                }
            }
        }
    }

    fn write_elements(&mut self, difference: &Difference) -> Result<Written, Error> {
        let mut written = Written::default();
        let mut failed = None;
        for table in &mut self.tables {
            let Some(changes) = difference.of(table.model()) else { continue };
            match table.write(changes) {
                Ok(()) => written.elements += changes.count(),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(written), Err)
    }

    fn write_all(&mut self, ruleset: &mut Ruleset) -> Result<(Written, KernelState), Error> {
        let mut written = Written { full: true, ..Written::default() };
        let (mut generations, mut failed) = (Vec::new(), None);
        for table in &mut self.tables {
            let wanted = ruleset.all_elements(table.model());
            match table.synchronise(ruleset.config(), &wanted) {
                Ok(Synchronised { elements, generations: step, deleted }) => {
                    ruleset.note_deleted(deleted);
                    written.elements += elements;
                    generations.push(step);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let state = match self.on_foreign_change.clone() {
            None => KernelState::InSync,
            Some(callback) => self.start_monitor(callback, &generations)?,
        };
        Ok((written, state))
    }

    /// Starts the monitor. The kernel is in sync if no other program has written since our own writes began: then each led from one
    /// generation of the ruleset to the next.
    fn start_monitor(
        &mut self,
        callback: ForeignChangeCallback,
        generations: &[(u32, u32)],
    ) -> Result<KernelState, Error> {
        let (monitor, ports) = self.monitor()?;
        watch_foreign(monitor, ports, Monitor::open, move |foreign| callback.call(foreign))
            .map_err(|_| Error::NoReply("start the thread of the monitor".to_owned()))?;
        self.on_foreign_change = None;
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

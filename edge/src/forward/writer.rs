// SPDX-License-Identifier: Apache-2.0
//! Makes the nftables table hold a forwarding state, and adopts the table of an earlier process.
//!
//! A packet's lookups are not atomic. So slot tables are added in transactions before the listeners refer to them, and deleted in
//! transactions after that: a packet that has found an old id still finds its slots.

use std::collections::BTreeMap;
use std::sync::Arc;

use steerage_nft::{Batch, Error, Nft, RuleInfo};

use super::elements::{self, ElementReader, SetChange, SlotChanges};
use super::interval_sets::{IntervalNames, IntervalSet, REPLACED_FROM};
use super::rules::{self, IP_FAMILIES, slot_map};
use super::state::{ForwardingState, SlotTable, class_of};
use crate::slot_table::SIZES;

/// Elements in one transaction: long ones block other users of nftables.
const CHUNK: usize = 50_000;

/// The interface whose frames are forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// A new interface of the same name has another index.
    pub(crate) index: u32,
}

/// What the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The table as this version makes it for this device.
    Current,
    /// The table of another version or device.
    Outdated,
    /// No table.
    Missing,
}

#[derive(Debug)]
pub(crate) struct NftWriter {
    nft: Nft,
    device: Device,
    /// What was written last.
    written: ForwardingState,
    found: Found,
    /// Whether `written`, `found` and `names` are the kernel's. A write or a listing that failed leaves them unknown.
    is_read: bool,
    names: IntervalNames,
    /// The ruleset's generation after the last commit or check.
    generation: u32,
}

impl NftWriter {
    /// Reads the table, and changes nothing.
    pub(crate) fn open(device: Device) -> Result<Self, Error> {
        let mut kernel = Self {
            nft: Nft::open()?,
            device,
            written: ForwardingState::default(),
            found: Found::Missing,
            is_read: false,
            names: IntervalNames::default(),
            generation: 0,
        };
        kernel.reload()?;
        Ok(kernel)
    }

    /// What the kernel holds, as of the last write or check.
    pub(crate) fn written(&self) -> &ForwardingState {
        &self.written
    }

    /// Whether the kernel has a table that this process can continue with.
    pub(crate) fn is_built(&self) -> bool {
        self.found == Found::Current
    }

    /// Whether the kernel forwards by a table, also by an outdated one.
    pub(crate) fn has_table(&self) -> bool {
        self.found != Found::Missing
    }

    /// Writes the differences; an outdated table is replaced in one transaction. Returns the number of written elements.
    pub(crate) fn apply(&mut self, state: &ForwardingState) -> Result<usize, Error> {
        if !self.is_read {
            self.reload()?;
        }
        let result = match self.write(state) {
            Err(error @ (Error::Kernel(_) | Error::NoReply(_) | Error::Overrun)) => {
                tracing::warn!(%error, "write to nftables failed; reading the table and retrying");
                self.reload()?;
                self.write(state)
            }
            other => other,
        };
        self.generation = self.nft.generation()?;
        result
    }

    /// Whether another program has changed the table, so that it must be written again. Elements are compared only if `thorough`:
    /// listing them takes time, and other programs may commit to nftables all the time.
    pub(crate) fn is_out_of_sync(&mut self, thorough: bool) -> Result<bool, Error> {
        let generation = self.nft.generation()?;
        if !self.is_built() || generation == self.generation {
            return Ok(false);
        }
        if !thorough && self.find_table()? == Found::Current {
            return Ok(false);
        }
        let before = self.written.clone();
        self.reload()?;
        self.generation = generation;
        Ok(!self.is_built() || self.written != before)
    }

    fn write(&mut self, state: &ForwardingState) -> Result<usize, Error> {
        let empty = Arc::<SlotTable>::default();
        let fresh = !self.is_built();
        let mut count = 0;
        let mut main = Batch::new();
        if fresh {
            rules::build(&mut main, &self.device.name, self.device.index);
            self.written = ForwardingState::default();
        }
        let (mut early, mut late) = (Vec::new(), Vec::new());
        for (id, slots) in &state.slot_tables {
            match self.written.slot_tables.get(id) {
                Some(old) if Arc::ptr_eq(old, slots) || old == slots => {}
                Some(old) => push(&mut main, *id, &elements::slot_changes(*id, old, slots), &mut count),
                None if fresh => {
                    push(&mut main, *id, &elements::slot_changes(*id, &empty, slots), &mut count);
                }
                None => early.push((*id, elements::slot_changes(*id, &empty, slots))),
            }
        }
        for (id, slots) in
            self.written.slot_tables.iter().filter(|(id, _)| !state.slot_tables.contains_key(id))
        {
            late.push((*id, elements::slot_changes(*id, slots, &empty)));
        }
        let mut names = if fresh { IntervalNames::default() } else { self.names.clone() };
        let mut before = Batch::new();
        names.delete_left_over(&mut before);
        for SetChange { set, delete, add } in elements::changes(&self.written, state) {
            count += delete.len() + add.len();
            if let Some(interval) = IntervalSet::named(&set)
                && delete.len() >= REPLACED_FROM
            {
                names.replace(&mut before, &mut main, interval, &elements::all_of(&set, state));
                continue;
            }
            let set = names.current(&set);
            main.delete_elements(&rules::table(), &set, &delete).add_elements(&rules::table(), &set, &add);
        }
        self.is_read = false;
        self.commit_all(&early, &mut count)?;
        self.nft.commit(before)?;
        self.nft.commit(main)?;
        self.found = Found::Current;
        self.names = names;
        self.commit_all(&late, &mut count)?;
        self.written = state.clone();
        self.is_read = true;
        Ok(count)
    }

    fn commit_all(&mut self, tables: &[(u32, SlotChanges)], count: &mut usize) -> Result<(), Error> {
        let (mut batch, mut held) = (Batch::new(), 0);
        for (id, changes) in tables {
            push(&mut batch, *id, changes, &mut held);
            if held >= CHUNK {
                *count += std::mem::take(&mut held);
                self.nft.commit(std::mem::take(&mut batch))?;
            }
        }
        *count += held;
        self.nft.commit(batch)
    }

    /// Reads the table into `written`.
    fn reload(&mut self) -> Result<(), Error> {
        self.is_read = false;
        self.written = ForwardingState::default();
        self.found = self.find_table()?;
        if !self.is_built() {
            self.is_read = true;
            return Ok(());
        }
        let table = rules::table();
        let listed = self.nft.rules(&table)?;
        let looked_up = |chain: &str| {
            listed.iter().filter(|rule| rule.chain == chain).flat_map(RuleInfo::looked_up_sets).collect()
        };
        self.names = IntervalNames::of(&self.nft.sets(&table)?, looked_up);
        let mut state = ForwardingState::default();
        for family in IP_FAMILIES {
            // `ranged` before `ranges`: it makes the entries.
            for name in ["targets", "listeners", "fragments", "local", "vips", "ranged", "ranges", "sources"]
            {
                let found = self.nft.elements(&table, &self.names.current(&family.name(name)))?;
                ElementReader(&mut state).read(name, family, &found);
            }
        }
        state.peers = ElementReader::macs(&self.nft.elements(&table, "peers")?);
        state.nodes = ElementReader::macs(&self.nft.elements(&table, "nodes")?);
        state.slot_tables = self.read_slot_tables()?;
        self.written = state;
        self.is_read = true;
        Ok(())
    }

    fn read_slot_tables(&mut self) -> Result<BTreeMap<u32, Arc<SlotTable>>, Error> {
        let table = rules::table();
        let mut tables = BTreeMap::<u32, SlotTable>::new();
        for class in 0..SIZES.len() {
            for (id, slot, target) in elements::slots(&self.nft.elements(&table, &slot_map(class))?) {
                let size = SIZES.get(class_of(id)).copied().and_then(|size| usize::try_from(size).ok());
                let slots = &mut tables.entry(id).or_default().slots;
                slots.resize(size.unwrap_or(0), 0);
                if let Some(place) = slots.get_mut(slot) {
                    *place = target;
                }
            }
        }
        for (id, target) in elements::usable(&self.nft.elements(&table, "usable")?) {
            tables.entry(id).or_default().usable.insert(target);
        }
        Ok(tables.into_iter().map(|(id, slots)| (id, Arc::new(slots))).collect())
    }

    fn find_table(&mut self) -> Result<Found, Error> {
        let table = rules::table();
        let Some(info) = self.nft.table(&table)? else { return Ok(Found::Missing) };
        let comment = rules::comment(&self.device.name, self.device.index);
        let same = info.comment.as_deref() == Some(comment.as_str())
            && self.nft.rules(&table)?.len() == rules::rule_count();
        Ok(if same { Found::Current } else { Found::Outdated })
    }
}

/// Deletes the table; no table is success.
pub(crate) fn remove() -> Result<(), Error> {
    let mut batch = Batch::new();
    batch.destroy_table(&rules::table());
    Nft::open()?.commit(batch)
}

fn push(batch: &mut Batch, id: u32, changes: &SlotChanges, count: &mut usize) {
    let [slots, usable] = changes;
    for (set, (delete, add)) in [(slot_map(class_of(id)), slots), ("usable".to_owned(), usable)] {
        *count += delete.len() + add.len();
        batch.delete_elements(&rules::table(), &set, delete).add_elements(&rules::table(), &set, add);
    }
}

#[cfg(test)]
mod tests;

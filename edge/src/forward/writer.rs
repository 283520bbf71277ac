// SPDX-License-Identifier: Apache-2.0
//! The writer: keeps the kernel's table as the state says, and adopts what an earlier process left there.
//!
//! A packet's lookups are not atomic, so a table that is going is deleted only after its listeners have left it, in a transaction
//! of its own: whoever found the old id still finds its slots.

use std::collections::BTreeMap;
use std::sync::Arc;

use steerage_nft::{Batch, Error, Nft};

use super::elements::{self, ElementReader, SetChange, SlotChanges};
use super::rules::{self, IP_FAMILIES, slot_map};
use super::state::{ForwardingState, SlotTable, class_of};
use crate::slot_table::SIZES;

/// Elements in one transaction, so that none holds the kernel up for long.
const CHUNK: usize = 50_000;

/// The device whose frames are looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Its name.
    pub(crate) name: String,
    /// Its index: another device of the same name has another one.
    pub(crate) index: u32,
}

/// What of the table is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// Ours, as this version makes it for this device.
    Same,
    /// Nothing, or what another version or another device needs.
    Other,
}

/// The table in the kernel, and what was last written to it.
#[derive(Debug)]
pub(crate) struct NftWriter {
    nft: Nft,
    device: Device,
    written: ForwardingState,
    /// The table is there as [`rules::build`] makes it.
    built: bool,
    /// The generation after our last commit or check.
    generation: u32,
}

impl NftWriter {
    /// Reads what is there, and changes nothing.
    pub(crate) fn open(device: Device) -> Result<Self, Error> {
        let mut kernel = Self {
            nft: Nft::open()?,
            device,
            written: ForwardingState::default(),
            built: false,
            generation: 0,
        };
        kernel.reload()?;
        Ok(kernel)
    }

    /// What the kernel holds, as far as is known.
    pub(crate) fn written(&self) -> &ForwardingState {
        &self.written
    }

    /// Whether the kernel's table is one that this process can go on with.
    pub(crate) fn is_built(&self) -> bool {
        self.built
    }

    /// Makes the kernel hold `state`; a table of another shape is replaced in one transaction. Returns how many elements were
    /// written.
    pub(crate) fn apply(&mut self, state: &ForwardingState) -> Result<usize, Error> {
        let result = match self.write(state) {
            Err(error @ (Error::Kernel(_) | Error::NoReply(_) | Error::Overrun)) => {
                tracing::warn!(%error, "the kernel's table is not as it was left; reading it again");
                self.reload()?;
                self.write(state)
            }
            other => other,
        };
        self.generation = self.nft.generation()?;
        result
    }

    /// Looks whether somebody else has changed the table; true when it must be written again. Whether all elements are still
    /// there is looked at only where `thorough`: listing them takes time, and others may commit in this namespace all the time.
    pub(crate) fn is_out_of_sync(&mut self, thorough: bool) -> Result<bool, Error> {
        let generation = self.nft.generation()?;
        if !self.built || generation == self.generation {
            return Ok(false);
        }
        if !thorough && self.look()? == Found::Same {
            return Ok(false);
        }
        let before = self.written.clone();
        self.reload()?;
        self.generation = generation;
        Ok(!self.built || self.written != before)
    }

    fn write(&mut self, state: &ForwardingState) -> Result<usize, Error> {
        let nothing = Arc::<SlotTable>::default();
        let fresh = !self.built;
        let mut count = 0;
        let mut main = Batch::new();
        if fresh {
            rules::build(&mut main, &self.device.name, self.device.index);
            self.written = ForwardingState::default();
        }
        let (mut early, mut late) = (Vec::new(), Vec::new());
        for (id, slots) in &state.tables {
            match self.written.tables.get(id) {
                Some(old) if Arc::ptr_eq(old, slots) || old == slots => {}
                Some(old) => push(&mut main, *id, &elements::slot_changes(*id, old, slots), &mut count),
                None if fresh => {
                    push(&mut main, *id, &elements::slot_changes(*id, &nothing, slots), &mut count);
                }
                None => early.push((*id, elements::slot_changes(*id, &nothing, slots))),
            }
        }
        for (id, slots) in self.written.tables.iter().filter(|(id, _)| !state.tables.contains_key(id)) {
            late.push((*id, elements::slot_changes(*id, slots, &nothing)));
        }
        for SetChange { set, delete, add } in elements::changes(&self.written, state) {
            count += delete.len() + add.len();
            main.delete_elements(&rules::table(), &set, &delete).add_elements(&rules::table(), &set, &add);
        }
        self.commit_all(&early, &mut count)?;
        self.nft.commit(main)?;
        self.built = true;
        self.commit_all(&late, &mut count)?;
        self.written = state.clone();
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

    /// Lists the table into `written`.
    fn reload(&mut self) -> Result<(), Error> {
        self.written = ForwardingState::default();
        self.built = self.look()? == Found::Same;
        if !self.built {
            return Ok(());
        }
        let table = rules::table();
        let mut state = ForwardingState::default();
        for side in IP_FAMILIES {
            // `ranges` after `ranged`, which makes the entries.
            for name in ["targets", "listeners", "fragments", "local", "vips", "ranged", "ranges", "sources"]
            {
                let found = self.nft.elements(&table, &side.name(name))?;
                ElementReader(&mut state).sided(name, side, &found);
            }
        }
        state.peers = ElementReader::macs(&self.nft.elements(&table, "peers")?);
        state.nodes = ElementReader::macs(&self.nft.elements(&table, "nodes")?);
        state.tables = self.tables()?;
        self.written = state;
        Ok(())
    }

    fn tables(&mut self) -> Result<BTreeMap<u32, Arc<SlotTable>>, Error> {
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

    fn look(&mut self) -> Result<Found, Error> {
        let table = rules::table();
        let Some(info) = self.nft.table(&table)? else { return Ok(Found::Other) };
        let comment = rules::comment(&self.device.name, self.device.index);
        let same = info.comment.as_deref() == Some(comment.as_str())
            && self.nft.rules(&table)?.len() == rules::rule_count();
        Ok(if same { Found::Same } else { Found::Other })
    }
}

/// Deletes the table; that there is none is success.
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

// SPDX-License-Identifier: Apache-2.0
//! Writes the differences between two states, in an order in which each packet finds what it needs:
//! what others refer to is written before them and deleted after them.
//!
//! The program reads several maps for a packet, and a write may come between. So nothing changes its
//! meaning in place but what is one word: slots, and where a Service's slots are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steerage_edge_packet::V6;
use steerage_edge_packet::maps::{
    AFFINITY, Counters, FORWARDER, ListenerKey, Mac, Member, Prefix, SLOTS_PER_ELEMENT, Service, Slots,
    Target, Vip,
};

use crate::change::StateChange;
use crate::difference::each_difference;
use crate::error::Error;
use crate::maps::Maps;
use crate::numbers::Numbers;
use crate::range_sets::RangeSets;
use crate::records::{self, Gate};
use crate::regions::{Move, Regions, elements};
use crate::state::{Listener, MacAddress, Sender, State, Table};
use crate::syscall;

/// Set in the numbers of the sets of senders' addresses, and in no set of source ranges.
pub(crate) const SENDER_SET: u32 = 1 << 31;

/// Where a table's slots are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// First element.
    pub(crate) first: u32,
    /// Number of slots.
    pub(crate) size: u32,
}

impl Region {
    pub(crate) fn slots(self) -> u64 {
        Service::slots(self.first * SLOTS_PER_ELEMENT, self.size)
    }

    /// Where these slots of a Service are.
    pub(crate) fn of(slots: u64) -> Self {
        let half = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0);
        Self { first: half(slots >> 32) / SLOTS_PER_ELEMENT, size: half(slots) }
    }

    fn is_at(self, first: u32) -> bool {
        self.size != 0 && self.first == first
    }
}

/// What the maps hold, and by which numbers.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) written: State,
    pub(crate) services: Numbers<ListenerKey>,
    pub(crate) regions: Regions,
    pub(crate) places: BTreeMap<u32, Region>,
    /// The listeners of each table.
    pub(crate) users: BTreeMap<u32, Vec<ListenerKey>>,
    pub(crate) range_sets: RangeSets,
    pub(crate) sender_sets: Numbers<MacAddress>,
    pub(crate) gate: Gate,
}

/// What is deleted once no listener refers to it.
#[derive(Debug, Default)]
struct Deletions {
    members: Vec<Member>,
    regions: Vec<Region>,
    prefixes: Vec<Prefix>,
    listeners: Vec<ListenerKey>,
}

impl Writer {
    /// For empty maps.
    pub(crate) fn new(maps: &Maps) -> Self {
        Self {
            written: State::default(),
            services: Numbers::new(maps.services.len()),
            regions: Regions::new(maps.slots.len()),
            places: BTreeMap::new(),
            users: BTreeMap::new(),
            range_sets: RangeSets::new(SENDER_SET),
            sender_sets: Numbers::new(SENDER_SET),
            gate: Gate::default(),
        }
    }

    /// After an error the maps hold parts of both states, and must be adopted again.
    pub(crate) fn write(&mut self, maps: &Maps, wanted: State) -> Result<(), Error> {
        // The old state is no part of the writer meanwhile.
        let old = std::mem::take(&mut self.written);
        self.write_difference(maps, &old, &wanted)?;
        self.written = wanted;
        Ok(())
    }

    /// The same if nothing else differs, at a cost that does not grow with the rest.
    pub(crate) fn write_change(&mut self, maps: &Maps, change: StateChange) -> Result<(), Error> {
        let old = change.old_part(&self.written);
        self.write_difference(maps, &old, &change.new_part())?;
        change.apply_to(&mut self.written);
        Ok(())
    }

    fn write_difference(&mut self, maps: &Maps, old: &State, wanted: &State) -> Result<(), Error> {
        let mut left = Deletions::default();
        write_targets(maps, old, wanted)?;
        let moved = self.write_tables(maps, old, wanted, &mut left)?;
        self.write_senders(maps, old, wanted)?;
        self.write_listeners(maps, old, wanted, &moved, &mut left)?;
        self.write_vips(maps, old, wanted)?;
        self.delete(maps, &left)?;
        delete_targets(maps, old, wanted)
    }

    /// Returns the tables whose slots are elsewhere now.
    fn write_tables(
        &mut self,
        maps: &Maps,
        old: &State,
        wanted: &State,
        left: &mut Deletions,
    ) -> Result<BTreeSet<u32>, Error> {
        let is_same = |a: &Arc<Table>, b: &Arc<Table>| Arc::ptr_eq(a, b) || a == b;
        let mut changed = Vec::new();
        each_difference(&old.tables, &wanted.tables, is_same, |number, old, new| {
            changed.push((*number, old.map(|old| &**old), new.map(|new| &**new)));
        });
        self.write_changed_tables(maps, &changed, left)
    }

    fn write_changed_tables(
        &mut self,
        maps: &Maps,
        changed: &[(u32, Option<&Table>, Option<&Table>)],
        left: &mut Deletions,
    ) -> Result<BTreeSet<u32>, Error> {
        let none = BTreeSet::new();
        let mut joined = Vec::new();
        for (number, old, new) in changed {
            let member = |target: &u32| Member { table: *number, target: *target };
            let members = |table: Option<&'_ Table>| table.map(|table| table.members.clone());
            let (old, new) = (members(*old), members(*new));
            let (old, new) = (old.as_ref().unwrap_or(&none), new.as_ref().unwrap_or(&none));
            joined.extend(new.difference(old).map(member));
            left.members.extend(old.difference(new).map(member));
        }
        maps.members.update(&joined, &vec![1_u32; joined.len()])?;
        let mut moved = BTreeSet::new();
        for (number, _, new) in changed {
            let Some(table) = new else {
                left.regions.extend(self.places.remove(number));
                continue;
            };
            let size = u32::try_from(table.slots.len()).unwrap_or(u32::MAX);
            let place = match self.places.get(number) {
                Some(place) if place.size == size => *place,
                old => {
                    left.regions.extend(old.copied());
                    moved.insert(*number);
                    let first = if size == 0 { 0 } else { self.make_place(maps, *number, size, left)? };
                    let place = Region { first, size };
                    self.places.insert(*number, place);
                    place
                }
            };
            for (element, chunk) in (place.first..).zip(table.slots.chunks(SLOTS_PER_ELEMENT as usize)) {
                let mut slots = Slots::default();
                slots[..chunk.len()].copy_from_slice(chunk);
                maps.slots.set(element, &slots);
            }
        }
        if !changed.is_empty() {
            maps.count_change();
        }
        Ok(moved)
    }

    /// Returns the first element of a place for a table's slots. Others move if there is none.
    fn make_place(&mut self, maps: &Maps, table: u32, size: u32, left: &mut Deletions) -> Result<u32, Error> {
        let mut moves = Vec::new();
        let taken = self.regions.take(elements(size), table, &mut moves);
        if !moves.is_empty() {
            tracing::debug!(table, size, moves = moves.len(), "moving tables to make place for another");
        }
        for step in &moves {
            self.move_table(maps, step, left);
        }
        let taken = taken.ok_or(Error::Full("SLOTS"))?;
        if taken.must_wait {
            syscall::wait_for_packets();
        }
        Ok(taken.first)
    }

    /// Copies the slots, then lets the Services that have them refer to the copy. Their version stays:
    /// nothing has changed for a flow.
    fn move_table(&mut self, maps: &Maps, step: &Move, left: &mut Deletions) {
        if step.must_wait {
            syscall::wait_for_packets();
        }
        for offset in 0..step.length {
            if let Some(slots) = maps.slots.get(step.from + offset) {
                maps.slots.set(step.to + offset, &slots);
            }
        }
        let users = self.users.get(&step.table).into_iter().flatten();
        for number in users.filter_map(|key| self.services.get(key)) {
            // Services may still refer to the table's old place, or not yet to its new one.
            if let Some(service) = maps.services.get(number)
                && Region::of(service.slots).is_at(step.from)
            {
                let slots = Region { first: step.to, ..Region::of(service.slots) }.slots();
                maps.services.set(number, &Service { slots, ..service });
            }
        }
        for place in self.places.get_mut(&step.table).into_iter().chain(&mut left.regions) {
            if place.is_at(step.from) {
                place.first = step.to;
            }
        }
    }

    fn write_senders(&mut self, maps: &Maps, old: &State, wanted: &State) -> Result<(), Error> {
        let none = BTreeSet::new();
        let (mut keys, mut sets, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        let (mut added, mut deleted) = (Vec::new(), Vec::new());
        let mut is_full = false;
        let numbers = &mut self.sender_sets;
        each_difference(&old.senders, &wanted.senders, PartialEq::eq, |mac, old, new| {
            let Some(number) = numbers.assign(mac).map(|number| SENDER_SET | number) else {
                is_full = true;
                return;
            };
            let key = Mac { mac: *mac, pad: 0 };
            let value = |sender: &Sender| if *sender == Sender::Forwarder { FORWARDER } else { number };
            match (old.map(value), new.map(value)) {
                (Some(_), None) => gone.push(key),
                (old, Some(new)) if old != Some(new) => {
                    keys.push(key);
                    sets.push(new);
                }
                _ => {}
            }
            let old = old.and_then(Sender::nets).unwrap_or(&none);
            let new = new.and_then(Sender::nets).unwrap_or(&none);
            added.extend(new.difference(old).map(|net| records::prefix(number, net)));
            deleted.extend(old.difference(new).map(|net| records::prefix(number, net)));
        });
        if is_full {
            return Err(Error::Full("SENDERS"));
        }
        maps.prefixes.update(&added, &vec![1_u32; added.len()])?;
        maps.senders.update(&keys, &sets)?;
        maps.senders.delete(&gone)?;
        maps.prefixes.delete(&deleted)?;
        // Only now, so that no other sender has got the number before its prefixes were deleted.
        for key in gone {
            self.sender_sets.remove(&key.mac);
        }
        Ok(())
    }

    fn write_listeners(
        &mut self,
        maps: &Maps,
        old: &State,
        wanted: &State,
        moved: &BTreeSet<u32>,
        left: &mut Deletions,
    ) -> Result<(), Error> {
        // Of moved tables, and those that differ.
        let mut dirty: BTreeSet<ListenerKey> =
            moved.iter().filter_map(|table| self.users.get(table)).flatten().copied().collect();
        let (mut added, mut fresh, mut released) = (Vec::new(), Vec::new(), Vec::new());
        let mut is_full = false;
        let mut changed = !dirty.is_empty();
        each_difference(&old.listeners, &wanted.listeners, PartialEq::eq, |key, old, new| {
            changed = true;
            if let Some(set) = new.and_then(|new| new.ranges.as_ref()) {
                match self.range_sets.add(set) {
                    Some((number, true)) => {
                        added.extend(set.iter().map(|net| records::prefix(number, net)));
                    }
                    Some(_) => {}
                    None => is_full = true,
                }
            }
            released.extend(old.and_then(|old| old.ranges.as_ref()));
            if let Some(old) = old
                && let Some(users) = self.users.get_mut(&old.table)
            {
                users.retain(|user| user != key);
                if users.is_empty() {
                    self.users.remove(&old.table);
                }
            }
            if let Some(new) = new {
                self.users.entry(new.table).or_default().push(*key);
                dirty.insert(*key);
                fresh.extend(old.is_none().then_some(*key));
            } else {
                dirty.remove(key);
                left.listeners.push(*key);
            }
        });
        if is_full {
            return Err(Error::Full("PREFIXES"));
        }
        // First, so that their places are free for others.
        self.delete_listeners(maps, &left.listeners)?;
        // Only now, so that no other set has got the number before its prefixes are deleted.
        for set in released {
            if let Some(number) = self.range_sets.remove(set) {
                left.prefixes.extend(set.iter().map(|net| records::prefix(number, net)));
            }
        }
        maps.prefixes.update(&added, &vec![1_u32; added.len()])?;
        for key in &dirty {
            // Those of moved tables may be no part of the change.
            let written = self.written.listeners.get(key);
            let Some(listener) = wanted.listeners.get(key).or(written).cloned() else { continue };
            let number = self.services.assign(key).ok_or(Error::Full("SERVICES"))?;
            self.write_service(maps, number, key, &listener);
        }
        let numbers: Vec<_> = fresh.iter().map(|key| self.services.get(key).unwrap_or(0)).collect();
        maps.listeners.update(&fresh, &numbers)?;
        if changed {
            maps.count_change();
        }
        Ok(())
    }

    /// Flows are checked again once the version changes, so that is written last.
    fn write_service(&self, maps: &Maps, number: u32, key: &ListenerKey, listener: &Listener) {
        let version = maps.services.get(number).unwrap_or_default().version;
        let ranges = listener.ranges.as_ref().and_then(|set| self.range_sets.get(set)).unwrap_or(0);
        let service = Service {
            listener: *key,
            slots: self.places.get(&listener.table).map_or(0, |place| place.slots()),
            version,
            flags: if listener.has_affinity { AFFINITY } else { 0 },
            table: listener.table,
            ranges,
        };
        maps.services.set(number, &service);
        maps.services.set(number, &Service { version: version.wrapping_add(1), ..service });
    }

    fn write_vips(&mut self, maps: &Maps, old: &State, wanted: &State) -> Result<(), Error> {
        let (mut keys, mut values, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        let gate = &mut self.gate;
        each_difference(&old.vips, &wanted.vips, PartialEq::eq, |vip, old, new| {
            let word = match (old, new) {
                (None, Some(_)) => Some(gate.add(*vip)),
                (Some(_), None) => Some(gate.remove(*vip)),
                _ => None,
            };
            if let Some((word, bits)) = word {
                maps.gate.set(word, &bits);
            }
            match new {
                Some(lease) => {
                    keys.push(V6::from(*vip));
                    values.push(Vip { lease: *lease });
                }
                None => gone.push(V6::from(*vip)),
            }
        });
        maps.vips.update(&keys, &values)?;
        maps.vips.delete(&gone)?;
        if !keys.is_empty() || !gone.is_empty() {
            maps.count_change();
        }
        Ok(())
    }

    fn delete_listeners(&mut self, maps: &Maps, listeners: &[ListenerKey]) -> Result<(), Error> {
        maps.listeners.delete(listeners)?;
        for key in listeners {
            if let Some(number) = self.services.remove(key) {
                let held = maps.services.get(number).unwrap_or_default();
                let ended = Service { version: held.version.wrapping_add(1), ..held };
                maps.services.set(number, &ended);
                maps.service_counters.reset(&number, Counters::default(), maps.cpus)?;
                // Last: the next process clears the counters of a number that has a listener here.
                maps.services.set(number, &Service { version: ended.version, ..Service::default() });
            }
        }
        Ok(())
    }

    fn delete(&mut self, maps: &Maps, left: &Deletions) -> Result<(), Error> {
        maps.prefixes.delete(&left.prefixes)?;
        // Exchanges of datagrams with these targets are checked again. Also before, so that an end of
        // this process between leaves none that was idle.
        let targets: BTreeSet<_> = left.members.iter().map(|member| member.target).collect();
        change_versions(maps, &targets);
        maps.members.delete(&left.members)?;
        change_versions(maps, &targets);
        for region in left.regions.iter().filter(|region| region.size != 0) {
            self.regions.free(region.first);
        }
        Ok(())
    }
}

fn write_targets(maps: &Maps, old: &State, wanted: &State) -> Result<(), Error> {
    let (mut result, mut changed) = (Ok(()), false);
    each_difference(&old.targets, &wanted.targets, PartialEq::eq, |number, _, new| {
        changed = true;
        let Some(state) = new else { return };
        match maps.targets.get(*number) {
            // Flows to the old address are checked again.
            Some(held) => {
                let version = held.version.wrapping_add(1);
                maps.targets.set(*number, &records::target(state, version));
            }
            None => result = Err(Error::Full("TARGETS")),
        }
    });
    if changed {
        maps.count_change();
    }
    result
}

fn delete_targets(maps: &Maps, old: &State, wanted: &State) -> Result<(), Error> {
    let mut result = Ok(());
    each_difference(&old.targets, &wanted.targets, PartialEq::eq, |number, _, new| {
        if new.is_none() {
            let held = maps.targets.get(*number).unwrap_or_default();
            let ended = Target { version: held.version.wrapping_add(1), family: 0, ..held };
            maps.targets.set(*number, &ended);
            let reset = maps.target_counters.reset(number, Counters::default(), maps.cpus);
            // Last, as of Services.
            maps.targets.set(*number, &Target { version: ended.version, ..Target::default() });
            result = std::mem::replace(&mut result, Ok(())).and(reset);
        }
    });
    result
}

fn change_versions(maps: &Maps, targets: &BTreeSet<u32>) {
    for number in targets {
        if let Some(held) = maps.targets.get(*number) {
            maps.targets.set(*number, &Target { version: held.version.wrapping_add(1), ..held });
        }
    }
}

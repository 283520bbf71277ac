// SPDX-License-Identifier: Apache-2.0
//! Writes the differences between two states, in an order in which each packet finds what it needs:
//! what others refer to is written before them and deleted after them.
//!
//! The program reads several maps for a packet, and a write may come between. So nothing changes its
//! meaning in place but what is one word: slots, and where a Service's slots are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_packet::V6;
use steerage_edge_packet::maps::{
    AFFINITY, ListenerKey, Mac, Member, Prefix, SLOTS_PER_ELEMENT, Service, Slots, Target, Vip,
};

use crate::error::Error;
use crate::maps::Maps;
use crate::numbers::Numbers;
use crate::records::{self, Gate};
use crate::regions::{Regions, elements};
use crate::state::{Listener, MacAddress, State, Table};

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
    fn slots(self) -> u64 {
        Service::slots(self.first * SLOTS_PER_ELEMENT, self.size)
    }
}

/// What the maps hold, and by which numbers.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) written: State,
    pub(crate) services: Numbers<ListenerKey>,
    pub(crate) regions: Regions,
    pub(crate) places: BTreeMap<u32, Region>,
    pub(crate) range_sets: Numbers<Arc<BTreeSet<IpNet>>>,
    pub(crate) sender_sets: Numbers<MacAddress>,
    pub(crate) gate: Gate,
}

impl Writer {
    /// For empty maps.
    pub(crate) fn new(maps: &Maps) -> Self {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        Self {
            written: State::default(),
            services: Numbers::new(count(maps.services.len())),
            regions: Regions::new(count(maps.slots.len())),
            places: BTreeMap::new(),
            range_sets: Numbers::new(SENDER_SET),
            sender_sets: Numbers::new(SENDER_SET),
            gate: Gate::default(),
        }
    }

    /// After an error the maps hold parts of both states, and must be adopted again.
    pub(crate) fn write(&mut self, maps: &Maps, wanted: &State) -> Result<(), Error> {
        self.write_targets(maps, wanted)?;
        let left = self.write_tables(maps, wanted)?;
        self.write_senders(maps, wanted)?;
        let unused_ranges = self.write_listeners(maps, wanted, &left.moved)?;
        self.write_vips(maps, wanted)?;
        self.delete_listeners(maps, wanted)?;
        self.delete_prefixes(maps, &unused_ranges)?;
        self.delete_tables(maps, wanted, left)?;
        self.delete_targets(maps, wanted);
        self.written = wanted.clone();
        Ok(())
    }

    fn write_targets(&self, maps: &Maps, wanted: &State) -> Result<(), Error> {
        for (number, state) in &wanted.targets {
            let old = self.written.targets.get(number);
            if old == Some(state) {
                continue;
            }
            let held = maps.targets.get(*number).ok_or(Error::Full("TARGETS"))?;
            // Flows to the old address are checked again.
            maps.targets.set(*number, &records::target(state, held.version.wrapping_add(1)));
        }
        Ok(())
    }

    fn write_tables(&mut self, maps: &Maps, wanted: &State) -> Result<LeftTables, Error> {
        let empty = Table::default();
        let mut left = LeftTables::default();
        let (mut changed, mut joined) = (Vec::new(), Vec::new());
        for (number, table) in &wanted.tables {
            let old = self.written.tables.get(number);
            if old.is_some_and(|old| Arc::ptr_eq(old, table) || old == table) {
                continue;
            }
            changed.push((*number, table));
            let old = old.map_or(&empty, |old| &**old);
            let member = |target: &u32| Member { table: *number, target: *target };
            joined.extend(table.members.difference(&old.members).map(member));
            left.members.extend(old.members.difference(&table.members).map(member));
        }
        maps.members.update(&joined, &vec![1_u32; joined.len()])?;
        for (number, table) in changed {
            let size = u32::try_from(table.slots.len()).unwrap_or(u32::MAX);
            let place = match self.places.get(&number) {
                Some(place) if place.size == size => *place,
                old => {
                    left.regions.extend(old.copied());
                    left.moved.insert(number);
                    let first = if size == 0 { Some(0) } else { self.regions.take(elements(size)) };
                    let place = Region { first: first.ok_or(Error::Full("SLOTS"))?, size };
                    self.places.insert(number, place);
                    place
                }
            };
            for (element, chunk) in (place.first..).zip(table.slots.chunks(SLOTS_PER_ELEMENT as usize)) {
                let mut slots = Slots::default();
                slots[..chunk.len()].copy_from_slice(chunk);
                maps.slots.set(element, &slots);
            }
        }
        Ok(left)
    }

    fn write_senders(&mut self, maps: &Maps, wanted: &State) -> Result<(), Error> {
        let none = BTreeSet::new();
        let (mut keys, mut sets) = (Vec::new(), Vec::new());
        let (mut added, mut deleted, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for (mac, nets) in &wanted.senders {
            let old = self.written.senders.get(mac);
            if old == Some(nets) {
                continue;
            }
            let number = SENDER_SET | self.sender_sets.assign(mac).ok_or(Error::Full("SENDERS"))?;
            if old.is_none() {
                keys.push(Mac { mac: *mac, pad: 0 });
                sets.push(number);
            }
            let old = old.map_or(&none, |old| &**old);
            added.extend(nets.difference(old).map(|net| records::prefix(number, net)));
            deleted.extend(old.difference(nets).map(|net| records::prefix(number, net)));
        }
        for (mac, nets) in self.written.senders.iter().filter(|(mac, _)| !wanted.senders.contains_key(*mac)) {
            gone.push(Mac { mac: *mac, pad: 0 });
            if let Some(number) = self.sender_sets.remove(mac) {
                deleted.extend(nets.iter().map(|net| records::prefix(SENDER_SET | number, net)));
            }
        }
        maps.prefixes.update(&added, &vec![1_u32; added.len()])?;
        maps.senders.update(&keys, &sets)?;
        maps.senders.delete(&gone)?;
        maps.prefixes.delete(&deleted)
    }

    /// Returns the prefixes of source ranges that no listener has any more.
    fn write_listeners(
        &mut self,
        maps: &Maps,
        wanted: &State,
        moved: &BTreeSet<u32>,
    ) -> Result<Vec<Prefix>, Error> {
        let ranges = |state: &State| -> BTreeSet<_> {
            state.listeners.values().filter_map(|listener| listener.ranges.clone()).collect()
        };
        let (old_ranges, new_ranges) = (ranges(&self.written), ranges(wanted));
        let mut added = Vec::new();
        for set in new_ranges.difference(&old_ranges) {
            let number = self.range_sets.assign(set).ok_or(Error::Full("PREFIXES"))?;
            added.extend(set.iter().map(|net| records::prefix(number, net)));
        }
        maps.prefixes.update(&added, &vec![1_u32; added.len()])?;
        let (mut keys, mut numbers) = (Vec::new(), Vec::new());
        for (key, listener) in &wanted.listeners {
            let old = self.written.listeners.get(key);
            if old == Some(listener) && !moved.contains(&listener.table) {
                continue;
            }
            let number = self.services.assign(key).ok_or(Error::Full("SERVICES"))?;
            self.write_service(maps, number, key, listener);
            if old.is_none() {
                keys.push(*key);
                numbers.push(number);
            }
        }
        maps.listeners.update(&keys, &numbers)?;
        let mut unused = Vec::new();
        for set in old_ranges.difference(&new_ranges) {
            if let Some(number) = self.range_sets.remove(set) {
                unused.extend(set.iter().map(|net| records::prefix(number, net)));
            }
        }
        Ok(unused)
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

    fn write_vips(&mut self, maps: &Maps, wanted: &State) -> Result<(), Error> {
        let (mut keys, mut values, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for (vip, lease) in &wanted.vips {
            let old = self.written.vips.get(vip);
            if old == Some(lease) {
                continue;
            }
            keys.push(V6::from(*vip));
            values.push(Vip { lease: *lease });
            if old.is_none() {
                let (word, bits) = self.gate.add(*vip);
                maps.gate.set(word, &bits);
            }
        }
        maps.vips.update(&keys, &values)?;
        for vip in self.written.vips.keys().filter(|vip| !wanted.vips.contains_key(*vip)) {
            gone.push(V6::from(*vip));
            let (word, bits) = self.gate.remove(*vip);
            maps.gate.set(word, &bits);
        }
        maps.vips.delete(&gone)
    }

    fn delete_listeners(&mut self, maps: &Maps, wanted: &State) -> Result<(), Error> {
        let is_gone = |key: &&ListenerKey| !wanted.listeners.contains_key(*key);
        let gone: Vec<_> = self.written.listeners.keys().filter(is_gone).copied().collect();
        maps.listeners.delete(&gone)?;
        for key in &gone {
            if let Some(number) = self.services.remove(key) {
                let version = maps.services.get(number).unwrap_or_default().version.wrapping_add(1);
                maps.services.set(number, &Service { version, ..Service::default() });
            }
        }
        Ok(())
    }

    fn delete_prefixes(&self, maps: &Maps, unused: &[Prefix]) -> Result<(), Error> {
        maps.prefixes.delete(unused)
    }

    fn delete_tables(&mut self, maps: &Maps, wanted: &State, left: LeftTables) -> Result<(), Error> {
        let LeftTables { mut members, mut regions, .. } = left;
        for (number, table) in
            self.written.tables.iter().filter(|(number, _)| !wanted.tables.contains_key(*number))
        {
            members.extend(table.members.iter().map(|target| Member { table: *number, target: *target }));
            regions.extend(self.places.remove(number));
        }
        maps.members.delete(&members)?;
        // Exchanges of datagrams with these targets are checked again.
        let targets: BTreeSet<_> = members.iter().map(|member| member.target).collect();
        for number in targets {
            if let Some(held) = maps.targets.get(number) {
                maps.targets.set(number, &Target { version: held.version.wrapping_add(1), ..held });
            }
        }
        for region in regions.iter().filter(|region| region.size != 0) {
            self.regions.free(region.first);
        }
        Ok(())
    }

    fn delete_targets(&self, maps: &Maps, wanted: &State) {
        for number in self.written.targets.keys().filter(|number| !wanted.targets.contains_key(*number)) {
            let version = maps.targets.get(*number).unwrap_or_default().version.wrapping_add(1);
            maps.targets.set(*number, &Target { version, ..Target::default() });
        }
    }
}

/// What is deleted once no listener refers to it.
#[derive(Debug, Default)]
struct LeftTables {
    members: Vec<Member>,
    regions: Vec<Region>,
    /// Tables whose slots are elsewhere now.
    moved: BTreeSet<u32>,
}

// SPDX-License-Identifier: Apache-2.0
//! Reads the maps that an earlier process has left, and removes what nothing refers to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_packet::V6;
use steerage_edge_packet::hash::GATE_WORDS;
use steerage_edge_packet::maps::{
    AFFINITY, ListenerKey, Mac, Member, Prefix, SLOTS_PER_ELEMENT, Service, Vip,
};

use crate::error::Error;
use crate::maps::Maps;
use crate::numbers::Numbers;
use crate::range_sets::RangeSets;
use crate::records;
use crate::regions::elements;
use crate::state::{Listener, State, Table};
use crate::writer::{Region, SENDER_SET, Writer};

/// A writer that continues with what the maps hold.
pub(crate) fn adopt(maps: &Maps) -> Result<Writer, Error> {
    let mut writer = Writer::new(maps);
    let services = read_services(maps)?;
    let sets = read_sets(maps)?;
    let mut tables = read_tables(maps, &mut writer, &services);
    read_members(maps, &mut tables)?;
    let mut ranges = Vec::new();
    let listener = |(key, _, service): &(ListenerKey, u32, Service)| {
        let set = (service.ranges != 0).then(|| sets.get(&service.ranges).cloned().unwrap_or_default());
        ranges.extend(set.iter().map(|set| (Arc::clone(set), service.ranges)));
        let has_affinity = service.flags & AFFINITY != 0;
        (*key, Listener { table: service.table, has_affinity, ranges: set })
    };
    let mut state = State {
        listeners: services.iter().map(listener).collect(),
        tables: tables.into_iter().map(|(number, table)| (number, Arc::new(table))).collect(),
        ..State::default()
    };
    let limit = u32::try_from(maps.services.len()).unwrap_or(u32::MAX);
    writer.services = Numbers::adopt(limit, services.iter().map(|(key, number, _)| (*key, *number)));
    writer.range_sets = RangeSets::adopt(SENDER_SET, &ranges);
    for (key, _, service) in &services {
        writer.users.entry(service.table).or_default().push(*key);
    }
    for number in 0..u32::try_from(maps.targets.len()).unwrap_or(u32::MAX) {
        let target = maps.targets.get(number).and_then(|target| records::target_state(&target));
        state.targets.extend(target.map(|target| (number, target)));
    }
    let senders = maps.senders.read::<Mac, u32>()?;
    let nets = |number: &u32| sets.get(number).cloned().unwrap_or_default();
    state.senders = senders.iter().map(|(mac, number)| (mac.mac, nets(number))).collect();
    let sender_sets = senders.iter().map(|(mac, number)| (mac.mac, number & !SENDER_SET));
    writer.sender_sets = Numbers::adopt(SENDER_SET, sender_sets);
    let vips = maps.vips.read::<V6, Vip>()?;
    state.vips = vips.iter().map(|(vip, value)| (IpAddr::from(*vip), value.lease)).collect();
    for (vip, _) in vips {
        writer.gate.add(vip.into());
    }
    for word in 0..GATE_WORDS {
        maps.gate.set(word, &writer.gate.word(word));
    }
    remove_unused_sets(maps, &sets, &services, &writer, &state)?;
    writer.written = state;
    Ok(writer)
}

/// The listeners that have a Service. Others are removed.
fn read_services(maps: &Maps) -> Result<Vec<(ListenerKey, u32, Service)>, Error> {
    let (mut found, mut broken) = (Vec::new(), Vec::new());
    for (key, number) in maps.listeners.read::<ListenerKey, u32>()? {
        match maps.services.get(number).filter(|service| service.listener == key) {
            Some(service) => found.push((key, number, service)),
            None => broken.push(key),
        }
    }
    maps.listeners.delete(&broken)?;
    // Sorted, because maps are made faster of what is sorted.
    found.sort_unstable_by_key(|(key, ..)| *key);
    Ok(found)
}

fn read_sets(maps: &Maps) -> Result<BTreeMap<u32, Arc<BTreeSet<IpNet>>>, Error> {
    let mut sets = BTreeMap::<u32, BTreeSet<IpNet>>::new();
    for (prefix, _) in maps.prefixes.read::<Prefix, u32>()? {
        sets.entry(prefix.set).or_default().extend(records::net(&prefix));
    }
    Ok(sets.into_iter().map(|(number, set)| (number, Arc::new(set))).collect())
}

fn read_tables(
    maps: &Maps,
    writer: &mut Writer,
    services: &[(ListenerKey, u32, Service)],
) -> BTreeMap<u32, Table> {
    let mut tables = BTreeMap::<u32, Table>::new();
    for (_, _, service) in services {
        if tables.contains_key(&service.table) {
            continue;
        }
        let (base, size) = (service.slots >> 32, service.slots & u64::from(u32::MAX));
        let half = |number: u64| u32::try_from(number).unwrap_or(0);
        let region = Region { first: half(base) / SLOTS_PER_ELEMENT, size: half(size) };
        let mut slots = Vec::with_capacity(usize::try_from(region.size).unwrap_or(0));
        for element in region.first..region.first + elements(region.size) {
            slots.extend(maps.slots.get(element).unwrap_or_default());
        }
        slots.truncate(usize::try_from(region.size).unwrap_or(0));
        if region.size != 0 {
            writer.regions.adopt(region.first, elements(region.size));
        }
        writer.places.insert(service.table, region);
        tables.insert(service.table, Table { slots, members: BTreeSet::new() });
    }
    tables
}

fn read_members(maps: &Maps, tables: &mut BTreeMap<u32, Table>) -> Result<(), Error> {
    let mut members: Vec<_> = maps.members.read::<Member, u32>()?.into_iter().map(|(key, _)| key).collect();
    members.sort_unstable();
    let mut unused = Vec::new();
    for of_table in members.chunk_by(|a, b| a.table == b.table) {
        match of_table.first().and_then(|first| tables.get_mut(&first.table)) {
            Some(table) => table.members = of_table.iter().map(|member| member.target).collect(),
            None => unused.extend_from_slice(of_table),
        }
    }
    maps.members.delete(&unused)
}

fn remove_unused_sets(
    maps: &Maps,
    sets: &BTreeMap<u32, Arc<BTreeSet<IpNet>>>,
    services: &[(ListenerKey, u32, Service)],
    writer: &Writer,
    state: &State,
) -> Result<(), Error> {
    let mut used: BTreeSet<u32> = services.iter().map(|(_, _, service)| service.ranges).collect();
    let senders = state.senders.keys().filter_map(|mac| writer.sender_sets.get(mac));
    used.extend(senders.map(|number| number | SENDER_SET));
    let unused = sets.iter().filter(|(number, _)| !used.contains(*number));
    let prefixes: Vec<_> =
        unused.flat_map(|(number, set)| set.iter().map(|net| records::prefix(*number, net))).collect();
    maps.prefixes.delete(&prefixes)
}

// SPDX-License-Identifier: Apache-2.0
//! Reads the maps that an earlier process has left, and removes what nothing refers to.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_packet::V6;
use steerage_edge_packet::hash::GATE_WORDS;
use steerage_edge_packet::maps::{
    AFFINITY, Counters, FORWARDER, ListenerKey, Mac, Member, Prefix, Service, Target, Vip,
};

use crate::error::Error;
use crate::maps::Maps;
use crate::numbers::Numbers;
use crate::range_sets::RangeSets;
use crate::records;
use crate::regions::elements;
use crate::state::{Listener, Sender, State, Table, TargetState};
use crate::syscall;
use crate::writer::{Region, SENDER_SET, Writer};

/// A writer that continues with what the maps hold.
pub(crate) fn adopt(maps: &Maps) -> Result<Writer, Error> {
    let mut writer = Writer::new(maps);
    let services = read_services(maps)?;
    clear_unused_services(maps, &services)?;
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
    let limit = maps.services.len();
    writer.services = Numbers::adopt(limit, services.iter().map(|(key, number, _)| (*key, *number)));
    writer.range_sets = RangeSets::adopt(SENDER_SET, &ranges);
    for (key, _, service) in &services {
        writer.users.entry(service.table).or_default().push(*key);
    }
    state.targets = read_targets(maps)?;
    let senders = maps.senders.read::<Mac, u32>()?;
    let sender = |number: &u32| match *number {
        FORWARDER => Sender::Forwarder,
        number => Sender::Own(sets.get(&number).cloned().unwrap_or_default()),
    };
    state.senders = senders.iter().map(|(mac, number)| (mac.mac, sender(number))).collect();
    let own_sets = senders.iter().filter(|(_, number)| *number != FORWARDER);
    let sender_sets = own_sets.map(|(mac, number)| (mac.mac, number & !SENDER_SET));
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

/// Ends the flows of Services without a listener, whose numbers the next listeners get.
fn clear_unused_services(maps: &Maps, services: &[(ListenerKey, u32, Service)]) -> Result<(), Error> {
    let used: HashSet<u32> = services.iter().map(|(_, number, _)| *number).collect();
    for number in 0..maps.services.len() {
        let Some(service) = maps.services.get(number).filter(|_| !used.contains(&number)) else { continue };
        let cleared = Service { version: service.version, ..Service::default() };
        if service != cleared {
            maps.service_counters.reset(&number, Counters::default(), maps.cpus)?;
            maps.services.set(number, &Service { version: service.version.wrapping_add(1), ..cleared });
        }
    }
    Ok(())
}

/// The targets. Of one that was being deleted, the flows end, and its counters.
fn read_targets(maps: &Maps) -> Result<BTreeMap<u32, TargetState>, Error> {
    let mut found = BTreeMap::new();
    for number in 0..maps.targets.len() {
        let Some(target) = maps.targets.get(number) else { continue };
        let cleared = Target { version: target.version, ..Target::default() };
        if let Some(state) = records::target_state(&target) {
            found.insert(number, state);
        } else if target != cleared {
            maps.target_counters.reset(&number, Counters::default(), maps.cpus)?;
            maps.targets.set(number, &Target { version: target.version.wrapping_add(1), ..cleared });
        }
    }
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
    let mut is_repaired = false;
    for (_, number, service) in services {
        if let Some(place) = writer.places.get(&service.table) {
            // An earlier process has ended while it wrote the Services of a table whose slots are
            // elsewhere now.
            is_repaired |= refer_to(maps, *number, service, *place);
            continue;
        }
        let mut place = Region::of(service.slots);
        let length = elements(place.size);
        if place.size != 0 && !writer.regions.adopt(place.first, length, service.table) {
            // Another table's slots.
            place = Region { first: 0, size: 0 };
            is_repaired |= refer_to(maps, *number, service, place);
        }
        let mut slots = Vec::with_capacity(usize::try_from(place.size).unwrap_or(0));
        for element in place.first..place.first + elements(place.size) {
            slots.extend(maps.slots.get(element).unwrap_or_default());
        }
        slots.truncate(usize::try_from(place.size).unwrap_or(0));
        writer.places.insert(service.table, place);
        tables.insert(service.table, Table { slots, members: BTreeSet::new() });
    }
    writer.regions.round();
    if is_repaired {
        // The places to which the Services have referred are free.
        syscall::wait_for_packets();
    }
    tables
}

/// Lets a Service have the slots at this place. Returns whether it had others.
fn refer_to(maps: &Maps, number: u32, service: &Service, place: Region) -> bool {
    if service.slots == place.slots() {
        return false;
    }
    let service = Service { slots: place.slots(), ..*service };
    maps.services.set(number, &service);
    maps.services.set(number, &Service { version: service.version.wrapping_add(1), ..service });
    true
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

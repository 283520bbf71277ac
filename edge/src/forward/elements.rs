// SPDX-License-Identifier: Apache-2.0
//! Converts the forwarding state to elements of sets and maps, and back. Pure, called by `writer`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use steerage_nft::{Data, Element};

use super::rules::{IP_FAMILIES, IpFamily};
use super::state::{ForwardingState, Mac, SlotTable};

/// The elements to delete from one set, and to add to it. A set of ranges is named by its first name, also if the kernel has the second.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SetChange {
    pub(crate) set: String,
    pub(crate) delete: Vec<Element>,
    pub(crate) add: Vec<Element>,
}

/// In a concatenation each field starts at a new 32-bit word.
fn concatenate(fields: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(24);
    for field in fields {
        bytes.extend_from_slice(field);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn family(address: IpAddr) -> IpFamily {
    IP_FAMILIES[usize::from(address.is_ipv6())]
}

/// All differences between two states except in their slot tables.
pub(crate) fn changes(old: &ForwardingState, new: &ForwardingState) -> Vec<SetChange> {
    let mut changes = Changes::default();
    changes.map(&old.targets, &new.targets, |id, address| {
        (family(*address).name("targets"), Element::entry(id.to_ne_bytes().to_vec(), octets(*address)))
    });
    changes.map(&old.listeners, &new.listeners, |(address, protocol, port), table| {
        let key = concatenate(&[&octets(*address), &[*protocol], &port.to_be_bytes()]);
        (family(*address).name("listeners"), Element::entry(key, table.to_ne_bytes().to_vec()))
    });
    changes.map(&old.fragments, &new.fragments, |address, table| {
        let element = Element::entry(octets(*address), table.to_ne_bytes().to_vec());
        (family(*address).name("fragments"), element)
    });
    for (name, old, new) in [("local", &old.local, &new.local), ("vips", &old.vips, &new.vips)] {
        changes.set(old, new, |address| (family(*address).name(name), Element::key(octets(*address))));
    }
    for (name, old, new) in [("peers", &old.peers, &new.peers), ("nodes", &old.nodes, &new.nodes)] {
        changes.set(old, new, |mac| (name.to_owned(), Element::key(mac.to_vec())));
    }
    let ranged = |state: &ForwardingState| state.ranges.keys().copied().collect::<BTreeSet<_>>();
    changes.set(&ranged(old), &ranged(new), |address| {
        (family(*address).name("ranged"), Element::key(octets(*address)))
    });
    changes.set(&pairs(&old.ranges), &pairs(&new.ranges), |(address, net)| {
        (family(*address).name("ranges"), range(&octets(*address), net))
    });
    changes.set(&pairs(&old.sources), &pairs(&new.sources), |(mac, net)| {
        (family(net.addr()).name("sources"), range(mac, net))
    });
    changes.0.into_iter().map(|(set, (delete, add))| SetChange { set, delete, add }).collect()
}

/// All elements that one set has in a state.
pub(crate) fn all_of(set: &str, state: &ForwardingState) -> Vec<Element> {
    let all = changes(&ForwardingState::default(), state);
    all.into_iter().find(|change| change.set == set).map(|change| change.add).unwrap_or_default()
}

fn pairs<K: Ord + Clone>(map: &BTreeMap<K, BTreeSet<IpNet>>) -> BTreeSet<(K, IpNet)> {
    map.iter().flat_map(|(key, nets)| nets.iter().map(|net| (key.clone(), *net))).collect()
}

fn range(first: &[u8], net: &IpNet) -> Element {
    let key = |address| concatenate(&[first, &octets(address)]);
    Element::range(key(net.network()), key(net.broadcast()))
}

#[derive(Default)]
struct Changes(BTreeMap<String, (Vec<Element>, Vec<Element>)>);

impl Changes {
    fn map<K: Ord, V: PartialEq>(
        &mut self,
        old: &BTreeMap<K, V>,
        new: &BTreeMap<K, V>,
        element: impl Fn(&K, &V) -> (String, Element),
    ) {
        for (key, value) in old.iter().filter(|(key, value)| new.get(key) != Some(value)) {
            let (set, element) = element(key, value);
            self.0.entry(set).or_default().0.push(element);
        }
        for (key, value) in new.iter().filter(|(key, value)| old.get(key) != Some(value)) {
            let (set, element) = element(key, value);
            self.0.entry(set).or_default().1.push(element);
        }
    }

    fn set<K: Ord>(
        &mut self,
        old: &BTreeSet<K>,
        new: &BTreeSet<K>,
        element: impl Fn(&K) -> (String, Element),
    ) {
        for key in old.difference(new) {
            let (set, element) = element(key);
            self.0.entry(set).or_default().0.push(element);
        }
        for key in new.difference(old) {
            let (set, element) = element(key);
            self.0.entry(set).or_default().1.push(element);
        }
    }
}

/// The elements to delete and to add: of the slot map, then of the set `usable`.
pub(crate) type SlotChanges = [(Vec<Element>, Vec<Element>); 2];

pub(crate) fn slot_changes(table: u32, old: &SlotTable, new: &SlotTable) -> SlotChanges {
    let entry = |slot: usize, target: u32| {
        let slot = u32::try_from(slot).unwrap_or(u32::MAX);
        Element::entry(
            concatenate(&[&table.to_ne_bytes(), &slot.to_ne_bytes()]),
            target.to_ne_bytes().to_vec(),
        )
    };
    let (mut delete, mut add) = (Vec::new(), Vec::new());
    for slot in 0..old.slots.len().max(new.slots.len()) {
        let held = |slots: &SlotTable| slots.slots.get(slot).copied().unwrap_or(0);
        let (before, after) = (held(old), held(new));
        if before != after {
            delete.extend((before != 0).then(|| entry(slot, before)));
            add.extend((after != 0).then(|| entry(slot, after)));
        }
    }
    let member = |target: &u32| Element::key(concatenate(&[&target.to_ne_bytes(), &table.to_ne_bytes()]));
    let delete_usable = old.usable.difference(&new.usable).map(member).collect();
    let add_usable = new.usable.difference(&old.usable).map(member).collect();
    [(delete, add), (delete_usable, add_usable)]
}

/// Reads elements that the kernel lists into a state. Elements of another shape are skipped: the table's comment has shown that
/// this version made the table.
pub(crate) struct ElementReader<'s>(pub(crate) &'s mut ForwardingState);

impl ElementReader<'_> {
    /// Elements of the set `name` of a family.
    pub(crate) fn read(&mut self, name: &str, family: IpFamily, elements: &[Element]) {
        let length = if family.name("") == "6" { 16 } else { 4 };
        for element in elements {
            self.read_element(name, length, element);
        }
    }

    fn read_element(&mut self, name: &str, length: usize, element: &Element) -> Option<()> {
        let key = &element.key;
        let state = &mut *self.0;
        match name {
            "targets" => {
                state.targets.insert(number(key, 0)?, address(value(element)?, 0, length)?);
            }
            "listeners" => {
                let port = key.get(length + 4..length + 6)?.try_into().ok()?;
                let listener = (address(key, 0, length)?, *key.get(length)?, u16::from_be_bytes(port));
                state.listeners.insert(listener, number(value(element)?, 0)?);
            }
            "fragments" => {
                state.fragments.insert(address(key, 0, length)?, number(value(element)?, 0)?);
            }
            "local" => drop(state.local.insert(address(key, 0, length)?)),
            "vips" => drop(state.vips.insert(address(key, 0, length)?)),
            "ranged" => drop(state.ranges.entry(address(key, 0, length)?).or_default()),
            "ranges" => {
                let net = net(key, element.key_end.as_ref()?, length, length)?;
                state.ranges.entry(address(key, 0, length)?).or_default().insert(net);
            }
            "sources" => {
                let net = net(key, element.key_end.as_ref()?, 8, length)?;
                state.sources.entry(mac(key)?).or_default().insert(net);
            }
            _ => {}
        }
        Some(())
    }

    /// Elements of the set `peers` or `nodes`.
    pub(crate) fn macs(elements: &[Element]) -> BTreeSet<Mac> {
        elements.iter().filter_map(|element| mac(&element.key)).collect()
    }
}

/// Elements of a slot map, as slot table, slot and target.
pub(crate) fn slots(elements: &[Element]) -> impl Iterator<Item = (u32, usize, u32)> + '_ {
    elements.iter().filter_map(|element| {
        let slot = usize::try_from(number(&element.key, 4)?).ok()?;
        Some((number(&element.key, 0)?, slot, number(value(element)?, 0)?))
    })
}

/// Elements of the set `usable`, as slot table and target.
pub(crate) fn usable(elements: &[Element]) -> impl Iterator<Item = (u32, u32)> + '_ {
    elements.iter().filter_map(|element| Some((number(&element.key, 4)?, number(&element.key, 0)?)))
}

fn value(element: &Element) -> Option<&[u8]> {
    match &element.data {
        Some(Data::Value(value)) => Some(value),
        _ => None,
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn mac(bytes: &[u8]) -> Option<Mac> {
    bytes.get(..6)?.try_into().ok()
}

fn address(bytes: &[u8], at: usize, length: usize) -> Option<IpAddr> {
    let bytes = bytes.get(at..at + length)?;
    match <[u8; 4]>::try_from(bytes) {
        Ok(four) => Some(four.into()),
        Err(_) => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
    }
}

/// The network between the first and the last address, which are at `at`.
fn net(first: &[u8], last: &[u8], at: usize, length: usize) -> Option<IpNet> {
    let (first, last) = (address(first, at, length)?, address(last, at, length)?);
    let same: u32 = octets(first)
        .iter()
        .zip(octets(last))
        .map(|(a, b)| (a ^ b).leading_zeros())
        .scan(true, |all_equal, zeros| {
            all_equal.then(|| {
                *all_equal = zeros == 8;
                zeros
            })
        })
        .sum();
    IpNet::new(first, u8::try_from(same).ok()?).ok()
}

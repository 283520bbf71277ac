// SPDX-License-Identifier: Apache-2.0
//! What an edge host's kernel forwards by, read from the pinned maps by this process: looking costs the edge nothing.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use anyhow::{Context as _, Result};
use aya::maps::{Array, HashMap, Map, MapData};
use steerage_edge_packet::V4;
use steerage_edge_packet::maps::{INET, LAYOUT, ListenerKey, SLOTS_PER_ELEMENT, Service, Slots, Target};

use super::cluster::{LISTENER, vip};

/// Protocol number of TCP.
const TCP: u8 = 6;

/// The maps of one edge host.
pub(crate) struct Tables {
    listeners: HashMap<MapData, ListenerKey, u32>,
    services: Array<MapData, Service>,
    slots: Array<MapData, Slots>,
    targets: Array<MapData, Target>,
}

impl Tables {
    /// Opens the maps of an interface. Fails until the edge has made them.
    pub(super) fn open(bpf: &Path, interface: &str) -> Result<Self> {
        let folder = bpf.join(interface).join(format!("maps-{LAYOUT}"));
        let open = |name: &str| {
            MapData::from_pin(folder.join(name)).with_context(|| format!("cannot open the map {name}"))
        };
        Ok(Self {
            listeners: HashMap::try_from(Map::HashMap(open("LISTENERS")?))?,
            services: Array::try_from(Map::Array(open("SERVICES")?))?,
            slots: Array::try_from(Map::Array(open("SLOTS")?))?,
            targets: Array::try_from(Map::Array(open("TARGETS")?))?,
        })
    }

    /// The addresses that a Service's connections go to; none if the kernel does not have the Service.
    pub(super) fn addresses_of(&self, service: u32) -> BTreeSet<Ipv4Addr> {
        let numbers = self.numbers_of(service).unwrap_or_default();
        numbers.into_iter().filter_map(|number| address(self.targets.get(&number, 0).ok()?)).collect()
    }

    /// The numbers of the targets in the slots of a Service.
    fn numbers_of(&self, service: u32) -> Option<BTreeSet<u32>> {
        let key = ListenerKey::new(IpAddr::V4(vip(service)), TCP, LISTENER);
        let number = self.listeners.get(&key, 0).ok()?;
        let slots = self.services.get(&number, 0).ok()?.slots;
        let (first, size) =
            (u32::try_from(slots >> 32).ok()?, u32::try_from(slots & u64::from(u32::MAX)).ok()?);
        let mut numbers = BTreeSet::new();
        for element in 0..size.div_ceil(SLOTS_PER_ELEMENT) {
            let of_element = self.slots.get(&(first / SLOTS_PER_ELEMENT + element), 0).ok()?;
            let left = usize::try_from(size - element * SLOTS_PER_ELEMENT).ok()?;
            numbers.extend(of_element.into_iter().take(left));
        }
        Some(numbers)
    }
}

fn address(target: Target) -> Option<Ipv4Addr> {
    (target.family == INET).then(|| V4(target.address[0]).into())
}

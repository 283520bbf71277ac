// SPDX-License-Identifier: Apache-2.0
//! What the program has counted.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use steerage_edge_packet::maps::{Counters, Event, ListenerKey};

use crate::error::Error;
use crate::maps::{KernelMap, Maps};
use crate::records;

/// Reads the counters, of which each CPU has its own. Clones are the same, and need nothing of the
/// data plane's owner.
#[derive(Clone, Debug)]
pub struct Counts {
    maps: Arc<Maps>,
}

impl Counts {
    pub(crate) fn new(maps: Arc<Maps>) -> Self {
        Self { maps }
    }

    /// Of each listener, since it was added.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn listeners(&self) -> Result<BTreeMap<ListenerKey, Counters>, Error> {
        let mut found = BTreeMap::new();
        for number in 1..self.maps.services.len() {
            let Some(service) = self.maps.services.get(number) else { continue };
            if service.listener != ListenerKey::default() {
                found.insert(service.listener, self.sum(&self.maps.service_counters, number)?);
            }
        }
        Ok(found)
    }

    /// Of each target, since it was added.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn targets(&self) -> Result<BTreeMap<IpAddr, Counters>, Error> {
        let mut found = BTreeMap::new();
        for number in 1..self.maps.targets.len() {
            let target = self.maps.targets.get(number);
            if let Some(state) = target.and_then(|target| records::target_state(&target)) {
                found.insert(state.address, self.target(number)?);
            }
        }
        Ok(found)
    }

    /// Of the target with this number.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn target(&self, number: u32) -> Result<Counters, Error> {
        self.sum(&self.maps.target_counters, number)
    }

    /// The number of each event.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn events(&self) -> Result<BTreeMap<Event, u64>, Error> {
        let events = &self.maps.events;
        let read = |event: Event| {
            Ok((event, events.lookup::<u32, u64>(&(event as u32), self.maps.cpus)?.iter().sum()))
        };
        Event::ALL.into_iter().map(read).collect()
    }

    fn sum(&self, map: &KernelMap, number: u32) -> Result<Counters, Error> {
        let mut sum = Counters::default();
        for value in map.lookup::<u32, Counters>(&number, self.maps.cpus)? {
            add(&mut sum, &value);
        }
        Ok(sum)
    }
}

/// Adds what was counted to a sum.
pub fn add(sum: &mut Counters, counted: &Counters) {
    sum.packets += counted.packets;
    sum.bytes += counted.bytes;
    sum.flows += counted.flows;
    sum.drops += counted.drops;
}

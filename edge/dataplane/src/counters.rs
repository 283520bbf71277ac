// SPDX-License-Identifier: Apache-2.0
//! What the program has counted.

use std::collections::BTreeMap;

use steerage_edge_packet::maps::{Counters, Event};

use crate::error::Error;
use crate::maps::{KernelMap, Maps};

/// The sums over all CPUs.
pub(crate) fn read(map: &KernelMap, number: u32, cpus: usize) -> Result<Counters, Error> {
    let values = map.lookup::<u32, Counters>(&number, cpus)?;
    Ok(values.iter().fold(Counters::default(), |sum, value| Counters {
        packets: sum.packets + value.packets,
        bytes: sum.bytes + value.bytes,
        flows: sum.flows + value.flows,
        drops: sum.drops + value.drops,
    }))
}

/// The number of each event.
pub(crate) fn events(maps: &Maps, cpus: usize) -> Result<BTreeMap<Event, u64>, Error> {
    let read =
        |event: Event| Ok((event, maps.events.lookup::<u32, u64>(&(event as u32), cpus)?.iter().sum()));
    Event::ALL.into_iter().map(read).collect()
}

// SPDX-License-Identifier: Apache-2.0
//! The numbers by which the kernel knows tables and targets. Pure. They differ from host to host; what they stand for does not.
//!
//! A target that goes keeps its number and its address for a while, since the flows of its clients may still name it.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::forward::{ForwardingState, LOCAL_TARGET, NUMBER_MASK, SlotTable, TARGET};

/// How long the address of a target that has gone is kept: connections have this long to end by themselves.
const RETIREMENT: Duration = Duration::from_hours(24);
/// How many such addresses are kept.
const MOST_RETIRED: usize = 16_384;

/// Numbers in use.
#[derive(Debug)]
pub(crate) struct IdAllocator<T> {
    targets: BTreeMap<IpAddr, Target>,
    tables: HashMap<T, u32>,
    /// Table numbers that the kernel held when this process started, by address.
    found: HashMap<IpAddr, u32>,
    last_target: u32,
    last_table: u32,
}

#[derive(Debug)]
struct Target {
    id: u32,
    /// Since when nothing leads there.
    retired: Option<Instant>,
}

impl<T> Default for IdAllocator<T> {
    fn default() -> Self {
        Self {
            targets: BTreeMap::new(),
            tables: HashMap::new(),
            found: HashMap::new(),
            last_target: 0,
            last_table: 0,
        }
    }
}

impl<T: Eq + Hash + Clone> IdAllocator<T> {
    /// Goes on with the numbers that the kernel holds.
    pub(crate) fn adopt(written: &ForwardingState) -> Self {
        let targets: BTreeMap<_, _> = written
            .targets
            .iter()
            .map(|(id, address)| (*address, Target { id: *id, retired: None }))
            .collect();
        let found: HashMap<_, _> =
            written.listeners.iter().map(|((vip, ..), table)| (*vip, table & NUMBER_MASK)).collect();
        Self {
            last_target: targets.values().map(|target| target.id & !TARGET).max().unwrap_or(0),
            last_table: written.tables.keys().map(|table| table & NUMBER_MASK).max().unwrap_or(0),
            targets,
            tables: HashMap::new(),
            found,
        }
    }

    /// The id of a target; this host's own is fixed.
    pub(crate) fn target(&mut self, address: IpAddr, is_local: bool) -> u32 {
        if is_local {
            return LOCAL_TARGET;
        }
        let last = &mut self.last_target;
        let target = self.targets.entry(address).or_insert_with(|| {
            *last += 1;
            Target { id: TARGET | *last, retired: None }
        });
        target.id
    }

    /// The number of a table that serves an address.
    pub(crate) fn table(&mut self, key: &T, vip: IpAddr) -> u32 {
        if let Some(number) = self.tables.get(key) {
            return *number;
        }
        // Two tables may have shared what they no longer share: the second gets a new number.
        let found = self.found.remove(&vip).filter(|number| !self.tables.values().any(|used| used == number));
        let number = found.unwrap_or_else(|| {
            self.last_table = (self.last_table + 1) & NUMBER_MASK;
            self.last_table
        });
        self.tables.insert(key.clone(), number);
        number
    }

    /// Forgets the tables that are not kept.
    pub(crate) fn retain_tables(&mut self, keep: impl Fn(&T) -> bool) {
        self.tables.retain(|key, _| keep(key));
    }

    /// The addresses of all targets, those that `tables` use and those that have not been gone for long.
    pub(crate) fn retire(
        &mut self,
        tables: &BTreeMap<u32, Arc<SlotTable>>,
        now: Instant,
    ) -> BTreeMap<u32, IpAddr> {
        let used: std::collections::HashSet<u32> =
            tables.values().flat_map(|table| table.usable.iter().copied()).collect();
        let mut retired = Vec::new();
        for target in self.targets.values_mut() {
            if used.contains(&target.id) {
                target.retired = None;
            } else {
                retired.push(*target.retired.get_or_insert(now));
            }
        }
        retired.sort();
        let oldest = retired.len().checked_sub(MOST_RETIRED).and_then(|at| retired.get(at).copied());
        self.targets.retain(|_, target| {
            target.retired.is_none_or(|since| {
                now.duration_since(since) < RETIREMENT && oldest.is_none_or(|oldest| since >= oldest)
            })
        });
        self.targets.iter().map(|(address, target)| (target.id, *address)).collect()
    }
}

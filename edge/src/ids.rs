// SPDX-License-Identifier: Apache-2.0
//! The ids by which the kernel knows slot tables and targets. Pure, used by `plan`. Ids differ between hosts; slots do not.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::forward::{ForwardingState, LOCAL_TARGET, NUMBER_MASK, TARGET};

/// A removed target keeps its id and its address for this time: flows of its clients still name the id, and end by themselves.
const RETENTION: Duration = Duration::from_hours(24);
/// The oldest removed targets beyond this number are forgotten.
const MAX_REMOVED: usize = 16_384;

#[derive(Clone, Debug, Default)]
pub(crate) struct TargetIds {
    targets: BTreeMap<IpAddr, Target>,
    last: u32,
}

#[derive(Clone, Debug)]
struct Target {
    id: u32,
    unused_since: Option<Instant>,
}

impl TargetIds {
    /// Continues with the ids that the kernel holds.
    pub(crate) fn adopt(written: &ForwardingState) -> Self {
        let target = |(id, address): (&u32, &IpAddr)| (*address, Target { id: *id, unused_since: None });
        let targets: BTreeMap<_, _> = written.targets.iter().map(target).collect();
        let last = targets.values().map(|target| target.id & !TARGET).max().unwrap_or(0);
        Self { targets, last }
    }

    pub(crate) fn assign(&mut self, address: IpAddr, is_local: bool) -> u32 {
        if is_local {
            return LOCAL_TARGET;
        }
        let last = &mut self.last;
        let target = self.targets.entry(address).or_insert_with(|| {
            *last += 1;
            Target { id: TARGET | *last, unused_since: None }
        });
        target.id
    }

    /// Forgets the targets that have been unused for too long.
    pub(crate) fn retain(&mut self, used: &BTreeSet<u32>, now: Instant) {
        let mut removed = Vec::new();
        for target in self.targets.values_mut() {
            if used.contains(&target.id) {
                target.unused_since = None;
            } else {
                removed.push(*target.unused_since.get_or_insert(now));
            }
        }
        removed.sort();
        let oldest = removed.len().checked_sub(MAX_REMOVED).and_then(|at| removed.get(at).copied());
        self.targets.retain(|_, target| {
            target.unused_since.is_none_or(|since| {
                now.duration_since(since) < RETENTION && oldest.is_none_or(|oldest| since >= oldest)
            })
        });
    }

    /// The addresses of all targets, also of those that were removed lately.
    pub(crate) fn addresses(&self) -> BTreeMap<u32, IpAddr> {
        self.targets.iter().map(|(address, target)| (target.id, *address)).collect()
    }
}

/// The numbers of slot tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableNumbers {
    /// The numbers that the kernel held when this process started, by VIP.
    adopted: Arc<HashMap<IpAddr, u32>>,
    /// All numbers that the kernel held then. They are never given to another VIP.
    reserved: Arc<HashSet<u32>>,
    used: HashSet<u32>,
    last: u32,
}

impl TableNumbers {
    /// Continues with the numbers that the kernel holds.
    pub(crate) fn adopt(written: &ForwardingState) -> Self {
        let number = |table: &u32| table & NUMBER_MASK;
        let adopted = written.listeners.iter().map(|((vip, ..), table)| (*vip, number(table))).collect();
        let reserved: HashSet<_> = written.slot_tables.keys().map(number).collect();
        let last = reserved.iter().copied().max().unwrap_or(0);
        Self { adopted: Arc::new(adopted), reserved: Arc::new(reserved), used: HashSet::new(), last }
    }

    /// The number of a new slot table that serves `vip`.
    pub(crate) fn assign(&mut self, vip: IpAddr) -> u32 {
        // Two VIPs may have shared a slot table that they no longer share: the second gets a new number.
        let adopted = self.adopted.get(&vip).copied().filter(|number| !self.used.contains(number));
        let number = adopted.unwrap_or_else(|| {
            // Once all numbers have been given out, they begin again, while old tables may still have theirs.
            loop {
                self.last = (self.last + 1) & NUMBER_MASK;
                if self.is_free(self.last) {
                    break self.last;
                }
            }
        });
        self.used.insert(number);
        number
    }

    /// An id of zero would mean no slot table.
    fn is_free(&self, number: u32) -> bool {
        number != 0 && !self.used.contains(&number) && !self.reserved.contains(&number)
    }

    /// Frees all numbers but these.
    pub(crate) fn retain(&mut self, used: HashSet<u32>) {
        self.used = used;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::slot_table_id;

    #[test]
    fn new_number_skips_numbers_in_use() {
        let vip = |number: u8| IpAddr::from([10, 0, 0, number]);
        let mut written = ForwardingState::default();
        for (vip, number) in [(vip(1), NUMBER_MASK), (vip(2), 2)] {
            let id = slot_table_id(number, 0, false);
            written.slot_tables.insert(id, Arc::default());
            written.listeners.insert((vip, 6, 80), id);
        }
        let mut numbers = TableNumbers::adopt(&written);
        // The largest number is in use: the next ones are zero, which is none, and 2, which belongs to another VIP.
        let new = [numbers.assign(vip(3)), numbers.assign(vip(4))];
        assert_eq!(new, [1, 3]);
        assert_eq!((numbers.assign(vip(1)), numbers.assign(vip(2))), (NUMBER_MASK, 2));
        numbers.retain([1, 3].into());
        numbers.last = 0;
        assert_eq!(numbers.assign(vip(5)), 4, "1 and 3 are in use, 2 was");
    }
}

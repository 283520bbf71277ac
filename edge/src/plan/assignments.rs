// SPDX-License-Identifier: Apache-2.0
//! The table of each group, with the numbers by which the kernel knows tables and targets, and what one plan leaves to the next.
//! Pure, called by the plan.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use steerage_edge_dataplane::maglev::{self, Member};
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Listener, State, StateChange, Table};

use super::PlanInputs;
use super::ledger::Ledger;
use super::reachable::distinct;
use super::room::{Room, Served, SlotsAndMembers, fair_share, ranges, served};
use super::select::{Frontend, TargetsInUse};
use super::targets::{TableKey, TargetGroup};
use super::usage::Memory;
use crate::host::HostNetwork;
use crate::numbers::{TableNumbers, TargetNumbers};

/// What one plan leaves to the next: numbers, tables, which are filled again only when their targets change, and the targets that
/// each VIP uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assignments {
    pub(super) targets: TargetNumbers,
    numbers: TableNumbers,
    pub(super) tables: HashMap<TableKey, AssignedTable>,
    pub(super) in_use: TargetsInUse,
    pub(super) served: Served,
    /// Of each group.
    memories: HashMap<TableKey, Arc<Memory>>,
    /// The targets of each listener's table that an earlier process has written, for the first plan.
    adopted: HashMap<ListenerKey, Arc<[IpAddr]>>,
}

#[derive(Clone, Debug)]
pub(super) struct AssignedTable {
    pub(super) number: u32,
    size: u32,
    members: Vec<Member>,
    pub(super) table: Arc<Table>,
}

impl AssignedTable {
    fn room(&self) -> SlotsAndMembers {
        SlotsAndMembers::of(self.size, self.members.len())
    }

    /// Whether it was filled for these, and is the table that they would get.
    fn is_of(&self, size: u32, members: &[Member]) -> bool {
        self.size == size && self.members == members
    }
}

impl Assignments {
    /// Continues with the numbers that the kernel holds.
    pub(crate) fn adopt(written: &State) -> Self {
        Self {
            targets: TargetNumbers::adopt(written),
            numbers: TableNumbers::adopt(written),
            served: served(written),
            adopted: adopted_targets(written),
            ..Self::default()
        }
    }

    /// The kernel's number of a target, if it has one.
    pub(crate) fn target_number(&self, address: IpAddr) -> Option<u32> {
        self.targets.get(address)
    }

    /// What is remembered of the group with this key, or with the other one, or of the table of its first listener.
    pub(super) fn memory(
        &self,
        key: &TableKey,
        other: &TableKey,
        first: &ListenerKey,
        now: Instant,
    ) -> Arc<Memory> {
        let adopted = || self.adopted.get(first).map(|used| Arc::new(Memory::adopt(used, now)));
        let known = self.memories.get(key).or_else(|| self.memories.get(other));
        known.cloned().or_else(adopted).unwrap_or_default()
    }

    /// What the next group with this key has to know.
    pub(super) fn remember(&mut self, group: &TargetGroup) {
        match self.memories.get_mut(&group.key) {
            Some(memory) => *memory = Arc::clone(&group.memory),
            None => drop(self.memories.insert(group.key.clone(), Arc::clone(&group.memory))),
        }
    }

    /// No group has this key any more. Returns the number of its table; `used` is what all tables take.
    pub(super) fn forget(&mut self, key: &TableKey, used: &mut SlotsAndMembers) -> Option<u32> {
        self.memories.remove(key);
        let assigned = self.tables.remove(key)?;
        *used = used.minus(assigned.room());
        self.numbers.release(assigned.number);
        Some(assigned.number)
    }

    /// All tables, by number.
    pub(super) fn tables(&self) -> BTreeMap<u32, Arc<Table>> {
        self.tables.values().map(|assigned| (assigned.number, Arc::clone(&assigned.table))).collect()
    }

    /// The number of the table of the group with this key.
    pub(super) fn table_number(&self, key: &TableKey) -> Option<u32> {
        self.tables.get(key).map(|assigned| assigned.number)
    }

    /// A group that serves has a target at this address, or none has any more. Returns its number if one has.
    pub(super) fn number(&mut self, address: IpAddr, is_used: bool, now: Instant) -> Option<u32> {
        if is_used {
            return Some(self.targets.mark_used(address));
        }
        self.targets.mark_unused(address, now);
        None
    }

    pub(super) fn has_too_many_removed(&self) -> bool {
        self.targets.has_too_many_removed()
    }

    /// Whether this host is a node, or was one lately, whose connections other edge hosts still forward.
    pub(super) fn is_node(&self, host: &HostNetwork, ledger: &Ledger) -> bool {
        ledger.has_own_host() || self.targets.has_own_host(host)
    }

    /// These listeners, and the targets in use, replace those that are gone.
    pub(super) fn serve(
        &mut self,
        gone: &StateChange,
        listeners: &BTreeMap<ListenerKey, Listener>,
        in_use: TargetsInUse,
    ) {
        for key in gone.listeners.keys() {
            self.served.remove(key);
        }
        self.served.extend(listeners.iter().map(|(key, listener)| (*key, ranges(listener))));
        for vip in gone.vips.keys() {
            self.in_use.remove(vip);
        }
        self.in_use.extend(in_use);
    }

    /// The group's table with its number, if it has changed; `used` is what all tables take. Each group of a VIP has one.
    pub(super) fn retarget(
        &mut self,
        group: &TargetGroup,
        used: &mut SlotsAndMembers,
    ) -> Option<(u32, Arc<Table>)> {
        let (members, size) = group.members(&mut self.targets);
        let before = self.tables.get(&group.key);
        if before.is_some_and(|before| before.is_of(size, &members)) {
            return None;
        }
        let number = before.map(|before| before.number);
        *used = used.minus(before.map(AssignedTable::room).unwrap_or_default());
        let number = number.unwrap_or_else(|| self.numbers.assign(&group.first));
        let table = Arc::new(Table::new(size, &members));
        let assigned = AssignedTable { number, size, members, table: Arc::clone(&table) };
        *used = used.plus(assigned.room());
        self.tables.insert(group.key.clone(), assigned);
        Some((number, table))
    }
}

/// The targets of each listener's table.
fn adopted_targets(written: &State) -> HashMap<ListenerKey, Arc<[IpAddr]>> {
    let address = |number: &u32| written.targets.get(number).map(|target| target.address);
    let mut of_tables = HashMap::new();
    let mut of_listeners = HashMap::new();
    for (key, listener) in &written.listeners {
        let Some(table) = written.tables.get(&listener.table) else { continue };
        let targets: &mut Arc<[IpAddr]> = of_tables
            .entry(listener.table)
            .or_insert_with(|| table.members.iter().filter_map(address).collect());
        of_listeners.insert(*key, Arc::clone(targets));
    }
    of_listeners
}

/// The number of each group's table, by the group's position.
pub(super) type PlannedTables = BTreeMap<usize, u32>;

/// The tables of all groups.
pub(super) struct Assigned {
    pub(super) tables: PlannedTables,
    pub(super) assignments: Assignments,
    pub(super) used: SlotsAndMembers,
    /// The maps have no room for tables as large as they should be.
    pub(super) is_cut: bool,
}

/// A table for each group that a frontend uses.
pub(super) fn assign(
    groups: &[TargetGroup],
    frontends: &[Frontend<'_>],
    in_use: TargetsInUse,
    previous: &Assignments,
    inputs: &PlanInputs<'_>,
) -> Assigned {
    let mut targets = previous.targets.clone();
    let mut numbers = previous.numbers.clone();
    let mut assigned = HashMap::with_capacity(groups.len());
    let mut planned = BTreeMap::new();
    let used: BTreeSet<usize> = frontends.iter().map(|frontend| frontend.group).collect();
    let mut wanted: Vec<_> = used
        .into_iter()
        .filter_map(|position| {
            let group = groups.get(position)?;
            let (members, size) = group.members(&mut targets);
            Some((position, group, members, size))
        })
        .collect();
    // Also of targets that are in no table now: they may be in one as soon as they are healthy.
    let all_reachable = distinct(wanted.iter().map(|(_, group, ..)| &group.reachable));
    let numbered = all_reachable
        .flat_map(|reachable| reachable.addresses())
        .map(|address| targets.assign(address))
        .collect();
    let is_cut = fit(&mut wanted, inputs.room);
    let mut used = SlotsAndMembers::default();
    for (position, group, members, size) in wanted {
        let before = previous.tables.get(&group.key);
        let number = before.map_or_else(|| numbers.assign(&group.first), |before| before.number);
        let table = before
            .filter(|before| before.is_of(size, &members))
            .map_or_else(|| Arc::new(Table::new(size, &members)), |before| Arc::clone(&before.table));
        planned.insert(position, number);
        used = used.plus(SlotsAndMembers::of(size, members.len()));
        assigned.insert(group.key.clone(), AssignedTable { number, size, members, table });
    }
    targets.retain(&numbered, inputs.now);
    numbers.retain(assigned.values().map(|table| table.number).collect());
    let memories = groups.iter().map(|group| (group.key.clone(), Arc::clone(&group.memory))).collect();
    let assignments = Assignments {
        targets,
        numbers,
        tables: assigned,
        in_use,
        served: Served::new(),
        memories,
        adopted: HashMap::new(),
    };
    Assigned { tables: planned, assignments, used, is_cut }
}

/// Gives the largest tables fewer slots, and the longest lists fewer targets, if the maps have no room for all. Whether it has.
fn fit(wanted: &mut [(usize, &TargetGroup, Vec<Member>, u32)], room: Room) -> bool {
    let sizes = wanted.iter().map(|(.., size)| Table::room(*size).into());
    let most_slots = fair_share(sizes, room.slots);
    if let Some(most) = most_slots {
        for (_, group, members, size) in &mut *wanted {
            *size = (*size).min(maglev::largest_size(most));
            group.keep_members(members, usize::try_from(*size).unwrap_or(usize::MAX));
        }
    }
    let counts = wanted.iter().map(|(_, _, members, _)| u64::try_from(members.len()).unwrap_or(u64::MAX));
    let most_members = fair_share(counts, room.members);
    if let Some(most) = most_members {
        for (_, group, members, _) in wanted {
            group.keep_members(members, usize::try_from(most).unwrap_or(usize::MAX).max(1));
        }
    }
    most_slots.is_some() || most_members.is_some()
}

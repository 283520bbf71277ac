// SPDX-License-Identifier: Apache-2.0
//! A change of the agent's tables by other programs, joined from the kernel's notifications. Pure; the monitor's thread fills it, the
//! loop reports it, and the writer reads from it what to repair first.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::rules::SetId;
use steerage_nft::{BaseChainInfo, Change, Commit, ObjectKind, Process, Table};

/// Names of one kind that are written out. The rest is counted.
const NAMED: usize = 4;

/// What other programs changed, and who.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForeignChange {
    tables: BTreeMap<Table, Damage>,
    processes: BTreeSet<Process>,
    /// Sockets that changed something, whose processes are not known yet.
    unattributed: BTreeSet<u32>,
    is_unknown: bool,
}

/// What happened to one table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Damage {
    /// It was deleted, perhaps to be made again.
    pub is_deleted: bool,
    /// No packet sees its base chains.
    pub is_dormant: bool,
    /// Base chains that came or changed, as they are now.
    pub base_chains: BTreeMap<String, BaseChainInfo>,
    /// Chains that came or went, and how many changes of rules each has.
    pub chains: BTreeMap<String, usize>,
    /// Sets that came or went, and how many changes of elements each has.
    pub sets: BTreeMap<String, usize>,
}

impl Damage {
    fn extend(&mut self, other: Self) {
        self.is_deleted |= other.is_deleted;
        self.is_dormant |= other.is_dormant;
        self.base_chains.extend(other.base_chains);
        for (all, more) in [(&mut self.chains, other.chains), (&mut self.sets, other.sets)] {
            for (name, count) in more {
                *all.entry(name).or_default() += count;
            }
        }
    }
}

/// A kind of change, as the metric names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChangeKind {
    /// The table is deleted.
    Deleted,
    /// Rules or chains are changed, or packets do not see them any more.
    Rules,
    /// Elements or sets are changed.
    Elements,
    /// The kernel's notifications were lost.
    Unknown,
}

impl ChangeKind {
    /// All, in order.
    pub const ALL: [Self; 4] = [Self::Deleted, Self::Rules, Self::Elements, Self::Unknown];

    /// The metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Rules => "rules",
            Self::Elements => "elements",
            Self::Unknown => "unknown",
        }
    }
}

impl ForeignChange {
    /// Anything may have changed: nobody watched, or notifications were lost.
    pub fn unknown() -> Self {
        Self { is_unknown: true, ..Self::default() }
    }

    /// Adds a change of one object.
    pub fn add(&mut self, change: Change) {
        let Change { port, table, object, name, deleted, is_dormant, base } = change;
        self.unattributed.insert(port);
        let damage = self.tables.entry(table).or_default();
        damage.base_chains.extend(name.clone().zip(base));
        let count = |names: &mut BTreeMap<String, usize>, by| {
            *names.entry(name.unwrap_or_default()).or_default() += by;
        };
        match object {
            ObjectKind::Table => {
                damage.is_deleted |= deleted;
                damage.is_dormant = is_dormant;
            }
            ObjectKind::Chain => count(&mut damage.chains, 0),
            ObjectKind::Rule => count(&mut damage.chains, 1),
            ObjectKind::Set | ObjectKind::Other => count(&mut damage.sets, 0),
            ObjectKind::Elements => count(&mut damage.sets, 1),
        }
    }

    /// Adds changed elements of a set that no notification told.
    pub fn add_elements(&mut self, table: Table, set: String, count: usize) {
        *self.tables.entry(table).or_default().sets.entry(set).or_default() += count;
    }

    /// Adds changed rules of a chain that no notification told.
    pub fn add_rules(&mut self, table: Table, chain: String, count: usize) {
        *self.tables.entry(table).or_default().chains.entry(chain).or_default() += count;
    }

    /// Adds another change.
    pub fn extend(&mut self, other: Self) {
        for (table, damage) in other.tables {
            self.tables.entry(table).or_default().extend(damage);
        }
        self.processes.extend(other.processes);
        self.unattributed.extend(other.unattributed);
        self.is_unknown |= other.is_unknown;
    }

    /// Adds the end of a transaction, which names the process.
    pub fn commit(&mut self, Commit { port, process, .. }: Commit) {
        if self.unattributed.remove(&port) {
            self.processes.extend(process);
        }
    }

    /// Adds that notifications were lost.
    pub fn lose(&mut self) {
        self.is_unknown = true;
    }

    /// Whether nothing was changed.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && !self.is_unknown
    }

    /// Whether the end of each transaction was seen.
    pub fn is_attributed(&self) -> bool {
        self.unattributed.is_empty()
    }

    /// Whether the tables may have admitted clients that source ranges exclude, as far as the change is known: rules or the sets of ranges
    /// changed. A table that is gone or dormant admits nobody.
    pub fn may_admit(&self) -> bool {
        let is_of_ranges = |set: &String| *set == SetId::Restricted.name() || set.starts_with("sources-");
        let may = |damage: &Damage| !damage.chains.is_empty() || damage.sets.keys().any(is_of_ranges);
        self.tables.values().any(|damage| !damage.is_deleted && may(damage))
    }

    /// The damage of each table, as far as it is known.
    pub fn tables(&self) -> &BTreeMap<Table, Damage> {
        &self.tables
    }

    /// The damage of each table; `None` where that is not all.
    pub fn damage(&self) -> Option<&BTreeMap<Table, Damage>> {
        (!self.is_unknown).then_some(&self.tables)
    }

    /// The tables and kinds, for the metric.
    pub fn kinds(&self) -> BTreeSet<(Option<&Table>, ChangeKind)> {
        let of_table = |(table, damage): (_, &Damage)| {
            let kinds = [
                (damage.is_deleted, ChangeKind::Deleted),
                (!damage.is_deleted && (damage.is_dormant || !damage.chains.is_empty()), ChangeKind::Rules),
                (!damage.is_deleted && !damage.sets.is_empty(), ChangeKind::Elements),
            ];
            kinds.into_iter().filter(|(is, _)| *is).map(move |(_, kind)| (Some(table), kind))
        };
        let unknown = self.is_unknown.then_some((None, ChangeKind::Unknown));
        self.tables.iter().flat_map(of_table).chain(unknown).collect()
    }

    /// The processes that did it, such as `nft (process 17)`.
    pub fn authors(&self) -> String {
        let all: Vec<_> =
            self.processes.iter().map(|Process { id, name }| format!("{name} (process {id})")).collect();
        if all.is_empty() { "an unknown process".to_owned() } else { listed(&all) }
    }
}

/// Such as `ip steerage: deleted; ip6 steerage: 2 rules of services, 1 element of slots-3`.
impl fmt::Display for ForeignChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unknown = self.is_unknown.then(|| "not all changes seen".to_owned());
        let tables = self.tables.iter().map(|(table, damage)| format!("{table}: {damage}"));
        f.write_str(&tables.chain(unknown).collect::<Vec<_>>().join("; "))
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_deleted {
            return f.write_str("deleted");
        }
        let of = |names: &BTreeMap<String, usize>, one: &str, container: &str| -> Vec<String> {
            let part = |(name, count): (&String, &usize)| match count {
                0 => format!("{container} {name}"),
                1 => format!("1 {one} of {name}"),
                _ => format!("{count} {one}s of {name}"),
            };
            names.iter().map(part).collect()
        };
        let with_base = |name: &String| match self.base_chains.get(name) {
            Some(BaseChainInfo { hook, priority, drops, .. }) => {
                let policy = if *drops { "drop" } else { "accept" };
                format!("{name} (now hook {hook}, priority {priority}, policy {policy})")
            }
            None => name.clone(),
        };
        let chains = self.chains.iter().map(|(name, count)| (with_base(name), *count)).collect();
        let dormant = self.is_dormant.then(|| "made dormant".to_owned()).into_iter().collect();
        let all = [dormant, of(&chains, "rule", "chain"), of(&self.sets, "element", "set")].concat();
        f.write_str(&if all.is_empty() { "created".to_owned() } else { listed(&all) })
    }
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMED);
    let named = names[..names.len() - more].join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

#[cfg(test)]
mod tests {
    use steerage_nft::Family;

    use super::*;

    fn change(family: Family, object: ObjectKind, name: &str, deleted: bool) -> Change {
        let name = (!name.is_empty()).then(|| name.to_owned());
        Change {
            port: 7,
            table: Table::new(family, "steerage"),
            object,
            name,
            deleted,
            is_dormant: false,
            base: None,
        }
    }

    #[test]
    fn change_names_tables_kinds_and_processes() {
        let mut all = ForeignChange::default();
        assert!(all.is_empty() && all.is_attributed());
        // What `nft flush ruleset` tells of a table.
        all.add(change(Family::Ip, ObjectKind::Rule, "services", true));
        all.add(change(Family::Ip, ObjectKind::Table, "", true));
        for _ in 0..2 {
            all.add(change(Family::Ip6, ObjectKind::Rule, "services", true));
        }
        all.add(change(Family::Ip6, ObjectKind::Chain, "other", false));
        all.add(change(Family::Ip6, ObjectKind::Elements, "slots-3", true));
        assert!(!all.is_attributed());
        let process = Some(Process { id: 17, name: "nft".to_owned() });
        let commit = |port, process| Commit { port, process, generation: None };
        all.commit(commit(8, Some(Process { id: 9, name: "other".to_owned() })));
        all.commit(commit(7, process));
        assert!(all.is_attributed());
        assert_eq!(
            all.to_string(),
            "ip steerage: deleted; ip6 steerage: chain other, 2 rules of services, 1 element of slots-3"
        );
        assert_eq!(all.authors(), "nft (process 17)");
        let kinds: Vec<_> =
            all.kinds().into_iter().map(|(table, kind)| (table.map(|table| table.family), kind)).collect();
        let expected = [
            (Some(Family::Ip), ChangeKind::Deleted),
            (Some(Family::Ip6), ChangeKind::Rules),
            (Some(Family::Ip6), ChangeKind::Elements),
        ];
        assert_eq!(kinds, expected);
        assert_eq!(all.damage().map(BTreeMap::len), Some(2));
        all.lose();
        assert_eq!(all.damage(), None);
    }

    #[test]
    fn only_rules_and_sets_of_ranges_admit_clients() {
        for (object, name, deleted, expected) in [
            (ObjectKind::Rule, "check-source", true, true),
            (ObjectKind::Elements, "restricted", true, true),
            (ObjectKind::Elements, "sources-24", false, true),
            (ObjectKind::Elements, "slots-3", true, false),
            (ObjectKind::Table, "", true, false),
        ] {
            let mut all = ForeignChange::default();
            all.add(change(Family::Ip, object, name, deleted));
            assert_eq!(all.may_admit(), expected, "{all}");
        }
    }

    #[test]
    fn dormant_table_and_changed_base_chains_are_named() {
        let mut all = ForeignChange::default();
        all.add(Change { is_dormant: true, ..change(Family::Ip, ObjectKind::Table, "", false) });
        assert_eq!(all.to_string(), "ip steerage: made dormant");
        assert_eq!(all.kinds().into_iter().map(|(_, kind)| kind).collect::<Vec<_>>(), [ChangeKind::Rules]);
        let base = |hook, drops| Some(BaseChainInfo { hook, priority: 7, kind: None, drops });
        for (name, hook, drops) in [("input", "input", true), ("output", "forward", false)] {
            all.add(Change {
                base: base(hook, drops),
                ..change(Family::Ip6, ObjectKind::Chain, name, false)
            });
        }
        all.add(change(Family::Ip6, ObjectKind::Rule, "output", true));
        assert_eq!(
            all.to_string(),
            "ip steerage: made dormant; ip6 steerage: chain input (now hook input, priority 7, policy drop), \
             1 rule of output (now hook forward, priority 7, policy accept)"
        );
        all.add(change(Family::Ip, ObjectKind::Table, "", false));
        assert!(all.to_string().starts_with("ip steerage: created; "), "active again: {all}");
    }

    #[test]
    fn unknown_change_names_nobody_and_long_lists_are_cut() {
        let unknown = ForeignChange::unknown();
        assert!(!unknown.is_empty() && unknown.is_attributed());
        assert_eq!(
            (unknown.to_string().as_str(), unknown.authors().as_str()),
            ("not all changes seen", "an unknown process")
        );
        assert_eq!(unknown.kinds().into_iter().collect::<Vec<_>>(), [(None, ChangeKind::Unknown)]);
        let mut many = ForeignChange::default();
        for number in 0..1000 {
            many.add(change(Family::Ip, ObjectKind::Chain, &format!("c{number:03}"), false));
        }
        assert_eq!(
            many.to_string(),
            "ip steerage: chain c000, chain c001, chain c002, chain c003 and 996 more"
        );
    }
}

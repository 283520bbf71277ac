// SPDX-License-Identifier: Apache-2.0
//! What another program may have changed in the agent's tables, as far as notifications say it. A repair reads no more. Pure.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Family;
use steerage_nft::{Change, ObjectKind};

use super::FAMILIES;
use crate::rules::{SetId, list_of_key};

/// With more elements of a set in doubt, the whole set is.
const MOST_KEYS: usize = 10_000;

/// What is in doubt in both tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Doubts {
    everything: bool,
    families: BTreeMap<Family, TableDoubts>,
}

/// What is in doubt in one table. Chains, rules and the names of sets are, if anything is: they are few.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableDoubts {
    sets: BTreeMap<String, SetDoubts>,
}

/// What is in doubt in one set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetDoubts {
    /// Elements with these keys.
    Keys(BTreeSet<Vec<u8>>),
    /// All elements.
    All,
}

impl Doubts {
    /// Everything is in doubt.
    pub fn everything() -> Self {
        Self { everything: true, families: BTreeMap::new() }
    }

    /// After another program's change of one of the agent's tables.
    pub fn after(change: Change) -> Self {
        let family = FAMILIES.into_iter().find(|(_, family)| *family == change.table.family);
        let mut doubts = Self::default();
        let (Some((family, _)), false) = (family, change.deleted && change.object == ObjectKind::Set) else {
            return Self::everything();
        };
        match (change.object, change.set) {
            (ObjectKind::Elements, Some(set)) => doubts.add(family, set, change.keys),
            (ObjectKind::Rule | ObjectKind::Chain | ObjectKind::Set, _) => {
                doubts.families.entry(family).or_default();
            }
            _ => return Self::everything(),
        }
        doubts
    }

    /// Adds elements of a set.
    pub fn add(&mut self, family: Family, set: String, keys: impl IntoIterator<Item = Vec<u8>>) {
        let none = || SetDoubts::Keys(BTreeSet::new());
        let doubts = self.families.entry(family).or_default().sets.entry(set).or_insert_with(none);
        doubts.merge(SetDoubts::Keys(keys.into_iter().collect()));
    }

    /// Adds what `other` doubts.
    pub fn merge(&mut self, other: Self) {
        self.everything |= other.everything;
        for (family, doubts) in other.families {
            let known = self.families.entry(family).or_default();
            for (set, doubts) in doubts.sets {
                known.sets.entry(set).or_insert_with(|| SetDoubts::Keys(BTreeSet::new())).merge(doubts);
            }
        }
    }

    /// Whether nothing is in doubt.
    pub fn is_empty(&self) -> bool {
        !self.everything && self.families.is_empty()
    }

    /// Whether everything is.
    pub fn is_everything(&self) -> bool {
        self.everything
    }

    /// What is in doubt of a family's table, if anything is.
    pub fn of(&self, family: Family) -> Option<&TableDoubts> {
        self.families.get(&family)
    }

    /// Whether elements of a long list are.
    pub fn has_list(&self, family: Family, list: u32) -> bool {
        match self.of(family).and_then(|doubts| doubts.of_set(&SetId::Endpoints.name())) {
            Some(SetDoubts::Keys(keys)) => keys.iter().any(|key| list_of_key(key) == Some(list)),
            Some(SetDoubts::All) => true,
            None => false,
        }
    }
}

impl TableDoubts {
    /// What is in doubt of a set, if anything is.
    pub fn of_set(&self, name: &str) -> Option<&SetDoubts> {
        self.sets.get(name)
    }
}

impl SetDoubts {
    fn merge(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::Keys(keys), Self::Keys(more)) => {
                keys.extend(more);
                if keys.len() > MOST_KEYS {
                    *self = Self::All;
                }
            }
            (known, _) => *known = Self::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_nft::Table;

    use super::*;

    fn change(object: ObjectKind, deleted: bool, set: Option<&str>, keys: &[u32]) -> Change {
        Change {
            port: 1,
            table: Table::new(steerage_nft::Family::Ip, "steerage"),
            object,
            deleted,
            set: set.map(str::to_owned),
            keys: keys.iter().map(|key| key.to_ne_bytes().to_vec()).collect(),
        }
    }

    #[test]
    fn only_what_was_changed_is_in_doubt() {
        let mut doubts = Doubts::default();
        assert!(doubts.is_empty());
        for object in [ObjectKind::Rule, ObjectKind::Chain, ObjectKind::Set] {
            doubts.merge(Doubts::after(change(object, false, None, &[])));
        }
        assert!(!doubts.is_empty() && doubts.of(Family::V4).is_some() && doubts.of(Family::V6).is_none());
        for keys in [&[1, 2][..], &[2, 3]] {
            doubts.merge(Doubts::after(change(ObjectKind::Elements, true, Some("endpoints"), keys)));
        }
        let has_list = |list| doubts.has_list(Family::V4, list);
        assert_eq!([0, 1, 2, 3, 4].map(has_list), [false, true, true, true, false]);
        let set = |name: &str| doubts.of(Family::V4).and_then(|doubts| doubts.of_set(name));
        assert!(matches!(set("endpoints"), Some(SetDoubts::Keys(keys)) if keys.len() == 3));
        assert_eq!(set("slots-1"), None);
    }

    #[test]
    fn many_elements_are_the_whole_set() {
        let keys: Vec<u32> = (0..20_000).collect();
        let mut doubts = Doubts::default();
        for part in keys.chunks(100) {
            doubts.merge(Doubts::after(change(ObjectKind::Elements, true, Some("endpoints"), part)));
        }
        let set = doubts.of(Family::V4).and_then(|doubts| doubts.of_set("endpoints"));
        assert_eq!(set, Some(&SetDoubts::All));
    }

    #[test]
    fn deleted_sets_and_unknown_changes_put_everything_in_doubt() {
        for change in [
            change(ObjectKind::Set, true, None, &[]),
            change(ObjectKind::Table, true, None, &[]),
            change(ObjectKind::Table, false, None, &[]),
            change(ObjectKind::Other, false, None, &[]),
        ] {
            let mut doubts = Doubts::default();
            doubts.merge(Doubts::after(change.clone()));
            assert!(doubts.is_everything(), "{change:?}");
        }
    }
}

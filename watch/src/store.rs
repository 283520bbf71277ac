// SPDX-License-Identifier: Apache-2.0
//! One watched kind as a table that follows a watch: lists are swept in by generation, so that a relist costs no second copy.

use std::collections::BTreeMap;

use steerage_model::{EndpointSlice, Key, Node, Service, ServiceCidr};

/// What a table can hold.
pub trait Object: Eq {
    /// Its key.
    type Key: Ord + Clone;

    /// The key of this object.
    fn key(&self) -> Self::Key;
}

/// What a watch says. A list arrives as `Init`, any number of `InitApply` and `InitDone`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<T: Object> {
    /// A list begins. What it does not bring again is gone at its end.
    Init,
    /// An object of the list.
    InitApply(T),
    /// The list is complete.
    InitDone,
    /// An object was added or changed.
    Apply(T),
    /// An object is gone.
    Delete(T::Key),
}

/// The objects of one kind, as far as the watch has told.
#[derive(Clone, Debug)]
pub struct Store<T: Object> {
    /// Boxed: a tree that is filled in order has nearly half of its places empty.
    rows: BTreeMap<T::Key, Box<Row<T>>>,
    generation: u64,
    listed: bool,
}

#[derive(Clone, Debug)]
struct Row<T> {
    object: T,
    /// The list that last brought the object.
    generation: u64,
}

impl<T: Object> Default for Store<T> {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), generation: 0, listed: false }
    }
}

impl<T: Object> Store<T> {
    /// Takes an event in. `changed` is called with the old and the new object for each one that differs.
    pub fn apply(&mut self, event: Event<T>, mut changed: impl FnMut(Option<&T>, Option<&T>)) {
        match event {
            Event::Init => self.generation += 1,
            Event::InitApply(object) | Event::Apply(object) => {
                let key = object.key();
                let old = self.rows.get(&key).map(|row| &row.object);
                if old != Some(&object) {
                    changed(old, Some(&object));
                }
                self.rows.insert(key, Box::new(Row { object, generation: self.generation }));
            }
            Event::Delete(key) => {
                if let Some(row) = self.rows.remove(&key) {
                    changed(Some(&row.object), None);
                }
            }
            Event::InitDone => {
                let generation = self.generation;
                self.rows.retain(|_, row| {
                    let kept = row.generation == generation;
                    if !kept {
                        changed(Some(&row.object), None);
                    }
                    kept
                });
                self.listed = true;
            }
        }
    }

    /// Whether a first list is complete. It stays true: a later relist leaves the old objects in place until its end.
    pub fn has_synced(&self) -> bool {
        self.listed
    }

    /// One object.
    pub fn get(&self, key: &T::Key) -> Option<&T> {
        self.rows.get(key).map(|row| &row.object)
    }

    /// All objects, by key.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.rows.values().map(|row| &row.object)
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl Object for Service {
    type Key = Key;

    fn key(&self) -> Key {
        self.key.clone()
    }
}

impl Object for EndpointSlice {
    type Key = Key;

    fn key(&self) -> Key {
        self.key.clone()
    }
}

impl Object for Node {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

impl Object for ServiceCidr {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

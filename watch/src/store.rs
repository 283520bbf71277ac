// SPDX-License-Identifier: Apache-2.0
//! The store of one kind, kept current by the events of a watch. A relist is mark and sweep: it needs no second copy.

use std::collections::BTreeMap;

use steerage_model::{EndpointSlice, Key, Node, Service, ServiceCidr};

/// An object of a store.
pub trait Object: Eq {
    /// Its key.
    type Key: Ord + Clone;

    /// The key.
    fn key(&self) -> Self::Key;
}

/// A watch event. A list is `Init`, any number of `InitApply`, and `InitDone`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<T: Object> {
    /// A list starts. Objects that it does not contain are deleted at its end.
    Init,
    /// An object of the list.
    InitApply(T),
    /// The list is complete.
    InitDone,
    /// An object was added or changed.
    Apply(T),
    /// An object was deleted.
    Delete(T::Key),
}

/// The objects of one kind.
#[derive(Clone, Debug)]
pub struct Store<T: Object> {
    /// Boxed: a B-tree that is filled in order is nearly half empty.
    rows: BTreeMap<T::Key, Box<Row<T>>>,
    generation: u64,
    listed: bool,
}

#[derive(Clone, Debug)]
struct Row<T> {
    object: T,
    /// The list that last contained the object.
    generation: u64,
}

impl<T: Object> Default for Store<T> {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), generation: 0, listed: false }
    }
}

impl<T: Object> Store<T> {
    /// Applies an event. `changed` is called with the old and the new object of every difference.
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

    /// Whether a first list is complete. It stays true: a relist keeps the old objects until its end.
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

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether the store is empty.
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

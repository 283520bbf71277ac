// SPDX-License-Identifier: Apache-2.0
//! The store of one kind, kept current by the events of a watch. A relist is mark and sweep: it needs no second copy.

use std::collections::BTreeMap;

use steerage_model::{EndpointSlice, Key, Node, Pod, Service, ServiceCidr};

/// An object of a store.
pub trait Object: Eq {
    /// Its key.
    type Key: Ord + Clone;

    /// The key.
    fn key(&self) -> Self::Key;

    /// The resource version, for a store that also takes objects from elsewhere than its watch, such as the responses to writes.
    /// An older version then never replaces or deletes a newer one, except in a list: what a list contains is newer than all that
    /// was stored before it. The store trusts the order of the events without versions, and where they are not decimal numbers.
    fn version(&self) -> Option<&str> {
        None
    }
}

/// A watch event. A list is `Init`, any number of `InitApply`, and `InitDone`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<T: Object> {
    /// A list starts. Objects that it does not contain are deleted at its end.
    Init,
    /// An object of the list.
    InitApply(T),
    /// The list contains this object, but it is unreadable: its last readable form stays.
    InitKeep(T::Key),
    /// The list is complete.
    InitDone,
    /// An object was added or changed.
    Apply(T),
    /// An object was deleted.
    Delete {
        /// Its key.
        key: T::Key,
        /// The resource version of the deletion.
        version: String,
    },
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
        let is_list = matches!(event, Event::InitApply(_));
        match event {
            Event::Init => self.generation += 1,
            Event::InitApply(object) | Event::Apply(object) => {
                let generation = self.generation;
                let Some(row) = self.rows.get_mut(&object.key()) else {
                    changed(None, Some(&object));
                    self.rows.insert(object.key(), Box::new(Row { object, generation }));
                    return;
                };
                // After a restore of etcd, a list has older versions than the store: only what was written during the list is newer.
                let is_late = (!is_list || row.generation == generation) && is_late(&object, &row.object);
                if is_list || !is_late {
                    row.generation = generation;
                }
                if row.object != object && !is_late {
                    changed(Some(&row.object), Some(&object));
                    row.object = object;
                }
            }
            Event::InitKeep(key) => {
                if let Some(row) = self.rows.get_mut(&key) {
                    row.generation = self.generation;
                }
            }
            Event::Delete { key, version } => {
                let known = self.rows.get(&key).and_then(|row| row.object.version());
                if known.is_some_and(|known| is_older(&version, known)) {
                    return;
                }
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

    /// The objects from the key `first` on, by key.
    pub fn iter_from<'a>(&'a self, first: &T::Key) -> impl Iterator<Item = &'a T> + use<'a, T> {
        self.rows.range(first..).map(|(_, row)| &row.object)
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

/// Whether a newer version than `new` is known already.
fn is_late<T: Object>(new: &T, known: &T) -> bool {
    new.version().zip(known.version()).is_some_and(|(new, known)| is_older(new, known))
}

/// Whether a resource version precedes another one; `false` unless both are decimal numbers (KEP-5504).
pub fn is_older(version: &str, than: &str) -> bool {
    let number = |text: &str| text.parse::<u128>().ok();
    number(version).zip(number(than)).is_some_and(|(version, than)| version < than)
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

impl Object for Pod {
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

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! Changed Services that wait to be planned. One of each namespace in turn: who changes very many Services at once delays only those of
//! the same namespace. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use steerage_model::Key;

/// The Services that wait.
#[derive(Debug, Default)]
pub(super) struct Turns {
    namespaces: BTreeMap<String, Waiting>,
    /// The namespaces, that whose turn is next first.
    order: VecDeque<String>,
}

#[derive(Debug, Default)]
struct Waiting {
    services: BTreeSet<Key>,
    /// The one that was taken last. Those behind it come first, also before one that has changed again.
    last: Option<Key>,
}

impl Waiting {
    fn take(&mut self) -> Option<Key> {
        let behind = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.services.range((behind, Bound::Unbounded)).next();
        let next = next.or_else(|| self.services.first())?.clone();
        self.services.remove(&next);
        self.last = Some(next.clone());
        Some(next)
    }
}

impl Turns {
    /// Adds Services. One that waits already keeps its place.
    pub(super) fn extend(&mut self, services: impl IntoIterator<Item = Key>) {
        for service in services {
            let namespace = service.namespace();
            if !self.namespaces.contains_key(namespace) {
                self.order.push_back(namespace.to_owned());
                self.namespaces.insert(namespace.to_owned(), Waiting::default());
            }
            if let Some(waiting) = self.namespaces.get_mut(namespace) {
                waiting.services.insert(service);
            }
        }
    }

    /// Takes the next one.
    pub(super) fn next(&mut self) -> Option<Key> {
        let namespace = self.order.pop_front()?;
        let waiting = self.namespaces.get_mut(&namespace)?;
        let next = waiting.take();
        if waiting.services.is_empty() {
            self.namespaces.remove(&namespace);
        } else {
            self.order.push_back(namespace);
        }
        next
    }

    /// Takes one out of its turn, if it waits.
    pub(super) fn remove(&mut self, service: &Key) {
        let Some(waiting) = self.namespaces.get_mut(service.namespace()) else { return };
        waiting.services.remove(service);
        if waiting.services.is_empty() {
            self.namespaces.remove(service.namespace());
            self.order.retain(|namespace| namespace != service.namespace());
        }
    }

    /// All that wait.
    pub(super) fn all(&self) -> impl Iterator<Item = &Key> {
        self.namespaces.values().flat_map(|waiting| &waiting.services)
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether Services of this namespace wait.
    pub(super) fn has(&self, namespace: &str) -> bool {
        self.namespaces.contains_key(namespace)
    }

    /// Whether this Service waits.
    pub(super) fn contains(&self, service: &Key) -> bool {
        self.namespaces.get(service.namespace()).is_some_and(|waiting| waiting.services.contains(service))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(all: &[(&str, &str)]) -> Vec<Key> {
        all.iter().map(|(namespace, name)| Key::new(*namespace, *name)).collect()
    }

    #[test]
    fn namespaces_take_turns() {
        let mut turns = Turns::default();
        turns.extend(keys(&[("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("c", "1"), ("c", "2")]));
        let first: Vec<_> = (0..2).filter_map(|_| turns.next()).collect();
        assert_eq!(first, keys(&[("a", "1"), ("b", "1")]));
        assert!(turns.has("a") && !turns.has("b"));
        // Changed again, and a new namespace.
        turns.extend(keys(&[("a", "1"), ("d", "1")]));
        let rest: Vec<_> = std::iter::from_fn(|| turns.next()).collect();
        assert_eq!(rest, keys(&[("c", "1"), ("a", "2"), ("d", "1"), ("c", "2"), ("a", "3"), ("a", "1")]));
        assert!(turns.is_empty() && !turns.contains(&Key::new("a", "1")));
    }

    #[test]
    fn what_is_removed_has_no_turn() {
        let mut turns = Turns::default();
        turns.extend(keys(&[("a", "1"), ("b", "1"), ("b", "2")]));
        for (namespace, name) in [("a", "1"), ("b", "1"), ("b", "none"), ("c", "1")] {
            turns.remove(&Key::new(namespace, name));
        }
        assert!(!turns.has("a") && turns.has("b"));
        let rest: Vec<_> = std::iter::from_fn(|| turns.next()).collect();
        assert_eq!(rest, keys(&[("b", "2")]));
    }
}

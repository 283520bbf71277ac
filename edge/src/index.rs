// SPDX-License-Identifier: Apache-2.0
//! The load balancers and node sets that the API holds. Pure: `source` feeds it, `plan` reads it.
//!
//! An object that this version cannot read keeps its last readable form, also across a relist: a newer controller must not
//! take traffic away from an older edge.

use steerage_edge_api::{EdgeLoadBalancerSpec, EdgeTarget};
use steerage_watch::{Event, Object, Store};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadBalancer {
    pub(crate) name: String,
    /// For owner references.
    pub(crate) uid: String,
    pub(crate) generation: i64,
    pub(crate) spec: EdgeLoadBalancerSpec,
}

impl Object for LoadBalancer {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeSet {
    pub(crate) name: String,
    pub(crate) targets: Vec<EdgeTarget>,
}

impl Object for NodeSet {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

/// An object as its source delivers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Delivered<T> {
    pub(crate) name: String,
    /// `None` where this version cannot read the object.
    pub(crate) readable: Option<T>,
}

impl<T: Eq> Object for Delivered<T> {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

#[allow(clippy::large_enum_variant, reason = "events are few, and moved rather than kept")]
#[derive(Clone, Debug)]
pub(crate) enum IndexEvent {
    LoadBalancer(Event<Delivered<LoadBalancer>>),
    NodeSet(Event<Delivered<NodeSet>>),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    load_balancers: Store<LoadBalancer>,
    node_sets: Store<NodeSet>,
}

impl Index {
    /// Whether both kinds have been listed once.
    pub(crate) fn has_synced(&self) -> bool {
        self.load_balancers.has_synced() && self.node_sets.has_synced()
    }

    pub(crate) fn apply(&mut self, event: IndexEvent) {
        match event {
            IndexEvent::LoadBalancer(event) => apply(&mut self.load_balancers, event),
            IndexEvent::NodeSet(event) => apply(&mut self.node_sets, event),
        }
    }

    /// All load balancers, by name.
    pub(crate) fn load_balancers(&self) -> impl Iterator<Item = &LoadBalancer> {
        self.load_balancers.iter()
    }

    pub(crate) fn node_set(&self, name: &str) -> Option<&NodeSet> {
        self.node_sets.get(&name.to_owned())
    }
}

fn apply<T: Object<Key = String> + Clone>(store: &mut Store<T>, event: Event<Delivered<T>>) {
    let last_readable =
        |delivered: Delivered<T>| delivered.readable.or_else(|| store.get(&delivered.name).cloned());
    let event = match event {
        Event::Init => Some(Event::Init),
        Event::InitApply(delivered) => last_readable(delivered).map(Event::InitApply),
        Event::InitDone => Some(Event::InitDone),
        Event::Apply(delivered) => last_readable(delivered).map(Event::Apply),
        Event::Delete { key, version } => Some(Event::Delete { key, version }),
    };
    if let Some(event) = event {
        store.apply(event, |_, _| {});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node_set(name: &str, readable: bool) -> Delivered<NodeSet> {
        let set = NodeSet { name: name.to_owned(), targets: Vec::new() };
        Delivered { name: name.to_owned(), readable: readable.then_some(set) }
    }

    fn index(events: Vec<Event<Delivered<NodeSet>>>) -> Index {
        let mut index = Index::default();
        for event in events {
            index.apply(IndexEvent::NodeSet(event));
        }
        index
    }

    #[test]
    fn unreadable_object_keeps_its_last_readable_form_across_a_relist() {
        let list = |readable| [Event::Init, Event::InitApply(node_set("a", readable)), Event::InitDone];
        let index = index([list(true), list(false)].concat());
        assert!(index.node_set("a").is_some());
    }

    #[test]
    fn object_that_was_never_readable_is_unknown_and_a_missing_one_is_removed() {
        let index = index(vec![
            Event::Apply(node_set("a", true)),
            Event::Init,
            Event::InitApply(node_set("b", false)),
            Event::InitDone,
        ]);
        assert!(index.node_set("a").is_none() && index.node_set("b").is_none());
    }

    #[test]
    fn index_has_synced_once_both_kinds_are_listed() {
        let mut index = index(vec![Event::Init, Event::InitDone]);
        assert!(!index.has_synced());
        index.apply(IndexEvent::LoadBalancer(Event::Init));
        index.apply(IndexEvent::LoadBalancer(Event::InitDone));
        assert!(index.has_synced());
    }
}

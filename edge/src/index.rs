// SPDX-License-Identifier: Apache-2.0
//! The load balancers and node sets that the API holds. Pure: `source` feeds it, `plan` reads it.
//!
//! An object that this version cannot read keeps its last readable form, also across a relist: a newer controller must not
//! take traffic away from an older edge.

use std::sync::Arc;

use steerage_edge_api::{EdgeLoadBalancerSpec, EdgeNodeSetSpec};
use steerage_watch::{Event, Object, Store};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadBalancer {
    pub(crate) name: String,
    /// For owner references.
    pub(crate) uid: String,
    pub(crate) generation: i64,
    /// When it was created, in seconds since 1970; zero if that is not known.
    pub(crate) created: i64,
    pub(crate) spec: Arc<EdgeLoadBalancerSpec>,
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
    /// For owner references.
    pub(crate) uid: Arc<str>,
    pub(crate) spec: Arc<EdgeNodeSetSpec>,
}

impl Object for NodeSet {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }
}

#[allow(clippy::large_enum_variant, reason = "events are few, and moved rather than kept")]
#[derive(Clone, Debug)]
pub(crate) enum IndexEvent {
    LoadBalancer(Event<LoadBalancer>),
    NodeSet(Event<NodeSet>),
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
            IndexEvent::LoadBalancer(event) => self.load_balancers.apply(event, |_, _| {}),
            IndexEvent::NodeSet(event) => self.node_sets.apply(event, |_, _| {}),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn node_set(name: &str) -> NodeSet {
        NodeSet { name: name.to_owned(), uid: "".into(), spec: Arc::default() }
    }

    fn index(events: Vec<Event<NodeSet>>) -> Index {
        let mut index = Index::default();
        for event in events {
            index.apply(IndexEvent::NodeSet(event));
        }
        index
    }

    #[test]
    fn unreadable_object_keeps_its_last_readable_form_across_a_relist() {
        let list = |event| [Event::Init, event, Event::InitDone];
        let index =
            index([list(Event::InitApply(node_set("a"))), list(Event::InitKeep("a".to_owned()))].concat());
        assert!(index.node_set("a").is_some());
    }

    #[test]
    fn object_that_was_never_readable_is_unknown_and_a_missing_one_is_removed() {
        let index = index(vec![
            Event::Apply(node_set("a")),
            Event::Init,
            Event::InitKeep("b".to_owned()),
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

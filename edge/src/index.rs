// SPDX-License-Identifier: Apache-2.0
//! The load balancers and node sets that the API holds. Pure: `source` feeds it, `plan` reads it.
//!
//! An object that this version cannot read keeps its last readable form, also across a relist: a newer controller must not
//! take traffic away from an older edge.

use std::collections::BTreeSet;
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
    /// Without `endpointNodes`. The same value in memory while nothing in it changes.
    pub(crate) spec: Arc<EdgeLoadBalancerSpec>,
    /// The nodes that have an endpoint by `EndpointSlices`, sorted, each once; `None` unless the steering is `fused`.
    pub(crate) endpoint_nodes: Option<Arc<[String]>>,
}

impl LoadBalancer {
    /// Whether nothing differs but which nodes have an endpoint, and the generation, which changes with it.
    fn differs_only_in_endpoints(&self, other: &Self) -> bool {
        let Self { name, uid, generation: _, created, spec, endpoint_nodes } = self;
        endpoint_nodes.is_some() == other.endpoint_nodes.is_some()
            && (name, uid, created, spec) == (&other.name, &other.uid, &other.created, &other.spec)
    }
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

/// What events have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct IndexChange {
    /// The names of load balancers of which only the nodes with an endpoint have changed.
    pub(crate) endpoints: BTreeSet<String>,
    /// The names of load balancers that are new, gone, or others than before.
    pub(crate) load_balancers: BTreeSet<String>,
    /// Whether anything else has.
    pub(crate) is_more: bool,
}

impl IndexChange {
    /// Whether nothing but load balancers has changed.
    pub(crate) fn is_of_load_balancers(&self) -> bool {
        !self.is_more
    }

    /// Whether nothing but nodes with an endpoint has changed.
    #[cfg(test)]
    pub(crate) fn is_of_endpoints(&self) -> bool {
        !self.endpoints.is_empty() && self.load_balancers.is_empty() && !self.is_more
    }

    fn note(&mut self, old: Option<&LoadBalancer>, new: Option<&LoadBalancer>) {
        match (old, new) {
            (Some(old), Some(new)) if old.differs_only_in_endpoints(new) => {
                self.endpoints.insert(new.name.clone());
            }
            (old, new) => self.load_balancers.extend(new.or(old).map(|changed| changed.name.clone())),
        }
    }
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

    /// Applies an event, and adds to `change` what it has changed.
    pub(crate) fn apply(&mut self, event: IndexEvent, change: &mut IndexChange) {
        match event {
            IndexEvent::LoadBalancer(mut event) => {
                if let Event::InitApply(new) | Event::Apply(new) = &mut event
                    && let Some(old) = self.load_balancers.get(&new.name)
                    && old.spec == new.spec
                {
                    new.spec = Arc::clone(&old.spec);
                }
                self.load_balancers.apply(event, |old, new| change.note(old, new));
            }
            IndexEvent::NodeSet(event) => self.node_sets.apply(event, |_, _| change.is_more = true),
        }
    }

    /// All load balancers, by name.
    pub(crate) fn load_balancers(&self) -> impl Iterator<Item = &LoadBalancer> {
        self.load_balancers.iter()
    }

    pub(crate) fn load_balancer(&self, name: &str) -> Option<&LoadBalancer> {
        self.load_balancers.get(&name.to_owned())
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
            index.apply(IndexEvent::NodeSet(event), &mut IndexChange::default());
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
        for event in [Event::Init, Event::InitDone] {
            index.apply(IndexEvent::LoadBalancer(event), &mut IndexChange::default());
        }
        assert!(index.has_synced());
    }

    #[test]
    fn changed_endpoints_are_told_from_other_changes() {
        let with = |edit: fn(&mut LoadBalancer, &mut EdgeLoadBalancerSpec)| {
            let mut spec: EdgeLoadBalancerSpec = serde_json::from_value(serde_json::json!({
                "service": {"namespace": "default", "name": "web", "uid": "s"}, "addresses": [], "listeners": [],
                "healthCheck": {"protocol": "HTTP", "port": 1, "intervalMilliseconds": 1000, "timeoutMilliseconds": 1000,
                    "healthyThreshold": 1, "unhealthyThreshold": 2},
            }))
            .expect("a specification");
            let mut object = LoadBalancer {
                name: "lb".to_owned(),
                uid: "u".to_owned(),
                generation: 1,
                created: 0,
                spec: Arc::new(spec.clone()),
                endpoint_nodes: Some(["a".to_owned()].into()),
            };
            edit(&mut object, &mut spec);
            object.spec = Arc::new(spec);
            object
        };
        let mut index = Index::default();
        let mut change_by = |object: LoadBalancer| {
            let mut change = IndexChange::default();
            index.apply(IndexEvent::LoadBalancer(Event::Apply(object)), &mut change);
            (change, Arc::as_ptr(&index.load_balancer("lb").expect("a load balancer").spec))
        };
        let (first, spec) = change_by(with(|_, _| {}));
        assert_eq!(first.load_balancers, ["lb".to_owned()].into());
        assert_eq!(change_by(with(|_, _| {})), (IndexChange::default(), spec), "no change");
        let (moved, same) = change_by(with(|object, _| {
            (object.generation, object.endpoint_nodes) = (2, Some(["b".to_owned()].into()));
        }));
        assert!(moved.is_of_endpoints() && moved.endpoints.contains("lb"));
        assert_eq!(same, spec, "the same value in memory");
        for edit in [
            (|object, _| object.endpoint_nodes = None) as fn(&mut LoadBalancer, &mut EdgeLoadBalancerSpec),
            |object, _| object.uid = "v".to_owned(),
            |object, spec| {
                object.endpoint_nodes = Some(["c".to_owned()].into());
                spec.slow_start_milliseconds = Some(1);
            },
        ] {
            let (change, _) = change_by(with(edit));
            assert!(change.load_balancers.contains("lb") && !change.is_of_endpoints());
            assert!(change.is_of_load_balancers());
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The index depends on the final state, not on the order of events.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use steerage_model::{Endpoint, Family, Pod, PodRef};

fn service(name: &str, variant: u8) -> Service {
    Service { uid: variant.to_string(), ..Service::new(Key::new("ns", name)) }
}

fn slice(name: &str, service: &str, variant: u8) -> EndpointSlice {
    EndpointSlice {
        endpoints: vec![Endpoint::ready(IpAddr::from([10, 0, 0, variant]), "a")],
        ..EndpointSlice::new(Key::new("ns", name), Key::new("ns", service), Family::V4)
    }
}

#[test]
fn slice_that_moves_to_another_service_dirties_both() {
    let mut index = Index::default();
    index.apply_slice(Event::Apply(slice("s", "one", 1)));
    index.take_dirty();
    index.apply_slice(Event::Apply(slice("s", "two", 1)));
    let dirty = index.take_dirty();
    assert_eq!(dirty.services, BTreeSet::from([Key::new("ns", "one"), Key::new("ns", "two")]));
    assert_eq!(index.slices(&Key::new("ns", "one")).count(), 0);
    assert_eq!(index.slices(&Key::new("ns", "two")).count(), 1);
}

#[test]
fn relist_deletes_missing_objects_at_its_end() {
    let mut index = Index::default();
    index.apply_service(Event::Apply(service("old", 1)));
    index.apply_service(Event::Init);
    index.apply_service(Event::InitApply(service("new", 1)));
    assert!(index.service(&Key::new("ns", "old")).is_some());
    index.take_dirty();
    index.apply_service(Event::InitDone);
    assert!(index.service(&Key::new("ns", "old")).is_none());
    assert_eq!(index.take_dirty().services, BTreeSet::from([Key::new("ns", "old")]));
}

#[test]
fn equal_object_dirties_nothing() {
    let mut index = Index::default();
    let node = Node { name: "a".into(), ..Node::default() };
    index.apply_node(Event::Apply(node.clone()));
    index.take_dirty();
    index.apply_node(Event::Apply(node));
    assert!(index.take_dirty().is_empty());
}

#[test]
fn index_is_synced_when_all_three_kinds_are_listed() {
    let mut index = Index::default();
    index.apply_service(Event::InitDone);
    index.apply_slice(Event::InitDone);
    assert!(!index.has_synced());
    index.apply_node(Event::InitDone);
    assert!(index.has_synced());
}

#[derive(Clone, Debug)]
enum Step {
    Service(u8, u8),
    DeleteService(u8),
    Slice(u8, u8, u8),
    DeleteSlice(u8),
    RelistSlices,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..4u8, 0..3u8).prop_map(|(s, v)| Step::Service(s, v)),
        (0..4u8).prop_map(Step::DeleteService),
        (0..6u8, 0..4u8, 0..3u8).prop_map(|(s, o, v)| Step::Slice(s, o, v)),
        (0..6u8).prop_map(Step::DeleteSlice),
        Just(Step::RelistSlices),
    ]
}

/// All observable state of the index.
fn view(index: &Index) -> Vec<(Key, Option<Service>, Vec<EndpointSlice>)> {
    (0..4)
        .map(|s| Key::new("ns", format!("svc{s}")))
        .map(|k| (k.clone(), index.service(&k).cloned(), index.slices(&k).cloned().collect()))
        .collect()
}

proptest! {
    #[test]
    fn any_history_gives_the_index_of_its_final_state(steps in prop::collection::vec(step(), 0..60)) {
        let mut index = Index::default();
        let mut before = view(&index);
        let (mut services, mut slices) = (BTreeMap::new(), BTreeMap::new());
        for step in steps {
            match step {
                Step::Service(s, v) => {
                    let one = service(&format!("svc{s}"), v);
                    services.insert(one.key.clone(), one.clone());
                    index.apply_service(Event::Apply(one));
                }
                Step::DeleteService(s) => {
                    let key = Key::new("ns", format!("svc{s}"));
                    services.remove(&key);
                    index.apply_service(Event::Delete { key, version: String::new() });
                }
                Step::Slice(s, owner, v) => {
                    let one = slice(&format!("slice{s}"), &format!("svc{owner}"), v);
                    slices.insert(one.key.clone(), one.clone());
                    index.apply_slice(Event::Apply(one));
                }
                Step::DeleteSlice(s) => {
                    let key = Key::new("ns", format!("slice{s}"));
                    slices.remove(&key);
                    index.apply_slice(Event::Delete { key, version: String::new() });
                }
                Step::RelistSlices => {
                    index.apply_slice(Event::Init);
                    // An interrupted list starts again.
                    if let Some(one) = slices.values().next() {
                        index.apply_slice(Event::InitApply(EndpointSlice::clone(one)));
                    }
                    index.apply_slice(Event::Init);
                    for one in slices.values() {
                        index.apply_slice(Event::InitApply(EndpointSlice::clone(one)));
                    }
                    index.apply_slice(Event::InitDone);
                }
            }
            // All changes are dirty, and nothing else.
            let after = view(&index);
            let changed: BTreeSet<_> =
                before.iter().zip(&after).filter(|(b, a)| b != a).map(|(b, _)| b.0.clone()).collect();
            prop_assert_eq!(index.take_dirty().services, changed);
            before = after;
        }
        let mut fresh = Index::default();
        for s in services.into_values() {
            fresh.apply_service(Event::Apply(s));
        }
        for s in slices.into_values() {
            fresh.apply_slice(Event::Apply(s));
        }
        prop_assert_eq!(view(&index), view(&fresh));
    }
}

/// A slice of this Service with an endpoint of a pod that is not ready.
fn of_pod(name: &str, key: &Key, uid: &str) -> EndpointSlice {
    let pod = PodRef { name: "web-1".into(), uid: uid.into() };
    let mut slice = slice(name, key.name(), 1);
    (slice.key, slice.service) = (Key::new(key.namespace(), name), key.clone());
    slice.endpoints[0].unready_pod = Some(Box::new(pod));
    slice
}

#[test]
fn changed_pod_dirties_the_services_that_have_it_as_an_unready_endpoint() {
    let mut index = Index::default();
    let pod = |uid: &str| Pod {
        key: Key::new("ns", "web-1"),
        uid: uid.into(),
        addresses: vec![[10, 0, 0, 1].into()],
        can_serve: true,
        gate: None,
    };
    let [one, two, elsewhere] = [("ns", "one"), ("ns", "two"), ("other", "one")].map(|(n, s)| Key::new(n, s));
    for (name, key) in [("a", &one), ("b", &two), ("c", &elsewhere)] {
        index.apply_slice(Event::Apply(of_pod(name, key, "u")));
    }
    index.apply_slice(Event::Apply(slice("d", "ready", 1)));
    index.take_dirty();
    for event in
        [Event::Apply(pod("u")), Event::Delete { key: Key::new("ns", "web-1"), version: String::new() }]
    {
        index.apply_pod(event);
        assert_eq!(index.take_dirty().services, BTreeSet::from([one.clone(), two.clone()]));
    }
    index.apply_pod(Event::Apply(pod("u")));
    index.take_dirty();
    index.apply_pod(Event::Apply(pod("u")));
    assert!(index.take_dirty().is_empty(), "an equal pod");
    let endpoint = of_pod("a", &one, "u").endpoints.remove(0);
    assert_eq!(index.pod_behind(&one, &endpoint), Some(&pod("u")));
    assert_eq!(index.pod_behind(&elsewhere, &endpoint), None, "a pod of another namespace");
    index.apply_pod(Event::Apply(pod("new")));
    assert_eq!(index.pod_behind(&one, &endpoint), None, "another pod of the same name");
}

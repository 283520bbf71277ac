// SPDX-License-Identifier: Apache-2.0
//! The store of a program that also writes the objects: it takes the responses to its writes before the watch delivers them.

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Versioned(&'static str, &'static str);

impl Object for Versioned {
    type Key = &'static str;

    fn key(&self) -> &'static str {
        self.0
    }

    fn version(&self) -> Option<&str> {
        Some(self.1)
    }
}

fn apply(store: &mut Store<Versioned>, event: Event<Versioned>) -> Vec<[Option<Versioned>; 2]> {
    let mut changes = Vec::new();
    store.apply(event, |old, new| changes.push([old.cloned(), new.cloned()]));
    changes
}

fn delete(key: &'static str, version: &str) -> Event<Versioned> {
    Event::Delete { key, version: version.to_owned() }
}

fn rows(store: &Store<Versioned>) -> Vec<Versioned> {
    store.iter().cloned().collect()
}

#[test]
fn write_is_read_at_once_and_its_echo_changes_nothing() {
    let mut store = Store::default();
    assert_eq!(
        apply(&mut store, Event::Apply(Versioned("a", "10"))),
        [[None, Some(Versioned("a", "10"))]],
        "the response to a write"
    );
    assert_eq!(store.get(&"a"), Some(&Versioned("a", "10")));
    assert!(apply(&mut store, Event::Apply(Versioned("a", "10"))).is_empty(), "its echo");
    assert!(apply(&mut store, Event::Apply(Versioned("a", "9"))).is_empty(), "a late event");
    assert_eq!(rows(&store), [Versioned("a", "10")]);
    assert_eq!(apply(&mut store, Event::Apply(Versioned("a", "11"))).len(), 1);
}

#[test]
fn deletion_of_an_earlier_object_with_the_same_name_is_ignored() {
    let mut store = Store::default();
    apply(&mut store, Event::Apply(Versioned("a", "10")));
    assert!(apply(&mut store, delete("a", "9")).is_empty());
    assert_eq!(rows(&store), [Versioned("a", "10")]);
    assert_eq!(apply(&mut store, delete("a", "11")), [[Some(Versioned("a", "10")), None]]);
    assert!(store.is_empty());
}

#[test]
fn relist_keeps_what_was_written_during_it_and_removes_what_is_missing() {
    let mut store = Store::default();
    for key in ["gone", "kept", "newer"] {
        apply(&mut store, Event::Apply(Versioned(key, "10")));
    }
    apply(&mut store, Event::Init);
    apply(&mut store, Event::Apply(Versioned("newer", "21")));
    apply(&mut store, Event::Apply(Versioned("written", "22")));
    assert!(apply(&mut store, Event::InitApply(Versioned("kept", "10"))).is_empty());
    assert!(apply(&mut store, Event::InitApply(Versioned("newer", "10"))).is_empty());
    assert_eq!(apply(&mut store, Event::InitDone), [[Some(Versioned("gone", "10")), None]]);
    assert_eq!(rows(&store), [Versioned("kept", "10"), Versioned("newer", "21"), Versioned("written", "22")]);
}

/// After a restore of etcd the versions begin before those that are known.
#[test]
fn list_with_older_versions_replaces_what_was_stored_before_it() {
    let mut store = Store::default();
    apply(&mut store, Event::Apply(Versioned("a", "1200")));
    apply(&mut store, Event::Init);
    assert_eq!(apply(&mut store, Event::InitApply(Versioned("a", "900"))).len(), 1);
    assert!(apply(&mut store, Event::InitDone).is_empty());
    assert_eq!(apply(&mut store, Event::Apply(Versioned("a", "1001"))).len(), 1);
    assert_eq!(rows(&store), [Versioned("a", "1001")]);
}

#[test]
fn unreadable_object_of_a_list_keeps_its_last_readable_form() {
    let mut store = Store::default();
    apply(&mut store, Event::Apply(Versioned("known", "1")));
    for event in [Event::Init, Event::InitKeep("known"), Event::InitKeep("unknown"), Event::InitDone] {
        assert!(apply(&mut store, event).is_empty());
    }
    assert_eq!(rows(&store), [Versioned("known", "1")]);
}

#[test]
fn unordered_versions_follow_the_events() {
    let mut store = Store::default();
    for version in ["b", "a"] {
        apply(&mut store, Event::Apply(Versioned("x", version)));
        assert_eq!(rows(&store), [Versioned("x", version)]);
    }
    apply(&mut store, delete("x", "0"));
    assert!(store.is_empty());
}

#[test]
fn objects_are_read_from_a_key_on() {
    let mut store = Store::default();
    for key in ["a", "b.1", "b.2", "c"] {
        apply(&mut store, Event::Apply(Versioned(key, "1")));
    }
    let keys: Vec<_> = store.iter_from(&"b.").map(Versioned::key).collect();
    assert_eq!(keys, ["b.1", "b.2", "c"]);
}

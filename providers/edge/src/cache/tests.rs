// SPDX-License-Identifier: Apache-2.0
//! The cache between a watch that lags and the provider's own writes.

use futures::FutureExt as _;
use steerage_model::Key;
use steerage_provider_api::Owner;

use super::*;

impl References for u8 {}

fn entry(name: &str, version: &str) -> Entry<u8> {
    Entry {
        name: name.to_owned(),
        uid: String::new(),
        version: version.to_owned(),
        owner: None,
        managed: true,
        deleting: false,
        content: Ok(0),
    }
}

/// The first change by `event`.
fn put(cache: &Cache<u8>, event: Event<Entry<u8>>) -> Option<Change<u8>> {
    cache.apply(event).pop()
}

fn delete(name: &str, version: &str) -> Event<Entry<u8>> {
    Event::Delete { key: name.to_owned(), version: version.to_owned() }
}

fn names(cache: &Cache<u8>) -> Vec<String> {
    cache.read(|rows| rows.map(|entry| format!("{}@{}", entry.name, entry.version)).collect())
}

#[test]
fn older_versions_never_win() {
    let cache = Cache::default();
    assert!(put(&cache, Event::Apply(entry("a", "10"))).is_some());
    assert!(put(&cache, Event::Apply(entry("a", "9"))).is_none(), "a late event of the watch");
    assert!(put(&cache, Event::Apply(entry("a", "10"))).is_none(), "the watch's echo of our own write");
    assert!(put(&cache, delete("a", "9")).is_none(), "the deletion of an earlier object of that name");
    assert_eq!(names(&cache), ["a@10"]);
    assert!(put(&cache, delete("a", "11")).is_some());
    assert!(names(&cache).is_empty());
}

#[test]
fn list_deletes_missing_objects() {
    let cache = Cache::default();
    for name in ["a", "b"] {
        cache.apply(Event::Apply(entry(name, "1")));
    }
    cache.apply(Event::Init);
    cache.apply(Event::InitApply(entry("b", "1")));
    cache.apply(Event::InitApply(entry("c", "5")));
    assert!(cache.listed().now_or_never().is_none());
    let gone = cache.apply(Event::InitDone);
    let gone: Vec<_> = gone.into_iter().map(|change| change.old.map(|old| old.version)).collect();
    assert_eq!(gone, [Some("1".to_owned())]);
    assert_eq!(names(&cache), ["b@1", "c@5"]);
    assert!(cache.listed().now_or_never().is_some());
}

#[test]
fn write_during_a_relist_survives_it() {
    let cache = Cache::default();
    cache.apply(Event::Apply(entry("a", "1")));
    cache.apply(Event::Init);
    cache.apply(Event::Apply(entry("a", "7")));
    cache.apply(Event::Apply(entry("b", "8")));
    cache.apply(Event::InitApply(entry("a", "1")));
    assert!(cache.apply(Event::InitDone).is_empty());
    assert_eq!(names(&cache), ["a@7", "b@8"]);
}

#[test]
fn late_events_do_not_bring_back_what_the_provider_deleted() {
    let cache = Cache::default();
    let old = |version| Entry { uid: "old".to_owned(), ..entry("a", version) };
    cache.apply(Event::Apply(old("5")));
    cache.forget("a", "another");
    assert_eq!(names(&cache), ["a@5"]);
    cache.forget("a", "old");
    assert!(cache.apply(Event::Apply(old("4"))).is_empty() && cache.get("a").is_none(), "a late event");
    cache.apply(Event::Apply(Entry { uid: "new".to_owned(), ..entry("a", "8") }));
    assert!(cache.apply(delete("a", "7")).is_empty());
    assert_eq!(names(&cache), ["a@8"]);
    assert!(cache.lock().forgotten.is_empty());
}

/// An object is deleted, created again and deleted again, all by the provider, before the watch delivers any of it.
#[test]
fn deletion_of_an_earlier_object_does_not_end_the_memory_of_a_later_one() {
    let cache = Cache::default();
    let of = |uid: &str, version| Entry { uid: uid.to_owned(), ..entry("a", version) };
    cache.apply(Event::Apply(of("first", "5")));
    cache.forget("a", "first");
    cache.apply(Event::Apply(of("second", "8")));
    cache.forget("a", "second");
    assert!(cache.apply(Event::Apply(of("first", "6"))).is_empty(), "a late event of the first");
    assert!(cache.apply(delete("a", "7")).is_empty());
    assert!(
        cache.apply(Event::Apply(of("second", "8"))).is_empty() && cache.get("a").is_none(),
        "a late event"
    );
    cache.apply(delete("a", "9"));
    assert!(cache.lock().forgotten.is_empty());
}

#[test]
fn relist_ends_the_memory_of_deletions() {
    let cache = Cache::default();
    cache.apply(Event::Apply(entry("a", "1")));
    cache.forget("a", "");
    assert_eq!(cache.lock().forgotten.len(), 1);
    cache.apply(Event::Init);
    assert!(cache.lock().forgotten.is_empty());
}

#[test]
fn objects_are_read_by_prefix() {
    let cache = Cache::default();
    for name in ["lb-1", "lb-1.host-a", "lb-1.host-b", "lb-10.host-a", "lb-2.host-a"] {
        cache.apply(Event::Apply(entry(name, "1")));
    }
    let names =
        cache.read_prefix("lb-1.", |rows, _| rows.map(|entry| entry.name.clone()).collect::<Vec<_>>());
    assert_eq!(names, ["lb-1.host-a", "lb-1.host-b"]);
}

/// Of a Service that was deleted and created again, both are found, until their objects go.
#[test]
fn owners_are_found_by_service() {
    let cache = Cache::default();
    let owned = |name: &str, version: &str, uid: &str| Entry {
        owner: Some(Owner { service: Key::new("shop", "web"), uid: uid.to_owned() }),
        ..entry(name, version)
    };
    let uids = |cache: &Cache<u8>| {
        let mut uids: Vec<_> = cache
            .index(|index| index.owners_of(&Key::new("shop", "web")).iter().map(|o| o.uid.clone()).collect());
        uids.sort();
        uids.concat()
    };
    for (object, expected) in
        [(owned("a", "1", "u"), "u"), (owned("b", "2", "v"), "uv"), (owned("a", "3", "u"), "uv")]
    {
        cache.apply(Event::Apply(object));
        assert_eq!(uids(&cache), expected);
    }
    cache.apply(Event::Apply(owned("c", "4", "v")));
    cache.apply(delete("b", "5"));
    assert_eq!(uids(&cache), "uv", "another object names the same owner");
    cache.forget("a", "");
    cache.apply(Event::Apply(entry("c", "6")));
    assert_eq!(uids(&cache), "");
    assert!(cache.index(|index| index.owners_of(&Key::new("shop", "other")).is_empty()));
}

// SPDX-License-Identifier: Apache-2.0
//! Directories of files that change in all ways.

use super::notices::SLOW_INTERVAL;
use super::*;
use crate::index::{Index, IndexChange};

const SET: &str = r#"{"kind": "EdgeNodeSet", "apiVersion": "steerage.dev/v1alpha1", "metadata": {"name": "NAME"}, "spec": {"targets": []}}"#;

fn set(name: &str) -> String {
    SET.replace("NAME", name)
}

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("steerage-edge-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("directory");
        Self(path)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).expect("write");
    }

    fn remove(&self, name: &str) {
        std::fs::remove_file(self.0.join(name)).expect("remove");
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn unreadable_files_are_skipped_and_keep_what_they_contained() {
    let directory = Directory::new("unreadable");
    for (name, text) in [("a.json", set("all").as_str()), ("b.json", "{"), ("c.txt", &set("other"))] {
        directory.write(name, text);
    }
    let (mut index, mut files) = (Index::default(), Files::default());
    let mut read = async |look, now| {
        for event in files.look(&directory.0, look, now).expect("list") {
            index.apply(event, &mut IndexChange::default());
        }
        assert!(index.has_synced() && index.load_balancers().next().is_none());
        assert!(index.node_set("other").is_none());
        index.node_set("all").is_some()
    };
    let at = |name: &str| Look::At([directory.0.join(name)].into());
    let now = Instant::now();
    assert!(read(Look::at_all(), now).await);
    for _ in 0..2 {
        directory.write("a.json", &set("all")[..40]);
        assert!(read(Look::at_all(), now).await && read(at("a.json"), now).await, "half written");
    }
    directory.remove("a.json");
    assert!(read(Look::at_all(), now).await && !read(Look::at_all(), now + GONE_AFTER).await);
}

/// Many programs write a file so. Its load balancer must not lose its VIP meanwhile.
#[test]
fn deleted_file_keeps_its_object_for_a_moment() {
    let directory = Directory::new("moment");
    let at = |name: &str| Look::At([directory.0.join(name)].into());
    let mut files = Files::default();
    for name in ["a", "b"] {
        directory.write(&format!("{name}.json"), &set(name));
    }
    let begun = Instant::now();
    files.look(&directory.0, Look::at_all(), begun).expect("listed");
    let mut deleted = |look, milliseconds| {
        let now = begun + Duration::from_millis(milliseconds);
        let events = files.look(&directory.0, look, now).expect("looked at");
        let is_list = |event: &IndexEvent| matches!(event, IndexEvent::NodeSet(Event::Init));
        assert!(!events.iter().any(is_list), "no list is needed: {events:?}");
        let name = |event| match event {
            IndexEvent::NodeSet(Event::Delete { key, .. }) => Some(key),
            _ => None,
        };
        (events.into_iter().filter_map(name).collect::<Vec<_>>(), files.next_due().map(|due| due - begun))
    };
    let (none, at_190) = (Vec::<String>::new(), Some(Duration::from_millis(190)));
    directory.remove("a.json");
    assert_eq!(deleted(at("a.json"), 0), (none.clone(), Some(GONE_AFTER)));
    directory.write("a.json", &set("a")[..40]);
    assert_eq!(deleted(Look::at_all(), 80), (none.clone(), None), "half written");
    directory.remove("a.json");
    assert_eq!(deleted(at("a.json"), 90), (none.clone(), at_190));
    directory.remove("b.json");
    assert_eq!(deleted(at("b.json"), 150), (none.clone(), at_190));
    assert_eq!(deleted(Look::at_all(), 189), (none.clone(), at_190));
    let nothing = || Look::At(BTreeSet::new());
    assert_eq!(deleted(nothing(), 190), (vec!["a".to_owned()], Some(Duration::from_millis(250))));
    assert_eq!(deleted(nothing(), 250), (vec!["b".to_owned()], None));
    assert_eq!(deleted(Look::at_all(), 500), (none, None));
}

/// Of a renamed file the new one counts at once, and not the one that is missing.
#[test]
fn renamed_file_may_have_changed() {
    let directory = Directory::new("changed");
    directory.write("b.json", &set("one"));
    let mut files = Files::default();
    let now = Instant::now();
    files.look(&directory.0, Look::at_all(), now).expect("listed");
    let other = set("one").replace("[]", r#"[{"node": "x", "addresses": ["10.0.0.1"]}]"#);
    for names in [&["a.json"][..], &["b.json", "a.json"]] {
        directory.remove("b.json");
        let paths = |names: &[&str]| Look::At(names.iter().map(|name| directory.0.join(name)).collect());
        files.look(&directory.0, paths(&["b.json"]), now).expect("looked at");
        directory.write("a.json", &other);
        let events = files.look(&directory.0, paths(names), now).expect("looked at");
        let targets = |event: &IndexEvent| match event {
            IndexEvent::NodeSet(Event::Apply(set)) => Some(set.spec.targets.len()),
            _ => None,
        };
        assert_eq!(events.iter().map(targets).collect::<Vec<_>>(), [Some(1)], "{events:?}");
        assert_eq!(files.next_due(), None);
        // Back.
        std::fs::rename(directory.0.join("a.json"), directory.0.join("b.json")).expect("rename");
        files.look(&directory.0, Look::at_all(), now).expect("looked at");
    }
}

#[test]
fn object_follows_its_files() {
    let directory = Directory::new("follows");
    directory.write("a.json", &set("one"));
    let (mut index, mut files, mut now) = (Index::default(), Files::default(), Instant::now());
    let mut names = |paths: &[&str]| {
        let look = match paths {
            [] => Look::at_all(),
            paths => Look::At(paths.iter().map(|name| directory.0.join(name)).collect()),
        };
        now += GONE_AFTER;
        for event in files.look(&directory.0, look, now).expect("read") {
            index.apply(event, &mut IndexChange::default());
        }
        ["one", "two"].map(|name| index.node_set(name).is_some())
    };
    assert_eq!(names(&[]), [true, false]);
    directory.write("b.json", &set("one"));
    assert_eq!(names(&["b.json"]), [true, false], "in two files");
    directory.remove("a.json");
    assert_eq!(names(&["a.json"]), [true, false], "still in one");
    std::fs::rename(directory.0.join("b.json"), directory.0.join("c.json")).expect("rename");
    assert_eq!(names(&["b.json", "c.json"]), [true, false]);
    directory.write("c.json", &set("two"));
    assert_eq!(names(&["c.json"]), [false, true], "another object");
    directory.remove("c.json");
    assert_eq!(names(&["c.json"]), [false, true], "for a moment");
    assert_eq!(names(&["c.json"]), [false, false]);
}

/// Much sooner than all times are read.
#[tokio::test]
async fn kernel_says_which_file_has_changed() {
    let directory = Directory::new("notices");
    directory.write("a.json", &set("one"));
    let (events, mut received) = mpsc::channel(64);
    let shutdown = CancellationToken::new();
    let watch = tokio::spawn(watch_directory(directory.0.clone(), events, shutdown.clone()));
    let mut index = Index::default();
    let mut wait_for = async |one: bool, two: bool| {
        while [index.node_set("one").is_some(), index.node_set("two").is_some()] != [one, two]
            || !index.has_synced()
        {
            index.apply(received.recv().await.expect("an event"), &mut IndexChange::default());
        }
    };
    let all = async {
        wait_for(true, false).await;
        directory.write("b.new", &set("two"));
        std::fs::rename(directory.0.join("b.new"), directory.0.join("b.json")).expect("rename");
        wait_for(true, true).await;
        directory.remove("a.json");
        wait_for(false, true).await;
        directory.write("b.json", &set("one"));
        wait_for(true, false).await;
        directory.remove("b.json");
        wait_for(false, false).await;
    };
    tokio::time::timeout(SLOW_INTERVAL / 2, all).await.expect("the kernel says so");
    shutdown.cancel();
    watch.await.expect("no panic").expect("no error");
}

/// The edge keeps what it has while there is no directory, and watches the new one as it did the old one.
#[tokio::test]
async fn directory_may_be_replaced() {
    let parent = Directory::new("replaced");
    let (path, old) = (parent.0.join("objects"), parent.0.join("old"));
    let make = |names: &[&str]| {
        std::fs::create_dir(&path).expect("directory");
        for name in names {
            parent.write(&format!("objects/{name}.json"), &set(name));
        }
    };
    make(&["one"]);
    let (events, mut received) = mpsc::channel(64);
    let shutdown = CancellationToken::new();
    let watch = tokio::spawn(watch_directory(path.clone(), events, shutdown.clone()));
    let mut index = Index::default();
    let mut is_so = async |one: bool, two: bool, limit: Duration| {
        let all = async {
            while [index.node_set("one").is_some(), index.node_set("two").is_some()] != [one, two]
                || !index.has_synced()
            {
                index.apply(received.recv().await.expect("an event"), &mut IndexChange::default());
            }
        };
        tokio::time::timeout(limit, all).await.is_ok()
    };
    // Much sooner than all times are read.
    let (soon, silence) = (SLOW_INTERVAL / 2, Duration::from_millis(400));
    assert!(is_so(true, false, soon).await);
    for _ in 0..2 {
        std::fs::rename(&path, &old).expect("rename");
        assert!(!is_so(false, false, silence).await, "nothing is deleted with the directory");
        make(&["one", "two"]);
        assert!(is_so(true, true, soon).await);
        // The new one is watched, and not the old one.
        parent.write("old/two.json", &set("other"));
        parent.remove("objects/one.json");
        assert!(is_so(false, true, soon).await);
        parent.write("objects/one.json", &set("one"));
        parent.remove("objects/two.json");
        assert!(is_so(true, false, soon).await);
        std::fs::remove_dir_all(&path).expect("remove");
        std::fs::remove_dir_all(&old).expect("remove");
        assert!(!is_so(false, false, silence).await, "nothing is deleted with the directory");
        make(&["one"]);
        tokio::time::sleep(silence).await;
    }
    shutdown.cancel();
    watch.await.expect("no panic").expect("no error");
}

/// Programs write files beside their place and rename them.
#[tokio::test]
async fn renamed_file_is_named_and_nothing_else_is_looked_at() {
    let directory = Directory::new("renamed");
    let mut notices = Notices::open(&directory.0).expect("inotify");
    notices.watch(&directory.0);
    directory.write("b.tmp", &set("two"));
    std::fs::rename(directory.0.join("b.tmp"), directory.0.join("b.json")).expect("rename");
    let look = notices.next(&directory.0).await;
    assert_eq!(look, Look::At([directory.0.join("b.json")].into()));
}

/// The kubelet changes one link, to which those of all files lead.
#[tokio::test]
async fn files_of_a_mounted_config_map_are_followed() {
    let directory = Directory::new("mounted");
    let link = |to: &str, name: &str| {
        std::os::unix::fs::symlink(to, directory.0.join(name)).expect("a link");
    };
    for (version, object) in [("v1", "one"), ("v2", "two")] {
        std::fs::create_dir(directory.0.join(version)).expect("directory");
        directory.write(&format!("{version}/a.json"), &set(object));
    }
    let old = std::fs::File::open(directory.0.join("v1/a.json")).expect("file");
    old.set_modified(SystemTime::UNIX_EPOCH).expect("an earlier time");
    link("v1", "..data");
    link("..data/a.json", "a.json");
    let mut notices = Notices::open(&directory.0).expect("inotify");
    notices.watch(&directory.0);
    let (mut files, mut index) = (Files::default(), Index::default());
    let mut apply = |events: Vec<IndexEvent>| {
        for event in events {
            index.apply(event, &mut IndexChange::default());
        }
        [index.node_set("one").is_some(), index.node_set("two").is_some()]
    };
    let listed = files.look(&directory.0, Look::at_all(), Instant::now()).expect("listed");
    assert_eq!(apply(listed), [true, false]);
    link("v2", "..data_tmp");
    std::fs::rename(directory.0.join("..data_tmp"), directory.0.join("..data")).expect("rename");
    let look = notices.next(&directory.0).await;
    let changed = files.look(&directory.0, look, Instant::now()).expect("looked at");
    assert_eq!(apply(changed), [false, true]);
}

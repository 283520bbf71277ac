// SPDX-License-Identifier: Apache-2.0
//! Objects from a directory of JSON files, for an edge without a cluster. The kernel says which files have changed, and only these are
//! read. All files' times are read from time to time, and more often where the kernel says nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use steerage_model::chain;
use steerage_watch::Event;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::parse;
use crate::index::{IndexEvent, LoadBalancer, NodeSet};

/// How often all files' times are read, in case the kernel has missed something, as for a directory of another machine.
const SLOW_INTERVAL: Duration = Duration::from_secs(5);
/// The same where the kernel reports no changes.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Delivers all `*.json` of a directory, one object each, and then what changes, until shutdown.
pub(crate) async fn watch_directory(
    directory: PathBuf,
    events: mpsc::Sender<IndexEvent>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    // Before the first look, so that nothing is missed in between.
    let mut notices = Notices::open(&directory);
    let (mut files, mut looked_at) = (Files::default(), Look::at_all());
    loop {
        let news = files
            .look(&directory, looked_at)
            .await
            .with_context(|| format!("cannot read {}", directory.display()))?;
        for event in news {
            if events.send(event).await.is_err() {
                return Ok(());
            }
        }
        let Some(next) = shutdown.run_until_cancelled(next_look(&directory, notices.as_mut())).await else {
            return Ok(());
        };
        looked_at = next;
    }
}

/// Which files may have changed.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// All whose times differ, and these.
    AtAll(BTreeSet<PathBuf>),
    At(BTreeSet<PathBuf>),
}

impl Look {
    fn at_all() -> Self {
        Self::AtAll(BTreeSet::new())
    }
}

async fn next_look(directory: &Path, notices: Option<&mut Notices>) -> Look {
    let Some(notices) = notices else {
        tokio::time::sleep(POLL_INTERVAL).await;
        return Look::at_all();
    };
    tokio::time::timeout(SLOW_INTERVAL, notices.next(directory)).await.unwrap_or_else(|_| Look::at_all())
}

/// What the kernel says of the directory.
struct Notices(AsyncFd<Descriptor>);

struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

#[allow(unsafe_code, reason = "tokio requires a descriptor that stays open and the same")]
fn register(descriptor: Descriptor) -> std::io::Result<AsyncFd<Descriptor>> {
    // SAFETY: a `Descriptor` owns one descriptor for its whole life, and the `AsyncFd` owns the `Descriptor`.
    unsafe { Ok(AsyncFd::register(descriptor)?) }
}

impl Notices {
    fn open(directory: &Path) -> Option<Self> {
        let open = || {
            let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
            let whole = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO;
            let gone = AddWatchFlags::IN_MOVED_FROM | AddWatchFlags::IN_DELETE;
            inotify.add_watch(directory, whole | gone)?;
            register(Descriptor(inotify))
        };
        match open() {
            Ok(inotify) => Some(Self(inotify)),
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(
                    directory = %directory.display(),
                    error,
                    "the kernel does not report changes of this directory; reading all files' times ten times a second"
                );
                None
            }
        }
    }

    /// Waits until something changes.
    async fn next(&mut self, directory: &Path) -> Look {
        let (mut changed, mut is_all) = (BTreeSet::new(), false);
        loop {
            let Ok(mut ready) = self.0.readable_mut().await else {
                // As if nothing was said.
                tokio::time::sleep(POLL_INTERVAL).await;
                return Look::AtAll(changed);
            };
            while let Ok(read) = ready.try_io(|fd| Ok(fd.get_ref().0.read_events()?)) {
                let Ok(events) = read else {
                    tokio::time::sleep(POLL_INTERVAL).await;
                    return Look::AtAll(changed);
                };
                for event in events {
                    match event.name {
                        Some(name) if is_json(Path::new(&name)) => drop(changed.insert(directory.join(name))),
                        // A link that leads elsewhere now, such as ..data of a mounted ConfigMap; lost notices, or the end of them.
                        Some(_) => is_all |= event.mask.contains(AddWatchFlags::IN_MOVED_TO),
                        None => is_all = true,
                    }
                }
            }
            if is_all {
                return Look::AtAll(changed);
            }
            if !changed.is_empty() {
                return Look::At(changed);
            }
        }
    }
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// Which object it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Identity {
    LoadBalancer(String),
    NodeSet(String),
}

/// What was delivered.
#[derive(Debug, Default)]
pub(super) struct Files {
    is_listed: bool,
    times: BTreeMap<PathBuf, SystemTime>,
    /// The last event of each file.
    contents: BTreeMap<PathBuf, IndexEvent>,
    /// In how many files each object is.
    holders: HashMap<Identity, usize>,
}

impl Files {
    /// What has changed.
    async fn look(&mut self, directory: &Path, look: Look) -> std::io::Result<Vec<IndexEvent>> {
        let changed = match look {
            Look::At(paths) if self.is_listed => paths,
            Look::At(named) | Look::AtAll(named) => {
                let times = modified_times(directory)?;
                if !self.is_listed {
                    return Ok(self.list(times).await);
                }
                let paths = times.keys().chain(self.times.keys());
                let differ = paths.filter(|path| times.get(*path) != self.times.get(*path)).cloned();
                // A file that was replaced twice within one tick of the clock has the same time.
                differ.chain(named).collect()
            }
        };
        match self.update(changed).await {
            Some(events) => Ok(events),
            None => Ok(self.list(modified_times(directory)?).await),
        }
    }

    /// The events of these files alone; `None` if they have an object that is in several: then the order of all counts.
    async fn update(&mut self, paths: BTreeSet<PathBuf>) -> Option<Vec<IndexEvent>> {
        let (mut before, mut now) = (Vec::new(), Vec::new());
        for path in paths {
            let time = tokio::fs::metadata(&path).await.and_then(|file| file.modified()).ok();
            match time {
                Some(time) => drop(self.times.insert(path.clone(), time)),
                None => drop(self.times.remove(&path)),
            }
            let old = self.contents.remove(&path);
            before.extend(old.iter().filter_map(identity));
            if let Some(event) = read(&path, old).await {
                now.extend(identity(&event));
                self.contents.insert(path.clone(), event);
            }
        }
        for identity in &before {
            if let Some(number) = self.holders.get_mut(identity) {
                *number -= 1;
            }
        }
        for identity in &now {
            *self.holders.entry(identity.clone()).or_default() += 1;
        }
        self.holders.retain(|_, number| *number > 0);
        let holders = |identity: &Identity| self.holders.get(identity).copied().unwrap_or_default();
        let is_elsewhere = |identity: &Identity| holders(identity) > usize::from(now.contains(identity));
        if before.iter().chain(&now).any(is_elsewhere) {
            return None;
        }
        let gone = before.iter().filter(|identity| !now.contains(identity));
        let mut events: Vec<_> = gone.map(deletion).collect();
        let now: HashSet<_> = now.into_iter().collect();
        let changed =
            self.contents.values().filter(|event| identity(event).is_some_and(|one| now.contains(&one)));
        events.extend(changed.filter_map(change));
        Some(events)
    }

    /// The files as one list of each kind. A file that cannot be read, perhaps because it is only half written, keeps its object.
    async fn list(&mut self, times: BTreeMap<PathBuf, SystemTime>) -> Vec<IndexEvent> {
        let mut events = vec![IndexEvent::LoadBalancer(Event::Init), IndexEvent::NodeSet(Event::Init)];
        let mut contents = std::mem::take(&mut self.contents);
        self.holders.clear();
        for path in times.keys() {
            let Some(event) = read(path, contents.remove(path)).await else { continue };
            if let Some(identity) = identity(&event) {
                *self.holders.entry(identity).or_default() += 1;
            }
            self.contents.insert(path.clone(), event.clone());
            events.push(event);
        }
        events.extend([IndexEvent::LoadBalancer(Event::InitDone), IndexEvent::NodeSet(Event::InitDone)]);
        (self.times, self.is_listed) = (times, true);
        events
    }
}

fn modified_times(directory: &Path) -> std::io::Result<BTreeMap<PathBuf, SystemTime>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if !is_json(&entry.path()) {
            continue;
        }
        // Of the file to which a link leads.
        match std::fs::metadata(entry.path()).and_then(|file| file.modified()) {
            Ok(time) => drop(files.insert(entry.path(), time)),
            // Deleted meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

/// What the file contains, or contained last if that cannot be read; `None` if it is gone or never was readable.
async fn read(path: &Path, last: Option<IndexEvent>) -> Option<IndexEvent> {
    let text = match tokio::fs::read_to_string(path).await {
        Ok(text) => Ok(text),
        // Deleted meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => Err(error.to_string()),
    };
    match text.and_then(|text| parse(&text).map_err(|error| error.to_string())) {
        Ok(event) => Some(event),
        Err(error) => {
            tracing::error!(path = %path.display(), error, "file unreadable; keeping the object it contained");
            last
        }
    }
}

fn identity(event: &IndexEvent) -> Option<Identity> {
    Some(match event {
        IndexEvent::LoadBalancer(Event::InitApply(LoadBalancer { name, .. }) | Event::InitKeep(name)) => {
            Identity::LoadBalancer(name.clone())
        }
        IndexEvent::NodeSet(Event::InitApply(NodeSet { name, .. }) | Event::InitKeep(name)) => {
            Identity::NodeSet(name.clone())
        }
        _ => return None,
    })
}

fn deletion(identity: &Identity) -> IndexEvent {
    fn event<T: steerage_watch::Object<Key = String>>(name: &str) -> Event<T> {
        Event::Delete { key: name.to_owned(), version: String::new() }
    }
    match identity {
        Identity::LoadBalancer(name) => IndexEvent::LoadBalancer(event(name)),
        Identity::NodeSet(name) => IndexEvent::NodeSet(event(name)),
    }
}

/// An event of a list, outside of one. An object that is unreadable keeps its last readable form.
fn change(event: &IndexEvent) -> Option<IndexEvent> {
    match event {
        IndexEvent::LoadBalancer(Event::InitApply(object)) => {
            Some(IndexEvent::LoadBalancer(Event::Apply(object.clone())))
        }
        IndexEvent::NodeSet(Event::InitApply(object)) => {
            Some(IndexEvent::NodeSet(Event::Apply(object.clone())))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
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
        let mut read = async |look| {
            for event in files.look(&directory.0, look).await.expect("list") {
                index.apply(event, &mut IndexChange::default());
            }
            assert!(index.has_synced() && index.load_balancers().next().is_none());
            assert!(index.node_set("other").is_none());
            index.node_set("all").is_some()
        };
        let at = |name: &str| Look::At([directory.0.join(name)].into());
        assert!(read(Look::at_all()).await);
        for _ in 0..2 {
            directory.write("a.json", &set("all")[..40]);
            assert!(read(Look::at_all()).await && read(at("a.json")).await, "half written");
        }
        directory.remove("a.json");
        assert!(!read(Look::at_all()).await);
    }

    #[tokio::test]
    async fn object_follows_its_files() {
        let directory = Directory::new("follows");
        directory.write("a.json", &set("one"));
        let (mut index, mut files) = (Index::default(), Files::default());
        let mut names = async |paths: &[&str]| {
            let look = match paths {
                [] => Look::at_all(),
                paths => Look::At(paths.iter().map(|name| directory.0.join(name)).collect()),
            };
            for event in files.look(&directory.0, look).await.expect("read") {
                index.apply(event, &mut IndexChange::default());
            }
            ["one", "two"].map(|name| index.node_set(name).is_some())
        };
        assert_eq!(names(&[]).await, [true, false]);
        directory.write("b.json", &set("one"));
        assert_eq!(names(&["b.json"]).await, [true, false], "in two files");
        directory.remove("a.json");
        assert_eq!(names(&["a.json"]).await, [true, false], "still in one");
        std::fs::rename(directory.0.join("b.json"), directory.0.join("c.json")).expect("rename");
        assert_eq!(names(&["b.json", "c.json"]).await, [true, false]);
        directory.write("c.json", &set("two"));
        assert_eq!(names(&["c.json"]).await, [false, true], "another object");
        directory.remove("c.json");
        assert_eq!(names(&["c.json"]).await, [false, false]);
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
        };
        tokio::time::timeout(SLOW_INTERVAL / 2, all).await.expect("the kernel says so");
        shutdown.cancel();
        watch.await.expect("no panic").expect("no error");
    }

    /// Programs write files beside their place and rename them.
    #[tokio::test]
    async fn renamed_file_is_named_and_nothing_else_is_looked_at() {
        let directory = Directory::new("renamed");
        let mut notices = Notices::open(&directory.0).expect("inotify");
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
        let (mut files, mut index) = (Files::default(), Index::default());
        let mut apply = |events: Vec<IndexEvent>| {
            for event in events {
                index.apply(event, &mut IndexChange::default());
            }
            [index.node_set("one").is_some(), index.node_set("two").is_some()]
        };
        let listed = files.look(&directory.0, Look::at_all()).await.expect("listed");
        assert_eq!(apply(listed), [true, false]);
        link("v2", "..data_tmp");
        std::fs::rename(directory.0.join("..data_tmp"), directory.0.join("..data")).expect("rename");
        let look = notices.next(&directory.0).await;
        let changed = files.look(&directory.0, look).await.expect("looked at");
        assert_eq!(apply(changed), [false, true]);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Objects from a directory of JSON files, for an edge without a cluster. The kernel says which files have changed, and only these are
//! read. All files' times are read from time to time, and more often where the kernel says nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use steerage_watch::Event;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::parse;
use crate::index::{IndexEvent, LoadBalancer, NodeSet};
use crate::logged_problem::LoggedProblem;

mod notices;

use notices::{Look, Notices, POLL_INTERVAL, next_look};

/// A file that is not there is believed to be deleted after this time: many programs delete a file and write it again.
const GONE_AFTER: Duration = Duration::from_millis(100);

/// Delivers all `*.json` of a directory, one object each, and then what changes, until shutdown.
pub(crate) async fn watch_directory(
    directory: PathBuf,
    events: mpsc::Sender<IndexEvent>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let mut notices = Notices::open(&directory);
    let (mut files, mut looked_at) = (Files::default(), Look::at_all());
    let (mut has_listed, mut problem) = (false, LoggedProblem::default());
    loop {
        if let (Look::AtAll(_), Some(notices)) = (&looked_at, &mut notices) {
            // Before the look, so that nothing is missed in between.
            notices.watch(&directory);
        }
        let result;
        (files, result) = look(files, directory.clone(), looked_at).await?;
        let next = match result {
            Ok(news) => {
                if problem.set(None) {
                    tracing::info!(directory = %directory.display(), "directory read again");
                }
                has_listed = true;
                for event in news {
                    if events.send(event).await.is_err() {
                        return Ok(());
                    }
                }
                let next = next_look(&directory, notices.as_mut(), files.next_due());
                shutdown.run_until_cancelled(next).await
            }
            Err(error) if has_listed => {
                let error = error.to_string();
                if problem.set(Some(error.clone())) {
                    let directory = directory.display();
                    tracing::error!(%directory, error, "directory not read; keeping the objects that it contained; retrying");
                }
                let next = shutdown.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await;
                next.map(|()| Look::at_all())
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", directory.display()));
            }
        };
        let Some(next) = next else { return Ok(()) };
        looked_at = next;
    }
}

/// Reads the files on a thread that may wait for a disk.
async fn look(
    mut files: Files,
    directory: PathBuf,
    looked_at: Look,
) -> anyhow::Result<(Files, std::io::Result<Vec<IndexEvent>>)> {
    let look = move || {
        let result = files.look(&directory, looked_at, Instant::now());
        (files, result)
    };
    tokio::task::spawn_blocking(look).await.context("reading the directory ended early")
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
    /// Since when files are not there whose objects are kept for now.
    missing: BTreeMap<PathBuf, Instant>,
    /// In how many files each object is.
    holders: HashMap<Identity, usize>,
}

impl Files {
    /// What has changed. Also looks at the files that have been missing for long enough. After an error all are listed anew.
    fn look(&mut self, directory: &Path, look: Look, now: Instant) -> std::io::Result<Vec<IndexEvent>> {
        let result = self.try_look(directory, look, now);
        if result.is_err() {
            self.is_listed = false;
            // Files are not gone because their directory is.
            self.missing.values_mut().for_each(|since| *since = now);
        }
        result
    }

    fn try_look(&mut self, directory: &Path, look: Look, now: Instant) -> std::io::Result<Vec<IndexEvent>> {
        std::fs::metadata(directory)?;
        let mut changed = match look {
            Look::At(paths) if self.is_listed => paths,
            Look::At(named) | Look::AtAll(named) => {
                let times = modified_times(directory)?;
                if !self.is_listed {
                    return Ok(self.list(times, now));
                }
                let paths = times.keys().chain(self.times.keys());
                let differ = paths.filter(|path| times.get(*path) != self.times.get(*path)).cloned();
                // A file that was replaced twice within one tick of the clock has the same time.
                differ.chain(named).collect()
            }
        };
        let due = self.missing.iter().filter(|(_, since)| **since + GONE_AFTER <= now);
        changed.extend(due.map(|(path, _)| path.clone()));
        match self.update(&changed, now) {
            Some(events) => Ok(events),
            None => Ok(self.list(modified_times(directory)?, now)),
        }
    }

    /// When the next missing file is believed to be deleted.
    fn next_due(&self) -> Option<Instant> {
        self.missing.values().min().map(|since| *since + GONE_AFTER)
    }

    /// The events of these files alone; `None` if they have an object that is in several: then the order of all counts.
    fn update(&mut self, paths: &BTreeSet<PathBuf>, now: Instant) -> Option<Vec<IndexEvent>> {
        let mut before = Vec::new();
        for path in paths {
            let time = std::fs::metadata(path).and_then(|file| file.modified()).ok();
            match time {
                Some(time) => drop(self.times.insert(path.clone(), time)),
                None => drop(self.times.remove(path)),
            }
            let old = self.remove(path);
            before.extend(old.iter().filter_map(identity));
            self.insert(path, old, now);
        }
        self.drop_moved();
        let after = paths.iter().filter_map(|path| self.contents.get(path)).filter_map(identity);
        let after: HashSet<_> = after.collect();
        let holders = |identity: &Identity| self.holders.get(identity).copied().unwrap_or_default();
        let is_elsewhere = |identity: &Identity| holders(identity) > usize::from(after.contains(identity));
        if before.iter().chain(&after).any(is_elsewhere) {
            return None;
        }
        let gone = before.iter().filter(|identity| !after.contains(identity));
        let mut events: Vec<_> = gone.map(deletion).collect();
        events.extend(paths.iter().filter_map(|path| self.contents.get(path)).filter_map(change));
        Some(events)
    }

    /// The files as one list of each kind. A file that cannot be read, perhaps because it is only half written, keeps its object.
    fn list(&mut self, times: BTreeMap<PathBuf, SystemTime>, now: Instant) -> Vec<IndexEvent> {
        let paths: BTreeSet<_> = times.keys().chain(self.contents.keys()).cloned().collect();
        for path in paths {
            let old = self.remove(&path);
            self.insert(&path, old, now);
        }
        self.drop_moved();
        let mut events = vec![IndexEvent::LoadBalancer(Event::Init), IndexEvent::NodeSet(Event::Init)];
        events.extend(self.contents.values().cloned());
        events.extend([IndexEvent::LoadBalancer(Event::InitDone), IndexEvent::NodeSet(Event::InitDone)]);
        (self.times, self.is_listed) = (times, true);
        events
    }

    fn remove(&mut self, path: &Path) -> Option<IndexEvent> {
        let event = self.contents.remove(path)?;
        if let Some(identity) = identity(&event)
            && let Some(number) = self.holders.get_mut(&identity)
        {
            *number -= 1;
            if *number == 0 {
                self.holders.remove(&identity);
            }
        }
        Some(event)
    }

    /// What the file contains, or contained last if it is missing for a short time, or unreadable.
    fn insert(&mut self, path: &Path, last: Option<IndexEvent>, now: Instant) {
        let event = match read(path) {
            Some(text) => {
                self.missing.remove(path);
                contents(path, text, last)
            }
            None => last.filter(|_| {
                let since = *self.missing.entry(path.to_owned()).or_insert(now);
                now < since + GONE_AFTER
            }),
        };
        let Some(event) = event else {
            self.missing.remove(path);
            return;
        };
        if let Some(identity) = identity(&event) {
            *self.holders.entry(identity).or_default() += 1;
        }
        self.contents.insert(path.to_owned(), event);
    }

    /// A missing file whose object is in another one was renamed.
    fn drop_moved(&mut self) {
        let missing: Vec<_> = self.missing.keys().cloned().collect();
        for path in missing {
            let identity = self.contents.get(&path).and_then(identity);
            if identity.and_then(|identity| self.holders.get(&identity)).is_some_and(|holders| *holders > 1) {
                self.remove(&path);
                self.missing.remove(&path);
            }
        }
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

/// The text of a file, or why it cannot be read; `None` if it is not there.
fn read(path: &Path) -> Option<Result<String, String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Some(Ok(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(Err(error.to_string())),
    }
}

/// What a file contains, or contained last if that cannot be read; `None` if it never was readable.
fn contents(path: &Path, text: Result<String, String>, last: Option<IndexEvent>) -> Option<IndexEvent> {
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
mod tests;

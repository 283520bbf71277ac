// SPDX-License-Identifier: Apache-2.0
//! Where load balancers and node sets come from: the API server's watches, or a folder of JSON files for an edge without a
//! cluster. Feeds the engine, decides nothing. While the source is away, nothing comes, and the engine goes on with what it has.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use futures::StreamExt as _;
use kube::core::DeserializeGuard;
use kube::{Api, Client, Resource, ResourceExt as _};
use kube_runtime::WatchStreamExt as _;
use kube_runtime::utils::Backoff;
use kube_runtime::watcher::{self, Event as Watched, watcher};
use serde::de::DeserializeOwned;
use steerage_edge_api::{EdgeLoadBalancer, EdgeNodeSet};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::index::Event;

/// Pauses between attempts to reach the API server. The longest is short: edge hosts are few, and what they miss is traffic.
const SHORTEST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pauses that double, from the start again after a success.
#[derive(Debug)]
struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(SHORTEST_PAUSE)
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let next = (self.0 * 2).min(LONGEST_PAUSE);
        Some(std::mem::replace(&mut self.0, next))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        *self = Self::default();
    }
}

/// A kind that is watched, and how its changes become events.
pub(crate) trait Kind:
    Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
    + DeserializeOwned
    + Clone
    + std::fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// It came or changed.
    fn come(object: Self) -> Event;
    /// It went.
    fn gone(name: String) -> Event;
    /// These are all.
    fn all(names: BTreeSet<String>) -> Event;
}

impl Kind for EdgeLoadBalancer {
    fn come(object: Self) -> Event {
        Event::LoadBalancer(Box::new(object))
    }
    fn gone(name: String) -> Event {
        Event::LoadBalancerDeleted(name)
    }
    fn all(names: BTreeSet<String>) -> Event {
        Event::LoadBalancers(names)
    }
}

impl Kind for EdgeNodeSet {
    fn come(object: Self) -> Event {
        Event::NodeSet(Box::new(object))
    }
    fn gone(name: String) -> Event {
        Event::NodeSetDeleted(name)
    }
    fn all(names: BTreeSet<String>) -> Event {
        Event::NodeSets(names)
    }
}

/// Watches one kind in a namespace until asked to end.
pub(crate) async fn watch<K: Kind>(
    client: Client,
    namespace: String,
    events: mpsc::Sender<Event>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    // An object that cannot be read must not stop the others.
    let api = Api::<DeserializeGuard<K>>::namespaced(client, &namespace);
    let mut stream = std::pin::pin!(watcher(api, watcher::Config::default()).backoff(Pauses::default()));
    let mut names = BTreeSet::new();
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            event = stream.next() => event,
        };
        let event = match event {
            None => anyhow::bail!("the watch has ended"),
            Some(Err(error)) => {
                tracing::warn!(kind = %K::kind(&()), %error, "cannot watch; trying again");
                continue;
            }
            Some(Ok(Watched::Init)) => {
                names.clear();
                continue;
            }
            Some(Ok(Watched::InitApply(object))) => {
                // Kept in its last good form also where it cannot be read now.
                names.insert(object.name_any());
                readable(object)
            }
            Some(Ok(Watched::InitDone)) => Some(K::all(std::mem::take(&mut names))),
            Some(Ok(Watched::Apply(object))) => readable(object),
            Some(Ok(Watched::Delete(object))) => Some(K::gone(object.name_any())),
        };
        if let Some(event) = event
            && events.send(event).await.is_err()
        {
            return Ok(());
        }
    }
}

fn readable<K: Kind>(object: DeserializeGuard<K>) -> Option<Event> {
    let name = object.name_any();
    match object.0 {
        Ok(object) => Some(K::come(object)),
        Err(error) => {
            tracing::error!(kind = %K::kind(&()), name, %error, "cannot be read; its last readable form stays in force");
            None
        }
    }
}

/// How often a folder is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Reads all `*.json` of a folder, each one object, whenever one of them changes.
pub(crate) async fn folder(
    folder: PathBuf,
    events: mpsc::Sender<Event>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let mut known = None;
    loop {
        let now = stamp(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        if known.as_ref() != Some(&now) {
            for event in read(&now).await {
                if events.send(event).await.is_err() {
                    return Ok(());
                }
            }
            known = Some(now);
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// The files and when they were last changed.
fn stamp(folder: &Path) -> std::io::Result<Vec<(PathBuf, SystemTime)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "json") {
            files.push((entry.path(), entry.metadata()?.modified()?));
        }
    }
    files.sort();
    Ok(files)
}

async fn read(files: &[(PathBuf, SystemTime)]) -> Vec<Event> {
    let mut events = Vec::new();
    let (mut load_balancers, mut node_sets) = (BTreeSet::new(), BTreeSet::new());
    for (path, _) in files {
        // A file that goes while it is read will not be there at the next look.
        let Ok(text) = tokio::fs::read_to_string(path).await else { continue };
        let kind = serde_json::from_str::<serde_json::Value>(&text)
            .ok()
            .and_then(|value| value.get("kind").and_then(serde_json::Value::as_str).map(str::to_owned));
        let event = match kind.as_deref() {
            Some("EdgeNodeSet") => serde_json::from_str::<EdgeNodeSet>(&text).map(|object| {
                node_sets.insert(object.name_any());
                EdgeNodeSet::come(object)
            }),
            _ => serde_json::from_str::<EdgeLoadBalancer>(&text).map(|object| {
                load_balancers.insert(object.name_any());
                EdgeLoadBalancer::come(object)
            }),
        };
        match event {
            Ok(event) => events.push(event),
            Err(error) => tracing::error!(path = %path.display(), %error, "cannot be read"),
        }
    }
    events.extend([EdgeLoadBalancer::all(load_balancers), EdgeNodeSet::all(node_sets)]);
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut pauses = Pauses::default();
        let taken: Vec<_> = pauses.by_ref().take(7).map(|pause| pause.as_millis()).collect();
        assert_eq!(taken, [200, 400, 800, 1600, 3200, 5000, 5000]);
        pauses.reset();
        assert_eq!(pauses.next(), Some(SHORTEST_PAUSE));
    }

    #[tokio::test]
    async fn unreadable_files_are_skipped() {
        let folder = std::env::temp_dir().join(format!("steerage-edge-source-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("folder");
        let set = r#"{"kind": "EdgeNodeSet", "apiVersion": "steerage.dev/v1alpha1", "metadata": {"name": "all"}, "spec": {"targets": []}}"#;
        for (name, text) in [("a.json", set), ("b.json", "{"), ("c.txt", set)] {
            std::fs::write(folder.join(name), text).expect("write");
        }
        let files = stamp(&folder).expect("list");
        let events = read(&files).await;
        std::fs::remove_dir_all(&folder).expect("remove");
        assert_eq!(files.len(), 2);
        let mut index = crate::index::Index::default();
        for event in events {
            index.apply(event);
        }
        assert!(index.has_synced() && index.load_balancers.is_empty());
        assert_eq!(index.node_sets.keys().collect::<Vec<_>>(), ["all"]);
    }
}

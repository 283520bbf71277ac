// SPDX-License-Identifier: Apache-2.0
//! The index that the watches feed, shared with the workers that plan from it, and what is to be looked at again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use steerage_model::{EndpointSlice, Key, Node, Service};
use steerage_process::Process;
use steerage_watch::Watches;
use steerage_watch::{Event, Index};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::plan::NodeTargets;

/// What happened to a Service since it was last looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    /// The Service itself changed.
    pub(crate) itself: bool,
    /// When its endpoints first changed.
    pub(crate) endpoints: Option<Instant>,
}

/// What changed since the last [`ClusterIndex::take`].
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Services, with what happened to them.
    pub(crate) services: BTreeMap<Key, Touched>,
    /// Whether any node changed.
    pub(crate) nodes: bool,
}

#[derive(Debug, Default)]
struct Inner {
    index: Index,
    nodes: Option<Arc<NodeTargets>>,
    changes: Changes,
}

/// All that is known of the cluster.
#[derive(Debug)]
pub(crate) struct ClusterIndex {
    inner: Mutex<Inner>,
    changed: Notify,
    synced: watch::Sender<bool>,
}

impl Default for ClusterIndex {
    fn default() -> Self {
        Self { inner: Mutex::default(), changed: Notify::new(), synced: watch::Sender::new(false) }
    }
}

impl ClusterIndex {
    /// Takes in what the watch of Services says.
    pub(crate) fn on_service(&self, event: Event<Service>) {
        self.feed(|index| index.apply_service(event), |touched, _| touched.itself = true);
    }

    /// Takes in what the watch of `EndpointSlices` says.
    pub(crate) fn on_slice(&self, event: Event<EndpointSlice>) {
        self.feed(
            |index| index.apply_slice(event),
            |touched, now| {
                touched.endpoints.get_or_insert(now);
            },
        );
    }

    /// Takes in what the watch of NodeTargets says.
    pub(crate) fn on_node(&self, event: Event<Node>) {
        self.feed(|index| index.apply_node(event), |_, _| ());
    }

    fn feed(&self, apply: impl FnOnce(&mut Index), mark: impl Fn(&mut Touched, Instant)) {
        let mut inner = self.lock();
        apply(&mut inner.index);
        let dirty = inner.index.take_dirty();
        let synced = inner.index.has_synced();
        if !dirty.nodes.is_empty() {
            inner.nodes = None;
            inner.changes.nodes = true;
        }
        let now = Instant::now();
        for key in &dirty.services {
            mark(inner.changes.services.entry(key.clone()).or_default(), now);
        }
        drop(inner);
        if synced {
            self.synced.send_if_modified(|known| !std::mem::replace(known, true));
            if !dirty.is_empty() {
                self.changed.notify_one();
            }
        }
    }

    /// Returns once all three kinds have been listed.
    pub(crate) async fn synced(&self) {
        // The sender is held by `self`, so the wait cannot fail.
        let _ = self.synced.subscribe().wait_for(|synced| *synced).await;
    }

    /// Returns when something has changed. For one listener.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What changed since the last call.
    pub(crate) fn take(&self) -> Changes {
        std::mem::take(&mut self.lock().changes)
    }

    /// Looks at the index and at the nodes as plans want them.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Index, &Arc<NodeTargets>) -> T) -> T {
        let mut inner = self.lock();
        let nodes = match inner.nodes.take() {
            Some(nodes) => nodes,
            None => Arc::new(NodeTargets::new(inner.index.nodes())),
        };
        let found = look(&inner.index, &nodes);
        inner.nodes = Some(nodes);
        found
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps `cluster` up with the cluster for as long as the process lives. Its readiness waits for the first lists.
pub(crate) fn follow(process: &Process, cluster: &Arc<ClusterIndex>, watches: &Watches) {
    one(process, "services", cluster, watches.services(), ClusterIndex::on_service);
    one(process, "endpointslices", cluster, watches.slices(), ClusterIndex::on_slice);
    one(process, "nodes", cluster, watches.nodes(), ClusterIndex::on_node);
}

fn one<T: steerage_watch::Object + Send + 'static>(
    process: &Process,
    name: &'static str,
    cluster: &Arc<ClusterIndex>,
    mut events: impl Stream<Item = Event<T>> + Send + Unpin + 'static,
    on: fn(&ClusterIndex, Event<T>),
) where
    T::Key: Send,
{
    let mut pending = Some(process.readiness().task(name));
    let cluster = Arc::clone(cluster);
    let stop = process.shutdown().clone();
    process.spawn(name, async move {
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                event = events.next() => event,
            };
            let Some(event) = event else { anyhow::bail!("the watch ended") };
            let listed = matches!(event, Event::InitDone);
            on(&cluster, event);
            if let Some(pending) = pending.take_if(|_| listed) {
                pending.done();
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use steerage_model::{Endpoint, Family};

    fn slice(ready: &[&str]) -> EndpointSlice {
        let service = Key::new("default", "web");
        let endpoints = ready.iter().map(|node| Endpoint::ready([10, 0, 0, 1].into(), node)).collect();
        EndpointSlice { endpoints, ..EndpointSlice::new(service.clone(), service, Family::V4) }
    }

    fn listed() -> ClusterIndex {
        let cluster = ClusterIndex::default();
        cluster.on_service(Event::Init);
        cluster.on_service(Event::InitDone);
        cluster.on_node(Event::Init);
        cluster.on_node(Event::InitDone);
        assert!(cluster.synced().now_or_never().is_none(), "slices are missing");
        cluster.on_slice(Event::Init);
        cluster.on_slice(Event::InitDone);
        assert!(cluster.synced().now_or_never().is_some());
        cluster
    }

    #[test]
    fn what_happened_to_a_service_is_told_apart() {
        let cluster = listed();
        assert!(cluster.changed().now_or_never().is_none());
        cluster.on_slice(Event::Apply(slice(&["a"])));
        let first = Instant::now();
        cluster.on_slice(Event::Apply(slice(&["b"])));
        assert!(cluster.changed().now_or_never().is_some());
        let changes = cluster.take();
        let touched = changes.services[&Key::new("default", "web")];
        assert!(!touched.itself && touched.endpoints.expect("a time") <= first, "the first change counts");
        cluster.on_service(Event::Apply(Service::new(Key::new("default", "web"))));
        let touched = cluster.take().services[&Key::new("default", "web")];
        assert_eq!(touched, Touched { itself: true, endpoints: None });
        assert!(cluster.take().services.is_empty());
    }

    #[test]
    fn nodes_are_prepared_once_for_many_plans() {
        let cluster = listed();
        let nodes = || cluster.read(|_, nodes| Arc::clone(nodes));
        assert!(Arc::ptr_eq(&nodes(), &nodes()));
        let before = nodes();
        cluster.on_slice(Event::Apply(slice(&["a"])));
        assert!(Arc::ptr_eq(&before, &nodes()));
        cluster.on_node(Event::Apply(Node { name: "a".to_owned(), ..Node::default() }));
        assert!(cluster.take().nodes);
        assert!(!Arc::ptr_eq(&before, &nodes()));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The index of the cluster, shared between the watches and the workers.
//!
//! The watches apply events under one lock; every change becomes a request in the queue at once. A reconcile takes one
//! [`Snapshot`] under the same lock, so that all it reads is of one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use steerage_model::{EndpointSlice, Key, Node, Pod, Service};
use steerage_process::Process;
use steerage_provider_api::{Owner, SharedSet};
use steerage_watch::{Event, Index, Object, Watches};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::applied::AppliedStates;
use crate::plan::{self, EndpointSummary, ManagedClasses, NodeChange, NodeTargets, PlanError, PodTargets};
use crate::removal_hold::{HoldingSet, RemovalBreaker, RemovalHold};
use crate::request_queue::{ReconcileRequest, RequestQueue};

/// What the cluster says of one Service, at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) service: Service,
    pub(crate) endpoints: EndpointSummary,
    pub(crate) nodes: Arc<NodeTargets>,
}

/// A pod that waits for its readiness gate.
#[derive(Clone, Debug)]
pub(crate) struct WaitingPod {
    pub(crate) pod: Pod,
    /// The Services that have it as a target, with the addresses at which it must be healthy.
    pub(crate) services: Vec<(Owner, BTreeSet<SocketAddr>)>,
    /// Whether a Service of its namespace has pods as targets: its EndpointSlices may be late.
    pub(crate) may_have_service: bool,
}

#[derive(Debug, Default)]
struct Inner {
    index: Index,
    /// Prepared once for all plans until a node changes.
    nodes: Option<Arc<NodeTargets>>,
    /// What was prepared last.
    prepared: Arc<NodeTargets>,
    /// Grows with every change of a node, and of what is held.
    node_generation: u64,
    /// The removals from the shared sets.
    holds: BTreeMap<SharedSet, RemovalHold>,
    breaker: RemovalBreaker,
    /// Whether cordoned nodes drain.
    drains_cordoned: bool,
    /// Nodes that changed since `told`.
    changed_nodes: BTreeSet<String>,
    /// What the last [`ClusterIndex::take_node_change`] compared with.
    told: Arc<NodeTargets>,
}

impl Inner {
    fn nodes(&mut self) -> Arc<NodeTargets> {
        let Self { index, nodes, prepared, node_generation, holds, breaker, drains_cordoned, .. } = self;
        let prepare = || {
            let mut new = NodeTargets::new(index.nodes(), *node_generation, prepared, *drains_cordoned);
            for set in SharedSet::ALL {
                let (wanted, hold) = (new.set(set).targets, holds.entry(set).or_default());
                let staying = |node: &str| new.staying(node);
                let targets = breaker.update(HoldingSet::Shared(set), hold, &wanted, staying);
                new.replace(set, targets);
            }
            // Labels change often, and few Services look at them: the others' sets stay the same.
            if new.differs_only_in_labels(prepared) {
                new.generation = prepared.generation;
            }
            *prepared = Arc::new(new);
            Arc::clone(prepared)
        };
        Arc::clone(nodes.get_or_insert_with(prepare))
    }
}

#[derive(Debug)]
pub(crate) struct ClusterIndex {
    inner: Mutex<Inner>,
    classes: ManagedClasses,
    requests: Arc<RequestQueue>,
    applied: Arc<AppliedStates>,
    pods_changed: Notify,
}

/// A Service that changed, or whose endpoints did.
struct ChangedService {
    key: Key,
    /// Absent when the Service is gone.
    owner: Option<Owner>,
    fingerprint: Option<u64>,
    is_ours: bool,
    /// Whether its status has an address or a hostname.
    is_published: bool,
}

impl ClusterIndex {
    pub(crate) fn new(
        classes: ManagedClasses,
        requests: Arc<RequestQueue>,
        applied: Arc<AppliedStates>,
    ) -> Self {
        Self { inner: Mutex::default(), classes, requests, applied, pods_changed: Notify::new() }
    }

    #[cfg(test)]
    pub(crate) fn requests(&self) -> Arc<RequestQueue> {
        Arc::clone(&self.requests)
    }

    /// Holds the removals from the shared sets with this breaker.
    pub(crate) fn with_breaker(self, breaker: RemovalBreaker) -> Self {
        self.lock().breaker = breaker;
        self
    }

    /// Whether cordoned nodes drain.
    pub(crate) fn with_cordoned_nodes_drained(self, drains_cordoned: bool) -> Self {
        self.lock().drains_cordoned = drains_cordoned;
        self
    }

    pub(crate) fn on_service(&self, event: Event<Service>) {
        for changed in self.apply(|index| index.apply_service(event)) {
            for owner in self.owners_of(&changed) {
                let fingerprint = changed.fingerprint.filter(|_| changed.owner.as_ref() == Some(&owner));
                // This process' own writes to a Service must not end a backoff.
                let reset = fingerprint.is_none() || fingerprint != self.applied.fingerprint(&owner);
                let request = ReconcileRequest { may_change: reset, ..ReconcileRequest::default() };
                self.requests.add(&owner, request, reset);
            }
        }
    }

    pub(crate) fn on_slice(&self, event: Event<EndpointSlice>) {
        let endpoints_changed = Some(Instant::now());
        for changed in self.apply(|index| index.apply_slice(event)) {
            let is_published = changed.is_published;
            let request = ReconcileRequest { endpoints_changed, is_published, ..ReconcileRequest::default() };
            for owner in self.owners_of(&changed) {
                self.requests.add(&owner, request, false);
            }
        }
    }

    pub(crate) fn on_pod(&self, event: Event<Pod>) {
        for changed in self.apply(|index| index.apply_pod(event)) {
            for owner in self.owners_of(&changed) {
                self.requests.add(&owner, ReconcileRequest::default(), false);
            }
        }
        self.pods_changed.notify_one();
    }

    /// Returns when a gated pod changed. For one listener.
    pub(crate) async fn pods_changed(&self) {
        self.pods_changed.notified().await;
    }

    pub(crate) fn on_node(&self, event: Event<Node>) {
        self.apply(|index| index.apply_node(event));
    }

    /// Applies one event, and returns the Services that it changed.
    fn apply(&self, apply: impl FnOnce(&mut Index)) -> Vec<ChangedService> {
        let mut inner = self.lock();
        apply(&mut inner.index);
        let dirty = inner.index.take_dirty();
        let changed = |key: Key| {
            let service = inner.index.service(&key);
            ChangedService {
                owner: service.map(owner_of),
                fingerprint: service.map(plan::fingerprint),
                is_ours: service.is_some_and(|service| self.is_ours(service)),
                is_published: service.is_some_and(|service| !service.ingress.is_empty()),
                key,
            }
        };
        let changed = dirty.services.into_iter().map(changed).collect();
        if !dirty.nodes.is_empty() {
            inner.nodes = None;
            inner.node_generation += 1;
            inner.changed_nodes.extend(dirty.nodes);
            self.requests.set_nodes_changed();
        }
        changed
    }

    /// The owner of the Service as it is, if this controller manages it, and owners of earlier Services of the same name.
    fn owners_of(&self, changed: &ChangedService) -> Vec<Owner> {
        let mut owners = self.applied.owners_of(&changed.key);
        let current =
            changed.owner.iter().filter(|owner| changed.is_ours && !owners.contains(owner)).cloned();
        owners.extend(current.collect::<Vec<_>>());
        owners
    }

    /// Whether this controller manages the Service, or has to clean up after it.
    fn is_ours(&self, service: &Service) -> bool {
        plan::is_managed(service, &self.classes) || !plan::owned_finalizers(service, &self.classes).is_empty()
    }

    /// The Service of this UID, with its endpoints and all nodes; `None` if it is gone.
    pub(crate) fn snapshot(&self, owner: &Owner, config: &plan::Config) -> Option<Snapshot> {
        let mut inner = self.lock();
        let nodes = inner.nodes();
        let index = &inner.index;
        let service = index.service(&owner.service).filter(|service| service.uid == owner.uid)?.clone();
        let slices = plan::slices_of_targets(&service, index.slices(&owner.service), config);
        let endpoints = EndpointSummary::new(slices.iter().copied());
        Some(Snapshot { service, endpoints, nodes })
    }

    /// Refuses addresses that belong to the cluster, but for those that the Service has published already.
    pub(crate) fn check_addresses(
        &self,
        service: &Service,
        mut addresses: impl Iterator<Item = IpAddr>,
    ) -> Result<(), PlanError> {
        let is_published = |address: IpAddr| service.ingress.iter().any(|found| found.ip == Some(address));
        let inner = self.lock();
        let held = addresses.find_map(|address| {
            let holder = plan::address_holder(address, &inner.index).filter(|_| !is_published(address))?;
            Some(PlanError::ClusterAddress { address, holder })
        });
        held.map_or(Ok(()), Err)
    }

    /// The pods that are targets of this Service, if pods are.
    pub(crate) fn pod_targets(&self, service: &Service, config: &plan::Config) -> PodTargets {
        plan::pod_targets(service, &self.lock().index, config)
    }

    /// Whether pods of this Service wait for their readiness gate.
    pub(crate) fn has_waiting_pods(&self, service: &Service, config: &plan::Config) -> bool {
        config.pod_readiness_gates
            && plan::may_have_pod_targets(service, config)
            && !plan::waiting_pods(service, &self.lock().index, config).is_empty()
    }

    /// All pods that wait for their readiness gate, by key.
    pub(crate) fn waiting_pods(&self, config: &plan::Config) -> BTreeMap<Key, WaitingPod> {
        let inner = self.lock();
        let index = &inner.index;
        let waiting = index.pods().filter(|pod| pod.is_waiting());
        let without =
            |pod: &Pod| WaitingPod { pod: pod.clone(), services: Vec::new(), may_have_service: false };
        let mut waiting: BTreeMap<Key, WaitingPod> =
            waiting.map(|pod| (pod.key.clone(), without(pod))).collect();
        if waiting.is_empty() {
            return waiting;
        }
        let namespaces: BTreeSet<String> = waiting.keys().map(|key| key.namespace().to_owned()).collect();
        let may_have = |service: &&Service| {
            namespaces.contains(service.key.namespace())
                && plan::is_managed(service, &self.classes)
                && plan::may_have_pod_targets(service, config)
        };
        for service in index.services().filter(may_have) {
            let near = waiting.values_mut().filter(|pod| pod.pod.key.namespace() == service.key.namespace());
            near.for_each(|pod| pod.may_have_service = true);
            for (key, (_, addresses)) in plan::waiting_pods(service, index, config) {
                if let Some(pod) = waiting.get_mut(key) {
                    pod.services.push((owner_of(service), addresses));
                }
            }
        }
        waiting
    }

    /// What changed about nodes since the last call, if anything did.
    pub(crate) fn take_node_change(&self) -> Option<NodeChange> {
        let mut inner = self.lock();
        let changed = std::mem::take(&mut inner.changed_nodes);
        if changed.is_empty() {
            return None;
        }
        let now = inner.nodes();
        let before = std::mem::replace(&mut inner.told, Arc::clone(&now));
        for (node, eligibility) in now.changed_eligibility(&before, &changed) {
            match eligibility {
                Ok(()) => tracing::info!(node, "node became eligible as a target"),
                Err(reason) => tracing::info!(node, %reason, "node became ineligible as a target"),
            }
        }
        Some(NodeChange::between(&before, &now, changed))
    }

    /// When the next removal from a shared set is no longer held.
    pub(crate) fn next_release(&self) -> Option<Instant> {
        self.lock().holds.values().filter_map(RemovalHold::next_release).min()
    }

    /// Requests that the shared sets are prepared again, if a removal is no longer held.
    pub(crate) fn release_removals(&self) {
        let mut inner = self.lock();
        let now = Instant::now();
        let is_due = |hold: &&RemovalHold| hold.next_release().is_some_and(|at| at <= now);
        let due = inner.holds.values().filter(is_due).flat_map(RemovalHold::held);
        let due: Vec<String> = due.map(str::to_owned).collect();
        if !due.is_empty() {
            inner.nodes = None;
            inner.node_generation += 1;
            inner.changed_nodes.extend(due);
            self.requests.set_nodes_changed();
        }
    }

    /// The nodes now.
    pub(crate) fn nodes(&self) -> Arc<NodeTargets> {
        self.lock().nodes()
    }

    /// The owners of all Services that this controller manages or has to clean up after.
    pub(crate) fn owners(&self) -> Vec<Owner> {
        self.lock().index.services().filter(|service| self.is_ours(service)).map(owner_of).collect()
    }

    /// Those of `owners` whose Service is not managed, and those whose Service is gone.
    pub(crate) fn unmanaged(&self, owners: &[Owner]) -> (Vec<Owner>, Vec<Owner>) {
        let inner = self.lock();
        let (mut unmanaged, mut gone) = (Vec::new(), Vec::new());
        for owner in owners {
            match inner.index.service(&owner.service).filter(|service| service.uid == owner.uid) {
                Some(service) if plan::is_managed(service, &self.classes) => {}
                Some(_) => unmanaged.push(owner.clone()),
                None => gone.push(owner.clone()),
            }
        }
        (unmanaged, gone)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn owner_of(service: &Service) -> Owner {
    Owner { service: service.key.clone(), uid: service.uid.clone() }
}

/// Keeps `cluster` current until shutdown. The process is not ready before the first lists are complete. Pods are watched only for
/// readiness gates.
pub(crate) fn follow(process: &Process, cluster: &Arc<ClusterIndex>, watches: &Watches, with_pods: bool) {
    follow_kind(process, "services", cluster, watches.services(), ClusterIndex::on_service);
    follow_kind(process, "endpointslices", cluster, watches.slices(), ClusterIndex::on_slice);
    follow_kind(process, "nodes", cluster, watches.nodes(), ClusterIndex::on_node);
    if with_pods {
        follow_kind(process, "pods", cluster, watches.pods(), ClusterIndex::on_pod);
    }
}

fn follow_kind<T: Object + Send + 'static>(
    process: &Process,
    name: &'static str,
    cluster: &Arc<ClusterIndex>,
    mut events: impl Stream<Item = Event<T>> + Send + Unpin + 'static,
    on_event: fn(&ClusterIndex, Event<T>),
) where
    T::Key: Send,
{
    let mut pending = Some(process.readiness().task(name));
    let cluster = Arc::clone(cluster);
    let stop = process.shutdown().clone();
    process.spawn(name, async move {
        loop {
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                event = events.next() => event,
            };
            let Some(event) = event else { anyhow::bail!("the watch of {name} ended") };
            let is_listed = matches!(event, Event::InitDone);
            on_event(&cluster, event);
            if let Some(pending) = pending.take_if(|_| is_listed) {
                pending.done();
            }
        }
    });
}

#[cfg(test)]
pub(crate) mod tests;

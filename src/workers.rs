// SPDX-License-Identifier: Apache-2.0
//! A bounded number of tasks that take requests out of the queue and reconcile them. Runs only while this process leads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use steerage_provider_api::{Owner, SharedSet};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::orphans::OrphanTracker;
use crate::queue::{ReconcileOutcome, Request as _, Which};
use crate::reconcile::Reconciler;
use crate::request_queue::{ReconcileRequest, RequestBatch, RequestQueue};

/// Wait before listing the provider's load balancers again after a failure.
const LIST_RETRY: Duration = Duration::from_secs(30);
/// Wait before a shared set is written again after a failure, or while targets are frozen.
const SET_RETRY: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerOptions {
    /// Tasks at a time.
    pub(crate) workers: usize,
    /// List the provider's load balancers about this often.
    pub(crate) resync_period: Duration,
    /// Delete a load balancer that only the provider's list names only if a second list names it after this time.
    pub(crate) orphan_grace_period: Duration,
}

/// Works until `stop`, then waits for the running tasks.
pub(crate) async fn run(
    reconciler: Arc<Reconciler>,
    requests: Arc<RequestQueue>,
    mut provider_changes: BoxStream<'static, Owner>,
    options: WorkerOptions,
    stop: CancellationToken,
) {
    let mut workers = Workers::new(Arc::clone(&reconciler), requests, options);
    workers.add_all();
    workers.add_sets();
    let mut resync_at = Instant::now();
    loop {
        workers.start_set_write();
        workers.start_tasks();
        let (due, list_at) = (workers.next_due(), workers.list_at);
        let release_at = workers.reconciler.cluster.next_release();
        tokio::select! {
            // In this order nothing starves: tasks that ended are few, and requests that were added are handled all at once.
            biased;
            () = stop.cancelled() => break,
            Some(ended) = workers.tasks.join_next_with_id() => workers.on_task_end(ended),
            () = workers.requests.changed() => workers.add_for_nodes(),
            calls = reconciler.provider.answered() => workers.requests.provider_answers(calls),
            Some(owner) = provider_changes.next() => workers.requests.add(&owner, ReconcileRequest::FULL, true),
            () = sleep_until(resync_at) => {
                workers.list();
                resync_at = Instant::now() + options.resync_period.mul_f64(0.8 + fastrand::f64() * 0.4);
            }
            () = sleep_until_some(list_at) => workers.list(),
            () = sleep_until_some(release_at) => workers.reconciler.cluster.release_removals(),
            () = sleep_until_some(due) => {}
        }
    }
    while workers.tasks.join_next().await.is_some() {}
}

async fn sleep_until_some(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

enum TaskResult {
    Reconciled(ReconcileOutcome<RequestBatch>),
    /// The owners of everything at the provider; `None` if the list failed.
    Owned(Option<Vec<Owner>>),
    /// A shared set was written, or is to be written again after a time.
    SetWritten(Option<Duration>),
}

struct Workers {
    requests: Arc<RequestQueue>,
    tasks: JoinSet<TaskResult>,
    /// The key and the requests of each task, so that those of a task that panicked are not lost.
    running: BTreeMap<Id, (String, RequestBatch)>,
    /// Shared sets to write, and when.
    sets: BTreeMap<SharedSet, Instant>,
    /// The running write of a shared set.
    set_write: Option<(Id, SharedSet)>,
    /// The task that lists the provider's load balancers.
    listing: Option<Id>,
    /// List them then, beside the resync: after a failure, or to look for an orphan again.
    list_at: Option<Instant>,
    orphans: OrphanTracker,
    reconciler: Arc<Reconciler>,
    options: WorkerOptions,
}

impl Workers {
    fn new(reconciler: Arc<Reconciler>, requests: Arc<RequestQueue>, options: WorkerOptions) -> Self {
        Self {
            requests,
            tasks: JoinSet::new(),
            running: BTreeMap::new(),
            sets: BTreeMap::new(),
            set_write: None,
            listing: None,
            list_at: None,
            orphans: OrphanTracker::new(options.orphan_grace_period),
            reconciler,
            options,
        }
    }

    /// Requests everything in full: a new leader knows nothing of what is in place.
    fn add_all(&self) {
        self.requests.clear();
        // The next change of nodes is one since now. Else it would be one from nothing, and concern every load balancer.
        drop(self.reconciler.cluster.take_node_change());
        for owner in self.reconciler.cluster.owners() {
            self.requests.add(&owner, ReconcileRequest::FULL, true);
        }
    }

    /// Requests all shared sets: nodes may have changed while nobody led, and the load balancers that use them may be paused.
    fn add_sets(&mut self) {
        if self.reconciler.config.capabilities.shared_sets {
            let now = Instant::now();
            self.sets.extend(SharedSet::ALL.map(|set| (set, now)));
        }
    }

    /// Requests what a change of nodes concerns: load balancers, and shared sets where the provider stores them.
    fn add_for_nodes(&mut self) {
        if !self.requests.take_nodes_changed() {
            return;
        }
        let Some(change) = self.reconciler.cluster.take_node_change() else { return };
        let shared_sets = self.reconciler.config.capabilities.shared_sets;
        for owner in self.reconciler.applied.concerned_by(&change, shared_sets) {
            let request = ReconcileRequest { nodes_changed: true, ..ReconcileRequest::default() };
            self.requests.add(&owner, request, false);
        }
        if shared_sets {
            let now = Instant::now();
            self.sets.extend(change.sets.into_iter().map(|set| (set, now)));
        }
    }

    /// Writes the shared sets that are due, one at a time: a write takes the newest nodes when it begins.
    fn start_set_write(&mut self) {
        let now = Instant::now();
        if self.set_write.is_some() {
            return;
        }
        let Some(set) = self.sets.iter().find(|(_, due)| **due <= now).map(|(set, _)| *set) else { return };
        self.sets.remove(&set);
        let reconciler = Arc::clone(&self.reconciler);
        let task = self.tasks.spawn(async move {
            let retry = match reconciler.set_shared(set).await {
                Some(Ok(())) => None,
                Some(Err(error)) => {
                    let retry_in = steerage_process::duration::display(SET_RETRY);
                    tracing::warn!(set = set.as_str(), %error, %retry_in, "shared set of targets not written; retrying");
                    Some(SET_RETRY)
                }
                None => Some(SET_RETRY),
            };
            TaskResult::SetWritten(retry)
        });
        self.set_write = Some((task.id(), set));
    }

    fn on_set_write_end(&mut self, retry: Option<Duration>) {
        if let (Some((_, set)), Some(after)) = (self.set_write.take(), retry) {
            self.sets.entry(set).or_insert(Instant::now() + after);
        }
    }

    fn start_tasks(&mut self) {
        while self.tasks.len() < self.options.workers
            && let Some((key, batch)) = self.requests.start_next(self.startable())
        {
            let (reconciler, requests) = (Arc::clone(&self.reconciler), batch.clone());
            let task =
                self.tasks.spawn(async move { TaskResult::Reconciled(reconcile(&reconciler, batch).await) });
            self.running.insert(task.id(), (key, requests));
        }
        let depth = i64::try_from(self.requests.depth()).unwrap_or(i64::MAX);
        self.reconciler.metrics.workqueue_depth.set(depth);
    }

    /// Some workers are left to requests of targets alone: the others may all wait for a cloud that takes no more changes, or does not
    /// answer them, while it would remove a dead node.
    fn startable(&self) -> Which {
        let others = self.running.values().filter(|(_, batch)| !batch.is_quick()).count();
        if others + self.options.workers / 4 < self.options.workers { Which::All } else { Which::Quick }
    }

    fn on_task_end(&mut self, ended: Result<(Id, TaskResult), JoinError>) {
        let (id, outcome) = match ended {
            Ok((_, TaskResult::Owned(owners))) => return self.on_listed(owners.as_deref()),
            Ok((_, TaskResult::SetWritten(retry))) => return self.on_set_write_end(retry),
            Err(error) if self.set_write.is_some_and(|(id, _)| id == error.id()) => {
                let set = self.set_write.map(|(_, set)| set.as_str());
                tracing::error!(set, %error, "task that writes a shared set panicked; retrying; report this as a bug");
                return self.on_set_write_end(Some(SET_RETRY));
            }
            Ok((id, TaskResult::Reconciled(outcome))) => (id, outcome),
            Err(error) if self.listing == Some(error.id()) => {
                tracing::error!(%error, "task panicked that lists the provider's load balancers; retrying; report this as a bug");
                return self.on_listed(None);
            }
            Err(error) => {
                let (key, mut requests) = self.running.get(&error.id()).cloned().unwrap_or_default();
                tracing::error!(key, %error, "reconcile task panicked; retrying after the backoff; report this as a bug");
                self.reconciler.metrics.reconciled("failed");
                // It may have changed anything, and what it knew is lost.
                requests.compare_all();
                (error.id(), ReconcileOutcome::Failed(None, requests))
            }
        };
        if let Some((key, _)) = self.running.remove(&id) {
            self.requests.finish(&key, outcome);
        }
    }

    /// Starts to list the provider's load balancers, unless a task does already. Each load balancer is compared on a schedule of its
    /// own.
    fn list(&mut self) {
        self.list_at = None;
        if self.listing.is_some() {
            return;
        }
        let reconciler = Arc::clone(&self.reconciler);
        let task = self.tasks.spawn(async move {
            match reconciler.provider.owned().await {
                Ok(owners) => TaskResult::Owned(Some(owners)),
                Err(error) => {
                    tracing::warn!(%error, retry_in = %steerage_process::duration::display(LIST_RETRY), "listing the provider's load balancers failed; retrying");
                    TaskResult::Owned(None)
                }
            }
        });
        self.listing = Some(task.id());
    }

    /// `owners`: those of everything at the provider; `None` if the list failed.
    fn on_listed(&mut self, owners: Option<&[Owner]>) {
        self.listing = None;
        let now = Instant::now();
        let Some(owners) = owners else {
            self.list_at = Some(now + LIST_RETRY);
            return;
        };
        let (unmanaged, gone) = self.reconciler.cluster.unmanaged(owners);
        // This process saw the Service, and so its end.
        let (known, orphans): (Vec<_>, Vec<_>) =
            gone.into_iter().partition(|owner| self.reconciler.applied.get(owner).is_some());
        let due = self.orphans.compare(orphans.into_iter().collect(), now);
        self.list_at = self.orphans.next_due(now);
        let found = i64::try_from(self.orphans.len()).unwrap_or(i64::MAX);
        self.reconciler.metrics.orphaned_load_balancers.set(found);
        for owner in unmanaged.iter().chain(&known).chain(&due) {
            let request = ReconcileRequest { exists_at_provider: true, ..ReconcileRequest::default() };
            self.requests.add(owner, request, false);
        }
    }

    /// When the next key is due, if a worker is free for it, or the next shared set.
    fn next_due(&self) -> Option<Instant> {
        let is_free = self.tasks.len() < self.options.workers;
        let request = is_free.then(|| self.requests.next_due(self.startable())).flatten();
        let set = self.sets.values().min().filter(|_| self.set_write.is_none()).copied();
        request.into_iter().chain(set).min()
    }
}

/// Reconciles all owners of a batch, one after the other.
async fn reconcile(reconciler: &Reconciler, batch: RequestBatch) -> ReconcileOutcome<RequestBatch> {
    let (mut rest, mut requeue, mut failed) =
        (RequestBatch::default(), None::<Duration>, None::<Option<Duration>>);
    // Whether all that failed did because the provider does not answer.
    let mut is_unanswered = true;
    for (owner, request) in batch.0 {
        let request = match reconciler.reconcile(&owner, &request).await {
            ReconcileOutcome::Done => continue,
            ReconcileOutcome::RequeueAfter(after, request) => {
                requeue = Some(requeue.map_or(after, |other| other.min(after)));
                request
            }
            ReconcileOutcome::Failed(after, request) => {
                is_unanswered = false;
                // The shortest wait that one asks for: another one's must not delay it.
                failed = Some(failed.flatten().into_iter().chain(after).min());
                request
            }
            ReconcileOutcome::Unanswered(request) => {
                failed = Some(failed.flatten());
                request
            }
        };
        rest.merge(RequestBatch([(owner, request)].into()));
    }
    match (failed, requeue) {
        (Some(_), _) if is_unanswered => ReconcileOutcome::Unanswered(rest),
        (Some(after), _) => ReconcileOutcome::Failed(after, rest),
        (None, Some(after)) => ReconcileOutcome::RequeueAfter(after, rest),
        (None, None) => ReconcileOutcome::Done,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use steerage_model::{Endpoint, EndpointSlice, Family, Ingress, Key, Service};
    use steerage_watch::{Backoff, Event};

    use super::*;
    use crate::applied::AppliedState;
    use crate::cluster_index::tests::service;
    use crate::reconcile::tests::{
        Polled, Silent, accepting, add_nodes, local_service, reconciler, silent_client,
    };

    fn owner(name: &str) -> Owner {
        Owner { service: Key::new("default", name), uid: name.to_owned() }
    }

    /// The owners whose deletion is requested.
    fn requested(requests: &RequestQueue) -> Vec<String> {
        let mut found: Vec<_> = std::iter::from_fn(|| requests.start_next(Which::All))
            .flat_map(|(_, RequestBatch(batch))| batch)
            .filter(|(_, request)| request.exists_at_provider)
            .map(|(owner, _)| owner.uid)
            .collect();
        found.sort();
        found
    }

    /// No list starts without the resync's timer, so it needs no provider.
    #[tokio::test]
    async fn only_an_orphan_that_this_process_never_knew_waits() {
        let reconciler = Arc::new(reconciler(Arc::new(Silent::default()), silent_client()));
        reconciler.applied.put(&owner("seen"), AppliedState::default());
        let mut deleting = Service { key: Key::new("default", "deleting"), ..service() };
        (deleting.uid, deleting.deleting) = ("deleting".to_owned(), true);
        reconciler.cluster.on_service(Event::Apply(deleting));

        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1));
        let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
        let grace = Duration::from_mins(10);
        let options = WorkerOptions { workers: 1, resync_period: grace, orphan_grace_period: grace };
        let mut workers = Workers::new(Arc::clone(&reconciler), Arc::clone(&requests), options);
        let managed = crate::cluster_index::owner_of(&service());
        let listed = [managed, owner("seen"), owner("deleting"), owner("unknown")];
        let before = Instant::now();
        workers.on_listed(Some(&listed));
        assert_eq!(requested(&requests), ["deleting", "seen"]);
        assert_eq!(reconciler.metrics.orphaned_load_balancers.get(), 1);
        assert!(workers.list_at.is_some_and(|at| at >= before + grace), "it is looked for again");

        workers.orphans = OrphanTracker::new(Duration::ZERO);
        workers.on_listed(Some(&listed[3..]));
        assert_eq!(requested(&requests), ["unknown"]);

        workers.on_listed(None);
        assert!(workers.list_at.is_some_and(|at| at < before + grace), "a failed list is repeated");
        assert_eq!(requested(&requests), [""; 0], "and nothing else");
    }

    /// Services change together with their endpoints, and the provider does not answer. Another one's endpoints wait for none of them.
    #[tokio::test(start_paused = true)]
    async fn changes_that_hang_leave_workers_to_targets() {
        let provider = Arc::new(Polled::default());
        let reconciler = Arc::new(reconciler(Arc::<Polled>::clone(&provider), accepting()));
        add_nodes(&reconciler, "ab");
        let (cluster, requests) = (&reconciler.cluster, reconciler.cluster.requests());
        let names = || (0..30).map(|number| format!("hanging-{number}")).chain(["other".to_owned()]);
        let apply = |name: &str, port| {
            let ingress = vec![Ingress { ip: "10.9.0.1".parse().ok(), hostname: None, ip_mode: None }];
            let mut service = Service { key: Key::new("default", name), ingress, ..local_service() };
            (service.uid, service.ports[0].port) = (name.to_owned(), port);
            cluster.on_service(Event::Apply(service));
        };
        let move_endpoint = |name: &str, node: &str| {
            let key = Key::new("default", name);
            let endpoints = vec![Endpoint::ready([10, 2, 0, 1].into(), node)];
            let slice = EndpointSlice::new(key.clone(), key, Family::V4);
            cluster.on_slice(Event::Apply(EndpointSlice { endpoints, ..slice }));
        };
        for name in names() {
            apply(&name, 80);
            move_endpoint(&name, "a");
        }
        let options = WorkerOptions {
            workers: 16,
            resync_period: Duration::from_hours(24),
            orphan_grace_period: Duration::from_mins(10),
        };
        let (changes, stop) = (futures::stream::pending().boxed(), CancellationToken::new());
        let running = tokio::spawn(run(Arc::clone(&reconciler), requests, changes, options, stop.clone()));
        tokio::time::sleep(Duration::from_mins(1)).await;
        provider.hangs.store(true, Ordering::Release);
        for name in names().take(30) {
            apply(&name, 81);
            move_endpoint(&name, "b");
        }
        for node in ["b", "a", "b"] {
            tokio::time::sleep(Duration::from_secs(9)).await;
            move_endpoint("other", node);
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(*provider.targets.lock().expect("lock"), node);
        }
        stop.cancel();
        running.abort();
    }
}

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

use crate::queue::{ReconcileOutcome, Request as _};
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
}

/// Works until `stop`, then waits for the running tasks.
pub(crate) async fn run(
    reconciler: Arc<Reconciler>,
    requests: Arc<RequestQueue>,
    mut provider_changes: BoxStream<'static, Owner>,
    options: WorkerOptions,
    stop: CancellationToken,
) {
    let mut workers = Workers {
        requests,
        tasks: JoinSet::new(),
        running: BTreeMap::new(),
        sets: BTreeMap::new(),
        set_write: None,
        reconciler,
        options,
    };
    workers.add_all();
    let mut list_at = Instant::now();
    loop {
        workers.start_set_write();
        workers.start_tasks();
        let due = workers.next_due();
        tokio::select! {
            () = stop.cancelled() => break,
            () = workers.requests.changed() => workers.add_for_nodes(),
            Some(owner) = provider_changes.next() => workers.requests.add(&owner, ReconcileRequest::FULL, true),
            Some(ended) = workers.tasks.join_next_with_id() => {
                if !workers.on_task_end(ended) {
                    list_at = list_at.min(Instant::now() + LIST_RETRY);
                }
            }
            () = sleep_until(list_at) => {
                workers.list_owned();
                list_at = Instant::now() + options.resync_period.mul_f64(0.8 + fastrand::f64() * 0.4);
            }
            () = async { match due { Some(due) => sleep_until(due).await, None => std::future::pending().await } } => {}
        }
    }
    while workers.tasks.join_next().await.is_some() {}
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
    reconciler: Arc<Reconciler>,
    options: WorkerOptions,
}

impl Workers {
    /// Requests everything in full: a new leader knows nothing of what is in place.
    fn add_all(&self) {
        self.requests.clear();
        for owner in self.reconciler.cluster.owners() {
            self.requests.add(&owner, ReconcileRequest::FULL, true);
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
            self.requests.add(&owner, ReconcileRequest::default(), false);
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
            && let Some((key, batch)) = self.requests.start_next()
        {
            let (reconciler, requests) = (Arc::clone(&self.reconciler), batch.clone());
            let task =
                self.tasks.spawn(async move { TaskResult::Reconciled(reconcile(&reconciler, batch).await) });
            self.running.insert(task.id(), (key, requests));
        }
        let depth = i64::try_from(self.requests.depth()).unwrap_or(i64::MAX);
        self.reconciler.metrics.workqueue_depth.set(depth);
    }

    /// `false` if the provider's load balancers could not be listed.
    fn on_task_end(&mut self, ended: Result<(Id, TaskResult), JoinError>) -> bool {
        let (id, outcome) = match ended {
            Ok((_, TaskResult::Owned(Some(owners)))) => {
                self.add_orphans(&owners);
                return true;
            }
            Ok((_, TaskResult::Owned(None))) => return false,
            Ok((_, TaskResult::SetWritten(retry))) => {
                self.on_set_write_end(retry);
                return true;
            }
            Err(error) if self.set_write.is_some_and(|(id, _)| id == error.id()) => {
                tracing::error!(%error, "task that writes a shared set panicked; retrying");
                self.on_set_write_end(Some(SET_RETRY));
                return true;
            }
            Ok((id, TaskResult::Reconciled(outcome))) => (id, outcome),
            Err(error) => {
                let (key, requests) = self.running.get(&error.id()).cloned().unwrap_or_default();
                tracing::error!(key, %error, "reconcile task panicked; retrying after the backoff");
                (error.id(), ReconcileOutcome::Failed(None, requests))
            }
        };
        if let Some((key, _)) = self.running.remove(&id) {
            self.requests.finish(&key, outcome);
        }
        true
    }

    /// Lists what exists at the provider. Each load balancer is compared on a schedule of its own.
    fn list_owned(&mut self) {
        let reconciler = Arc::clone(&self.reconciler);
        self.tasks.spawn(async move {
            match reconciler.provider.owned().await {
                Ok(owners) => TaskResult::Owned(Some(owners)),
                Err(error) => {
                    tracing::warn!(%error, retry_in = %steerage_process::duration::display(LIST_RETRY), "listing the provider's load balancers failed; retrying");
                    TaskResult::Owned(None)
                }
            }
        });
    }

    /// Requests the deletion of what the provider has for Services that are gone or not managed.
    fn add_orphans(&self, owners: &[Owner]) {
        for owner in self.reconciler.cluster.unmanaged(owners) {
            let request = ReconcileRequest { exists_at_provider: true, ..ReconcileRequest::default() };
            self.requests.add(&owner, request, false);
        }
    }

    /// When the next key is due, if a worker is free for it, or the next shared set.
    fn next_due(&self) -> Option<Instant> {
        let request = (self.tasks.len() < self.options.workers).then(|| self.requests.next_due()).flatten();
        let set = self.sets.values().min().filter(|_| self.set_write.is_none()).copied();
        request.into_iter().chain(set).min()
    }
}

/// Reconciles all owners of a batch, one after the other.
async fn reconcile(reconciler: &Reconciler, batch: RequestBatch) -> ReconcileOutcome<RequestBatch> {
    let (mut rest, mut requeue, mut failed) =
        (RequestBatch::default(), None::<Duration>, None::<Option<Duration>>);
    for (owner, request) in batch.0 {
        let request = match reconciler.reconcile(&owner, &request).await {
            ReconcileOutcome::Done => continue,
            ReconcileOutcome::RequeueAfter(after, request) => {
                requeue = Some(requeue.map_or(after, |other| other.min(after)));
                request
            }
            ReconcileOutcome::Failed(after, request) => {
                failed = Some(failed.flatten().max(after));
                request
            }
        };
        rest.merge(RequestBatch([(owner, request)].into()));
    }
    match (failed, requeue) {
        (Some(after), _) => ReconcileOutcome::Failed(after, rest),
        (None, Some(after)) => ReconcileOutcome::RequeueAfter(after, rest),
        (None, None) => ReconcileOutcome::Done,
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Drives the queue: what changed goes in, a bounded number of tasks take it out. Runs only under the Lease.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use steerage_provider_api::Owner;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::plan;
use crate::queue::{Backoff, Queue, QueueItem, TaskOutcome};
use crate::reconcile::{ReconcileRequest, Reconciler};

/// When to list again what the provider holds after that failed.
const RELIST: Duration = Duration::from_secs(30);

/// How the workers are set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerOptions {
    /// Tasks at a time.
    pub(crate) workers: usize,
    /// Waits after failures.
    pub(crate) backoff: Backoff,
    /// After about how long everything is compared once more.
    pub(crate) resync_period: Duration,
}

/// The work on one unit: all its owners that request a look.
#[derive(Clone, Debug, Default)]
struct RequestBatch(BTreeMap<Owner, ReconcileRequest>);

impl QueueItem for RequestBatch {
    fn merge(&mut self, other: Self) {
        for (owner, request) in other.0 {
            self.0.entry(owner).or_default().merge(request);
        }
    }

    fn urgent(&self) -> bool {
        self.0.values().any(QueueItem::urgent)
    }
}

/// Works until `stop`, then lets what is in hand end.
pub(crate) async fn work(
    reconciler: Arc<Reconciler>,
    mut provider_changes: BoxStream<'static, Owner>,
    options: WorkerOptions,
    stop: CancellationToken,
) {
    let mut workers = Workers {
        queue: Queue::new(options.backoff),
        tasks: JoinSet::new(),
        running: BTreeMap::new(),
        reconciler,
        options,
    };
    workers.start();
    let mut compare_at = Instant::now();
    loop {
        workers.take();
        let due = workers.due();
        tokio::select! {
            () = stop.cancelled() => break,
            () = workers.reconciler.cluster.changed() => workers.on_changes(),
            Some(owner) = provider_changes.next() => workers.add(&owner, ReconcileRequest { all: true, ..ReconcileRequest::default() }, true),
            Some(ended) = workers.tasks.join_next_with_id() => {
                if !workers.on_end(ended) {
                    compare_at = compare_at.min(Instant::now() + RELIST);
                }
            }
            () = sleep_until(compare_at) => {
                workers.compare();
                compare_at = Instant::now() + options.resync_period.mul_f64(0.8 + chance() * 0.4);
            }
            () = async { match due { Some(due) => sleep_until(due).await, None => std::future::pending().await } } => {}
        }
    }
    while workers.tasks.join_next().await.is_some() {}
}

/// What a task brings back.
enum TaskResult {
    /// The work on a unit.
    Unit(TaskOutcome<RequestBatch>),
    /// Who has something at the provider, if it could be listed.
    Owned(Option<Vec<Owner>>),
}

struct Workers {
    queue: Queue<RequestBatch>,
    tasks: JoinSet<TaskResult>,
    /// The units of the tasks, so that one that panicked is not lost.
    running: BTreeMap<tokio::task::Id, String>,
    reconciler: Arc<Reconciler>,
    options: WorkerOptions,
}

impl Workers {
    /// Everything that is known needs a look, for nothing is remembered.
    fn start(&mut self) {
        let _ = self.reconciler.cluster.take();
        let classes = &self.reconciler.config.classes;
        let owners: Vec<Owner> = self.reconciler.cluster.read(|index, _| {
            let ours = |s: &&steerage_model::Service| {
                plan::is_managed(s, classes) || !plan::owned_finalizers(s, classes).is_empty()
            };
            index.services().filter(ours).map(owner_of).collect()
        });
        for owner in owners {
            self.add(&owner, ReconcileRequest { all: true, ..ReconcileRequest::default() }, true);
        }
    }

    fn on_changes(&mut self) {
        let changes = self.reconciler.cluster.take();
        let reconciler = Arc::clone(&self.reconciler);
        let classes = &reconciler.config.classes;
        for (key, touched) in changes.services {
            let current = reconciler.cluster.read(|index, _| {
                let service = index.service(&key)?;
                let ours = plan::is_managed(service, classes)
                    || !plan::owned_finalizers(service, classes).is_empty();
                ours.then(|| owner_of(service))
            });
            let mut owners = reconciler.applied.owners_of(&key);
            owners.extend(current.filter(|owner| !owners.contains(owner)));
            for owner in owners {
                let fresh = touched.itself && self.is_fresh(&owner);
                self.add(
                    &owner,
                    ReconcileRequest { since: touched.endpoints, ..ReconcileRequest::default() },
                    fresh,
                );
            }
        }
        if changes.nodes {
            for owner in reconciler.applied.owners() {
                self.add(&owner, ReconcileRequest::default(), false);
            }
        }
    }

    /// Whether the Service now asks for something else than when it was last served: our own writes to it do not make it fresh.
    fn is_fresh(&self, owner: &Owner) -> bool {
        let wanted = self.reconciler.cluster.read(|index, _| {
            let service = index.service(&owner.service).filter(|service| service.uid == owner.uid)?;
            Some(plan::fingerprint(service))
        });
        let last = self.reconciler.applied.get(owner).and_then(|state| state.fingerprint);
        wanted.is_none() || wanted != last
    }

    fn add(&mut self, owner: &Owner, request: ReconcileRequest, fresh: bool) {
        let unit = self.reconciler.provider.serialization_key(owner);
        self.queue.add(&unit, RequestBatch([(owner.clone(), request)].into()), fresh, Instant::now());
        self.count();
    }

    fn take(&mut self) {
        while self.tasks.len() < self.options.workers
            && let Some((unit, work)) = self.queue.take(Instant::now())
        {
            let reconciler = Arc::clone(&self.reconciler);
            let task = self.tasks.spawn(async move { TaskResult::Unit(run(&reconciler, work).await) });
            self.running.insert(task.id(), unit);
        }
        self.count();
    }

    fn on_end(&mut self, ended: Result<(tokio::task::Id, TaskResult), tokio::task::JoinError>) -> bool {
        let (id, outcome) = match ended {
            Ok((_, TaskResult::Owned(Some(owners)))) => {
                self.look_for_orphans(&owners);
                return true;
            }
            Ok((_, TaskResult::Owned(None))) => return false,
            Ok((id, TaskResult::Unit(outcome))) => (id, outcome),
            Err(error) => {
                tracing::error!(%error, "a worker's task died");
                (error.id(), TaskOutcome::Failed(None, RequestBatch::default()))
            }
        };
        if let Some(unit) = self.running.remove(&id) {
            self.queue.finish(&unit, outcome, Instant::now(), chance());
        }
        true
    }

    /// Has everything compared, and what the provider holds listed.
    fn compare(&mut self) {
        for owner in self.reconciler.applied.owners() {
            self.add(&owner, ReconcileRequest { all: true, ..ReconcileRequest::default() }, false);
        }
        let reconciler = Arc::clone(&self.reconciler);
        self.tasks.spawn(async move {
            match reconciler.provider.owned().await {
                Ok(owners) => TaskResult::Owned(Some(owners)),
                Err(error) => {
                    tracing::warn!(%error, "cannot list what the provider holds, to be tried again");
                    TaskResult::Owned(None)
                }
            }
        });
    }

    /// What the provider holds for Services that are gone, or that should have nothing.
    fn look_for_orphans(&mut self, owners: &[Owner]) {
        let classes = &self.reconciler.config.classes;
        let orphans: Vec<Owner> = self.reconciler.cluster.read(|index, _| {
            let served = |owner: &Owner| {
                let service = index.service(&owner.service).filter(|service| service.uid == owner.uid);
                service.is_some_and(|service| plan::is_managed(service, classes))
            };
            owners.iter().filter(|owner| !served(owner)).cloned().collect()
        });
        for owner in orphans {
            self.add(&owner, ReconcileRequest { owned: true, ..ReconcileRequest::default() }, false);
        }
    }

    /// When there is something to take, if there is a worker free for it.
    fn due(&self) -> Option<Instant> {
        (self.tasks.len() < self.options.workers).then(|| self.queue.next_due()).flatten()
    }

    fn count(&self) {
        self.reconciler.metrics.queue.set(i64::try_from(self.queue.waiting()).unwrap_or(i64::MAX));
    }
}

/// Looks at all owners of a unit, one after the other.
async fn run(reconciler: &Reconciler, work: RequestBatch) -> TaskOutcome<RequestBatch> {
    let (mut rest, mut again, mut failed) =
        (RequestBatch::default(), None::<Duration>, None::<Option<Duration>>);
    for (owner, request) in work.0 {
        let left = match reconciler.reconcile(&owner, request).await {
            TaskOutcome::Done => continue,
            TaskOutcome::Again(after, request) => {
                again = Some(again.map_or(after, |other| other.min(after)));
                request
            }
            TaskOutcome::Failed(after, request) => {
                failed = Some(failed.flatten().max(after));
                request
            }
        };
        rest.merge(RequestBatch([(owner, left)].into()));
    }
    match (failed, again) {
        (Some(after), _) => TaskOutcome::Failed(after, rest),
        (None, Some(after)) => TaskOutcome::Again(after, rest),
        (None, None) => TaskOutcome::Done,
    }
}

fn owner_of(service: &steerage_model::Service) -> Owner {
    Owner { service: service.key.clone(), uid: service.uid.clone() }
}

/// A number from 0 to 1 by chance. The standard library's hashers are seeded by the system; nothing here needs more than that.
fn chance() -> f64 {
    let bits = RandomState::new().hash_one(0_u8) >> 32;
    f64::from(u32::try_from(bits).unwrap_or(u32::MAX)) / f64::from(u32::MAX)
}

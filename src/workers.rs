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
use crate::queue::{Backoff, Outcome, Queue, Work};
use crate::reconcile::{Need, Reconciler};

/// When to list again what the provider holds after that failed.
const RELIST: Duration = Duration::from_secs(30);

/// How the workers are set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Tasks at a time.
    pub(crate) workers: usize,
    /// Waits after failures.
    pub(crate) backoff: Backoff,
    /// After about how long everything is compared once more.
    pub(crate) resync_period: Duration,
}

/// The work on one unit: all its owners that need a look.
#[derive(Clone, Debug, Default)]
struct UnitWork(BTreeMap<Owner, Need>);

impl Work for UnitWork {
    fn merge(&mut self, other: Self) {
        for (owner, need) in other.0 {
            self.0.entry(owner).or_default().merge(need);
        }
    }

    fn urgent(&self) -> bool {
        self.0.values().any(Work::urgent)
    }
}

/// Works until `stop`, then lets what is in hand end.
pub(crate) async fn work(
    reconciler: Arc<Reconciler>,
    mut provider_changes: BoxStream<'static, Owner>,
    options: Options,
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
            () = workers.reconciler.world.changed() => workers.on_changes(),
            Some(owner) = provider_changes.next() => workers.add(&owner, Need { all: true, ..Need::default() }, true),
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
enum Ended {
    /// The work on a unit.
    Unit(Outcome<UnitWork>),
    /// Who has something at the provider, if it could be listed.
    Owned(Option<Vec<Owner>>),
}

struct Workers {
    queue: Queue<UnitWork>,
    tasks: JoinSet<Ended>,
    /// The units of the tasks, so that one that panicked is not lost.
    running: BTreeMap<tokio::task::Id, String>,
    reconciler: Arc<Reconciler>,
    options: Options,
}

impl Workers {
    /// Everything that is known needs a look, for nothing is remembered.
    fn start(&mut self) {
        let _ = self.reconciler.world.take();
        let classes = &self.reconciler.config.classes;
        let owners: Vec<Owner> = self.reconciler.world.read(|index, _| {
            let ours = |s: &&steerage_model::Service| {
                plan::wants(s, classes) || !plan::is_ours(s, classes).is_empty()
            };
            index.services().filter(ours).map(owner_of).collect()
        });
        for owner in owners {
            self.add(&owner, Need { all: true, ..Need::default() }, true);
        }
    }

    fn on_changes(&mut self) {
        let changes = self.reconciler.world.take();
        let reconciler = Arc::clone(&self.reconciler);
        let classes = &reconciler.config.classes;
        for (key, touched) in changes.services {
            let current = reconciler.world.read(|index, _| {
                let service = index.service(&key)?;
                let ours = plan::wants(service, classes) || !plan::is_ours(service, classes).is_empty();
                ours.then(|| owner_of(service))
            });
            let mut owners = reconciler.states.owners_of(&key);
            owners.extend(current.filter(|owner| !owners.contains(owner)));
            for owner in owners {
                let fresh = touched.itself && self.is_fresh(&owner);
                self.add(&owner, Need { since: touched.endpoints, ..Need::default() }, fresh);
            }
        }
        if changes.nodes {
            for owner in reconciler.states.owners() {
                self.add(&owner, Need::default(), false);
            }
        }
    }

    /// Whether the Service now asks for something else than when it was last served: our own writes to it do not make it fresh.
    fn is_fresh(&self, owner: &Owner) -> bool {
        let wanted = self.reconciler.world.read(|index, _| {
            let service = index.service(&owner.service).filter(|service| service.uid == owner.uid)?;
            Some(plan::fingerprint(service))
        });
        let last = self.reconciler.states.get(owner).and_then(|state| state.fingerprint);
        wanted.is_none() || wanted != last
    }

    fn add(&mut self, owner: &Owner, need: Need, fresh: bool) {
        let unit = self.reconciler.provider.serialization_key(owner);
        self.queue.add(&unit, UnitWork([(owner.clone(), need)].into()), fresh, Instant::now());
        self.count();
    }

    fn take(&mut self) {
        while self.tasks.len() < self.options.workers
            && let Some((unit, work)) = self.queue.take(Instant::now())
        {
            let reconciler = Arc::clone(&self.reconciler);
            let task = self.tasks.spawn(async move { Ended::Unit(run(&reconciler, work).await) });
            self.running.insert(task.id(), unit);
        }
        self.count();
    }

    fn on_end(&mut self, ended: Result<(tokio::task::Id, Ended), tokio::task::JoinError>) -> bool {
        let (id, outcome) = match ended {
            Ok((_, Ended::Owned(Some(owners)))) => {
                self.look_for_orphans(&owners);
                return true;
            }
            Ok((_, Ended::Owned(None))) => return false,
            Ok((id, Ended::Unit(outcome))) => (id, outcome),
            Err(error) => {
                tracing::error!(%error, "a worker's task died");
                (error.id(), Outcome::Failed(None, UnitWork::default()))
            }
        };
        if let Some(unit) = self.running.remove(&id) {
            self.queue.finish(&unit, outcome, Instant::now(), chance());
        }
        true
    }

    /// Has everything compared, and what the provider holds listed.
    fn compare(&mut self) {
        for owner in self.reconciler.states.owners() {
            self.add(&owner, Need { all: true, ..Need::default() }, false);
        }
        let reconciler = Arc::clone(&self.reconciler);
        self.tasks.spawn(async move {
            match reconciler.provider.owned().await {
                Ok(owners) => Ended::Owned(Some(owners)),
                Err(error) => {
                    tracing::warn!(%error, "cannot list what the provider holds, to be tried again");
                    Ended::Owned(None)
                }
            }
        });
    }

    /// What the provider holds for Services that are gone, or that should have nothing.
    fn look_for_orphans(&mut self, owners: &[Owner]) {
        let classes = &self.reconciler.config.classes;
        let orphans: Vec<Owner> = self.reconciler.world.read(|index, _| {
            let served = |owner: &Owner| {
                let service = index.service(&owner.service).filter(|service| service.uid == owner.uid);
                service.is_some_and(|service| plan::wants(service, classes))
            };
            owners.iter().filter(|owner| !served(owner)).cloned().collect()
        });
        for owner in orphans {
            self.add(&owner, Need { owned: true, ..Need::default() }, false);
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
async fn run(reconciler: &Reconciler, work: UnitWork) -> Outcome<UnitWork> {
    let (mut rest, mut again, mut failed) = (UnitWork::default(), None::<Duration>, None::<Option<Duration>>);
    for (owner, need) in work.0 {
        let left = match reconciler.look(&owner, need).await {
            Outcome::Done => continue,
            Outcome::Again(after, need) => {
                again = Some(again.map_or(after, |other| other.min(after)));
                need
            }
            Outcome::Failed(after, need) => {
                failed = Some(failed.flatten().max(after));
                need
            }
        };
        rest.merge(UnitWork([(owner, left)].into()));
    }
    match (failed, again) {
        (Some(after), _) => Outcome::Failed(after, rest),
        (None, Some(after)) => Outcome::Again(after, rest),
        (None, None) => Outcome::Done,
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

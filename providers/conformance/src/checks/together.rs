// SPDX-License-Identifier: Apache-2.0
//! Several Services at the same time, while calls are cut off.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use steerage_provider_api::{Compare, Error, GroupTargets, LoadBalancer, Owner, Progress, Provider};

use super::orders::wish;
use crate::converge::{converge, converge_without_comparison, ensure_same, owned};
use crate::{CutPoint, Fault, Harness, Span, fixture};

/// Services that change at the same time.
const SERVICES: usize = 3;
/// What is wanted of each, one after the other, by one process and by the next.
const WISHES: usize = 3;
/// Calls for one wish: fewer than some need, so that the next wish finds the last one half done.
const CALLS: usize = 5;

/// Services that come, change and go at the same time do not disturb each other, whatever is cut off: each ends as it is wanted, none of
/// its groups loses its last target on the way, and nothing of them is left. What they share in the cloud, and what the provider
/// remembers of that, is under test.
pub async fn services_do_not_disturb_each_other<H: Harness>(harness: &H) -> anyhow::Result<()> {
    for seed in 0..harness.seeds() {
        world(harness, seed).await.with_context(|| format!("seed {seed}"))?;
    }
    Ok(())
}

async fn world<H: Harness>(harness: &H, seed: u64) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let mut random = fastrand::Rng::with_seed(seed);
    let names = (0..SERVICES).map(|index| format!("together-{index}"));
    let mut services: Vec<Service> =
        names.map(|name| Service::new(fixture::owner(&name, 1), random.fork())).collect();
    for _process in 0..2 {
        let provider = harness.fresh().await?;
        harness.proxy().reset();
        for _ in 0..3 {
            let point = if random.bool() { CutPoint::Before } else { CutPoint::After };
            harness.proxy().inject(random.usize(1..60), Span::Once, Fault::Cut(point));
        }
        try_join_all(services.iter_mut().map(|service| service.live(harness, &provider))).await?;
    }
    harness.proxy().reset();
    let provider = harness.fresh().await?;
    try_join_all(services.iter_mut().map(|service| service.settle(harness, &provider))).await?;

    // A process that knows nothing finds nothing to do.
    harness.proxy().reset();
    let another = harness.fresh().await?;
    let wanted: Vec<&LoadBalancer> = services.iter().filter_map(|service| service.wanted.as_ref()).collect();
    try_join_all(wanted.iter().map(|lb| converge(&another, lb))).await?;
    let writes = harness.proxy().writes();
    ensure!(
        writes.is_empty(),
        "another process wrote {:?}",
        writes.iter().map(|call| &call.name).collect::<Vec<_>>()
    );
    let mut owners: Vec<Owner> = wanted.iter().map(|lb| lb.owner.clone()).collect();
    owners.sort();
    let found = owned(harness).await?;
    ensure!(found == owners, "owned() is {found:?}, not {owners:?}");

    try_join_all(owners.iter().map(|owner| crate::converge_deleted(&another, owner))).await?;
    ensure_same("all deleted", &empty, &harness.snapshot().await?)
}

struct Service {
    owner: Owner,
    random: fastrand::Rng,
    wanted: Option<LoadBalancer>,
    /// The groups in use that had targets when all was done last.
    served: BTreeSet<String>,
    history: Vec<String>,
}

impl Service {
    fn new(owner: Owner, random: fastrand::Rng) -> Self {
        Self { owner, random, wanted: None, served: BTreeSet::new(), history: Vec::new() }
    }

    async fn live<H: Harness>(&mut self, harness: &H, provider: &H::Provider) -> anyhow::Result<()> {
        for _ in 0..WISHES {
            let wanted = (self.random.u8(0..5) > 0).then(|| wish(harness, &mut self.random, &self.owner));
            let has_structure =
                |one: &LoadBalancer| wanted.as_ref().is_some_and(|other| one.has_structure_of(other));
            if !self.wanted.as_ref().is_some_and(has_structure) {
                // Groups that are not used any more go, and may be emptied before.
                self.served.clear();
            }
            self.wanted = wanted;
            for _ in 0..CALLS {
                let is_done = self.call(provider).await.with_context(|| self.story())?;
                self.look(harness, is_done).await.with_context(|| self.story())?;
                if is_done {
                    break;
                }
            }
        }
        Ok(())
    }

    /// One call. True if it is all that is needed.
    async fn call(&mut self, provider: &impl Provider) -> anyhow::Result<bool> {
        let (name, result) = match &mut self.wanted {
            None => ("delete", provider.delete(&self.owner).await.map(|progress| progress == Progress::Done)),
            Some(lb) => match self.random.u8(0..4) {
                0 => {
                    let targets = GroupTargets::of_nodes(lb.nodes());
                    ("set_targets", provider.set_targets(&self.owner, &targets).await.map(|_| false))
                }
                some => {
                    let compare = if some == 1 { Compare::InPlace } else { Compare::Remembered };
                    let result = provider.apply(lb, compare).await;
                    ("apply", result.map(|outcome| outcome.progress == Progress::Done))
                }
            },
        };
        match result {
            Ok(is_done) => {
                self.history.push(format!("{name}{}", if is_done { ", done" } else { "" }));
                Ok(is_done)
            }
            Err(Error::Unavailable(_) | Error::Conflict(_) | Error::Busy(_) | Error::Throttled { .. }) => {
                self.history.push(format!("{name}, failed"));
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// No group in use has lost its last target.
    async fn look<H: Harness>(&mut self, harness: &H, is_done: bool) -> anyhow::Result<()> {
        for (group, targets) in harness.targets(&self.owner).await? {
            if targets.is_empty() {
                ensure!(!self.served.contains(&group), "{group} has no targets any more");
            } else if is_done {
                self.served.insert(group);
            }
        }
        Ok(())
    }

    async fn settle<H: Harness>(&mut self, harness: &H, provider: &H::Provider) -> anyhow::Result<()> {
        let Some(lb) = &self.wanted else {
            return crate::converge_deleted(provider, &self.owner).await.with_context(|| self.story());
        };
        converge_without_comparison(provider, lb).await.with_context(|| self.story())?;
        let wanted: BTreeSet<String> = lb.nodes().targets.iter().map(|target| target.node.clone()).collect();
        for (group, targets) in harness.targets(&self.owner).await? {
            ensure!(targets == wanted, "{group} of {} has {targets:?}, not {wanted:?}", self.story());
        }
        Ok(())
    }

    fn story(&self) -> String {
        format!("{}: {}", self.owner.service, self.history.join("; "))
    }
}

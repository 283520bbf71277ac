// SPDX-License-Identifier: Apache-2.0
//! Drives a provider to a goal as the controller does: calls it until it reports that it is done.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use steerage_provider_api::{
    AdmittedSources, Compare, Error, GroupTargets, LoadBalancer, Outcome, Owner, Progress, Provider,
    RequestedSources, TargetSet,
};

use crate::{Harness, Snapshot};

/// Number of calls before the suite gives up.
const ROUNDS: usize = 1000;
/// Wait between two calls, even if the provider asks for more.
const PAUSE: Duration = Duration::from_millis(20);
/// Allowed conflicts in a row, which occur while writes of another instance are not visible yet: for some seconds, if a busy machine
/// delays a watch.
const CONFLICTS: usize = 500;

/// Calls `apply` until it is done, each time with a comparison of what is in place. An error of the provider is the root of the
/// returned error.
pub async fn converge(provider: &impl Provider, lb: &LoadBalancer) -> anyhow::Result<Outcome> {
    converge_from(provider, lb, Compare::InPlace, Compare::InPlace).await
}

/// Like [`converge`], but the first call relies on what the provider remembers, as the controller's does when something changed.
pub async fn converge_remembered(provider: &impl Provider, lb: &LoadBalancer) -> anyhow::Result<Outcome> {
    converge_from(provider, lb, Compare::Remembered, Compare::InPlace).await
}

/// Like [`converge`], but no call asks for a comparison, as none of the controller's does between two resyncs: what the provider cannot be
/// sure of, it must not remember. Calls failed before, so the provider may still wait with a part, and may say so with the earlier error.
pub(crate) async fn converge_without_comparison(
    provider: &impl Provider,
    lb: &LoadBalancer,
) -> anyhow::Result<Outcome> {
    let mut failures = 0;
    loop {
        match converge_from(provider, lb, Compare::Remembered, Compare::Remembered).await {
            Err(error)
                if failures < CONFLICTS
                    && matches!(
                        error.downcast_ref(),
                        Some(Error::Unavailable(_) | Error::Throttled { .. })
                    ) =>
            {
                failures += 1;
                tokio::time::sleep(PAUSE).await;
            }
            result => return result,
        }
    }
}

async fn converge_from(
    provider: &impl Provider,
    lb: &LoadBalancer,
    first: Compare,
    others: Compare,
) -> anyhow::Result<Outcome> {
    let mut compare = first;
    let mut conflicts = 0;
    for _ in 0..ROUNDS {
        match provider.apply(lb, compare).await {
            Ok(outcome) if outcome.progress == Progress::Done => return Ok(outcome),
            Ok(_) => conflicts = 0,
            Err(Error::Conflict(_) | Error::Busy(_)) if conflicts < CONFLICTS => conflicts += 1,
            Err(error) => return Err(error.into()),
        }
        compare = others;
        tokio::time::sleep(PAUSE).await;
    }
    anyhow::bail!("{}: not done after {ROUNDS} rounds", lb.owner)
}

/// Calls `delete` until it is done.
pub async fn converge_deleted(provider: &impl Provider, owner: &Owner) -> anyhow::Result<()> {
    let mut conflicts = 0;
    for _ in 0..ROUNDS {
        match provider.delete(owner).await {
            Ok(Progress::Done) => return Ok(()),
            Ok(Progress::Again(_)) => conflicts = 0,
            Err(Error::Conflict(_) | Error::Busy(_)) if conflicts < CONFLICTS => conflicts += 1,
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(PAUSE).await;
    }
    anyhow::bail!("{owner}: not deleted after {ROUNDS} rounds")
}

/// Calls `set_targets` until it is done.
pub(crate) async fn converge_targets(
    provider: &impl Provider,
    owner: &Owner,
    targets: &GroupTargets,
) -> anyhow::Result<Outcome> {
    for _ in 0..ROUNDS {
        let outcome = provider.set_targets(owner, targets).await?;
        if outcome.progress == Progress::Done {
            return Ok(outcome);
        }
        tokio::time::sleep(PAUSE).await;
    }
    anyhow::bail!("{owner}: targets not set after {ROUNDS} rounds")
}

/// Calls `restrict_sources` until it is done. A provider that needs several changes, one after the other, is busy meanwhile.
pub(crate) async fn converge_restricted(
    provider: &impl Provider,
    owner: &Owner,
    requested: &RequestedSources,
) -> anyhow::Result<Option<AdmittedSources>> {
    for _ in 0..CONFLICTS {
        match provider.restrict_sources(owner, requested).await {
            Err(Error::Conflict(_) | Error::Busy(_)) => tokio::time::sleep(PAUSE).await,
            other => return Ok(other?),
        }
    }
    anyhow::bail!("{owner}: sources not restricted after {CONFLICTS} rounds")
}

/// A state to reach.
#[derive(Clone, Debug)]
pub(crate) enum Goal {
    /// The load balancer exists with its targets.
    Present(Box<LoadBalancer>),
    /// The owner has no objects.
    Absent(Owner),
}

impl Goal {
    pub(crate) fn present(lb: LoadBalancer, targets: TargetSet) -> Self {
        Self::Present(Box::new(lb.with_nodes(targets)))
    }

    pub(crate) fn owner(&self) -> &Owner {
        match self {
            Self::Present(lb) => &lb.owner,
            Self::Absent(owner) => owner,
        }
    }

    pub(crate) async fn reach(&self, provider: &impl Provider) -> anyhow::Result<()> {
        match self {
            Self::Present(lb) => converge_remembered(provider, lb).await.map(drop),
            Self::Absent(owner) => converge_deleted(provider, owner).await,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Present(lb) => write!(f, "{} with {} listeners", lb.owner, lb.listeners.len()),
            Self::Absent(owner) => write!(f, "no {owner}"),
        }
    }
}

/// The owners that a fresh instance finds, sorted.
pub(crate) async fn owned<H: Harness>(harness: &H) -> anyhow::Result<Vec<Owner>> {
    let mut owned = harness.fresh().await?.owned().await.context("owned")?;
    owned.sort();
    Ok(owned)
}

/// Deletes all objects of the suite, without faults.
pub(crate) async fn clean<H: Harness>(harness: &H) -> anyhow::Result<()> {
    harness.proxy().reset();
    harness.remove_foreign().await.context("remove the foreign objects")?;
    let provider = harness.fresh().await?;
    for owner in provider.owned().await? {
        converge_deleted(&provider, &owner).await?;
    }
    Ok(())
}

/// Returns an error with the difference if the snapshots differ.
pub(crate) fn ensure_same(what: &str, expected: &Snapshot, got: &Snapshot) -> anyhow::Result<()> {
    let names: BTreeSet<&String> = expected.keys().chain(got.keys()).collect();
    let mut differences = String::new();
    for name in names {
        let line = match (expected.get(name), got.get(name)) {
            (a, b) if a == b => continue,
            (Some(_), None) => format!("\n    missing: {name}"),
            (None, _) => format!("\n    unexpected: {name}"),
            (Some(a), Some(b)) => format!("\n    {name}:\n      expected {a}\n      got      {b}"),
        };
        differences.push_str(&line);
    }
    ensure!(differences.is_empty(), "{what}: the backend differs:{differences}");
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Drives a provider to a goal as the controller does: again and again, until it says that it is done.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use steerage_model::Ingress;
use steerage_provider_api::{Error, LoadBalancer, Owner, Progress, Provider, SetTargetsOutcome, TargetSet};

use crate::{Harness, Snapshot};

/// How often a provider may ask to be called again before the suite gives up.
const ROUNDS: usize = 200;
/// The suite does not wait longer than this, whatever the provider asks for.
const PAUSE: Duration = Duration::from_millis(20);
/// How many conflicts in a row may come of another instance's writes that are seen late.
const CONFLICTS: usize = 20;

/// Calls `ensure` and `set_targets` until both are done. The provider's own error is at the root of the one returned.
pub async fn converge(
    provider: &impl Provider,
    lb: &LoadBalancer,
    set: &TargetSet,
) -> anyhow::Result<(Vec<Ingress>, SetTargetsOutcome)> {
    let mut conflicts = 0;
    for _ in 0..ROUNDS {
        match round(provider, lb, set).await {
            Ok((ingress, targets, true)) => return Ok((ingress, targets)),
            Ok(_) => conflicts = 0,
            Err(Error::Conflict(_)) if conflicts < CONFLICTS => conflicts += 1,
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(PAUSE).await;
    }
    anyhow::bail!("{}: not done after {ROUNDS} rounds", lb.owner)
}

async fn round(
    provider: &impl Provider,
    lb: &LoadBalancer,
    set: &TargetSet,
) -> Result<(Vec<Ingress>, SetTargetsOutcome, bool), Error> {
    let ensured = provider.ensure(lb).await?;
    let targets = provider.set_targets(lb, set).await?;
    let done = ensured.progress == Progress::Done && targets.progress == Progress::Done;
    Ok((ensured.ingress, targets, done))
}

/// Calls `delete` until it is done.
pub async fn converge_deleted(provider: &impl Provider, owner: &Owner) -> anyhow::Result<()> {
    let mut conflicts = 0;
    for _ in 0..ROUNDS {
        match provider.delete(owner).await {
            Ok(Progress::Done) => return Ok(()),
            Ok(Progress::Again(_)) => conflicts = 0,
            Err(Error::Conflict(_)) if conflicts < CONFLICTS => conflicts += 1,
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(PAUSE).await;
    }
    anyhow::bail!("{owner}: not deleted after {ROUNDS} rounds")
}

/// A state to be reached.
#[derive(Clone, Debug)]
pub(crate) enum Goal {
    /// This load balancer with these targets.
    Made(Box<LoadBalancer>, TargetSet),
    /// Nothing of this owner.
    Gone(Owner),
}

impl Goal {
    pub(crate) fn made(lb: LoadBalancer, set: TargetSet) -> Self {
        Self::Made(Box::new(lb), set)
    }

    pub(crate) fn owner(&self) -> &Owner {
        match self {
            Self::Made(lb, _) => &lb.owner,
            Self::Gone(owner) => owner,
        }
    }

    pub(crate) async fn reach(&self, provider: &impl Provider) -> anyhow::Result<()> {
        match self {
            Self::Made(lb, set) => converge(provider, lb, set).await.map(drop),
            Self::Gone(owner) => converge_deleted(provider, owner).await,
        }
    }
}

/// The owners that a fresh instance finds, sorted.
pub(crate) async fn owned<H: Harness>(harness: &H) -> anyhow::Result<Vec<Owner>> {
    let mut owned = harness.fresh().await?.owned().await.context("owned")?;
    owned.sort();
    Ok(owned)
}

/// Deletes everything of the suite, with a healthy proxy.
pub(crate) async fn clean<H: Harness>(harness: &H) -> anyhow::Result<()> {
    harness.proxy().reset();
    harness.remove_foreign().await.context("remove the foreign objects")?;
    let provider = harness.fresh().await?;
    for owner in provider.owned().await? {
        converge_deleted(&provider, &owner).await?;
    }
    Ok(())
}

/// Fails with the difference unless two snapshots are equal.
pub(crate) fn same(what: &str, expected: &Snapshot, got: &Snapshot) -> anyhow::Result<()> {
    let names: BTreeSet<&String> = expected.keys().chain(got.keys()).collect();
    let mut differences = String::new();
    for name in names {
        let line = match (expected.get(name), got.get(name)) {
            (a, b) if a == b => continue,
            (Some(_), None) => format!("\n    missing: {name}"),
            (None, _) => format!("\n    too much: {name}"),
            (Some(a), Some(b)) => format!("\n    {name}:\n      expected {a}\n      got      {b}"),
        };
        differences.push_str(&line);
    }
    ensure!(differences.is_empty(), "{what}: the backend differs:{differences}");
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Deleting what is there, what is not there, and what never was.

use anyhow::ensure;

use super::steady::nothing_written;
use crate::converge::{Goal, owned, same};
use crate::{Harness, fixture};

/// Deleting takes all away and nothing else, and doing it again, or for nobody, writes nothing.
pub async fn deletion_is_idempotent<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let (owner, neighbour) = (fixture::owner("deleted", 1), fixture::owner("neighbour", 1));
    let provider = harness.fresh().await?;
    harness.proxy().reset();
    Goal::Gone(owner.clone()).reach(&provider).await?;
    nothing_written("deleting nothing", &harness.proxy().calls())?;

    let set = fixture::targets(harness, &[0, 1]);
    Goal::made(fixture::first(harness, &neighbour), set.clone()).reach(&provider).await?;
    let before = harness.snapshot().await?;
    Goal::made(fixture::first(harness, &owner), set).reach(&provider).await?;
    Goal::Gone(owner.clone()).reach(&provider).await?;
    same("beside a neighbour", &before, &harness.snapshot().await?)?;

    for instance in [provider, harness.fresh().await?] {
        harness.proxy().reset();
        Goal::Gone(owner.clone()).reach(&instance).await?;
        nothing_written("deleting again", &harness.proxy().calls())?;
    }
    let found = owned(harness).await?;
    ensure!(found == [neighbour.clone()], "owned() is {found:?} after the deletion");
    Goal::Gone(neighbour).reach(&harness.fresh().await?).await?;
    same("at the end", &empty, &harness.snapshot().await?)
}

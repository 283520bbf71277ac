// SPDX-License-Identifier: Apache-2.0
//! Deletion of existing, deleted and never created load balancers.

use anyhow::ensure;

use super::steady::ensure_no_writes;
use crate::converge::{Goal, ensure_same, owned};
use crate::{Harness, fixture};

/// Deletion removes all objects of the owner and no others. A repeated deletion writes nothing.
pub async fn deletion_is_idempotent<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let (owner, neighbour) = (fixture::owner("deleted", 1), fixture::owner("neighbour", 1));
    let provider = harness.fresh().await?;
    harness.proxy().reset();
    Goal::Absent(owner.clone()).reach(&provider).await?;
    ensure_no_writes("deleting nothing", &harness.proxy().calls())?;

    let set = fixture::targets(harness, &[0, 1]);
    Goal::present(fixture::first(harness, &neighbour), set.clone()).reach(&provider).await?;
    let before = harness.snapshot().await?;
    Goal::present(fixture::first(harness, &owner), set).reach(&provider).await?;
    Goal::Absent(owner.clone()).reach(&provider).await?;
    ensure_same("beside a neighbour", &before, &harness.snapshot().await?)?;

    for instance in [provider, harness.fresh().await?] {
        harness.proxy().reset();
        Goal::Absent(owner.clone()).reach(&instance).await?;
        ensure_no_writes("deleting again", &harness.proxy().calls())?;
    }
    let found = owned(harness).await?;
    ensure!(found == [neighbour.clone()], "owned() is {found:?} after the deletion");
    Goal::Absent(neighbour).reach(&harness.fresh().await?).await?;
    ensure_same("at the end", &empty, &harness.snapshot().await?)
}

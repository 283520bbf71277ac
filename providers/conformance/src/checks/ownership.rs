// SPDX-License-Identifier: Apache-2.0
//! Whose is what, told by UID.

use anyhow::{Context as _, ensure};

use crate::converge::{Goal, owned, same};
use crate::{Harness, When, converge_deleted, fixture};

/// `owned()` lists everybody who has anything, also something half made, and nobody else.
pub async fn owned_lists_exactly<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    let mut owners: Vec<_> = ["owned-a", "owned-b", "owned-c"].iter().map(|n| fixture::owner(n, 1)).collect();
    for owner in &owners {
        let found = owned(harness).await?;
        ensure!(!found.contains(owner), "owned() lists {owner} before anything was made");
        let made = Goal::made(fixture::first(harness, owner), fixture::targets(harness, &[0]));
        made.reach(&provider).await?;
    }
    half_made(harness).await?;
    while let Some(owner) = owners.first().cloned() {
        let found = owned(harness).await?;
        ensure!(found == owners, "owned() is {found:?}, not {owners:?}");
        converge_deleted(&provider, &owner).await?;
        owners.remove(0);
    }
    ensure!(owned(harness).await?.is_empty(), "owned() lists what was deleted");
    same("at the end", &empty, &harness.snapshot().await?)
}

/// After every number of calls: who has left something in the backend is found, and what is found can be deleted.
async fn half_made<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("owned-half", 1);
    let made = Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0]));
    let before = harness.snapshot().await?;
    for call in 1.. {
        harness.proxy().reset();
        harness.proxy().crash_at(call, When::After);
        let _ = made.reach(&harness.fresh().await?).await;
        let struck = harness.proxy().struck();
        harness.proxy().reset();
        let left = harness.snapshot().await? != before;
        let found = owned(harness).await?.contains(&owner);
        ensure!(found || !left, "crashed after call {call}: something is left, but owned() does not list it");
        converge_deleted(&harness.fresh().await?, &owner).await?;
        same(&format!("crashed after call {call} and deleted"), &before, &harness.snapshot().await?)?;
        if !struck {
            break;
        }
    }
    Ok(())
}

/// A Service deleted and made anew under the same name has another UID: making its load balancer takes away the old one's,
/// and a late deletion of the old one does not touch the new.
pub async fn a_remade_service_leaves_nothing_of_the_old<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let (old, new) = (fixture::owner("remade", 1), fixture::owner("remade", 2));
    let set = fixture::targets(harness, &[0, 1]);
    let goal = Goal::made(fixture::first(harness, &new), set.clone());
    goal.reach(&harness.fresh().await?).await?;
    let alone = harness.snapshot().await?;
    Goal::Gone(new.clone()).reach(&harness.fresh().await?).await?;

    let provider = harness.fresh().await?;
    Goal::made(fixture::second(harness, &old), set).reach(&provider).await?;
    goal.reach(&provider).await.context("made anew")?;
    same("made anew", &alone, &harness.snapshot().await?)?;
    let found = owned(harness).await?;
    ensure!(found == [new.clone()], "owned() is {found:?}, not the new one alone");

    for instance in [provider, harness.fresh().await?] {
        converge_deleted(&instance, &old).await.context("a late deletion of the old one")?;
        same("the old one deleted late", &alone, &harness.snapshot().await?)?;
        goal.reach(&instance).await?;
    }
    Goal::Gone(new).reach(&harness.fresh().await?).await?;
    same("at the end", &empty, &harness.snapshot().await?)
}

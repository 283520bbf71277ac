// SPDX-License-Identifier: Apache-2.0
//! Ownership by UID.

use anyhow::{Context as _, ensure};

use crate::converge::{Goal, ensure_same, owned};
use crate::{CutPoint, Harness, converge_deleted, fixture};

/// `owned()` lists exactly the owners of objects, including incomplete ones.
pub async fn owned_lists_all_owners<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    let mut owners: Vec<_> = ["owned-a", "owned-b", "owned-c"].iter().map(|n| fixture::owner(n, 1)).collect();
    for owner in &owners {
        let found = owned(harness).await?;
        ensure!(!found.contains(owner), "owned() lists {owner} before anything was created");
        let made = Goal::present(fixture::first(harness, owner), fixture::targets(harness, &[0]));
        made.reach(&provider).await?;
    }
    partial_owners_are_listed(harness).await?;
    while let Some(owner) = owners.first().cloned() {
        let found = owned(harness).await?;
        ensure!(found == owners, "owned() is {found:?}, not {owners:?}");
        converge_deleted(&provider, &owner).await?;
        owners.remove(0);
    }
    ensure!(owned(harness).await?.is_empty(), "owned() lists a deleted owner");
    ensure_same("at the end", &empty, &harness.snapshot().await?)
}

/// After a crash at any write, an owner with objects is listed, and its objects can be deleted.
async fn partial_owners_are_listed<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("owned-half", 1);
    let made = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0]));
    let before = harness.snapshot().await?;
    for write in 1.. {
        harness.proxy().reset();
        harness.proxy().crash_at_write(write, CutPoint::After);
        let _ = made.reach(&harness.fresh().await?).await;
        let fault_fired = harness.proxy().fault_fired();
        harness.proxy().reset();
        let left = harness.snapshot().await? != before;
        let found = owned(harness).await?.contains(&owner);
        ensure!(
            found || !left,
            "crashed after write {write}: objects exist, but owned() does not list the owner"
        );
        converge_deleted(&harness.fresh().await?, &owner).await?;
        ensure_same(
            &format!("crashed after write {write} and deleted"),
            &before,
            &harness.snapshot().await?,
        )?;
        if !fault_fired {
            break;
        }
    }
    Ok(())
}

/// A re-created Service has another UID. Its load balancer replaces the old one, and a late deletion of the old one does not
/// change the new one.
pub async fn recreated_service_replaces_old_resources<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let (old, new) = (fixture::owner("remade", 1), fixture::owner("remade", 2));
    let set = fixture::targets(harness, &[0, 1]);
    let goal = Goal::present(fixture::first(harness, &new), set.clone());
    goal.reach(&harness.fresh().await?).await?;
    let alone = harness.snapshot().await?;
    Goal::Absent(new.clone()).reach(&harness.fresh().await?).await?;

    let provider = harness.fresh().await?;
    Goal::present(fixture::second(harness, &old), set).reach(&provider).await?;
    goal.reach(&provider).await.context("re-created")?;
    ensure_same("re-created", &alone, &harness.snapshot().await?)?;
    let found = owned(harness).await?;
    ensure!(found == [new.clone()], "owned() is {found:?}, not only the new owner");

    for instance in [provider, harness.fresh().await?] {
        converge_deleted(&instance, &old).await.context("a late deletion of the old one")?;
        ensure_same("the old one deleted late", &alone, &harness.snapshot().await?)?;
        goal.reach(&instance).await?;
    }
    Goal::Absent(new).reach(&harness.fresh().await?).await?;
    ensure_same("at the end", &empty, &harness.snapshot().await?)
}

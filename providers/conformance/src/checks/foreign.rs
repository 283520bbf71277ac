// SPDX-License-Identifier: Apache-2.0
//! What is not the provider's own.

use anyhow::{Context as _, ensure};
use steerage_provider_api::Error;

use crate::converge::{Goal, owned, same};
use crate::{Harness, Snapshot, fixture};

/// What somebody else added to the provider's objects outlives every change.
pub async fn foreign_fields_are_kept<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("marked", 1);
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1])).reach(&provider).await?;
    harness.mark(&owner).await.context("mark")?;
    ensure!(harness.marked(&owner).await?, "the harness can't see its own mark");
    let changed = Goal::made(fixture::second(harness, &owner), fixture::targets(harness, &[1, 2]));
    changed.reach(&provider).await?;
    ensure!(harness.marked(&owner).await?, "a change by the same instance took the foreign fields away");
    let back = Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0, 2]));
    back.reach(&harness.fresh().await?).await?;
    ensure!(harness.marked(&owner).await?, "a change by a fresh instance took the foreign fields away");
    Goal::Gone(owner).reach(&harness.fresh().await?).await?;
    same("at the end", &empty, &harness.snapshot().await?)
}

/// Objects under the provider's own names, but without its marks, are neither adopted nor changed nor deleted; the provider goes
/// around them, or says [`Error::Invalid`] with what to do, and goes on once they are gone.
pub async fn foreign_objects_are_left_alone<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("foreign", 1);
    let lb = fixture::first(harness, &owner);
    let made = Goal::made(lb.clone(), fixture::targets(harness, &[0, 1]));
    let gone = Goal::Gone(owner.clone());
    let empty = harness.snapshot().await?;
    harness.plant_foreign(&lb).await.context("plant foreign objects")?;
    let foreign = harness.snapshot().await?;
    ensure!(foreign != empty, "the harness planted nothing");

    for instance in ["the first", "a second"] {
        let provider = harness.fresh().await?;
        match made.reach(&provider).await {
            Ok(()) => {}
            Err(error) if matches!(error.downcast_ref(), Some(Error::Invalid { .. })) => {}
            Err(error) => {
                return Err(error.context("foreign objects are in the way: the error is not Invalid"));
            }
        }
        untouched(&foreign, &harness.snapshot().await?)
            .with_context(|| format!("made by {instance} instance"))?;
    }
    let found = owned(harness).await?;
    ensure!(found.iter().all(|o| *o == owner), "owned() lists what is foreign: {found:?}");
    gone.reach(&harness.fresh().await?).await?;
    same("deleted beside foreign objects", &foreign, &harness.snapshot().await?)?;

    let provider = harness.fresh().await?;
    let _ = made.reach(&provider).await;
    harness.remove_foreign().await?;
    made.reach(&provider).await.context("the foreign objects are gone")?;
    gone.reach(&provider).await?;
    same("at the end", &empty, &harness.snapshot().await?)
}

fn untouched(foreign: &Snapshot, now: &Snapshot) -> anyhow::Result<()> {
    let kept = now.iter().filter(|(name, _)| foreign.contains_key(*name));
    same("foreign objects", foreign, &kept.map(|(k, v)| (k.clone(), v.clone())).collect())
}

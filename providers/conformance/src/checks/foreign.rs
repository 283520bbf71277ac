// SPDX-License-Identifier: Apache-2.0
//! Objects and data that do not belong to the provider.

use anyhow::{Context as _, ensure};
use steerage_provider_api::Error;

use crate::converge::{Goal, ensure_same, owned};
use crate::{Harness, Snapshot, fixture};

/// Data that others added to the provider's objects survive every change.
pub async fn foreign_fields_are_kept<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("marked", 1);
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]))
        .reach(&provider)
        .await?;
    harness.mark(&owner).await.context("mark")?;
    ensure!(harness.marked(&owner).await?, "the harness does not find its own mark");
    let changed = Goal::present(fixture::second(harness, &owner), fixture::targets(harness, &[1, 2]));
    changed.reach(&provider).await?;
    ensure!(harness.marked(&owner).await?, "a change by the same instance removed foreign fields");
    let back = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 2]));
    back.reach(&harness.fresh().await?).await?;
    ensure!(harness.marked(&owner).await?, "a change by a fresh instance removed foreign fields");
    Goal::Absent(owner).reach(&harness.fresh().await?).await?;
    ensure_same("at the end", &empty, &harness.snapshot().await?)
}

/// Objects with the provider's names but without its marks are not adopted, changed or deleted. The provider avoids them, or
/// returns [`Error::Invalid`] and continues once they are gone.
pub async fn foreign_objects_are_not_changed<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("foreign", 1);
    let lb = fixture::first(harness, &owner);
    let made = Goal::present(lb.clone(), fixture::targets(harness, &[0, 1]));
    let gone = Goal::Absent(owner.clone());
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
                return Err(error.context("foreign objects block the name, but the error is not Invalid"));
            }
        }
        ensure_unchanged(&foreign, &harness.snapshot().await?)
            .with_context(|| format!("after creation by {instance} instance"))?;
    }
    let found = owned(harness).await?;
    ensure!(found.iter().all(|o| *o == owner), "owned() lists foreign objects: {found:?}");
    gone.reach(&harness.fresh().await?).await?;
    ensure_same("deleted beside foreign objects", &foreign, &harness.snapshot().await?)?;

    let provider = harness.fresh().await?;
    let _ = made.reach(&provider).await;
    harness.remove_foreign().await?;
    made.reach(&provider).await.context("the foreign objects are gone")?;
    gone.reach(&provider).await?;
    ensure_same("at the end", &empty, &harness.snapshot().await?)
}

fn ensure_unchanged(foreign: &Snapshot, now: &Snapshot) -> anyhow::Result<()> {
    let kept = now.iter().filter(|(name, _)| foreign.contains_key(*name));
    ensure_same("foreign objects", foreign, &kept.map(|(k, v)| (k.clone(), v.clone())).collect())
}

// SPDX-License-Identifier: Apache-2.0
//! Nothing to do means nothing written.

use anyhow::ensure;

use crate::converge::{Goal, same};
use crate::{Call, Harness, converge, fixture};

/// When all is as asked, neither the same instance nor a fresh one writes, the same one reads no more than the harness allows, and
/// both say the same addresses.
pub async fn a_second_run_writes_nothing<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("steady", 1);
    let lb = fixture::first(harness, &owner);
    let set = fixture::targets(harness, &[0, 1]);
    let provider = harness.fresh().await?;
    let (ingress, _) = converge(&provider, &lb, &set).await?;
    ensure!(!ingress.is_empty(), "done, but there is no address to publish");
    let before = harness.snapshot().await?;

    harness.proxy().reset();
    let (again, _) = converge(&provider, &lb, &set).await?;
    nothing_written("the same instance", &harness.proxy().calls())?;
    let reads = harness.proxy().calls().len();
    ensure!(
        reads <= harness.steady_reads(),
        "{reads} reads where nothing has changed, at most {} are allowed: {:?}",
        harness.steady_reads(),
        names(&harness.proxy().calls())
    );
    ensure!(again == ingress, "the addresses changed from {ingress:?} to {again:?}");

    harness.proxy().reset();
    let fresh = harness.fresh().await?;
    let (again, _) = converge(&fresh, &lb, &set).await?;
    nothing_written("a fresh instance", &harness.proxy().calls())?;
    ensure!(again == ingress, "the addresses changed from {ingress:?} to {again:?} with a fresh instance");
    same("after a second run", &before, &harness.snapshot().await?)?;
    Goal::Gone(owner).reach(&fresh).await
}

/// Fails with the writes among the calls.
pub(super) fn nothing_written(who: &str, calls: &[Call]) -> anyhow::Result<()> {
    let writes: Vec<_> = calls.iter().filter(|c| c.write).cloned().collect();
    ensure!(writes.is_empty(), "{who} wrote though nothing was to do: {:?}", names(&writes));
    Ok(())
}

fn names(calls: &[Call]) -> Vec<&str> {
    calls.iter().map(|c| c.name.as_str()).collect()
}

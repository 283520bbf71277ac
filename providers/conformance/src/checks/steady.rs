// SPDX-License-Identifier: Apache-2.0
//! No writes in the steady state.

use anyhow::ensure;

use crate::converge::{Goal, ensure_same};
use crate::{Call, Harness, converge, converge_remembered, fixture};

/// Once the goal is reached, neither the same nor a fresh instance writes, and both return the same addresses. The same
/// instance reads no more than the harness allows, and nothing where it may rely on what it remembers.
pub async fn second_run_writes_nothing<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("steady", 1);
    let lb = fixture::with_targets(harness, &fixture::first(harness, &owner), &[0, 1]);
    let provider = harness.fresh().await?;
    let ingress = converge(&provider, &lb).await?.ingress;
    ensure!(!ingress.is_empty(), "done, but there is no address to publish");
    let before = harness.snapshot().await?;

    harness.proxy().reset();
    let remembered = converge_remembered(&provider, &lb).await?.ingress;
    let calls = harness.proxy().calls();
    ensure!(calls.is_empty(), "calls for what the provider remembers: {:?}", names(&calls));
    ensure!(remembered == ingress, "the addresses changed from {ingress:?} to {remembered:?}");
    let again = converge(&provider, &lb).await?.ingress;
    ensure_no_writes("the same instance", &harness.proxy().calls())?;
    let reads = harness.proxy().calls().len();
    ensure!(
        reads <= harness.steady_reads(),
        "{reads} reads although nothing has changed, at most {} are allowed: {:?}",
        harness.steady_reads(),
        names(&harness.proxy().calls())
    );
    ensure!(again == ingress, "the addresses changed from {ingress:?} to {again:?}");

    harness.proxy().reset();
    let fresh = harness.fresh().await?;
    let again = converge(&fresh, &lb).await?.ingress;
    ensure_no_writes("a fresh instance", &harness.proxy().calls())?;
    ensure!(again == ingress, "the addresses changed from {ingress:?} to {again:?} with a fresh instance");
    ensure_same("after a second run", &before, &harness.snapshot().await?)?;
    Goal::Absent(owner).reach(&fresh).await
}

/// Returns an error with the writes among the calls, if there are any.
pub(super) fn ensure_no_writes(who: &str, calls: &[Call]) -> anyhow::Result<()> {
    let writes: Vec<_> = calls.iter().filter(|c| c.write).cloned().collect();
    ensure!(writes.is_empty(), "{who} wrote although nothing has changed: {:?}", names(&writes));
    Ok(())
}

fn names(calls: &[Call]) -> Vec<&str> {
    calls.iter().map(|c| c.name.as_str()).collect()
}

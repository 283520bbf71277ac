// SPDX-License-Identifier: Apache-2.0
//! Throttling by the backend, which the controller must be told.

use anyhow::{Context as _, bail, ensure};
use steerage_provider_api::Error;

use crate::converge::{Goal, ensure_same};
use crate::{Fault, Harness, Span, fixture};

/// Throttled from any call on, the provider returns [`Error::Throttled`]. When throttling ends, the same instance reaches the
/// goal.
pub async fn throttling_is_reported_and_survived<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("throttle", 1);
    let made = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    let gone = Goal::Absent(owner);
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    made.reach(&provider).await?;
    let expected = harness.snapshot().await?;
    gone.reach(&provider).await?;

    for call in 1.. {
        let provider = harness.fresh().await?;
        let creating = throttled(harness, &made, &provider, call).await.context("creating")?;
        ensure_same(&format!("throttled from call {call}"), &expected, &harness.snapshot().await?)?;
        let deleting = throttled(harness, &gone, &provider, call).await.context("deleting")?;
        ensure_same(&format!("throttled from call {call}"), &empty, &harness.snapshot().await?)?;
        if !creating && !deleting {
            ensure!(call > 1, "no call was made");
            return Ok(());
        }
    }
    bail!("the provider never stops calling")
}

async fn throttled<H: Harness>(
    harness: &H,
    goal: &Goal,
    provider: &H::Provider,
    call: usize,
) -> anyhow::Result<bool> {
    let proxy = harness.proxy();
    proxy.reset();
    proxy.inject_distinct(call, Span::Rest, Fault::Respond(harness.throttle()));
    let outcome = goal.reach(provider).await;
    let fault_fired = proxy.fault_fired();
    proxy.reset();
    if !fault_fired {
        outcome.context("no call was throttled")?;
        return Ok(false);
    }
    match outcome {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Throttled { .. })) => {}
        Err(error) => bail!("throttled from call {call}: the error is not Throttled: {error:#}"),
        Ok(()) => bail!("throttled from call {call}: the provider reported success"),
    }
    goal.reach(provider).await.with_context(|| format!("after being throttled from call {call}"))?;
    Ok(true)
}

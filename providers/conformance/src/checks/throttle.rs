// SPDX-License-Identifier: Apache-2.0
//! A backend that is called too often says so, and the controller must hear it.

use anyhow::{Context as _, bail, ensure};
use steerage_provider_api::Error;

use crate::converge::{Goal, same};
use crate::{Fault, Harness, Span, fixture};

/// Throttled from any call on, the provider says [`Error::Throttled`]; once it is let in, the same instance gets there.
pub async fn throttling_is_told_and_survived<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("throttle", 1);
    let made = Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    let gone = Goal::Gone(owner);
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    made.reach(&provider).await?;
    let expected = harness.snapshot().await?;
    gone.reach(&provider).await?;

    for call in 1.. {
        let provider = harness.fresh().await?;
        let creating = throttled(harness, &made, &provider, call).await.context("creating")?;
        same(&format!("throttled from call {call}"), &expected, &harness.snapshot().await?)?;
        let deleting = throttled(harness, &gone, &provider, call).await.context("deleting")?;
        same(&format!("throttled from call {call}"), &empty, &harness.snapshot().await?)?;
        if !creating && !deleting {
            ensure!(call > 1, "not one call was made");
            return Ok(());
        }
    }
    bail!("calls without end")
}

async fn throttled<H: Harness>(
    harness: &H,
    goal: &Goal,
    provider: &H::Provider,
    call: usize,
) -> anyhow::Result<bool> {
    let proxy = harness.proxy();
    proxy.reset();
    proxy.inject(call, Span::Onward, Fault::Answer(harness.throttle()));
    let outcome = goal.reach(provider).await;
    let struck = proxy.struck();
    proxy.reset();
    if !struck {
        outcome.context("no call was throttled")?;
        return Ok(false);
    }
    match outcome {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Throttled { .. })) => {}
        Err(error) => bail!("throttled from call {call}: the error is not Throttled, but: {error:#}"),
        Ok(()) => bail!("throttled from call {call}: said to be done"),
    }
    goal.reach(provider).await.with_context(|| format!("after being throttled from call {call}"))?;
    Ok(true)
}

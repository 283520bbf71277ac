// SPDX-License-Identifier: Apache-2.0
//! A provider may die, or lose a connection, at every single call.

use anyhow::{Context as _, ensure};

use crate::converge::{Goal, owned, same};
use crate::{Fault, Harness, Snapshot, Span, When, fixture};

/// No provider needs as many calls for one goal: the loop ends even if a provider calls without end.
const MOST_CALLS: usize = 500;

/// Who goes on after the fault.
#[derive(Clone, Copy, Debug)]
enum Recovery {
    /// A new instance: the old one died at the cut call.
    Fresh,
    /// The same one: only that one call was cut.
    Same,
}

/// A load balancer being made.
pub async fn a_crash_in_creation<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-create", 1);
    let to = Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    anywhere(harness, None, &to).await
}

/// Listeners, health check and targets being changed.
pub async fn a_crash_in_change<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-change", 1);
    let from = Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    let to = Goal::made(fixture::second(harness, &owner), fixture::targets(harness, &[1, 2]));
    anywhere(harness, Some(&from), &to).await
}

/// A Service made anew under the same name, before its predecessor's load balancer was deleted.
pub async fn a_crash_in_replacement<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let (old, new) = (fixture::owner("crash-replace", 1), fixture::owner("crash-replace", 2));
    let from = Goal::made(fixture::first(harness, &old), fixture::targets(harness, &[0]));
    let to = Goal::made(fixture::first(harness, &new), fixture::targets(harness, &[1]));
    anywhere(harness, Some(&from), &to).await
}

/// A load balancer being deleted.
pub async fn a_crash_in_deletion<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-delete", 1);
    let from = Goal::made(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    anywhere(harness, Some(&from), &Goal::Gone(owner)).await
}

/// From every cut the goal is reached, and the backend is as if nothing had been cut.
async fn anywhere<H: Harness>(harness: &H, from: Option<&Goal>, to: &Goal) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    to.reach(&provider).await.context("without a fault")?;
    let expected = harness.snapshot().await?;
    Goal::Gone(to.owner().clone()).reach(&provider).await?;
    same("deleted without a fault", &empty, &harness.snapshot().await?)?;
    drop(provider);

    for (when, recovery) in
        [(When::Before, Recovery::Fresh), (When::After, Recovery::Fresh), (When::After, Recovery::Same)]
    {
        let mut call = 1;
        while once(harness, from, to, (&empty, &expected), call, when, recovery).await.with_context(|| {
            format!("call {call} cut {when:?} it reached the backend, {recovery:?} instance goes on")
        })? {
            call += 1;
            ensure!(call < MOST_CALLS, "more than {MOST_CALLS} calls");
        }
    }
    Ok(())
}

/// One fault; false once the goal is reached in fewer calls than `call`.
async fn once<H: Harness>(
    harness: &H,
    from: Option<&Goal>,
    to: &Goal,
    (empty, expected): (&Snapshot, &Snapshot),
    call: usize,
    when: When,
    recovery: Recovery,
) -> anyhow::Result<bool> {
    let proxy = harness.proxy();
    let mut provider = harness.fresh().await?;
    if let Some(from) = from {
        from.reach(&provider).await.context("before the fault")?;
    }
    proxy.reset();
    match recovery {
        Recovery::Fresh => {
            provider = harness.fresh().await?;
            proxy.crash_at(call, when);
        }
        Recovery::Same => proxy.inject(call, Span::Once, Fault::Cut(when)),
    }
    let outcome = to.reach(&provider).await;
    let struck = proxy.struck();
    let cut = proxy.calls().get(call - 1).map_or("none", |c| &c.name).to_owned();
    if !struck {
        outcome.context("no call was cut")?;
    }
    proxy.reset();
    if matches!(recovery, Recovery::Fresh) {
        drop(provider);
        provider = harness.fresh().await?;
    }
    to.reach(&provider).await.with_context(|| format!("{cut} was cut"))?;
    same(&format!("{cut} was cut"), expected, &harness.snapshot().await?)?;
    let owners = match to {
        Goal::Made(lb, _) => vec![lb.owner.clone()],
        Goal::Gone(_) => Vec::new(),
    };
    let found = owned(harness).await?;
    ensure!(found == owners, "{cut} was cut: owned() is {found:?}, not {owners:?}");
    Goal::Gone(to.owner().clone()).reach(&provider).await?;
    same("deleted afterwards", empty, &harness.snapshot().await?)?;
    Ok(struck)
}

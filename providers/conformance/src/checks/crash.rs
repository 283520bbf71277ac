// SPDX-License-Identifier: Apache-2.0
//! Crashes of the provider at every single write, and lost connections at every single call.

use anyhow::{Context as _, ensure};

use crate::converge::{Goal, ensure_same, owned};
use crate::{CutPoint, Fault, Harness, Snapshot, Span, fixture};

/// Limit for one goal, to end the loop if a provider never stops calling.
const MAX_CALLS: usize = 500;

/// The instance that continues after the fault.
#[derive(Clone, Copy, Debug)]
enum Recovery {
    /// A new instance, as after a crash at the cut write.
    Fresh,
    /// The same instance, as after a lost connection.
    Same,
}

impl Recovery {
    /// What is cut.
    fn of(self) -> &'static str {
        match self {
            Self::Fresh => "write",
            Self::Same => "call",
        }
    }
}

/// Creates a load balancer.
pub async fn creation_survives_crash_at_any_call<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-create", 1);
    let to = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    survives_every_cut(harness, None, &to).await
}

/// Changes listeners, health check and targets.
pub async fn change_survives_crash_at_any_call<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-change", 1);
    let from = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    let to = Goal::present(fixture::second(harness, &owner), fixture::targets(harness, &[1, 2]));
    survives_every_cut(harness, Some(&from), &to).await
}

/// Replaces the load balancer of a Service that was re-created before the old load balancer was deleted.
pub async fn replacement_survives_crash_at_any_call<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let (old, new) = (fixture::owner("crash-replace", 1), fixture::owner("crash-replace", 2));
    let from = Goal::present(fixture::first(harness, &old), fixture::targets(harness, &[0]));
    let to = Goal::present(fixture::first(harness, &new), fixture::targets(harness, &[1]));
    survives_every_cut(harness, Some(&from), &to).await
}

/// Deletes a load balancer.
pub async fn deletion_survives_crash_at_any_call<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-delete", 1);
    let from = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    survives_every_cut(harness, Some(&from), &Goal::Absent(owner)).await
}

/// Checks that the goal is reached after a crash at any write and a cut of any call, with the same result as without.
///
/// The backend gets what is cut, and only the answer is lost. Cut before that, a crash at a write leaves what the crash at the write
/// before it left, and a new instance knows no more.
async fn survives_every_cut<H: Harness>(harness: &H, from: Option<&Goal>, to: &Goal) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    to.reach(&provider).await.context("without a fault")?;
    let expected = harness.snapshot().await?;
    Goal::Absent(to.owner().clone()).reach(&provider).await?;
    ensure_same("deleted without a fault", &empty, &harness.snapshot().await?)?;
    drop(provider);

    for recovery in [Recovery::Fresh, Recovery::Same] {
        let mut call = 1;
        while survives_cut(harness, from, to, (&empty, &expected), call, recovery).await.with_context(
            || {
                format!(
                    "{} {call} cut after it reached the backend, {recovery:?} instance continues",
                    recovery.of()
                )
            },
        )? {
            call += 1;
            ensure!(call < MAX_CALLS, "more than {MAX_CALLS} calls");
        }
    }
    Ok(())
}

/// Cuts one write or call. Returns false if the goal needs fewer than that.
async fn survives_cut<H: Harness>(
    harness: &H,
    from: Option<&Goal>,
    to: &Goal,
    (empty, expected): (&Snapshot, &Snapshot),
    call: usize,
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
            proxy.crash_at_write(call, CutPoint::After);
        }
        Recovery::Same => proxy.inject_distinct(call, Span::Once, Fault::Cut(CutPoint::After)),
    }
    let outcome = to.reach(&provider).await;
    let faulty = proxy.faulty();
    if faulty.is_none() {
        outcome.context("no call was cut")?;
    }
    proxy.reset();
    if matches!(recovery, Recovery::Fresh) {
        drop(provider);
        provider = harness.fresh().await?;
    }
    let cut = faulty.as_deref().unwrap_or("no call");
    to.reach(&provider).await.with_context(|| format!("{cut} was cut"))?;
    ensure_same(&format!("{cut} was cut"), expected, &harness.snapshot().await?)?;
    let owners = match to {
        Goal::Present(lb) => vec![lb.owner.clone()],
        Goal::Absent(_) => Vec::new(),
    };
    let found = owned(harness).await?;
    ensure!(found == owners, "{cut} was cut: owned() is {found:?}, not {owners:?}");
    Goal::Absent(to.owner().clone()).reach(&provider).await?;
    ensure_same("deleted afterwards", empty, &harness.snapshot().await?)?;
    Ok(faulty.is_some())
}

// SPDX-License-Identifier: Apache-2.0
//! Crashes of the provider after every single write, and lost answers of every single call.

use anyhow::{Context as _, ensure};

use crate::converge::{Goal, clean, ensure_same, owned};
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

/// Creates a load balancer, and deletes it.
pub async fn creation_and_deletion_survive_crash_after_any_write<H: Harness>(
    harness: &H,
) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-create", 1);
    let to = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    survives_every_cut(harness, &Goal::Absent(owner), &to, Ways::Differ).await
}

/// Changes listeners, health check and targets, and changes them back.
pub async fn change_survives_crash_after_any_write<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("crash-change", 1);
    let from = Goal::present(fixture::first(harness, &owner), fixture::targets(harness, &[0, 1]));
    let to = Goal::present(fixture::second(harness, &owner), fixture::targets(harness, &[1, 2]));
    survives_every_cut(harness, &from, &to, Ways::Differ).await
}

/// Replaces the load balancer of a Service that was re-created before the old load balancer was deleted, and replaces that one.
pub async fn replacement_survives_crash_after_any_write<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let (old, new) = (fixture::owner("crash-replace", 1), fixture::owner("crash-replace", 2));
    let from = Goal::present(fixture::first(harness, &old), fixture::targets(harness, &[0]));
    let to = Goal::present(fixture::first(harness, &new), fixture::targets(harness, &[1]));
    survives_every_cut(harness, &from, &to, Ways::AreAlike).await
}

/// A way between two goals, and what the backend holds without a fault where it ends.
struct Way<'a> {
    from: &'a Goal,
    to: &'a Goal,
    expected: Snapshot,
}

/// Whether the ways there and back make other calls.
#[derive(Clone, Copy, Debug)]
enum Ways {
    /// Each call of both is cut.
    Differ,
    /// Each call is cut once.
    AreAlike,
}

/// Checks that each of two goals is reached from the other after a crash after any write and a cut of any call, with the same result as
/// without. One way begins where the other one ended, because it costs most to bring a slow backend to where a way begins.
///
/// The backend gets what is cut, and only the answer is lost. A crash before a write arrives leaves what the crash after the write before
/// left, so it is not tried.
async fn survives_every_cut<H: Harness>(
    harness: &H,
    one: &Goal,
    other: &Goal,
    kind: Ways,
) -> anyhow::Result<()> {
    let empty = harness.snapshot().await?;
    let provider = harness.fresh().await?;
    one.reach(&provider).await.context("without a fault")?;
    let at_one = harness.snapshot().await?;
    other.reach(&provider).await.context("without a fault")?;
    let ways = [
        Way { from: other, to: one, expected: at_one },
        Way { from: one, to: other, expected: harness.snapshot().await? },
    ];
    for recovery in [Recovery::Fresh, Recovery::Same] {
        let mut provider = harness.fresh().await?;
        other.reach(&provider).await.context("without a fault")?;
        for call in 1.. {
            ensure!(call < MAX_CALLS, "more than {MAX_CALLS} calls");
            let ways = match kind {
                Ways::Differ => &ways[..],
                Ways::AreAlike => &ways[(call - 1) % 2..][..1],
            };
            let mut were_cut = false;
            for way in ways {
                were_cut |= survives_cut(harness, &mut provider, way, call, recovery).await.with_context(|| {
                    format!(
                        "{} {call} from {} to {} cut after it reached the backend, {recovery:?} instance continues",
                        recovery.of(),
                        way.from,
                        way.to,
                    )
                })?;
            }
            if !were_cut {
                break;
            }
        }
    }
    clean(harness).await?;
    ensure_same("deleted afterwards", &empty, &harness.snapshot().await?)
}

/// Cuts one write or call. Returns false if the way needs fewer than that.
async fn survives_cut<H: Harness>(
    harness: &H,
    provider: &mut H::Provider,
    Way { from, to, expected }: &Way<'_>,
    call: usize,
    recovery: Recovery,
) -> anyhow::Result<bool> {
    let proxy = harness.proxy();
    proxy.reset();
    match recovery {
        Recovery::Fresh => {
            *provider = harness.fresh().await?;
            proxy.crash_at_write(call, CutPoint::After);
        }
        Recovery::Same => proxy.inject_distinct(call, Span::Once, Fault::Cut(CutPoint::After)),
    }
    let outcome = to.reach(provider).await;
    let faulty = proxy.faulty();
    if faulty.is_none() {
        outcome.context("no call was cut")?;
    }
    proxy.reset();
    if matches!(recovery, Recovery::Fresh) {
        *provider = harness.fresh().await?;
    }
    let cut = faulty.as_deref().unwrap_or("no call");
    to.reach(provider).await.with_context(|| format!("{cut} was cut"))?;
    ensure_same(&format!("{cut} was cut"), expected, &harness.snapshot().await?)?;
    let owners = match to {
        Goal::Present(lb) => vec![lb.owner.clone()],
        Goal::Absent(_) => Vec::new(),
    };
    let found = owned(harness).await?;
    ensure!(found == owners, "{cut} was cut: owned() is {found:?}, not {owners:?}");
    // As the controller does for a Service that is gone.
    if from.owner() != to.owner() {
        Goal::Absent(from.owner().clone()).reach(provider).await?;
    }
    Ok(faulty.is_some())
}

// SPDX-License-Identifier: Apache-2.0
//! The guarantees of every Steerage provider, as checks that run against a real backend.
//!
//! A provider's tests implement [`Harness`] for its backend, put a [`Proxy`] between provider and backend, and call [`run`].
//! The proxy counts calls independently of the provider. It also injects faults: it cuts a connection before or after the
//! backend receives the call, answers instead of the backend, or delays. The suite knows no backend and starts none. It is a
//! dev-dependency only.

pub mod checks;
mod converge;
pub mod fixture;
mod harness;
mod peers;
mod proxy;
pub mod simulated;

pub use converge::{converge, converge_deleted, converge_remembered};
pub use harness::{Harness, Snapshot};
pub use peers::{check_peer_table, check_peers_are_refused};
pub use proxy::{
    Call, CallKind, CannedResponse, Connect, CutPoint, Fault, Io, Proxy, Request, Span, Upstream,
};

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;

/// Runs all checks in order. Returns an error that lists the failed ones.
///
/// At the start the backend must hold nothing of the provider's. After a failed check, everything that `owned` lists is
/// deleted.
pub async fn run<H: Harness>(harness: &H) -> anyhow::Result<()> {
    run_shared(harness, &AtomicUsize::new(0)).await
}

/// Lets two harnesses share the checks, for a slow backend: `run` makes one, with a backend of its own, and passes the count to
/// [`run_shared`].
pub async fn in_two_tasks<F>(run: impl Fn(Arc<AtomicUsize>) -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let taken = Arc::<AtomicUsize>::default();
    let tasks = [Arc::clone(&taken), taken].map(|taken| tokio::spawn(run(taken)));
    for task in tasks {
        task.await??;
    }
    Ok(())
}

/// Like [`run`], but takes one check after the other of those that nobody has taken: `taken` counts them.
pub async fn run_shared<H: Harness>(harness: &H, taken: &AtomicUsize) -> anyhow::Result<()> {
    let mut failures = String::new();
    let all = checks::all::<H>();
    while let Some((name, check)) = all.get(taken.fetch_add(1, Ordering::Relaxed)) {
        let before = std::time::Instant::now();
        let outcome = check(harness).await;
        match &outcome {
            Ok(()) => eprintln!("conformance: {name}: ok ({:.1} s)", before.elapsed().as_secs_f64()),
            Err(error) => {
                eprintln!("conformance: {name}: FAILED: {error:#}");
                let _ = write!(failures, "\n  {name}: {error:#}");
            }
        }
        if outcome.is_err() {
            converge::clean(harness).await?;
        }
    }
    anyhow::ensure!(failures.is_empty(), "the provider does not conform:{failures}");
    Ok(())
}

/// Runs the checks with these names, in the order of [`run`], until one fails. Each name must be that of a check.
pub async fn run_only<H: Harness>(harness: &H, names: &[&str]) -> anyhow::Result<()> {
    let all = checks::all::<H>();
    for name in names {
        anyhow::ensure!(all.iter().any(|(known, _)| known == name), "no check is called {name}");
    }
    for (name, check) in all.into_iter().filter(|(name, _)| names.contains(name)) {
        check(harness).await.with_context(|| name)?;
    }
    Ok(())
}

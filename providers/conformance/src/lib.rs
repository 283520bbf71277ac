// SPDX-License-Identifier: Apache-2.0
//! What every provider of Steerage must hold, as checks that run against a real backend.
//!
//! A provider's own tests implement [`Harness`] for its backend, put a [`Proxy`] between the two, and call [`run`]. The proxy
//! counts the calls outside the product, and makes the faults: it cuts a connection before or after the call reached the
//! backend, answers in the backend's stead, delays. The suite knows no backend and starts none; it is a dev-dependency only.

pub mod checks;
mod converge;
pub mod fixture;
mod harness;
mod proxy;

pub use converge::{converge, converge_deleted};
pub use harness::{Harness, Snapshot};
pub use proxy::{Answer, Call, CallKind, Connect, Fault, Io, Proxy, Request, Span, Upstream, When};

use std::fmt::Write as _;

/// Runs every check, one after the other, and fails with a list of those that failed.
///
/// The backend must hold nothing of the provider's before: what a failed check left behind is deleted, all that `owned` lists.
pub async fn run<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let mut failures = String::new();
    for (name, check) in checks::all::<H>() {
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

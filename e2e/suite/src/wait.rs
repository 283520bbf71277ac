// SPDX-License-Identifier: Apache-2.0
//! Waiting for a cluster's state, with an error that has the last state seen.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::time::sleep;

/// Enough for any operation of the control plane on two busy cores.
pub const TIMEOUT: Duration = Duration::from_mins(1);

/// Probes until the probe succeeds. Its last error becomes part of the timeout's error.
pub async fn until<T, E: Display>(
    what: impl Display,
    limit: Duration,
    mut probe: impl AsyncFnMut() -> Result<T, E>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        match probe().await {
            Ok(value) => return Ok(value),
            Err(seen) if start.elapsed() > limit => {
                bail!("{what}: not within {} s; last seen: {seen:#}", limit.as_secs())
            }
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Fails as soon as the probe fails during this time.
pub async fn holds<E: Display>(
    what: impl Display,
    during: Duration,
    mut probe: impl AsyncFnMut() -> Result<(), E>,
) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < during {
        if let Err(seen) = probe().await {
            bail!("{what}: no longer after {:.1} s: {seen:#}", start.elapsed().as_secs_f64());
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Waiting for what a cluster does in its own time, with a message that says what was seen last.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::time::sleep;

/// Long enough for anything that the control plane does on two busy cores.
pub const SOON: Duration = Duration::from_secs(30);

/// Probes until it succeeds. An error of the probe is what was seen instead, kept for the message.
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

/// Probes for a while and fails when the probe ever does.
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

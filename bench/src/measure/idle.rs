// SPDX-License-Identifier: Apache-2.0
//! Idle load: what a program does while nothing changes.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use steerage_nft::{Error, Monitor};

use super::{Bench, Trial};
use crate::report::Better::Less;
use crate::testbed::At;

/// Wait before the measurement, for work that earlier changes started.
const SETTLE: Duration = Duration::from_secs(2);

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    sleep(SETTLE);
    let time = bench.settings.idle;
    let mut monitor = trial.testbed.inside(At::Node, Monitor::open)??;
    let before = (trial.running.group.cpu_seconds(), bench.cluster.requests(trial.who)?);
    sleep(time);
    let after = (trial.running.group.cpu_seconds(), bench.cluster.requests(trial.who)?);
    let requests = |(all, watches): (usize, usize)| all - watches;
    let seconds = time.as_secs();
    let mut add = |what: &str, unit, value| {
        bench.report.add(
            &format!("idle for {seconds} s, {} Services: {what}", trial.level),
            unit,
            Less,
            trial.who,
            value,
        );
    };
    add("CPU time", "ms", (after.0 - before.0) * 1000.0);
    add("nftables notifications", "", count(changes(&mut monitor)?));
    add("API requests except watches", "", count(requests(after.1).saturating_sub(requests(before.1))));
    add("watches opened", "", count(after.1.1.saturating_sub(before.1.1)));
    Ok(())
}

/// The number of waiting notifications. Lost ones are not counted.
fn changes(monitor: &mut Monitor) -> Result<usize> {
    let mut count = 0;
    loop {
        match monitor.receive() {
            Ok(Some(changes)) => count += changes.len(),
            Ok(None) => return Ok(count),
            Err(Error::Overrun) => count += 1,
            Err(error) => return Err(error.into()),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
fn count(number: usize) -> f64 {
    number as f64
}

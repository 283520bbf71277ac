// SPDX-License-Identifier: Apache-2.0
//! Time from the API server's response to a change of an EndpointSlice, to the new status of the health-check port.

use std::net::SocketAddrV4;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::{Bench, Trial, first_packet};
use crate::report::Better::Less;
use crate::report::percentile;
use crate::testbed::NODE;
use crate::traffic::await_status;

/// Minimum number of changes, however long they take.
const MIN_CHANGES: usize = 4;

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let port = bench.cluster.health().health.context("no health-check port")?;
    let to = SocketAddrV4::new(NODE, port);
    await_status(trial.testbed, to, 200, bench.settings.limit)?;
    let (mut falls, mut rises) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    while rises.len() < bench.settings.changes
        && (begun.elapsed() < bench.settings.change_time || falls.len() + rises.len() < MIN_CHANGES)
    {
        falls.push(flip(bench, trial, to, false)?);
        sleep(first_packet::pause(trial.who));
        rises.push(flip(bench, trial, to, true)?);
        sleep(first_packet::pause(trial.who));
    }
    for (status, samples) in [("503", falls), ("200", rises)] {
        for percent in [50, 99] {
            let name =
                format!("EndpointSlice change to /healthz {status}, {} Services: p{percent}", trial.level);
            let time = percentile(&samples, percent).context("no sample")?;
            bench.report.add(&name, "ms", Less, trial.who, time * 1000.0);
        }
    }
    Ok(())
}

fn flip(bench: &Bench<'_>, trial: &Trial<'_>, to: SocketAddrV4, present: bool) -> Result<Duration> {
    let (limit, status) = (bench.settings.limit, if present { 200 } else { 503 });
    scope(|scope| {
        let asked = scope.spawn(|| await_status(trial.testbed, to, status, limit));
        let written = bench.cluster.set_health(present)?;
        let Ok(seen) = asked.join() else { bail!("the prober panicked") };
        Ok(seen?.saturating_duration_since(written))
    })
}

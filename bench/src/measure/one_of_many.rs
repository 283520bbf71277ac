// SPDX-License-Identifier: Apache-2.0
//! Time from the API server's response to a change of one of a Service's many endpoints, to the commit of the rules, as the kernel tells
//! it. The first datagram at that endpoint would tell little: one in a thousand goes there.

use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use steerage_nft::{Error, Monitor, Notification, ObjectKind};

use super::first_packet::pause;
use super::{Bench, Trial};
use crate::report::Better::Less;
use crate::report::percentile;
use crate::testbed::At;

/// Wait before the measurement, for work that earlier changes started.
const SETTLE: Duration = Duration::from_secs(2);
/// How long the monitor waits for one datagram.
const POLL: Duration = Duration::from_secs(1);

/// Only where the probe Service has many endpoints.
pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    if !bench.cluster.has_large_probe() {
        eprintln!("one-of-many: the probe Service has few endpoints; use --endpoints");
        return Ok(());
    }
    let Trial { who, level, .. } = *trial;
    let endpoints = bench.cluster.probe_endpoints();
    bench.cluster.move_probe(bench.side)?;
    sleep(SETTLE);
    let mut monitor = trial.testbed.inside(At::Node, Monitor::open)??;
    let mut samples = Vec::new();
    let begun = Instant::now();
    while samples.len() < bench.settings.changes && begun.elapsed() < bench.settings.change_time {
        let is_other = samples.len().is_multiple_of(2);
        samples.push(one(bench, &mut monitor, is_other)?);
        sleep(pause(who));
    }
    bench.cluster.move_probe(bench.side)?;
    for percent in [50, 99] {
        let name = format!("change of one endpoint of {endpoints} to commit, {level} Services: p{percent}");
        let time = percentile(&samples, percent).context("no sample")?;
        bench.report.add(&name, "ms", Less, who, time * 1000.0);
    }
    Ok(())
}

/// Measures one change. The commit may come before the API server's response.
fn one(bench: &Bench<'_>, monitor: &mut Monitor, is_other: bool) -> Result<Duration> {
    let limit = bench.settings.limit;
    // Of earlier changes: their deletions of flows, or a second sync.
    while monitor.receive()?.is_some() {}
    scope(|scope| {
        let heard = scope.spawn(|| commit_of_elements(monitor, limit));
        let written = bench.cluster.change_one_of_probe(bench.side, is_other)?;
        let heard = heard.join().map_err(|_| anyhow::anyhow!("the monitor panicked"))??;
        Ok(heard.saturating_duration_since(written))
    })
}

/// The time of the next commit that changes elements.
fn commit_of_elements(monitor: &mut Monitor, limit: Duration) -> Result<Instant> {
    let begun = Instant::now();
    let mut has_elements = false;
    while begun.elapsed() < limit {
        if !monitor.wait(POLL)? {
            continue;
        }
        let now = Instant::now();
        let notifications = match monitor.receive() {
            Ok(notifications) => notifications.unwrap_or_default(),
            // Many changes: they are the elements, or the commit.
            Err(Error::Overrun) => return Ok(now),
            Err(error) => return Err(error.into()),
        };
        for notification in notifications {
            match notification {
                Notification::Change(change) => has_elements |= change.object == ObjectKind::Elements,
                Notification::Commit(_) if has_elements => return Ok(now),
                Notification::Commit(_) => {}
            }
        }
    }
    anyhow::bail!("no commit of elements in {limit:?}")
}

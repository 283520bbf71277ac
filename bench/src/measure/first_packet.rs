// SPDX-License-Identifier: Apache-2.0
//! Time from the API server's response to a change of an EndpointSlice, to the first datagram at a new endpoint.

use std::net::SocketAddrV4;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{Bench, Trial};
use crate::report::Better::Less;
use crate::report::percentile;
use crate::testbed::{At, NODE};
use crate::traffic::{PROBE_INTERVAL, get, while_probing};
use crate::who::Who;

/// Minimum number of changes, however long they take.
const MIN_CHANGES: usize = 3;
/// The admin port of the agent.
const ADMIN: u16 = 10358;

/// Time between two changes. By default kube-proxy writes at most once a second; this pause keeps that limit out of the result.
pub(super) fn pause(who: Who) -> Duration {
    match who {
        Who::Ours => Duration::from_millis(20),
        Who::Peer => Duration::from_millis(1200),
    }
}

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let Trial { who, level, .. } = *trial;
    let before = applied(trial)?;
    let mut samples = Vec::new();
    let begun = Instant::now();
    while samples.len() < bench.settings.changes
        && (begun.elapsed() < bench.settings.change_time || samples.len() < MIN_CHANGES)
    {
        samples.push(one(bench, trial)?);
        sleep(pause(who));
    }
    for percent in [50, 99] {
        let name = format!("EndpointSlice change to first packet, {level} Services: p{percent}");
        let time = percentile(&samples, percent).context("no sample")?;
        bench.report.add(&name, "ms", Less, who, time * 1000.0);
    }
    if let (Some((count, seconds)), Some((until, total))) = (before, applied(trial)?)
        && until > count
    {
        let name = format!("agent's diff, encode and commit of a change, {level} Services: mean");
        bench.report.add(&name, "µs", Less, who, (total - seconds) / (until - count) * 1e6);
    }
    Ok(())
}

/// Measures one change.
pub(super) fn one(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<Duration> {
    let side = bench.side.other();
    let (cluster, limit) = (&bench.cluster, bench.settings.limit);
    let time = while_probing(trial.testbed, bench.probe(), PROBE_INTERVAL, || {
        trial.pods.expect_packet(side);
        let written = cluster.move_probe(side)?;
        let heard = trial
            .pods
            .first_packet(limit)
            .with_context(|| format!("no packet at a new endpoint in {limit:?}"))?;
        // The packet may arrive before the API server's response.
        Ok(heard.saturating_duration_since(written))
    })?;
    bench.side = side;
    Ok(time)
}

/// The agent's count of writes, and their total seconds.
fn applied(trial: &Trial<'_>) -> Result<Option<(f64, f64)>> {
    if trial.who != Who::Ours {
        return Ok(None);
    }
    let (status, body) =
        trial.testbed.inside(At::Client, || get(SocketAddrV4::new(NODE, ADMIN), "/metrics"))??;
    anyhow::ensure!(status == 200, "the agent's /metrics returned {status}");
    let value = |name: &str| -> Result<f64> {
        let line = body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.with_context(|| format!("the agent has no metric {name}"))?.trim().parse()?)
    };
    Ok(Some((
        value("steerage_agent_write_duration_seconds_count")?,
        value("steerage_agent_write_duration_seconds_sum")?,
    )))
}

// SPDX-License-Identifier: Apache-2.0
//! From the API server's answer to the change of an EndpointSlice, to the first datagram at one of its new endpoints.

use std::net::SocketAddrV4;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{Bench, Trial};
use crate::report::Better::Less;
use crate::report::percentile;
use crate::subject::Who;
use crate::traffic::{BEAT, get, knocking};
use crate::world::{At, NODE};

/// At least so many changes, however long they take.
const LEAST: usize = 3;
/// The agent's administration port.
const ADMIN: u16 = 10358;

/// Between two changes. kube-proxy writes at most once a second by default: none of its changes has to wait for that.
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
        && (begun.elapsed() < bench.settings.change_time || samples.len() < LEAST)
    {
        samples.push(one(bench, trial)?);
        sleep(pause(who));
    }
    for percent in [50, 99] {
        let name = format!("slice change to first packet, {level} Services: p{percent}");
        let time = percentile(&samples, percent).context("no sample")?;
        bench.report.add(&name, "ms", Less, who, time * 1000.0);
    }
    if let (Some((count, seconds)), Some((until, total))) = (before, applied(trial)?)
        && until > count
    {
        let name = format!("of it difference, encoding and commit, {level} Services: mean");
        bench.report.add(&name, "µs", Less, who, (total - seconds) / (until - count) * 1e6);
    }
    Ok(())
}

/// One change.
pub(super) fn one(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<Duration> {
    let side = bench.side.other();
    let (cluster, limit) = (&bench.cluster, bench.settings.limit);
    let time = knocking(trial.world, bench.probe(), BEAT, || {
        trial.pods.want(side);
        let written = cluster.move_probe(side)?;
        let heard =
            trial.pods.heard(limit).with_context(|| format!("no packet at a new endpoint in {limit:?}"))?;
        // A packet may be there before the answer to who made the change.
        Ok(heard.saturating_duration_since(written))
    })?;
    bench.side = side;
    Ok(time)
}

/// The agent's own count of writes, and their seconds.
fn applied(trial: &Trial<'_>) -> Result<Option<(f64, f64)>> {
    if trial.who != Who::Ours {
        return Ok(None);
    }
    let (status, body) =
        trial.world.inside(At::Client, || get(SocketAddrV4::new(NODE, ADMIN), "/metrics"))??;
    anyhow::ensure!(status == 200, "the agent's metrics answer {status}");
    let value = |name: &str| -> Result<f64> {
        let line = body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.with_context(|| format!("no metric {name}"))?.trim().parse()?)
    };
    Ok(Some((value("steerage_agent_apply_seconds_count")?, value("steerage_agent_apply_seconds_sum")?)))
}

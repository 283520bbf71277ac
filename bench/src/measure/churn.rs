// SPDX-License-Identifier: Apache-2.0
//! Churn: many changes per second over all Services. Measures CPU time and programming lag in the first and the last third.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::{Bench, Trial, first_packet};
use crate::cluster::Slices;
use crate::objects::{self, Shape, Side};
use crate::report::Better::{Less, More};
use crate::report::percentile;

/// Concurrent changes at the API server.
const PARALLEL: usize = 32;

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let (time, rate) = bench.settings.churn;
    let changes =
        changes(bench.cluster.slices(), trial.level, bench.settings.shape, bench.churn_changes, rate, time);
    let writer = bench.cluster.spawn(changes);
    let begun = Instant::now();
    // Start and duration of each probe change, and the CPU seconds so far.
    let mut lags: Vec<(Duration, Duration)> = Vec::new();
    let mut used = vec![(Duration::ZERO, trial.running.group.cpu_seconds())];
    while begun.elapsed() < time {
        let at = begun.elapsed();
        lags.push((at, first_packet::one(bench, trial)?));
        used.push((begun.elapsed(), trial.running.group.cpu_seconds()));
        std::thread::sleep(Duration::from_millis(100));
    }
    let (done, took) = bench.cluster.block_on(writer)??;
    bench.churn_changes += done;

    let third = time / 3;
    let name = |what: &str| format!("{rate} changes/s over {} Services: {what}", trial.level);
    let lag = |late: bool| {
        let picked = lags.iter().filter(|(at, _)| if late { *at >= third * 2 } else { *at < third });
        let mut picked: Vec<_> = picked.map(|(_, lag)| *lag).collect();
        // A change that takes longer than a third counts in both thirds.
        picked.extend(lags.last().filter(|_| picked.is_empty()).map(|(_, lag)| *lag));
        percentile(&picked, 50)
    };
    let share = |late: bool| {
        let edge = if late { third * 2 } else { third };
        let middle = used.iter().rev().find(|(at, _)| *at <= edge).or(used.first())?;
        let (from, to) = if late {
            (middle, used.last()?)
        } else {
            (used.first()?, used.iter().find(|(at, _)| *at >= edge)?)
        };
        let seconds = (to.0.saturating_sub(from.0)).as_secs_f64();
        (seconds > 0.0).then(|| (to.1 - from.1) / seconds * 100.0)
    };
    for (late, when) in [(false, "first third"), (true, "last third")] {
        let lag = lag(late).context("no lag was measured")?;
        bench.report.add(&name(&format!("lag, {when}, p50")), "ms", Less, trial.who, lag * 1000.0);
        let share = share(late).context("no CPU time was measured")?;
        bench.report.add(&name(&format!("CPU use, {when}")), "% of a core", Less, trial.who, share);
    }
    bench.report.add(&name("changes written"), "1/s", More, trial.who, f64::from(done) / took.as_secs_f64());
    Ok(())
}

/// Writes changes. Returns their number and the elapsed time.
async fn changes(
    slices: Slices,
    level: u32,
    shape: Shape,
    first: u32,
    rate: u32,
    time: Duration,
) -> Result<(u32, Duration)> {
    let begun = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut under_way: JoinSet<Result<Instant>> = JoinSet::new();
    let mut made = 0;
    while begun.elapsed() < time {
        ticks.tick().await;
        while under_way.len() >= PARALLEL {
            under_way.join_next().await.context("no change in progress")??.context("write a change")?;
        }
        let change = first + made;
        let (number, side) =
            (change % level, if (change / level).is_multiple_of(2) { Side::B } else { Side::A });
        let slices = slices.clone();
        under_way.spawn(async move {
            slices.change(&objects::name(number), objects::changed_endpoints(shape, number, side)).await
        });
        made += 1;
    }
    while let Some(done) = under_way.join_next().await {
        done?.context("write a change")?;
    }
    Ok((made, begun.elapsed()))
}

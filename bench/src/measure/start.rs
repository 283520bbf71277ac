// SPDX-License-Identifier: Apache-2.0
//! Start on an empty node: how long until every Service works, and at what cost.

use std::net::SocketAddrV4;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{Bench, Trial, connections};
use crate::report::Better::Less;
use crate::subject::Who;
use crate::traffic::{exchange, knocking};
use crate::usage::Group;
use crate::world::At;

/// Between two datagrams that look whether all is programmed.
const BEAT: Duration = Duration::from_millis(1);
/// Of each kind of address, so many are tried.
const TRIED: usize = 32;
/// A program that has used no processor time for so long has finished its start.
const QUIET: Duration = Duration::from_millis(600);
/// But it is not waited for longer than this.
const SETTLED: Duration = Duration::from_secs(10);
const MIB: f64 = 1024.0 * 1024.0;

/// From the line of its log that says that Services and slices are listed, to the first datagram that reaches the probe's
/// endpoint: with both programs one transaction lets all Services work. That the others do is tried. False when it is given up.
pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<bool> {
    let Trial { who, level, world, pods, running } = *trial;
    let limit = bench.settings.limit;
    let peak = running.group.watch();
    let side = bench.side;
    let (listed, programmed) = knocking(world, bench.probe(), BEAT, || {
        pods.want(side);
        let listed = running.listed(limit)?;
        Ok((listed, pods.heard((listed + limit).saturating_duration_since(Instant::now()))))
    })?;
    let name = |what: &str| format!("start, {level} Services: {what}");
    let times =
        [("process start to all programmed", running.begun), ("end of lists to all programmed", listed)];
    let Some(programmed) = programmed else {
        for (what, _) in times {
            bench.report.add_unfinished(&name(what), "s", who, limit.as_secs_f64());
        }
        return Ok(false);
    };
    for (what, from) in times {
        let time = programmed.saturating_duration_since(from).as_secs_f64();
        bench.report.add(&name(what), "s", Less, who, time);
    }
    let all: Vec<SocketAddrV4> =
        connections::targets(bench, TRIED).into_iter().flat_map(|(_, targets)| targets).collect();
    world
        .inside(At::Client, || all.iter().try_for_each(|target| exchange(*target).map(drop)))?
        .context("not all is programmed")?;

    settle(&running.group);
    bench.report.add(&name("processor time of it"), "s", Less, who, running.group.processor());
    bench.report.add(&name("resident memory at most"), "MiB", Less, who, mib(peak.bytes()));
    bench.report.add(&name("resident memory after it"), "MiB", Less, who, mib(running.group.resident()));
    Ok(true)
}

/// What the kernel holds when the program has gone: its rules.
pub(super) fn after_end(bench: &mut Bench<'_>, who: Who, level: u32, group: &Group) -> Result<()> {
    let bytes = group.kernel_bytes()?;
    let name = format!("start, {level} Services: kernel memory of the rules");
    bench.report.add(&name, "MiB", Less, who, mib(bytes));
    Ok(())
}

fn settle(group: &Group) {
    let begun = Instant::now();
    let (mut used, mut since) = (group.processor(), Instant::now());
    while since.elapsed() < QUIET && begun.elapsed() < SETTLED {
        sleep(Duration::from_millis(100));
        let now = group.processor();
        if now > used {
            (used, since) = (now, Instant::now());
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

// SPDX-License-Identifier: Apache-2.0
//! Start on an empty node: time until every Service works, CPU time and memory.

use std::net::SocketAddrV4;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{Bench, Trial, connections};
use crate::report::Better::Less;
use crate::testbed::At;
use crate::traffic::{exchange, while_probing};
use crate::usage::Group;
use crate::who::Who;

/// Time between two datagrams that probe whether everything is programmed.
const PROBE_INTERVAL: Duration = Duration::from_millis(1);
/// Number of checked addresses of each kind.
const CHECKED: usize = 32;
/// A start has ended when the program has used no CPU time for this long.
const QUIET: Duration = Duration::from_millis(600);
/// Maximum wait for the end of a start.
const MAX_SETTLE: Duration = Duration::from_secs(10);
const MIB: f64 = 1024.0 * 1024.0;

/// Measures from the log line about the initial list to the first datagram at an endpoint of the probe Service. Both programs
/// program all Services in one transaction; afterwards other Services are checked too. Returns false on timeout.
pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<bool> {
    let Trial { who, level, testbed, pods, running } = *trial;
    let limit = bench.settings.limit;
    let peak = running.group.record_peak();
    let side = bench.side;
    let (listed, programmed) = while_probing(testbed, bench.probe(), PROBE_INTERVAL, || {
        pods.expect_packet(side);
        let listed = running.listed(limit)?;
        Ok((listed, pods.first_packet((listed + limit).saturating_duration_since(Instant::now()))))
    })?;
    let name = |what: &str| format!("start, {level} Services: {what}");
    let times =
        [("process start to fully programmed", running.begun), ("initial list to fully programmed", listed)];
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
        connections::targets(bench, CHECKED).into_iter().flat_map(|(_, targets)| targets).collect();
    testbed
        .inside(At::Client, || all.iter().try_for_each(|target| exchange(*target).map(drop)))?
        .context("a Service is not programmed")?;

    settle(&running.group);
    bench.report.add(&name("CPU time"), "s", Less, who, running.group.cpu_seconds());
    bench.report.add(&name("peak resident memory"), "MiB", Less, who, mib(peak.bytes()));
    bench.report.add(
        &name("resident memory after start"),
        "MiB",
        Less,
        who,
        mib(running.group.resident_bytes()),
    );
    Ok(true)
}

/// Measures the kernel memory that remains after the program ended: its rules.
pub(super) fn after_end(bench: &mut Bench<'_>, who: Who, level: u32, group: &Group) -> Result<()> {
    let bytes = group.kernel_bytes()?;
    let name = format!("start, {level} Services: kernel memory of the ruleset");
    bench.report.add(&name, "MiB", Less, who, mib(bytes));
    Ok(())
}

pub(super) fn settle(group: &Group) {
    let begun = Instant::now();
    let (mut used, mut since) = (group.cpu_seconds(), Instant::now());
    while since.elapsed() < QUIET && begun.elapsed() < MAX_SETTLE {
        sleep(Duration::from_millis(100));
        let now = group.cpu_seconds();
        if now > used {
            (used, since) = (now, Instant::now());
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

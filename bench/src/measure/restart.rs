// SPDX-License-Identifier: Apache-2.0
//! A new process on a node that has the rules of its predecessor, which nothing made wrong meanwhile.

use anyhow::{Context as _, Result};

use super::{Bench, start};
use crate::report::Better::Less;
use crate::subject::Running;
use crate::testbed::Testbed;
use crate::who::Who;

/// Numbers of the cgroups of restarted programs start here.
const GROUPS: usize = 10_000;

/// Measures from the log line about the initial list to that about the first write.
pub(super) fn measure(
    bench: &mut Bench<'_>,
    who: Who,
    testbed: &Testbed,
    level: u32,
    number: usize,
) -> Result<()> {
    let limit = bench.settings.limit;
    let kubeconfig = bench.cluster.kubeconfig(who);
    let running = Running::start(bench.programs, who, testbed, &kubeconfig, GROUPS + number)?;
    let listed = running.listed(limit)?;
    let written = running.written(limit).with_context(|| format!("{} restarted", who.title()))?;
    start::settle(&running.group);
    let name = |what: &str| format!("restart, {level} Services: {what}");
    let times =
        [("process start to rules confirmed", running.begun), ("initial list to rules confirmed", listed)];
    for (what, from) in times {
        let time = written.saturating_duration_since(from).as_secs_f64();
        bench.report.add(&name(what), "s", Less, who, time);
    }
    bench.report.add(&name("CPU time"), "s", Less, who, running.group.cpu_seconds());
    running.end().map(drop)
}

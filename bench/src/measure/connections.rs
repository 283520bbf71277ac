// SPDX-License-Identifier: Apache-2.0
//! New connections from outside, through cluster IP, node port and VIP, with one byte echoed.

use std::net::SocketAddrV4;

use anyhow::{Context as _, Result, ensure};

use super::{Bench, Trial};
use crate::objects::service_port::ECHO;
use crate::report::Better::{Less, More};
use crate::report::percentile;
use crate::testbed::NODE;
use crate::traffic::connect;

/// Number of Services that get connections in turn.
const SPREAD: usize = 64;
/// At most one connection in this many may fail, because source ports of the client may collide.
const CONNECTIONS_PER_FAILURE: usize = 100;

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let time = bench.settings.round;
    for (what, targets) in targets(bench, SPREAD) {
        for threads in [1, 2] {
            let round = connect(trial.testbed, &targets, threads, time)?;
            let (failed, why) = round.failed;
            ensure!(
                failed * CONNECTIONS_PER_FAILURE <= round.connect_times.len(),
                "{failed} connections to a {what} failed: {why:?}"
            );
            let name = |metric: &str| format!("new connections, {} Services, {what}: {metric}", trial.level);
            if threads == 1 {
                let connect_time = percentile(&round.connect_times, 50).context("no connection")?;
                bench.report.add(&name("time to connect, p50"), "µs", Less, trial.who, connect_time * 1e6);
            } else {
                #[allow(clippy::cast_precision_loss, reason = "far below 2^52 connections")]
                let rate = round.connect_times.len() as f64 / round.time.as_secs_f64();
                bench.report.add(&name("rate"), "1/s", More, trial.who, rate);
            }
        }
    }
    Ok(())
}

/// At most `count` addresses of each kind, evenly spread over all Services.
pub(super) fn targets(bench: &Bench<'_>, count: usize) -> [(&'static str, Vec<SocketAddrV4>); 3] {
    let services = bench.cluster.services();
    let spread = |all: Vec<SocketAddrV4>| {
        let step = all.len().div_ceil(count).max(1);
        // Starts with the last Service, so that it is included.
        all.into_iter().rev().step_by(step).collect()
    };
    let load_balanced = || services.iter().filter_map(|service| service.load_balanced);
    [
        (
            "ClusterIP",
            spread(services.iter().map(|service| SocketAddrV4::new(service.cluster, ECHO)).collect()),
        ),
        ("NodePort", spread(load_balanced().map(|(port, _)| SocketAddrV4::new(NODE, port)).collect())),
        ("VIP", spread(load_balanced().map(|(_, vip)| SocketAddrV4::new(vip, ECHO)).collect())),
    ]
}

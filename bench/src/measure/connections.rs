// SPDX-License-Identifier: Apache-2.0
//! New connections from outside, with one byte to and fro: through cluster address, node port and load balancer's address.

use std::net::SocketAddrV4;

use anyhow::{Context as _, Result, ensure};

use super::{Bench, Trial};
use crate::objects::service_port::ECHO;
use crate::report::Better::{Less, More};
use crate::report::percentile;
use crate::traffic::connect;
use crate::world::NODE;

/// Connections go to so many Services in turn.
const SPREAD: usize = 64;
/// Of a hundred connections, at most one may fail: the client's ports may clash.
const FAILING: usize = 100;

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let time = bench.settings.round;
    for (what, targets) in targets(bench, SPREAD) {
        for threads in [1, 2] {
            let round = connect(trial.world, &targets, threads, time)?;
            let (failed, why) = round.failed;
            ensure!(
                failed * FAILING <= round.stood.len(),
                "{failed} connections to a {what} failed: {why:?}"
            );
            let name = |metric: &str| format!("new connections, {} Services, {what}: {metric}", trial.level);
            if threads == 1 {
                let stood = percentile(&round.stood, 50).context("no connection")?;
                bench.report.add(&name("time to stand, p50"), "µs", Less, trial.who, stood * 1e6);
            } else {
                #[allow(clippy::cast_precision_loss, reason = "far below 2^52 connections")]
                let rate = round.stood.len() as f64 / round.time.as_secs_f64();
                bench.report.add(&name("rate"), "1/s", More, trial.who, rate);
            }
        }
    }
    Ok(())
}

/// At most `count` addresses of each kind, of Services from the first to the last.
pub(super) fn targets(bench: &Bench<'_>, count: usize) -> [(&'static str, Vec<SocketAddrV4>); 3] {
    let services = bench.cluster.services();
    let spread = |all: Vec<SocketAddrV4>| {
        let step = all.len().div_ceil(count).max(1);
        // From the last on, so that it is among them.
        all.into_iter().rev().step_by(step).collect()
    };
    let balanced = || services.iter().filter_map(|service| service.balanced);
    [
        (
            "ClusterIP",
            spread(services.iter().map(|service| SocketAddrV4::new(service.cluster, ECHO)).collect()),
        ),
        ("NodePort", spread(balanced().map(|(port, _)| SocketAddrV4::new(NODE, port)).collect())),
        ("VIP", spread(balanced().map(|(_, vip)| SocketAddrV4::new(vip, ECHO)).collect())),
    ]
}

// SPDX-License-Identifier: Apache-2.0
//! Throughput of one connection, with and without segmentation offload.

use std::net::SocketAddrV4;

use anyhow::Result;

use super::{Bench, Trial};
use crate::objects::service_port::SINK;
use crate::report::Better::More;
use crate::testbed::At;
use crate::traffic::stream;

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let to = SocketAddrV4::new(bench.cluster.probe().cluster, SINK);
    let offload = |state: &str| {
        trial.testbed.shell(At::Client, &format!("ethtool -K eth0 tso {state} gso {state} >/dev/null"))
    };
    for (what, state) in [("TSO", "on"), ("no TSO", "off")] {
        offload(state)?;
        let rate = stream(trial.testbed, trial.pods, to, bench.settings.round * 2);
        offload("on")?;
        let name = format!("throughput of one connection, {} Services: {what}", trial.level);
        bench.report.add(&name, "Gbit/s", More, trial.who, rate? / 1e9);
    }
    Ok(())
}

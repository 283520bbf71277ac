// SPDX-License-Identifier: Apache-2.0
//! One established connection that sends as much as goes, with segmentation offload and without.

use std::net::SocketAddrV4;

use anyhow::Result;

use super::{Bench, Trial};
use crate::objects::service_port::SINK;
use crate::report::Better::More;
use crate::traffic::stream;
use crate::world::At;

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let to = SocketAddrV4::new(bench.cluster.probe().cluster, SINK);
    let offload = |state: &str| {
        trial.world.shell(At::Client, &format!("ethtool -K eth0 tso {state} gso {state} >/dev/null"))
    };
    for (what, state) in [("TSO", "on"), ("no TSO", "off")] {
        offload(state)?;
        let rate = stream(trial.world, trial.pods, to, bench.settings.round * 2);
        offload("on")?;
        let name = format!("throughput of a connection, {} Services: {what}", trial.level);
        bench.report.add(&name, "Gbit/s", More, trial.who, rate? / 1e9);
    }
    Ok(())
}

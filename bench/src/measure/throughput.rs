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
    for (what, segments) in [("TSO", 65535), ("no TSO", 1)] {
        trial.world.shell(At::Client, &format!("ip link set dev eth0 gso_max_segs {segments}"))?;
        let rate = stream(trial.world, trial.pods, to, bench.settings.round * 2);
        trial.world.shell(At::Client, "ip link set dev eth0 gso_max_segs 65535")?;
        let name = format!("throughput of a connection, {} Services: {what}", trial.level);
        bench.report.add(&name, "Gbit/s", More, trial.who, rate? / 1e9);
    }
    Ok(())
}

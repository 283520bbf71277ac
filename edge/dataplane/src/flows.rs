// SPDX-License-Identifier: Apache-2.0
//! Reads the flows that the kernel remembers. Tests use it; what hosts exchange is in
//! `exceptions`.

use steerage_edge_packet::maps::{Flow, FlowKey};
use steerage_edge_packet::{V4, V6};

use crate::error::Error;
use crate::maps::Maps;

/// All established flows, of both families.
pub(crate) fn read(maps: &Maps) -> Result<Vec<(FlowKey<V6>, Flow)>, Error> {
    let mut flows = maps.flows6.read()?;
    let of_v4 = maps.flows4.read::<FlowKey<V4>, Flow>()?;
    flows.extend(of_v4.into_iter().map(|(key, flow)| (key.mapped(), flow)));
    Ok(flows)
}

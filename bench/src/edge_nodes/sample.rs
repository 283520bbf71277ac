// SPDX-License-Identifier: Apache-2.0
//! What a host and the nodes have counted at one moment. Pure.

use std::time::Instant;

use super::hosts::Usage;
use super::nodes::Asked;
use super::world::Traffic;

/// All that a host and the nodes have counted by now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) usage: Usage,
    pub(super) link: Traffic,
    pub(super) api: Traffic,
    pub(super) asked: Asked,
}

/// CPU time in a second of each host.
pub(super) fn cpu_rates(before: &[Sample], after: &[Sample]) -> Vec<f64> {
    let rate = |(before, after): (&Sample, &Sample)| {
        let used = after.usage.cpu.saturating_sub(before.usage.cpu).as_secs_f64();
        used / after.at.duration_since(before.at).as_secs_f64()
    };
    before.iter().zip(after).map(rate).collect()
}

pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

// SPDX-License-Identifier: Apache-2.0
//! The results of the controller's benchmark, under names that say of how many Services and nodes they are. Pure.

use std::time::Duration;

use crate::report::{Better, Report, percentile};
use crate::who::Who;

/// A report, and what the next results are of.
pub(super) struct Results {
    pub(super) report: Report,
    of: String,
}

impl Results {
    pub(super) fn new() -> Self {
        Self { report: Report::new("controller", "–"), of: String::new() }
    }

    /// The next results are of this many Services and nodes.
    pub(super) fn set_scale(&mut self, services: u32, nodes: u32) {
        self.of = format!("{services} Services, {nodes} nodes");
    }

    /// Adds a value of which less is better.
    pub(super) fn add(&mut self, metric: &str, unit: &'static str, value: f64) {
        self.report.add(&format!("{metric}, {}", self.of), unit, Better::Less, Who::Ours, value);
    }

    /// Adds a rate, of which more is better.
    pub(super) fn add_rate(&mut self, metric: &str, per_second: f64) {
        self.report.add(&format!("{metric}, {}", self.of), "1/s", Better::More, Who::Ours, per_second);
    }

    /// Adds the percentiles of delays.
    pub(super) fn add_delays(&mut self, metric: &str, delays: &[Duration]) {
        for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
            let seconds = percentile(delays, percent).unwrap_or_default();
            self.add(&format!("{metric}, {name}"), "ms", seconds * 1000.0);
        }
    }
}

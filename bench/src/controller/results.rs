// SPDX-License-Identifier: Apache-2.0
//! The results of the controller's benchmark, under names that say of how many Services and nodes they are. Pure.

use std::time::Duration;

use super::program::Rest;
use crate::report::{Better, Report, percentile};
use crate::who::Who;

/// A report, and what the next results are of.
pub(super) struct Results {
    pub(super) report: Report,
    of: String,
}

/// What a start with everything in place cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    /// Until every load balancer was compared.
    pub(super) planned: Duration,
    /// CPU seconds until then.
    pub(super) cpu: f64,
    pub(super) rest: Rest,
    pub(super) peak_mebibytes: f64,
    pub(super) writes: Writes,
}

/// What a change of a node cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeChange {
    /// Until the provider had the nodes, for all load balancers.
    pub(super) reached: Duration,
    pub(super) cpu: f64,
    pub(super) writes: Writes,
    pub(super) provider_calls: f64,
}

/// Requests that change objects.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writes {
    /// Of Services and of the edge's objects.
    pub(super) objects: f64,
    pub(super) events: f64,
}

impl Writes {
    /// Those since an earlier count.
    pub(super) fn since(self, before: Self) -> Self {
        Self { objects: self.objects - before.objects, events: self.events - before.events }
    }
}

impl Results {
    pub(super) fn new() -> Self {
        Self { report: Report::new("controller", "upstream service controller"), of: String::new() }
    }

    /// The next results are of this many Services and nodes.
    pub(super) fn set_scale(&mut self, services: u32, nodes: u32) {
        self.of = format!("{services} Services, {nodes} nodes");
    }

    /// Adds a value of which less is better.
    pub(super) fn add(&mut self, who: Who, metric: &str, unit: &'static str, value: f64) {
        self.report.add(&format!("{metric}, {}", self.of), unit, Better::Less, who, value);
    }

    /// Adds a lower bound: the work was given up after this value.
    pub(super) fn add_bound(&mut self, who: Who, metric: &str, unit: &'static str, value: f64) {
        self.report.add_unfinished(&format!("{metric}, {}", self.of), unit, who, value);
    }

    /// Adds what a start cost. `what` names the start.
    pub(super) fn add_start(&mut self, who: Who, what: &str, start: &Start) {
        self.add(who, &format!("{what}: time until everything is planned"), "s", start.planned.as_secs_f64());
        self.add(who, &format!("{what}: CPU"), "s", start.cpu);
        let (after, cpu) = (format!("{what}: time until it rests"), format!("{what}: CPU until it rests"));
        let add = if start.rest.is_bound { Self::add_bound } else { Self::add };
        add(self, who, &after, "s", start.rest.after.as_secs_f64());
        add(self, who, &cpu, "s", start.rest.cpu);
        self.add(who, &format!("{what}: peak resident memory"), "MiB", start.peak_mebibytes);
        self.add(who, &format!("{what}: writes"), "", start.writes.objects);
        self.add(who, &format!("{what}: events written"), "", start.writes.events);
    }

    /// Adds what a change of a node cost. `what` names the change.
    pub(super) fn add_node_change(&mut self, who: Who, what: &str, change: &NodeChange) {
        let reached = format!("{what}: time until the provider has the nodes");
        self.add(who, &reached, "s", change.reached.as_secs_f64());
        self.add(who, &format!("{what}: CPU"), "s", change.cpu);
        self.add(who, &format!("{what}: provider calls"), "", change.provider_calls);
        self.add(who, &format!("{what}: writes"), "", change.writes.objects);
        self.add(who, &format!("{what}: events written"), "", change.writes.events);
    }

    /// Adds a rate, of which more is better.
    pub(super) fn add_rate(&mut self, metric: &str, per_second: f64) {
        self.report.add(&format!("{metric}, {}", self.of), "1/s", Better::More, Who::Ours, per_second);
    }

    /// Adds the percentiles of delays.
    pub(super) fn add_delays(&mut self, metric: &str, delays: &[Duration]) {
        for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
            let seconds = percentile(delays, percent).unwrap_or_default();
            self.add(Who::Ours, &format!("{metric}, {name}"), "ms", seconds * 1000.0);
        }
    }
}

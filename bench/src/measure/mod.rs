// SPDX-License-Identifier: Apache-2.0
//! The measurements and their order: one trial for each number of Services, run and program. A trial starts the program on an
//! empty node, measures it and ends it. The programs never run at the same time.

mod churn;
mod connections;
mod draw;
mod first_packet;
mod health;
mod idle;
mod kernel;
mod one_of_many;
mod repair;
mod restart;
mod start;
mod throughput;

pub use draw::{Extent, draw};

use std::collections::BTreeSet;
use std::net::SocketAddrV4;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::cluster::Cluster;
use crate::host;
use crate::objects::{Shape, Side, service_port};
use crate::report::Report;
use crate::subject::{Programs, Running};
use crate::testbed::{At, DriverNetns, Testbed};
use crate::traffic::Pods;
use crate::who::Who;

/// The measurements of a trial, in order. Churn and repair are last of those with a running program: the work of one may continue,
/// and kube-proxy does not repair everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Measure {
    /// Time from a change of an EndpointSlice to the first packet at a new endpoint
    #[value(alias = "follow")]
    FirstPacket,
    /// Time from a change of one of many endpoints to the commit of the rules; only with more than eight endpoints
    OneOfMany,
    /// Time from a change of an EndpointSlice to the new status of the health-check port
    Health,
    /// Time from the initial list to fully programmed, CPU time, memory; always measured
    Start,
    /// Time and rate of new connections
    Connections,
    /// Throughput of one connection
    Throughput,
    /// CPU time and API requests while nothing changes
    Idle,
    /// CPU time and lag under many changes per second
    Churn,
    /// Time without service after another program changed or deleted the tables
    Repair,
    /// Kernel time of one endpoint change, for the agent only
    Kernel,
    /// Time from the initial list of a new process to the end of its first write, with the rules of its predecessor in the kernel
    Restart,
}

/// The extent of a benchmark.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Numbers of Services, ascending.
    pub levels: Vec<u32>,
    /// How many endpoints the Services have.
    pub shape: Shape,
    /// Trials of each program at each level.
    pub runs: usize,
    /// Measurements of each trial.
    pub measures: BTreeSet<Measure>,
    /// Measured programs.
    pub subjects: Vec<Who>,
    /// Maximum number of changes of each kind in a trial.
    pub changes: usize,
    /// Maximum time for changes of each kind in a trial.
    pub change_time: Duration,
    /// Length of a round of new connections, and half the length of a throughput measurement.
    pub round: Duration,
    /// Times that each change by another program is made.
    pub repairs: usize,
    /// Length of churn, and changes per second.
    pub churn: (Duration, u32),
    /// Length of the idle measurement.
    pub idle: Duration,
    /// Time after which a step is given up.
    pub limit: Duration,
}

/// The highest level at which churn, idle load and throughput are measured.
const MAX_FULL_LEVEL: u32 = 10_000;

/// A benchmark in progress.
struct Bench<'a> {
    settings: &'a Settings,
    programs: &'a Programs,
    cluster: Cluster,
    testbeds: Vec<(Who, Testbed, Pods)>,
    report: Report,
    /// Current endpoints of the probe Service.
    side: Side,
    /// Number of churn changes so far.
    churn_changes: u32,
}

/// A trial: one start of one program.
struct Trial<'a> {
    who: Who,
    level: u32,
    testbed: &'a Testbed,
    pods: &'a Pods,
    running: &'a Running,
}

/// Runs all trials. Calls `save` with the results so far after each trial.
pub fn run(
    settings: &Settings,
    programs: &Programs,
    folder: &Path,
    driver: &DriverNetns,
    save: impl Fn(&Report) -> Result<()>,
) -> Result<Report> {
    let cluster = Cluster::start(folder, settings.shape)?;
    let testbed = |who: &Who| -> Result<_> {
        let testbed = Testbed::new(driver, *who)?;
        let pods = Pods::serve(&testbed, settings.shape)?;
        Ok((*who, testbed, pods))
    };
    let testbeds: Result<Vec<_>> = settings.subjects.iter().map(testbed).collect();
    let report = Report::new(Who::Ours.title(), Who::Peer.title());
    let mut bench =
        Bench { settings, programs, cluster, testbeds: testbeds?, report, side: Side::A, churn_changes: 0 };
    let mut abandoned = BTreeSet::new();
    let mut number = 0;
    for level in &settings.levels {
        let begun = std::time::Instant::now();
        bench.cluster.fill(*level)?;
        eprintln!("created {level} Services in {:.1} s", begun.elapsed().as_secs_f64());
        for run in 0..settings.runs {
            let mut order = settings.subjects.clone();
            if run % 2 == 1 {
                order.reverse();
            }
            for who in order.into_iter().filter(|who| !abandoned.contains(who)).collect::<Vec<_>>() {
                number += 1;
                eprintln!("{level} Services, run {}, {} (load {:.1})", run + 1, who.title(), host::load());
                if !bench.trial(who, *level, number)? {
                    eprintln!("{} reached the time limit; skipping it with more Services", who.title());
                    abandoned.insert(who);
                }
                save(&bench.report)?;
            }
        }
    }
    Ok(bench.report)
}

impl Bench<'_> {
    /// Runs one trial. Returns false if the program did not finish its start.
    fn trial(&mut self, who: Who, level: u32, number: usize) -> Result<bool> {
        let mut testbeds = std::mem::take(&mut self.testbeds);
        let found = testbeds.iter_mut().find(|(of, ..)| *of == who).context("no testbed for it")?;
        let (_, testbed, pods) = &*found;
        let running = Running::start(self.programs, who, testbed, &self.cluster.kubeconfig(who), number)?;
        let trial = Trial { who, level, testbed, pods, running: &running };
        let result = self.measure(&trial).with_context(|| {
            format!("{} with {level} Services; end of its log:\n{}", who.title(), running.log_tail())
        });
        let group = running.end()?;
        if matches!(result, Ok(true)) {
            start::after_end(self, who, level, &group)?;
            if self.settings.measures.contains(&Measure::Restart) {
                restart::measure(self, who, testbed, level, number)?;
            }
            if who == Who::Ours && self.settings.measures.contains(&Measure::Kernel) {
                kernel::measure(self, testbed, level)?;
            }
        }
        // The next trial starts with an empty node.
        testbed.shell(At::Node, "nft flush ruleset; conntrack -F >/dev/null 2>&1 || true")?;
        drop(group);
        self.testbeds = testbeds;
        result
    }

    fn measure(&mut self, trial: &Trial<'_>) -> Result<bool> {
        if !start::measure(self, trial)? {
            return Ok(false);
        }
        let measures = self.settings.measures.clone();
        let full = self.settings.levels.iter().copied().filter(|level| *level <= MAX_FULL_LEVEL).max()
            == Some(trial.level);
        for measure in measures {
            match measure {
                Measure::FirstPacket => first_packet::measure(self, trial)?,
                Measure::OneOfMany => one_of_many::measure(self, trial)?,
                Measure::Health => health::measure(self, trial)?,
                Measure::Connections => connections::measure(self, trial)?,
                Measure::Throughput if full => throughput::measure(self, trial)?,
                Measure::Churn if full => churn::measure(self, trial)?,
                Measure::Idle if full => idle::measure(self, trial)?,
                Measure::Repair if full => repair::measure(self, trial)?,
                Measure::Start
                | Measure::Kernel
                | Measure::Restart
                | Measure::Throughput
                | Measure::Churn
                | Measure::Repair
                | Measure::Idle => {}
            }
        }
        Ok(true)
    }

    /// The destination of the probe's datagrams.
    fn probe(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.cluster.probe().cluster, service_port::PROBE)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The measurements, and the order in which they are taken: for each number of Services, each run and each program in turn, one
//! trial, which starts the program on an empty node, measures, and ends it. The programs never run at the same time.

mod churn;
mod connections;
mod follow;
mod health;
mod idle;
mod kernel;
mod start;
mod throughput;

use std::collections::BTreeSet;
use std::net::SocketAddrV4;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::cluster::Cluster;
use crate::host;
use crate::objects::{Side, service_port};
use crate::report::Report;
use crate::subject::{Programs, Running, Who};
use crate::traffic::Pods;
use crate::world::{At, Home, World};

/// What can be measured, in the order in which it is: churn last, since a program may work on after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Measure {
    /// From an EndpointSlice's change to the first packet at the new endpoint
    Follow,
    /// From an EndpointSlice's change to the other answer of the health-check port
    Health,
    /// From the end of the lists to everything programmed; memory; processor time. Always taken
    Start,
    /// New connections
    Connections,
    /// Established connections
    Throughput,
    /// What is done when nothing happens
    Idle,
    /// Many changes a second
    Churn,
    /// What one change costs the kernel; of the agent alone
    Kernel,
}

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Numbers of Services, growing.
    pub levels: Vec<u32>,
    /// Trials of each program at each level.
    pub runs: usize,
    /// What is measured.
    pub measures: BTreeSet<Measure>,
    /// Which programs.
    pub subjects: Vec<Who>,
    /// At most so many changes of a kind in a trial.
    pub changes: usize,
    /// After so long no further change is made.
    pub change_time: Duration,
    /// Length of a round of connections, and of a stream.
    pub round: Duration,
    /// Length of the churn, and its changes a second.
    pub churn: (Duration, u32),
    /// How long nothing happens.
    pub idle: Duration,
    /// What takes longer is given up.
    pub limit: Duration,
}

/// The largest number of Services at which churn, idleness and streams are measured.
const USUAL: u32 = 10_000;

/// Everything there is.
struct Bench<'a> {
    settings: &'a Settings,
    programs: &'a Programs,
    cluster: Cluster,
    worlds: Vec<(Who, World, Pods)>,
    report: Report,
    /// The probe's present endpoints.
    side: Side,
    /// Changes of numbered Services made so far.
    churned: u32,
}

/// One program, started for one trial.
struct Trial<'a> {
    who: Who,
    level: u32,
    world: &'a World,
    pods: &'a Pods,
    running: &'a Running,
}

/// Takes all measurements; `save` gets what there is after each trial.
pub fn run(
    settings: &Settings,
    programs: &Programs,
    folder: &Path,
    home: &Home,
    save: impl Fn(&Report) -> Result<()>,
) -> Result<Report> {
    let cluster = Cluster::start(folder)?;
    let world = |who: &Who| -> Result<_> {
        let world = World::new(home, *who)?;
        let pods = Pods::serve(&world)?;
        Ok((*who, world, pods))
    };
    let worlds: Result<Vec<_>> = settings.subjects.iter().map(world).collect();
    let report = Report::default();
    let mut bench = Bench { settings, programs, cluster, worlds: worlds?, report, side: Side::A, churned: 0 };
    let mut given_up = BTreeSet::new();
    let mut number = 0;
    for level in &settings.levels {
        let begun = std::time::Instant::now();
        bench.cluster.fill(*level)?;
        eprintln!("{level} Services are there after {:.1} s", begun.elapsed().as_secs_f64());
        for run in 0..settings.runs {
            let mut order = settings.subjects.clone();
            if run % 2 == 1 {
                order.reverse();
            }
            for who in order.into_iter().filter(|who| !given_up.contains(who)).collect::<Vec<_>>() {
                number += 1;
                eprintln!("{level} Services, run {}, {} (load {:.1})", run + 1, who.title(), host::load());
                if !bench.trial(who, *level, number)? {
                    eprintln!("{} was given up; it is not tried with more Services", who.title());
                    given_up.insert(who);
                }
                save(&bench.report)?;
            }
        }
    }
    Ok(bench.report)
}

impl Bench<'_> {
    /// One trial. False when the program did not finish its start.
    fn trial(&mut self, who: Who, level: u32, number: usize) -> Result<bool> {
        let mut worlds = std::mem::take(&mut self.worlds);
        let found = worlds.iter_mut().find(|(of, ..)| *of == who).context("no world for it")?;
        let (_, world, pods) = &*found;
        let running = Running::start(self.programs, who, world, &self.cluster.kubeconfig(who), number)?;
        let trial = Trial { who, level, world, pods, running: &running };
        let result = self.measure(&trial).with_context(|| {
            format!("{} with {level} Services; its last words:\n{}", who.title(), running.last_words())
        });
        let group = running.end()?;
        if matches!(result, Ok(true)) {
            start::after_end(self, who, level, &group)?;
            if who == Who::Ours && self.settings.measures.contains(&Measure::Kernel) {
                kernel::measure(self, world, level)?;
            }
        }
        // What the next trial begins with.
        world.shell(At::Node, "nft flush ruleset; conntrack -F >/dev/null 2>&1 || true")?;
        drop(group);
        self.worlds = worlds;
        result
    }

    fn measure(&mut self, trial: &Trial<'_>) -> Result<bool> {
        if !start::measure(self, trial)? {
            return Ok(false);
        }
        let measures = self.settings.measures.clone();
        let usual =
            self.settings.levels.iter().copied().filter(|level| *level <= USUAL).max() == Some(trial.level);
        for measure in measures {
            match measure {
                Measure::Follow => follow::measure(self, trial)?,
                Measure::Health => health::measure(self, trial)?,
                Measure::Connections => connections::measure(self, trial)?,
                Measure::Throughput if usual => throughput::measure(self, trial)?,
                Measure::Churn if usual => churn::measure(self, trial)?,
                Measure::Idle if usual => idle::measure(self, trial)?,
                Measure::Start | Measure::Kernel | Measure::Throughput | Measure::Churn | Measure::Idle => {}
            }
        }
        Ok(true)
    }

    /// Where the probe's datagrams go.
    fn probe(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.cluster.probe().cluster, service_port::PROBE)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The phases of a measurement, in their order, and the run of one program through them.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::program::{Program, Programs};
use super::recorder::Phase;
use super::world::World;
use crate::who::Who;

/// Time between two looks at the record.
const LOOK: Duration = Duration::from_millis(200);
/// A phase ends after this time without work: longer than either program waits before it asks again whether a load balancer is active,
/// or tries again what failed once.
const QUIET: Duration = Duration::from_secs(12);
/// Time between two messages about what is missing after that.
const TELL: Duration = Duration::from_mins(1);
/// Longest wait for what a phase is about: after it, the work was not done.
const LIMIT: Duration = Duration::from_hours(1);

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Create,
    PortChange,
    EndpointsMove,
    NodeOut,
    NodeBack,
    NodeReplaced,
    Restart,
    AfterRestart,
    Delete,
}

impl Step {
    /// In the order of a run.
    pub(super) const ALL: [Self; 9] = [
        Self::Create,
        Self::PortChange,
        Self::EndpointsMove,
        Self::NodeOut,
        Self::NodeBack,
        Self::NodeReplaced,
        Self::Restart,
        Self::AfterRestart,
        Self::Delete,
    ];

    /// In tables and in JSON.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::PortChange => "change of the port",
            Self::EndpointsMove => "endpoints move, policy Local",
            Self::NodeOut => "a node leaves",
            Self::NodeBack => "the node comes back",
            Self::NodeReplaced => "a node is replaced",
            Self::Restart => "restart",
            Self::AfterRestart => "the first minutes after it",
            Self::Delete => "delete",
        }
    }

    fn change(self, world: &mut World, services: u32) -> Result<()> {
        match self {
            Self::Create => world.create_services(services),
            Self::PortChange => world.change_port(),
            Self::EndpointsMove => world.move_endpoints(),
            Self::NodeOut => world.take_node_out(),
            Self::NodeBack => world.put_node_back(),
            Self::NodeReplaced => world.replace_node(),
            Self::Delete => world.delete_services(),
            Self::Restart | Self::AfterRestart => Ok(()),
        }
    }
}

/// How a program did its work.
pub(super) struct Measured {
    pub(super) phases: Vec<(Step, Phase)>,
    /// Objects of the cloud that were left after the last Service.
    pub(super) left_over: usize,
}

/// Measures a program with so many Services, in a world of its own.
pub(super) fn run(programs: &Programs, who: Who, services: u32, number: usize) -> Result<Measured> {
    let mut world = World::start(programs.vendor, who)?;
    let start = |world: &World, offset| programs.start(who, world, 2 * number + offset);
    let mut program = start(&world, 0)?;
    // Before there are Services: what a program reads when it starts belongs to no Service.
    settle(&world, &mut program, Instant::now(), false)?;
    let mut phases = Vec::new();
    for step in Step::ALL {
        eprintln!("{}, {services} Services: {}", programs.vendor.title(who), step.title());
        let begun;
        if step == Step::Restart {
            program.end()?;
            world.recorder().reset();
            begun = Instant::now();
            program = start(&world, 1)?;
        } else {
            world.recorder().reset();
            begun = Instant::now();
            step.change(&mut world, services)?;
        }
        let took = if step == Step::AfterRestart {
            let period = Duration::from_secs(45) + Duration::from_millis(600) * services;
            sleep(period);
            period
        } else {
            settle(&world, &mut program, begun, step == Step::Restart)?
        };
        phases.push((step, Phase { counts: world.recorder().counts(), took }));
    }
    program.end()?;
    Ok(Measured { phases, left_over: world.left_over()? })
}

/// Waits until the cloud has what the Services ask for and the program rests. The time from the change to its last call.
fn settle(world: &World, program: &mut Program, begun: Instant, must_call: bool) -> Result<Duration> {
    let mut told = None;
    loop {
        sleep(LOOK);
        program.ensure_runs()?;
        let last = world.recorder().last_work();
        let rests = last.unwrap_or(begun).elapsed() >= QUIET && (last.is_some() || !must_call);
        let missing = if rests { world.missing()? } else { None };
        if rests && missing.is_none() {
            return Ok(last.map_or(Duration::ZERO, |last| last.saturating_duration_since(begun)));
        }
        if let Some(missing) = missing {
            ensure!(begun.elapsed() < LIMIT, "the cloud does not have what the Services ask for: {missing}");
            if told.is_none_or(|told: Instant| told.elapsed() >= TELL) {
                eprintln!("waiting: {missing}");
                told = Some(Instant::now());
            }
            sleep(Duration::from_secs(1));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The controller with a real API server: first programming, restarts, a node that joins and leaves, and moving endpoints.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::program::{Program, Programs};
use super::results::{NodeChange, Results, Start};
use super::world::World;
use super::{Scale, moves, peer};
use crate::who::Who;

/// Numbers of the peer's processes, which the controller's do not reach.
const FIRST_OF_PEER: usize = 500;

/// Measures all of the controller. `rate`: how many EndpointSlices change per second.
pub(super) fn measure(scale: &Scale, programs: &Programs, rate: u32, results: &mut Results) -> Result<()> {
    let mut world = World::start()?;
    world.fill(scale)?;
    let mut bench = Bench { world, programs, results, started: 0 };
    let (mut program, first) = bench.start()?;
    bench.world.ensure_programmed()?;
    bench.results.add_start(Who::Ours, "first start", &first);
    for _ in 0..scale.runs {
        program.end()?;
        let start;
        (program, start) = bench.start()?;
        bench.results.add_start(Who::Ours, "restart", &start);
    }
    for _ in 0..scale.runs {
        bench.change_node(&program, "joins", World::add_node)?;
        bench.change_node(&program, "leaves", World::remove_node)?;
    }
    bench.move_endpoints(&program, rate, scale.period)?;
    program.end()
}

/// Measures the peer, if there is one, with an API server of its own.
pub(super) fn measure_peer(scale: &Scale, programs: &Programs, results: &mut Results) -> Result<()> {
    if programs.peer.is_none() {
        return Ok(());
    }
    let mut world = World::start()?;
    world.fill_for_peer(scale)?;
    peer::measure(&mut world, programs, scale, "", FIRST_OF_PEER, results)
}

struct Bench<'a> {
    world: World,
    programs: &'a Programs,
    results: &'a mut Results,
    started: usize,
}

impl Bench<'_> {
    /// Starts the controller, and waits until it has planned everything.
    fn start(&mut self) -> Result<(Program, Start)> {
        self.started += 1;
        let before = self.world.writes()?;
        let program = self.programs.start(Who::Ours, self.world.kubeconfig(), self.started)?;
        let planned = program.wait_done(self.world.services())?;
        let (cpu, rest) = (program.cpu_seconds(), program.rest());
        let writes = self.world.writes()?.since(before);
        let start = Start { planned, cpu, rest, peak_mebibytes: program.peak_mebibytes(), writes };
        Ok((program, start))
    }

    fn change_node(
        &mut self,
        program: &Program,
        verb: &str,
        change: fn(&mut World) -> Result<()>,
    ) -> Result<()> {
        let idle = program.idle_rate();
        let (writes, calls, cpu) =
            (self.world.writes()?, self.world.provider_calls()?, program.cpu_seconds());
        let begun = Instant::now();
        change(&mut self.world)?;
        self.world.wait_node_set()?;
        let reached = begun.elapsed();
        program.rest();
        let change = NodeChange {
            reached,
            cpu: (program.cpu_seconds() - cpu - idle * begun.elapsed().as_secs_f64()).max(0.0),
            writes: self.world.writes()?.since(writes),
            provider_calls: self.world.provider_calls()? - calls,
        };
        self.results.add_node_change(Who::Ours, &format!("a node {verb}"), &change);
        Ok(())
    }

    fn move_endpoints(&mut self, program: &Program, rate: u32, period: Duration) -> Result<()> {
        let cpu = program.cpu_seconds();
        let begun = Instant::now();
        let moved = moves::run(&self.world, rate, period)?;
        let share = (program.cpu_seconds() - cpu) / begun.elapsed().as_secs_f64() * 100.0;
        let what = format!("{rate} changes of endpoints per second");
        self.results.add_delays(&format!("{what}: time until the targets are written"), &moved.delays);
        self.results.add(Who::Ours, &format!("{what}: CPU"), "% of a core", share);
        self.results.add_rate(&format!("{what}: changes made"), moved.per_second);
        Ok(())
    }
}

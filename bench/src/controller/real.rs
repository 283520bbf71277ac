// SPDX-License-Identifier: Apache-2.0
//! The controller with a real API server: first programming, restarts, a node that joins and leaves, and moving endpoints.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::program::Program;
use super::results::Results;
use super::world::World;
use super::{Scale, moves};

/// Measures all of it. `rate`: how many EndpointSlices change per second.
pub(super) fn measure(
    scale: &Scale,
    controller: &Path,
    folder: &Path,
    rate: u32,
    results: &mut Results,
) -> Result<()> {
    let mut world = World::start()?;
    world.fill(scale.services, scale.nodes, scale.endpoints)?;
    let (controller, folder) = (controller.to_owned(), folder.to_owned());
    let mut bench = Bench { world, controller, folder, results, started: 0 };
    let mut program = bench.program_everything()?;
    for _ in 0..scale.runs {
        program.end()?;
        program = bench.restart()?;
    }
    for _ in 0..scale.runs {
        bench.change_node(&program, "joins", World::add_node)?;
        bench.change_node(&program, "leaves", World::remove_node)?;
    }
    bench.move_endpoints(&program, rate, scale.period)?;
    program.end()
}

struct Bench<'a> {
    world: World,
    controller: PathBuf,
    folder: PathBuf,
    results: &'a mut Results,
    started: usize,
}

impl Bench<'_> {
    fn start(&mut self) -> Result<Program> {
        self.started += 1;
        Program::start(&self.controller, self.world.kubeconfig(), &self.folder, self.started)
    }

    /// Starts with nothing in place.
    fn program_everything(&mut self) -> Result<Program> {
        let program = self.start()?;
        let took = program.wait_done(self.world.services())?;
        self.world.ensure_programmed()?;
        self.results.add(
            "first start: time until all load balancers are programmed",
            "s",
            took.as_secs_f64(),
        );
        self.results.add("first start: CPU", "s", program.cpu_seconds());
        Ok(program)
    }

    /// Starts with everything in place.
    fn restart(&mut self) -> Result<Program> {
        let before = self.world.writes()?;
        let program = self.start()?;
        let took = program.wait_done(self.world.services())?;
        let cpu = program.cpu_seconds();
        program.wait_quiet()?;
        let writes = self.world.writes()? - before;
        self.results.add("restart: time until all load balancers are compared", "s", took.as_secs_f64());
        self.results.add("restart: CPU", "s", cpu);
        self.results.add("restart: writes", "", writes);
        self.results.add("restart: peak resident memory", "MiB", program.peak_mebibytes());
        Ok(program)
    }

    fn change_node(
        &mut self,
        program: &Program,
        verb: &str,
        change: fn(&mut World) -> Result<()>,
    ) -> Result<()> {
        let idle = program.idle_rate()?;
        let (writes, cpu) = (self.world.writes()?, program.cpu_seconds());
        let begun = Instant::now();
        change(&mut self.world)?;
        self.world.wait_node_set()?;
        let took = begun.elapsed();
        program.wait_quiet()?;
        let cpu = program.cpu_seconds() - cpu - idle * begun.elapsed().as_secs_f64();
        let writes = self.world.writes()? - writes;
        self.results.add(
            &format!("a node {verb}: time until the node set is written"),
            "s",
            took.as_secs_f64(),
        );
        self.results.add(&format!("a node {verb}: CPU"), "s", cpu.max(0.0));
        self.results.add(&format!("a node {verb}: writes"), "", writes);
        Ok(())
    }

    fn move_endpoints(&mut self, program: &Program, rate: u32, period: Duration) -> Result<()> {
        let cpu = program.cpu_seconds();
        let begun = Instant::now();
        let moved = moves::run(&self.world, rate, period)?;
        let share = (program.cpu_seconds() - cpu) / begun.elapsed().as_secs_f64() * 100.0;
        let what = format!("{rate} changes of endpoints per second");
        self.results.add_delays(&format!("{what}: time until the targets are written"), &moved.delays);
        self.results.add(&format!("{what}: CPU"), "% of a core", share);
        self.results.add_rate(&format!("{what}: changes made"), moved.per_second);
        Ok(())
    }
}

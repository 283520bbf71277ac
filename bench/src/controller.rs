// SPDX-License-Identifier: Apache-2.0
//! The controller with the edge's provider and its real objects: first programming, restart, a node that joins and leaves, and moving
//! endpoints, with thousands of Services and nodes. No edge runs: the objects are the result.
//!
//! All is measured from outside: objects by a watch, writes by the API server's count, CPU time and memory by the kernel. Only the end
//! of a phase is read from the controller's own counters.

mod moves;
mod objects;
mod program;
mod world;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use steerage_process::duration;

use crate::host;
use crate::report::{Better, Report, percentile};
use crate::who::Who;
use program::Program;
use world::World;

/// The flags of `steerage-bench controller`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run a short version: few Services and nodes, and short measurements
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure with this number of Services, half of them with api steering [default: 10000; with --quick 500]
    #[arg(long, value_name = "COUNT")]
    services: Option<u32>,
    /// Measure with this number of nodes [default: 5000; with --quick 200]
    #[arg(long, value_name = "COUNT")]
    nodes: Option<u32>,
    /// Give each Service this many endpoints
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    endpoints: u32,
    /// Repeat restarts and changes of nodes this many times [default: 5; with --quick 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    runs: Option<u16>,
    /// Change this many EndpointSlices per second
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    rate: u32,
    /// Change EndpointSlices for this long [default: 1m; with --quick 10s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    period: Option<Duration>,
    /// Measure this controller [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let own = std::env::current_exe()?;
        let file = self.controller.clone().unwrap_or_else(|| own.with_file_name("steerage"));
        ensure!(file.exists(), "{} is missing; run hack/bench", file.display());
        let runs = self.runs.unwrap_or(if self.quick { 3 } else { 5 });
        let services = self.services.unwrap_or(if self.quick { 500 } else { 10_000 });
        let nodes = self.nodes.unwrap_or(if self.quick { 200 } else { 5000 });
        ensure!(services >= 2 && nodes >= 2, "at least 2 Services and 2 nodes are needed");
        let period = self.period.unwrap_or(Duration::from_secs(if self.quick { 10 } else { 60 }));
        let folder = std::env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let load = host::load();
        let mut world = World::start()?;
        world.fill(services, nodes, self.endpoints)?;
        let mut bench = Bench {
            what: format!("{services} Services, {nodes} nodes"),
            world,
            file,
            folder: folder.clone(),
            report: Report::new("controller", "–"),
            started: 0,
        };
        let mut program = bench.program_everything()?;
        for _ in 0..runs {
            program.end()?;
            program = bench.restart()?;
        }
        for _ in 0..runs {
            bench.change_node(&program, "joins", World::add_node)?;
            bench.change_node(&program, "leaves", World::remove_node)?;
        }
        bench.move_endpoints(&program, self.rate, period)?;
        program.end()?;
        println!("{}; {runs} runs; load before {load:.1}, after {:.1}\n", host::describe(), host::load());
        println!("{}", bench.report.markdown());
        if let Some(json) = &self.json {
            fs::write(json, format!("{:#}\n", bench.report.json()))
                .with_context(|| format!("cannot write {}", json.display()))?;
        }
        // After a failure the log is kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

struct Bench {
    what: String,
    world: World,
    file: PathBuf,
    folder: PathBuf,
    report: Report,
    started: usize,
}

impl Bench {
    fn start(&mut self) -> Result<Program> {
        self.started += 1;
        Program::start(&self.file, self.world.kubeconfig(), &self.folder, self.started)
    }

    fn add(&mut self, metric: &str, unit: &'static str, better: Better, value: f64) {
        let name = format!("{metric}, {}", self.what);
        self.report.add(&name, unit, better, Who::Ours, value);
    }

    /// Starts with nothing in place.
    fn program_everything(&mut self) -> Result<Program> {
        let program = self.start()?;
        let took = program.wait_done(self.world.services())?;
        self.world.ensure_programmed()?;
        self.add(
            "first start: time until all load balancers are programmed",
            "s",
            Better::Less,
            took.as_secs_f64(),
        );
        self.add("first start: CPU", "s", Better::Less, program.cpu_seconds());
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
        self.add(
            "restart: time until all load balancers are compared",
            "s",
            Better::Less,
            took.as_secs_f64(),
        );
        self.add("restart: CPU", "s", Better::Less, cpu);
        self.add("restart: writes", "", Better::Less, writes);
        self.add("restart: peak resident memory", "MiB", Better::Less, program.peak_mebibytes());
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
        let begun = std::time::Instant::now();
        change(&mut self.world)?;
        self.world.wait_node_set()?;
        let took = begun.elapsed();
        program.wait_quiet()?;
        let cpu = program.cpu_seconds() - cpu - idle * begun.elapsed().as_secs_f64();
        let writes = self.world.writes()? - writes;
        self.add(
            &format!("a node {verb}: time until the node set is written"),
            "s",
            Better::Less,
            took.as_secs_f64(),
        );
        self.add(&format!("a node {verb}: CPU"), "s", Better::Less, cpu.max(0.0));
        self.add(&format!("a node {verb}: writes"), "", Better::Less, writes);
        Ok(())
    }

    fn move_endpoints(&mut self, program: &Program, rate: u32, period: Duration) -> Result<()> {
        let cpu = program.cpu_seconds();
        let begun = std::time::Instant::now();
        let moved = moves::run(&self.world, rate, period)?;
        let share = (program.cpu_seconds() - cpu) / begun.elapsed().as_secs_f64() * 100.0;
        let seconds = |percent| percentile(&moved.delays, percent).unwrap_or_default();
        let what = format!("{} changes of endpoints per second", number(moved.per_second));
        self.add(&format!("{what}: time until the targets are written, p50"), "s", Better::Less, seconds(50));
        self.add(&format!("{what}: time until the targets are written, p99"), "s", Better::Less, seconds(99));
        self.add(&format!("{what}: CPU"), "% of a core", Better::Less, share);
        Ok(())
    }
}

fn number(value: f64) -> String {
    format!("{value:.0}")
}

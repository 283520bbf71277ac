// SPDX-License-Identifier: Apache-2.0
//! The controller with the edge's provider and its real objects: first programming, restart, a node that joins and leaves, and moving
//! endpoints, with thousands of Services and nodes. No edge runs: the objects are the result.
//!
//! Once with a real API server, and once with one in memory, where that would be what is measured. All is measured from outside:
//! objects by a watch or by the request, writes by the API server's count, CPU time and memory by the kernel. Only the end of a phase is
//! read from the controller's own counters.

mod cell;
mod in_memory;
mod memory;
mod moves;
mod objects;
mod plot;
mod program;
mod real;
mod results;
mod world;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use steerage_process::duration;

use crate::host;
use results::Results;

/// Which API server the controller has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ApiServer {
    /// kube-apiserver with etcd
    Real,
    /// One in memory that answers at once
    Memory,
}

/// The flags of `steerage-bench controller`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run a short version: few Services and nodes, and short measurements
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only with these API servers
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,…", default_value = "real,memory")]
    only: Vec<ApiServer>,
    /// Instead, draw cost against Services and against nodes, with the API server in memory, as SVG into this directory
    #[arg(long, value_name = "DIRECTORY")]
    plot: Option<PathBuf>,
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
    /// Change this many EndpointSlices per second at the real API server
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    rate: u32,
    /// Change this many EndpointSlices per second at the API server in memory
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    memory_rate: u32,
    /// Change EndpointSlices for this long [default: 1m; with --quick 10s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    period: Option<Duration>,
    /// Measure this controller [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
struct Scale {
    services: u32,
    nodes: u32,
    endpoints: u32,
    runs: u16,
    period: Duration,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let own = std::env::current_exe()?;
        let file = self.controller.clone().unwrap_or_else(|| own.with_file_name("steerage"));
        ensure!(file.exists(), "{} is missing; run hack/bench", file.display());
        let scale = Scale {
            services: self.services.unwrap_or(if self.quick { 500 } else { 10_000 }),
            nodes: self.nodes.unwrap_or(if self.quick { 200 } else { 5000 }),
            endpoints: self.endpoints,
            runs: self.runs.unwrap_or(if self.quick { 3 } else { 5 }),
            period: self.period.unwrap_or(Duration::from_secs(if self.quick { 10 } else { 60 })),
        };
        ensure!(scale.services >= 2 && scale.nodes >= 2, "at least 2 Services and 2 nodes are needed");
        let folder = std::env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let load = host::load();
        let mut results = Results::new();
        results.set_scale(scale.services, scale.nodes);
        if let Some(plots) = &self.plot {
            in_memory::draw(&scale, &file, &folder, plots, &mut results)?;
        } else {
            if self.only.contains(&ApiServer::Real) {
                real::measure(&scale, &file, &folder, self.rate, &mut results)?;
            }
            if self.only.contains(&ApiServer::Memory) {
                in_memory::measure(&scale, &file, &folder, self.memory_rate, &mut results)?;
            }
        }
        let (machine, runs, after) = (host::describe(), scale.runs, host::load());
        println!("{machine}; {runs} runs; load before {load:.1}, after {after:.1}\n");
        println!("{}", results.report.markdown());
        if let Some(json) = &self.json {
            fs::write(json, format!("{:#}\n", results.report.json()))
                .with_context(|| format!("cannot write {}", json.display()))?;
        }
        // After a failure the log is kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

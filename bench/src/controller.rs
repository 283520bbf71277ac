// SPDX-License-Identifier: Apache-2.0
//! The controller with the edge's provider and its real objects: first programming, restart, a node that joins and leaves, and moving
//! endpoints, with thousands of Services and nodes. No edge runs: the objects are the result. Beside it, the upstream service
//! controller, as cloud-provider-aws runs it, with a provider that answers at once. It does not read endpoints.
//!
//! Once with a real API server, and once with one in memory, where that would be what is measured. All is measured from outside:
//! objects by a watch or by the request, writes by the API server's count, CPU time and memory by the kernel. Only the end of a phase is
//! read from the controller's own counters.

mod cell;
mod in_memory;
pub(crate) mod memory;
mod moves;
mod objects;
mod peer;
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
use program::Programs;
use results::Results;

/// The name of a result of both programs.
const HANGING: &str = "a node joins while one Service's provider calls hang: time until the provider has the nodes, for the others";

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
    /// Write the results as JSON to this file, after each program
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
    /// Measure the controller only, without the upstream service controller
    #[arg(long)]
    alone: bool,
    /// Give the upstream service controller the defaults of its flags: one Service at a time, 20 requests per second
    #[arg(long)]
    peer_defaults: bool,
    /// Give up a program that does not come to rest, or does not follow a change of nodes, after this time
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = duration::parse)]
    limit: Duration,
    /// Measure this controller [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Measure this cloud-controller-manager with the provider `memory` [default: the one from hack/prepare]
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
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
        let programs = self.programs(folder.clone())?;
        let load = host::load();
        let mut results = Results::new();
        results.set_scale(scale.services, scale.nodes);
        if let Some(plots) = &self.plot {
            in_memory::draw(&scale, &programs, plots, &mut results)?;
            self.save(&results)?;
        } else {
            if self.only.contains(&ApiServer::Real) {
                real::measure(&scale, &programs, self.rate, &mut results)?;
                self.save(&results)?;
                real::measure_peer(&scale, &programs, &mut results)?;
                self.save(&results)?;
            }
            if self.only.contains(&ApiServer::Memory) {
                in_memory::measure(&scale, &programs, self.memory_rate, &mut results)?;
                self.save(&results)?;
                in_memory::measure_peer(&scale, &programs, &mut results)?;
                self.save(&results)?;
            }
        }
        let (machine, runs, after) = (host::describe(), scale.runs, host::load());
        println!("{machine}; {runs} runs; load before {load:.1}, after {after:.1}\n");
        println!("{}", results.report.markdown());
        // After a failure the log is kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }

    fn programs(&self, folder: PathBuf) -> Result<Programs> {
        let prepared = || host::prepared("aws-cloud-controller-manager");
        let controller = host::given_or_beside(self.controller.clone(), "steerage")?;
        let is_alone = self.alone || self.plot.is_some();
        let peer = if is_alone { None } else { Some(self.peer.clone().map_or_else(prepared, Ok)?) };
        for file in [Some(&controller), peer.as_ref()].into_iter().flatten() {
            ensure!(file.exists(), "{} is missing; run hack/bench", file.display());
        }
        let (peer_defaults, limit) = (self.peer_defaults, self.limit);
        Ok(Programs { controller, peer, folder, peer_defaults, json_only: false, limit })
    }

    fn save(&self, results: &Results) -> Result<()> {
        let Some(file) = &self.json else { return Ok(()) };
        fs::write(file, format!("{:#}\n", results.report.json()))
            .with_context(|| format!("cannot write {}", file.display()))
    }
}

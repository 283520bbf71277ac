// SPDX-License-Identifier: Apache-2.0
//! How long the edge sends packets to a node that has lost its endpoint, by the signal that tells it: real processes of controller
//! and edge, an API server in memory, simulated nodes, and one datagram after the other, each from a port of its own.
//!
//! Time runs from the moment at which the node's answers and the EndpointSlice change, to the last packet that arrives at the node,
//! by the kernel's clock. What a service proxy and the kubelet need is not in it: nothing of a node is real here but its answers.

#![allow(clippy::cast_precision_loss, reason = "counts and nanoseconds far below 2^52")]

mod cell;
mod moves;
mod objects;
mod probed;
mod programs;
mod results;
mod seen;
mod sender;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use steerage_process::duration;

use crate::controller::memory::MemoryServer;
use crate::edge_nodes::cluster::Cluster;
use crate::edge_nodes::hosts::Hosts;
use crate::edge_nodes::nodes::Nodes;
use crate::edge_nodes::world::{self, API_SERVER, NODES, SWITCH, World};
use crate::host;
use cell::{Cell, Signal};
use moves::Mover;
use results::Results;

/// Namespace of the client, which is on the nodes' link.
const CLIENT: &str = "client";
/// Until the controller and the edge serve all Services.
const START_LIMIT: Duration = Duration::from_mins(1);
/// Of the edge's process, in bytes: far more than it needs.
const MEMORY: u64 = 1 << 30;

/// The flags of `steerage-bench edge-window`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run a short version: intervals of 100ms and 500ms, thresholds 1 and 3, 20s
    #[arg(long)]
    quick: bool,
    /// Write every measured time as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the times, in intervals, as SVG into this file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Measure with these intervals of health checks, from 100ms to 10s [default: 100ms,200ms,500ms,1s,2s,5s,10s]
    #[arg(long, value_delimiter = ',', value_name = "DURATION,…", value_parser = duration::parse)]
    intervals: Vec<Duration>,
    /// Measure with these unhealthy thresholds [default: 1,2,3,4,5]
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=10))]
    thresholds: Vec<u32>,
    /// Measure only these signals
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<Signal>,
    /// Let endpoints move for this long [default: 10m; with --quick 20s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    period: Option<Duration>,
    /// Measure this steerage-edge [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    edge: Option<PathBuf>,
    /// Measure with this controller, `steerage` [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let Self { quick, json, plot, intervals, thresholds, only, period, edge, controller } = self;
        let milliseconds = |values: &[u64]| values.iter().copied().map(Duration::from_millis).collect();
        let intervals: Vec<Duration> = match (intervals.is_empty(), quick) {
            (false, _) => intervals,
            (true, true) => milliseconds(&[100, 500]),
            (true, false) => milliseconds(&[100, 200, 500, 1000, 2000, 5000, 10_000]),
        };
        let bounds = Duration::from_millis(100)..=Duration::from_secs(10);
        ensure!(
            intervals.iter().all(|interval| bounds.contains(interval)),
            "--intervals must be from 100ms to 10s"
        );
        let thresholds = match (thresholds.is_empty(), quick) {
            (false, _) => thresholds,
            (true, true) => vec![1, 3],
            (true, false) => (1..=5).collect(),
        };
        let period = period.unwrap_or(Duration::from_secs(if quick { 20 } else { 600 }));
        let cells = cell::all(&only, &intervals, &thresholds);
        let edge = host::given_or_beside(edge, "steerage-edge")?;
        let controller = host::given_or_beside(controller, "steerage")?;
        for program in [&edge, &controller] {
            ensure!(program.exists(), "{} is missing", program.display());
        }
        let folder = env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let load_before = host::load();
        let (results, unmeasured) = measure(&cells, &folder, edge, &controller, period)?;
        println!("{}; load before {load_before:.1}, after {:.1}\n", host::describe(), host::load());
        println!("{}", results.markdown());
        if unmeasured > 0 {
            println!(
                "{unmeasured} moves were not measured: the node got no packets before it lost its endpoint."
            );
        }
        if let Some(file) = json {
            fs::write(&file, format!("{:#}\n", results.json()))
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        if let Some(file) = plot {
            fs::write(&file, results.svg()).with_context(|| format!("cannot write {}", file.display()))?;
        }
        // After a failure the logs are kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

fn measure(
    cells: &[Cell],
    folder: &Path,
    edge: PathBuf,
    controller: &Path,
    period: Duration,
) -> Result<(Results, u64)> {
    let nodes = cell::nodes(cells);
    let world = World::new(folder, 1, nodes)?;
    world::add_client(CLIENT, objects::VIPS)?;
    world::refuse_statements(cell::stating_nodes(cells))?;
    let stating = Cluster::of(cell::stating_nodes(cells), cell::first_endpoints(cells));
    let agents = Nodes::start(&world, &stating)?;
    let answers = world::inside(NODES, || probed::Answers::start(cells))??;
    let server = world::inside(SWITCH, || MemoryServer::start_at(API_SERVER, folder))??;
    objects::put_all(&server, cells);
    let mut hosts = Hosts::new(&world, edge, server.kubeconfig(), MEMORY)?;
    hosts.start(&world, 0)?;
    let mut controller = programs::Controller::start(controller, server.kubeconfig(), folder)?;
    let seen = world::inside(NODES, || seen::Seen::start(nodes))??;
    let sender = world::inside(CLIENT, || sender::Sender::start(cells))??;
    let mover = Arc::new(Mover { agents, answers, server, seen, sender, unmeasured: AtomicU64::new(0) });
    let begun = Instant::now();
    let silent = |mover: &Mover| cells.iter().find(|cell| !mover.is_served(cell)).copied();
    while let Some(cell) = silent(&mover) {
        hosts.check()?;
        controller.check()?;
        ensure!(begun.elapsed() < START_LIMIT, "no packet of Service {} arrived", cell.service);
        std::thread::sleep(Duration::from_millis(50));
    }
    let times = moves::run(&mover, cells, period)?;
    hosts.check()?;
    controller.check()?;
    mover.seen.check()?;
    let unmeasured = mover.unmeasured.load(Ordering::Relaxed);
    drop((controller, hosts, mover, world));
    Ok((Results::new(cells, times), unmeasured))
}

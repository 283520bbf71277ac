// SPDX-License-Identifier: Apache-2.0
//! What edge hosts cost with many Services of policy Local and many nodes: real processes of steerage-edge in network namespaces,
//! an API server in memory, and one server that answers as the agents of all nodes do.
//!
//! All is measured from outside: tables by the kernel's maps, CPU time and memory by the kernel, requests by the nodes, bytes by the
//! interfaces. The edge's own metrics say when a host has heard all nodes, and are compared with what the nodes have counted.

#![allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]

pub(crate) mod cluster;
pub(crate) mod hosts;
pub(crate) mod nodes;
mod run;
mod sample;
mod stated;
mod tables;
pub(crate) mod world;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use steerage_process::duration;

use crate::controller::memory::MemoryServer;
use crate::edge_bed::cpu;
use crate::host;
use cluster::{Cluster, MOST_NODES, MOST_SERVICES};
use hosts::Hosts;
use nodes::Nodes;
use run::{Run, Settings, Stopped};
use world::{API_SERVER, MOST_HOSTS, SWITCH, World};

/// The flags of `steerage-bench edge-nodes`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run a short version: 200 Services, 100 nodes, 2 hosts, few changes
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file, after every phase
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Simulate this number of Services [default: 10000; with --quick 200]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SERVICES - 1000)))]
    services: Option<u32>,
    /// Simulate this number of nodes [default: 5000; with --quick 100]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(4..=i64::from(MOST_NODES)))]
    nodes: Option<u32>,
    /// Run this number of edge hosts [default: 3; with --quick 2]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=i64::from(MOST_HOSTS)))]
    hosts: Option<u8>,
    /// Let health checks have this interval, for which nodes hold requests, from 100ms to 10s
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse)]
    interval: Duration,
    /// Measure the rest for this long [default: 1m; with --quick 5s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    period: Option<Duration>,
    /// Move this number of endpoints, one after the other [default: 50; with --quick 10]
    #[arg(long, value_name = "COUNT")]
    moves: Option<u32>,
    /// Add a Service, silence a node and restart an edge this many times each [default: 3; with --quick 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(..=1000))]
    changes: Option<u32>,
    /// Stop if the edge hosts do not have the kernel's tables right within this time
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration::parse)]
    limit: Duration,
    /// Stop if the edge processes together have more resident memory, in MiB [default: half of the machine's]
    #[arg(long, value_name = "MIB")]
    memory_limit: Option<u64>,
    /// Measure this steerage-edge [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    edge: Option<PathBuf>,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let Self {
            quick,
            json,
            services,
            nodes,
            hosts,
            interval,
            period,
            moves,
            changes,
            limit,
            memory_limit,
            edge,
        } = self;
        let or =
            |value: Option<u32>, quickly, otherwise| value.unwrap_or(if quick { quickly } else { otherwise });
        let (services, nodes) = (or(services, 200, 10_000), or(nodes, 100, 5000));
        let hosts = hosts.unwrap_or(if quick { 2 } else { 3 });
        let bounds = Duration::from_millis(100)..=Duration::from_secs(10);
        ensure!(bounds.contains(&interval), "--interval must be from 100ms to 10s");
        let settings = Settings {
            interval,
            period: period.unwrap_or(Duration::from_secs(if quick { 5 } else { 60 })),
            moves: or(moves, 10, 50),
            changes: or(changes, 1, 3),
            limit,
        };
        let edge = host::given_or_beside(edge, "steerage-edge")?;
        ensure!(edge.exists(), "{} is missing", edge.display());
        // Each held request is a descriptor of this process and one of an edge.
        let descriptors = u64::from(nodes) * u64::from(hosts) + 4096;
        host::allow_descriptors(descriptors)?;
        let folder = env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let load_before = host::load();
        let world = World::new(&folder, hosts, nodes)?;
        let (told, seen) = cpu::known_load()?;
        let cluster = Cluster::new(services, nodes);
        let server = world::inside(SWITCH, || MemoryServer::start_at(API_SERVER, &folder))??;
        let simulated = Nodes::start(&world, &cluster)?;
        let memory_limit = memory_limit.map_or(host::memory() / 2, |mib| mib << 20);
        let hosts = Hosts::new(&world, edge, server.kubeconfig(), memory_limit)?;
        let mut run = Run::new(&world, &server, &simulated, hosts, cluster, settings, json);
        run.note(format!(
            "A process that used {told:.2?} of CPU time by its own clock used {seen:.2?} by the meter of CPU time."
        ));
        let outcome = run.measure();
        let stopped = match &outcome {
            Err(error) => error.downcast_ref::<Stopped>().map(ToString::to_string),
            Ok(()) => None,
        };
        println!("{}; load before {load_before:.1}, after {:.1}\n", host::describe(), host::load());
        println!("{}", run.report());
        if let Some(reason) = &stopped {
            println!("{reason}");
        }
        // Processes first: they are in the namespaces.
        drop(run);
        drop((simulated, server, world));
        if stopped.is_none() {
            // After a failure the logs are kept.
            outcome?;
        }
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

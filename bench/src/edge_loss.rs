// SPDX-License-Identifier: Apache-2.0
//! What clients of one Service lose while its targets, the edge hosts and their programs change: real edge processes and simulated
//! nodes in network namespaces, many connections of every kind over both IP families, and the loss meter of the end-to-end suite.
//!
//! It measures no speed. The cores are shared by clients, router, hosts and nodes: what is only slow has waited for one.

mod events;
mod hosts;
mod results;
mod run;
pub(crate) mod servers;
mod service;
mod world;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use steerage_meter::load::Shape;
use steerage_process::duration;

use crate::edge_bed::{Bed, Size};
use crate::host;
use events::EVENTS;
use world::{CLIENTS, HOSTS, NODES, Programs, World};

/// Connections that both clients hold and do not use until the end.
const IDLE: u32 = 10_000;
/// Connections that both hold and use.
const ACTIVE: u32 = 500;
/// Flows of datagrams of both.
const FLOWS: u32 = 200;
/// New connections of both in a second.
const NEW_PER_SECOND: u32 = 500;
/// Clients: one for each family.
const SHARES: u32 = 2;

/// The flags of `steerage-bench edge-loss`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run each event once, with a tenth of the idle and active connections
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file, after every event
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run only events whose names contain this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Repeat each event for this long; 0s runs each once [default: 10m, with --quick 0s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    period: Option<Duration>,
    /// Serve this number of Services beside the measured one
    #[arg(long, value_name = "COUNT", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=10_000))]
    services: u32,
    /// Measure this steerage-edge [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    edge: Option<PathBuf>,
    /// Use this steerage-edge in the event of an upgrade [default: that of --edge]
    #[arg(long, value_name = "FILE")]
    next_edge: Option<PathBuf>,
}

impl Flags {
    /// Measures and prints the results. Fails if a promise is broken.
    pub fn run(self) -> Result<()> {
        let Self { quick, json, only, period, services, edge, next_edge } = self;
        let edge = host::given_or_beside(edge, "steerage-edge")?;
        let next = next_edge.unwrap_or_else(|| edge.clone());
        for program in [&edge, &next] {
            ensure!(program.exists(), "{} is missing", program.display());
        }
        let period = period.unwrap_or(Duration::from_secs(if quick { 0 } else { 600 }));
        let events: Vec<_> = EVENTS
            .iter()
            .filter(|event| only.as_ref().is_none_or(|only| event.name.contains(only)))
            .collect();
        ensure!(!events.is_empty(), "--only: no event has such a name");
        let part = if quick { 10 } else { 1 };
        let shape = Shape {
            connect_every: Duration::from_secs(1) * SHARES / NEW_PER_SECOND,
            active: ACTIVE / SHARES / part,
            idle: IDLE / SHARES / part,
            pause: Duration::from_millis(250),
            askers: FLOWS / SHARES,
            datagram_every: Duration::from_millis(20),
        };
        host::allow_descriptors(host::MOST_DESCRIPTORS)?;
        let folder = env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let load_before = host::load();
        let bed = Bed::new(&folder, Size { hosts: HOSTS, nodes: NODES, clients: CLIENTS })?;
        let mut world = World::new(bed, Programs { edge, next }, services)?;
        run::test_meter(&mut world, Shape { idle: 0, ..shape }).context("the meter does not work")?;
        let mut rows = Vec::new();
        for has_moved in [false, true] {
            for event in &events {
                eprintln!("{}{}", event.name, if has_moved { ", after slots have moved" } else { "" });
                rows.extend(run::measure(&mut world, event, has_moved, shape, period)?);
                if let Some(file) = &json {
                    fs::write(file, format!("{:#}\n", results::json(&rows)))
                        .with_context(|| format!("cannot write {}", file.display()))?;
                }
            }
        }
        println!("{}; load before {load_before:.1}, after {:.1}\n", host::describe(), host::load());
        println!("{}", results::markdown(&rows));
        for event in events {
            println!("{}: may lose {}", event.name, event.promise.text());
        }
        drop(world);
        let broken = rows.iter().filter(|row| !row.is_kept).count();
        // With a broken promise the logs are kept.
        ensure!(
            broken == 0,
            "{broken} of {} rows lost more than they may; logs are in {}",
            rows.len(),
            folder.display()
        );
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The flags, and the composition root.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum as _};
use steerage_process::duration;

use crate::clouds;
use crate::controller;
use crate::edge;
use crate::edge_loss;
use crate::edge_nodes;
use crate::edge_window;
use crate::host;
use crate::measure::{self, Extent, Measure, Settings};
use crate::objects::{ENDPOINTS, Shape};
use crate::report::Report;
use crate::subject::Programs;
use crate::testbed::DriverNetns;
use crate::who::Who;

/// Measures Steerage beside its peers, on this machine, and prints medians, spread and ratios.
#[derive(Debug, Parser)]
#[command(name = "steerage-bench", disable_version_flag = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The agent and kube-proxy in nftables mode, one after the other against one real API server
    Agent(Proxies),
    /// The controller with the edge's provider beside the upstream service controller, against a real API server and one in memory
    Controller(controller::Flags),
    /// The controller with a cloud's provider beside the vendor's, against one real API server and what stands for the cloud
    Clouds(clouds::Flags),
    /// The edge beside other load balancers, one at a time on the same host in network namespaces
    Edge(edge::Flags),
    /// What clients of a Service lose while its targets, the edge hosts and their programs change
    EdgeLoss(edge_loss::Flags),
    /// The nodes' servers of `edge-loss`, in a process of their own
    #[command(hide = true)]
    EdgeLossNodes(edge_loss::servers::NodesFlags),
    /// Edge hosts with many Services and simulated nodes: what starts, rest and changes cost
    EdgeNodes(edge_nodes::Flags),
    /// Time from the loss of a node's endpoint to the last packet that the edge sends to the node, for each signal
    EdgeWindow(edge_window::Flags),
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum ShapeName {
    /// Each Service has as many
    #[default]
    Even,
    /// Most have three, one in a hundred has 100 to 300, one in a thousand 1,000 to 5,000
    Tail,
}

#[derive(Debug, clap::Args)]
struct Proxies {
    /// Run a short version: few Services and short measurements, some minutes in all
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file, after every trial
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure with these numbers of Services [default: 1,100,1000,10000,30000; with --quick 1,1000]
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…")]
    services: Vec<u32>,
    /// Give every Service this many endpoints [default: 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=5000))]
    endpoints: Option<u32>,
    /// Vary the number of endpoints: even, or the long tail of large clusters
    #[arg(long, value_enum, default_value_t, conflicts_with = "endpoints")]
    shape: ShapeName,
    /// Instead, draw the agent's cost against endpoints of a Service, with as many endpoints in all, as SVG into this directory
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = ["services", "endpoints", "shape", "only"])]
    plot: Option<PathBuf>,
    /// Start and measure each program this many times with each number of Services [default: 5; with --quick 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    runs: Option<u16>,
    /// Run only these measurements; the start is always measured
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<Measure>,
    /// Measure the agent only, without kube-proxy
    #[arg(long)]
    alone: bool,
    /// Make at most this many changes of each kind after each start [default: 200; with --quick 30]
    #[arg(long, value_name = "COUNT")]
    changes: Option<usize>,
    /// Give up a program that has not programmed all Services after this time
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    limit: Duration,
    /// Measure churn and idle load for this long [default: 1m; with --quick 10s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    period: Option<Duration>,
    /// Measure this agent [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// Measure this kube-proxy [default: the one from hack/prepare]
    #[arg(long, value_name = "FILE")]
    kube_proxy: Option<PathBuf>,
}

impl Args {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        match self.command {
            Command::Agent(proxies) => proxies.run(),
            Command::Controller(flags) => flags.run(),
            Command::Clouds(flags) => flags.run(),
            Command::Edge(flags) => flags.run(),
            Command::EdgeLoss(flags) => flags.run(),
            Command::EdgeLossNodes(flags) => flags.run(),
            Command::EdgeNodes(flags) => flags.run(),
            Command::EdgeWindow(flags) => flags.run(),
        }
    }
}

impl Proxies {
    fn run(self) -> Result<()> {
        let Self {
            quick,
            json,
            services,
            endpoints,
            shape,
            plot,
            runs,
            only,
            alone,
            changes,
            limit,
            period,
            agent,
            kube_proxy,
        } = self;
        let mut levels = match (services.is_empty(), quick) {
            (false, _) => services,
            (true, true) => vec![1, 1000],
            (true, false) => vec![1, 100, 1000, 10_000, 30_000],
        };
        levels.sort_unstable();
        levels.dedup();
        ensure!(levels[0] > 0, "--services must be at least 1");
        let period = period.unwrap_or(Duration::from_secs(if quick { 10 } else { 60 }));
        let measures = if only.is_empty() { Measure::value_variants().to_vec() } else { only };
        let settings = Settings {
            levels,
            shape: match shape {
                ShapeName::Even => Shape::Even(endpoints.unwrap_or(ENDPOINTS)),
                ShapeName::Tail => Shape::Tail,
            },
            runs: usize::from(runs.unwrap_or(if quick { 3 } else { 5 })),
            measures: measures.into_iter().collect(),
            subjects: if alone { vec![Who::Ours] } else { Who::ALL.to_vec() },
            changes: changes.unwrap_or(if quick { 30 } else { 200 }),
            change_time: Duration::from_secs(if quick { 5 } else { 15 }),
            round: if quick { Duration::from_millis(300) } else { Duration::from_secs(1) },
            repairs: if quick { 1 } else { 5 },
            churn: (period, 100),
            idle: period,
            limit,
        };
        let folder = env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let programs = Programs {
            agent: host::given_or_beside(agent, "steerage-agent")?,
            kube_proxy: kube_proxy.map_or_else(|| host::prepared("kube-proxy"), Ok)?,
            folder: folder.clone(),
        };
        for file in [&programs.agent, &programs.kube_proxy] {
            ensure!(file.exists(), "{} is missing; run hack/prepare, then hack/bench", file.display());
        }
        let (machine, load) = (host::describe(), host::load());
        // Before any other thread starts, because threads inherit the namespace.
        let driver = DriverNetns::enter()?;
        let save = |report: &Report| match &json {
            Some(file) => fs::write(file, format!("{:#}\n", report.json()))
                .with_context(|| format!("cannot write {}", file.display())),
            None => Ok(()),
        };
        let report = match &plot {
            Some(plots) => {
                let extent = Extent { endpoints: if quick { 9000 } else { 90_000 } };
                measure::draw(&settings, extent, &programs, &folder, &driver, plots, save)?
            }
            None => measure::run(&settings, &programs, &folder, &driver, save)?,
        };
        println!("{machine}; {} runs; load before {load:.1}, after {:.1}\n", settings.runs, host::load());
        println!("{}", report.markdown());
        // After a failure the logs are kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_must_be_at_least_one() {
        let parse = |runs| Args::try_parse_from(["steerage-bench", "agent", "--runs", runs]);
        assert!(parse("0").is_err());
        assert!(parse("1").is_ok());
    }
}

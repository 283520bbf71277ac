// SPDX-License-Identifier: Apache-2.0
//! The flags, and what they compose.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum as _};

use crate::host;
use crate::measure::{self, Measure, Settings};
use crate::report::Report;
use crate::subject::{Programs, Who};
use crate::world::Home;

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
}

#[derive(Debug, clap::Args)]
struct Proxies {
    /// A short form: few Services, short rounds, some minutes in all
    #[arg(long)]
    quick: bool,
    /// File for the numbers as JSON; written after every trial
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Numbers of Services [default: 1,100,1000,10000,30000; with --quick 1,1000]
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    services: Vec<u32>,
    /// How often each program is started and measured with each number of Services [default: 5; with --quick 3]
    #[arg(long, value_name = "N")]
    runs: Option<usize>,
    /// Only these measurements; the start is always measured
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT,…")]
    only: Vec<Measure>,
    /// Leave kube-proxy out
    #[arg(long)]
    alone: bool,
    /// At most so many changes of a kind for each start [default: 200; with --quick 30]
    #[arg(long, value_name = "N")]
    changes: Option<usize>,
    /// Seconds after which a program that has not programmed all Services is given up
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    limit: u64,
    /// Length of the churn and of idleness in seconds [default: 60; with --quick 10]
    #[arg(long, value_name = "SECONDS")]
    minute: Option<u64>,
    /// The agent's binary [default: beside this one]
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// kube-proxy's binary [default: the one that hack/prepare built]
    #[arg(long, value_name = "FILE")]
    kube_proxy: Option<PathBuf>,
}

impl Args {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        let Self { command: Command::Agent(proxies) } = self;
        proxies.run()
    }
}

impl Proxies {
    fn run(self) -> Result<()> {
        let Self { quick, json, services, runs, only, alone, changes, limit, minute, agent, kube_proxy } =
            self;
        let mut levels = match (services.is_empty(), quick) {
            (false, _) => services,
            (true, true) => vec![1, 1000],
            (true, false) => vec![1, 100, 1000, 10_000, 30_000],
        };
        levels.sort_unstable();
        levels.dedup();
        ensure!(levels[0] > 0, "there is nothing to measure without a Service");
        let minute = Duration::from_secs(minute.unwrap_or(if quick { 10 } else { 60 }));
        let measures = if only.is_empty() { Measure::value_variants().to_vec() } else { only };
        let settings = Settings {
            levels,
            runs: runs.unwrap_or(if quick { 3 } else { 5 }).max(1),
            measures: measures.into_iter().collect(),
            subjects: if alone { vec![Who::Ours] } else { Who::ALL.to_vec() },
            changes: changes.unwrap_or(if quick { 30 } else { 200 }),
            change_time: Duration::from_secs(if quick { 5 } else { 15 }),
            round: if quick { Duration::from_millis(300) } else { Duration::from_secs(1) },
            churn: (minute, 100),
            idle: minute,
            limit: Duration::from_secs(limit),
        };
        let folder = env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let programs = Programs {
            agent: agent.map_or_else(beside, Ok)?,
            kube_proxy: kube_proxy.map_or_else(prepared, Ok)?,
            folder: folder.clone(),
        };
        for file in [&programs.agent, &programs.kube_proxy] {
            ensure!(file.exists(), "{} is missing: run hack/prepare, and hack/bench", file.display());
        }
        let (machine, load) = (host::describe(), host::load());
        // Before there is any other thread: they all belong into this namespace.
        let home = Home::enter()?;
        let save = |report: &Report| match &json {
            Some(file) => fs::write(file, format!("{:#}\n", report.json()))
                .with_context(|| format!("cannot write {}", file.display())),
            None => Ok(()),
        };
        let report = measure::run(&settings, &programs, &folder, &home, save)?;
        println!("{machine}; {} runs; load before {load:.1}, after {:.1}\n", settings.runs, host::load());
        println!("{}", report.markdown());
        // After a failure the logs stay, to be looked at.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

fn beside() -> Result<PathBuf> {
    let own = env::current_exe()?;
    Ok(own.with_file_name("steerage-agent"))
}

fn prepared() -> Result<PathBuf> {
    let var = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = var("STEERAGE_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|base| base.join("steerage")))
        .or_else(|| var("HOME").map(|home| home.join(".cache/steerage")));
    Ok(cache.context("neither STEERAGE_CACHE nor HOME is set")?.join("bin/kube-proxy"))
}

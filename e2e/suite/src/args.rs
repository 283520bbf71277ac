// SPDX-License-Identifier: Apache-2.0
//! The suite's flags, and its composition: a cluster, a runner inside a client, the cases of a boot.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use libtest_mimic::Arguments;

use crate::cases;
use crate::cluster::{Cluster, kind::Kind, lab::Lab};
use crate::suite::Suite;

/// Which service proxy the cluster runs, and with it which tests make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Boot {
    /// kube-proxy on every node: all tests.
    KubeProxy,
    /// Steerage's agent instead of kube-proxy: source address, health check, life cycle.
    Agent,
}

impl Boot {
    /// The name as the flag takes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::KubeProxy => "kube-proxy",
            Self::Agent => "agent",
        }
    }
}

/// Where the cluster runs.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kindred {
    /// `hack/lab`.
    Lab,
    /// `hack/kind`.
    Kind,
}

/// Shows on a running cluster that Steerage keeps its promises.
#[derive(Debug, Parser)]
#[command(disable_version_flag = true)]
pub struct Args {
    /// The service proxy that the cluster runs.
    #[arg(long, value_enum, default_value = "kube-proxy")]
    boot: Boot,
    /// Where the cluster runs.
    #[arg(long, value_enum, default_value = "lab")]
    cluster: Kindred,
    /// The cluster's name.
    #[arg(long, env = "STEERAGE_LAB_NAME", default_value = "lab")]
    name: String,
    /// Folder for what a failing test leaves to look at.
    #[arg(long, default_value = "e2e-logs")]
    logs: PathBuf,
    /// File for the measured numbers: JSON, or Markdown if it ends in `.md`. May be given several times.
    #[arg(long)]
    report: Vec<PathBuf>,
    #[command(flatten)]
    harness: Arguments,
}

impl Args {
    /// Runs the tests that the flags select.
    pub fn run(self) -> Result<ExitCode> {
        let Self { boot, cluster, name, logs, report, mut harness } = self;
        // The tests share one cluster and two cores, and some of them break things.
        harness.test_threads = Some(1);
        if harness.list {
            return Ok(libtest_mimic::run(&harness, cases::names(boot)).exit_code());
        }
        let cluster: Box<dyn Cluster> = match cluster {
            Kindred::Lab => Box::new(Lab::open(&name)?),
            Kindred::Kind => Box::new(Kind::open(&name)?),
        };
        inside(boot, cluster, logs, |suite, runtime| {
            let conclusion = libtest_mimic::run(&harness, cases::trials(suite, runtime));
            runtime.block_on(suite.finish());
            suite.report.print();
            for file in &report {
                suite.report.write(file, boot).with_context(|| format!("writing {}", file.display()))?;
            }
            Ok(conclusion.exit_code())
        })
    }
}

/// Connects to a cluster from inside its first client: threads inherit the namespace, so that every socket is the client's.
pub(crate) fn inside<T: Send>(
    boot: Boot,
    cluster: Box<dyn Cluster>,
    logs: PathBuf,
    work: impl FnOnce(&Arc<Suite>, &tokio::runtime::Runtime) -> Result<T> + Send,
) -> Result<T> {
    let [client, _] = cluster.clients();
    steerage_lab::in_netns(&client.netns, move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let suite = Arc::new(runtime.block_on(Suite::start(boot, cluster, logs))?);
        work(&suite, &runtime)
    })?
}

// SPDX-License-Identifier: Apache-2.0
//! The suite's flags, and its composition: a cluster, a session inside its first client, the cases that apply.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use libtest_mimic::Arguments;
use steerage_lab::Cloud;

use crate::cases;
use crate::cluster::{Cluster, kind::Kind, lab::Lab};
use crate::service_proxy::ServiceProxy;
use crate::session::inside;

/// What made the cluster.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ClusterKind {
    /// `hack/lab`.
    Lab,
    /// `hack/kind`.
    Kind,
}

/// Test Steerage on a running cluster.
#[derive(Debug, Parser)]
#[command(disable_version_flag = true)]
pub struct Args {
    /// Expect this service proxy in the cluster.
    #[arg(long, value_enum, default_value = "kube-proxy")]
    service_proxy: ServiceProxy,
    /// Expect a cluster of this command.
    #[arg(long, value_enum, default_value = "lab")]
    cluster: ClusterKind,
    /// Expect this cloud around the cluster.
    #[arg(long, value_enum)]
    cloud: Option<Cloud>,
    /// Measure what the agents' forwarding to other nodes saves, too.
    #[arg(long)]
    measure_forwarding: bool,
    /// Use the cluster of this name.
    #[arg(long, env = "STEERAGE_LAB_NAME", default_value = "lab")]
    name: String,
    /// Write objects, logs and rules of failing cases into this folder.
    #[arg(long, default_value = "e2e-logs")]
    logs: PathBuf,
    /// Write the measurements to this file: as Markdown if its name ends in `.md`, else as JSON. Repeatable.
    #[arg(long)]
    report: Vec<PathBuf>,
    #[command(flatten)]
    harness: Arguments,
}

impl Args {
    /// Runs the cases that the flags select.
    pub fn run(self) -> Result<ExitCode> {
        let Self { service_proxy, cluster, cloud, measure_forwarding, name, logs, report, mut harness } =
            self;
        // The cases share one cluster, and some break parts of it.
        harness.test_threads = Some(1);
        if harness.list {
            return Ok(libtest_mimic::run(&harness, cases::names(service_proxy, cloud, measure_forwarding))
                .exit_code());
        }
        let cluster: Box<dyn Cluster> = match cluster {
            ClusterKind::Lab => Box::new(Lab::open(&name)?),
            ClusterKind::Kind => Box::new(Kind::open(&name)?),
        };
        inside(service_proxy, cluster, logs, |suite, runtime| {
            ensure!(suite.cloud() == cloud, "cluster {name} is of another cloud: see --cloud");
            let conclusion = libtest_mimic::run(&harness, cases::trials(suite, runtime, measure_forwarding));
            runtime.block_on(suite.finish());
            suite.report.print();
            for file in &report {
                suite
                    .report
                    .write(file, service_proxy)
                    .with_context(|| format!("writing {}", file.display()))?;
            }
            Ok(conclusion.exit_code())
        })
    }
}

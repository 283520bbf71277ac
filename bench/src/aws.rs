// SPDX-License-Identifier: Apache-2.0
//! The controller with the provider for AWS beside cloud-provider-aws: the calls that each makes for the same changes of the same
//! Services, and how long they take. No Service has traffic.
//!
//! Each program runs against a real API server and moto, in place of AWS, behind a proxy that records calls. Numbers of calls are
//! those of AWS as far as moto answers as AWS does. Seconds are not; the time by AWS's rates is computed from the calls.

mod objects;
mod phases;
mod program;
mod rates;
mod recorder;
mod snapshot;
mod table;
mod world;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::host;
use crate::who::Who;
use program::{Programs, title};
use table::Results;

/// The flags of `steerage-bench aws`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run a short version: 1 and 10 Services, some minutes in all
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file, after each program
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure with these numbers of Services [default: 1,10,100; with --quick 1,10]
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…")]
    services: Vec<u32>,
    /// Measure only this program
    #[arg(long, value_enum)]
    only: Option<Who>,
    /// Measure this controller [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Measure this aws-cloud-controller-manager [default: the one from hack/prepare]
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let Self { quick, json, services, only, controller, peer } = self;
        let levels = match (services.is_empty(), quick) {
            (false, _) => services,
            (true, true) => vec![1, 10],
            (true, false) => vec![1, 10, 100],
        };
        ensure!(levels.iter().all(|level| *level > 0), "--services must be at least 1");
        let subjects = only.map_or_else(|| Who::ALL.to_vec(), |who| vec![who]);
        let folder = std::env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let sibling = || anyhow::Ok(std::env::current_exe()?.with_file_name("steerage"));
        let programs = Programs {
            controller: controller.map_or_else(sibling, Ok)?,
            peer: peer.map_or_else(|| host::prepared("aws-cloud-controller-manager"), Ok)?,
            folder: folder.clone(),
        };
        for who in &subjects {
            let file = if *who == Who::Ours { &programs.controller } else { &programs.peer };
            ensure!(file.exists(), "{} is missing; run hack/bench", file.display());
        }
        let load = host::load();
        let mut results = Results::default();
        let mut number = 0;
        for services in levels {
            for who in &subjects {
                let measured = phases::run(&programs, *who, services, number)
                    .with_context(|| format!("{} with {services} Services", title(*who)))?;
                results.add(*who, services, measured);
                number += 1;
                if let Some(file) = &json {
                    fs::write(file, format!("{:#}\n", results.json()))
                        .with_context(|| format!("cannot write {}", file.display()))?;
                }
            }
        }
        println!("{}; load before {load:.1}, after {:.1}\n", host::describe(), host::load());
        println!("{}", results.markdown());
        // After a failure the logs are kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The controller with a cloud's provider beside the vendor's own: the calls that each makes for the same changes of the same
//! Services, and how long they take. No Service has traffic.
//!
//! Each program runs against a real API server and what stands for the cloud, behind a proxy that records calls. Numbers of
//! calls are those of the cloud as far as that answers as the cloud does. Seconds are not.

mod aws;
mod azure;
mod cloud;
mod gce;
pub mod handover;
mod objects;
mod openstack;
mod phases;
mod program;
mod recorder;
mod table;
mod tls;
mod world;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::host;
use crate::who::Who;
use cloud::Vendor;
use program::Programs;
use table::Results;

/// The flags of `steerage-bench clouds`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Measure with these clouds, one after the other
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "NAME,…",
        default_value = "aws,openstack,gce,azure"
    )]
    cloud: Vec<Vendor>,
    /// Run a short version: 1 and 10 Services, some minutes in all
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file, after each program; with several clouds, each is an entry
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure with these numbers of Services [default: of AWS 1,10,100, of the others 1,10,50; with --quick 1,10]
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…")]
    services: Vec<u32>,
    /// Measure only this program
    #[arg(long, value_enum)]
    only: Option<Who>,
    /// Measure this controller [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Measure this program of the vendor, with one cloud only [default: the one from hack/prepare]
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let Self { cloud: vendors, quick, json, services, only, controller, peer } = self;
        ensure!(peer.is_none() || vendors.len() == 1, "--peer needs one --cloud");
        ensure!(services.iter().all(|level| *level > 0), "--services must be at least 1");
        let subjects = only.map_or_else(|| Who::ALL.to_vec(), |who| vec![who]);
        let folder = std::env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let controller = host::given_or_beside(controller, "steerage")?;
        let mut all = serde_json::Map::new();
        let mut number = 0;
        for vendor in vendors {
            let programs = Programs {
                vendor,
                controller: controller.clone(),
                peer: peer.clone().map_or_else(|| host::prepared(vendor.peer_program()), Ok)?,
                folder: folder.clone(),
                flags: &["--serve-unset-class"],
            };
            for who in &subjects {
                let file = if *who == Who::Ours { &programs.controller } else { &programs.peer };
                ensure!(file.exists(), "{} is missing; run hack/bench", file.display());
            }
            let levels = match (services.is_empty(), quick) {
                (false, _) => services.clone(),
                (true, true) => vec![1, 10],
                (true, false) => vec![1, 10, vendor.most_services()],
            };
            let load = host::load();
            let mut results = Results::new(vendor);
            for services in levels {
                for who in &subjects {
                    let measured = phases::run(&programs, *who, services, number)
                        .with_context(|| format!("{} with {services} Services", vendor.title(*who)))?;
                    results.add(*who, services, measured);
                    number += 1;
                    if let Some(file) = &json {
                        all.insert(vendor.name().to_owned(), results.json());
                        let numbers = serde_json::Value::Object(all.clone());
                        fs::write(file, format!("{numbers:#}\n"))
                            .with_context(|| format!("cannot write {}", file.display()))?;
                    }
                }
            }
            println!("{}; load before {load:.1}, after {:.1}\n", host::describe(), host::load());
            println!("{}", results.markdown());
        }
        // After a failure the logs are kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

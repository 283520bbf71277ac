// SPDX-License-Identifier: Apache-2.0
//! The controller: gives Services of type `LoadBalancer` their load balancers. See `args` for how it is put together.

use std::process::ExitCode;

use clap::Parser as _;

mod args;
mod controller;
mod lease;
mod metrics;
mod plan;
mod provider;
mod queue;
mod rate;
mod reasons;
mod reconcile;
mod state;
mod status;
mod workers;
mod world;
mod writer;

fn main() -> ExitCode {
    args::run(args::Args::parse())
}

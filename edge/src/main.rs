// SPDX-License-Identifier: Apache-2.0
//! The edge: a software load balancer for clusters that have no cloud. It announces virtual addresses on its link, probes nodes,
//! and lets the kernel forward packets to them unchanged; replies go past it.

mod args;
mod engine;
mod forward;
mod hash;
mod health;
mod host;
mod ids;
mod index;
mod link;
mod metrics;
mod plan;
mod prober;
#[cfg(test)]
mod reference;
mod slot_table;
mod source;
mod status;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    args::Args::parse().run()
}

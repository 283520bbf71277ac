// SPDX-License-Identifier: Apache-2.0
//! `steerage-edge`, a software load balancer for clusters without a cloud. It announces VIPs on its link, probes nodes, and makes
//! the kernel forward packets to them unchanged. Replies bypass it.

mod args;
mod channel;
mod compose;
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
mod vips;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    args::Args::parse().run()
}

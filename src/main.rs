// SPDX-License-Identifier: Apache-2.0
//! The controller: gives Services of type `LoadBalancer` their load balancers. `args` composes it.

use std::process::ExitCode;

use clap::Parser as _;

mod applied;
mod args;
mod chosen_provider;
mod cluster_index;
mod cluster_uid;
mod condition_metrics;
mod controller;
mod dry_run;
mod leader_provider;
mod lease;
mod metrics;
mod node_list;
mod orphans;
mod plan;
mod pod_gates;
mod provider_notices;
mod queue;
mod rate_limit;
mod reasons;
mod reconcile;
mod recovery;
#[cfg(all(test, feature = "azure", feature = "gce", feature = "openstack"))]
mod reference;
mod removal_hold;
mod repeated_logs;
mod request_queue;
mod service_reader;
mod service_writer;
#[cfg(test)]
mod simulation;
mod status;
mod workers;
mod write_retry;
mod written_status;

/// musl's own took 42 % of the CPU time of 1,000 changes of endpoints per second (decision 29).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    args::run(args::Args::parse())
}

// SPDX-License-Identifier: Apache-2.0
//! `steerage-edge`, a software load balancer for clusters without a cloud. It announces VIPs on its link, probes nodes, and makes
//! a program in the kernel forward packets to them unchanged. Replies bypass it.

mod api_contact;
mod args;
mod channel;
mod checks;
mod cluster;
mod compose;
mod drains;
mod endpoint_nodes;
mod engine;
mod hash;
mod health;
mod host;
mod index;
mod kernel;
mod leftovers;
mod link;
mod logged_problem;
mod metrics;
mod numbers;
mod peers;
mod pin_names;
mod plan;
mod plan_pace;
mod port_set;
mod probe_schedule;
mod prober;
mod reach;
#[cfg(test)]
mod reference;
mod routes;
mod shards;
mod source;
mod status;
mod timer;
mod tunnel;
mod vips;

use std::process::ExitCode;

use clap::Parser as _;
use steerage_process::Component;

use args::{ADMIN, Args, Command};

fn main() -> ExitCode {
    let Args { command, edge, client, process } = Args::parse();
    match command {
        Some(Command::Cleanup) => match compose::cleanup(&edge.bpf_dir) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("steerage-edge cleanup: {error:#}");
                ExitCode::from(steerage_process::EXIT_FAILED)
            }
        },
        Some(Command::RouteFence) => routes::run_fence(edge.routes.route_table, &process.log),
        None => {
            let component = Component { name: "edge", version: env!("CARGO_PKG_VERSION"), admin: ADMIN };
            let shutdown_problem = edge.shutdown_problem(process.admin.shutdown_grace_period);
            steerage_process::run(component, &process, |process| {
                if let Some(problem) = shutdown_problem {
                    tracing::warn!(
                        problem,
                        "the process may be killed before other edge hosts have its VIPs; set a longer grace period, or shorter waits"
                    );
                }
                compose::start(edge, client, process)
            })
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `steerage-bench`: the command behind `hack/bench`.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match steerage_bench::args::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("steerage-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

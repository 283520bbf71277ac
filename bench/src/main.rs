// SPDX-License-Identifier: Apache-2.0
//! `steerage-bench`: side-by-side benchmarks as a command, behind `hack/bench`. All it does is in the library.

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

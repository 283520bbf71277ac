// SPDX-License-Identifier: Apache-2.0
//! `steerage-nlb`: the AWS of a lab.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match steerage_nlb::args::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("steerage-nlb: {error:#}");
            ExitCode::FAILURE
        }
    }
}

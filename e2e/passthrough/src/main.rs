// SPDX-License-Identifier: Apache-2.0
//! `steerage-passthrough`: the GCE or Azure of a lab.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match steerage_passthrough::args::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("steerage-passthrough: {error:#}");
            ExitCode::FAILURE
        }
    }
}

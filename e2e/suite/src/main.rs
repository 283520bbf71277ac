// SPDX-License-Identifier: Apache-2.0
//! `steerage-e2e`: runs the end-to-end suite.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match steerage_e2e::args::Args::parse().run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `demo`: runs the demonstration of `hack/demo`.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match steerage_e2e::demo::Args::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

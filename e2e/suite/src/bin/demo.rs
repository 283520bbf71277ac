// SPDX-License-Identifier: Apache-2.0
//! `demo`: the story of `hack/demo`. All it does is in the library.

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

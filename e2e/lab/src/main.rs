// SPDX-License-Identifier: Apache-2.0
//! `steerage-lab`: the command behind `hack/lab`. All it does is in the library.

mod args;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match args::Args::parse().run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The binary `steerage-agent`: one a node.

mod args;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    args::Args::parse().run()
}

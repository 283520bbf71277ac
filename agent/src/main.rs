// SPDX-License-Identifier: Apache-2.0
//! The binary `steerage-agent`, which runs on every node.

mod args;
#[cfg(test)]
mod reference;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    args::Args::parse().run()
}

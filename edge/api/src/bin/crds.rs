// SPDX-License-Identifier: Apache-2.0
//! Prints the custom resource definitions for the chart: one JSON document each, separated as YAML documents.

use std::io::{self, Write as _};

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    for crd in steerage_edge_api::crds() {
        writeln!(out, "---\n{}", serde_json::to_string_pretty(&crd)?)?;
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Renders `docs/reference/edge.md`.

use clap::CommandFactory as _;
use steerage_process::Metrics;

use crate::args::Args;

#[test]
fn reference_page_of_the_edge_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("edge", env!("CARGO_PKG_VERSION"));
    metrics.register("edge", |registry| crate::metrics::Metrics::default().register(registry));
    steerage_reference::check(
        "edge.md",
        "The edge: `steerage-edge`",
        "Flags, environment variables, subcommands and metrics. [edge/README.md](../../edge/README.md) says what a host needs.",
        &[steerage_reference::flags(&Args::command()), steerage_reference::metrics(&metrics.text()?)],
    )
}

// SPDX-License-Identifier: Apache-2.0
//! Renders `docs/reference/controller.md`.

use std::time::Duration;

use clap::CommandFactory as _;
use steerage_process::Metrics;

use crate::args::Args;

#[test]
fn reference_page_of_the_controller_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("controller", env!("CARGO_PKG_VERSION"));
    let ours = metrics.register("controller", crate::metrics::Metrics::new);
    ours.reconciled("done");
    ours.called("ensure", "ok", Duration::ZERO);
    steerage_reference::check(
        "controller.md",
        "The controller: `steerage`",
        "Flags, environment variables and metrics. The chart sets the flags from its [values](chart-values.md).",
        &[steerage_reference::flags(&Args::command()), steerage_reference::metrics(&metrics.text()?)],
    )
}

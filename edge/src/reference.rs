// SPDX-License-Identifier: Apache-2.0
//! Renders `docs/reference/edge.md`.

use clap::CommandFactory as _;
use steerage_process::{EXIT_FAILED, EXIT_FORCED, Metrics};

use crate::args::{ADMIN, Args};

#[test]
fn reference_page_of_the_edge_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("edge", env!("CARGO_PKG_VERSION"));
    metrics.register("edge", |registry| {
        crate::metrics::Metrics::default().register(registry);
        crate::metrics::register_sample_traffic(registry);
    });
    metrics.register("edge_watch", steerage_watch::register_sample_metrics);
    steerage_reference::check(
        "edge.md",
        "The edge: `steerage-edge`",
        "Flags, environment variables, subcommands, endpoints, exit codes and metrics. [edge/README.md](../../edge/README.md) says what a host needs.",
        &[
            steerage_reference::flags(&Args::command()),
            steerage_reference::endpoints(
                &ADMIN.to_string(),
                &[
                    ("peers", "the host knows the other edge hosts on the link"),
                    ("watches", "the edge's objects are listed"),
                    ("kernel", "the kernel's program runs, and its maps hold the first plan"),
                ],
                &[],
            ),
            steerage_reference::exit_codes(
                EXIT_FAILED,
                EXIT_FORCED,
                &[(
                    crate::routes::EXIT_TABLE_TAKEN,
                    "Only of `route-fence`, the process that `--route-table` starts: another steerage-edge in the network namespace has \
                     this table. Use another `--route-table`",
                )],
            ),
            steerage_reference::metrics(&metrics.text()?),
        ],
    )
}

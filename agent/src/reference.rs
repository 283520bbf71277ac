// SPDX-License-Identifier: Apache-2.0
//! Renders `docs/reference/agent.md`.

use clap::CommandFactory as _;
use steerage_process::Metrics;

use crate::args::Args;

#[test]
fn reference_page_of_the_agent_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("agent", env!("CARGO_PKG_VERSION"));
    let ours = metrics.register("agent", steerage_agent::metrics::Metrics::new);
    metrics.register_as("kubeproxy", |registry| ours.kube_proxy.register(registry));
    ours.kube_proxy.count_healthz(200);
    ours.kube_proxy.count_livez(200);
    ours.kube_proxy.without_local_endpoints(0, 0);
    steerage_reference::check(
        "agent.md",
        "The node agent: `steerage-agent`",
        "Flags, environment variables, subcommands and metrics. Metrics that start with `kubeproxy_` have kube-proxy's names \
         and meaning. The chart sets the flags from its [values](chart-values.md); [the agent in operation](../agent.md) \
         explains the rest.",
        &[steerage_reference::flags(&Args::command()), steerage_reference::metrics(&metrics.text()?)],
    )
}

// SPDX-License-Identifier: Apache-2.0
//! Renders `docs/reference/agent.md`.

use clap::CommandFactory as _;
use steerage_process::{EXIT_FAILED, EXIT_FORCED, Metrics};

use crate::args::{ADMIN, Args};

#[test]
fn reference_page_of_the_agent_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("agent", env!("CARGO_PKG_VERSION"));
    let ours = metrics.register("agent", steerage_agent::metrics::Metrics::new);
    metrics.register_as("kubeproxy", |registry| ours.kube_proxy.register(registry));
    metrics.register("agent", steerage_watch::events::register_metrics);
    metrics.register("agent_watch", steerage_watch::register_sample_metrics);
    metrics.register("agent", steerage_agent::metrics::register_sample_counted_packets);
    ours.host.set_features(&steerage_agent::rules::Features::default());
    for watch in ["addresses", "routes"] {
        drop(ours.host.watch_restarts(watch));
    }
    ours.kube_proxy.count_healthz(200);
    ours.kube_proxy.count_livez(200);
    let families = [steerage_model::Family::V4];
    ours.kube_proxy.show(&families);
    ours.kube_proxy.queued(&families);
    ours.kube_proxy.synced(&families, []);
    ours.kube_proxy.without_local_endpoints(&families, &std::collections::BTreeMap::new());
    metrics.register_as("rest_client", steerage_watch::RequestMetrics::new).show_sample();
    steerage_reference::check(
        "agent.md",
        "The node agent: `steerage-agent`",
        "Flags, environment variables, subcommands, endpoints, exit codes and metrics. Metrics that start with `kubeproxy_` have kube-proxy's names \
         and meaning. The chart sets the flags from its [values](chart-values.md); [the agent in operation](../agent.md) \
         explains the rest.",
        &[
            steerage_reference::flags(&Args::command()),
            steerage_reference::endpoints(
                &ADMIN.to_string(),
                &[(
                    "rules",
                    "Services, EndpointSlices and the Node are listed, and the rules are in the kernel",
                )],
                &[
                    (
                        "`[::]:10356`, with `--kube-proxy-replacement` also `[::]:10256`, or `--healthz-port`",
                        "/healthz",
                        "200 while the rules are current, no watch is silent for longer than `--max-watch-silence`, and the Node exists, is not being deleted and lacks the cluster autoscaler's taint; otherwise 503. With JSON",
                    ),
                    ("the same", "/livez", "200 while the rules are current, otherwise 503"),
                    (
                        "the same",
                        "/statement",
                        "JSON: what all health-check node ports answer at addresses of the family that was asked, or what has \
                         changed since the revision `after`, for which a request waits `wait` milliseconds, 10000 at most; 503 \
                         until the rules are in the kernel",
                    ),
                    (
                        "with `--kube-proxy-replacement` also `127.0.0.1:10249`, or `--metrics-bind-address`",
                        "/metrics, /healthz, /proxyMode",
                        "what kube-proxy serves there: the metrics, `ok` and `nftables`",
                    ),
                    (
                        "`spec.healthCheckNodePort` of each Service of policy Local",
                        "any",
                        "200 with a ready endpoint on this node and current rules, otherwise 503; the header \
                         `X-Load-Balancing-Endpoint-Weight` has their number",
                    ),
                ],
            ),
            steerage_reference::exit_codes(EXIT_FAILED, EXIT_FORCED, &[]),
            steerage_reference::metrics(&metrics.text()?),
        ],
    )
}

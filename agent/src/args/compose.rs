// SPDX-License-Identifier: Apache-2.0
//! The composition root: makes the agent's parts from the flags, connects them, and runs the loop.

use std::time::Duration;

use anyhow::{Context, bail};
use futures::{Stream, StreamExt};
use ipnet::IpNet;
use steerage_agent::agent::Agent;
use steerage_agent::debug_socket::DebugSocket;
use steerage_agent::health::{
    HealthCheckPorts, Listeners, ProxyHealth, allow_many_connections, serve_node_health, server_runtime,
};
use steerage_agent::input::Input;
use steerage_agent::kernel::{AddressWatch, Dataplane, Doubts, FlowCleaner};
use steerage_agent::metrics::{Metrics, register_dropped_packets};
use steerage_agent::node_annotations::{keep_annotated, node_agent};
use steerage_agent::plan::ElementLimits;
use steerage_agent::rules::{Ruleset, flow_seed};
use steerage_agent::settings::{AgentSettings, DetectLocal, NodePortAddresses};
use steerage_process::{Component, Process};
use steerage_watch::events::Recorder;
use steerage_watch::{ServiceCidrs, Store, Watches, client};
use tokio::sync::{mpsc, watch};

use super::{AgentArgs, Args, DetectLocalMode, healthz_ports};

/// Wait before a socket that failed is replaced.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

impl Args {
    pub(super) async fn compose(self, process: Process, debug_socket: DebugSocket) -> anyhow::Result<()> {
        let Self { command: _, process: _, client: client_args, agent } = self;
        let AgentArgs {
            kube_proxy_replacement,
            node_name,
            nodeport_addresses,
            detect_local_mode,
            cluster_cidr,
            pod_bridge_interface,
            pod_interface_name_prefix,
            drop_unassigned_vips,
            deny_service_external_ips,
            max_service_elements,
            max_namespace_elements,
            healthz_port,
            max_watch_silence,
            seccomp: _,
        } = agent;
        allow_many_connections();
        let node = node_name.context("--node-name is missing")?;
        if kube_proxy_replacement && client_args.api_server.is_none() && client_args.kubeconfig.is_none() {
            bail!(
                "--kube-proxy-replacement needs --api-server or --kubeconfig: without kube-proxy nothing serves the API \
                 server's cluster IP"
            );
        }
        let detect_local =
            detection(detect_local_mode, cluster_cidr, pod_bridge_interface, pod_interface_name_prefix)?;
        let settings = AgentSettings {
            node: node.clone(),
            kube_proxy_replacement,
            node_port_addresses: nodeport_addresses,
            detect_local,
            unassigned: drop_unassigned_vips.into_iter().flat_map(|range| range.0).collect(),
            deny_external_ips: deny_service_external_ips,
            element_limits: ElementLimits {
                service: max_service_elements,
                namespace: max_namespace_elements,
            },
            api_server: client_args.api_server.as_ref().and_then(|server| server.to_string().parse().ok()),
        };
        let Component { name, version, .. } = process.component();
        let first = process.readiness().task("rules");
        let client = client(name, version, &client_args).await?;
        let metrics = process.metrics().register(name, Metrics::new);
        process.metrics().register_as("kubeproxy", |registry| metrics.kube_proxy.register(registry));
        process.metrics().register(name, register_dropped_packets);
        let (recorder, writer) =
            process.metrics().register(name, |registry| Recorder::new(client.clone(), name, &node, registry));
        tokio::spawn(writer);

        let counted = metrics.clone();
        let cleaner =
            FlowCleaner::start(move |walk| counted.walked(walk)).context("cannot reach conntrack")?;
        let mut dataplane = Dataplane::open().context("cannot reach nftables")?;
        let ruleset = empty_ruleset(&settings);
        let (inputs, queue) = mpsc::unbounded_channel();
        tokio::spawn(debug_socket.serve(inputs.clone()));
        dataplane.watch_foreign_changes(pass_doubts(inputs.clone()));
        if matches!(settings.node_port_addresses, NodePortAddresses::In(_)) {
            watch_addresses(inputs.clone())?;
        }

        let watches =
            process.metrics().register("agent_watch", |registry| Watches::new(client.clone(), registry));
        follow(watches.services(), inputs.clone(), Input::Service);
        follow(watches.slices(), inputs.clone(), Input::Slice);
        follow(watches.dispensable().watch(ServiceCidrs), inputs.clone(), Input::ServiceCidr);
        follow(watches.node(&node), inputs, Input::Node);

        let (ask, asked) = watch::channel(false);
        let annotations = node_agent(kube_proxy_replacement, version);
        tokio::spawn(keep_annotated(client, node, annotations.clone(), asked));
        let (ports, proxy_health) = (HealthCheckPorts::default(), ProxyHealth::default());
        if !max_watch_silence.is_zero() {
            let staleness = watches.staleness().clone();
            let longest = move || staleness.longest().map(|(_, silent)| silent);
            proxy_health.limit_watch_silence(max_watch_silence, longest);
        }
        let node_ports = healthz_ports(healthz_port, kube_proxy_replacement);
        let servers = server_runtime().context("cannot start the health servers' thread")?;
        servers.spawn(serve_node_health(node_ports, proxy_health.clone(), metrics.kube_proxy.clone()));

        let listeners = Listeners::new(ports.clone(), proxy_health.clone(), servers);
        let agent = Agent {
            settings,
            ruleset,
            dataplane,
            cleaner,
            ports,
            proxy_health,
            listeners,
            recorder,
            annotations: (annotations, ask),
            metrics,
            first: Some(first),
        };
        agent.run(queue, process.shutdown().clone()).await
    }
}

/// Joins the mode with the flag that it needs.
fn detection(
    how: DetectLocalMode,
    cidrs: Vec<IpNet>,
    bridge: Option<String>,
    prefix: Option<String>,
) -> anyhow::Result<DetectLocal> {
    Ok(match how {
        DetectLocalMode::NodeCidr => DetectLocal::NodeCidrs,
        DetectLocalMode::ClusterCidr if cidrs.is_empty() => {
            bail!("--detect-local-mode cluster-cidr needs --cluster-cidr")
        }
        DetectLocalMode::ClusterCidr => DetectLocal::ClusterCidrs(cidrs),
        DetectLocalMode::BridgeInterface => DetectLocal::Bridge(
            bridge.context("--detect-local-mode bridge-interface needs --pod-bridge-interface")?,
        ),
        DetectLocalMode::InterfaceNamePrefix => DetectLocal::InterfacePrefix(
            prefix.context("--detect-local-mode interface-name-prefix needs --pod-interface-name-prefix")?,
        ),
        DetectLocalMode::None => DetectLocal::Nothing,
    })
}

/// The configuration of the rules as far as flags say it.
fn empty_ruleset(settings: &AgentSettings) -> Ruleset {
    let mut ruleset = Ruleset::default();
    ruleset.set_seed(flow_seed(&settings.node));
    // kube-proxy does it where it runs.
    ruleset.set_drop_invalid(settings.kube_proxy_replacement && !is_conntrack_liberal());
    ruleset.set_unassigned(settings.unassigned(&Store::default()));
    ruleset
}

/// Whether connection tracking places packets outside of the window, too (`nf_conntrack_tcp_be_liberal`).
fn is_conntrack_liberal() -> bool {
    let setting = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal");
    setting.is_ok_and(|value| value.trim() != "0")
}

/// Passes to the loop what other programs changed, as long as there is a loop.
fn pass_doubts(inputs: mpsc::UnboundedSender<Input>) -> impl FnMut(Doubts) -> bool {
    move |doubts| {
        if doubts.is_empty() {
            !inputs.is_closed()
        } else {
            inputs.send(Input::ForeignChange(doubts)).is_ok()
        }
    }
}

/// Passes a watch's events to the loop.
fn follow<E: Send + 'static>(
    mut events: impl Stream<Item = E> + Send + Unpin + 'static,
    inputs: mpsc::UnboundedSender<Input>,
    input: fn(E) -> Input,
) {
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if inputs.send(input(event)).is_err() {
                return;
            }
        }
    });
}

/// Notifies the loop when addresses of this host change.
fn watch_addresses(inputs: mpsc::UnboundedSender<Input>) -> anyhow::Result<()> {
    let mut watch = AddressWatch::open().context("cannot watch the host's addresses")?;
    tokio::spawn(async move {
        loop {
            if let Err(error) = watch.changed().await {
                tracing::warn!(%error, "changes of the host's addresses not seen; watching anew");
                tokio::time::sleep(REOPEN_INTERVAL).await;
                match AddressWatch::open() {
                    Ok(another) => watch = another,
                    Err(error) => tracing::warn!(%error, "cannot watch the host's addresses; trying again"),
                }
            }
            if inputs.send(Input::HostAddresses).is_err() {
                return;
            }
        }
    });
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! The composition root: makes the agent's parts from the flags, connects them, and runs the loop.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::{Stream, StreamExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1 as api;
use kube::Client;
use kube::api::{Api, ListParams};
use steerage_agent::agent::Agent;
use steerage_agent::debug_socket::DebugSocket;
use steerage_agent::edge_tunnel::EdgeTunnelSettings;
use steerage_agent::health::{
    HealthCheckPorts, Listeners, NodeHealth, ProxyHealth, StatedTunnel, allow_many_connections,
    serve_node_health, server_runtime,
};
use steerage_agent::input::Input;
use steerage_agent::kernel::{
    AddressWatch, Dataplane, EdgeTunnelKeeper, FlowCleaner, KernelFeatures, NextHops, Noticed,
    kernel_features, remove_edge_tunnel,
};
use steerage_agent::metrics::{HostMetrics, Metrics, register_counted_packets};
use steerage_agent::node_annotations::{keep_annotated, node_agent};
use steerage_agent::peers::ForwardToPeers;
use steerage_agent::plan::ElementLimits;
use steerage_agent::rules::{Feature, Features, Ruleset, flow_seed};
use steerage_agent::settings::{AgentSettings, DetectLocal, NodePortAddresses};
use steerage_model::{Family, Node, Service, TunnelReceiver};
use steerage_nft::Nft;
use steerage_process::admin::AdminPages;
use steerage_process::{Component, Process};
use steerage_watch::events::Recorder;
use steerage_watch::{
    ClientArgs, Event, Nodes, RequestMetrics, ServiceCidrs, Store, Watches, counted_client,
};
use tokio::sync::{mpsc, oneshot, watch};

use super::host_watch::HostWatch;
use super::{AgentArgs, Args, DetectLocalMode, config_file, healthz_ports, metrics_address};

/// Of at most this many Nodes each agent watches all. Together the agents of that many read 30 MB/s: every kubelet writes its Node each
/// five minutes, in some 10 kB.
const MAX_WATCHED_NODES: i64 = 1_000;
/// Wait before Nodes are counted again, up to twice as long.
const COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// Wait between looks at changed routes. Each pod that comes or goes changes one.
const ROUTES_SETTLE: Duration = Duration::from_secs(1);

impl Args {
    pub(super) async fn compose(self, process: Process, debug_socket: DebugSocket) -> anyhow::Result<()> {
        let Self { command: _, process: _, client: mut client_args, mut agent } = self;
        if let Some(path) = agent.config.take() {
            config_file::apply(&path, &mut agent, &mut client_args)?;
        }
        // The next process adopts the rules, and no traffic fails.
        process.end_on_panic();
        allow_many_connections();
        let mut settings = settings(agent.clone(), &client_args)?;
        let tunnel = edge_tunnel(&agent);
        let AgentArgs { healthz_port, metrics_bind_address, max_watch_silence, .. } = agent;
        let AgentSettings { node, kube_proxy_replacement, .. } = settings.clone();
        let Component { name, version, .. } = process.component();
        let first = process.readiness().task("rules");
        let requests = process.metrics().register_as("rest_client", RequestMetrics::new);
        let client = counted_client(name, version, &client_args, &requests).await?;
        let metrics = process.metrics().register(name, Metrics::new);
        process.metrics().register_as("kubeproxy", |registry| metrics.kube_proxy.register(registry));
        process.metrics().register(name, register_counted_packets);
        let (recorder, writer) =
            process.metrics().register(name, |registry| Recorder::new(client.clone(), name, &node, registry));
        tokio::spawn(writer);

        let counted = metrics.clone();
        let cleaner =
            FlowCleaner::start(move |walk| counted.walked(walk)).context("cannot reach conntrack")?;
        let mut dataplane = Dataplane::open().context("cannot reach nftables")?;
        metrics.kube_proxy.show(dataplane.families());
        let features = report_features(&metrics);
        settings.forward_to_peers = settings.forward_to_peers.filter(|_| can_forward(&features));
        let next_hops = settings.forward_to_peers.as_ref().map(|_| NextHops::open()).transpose();
        let next_hops = next_hops.context("cannot look routes up")?;
        let ruleset = empty_ruleset(&settings, features);
        let (inputs, queue) = mpsc::unbounded_channel();
        tokio::spawn(debug_socket.serve(inputs.clone()));
        let others = inputs.clone();
        dataplane.watch_foreign(move |noticed| match noticed {
            Noticed::Nothing => !others.is_closed(),
            noticed => others.send(Input::Foreign(noticed)).is_ok(),
        });
        watch_host(&settings, &inputs, &metrics)?;
        let stated_tunnel = StatedTunnel::default();
        keep_edge_tunnel(tunnel, &metrics, stated_tunnel.clone())?;

        let watches =
            process.metrics().register("agent_watch", |registry| Watches::new(client.clone(), registry));
        follow(watches.services(), inputs.clone(), |event| Input::Service(without_labels(event)));
        follow(watches.slices(), inputs.clone(), Input::Slice);
        follow(watches.dispensable().watch(ServiceCidrs), inputs.clone(), Input::ServiceCidr);
        let cluster_nodes = if settings.forward_to_peers.is_some() {
            follow(watches.watch(Nodes::all()), inputs, Input::Node);
            None
        } else {
            follow(watches.watch(Nodes::one(&node)), inputs.clone(), Input::Node);
            let events = watches.dispensable().watch(Nodes::all());
            Some(follow_nodes_on_demand(client.clone(), events, inputs))
        };

        let (ask, asked) = watch::channel(false);
        let annotations = node_agent(kube_proxy_replacement, version);
        tokio::spawn(keep_annotated(client, node, annotations.clone(), asked));
        let (ports, proxy_health) = (HealthCheckPorts::default(), ProxyHealth::default());
        if !max_watch_silence.is_zero() {
            let staleness = watches.staleness().clone();
            let longest = move || staleness.longest().map(|(_, silent)| silent);
            proxy_health.limit_watch_silence(max_watch_silence, longest);
        }
        let servers = server_runtime().context("cannot start the health servers' thread")?;
        let node_health = NodeHealth {
            proxy_health: proxy_health.clone(),
            families: dataplane.families().to_vec(),
            ports: ports.clone(),
            tunnel: stated_tunnel,
            counts: metrics.kube_proxy.clone(),
            statements: metrics.statements.clone(),
        };
        let health_addresses = healthz_ports(healthz_port, kube_proxy_replacement);
        servers.spawn(serve_node_health(health_addresses, node_health));
        let kube_proxys = metrics_address(metrics_bind_address, kube_proxy_replacement);
        serve_as_kube_proxy(process.admin_pages(), kube_proxys, kube_proxy_replacement);

        let listeners = Listeners::new(ports.clone(), proxy_health.clone(), servers);
        let agent = Agent {
            settings,
            ruleset,
            dataplane,
            next_hops,
            cluster_nodes,
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

/// The settings that flags and a file say.
fn settings(flags: AgentArgs, client: &ClientArgs) -> anyhow::Result<AgentSettings> {
    let AgentArgs {
        kube_proxy_replacement,
        config: _,
        node_name,
        bind_address,
        nodeport_addresses,
        masquerade_all,
        detect_local_mode,
        cluster_cidr,
        pod_bridge_interface,
        pod_interface_name_prefix,
        drop_unassigned_vips,
        deny_service_external_ips,
        max_service_elements,
        max_namespace_elements,
        forward_without_local_endpoints,
        forward_tunnel_devices,
        edge_tunnel_vni: _,
        edge_tunnel_port: _,
        edge_tunnel_sources: _,
        edge_tunnel_vips: _,
        healthz_port: _,
        metrics_bind_address: _,
        max_watch_silence: _,
        seccomp: _,
    } = flags;
    let node = node_name.context("--node-name is missing, and no file names the node")?;
    require_api_server(kube_proxy_replacement, client)?;
    let mode = detect_local_mode.unwrap_or(DetectLocalMode::NodeCidr);
    Ok(AgentSettings {
        node,
        kube_proxy_replacement,
        node_port_addresses: nodeport_addresses.unwrap_or(NodePortAddresses::Primary),
        detect_local: detection(mode, cluster_cidr, pod_bridge_interface, pod_interface_name_prefix)?,
        masquerade_all,
        node_ip: bind_address,
        unassigned: drop_unassigned_vips.into_iter().flat_map(|range| range.0).collect(),
        deny_external_ips: deny_service_external_ips,
        element_limits: ElementLimits { service: max_service_elements, namespace: max_namespace_elements },
        forward_to_peers: forward_without_local_endpoints
            .then_some(ForwardToPeers { tunnel_devices: forward_tunnel_devices }),
        api_server: client.api_server.as_ref().and_then(|server| server.to_string().parse().ok()),
    })
}

/// What the flags say of the edge's tunnel, if there is one.
fn edge_tunnel(flags: &AgentArgs) -> Option<EdgeTunnelSettings> {
    Some(EdgeTunnelSettings {
        vni: flags.edge_tunnel_vni?,
        port: flags.edge_tunnel_port,
        sources: flags.edge_tunnel_sources.clone(),
        vips: flags.edge_tunnel_vips.iter().flat_map(|range| range.0.iter().copied()).collect(),
    })
}

/// Starts to keep the devices and tables of the edge's tunnel, or removes those of an earlier process.
fn keep_edge_tunnel(
    settings: Option<EdgeTunnelSettings>,
    metrics: &Metrics,
    stated: StatedTunnel,
) -> anyhow::Result<()> {
    let Some(settings) = settings else {
        remove_edge_tunnel(&mut Nft::open().context("cannot reach nftables")?);
        for family in [Family::V4, Family::V6] {
            stated.set(family, TunnelReceiver::Off);
        }
        return Ok(());
    };
    let keeper = EdgeTunnelKeeper::open(settings).context("cannot reach nftables")?;
    let HostMetrics { edge_tunnel_ready: ready, edge_tunnel_failed: failed, .. } = metrics.host.clone();
    tokio::spawn(keeper.run(ready, failed, move |family, receiver| stated.set(family, receiver)));
    Ok(())
}

/// Serves at kube-proxy's address what it serves there, too.
fn serve_as_kube_proxy(pages: &AdminPages, address: Option<SocketAddr>, kube_proxy_replacement: bool) {
    if kube_proxy_replacement {
        pages.add("/proxyMode", "nftables");
    }
    if let Some(address) = address {
        pages.add("/healthz", "ok");
        tokio::spawn(pages.clone().serve_at(address));
    }
}

/// In place of kube-proxy there has to be a way to the API server.
fn require_api_server(kube_proxy_replacement: bool, client: &ClientArgs) -> anyhow::Result<()> {
    if kube_proxy_replacement && client.api_server.is_none() && client.kubeconfig.is_none() {
        bail!(
            "--kube-proxy-replacement needs --api-server or --kubeconfig: without kube-proxy nothing serves the API server's \
             cluster IP"
        );
    }
    Ok(())
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

/// Finds out what the kernel has, and reports it. If that cannot be found out, the rules are written as for a kernel that has all.
fn report_features(metrics: &Metrics) -> Features {
    match kernel_features() {
        Ok(KernelFeatures { release, features }) => {
            tracing::info!(kernel = release, missing = %features, "features of the kernel");
            metrics.host.set_features(&features);
            features
        }
        Err(error) => {
            tracing::warn!(%error, "features of the kernel not found out; using all");
            Features::default()
        }
    }
}

/// Without the feature the kernel would refuse all rules.
fn can_forward(features: &Features) -> bool {
    let can = features.has(Feature::Duplicates);
    if !can {
        tracing::warn!(
            feature = Feature::Duplicates.name(),
            "kernel lacks nft_dup_ipv4 or nft_dup_ipv6; ignoring --forward-without-local-endpoints"
        );
    }
    can
}

/// The configuration of the rules as far as flags say it.
fn empty_ruleset(settings: &AgentSettings, features: Features) -> Ruleset {
    let mut ruleset = Ruleset::default();
    ruleset.set_features(features);
    ruleset.set_seed(flow_seed(&settings.node));
    // kube-proxy does it where it runs.
    ruleset.set_drop_invalid(settings.kube_proxy_replacement && !is_conntrack_liberal());
    ruleset.set_forward_to_peers(settings.forward_to_peers.is_some());
    ruleset.set_unassigned(settings.unassigned(&Store::default()));
    ruleset
}

/// Whether connection tracking places packets outside of the window, too (`nf_conntrack_tcp_be_liberal`).
fn is_conntrack_liberal() -> bool {
    let setting = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal");
    setting.is_ok_and(|value| value.trim() != "0")
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

/// No rule follows from the labels of Services, which may be many.
fn without_labels(event: Event<Service>) -> Event<Service> {
    let stripped = |service: Service| Service { labels: Arc::default(), ..service };
    match event {
        Event::InitApply(service) => Event::InitApply(stripped(service)),
        Event::Apply(service) => Event::Apply(stripped(service)),
        other => other,
    }
}

/// The same for all Nodes, from a moment within the time that is sent on, unless they are more than [`MAX_WATCHED_NODES`].
fn follow_nodes_on_demand(
    client: Client,
    events: impl Stream<Item = Event<Node>> + Send + Unpin + 'static,
    inputs: mpsc::UnboundedSender<Input>,
) -> oneshot::Sender<Duration> {
    let (start, started) = oneshot::channel::<Duration>();
    tokio::spawn(async move {
        let Ok(spread) = started.await else { return };
        tokio::time::sleep(spread.mul_f64(fastrand::f64())).await;
        let nodes = loop {
            match count_nodes(client.clone()).await {
                Ok(nodes) => break nodes,
                // The watch says so, too.
                Err(kube::Error::Api(status)) if status.code == 403 => break 0,
                // Agents that all watch would not help an API server in need.
                Err(error) => {
                    tracing::debug!(%error, "Nodes not counted; counting again");
                    tokio::time::sleep(COUNT_INTERVAL.mul_f64(1.0 + fastrand::f64())).await;
                }
            }
        };
        if nodes > MAX_WATCHED_NODES {
            tracing::warn!(
                nodes,
                most = MAX_WATCHED_NODES,
                "not watching all Nodes for external IPs, because they are too many; external IPs at addresses of other nodes are served"
            );
            let _ = inputs.send(Input::TooManyNodes);
            return;
        }
        tracing::info!(
            "watching all Nodes, because a Service has an external IP, which must not be the address of a node"
        );
        follow(events, inputs, Input::ClusterNode);
    });
    start
}

/// The number of Nodes, of which there is one at least, without reading them.
async fn count_nodes(client: Client) -> kube::Result<i64> {
    let first = Api::<api::Node>::all(client).list_metadata(&ListParams::default().limit(1)).await?;
    Ok(1 + first.metadata.remaining_item_count.unwrap_or_default())
}

/// Notifies the loop of changes of the host that matter.
fn watch_host(
    settings: &AgentSettings,
    inputs: &mpsc::UnboundedSender<Input>,
    metrics: &Metrics,
) -> anyhow::Result<()> {
    let notify = |open: fn() -> std::io::Result<AddressWatch>, what, settle, input: fn() -> Input| {
        let watch = HostWatch { what, settle, restarts: metrics.host.watch_restarts(what) };
        watch.start(open, inputs.clone(), input)
    };
    if matches!(settings.node_port_addresses, NodePortAddresses::In(_)) {
        notify(AddressWatch::open, "addresses", Duration::ZERO, || Input::HostAddresses)?;
    }
    if settings.forward_to_peers.is_some() {
        notify(AddressWatch::of_routes, "routes", ROUTES_SETTLE, || Input::Routes)?;
    }
    Ok(())
}

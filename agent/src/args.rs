// SPDX-License-Identifier: Apache-2.0
//! Flags and subcommands. [`compose`] puts the agent together from them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use clap::{Args as Flags, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use steerage_agent::check::{AgentState, Level};
use steerage_agent::debug_request::DebugCommand;
use steerage_agent::debug_socket::{DebugSocket, DebugSocketError, send_command};
use steerage_agent::dump::{kernel_elements, kernel_tables};
use steerage_agent::explain::PacketQuery;
use steerage_agent::health::HealthAddress;
use steerage_agent::kernel::{clean_up, host_facts, trace_packet};
use steerage_agent::node_annotations::remove_annotations;
use steerage_agent::plan::{Frontend, LEAST_ELEMENTS};
use steerage_agent::sandbox::{FilterMode, SandboxError, confine};
use steerage_agent::settings::{AddressRange, NodePortAddresses};
use steerage_model::names;
use steerage_process::{Component, EXIT_FAILED, ProcessArgs, duration, run};
use steerage_watch::{ClientArgs, client};

mod compose;
mod config_file;
mod host_watch;

/// Default address of the administration server.
pub(crate) const ADMIN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), 10358);
/// Ports of the node's health: kube-proxy's, which is free where none runs, and the agent's, which load balancers of Services
/// labelled for it use.
const HEALTHZ_PORTS: [u16; 2] = [10256, 10356];
/// Where kube-proxy serves its metrics by default.
const KUBE_PROXY_METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
/// A quiet watch delivers a bookmark about once a minute, but after a restart of the API server perhaps none: then it is listed again
/// after twice the longest silence of a watch. A shorter limit would fail healthy nodes.
const MIN_WATCH_SILENCE: Duration = Duration::from_mins(5);

/// How to recognise traffic from local pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DetectLocalMode {
    /// By the node's pod CIDRs
    NodeCidr,
    /// By --cluster-cidr
    ClusterCidr,
    /// By --pod-bridge-interface
    BridgeInterface,
    /// By --pod-interface-name-prefix
    InterfaceNamePrefix,
    /// Not at all
    None,
}

/// What to do about system calls that the agent does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SeccompMode {
    /// Fail them
    Enforce,
    /// Allow them, and log them in the kernel's audit log
    Log,
    /// Allow them
    Off,
}

impl SeccompMode {
    fn confine(self) -> Result<(), SandboxError> {
        match self {
            Self::Enforce => confine(FilterMode::Enforce),
            Self::Log => confine(FilterMode::Log),
            Self::Off => Ok(()),
        }
    }
}

/// Translate packets for Services on this node, and answer load balancers' health checks
#[derive(Debug, Parser)]
#[command(
    name = "steerage-agent",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Clone, Debug, Flags)]
#[command(next_help_heading = "Agent")]
struct AgentArgs {
    /// Serve all Services, in place of kube-proxy; needs --api-server or --kubeconfig. Without it, serve only Services labelled
    /// service.kubernetes.io/service-proxy-name: steerage, beside kube-proxy
    #[arg(long, env = "STEERAGE_KUBE_PROXY_REPLACEMENT")]
    kube_proxy_replacement: bool,
    /// Take settings from kube-proxy's configuration file, where no flag says otherwise, and log what the agent does differently;
    /// needs --kube-proxy-replacement
    #[arg(long, env = "STEERAGE_CONFIG", value_name = "FILE", requires = "kube_proxy_replacement")]
    config: Option<PathBuf>,
    /// Serve this node; required, unless --config names it
    #[arg(long, env = "NODE_NAME", required_unless_present = "config", value_name = "NAME")]
    node_name: Option<String>,
    /// Use this as the node's own address of its family, instead of that in the Node's status; no socket is bound to it
    #[arg(long, env = "STEERAGE_BIND_ADDRESS", value_name = "IP")]
    bind_address: Option<IpAddr>,
    /// Serve node ports and health-check ports at these addresses of the host: `primary`, the node's first address of each family in
    /// its status, or comma-separated networks. A family without a network has no node ports [default: primary]
    #[arg(long, env = "STEERAGE_NODEPORT_ADDRESSES", value_name = "primary|CIDR,…")]
    nodeport_addresses: Option<NodePortAddresses>,
    /// Replace the source address of all clients of cluster IPs by the node's, also that of pods; some network plug-ins need it
    #[arg(long, env = "STEERAGE_MASQUERADE_ALL")]
    masquerade_all: bool,
    /// Recognise traffic from local pods this way [default: node-cidr]
    #[arg(long, env = "STEERAGE_DETECT_LOCAL_MODE", value_enum, value_name = "MODE")]
    detect_local_mode: Option<DetectLocalMode>,
    /// Treat these networks as those of all pods; for --detect-local-mode cluster-cidr
    #[arg(long, env = "STEERAGE_CLUSTER_CIDR", value_delimiter = ',', value_name = "CIDR,…")]
    cluster_cidr: Vec<IpNet>,
    /// Treat traffic from this bridge as that of local pods; for --detect-local-mode bridge-interface
    #[arg(long, env = "STEERAGE_POD_BRIDGE_INTERFACE", value_name = "NAME", value_parser = interface)]
    pod_bridge_interface: Option<String>,
    /// Treat traffic from interfaces with this name prefix as that of local pods. No other interface may have the prefix; for
    /// --detect-local-mode interface-name-prefix
    #[arg(long, env = "STEERAGE_POD_INTERFACE_NAME_PREFIX", value_name = "PREFIX", value_parser = interface)]
    pod_interface_name_prefix: Option<String>,
    /// Drop packets to these addresses that match no Service: CIDRs, addresses or ranges first-last, as in the load balancer's pools.
    /// Do not list addresses at which a load balancer terminates connections (ipMode Proxy)
    #[arg(long, env = "STEERAGE_DROP_UNASSIGNED_VIPS", value_name = "RANGE,…", value_delimiter = ',')]
    drop_unassigned_vips: Vec<AddressRange>,
    /// Serve no external IPs of Services: any user who may create a Service may name any address there. Without this flag an external
    /// IP is still not served in a `ServiceCIDR`, at an address of a node or in its pod network (of other nodes only in clusters
    /// of up to 1,000), at an API server's address and port, or where another Service has an assigned address; to know the nodes, the agent watches all Nodes once a Service has an external IP
    #[arg(long, env = "STEERAGE_DENY_SERVICE_EXTERNAL_IPS")]
    deny_service_external_ips: bool,
    /// Let a Service have this many elements of nftables sets and maps on this node: about one for each endpoint of each port, and ten
    /// for each address and port. One that needs more is served with a part of its endpoints, an event and a metric
    #[arg(
        long,
        env = "STEERAGE_MAX_SERVICE_ELEMENTS",
        value_name = "N",
        default_value = "100000",
        value_parser = elements
    )]
    max_service_elements: usize,
    /// Let the Services of a namespace together have this many elements. If they need more, the largest are served with a part of
    /// their endpoints; each has 256 in any case, so limit their number by a `ResourceQuota`. A million elements take about 70 MB of the
    /// kernel's memory and twice that in the agent, both within the agent's memory limit
    #[arg(
        long,
        env = "STEERAGE_MAX_NAMESPACE_ELEMENTS",
        value_name = "N",
        default_value = "250000",
        value_parser = elements
    )]
    max_namespace_elements: usize,
    /// Under externalTrafficPolicy Local, forward packets that find no endpoint on this node to a node that has one, unchanged, instead
    /// of dropping them: while the load balancer still sends here. Only packets to a load balancer's address, only once, and to nodes on
    /// the same link. All nodes are watched
    #[arg(long, env = "STEERAGE_FORWARD_WITHOUT_LOCAL_ENDPOINTS")]
    forward_without_local_endpoints: bool,
    /// Forward such packets to nodes off the link, too, where the route to their pods leads through one of these tunnel devices, such as
    /// flannel.1
    #[arg(
        long,
        env = "STEERAGE_FORWARD_TUNNEL_DEVICES",
        value_delimiter = ',',
        value_name = "NAME,…",
        requires = "forward_without_local_endpoints",
        value_parser = interface
    )]
    forward_tunnel_devices: Vec<String>,
    /// Receive what edge hosts that are not on this node's link send through VXLAN, with this number of the virtual network (VNI), the
    /// edge hosts' --tunnel-vni
    #[arg(
        long,
        env = "STEERAGE_EDGE_TUNNEL_VNI",
        value_name = "NUMBER",
        requires_all = ["edge_tunnel_sources", "edge_tunnel_vips"],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(steerage_tunnel::MAX_VNI))
    )]
    edge_tunnel_vni: Option<u32>,
    /// Receive the edge hosts' VXLAN packets on this UDP port, the edge hosts' --tunnel-port
    #[arg(
        long,
        env = "STEERAGE_EDGE_TUNNEL_PORT",
        value_name = "PORT",
        default_value_t = steerage_tunnel::DEFAULT_PORT,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    edge_tunnel_port: u16,
    /// Receive VXLAN packets only from these networks: the addresses from which edge hosts send to this node. What other hosts send to
    /// the port is dropped
    #[arg(
        long,
        env = "STEERAGE_EDGE_TUNNEL_SOURCES",
        value_name = "CIDR,…",
        value_delimiter = ',',
        requires = "edge_tunnel_vni",
        value_parser = network
    )]
    edge_tunnel_sources: Vec<IpNet>,
    /// Accept only packets to these addresses out of the tunnel: CIDRs, addresses or ranges first-last, as in the load balancer's pools.
    /// Of these packets, what no Service proxy on this node translates is dropped
    #[arg(
        long,
        env = "STEERAGE_EDGE_TUNNEL_VIPS",
        value_name = "RANGE,…",
        value_delimiter = ',',
        requires = "edge_tunnel_vni"
    )]
    edge_tunnel_vips: Vec<AddressRange>,
    /// Serve the node's /healthz, /livez and /statement on these ports, of all addresses or of one [default: 10356, and 10256 with
    /// --kube-proxy-replacement]
    #[arg(long, env = "STEERAGE_HEALTHZ_PORT", value_name = "[IP:]PORT,…", value_delimiter = ',')]
    healthz_port: Vec<HealthAddress>,
    /// Serve what --admin-address serves at this address, too, as kube-proxy does; `none` for nowhere [default: 127.0.0.1:10249 with
    /// --kube-proxy-replacement, otherwise none]
    #[arg(long, env = "STEERAGE_METRICS_BIND_ADDRESS", value_name = "IP:PORT")]
    metrics_bind_address: Option<MetricsAddress>,
    /// Fail health checks after this long without watch data; 0s disables, else at least 5m. Disabled by default: the rules keep
    /// serving while the API server is unavailable, and no node would serve if all failed at once
    #[arg(
        long,
        env = "STEERAGE_MAX_WATCH_SILENCE",
        value_name = "DURATION",
        default_value = "0s",
        value_parser = watch_silence
    )]
    max_watch_silence: Duration,
    /// Filter system calls that the agent does not need, such as starting a program. A kubeconfig with a credential plugin needs
    /// `off`
    #[arg(long, env = "STEERAGE_SECCOMP", value_enum, default_value = "enforce", value_name = "MODE")]
    seccomp: SeccompMode,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Delete the agent's tables and the devices of the edge's tunnel from this host's kernel, and the agent's annotations from the Node
    Cleanup {
        #[command(flatten)]
        client: ClientArgs,
        /// Remove the annotations of this node; without it they stay
        #[arg(long, env = "NODE_NAME", value_name = "NAME", help_heading = "Agent")]
        node_name: Option<String>,
    },
    /// Say what on this host is not as Services need it: kernel, kernel settings, conntrack, the agent's tables, other programs'. Changes nothing.
    /// Fails if Services cannot work
    Check {
        /// Print only what the agent would do about each field of this configuration file of kube-proxy
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Print what happens to a packet on this node, and why
    Explain {
        /// Explain a packet to this destination
        #[arg(value_name = "IP:PORT/PROTO")]
        to: Frontend,
        /// Explain a packet from this source [default: outside the node]
        #[arg(long, value_name = "IP")]
        from: Option<IpAddr>,
        /// Wait for such a packet, and print its way through all tables of this host; of TCP, one that opens a connection
        #[arg(long)]
        trace: bool,
        /// Wait this long for the packet
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse, requires = "trace")]
        trace_timeout: Duration,
    },
    /// Print the wanted tables of this node, and where the kernel's differ
    Dump {
        /// Print elements that do not differ, too
        #[arg(long)]
        all: bool,
    },
}

impl Command {
    fn run(self) -> anyhow::Result<()> {
        let command = match self {
            Self::Cleanup { client, node_name } => return clean_up_node(node_name, &client),
            Self::Check { config: Some(path) } => return config_file::check(&path),
            Self::Check { config: None } => return check(),
            Self::Dump { all } => DebugCommand::Dump { all },
            Self::Explain { to, from, trace, trace_timeout } => {
                let query = PacketQuery::new(to, from).map_err(anyhow::Error::msg)?;
                if trace {
                    return trace_next(query, trace_timeout);
                }
                DebugCommand::Explain(query)
            }
        };
        let text = match send_command(&command) {
            Err(error @ DebugSocketError::Silent) => {
                eprintln!("steerage-agent: {error}. This is what the kernel's tables hold:");
                match &command {
                    DebugCommand::Dump { all } => kernel_tables(*all),
                    DebugCommand::Explain(query) => kernel_elements(&query.frontend),
                }
                .context("cannot read the kernel's tables")?
            }
            reply => reply?,
        };
        print!("{text}");
        Ok(())
    }
}

/// Needs no running agent.
fn trace_next(query: PacketQuery, timeout: Duration) -> anyhow::Result<()> {
    let packet = trace_packet(query, timeout)
        .context("cannot trace: run this as root on the node, or in the agent's pod")?
        .with_context(|| {
            format!("no such packet to {} came within {}", query.frontend, duration::rounded(timeout))
        })?;
    print!("{packet}");
    Ok(())
}

fn check() -> anyhow::Result<()> {
    let mut facts =
        host_facts().context("cannot reach nftables: run this as root on the node, or in the agent's pod")?;
    facts.agent = match send_command(&DebugCommand::Dump { all: false }) {
        Ok(text) => AgentState::of_dump(&text),
        Err(DebugSocketError::NotRunning) => AgentState::NotRunning,
        Err(error) => AgentState::Unknown(error.to_string()),
    };
    let findings = facts.findings();
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|finding| finding.level == Level::Error).count();
    anyhow::ensure!(errors == 0, "{errors} error(s)");
    Ok(())
}

/// Succeeds once the tables are deleted: the API server may stay unreachable.
fn clean_up_node(node: Option<String>, args: &ClientArgs) -> anyhow::Result<()> {
    let _none_runs = DebugSocket::open().context("a running agent would write the tables again")?;
    clean_up().context("cannot delete the tables")?;
    if let Err(error) = remove_node_annotations(node.as_deref(), args) {
        let node = node.unwrap_or_else(|| "NODE".to_owned());
        eprintln!(
            "steerage-agent: the tables are deleted, but the Node keeps its annotations ({error:#}). Remove them: \
             kubectl annotate node {node} {}- {}-",
            names::AGENT_MODE,
            names::AGENT_VERSION
        );
    }
    Ok(())
}

fn remove_node_annotations(node: Option<&str>, args: &ClientArgs) -> anyhow::Result<()> {
    let node = node.context("--node-name is missing")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = client("agent", env!("CARGO_PKG_VERSION"), args).await?;
        remove_annotations(client, node).await
    })
}

fn healthz_ports(given: Vec<HealthAddress>, kube_proxy_replacement: bool) -> Vec<HealthAddress> {
    let [kube_proxy, agent] = HEALTHZ_PORTS.map(HealthAddress::all);
    match (given.is_empty(), kube_proxy_replacement) {
        (false, _) => given,
        (true, true) => vec![kube_proxy, agent],
        (true, false) => vec![agent],
    }
}

/// Where kube-proxy's metrics are, without a flag.
fn metrics_address(given: Option<MetricsAddress>, kube_proxy_replacement: bool) -> Option<SocketAddr> {
    let default = kube_proxy_replacement.then_some(KUBE_PROXY_METRICS);
    given.map_or(default, |MetricsAddress(address)| address)
}

/// An address, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MetricsAddress(Option<SocketAddr>);

impl FromStr for MetricsAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" {
            return Ok(Self(None));
        }
        text.parse().map(|address| Self(Some(address))).map_err(|_| "neither IP:PORT nor none")
    }
}

fn watch_silence(text: &str) -> Result<Duration, String> {
    let limit = duration::parse(text)?;
    if limit.is_zero() || limit >= MIN_WATCH_SILENCE {
        return Ok(limit);
    }
    Err("a quiet watch may bring no data for nearly five minutes: use 0s, or at least 5m".to_owned())
}

fn elements(text: &str) -> Result<usize, String> {
    let count = text.parse().map_err(|error| format!("{error}"))?;
    if count < LEAST_ELEMENTS {
        return Err(format!("every Service needs some: at least {LEAST_ELEMENTS}"));
    }
    Ok(count)
}

/// A network, or an address.
fn network(text: &str) -> Result<IpNet, String> {
    let of_address = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse::<IpNet>().map(|net| net.trunc()).or_else(|_| of_address()).map_err(|error| error.to_string())
}

/// The name of a network interface, or the beginning of one.
fn interface(text: &str) -> Result<String, &'static str> {
    let fits = (1..16).contains(&text.len()) && !text.contains(|c: char| c == '/' || c.is_whitespace());
    if fits {
        Ok(text.to_owned())
    } else {
        Err("an interface's name has 1 to 15 characters, without spaces and slashes")
    }
}

impl Args {
    pub(crate) fn run(self) -> ExitCode {
        let failed = |error: anyhow::Error| {
            eprintln!("steerage-agent: {error:#}");
            ExitCode::from(EXIT_FAILED)
        };
        if let Some(command) = self.command {
            return command.run().map_or_else(failed, |()| ExitCode::SUCCESS);
        }
        // Before anything else is opened: a second agent would first find ports in use, which explains less.
        let debug_socket = match DebugSocket::open() {
            Ok(debug_socket) => debug_socket,
            Err(error) => return failed(error.into()),
        };
        let component = Component { name: "agent", version: env!("CARGO_PKG_VERSION"), admin: ADMIN };
        let process = self.process.clone();
        // Before there are threads, which inherit the filter.
        let confined = self.agent.seccomp.confine();
        run(component, &process, |process| {
            if let Err(error) = confined {
                let error = steerage_model::chain(&error);
                tracing::warn!(error, "seccomp filter not installed; continuing without it");
            }
            debug_socket.report();
            self.compose(process, debug_socket)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_of_the_chart_parses() {
        let line = "steerage-agent --log-level=info --log-format=text --admin-address=[::]:10358 --kube-proxy-replacement \
                    --api-server=10.77.0.2:6443 --node-name=a";
        let args = Args::parse_from(line.split_whitespace());
        assert_eq!((args.agent.kube_proxy_replacement, args.agent.node_name.as_deref()), (true, Some("a")));
        assert_eq!(args.agent.nodeport_addresses, None);
    }

    #[test]
    fn configuration_file_is_for_the_replacement_of_kube_proxy() {
        let parse = |line: &str| Args::try_parse_from(line.split_whitespace()).is_ok();
        assert!(parse("steerage-agent --kube-proxy-replacement --config /etc/kube-proxy.yaml"));
        assert!(!parse("steerage-agent --node-name a --config /etc/kube-proxy.yaml"));
        assert!(
            !parse("steerage-agent --kube-proxy-replacement"),
            "without a file a flag has to name the node"
        );
    }

    #[test]
    fn metrics_are_where_kube_proxys_are_if_it_is_replaced() {
        assert_eq!(metrics_address(None, true), Some(KUBE_PROXY_METRICS));
        assert_eq!(metrics_address(None, false), None);
        let given =
            |text: &str| text.parse::<MetricsAddress>().map(|given| metrics_address(Some(given), true));
        assert_eq!(given("0.0.0.0:10249"), Ok(Some("0.0.0.0:10249".parse().unwrap())));
        assert_eq!((given("none"), given("").is_err(), given("10249").is_err()), (Ok(None), true, true));
    }

    #[test]
    fn interface_names_that_cannot_exist_are_refused() {
        let parse = |name: &str| {
            Args::try_parse_from([
                "steerage-agent",
                "--node-name=a",
                &format!("--pod-bridge-interface={name}"),
            ])
        };
        assert_eq!(parse("cni0").unwrap().agent.pod_bridge_interface.as_deref(), Some("cni0"));
        for bad in ["", "a/b", "a b", "sixteen-letters-"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn node_health_is_served_on_the_ports_that_load_balancers_probe() {
        let all = HealthAddress::all;
        assert_eq!(healthz_ports(Vec::new(), false), [all(10356)], "kube-proxy serves the other one");
        assert_eq!(healthz_ports(Vec::new(), true), [all(10256), all(10356)]);
        let args = Args::parse_from(["steerage-agent", "--node-name=a", "--healthz-port=1,127.0.0.1:2"]);
        let local = HealthAddress { ip: Some(KUBE_PROXY_METRICS.ip()), port: 2 };
        assert_eq!(healthz_ports(args.agent.healthz_port, true), [all(1), local]);
    }

    #[test]
    fn edge_tunnel_needs_its_sources_and_vips() {
        let parse = |line: &str| {
            let all = ["steerage-agent", "--node-name=a"].into_iter().chain(line.split_whitespace());
            Args::try_parse_from(all).map(|args| args.agent)
        };
        let whole = "--edge-tunnel-vni=7 --edge-tunnel-sources=10.0.0.11,fd00::/64 --edge-tunnel-vips=10.0.200.1-10.0.200.2";
        let agent = parse(whole).unwrap();
        assert_eq!((agent.edge_tunnel_vni, agent.edge_tunnel_port), (Some(7), 10_361));
        let nets = ["10.0.0.11/32", "fd00::/64"].map(|net| net.parse().unwrap());
        assert_eq!(agent.edge_tunnel_sources, nets);
        for part in whole.split_whitespace() {
            assert!(parse(&whole.replace(part, "")).is_err(), "without {part}");
        }
        assert!(parse(&whole.replace("vni=7", "vni=0")).is_err());
        assert!(parse("").unwrap().edge_tunnel_vni.is_none());
    }

    #[test]
    fn watch_silence_limits_below_five_minutes_are_refused() {
        let limit = |text: &str| {
            let args = Args::try_parse_from(["steerage-agent", "--node-name=a", "--max-watch-silence", text]);
            args.ok().map(|args| args.agent.max_watch_silence)
        };
        let minutes = |count| Some(Duration::from_mins(count));
        assert_eq!([limit("0s"), limit("300s"), limit("5m")], [minutes(0), minutes(5), minutes(5)]);
        assert_eq!([limit("0"), limit("30s"), limit("120")], [None; 3]);
    }

    #[test]
    fn cleanup_needs_no_flags() {
        let args = Args::parse_from(["steerage-agent", "cleanup"]);
        assert!(matches!(args.command, Some(Command::Cleanup { node_name: None, .. })));
    }
}

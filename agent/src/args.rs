// SPDX-License-Identifier: Apache-2.0
//! Flags and subcommands. [`compose`] puts the agent together from them.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args as Flags, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use steerage_agent::check::Level;
use steerage_agent::debug_request::DebugCommand;
use steerage_agent::debug_socket::{DebugSocket, send_command};
use steerage_agent::explain::PacketQuery;
use steerage_agent::kernel::{clean_up, host_facts};
use steerage_agent::node_annotations::remove_annotations;
use steerage_agent::plan::{Frontend, LEAST_ELEMENTS};
use steerage_agent::sandbox::{FilterMode, SandboxError, confine};
use steerage_agent::settings::{AddressRange, NodePortAddresses};
use steerage_model::names;
use steerage_process::{Component, EXIT_FAILED, ProcessArgs, duration, run};
use steerage_watch::{ClientArgs, client};

mod compose;

/// Default address of the administration server.
pub(crate) const ADMIN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), 10358);
/// Ports of the node's health: kube-proxy's, which is free where none runs, and the agent's, which load balancers of Services
/// labelled for it use.
const HEALTHZ_PORTS: [u16; 2] = [10256, 10356];
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
    /// Serve this node
    #[arg(long, env = "NODE_NAME", required = true, value_name = "NAME")]
    node_name: Option<String>,
    /// Serve node ports and health-check ports at these addresses of the host: `primary`, or comma-separated networks
    #[arg(
        long,
        env = "STEERAGE_NODEPORT_ADDRESSES",
        default_value = "primary",
        value_name = "primary|CIDR,…"
    )]
    nodeport_addresses: NodePortAddresses,
    /// Recognise traffic from local pods this way
    #[arg(
        long,
        env = "STEERAGE_DETECT_LOCAL_MODE",
        value_enum,
        default_value = "node-cidr",
        value_name = "MODE"
    )]
    detect_local_mode: DetectLocalMode,
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
    /// IP is still not served in a `ServiceCIDR`, at an address in this node's status, at an API server's address and port, or where
    /// another Service has an assigned address
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
    /// Serve the node's /healthz and /livez on these ports [default: 10356, and 10256 with --kube-proxy-replacement]
    #[arg(long, env = "STEERAGE_HEALTHZ_PORT", value_name = "PORT,…", value_delimiter = ',')]
    healthz_port: Vec<u16>,
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
    /// Delete the agent's tables from this host's kernel, and its annotations from the Node
    Cleanup {
        #[command(flatten)]
        client: ClientArgs,
        /// Remove the annotations of this node; without it they stay
        #[arg(long, env = "NODE_NAME", value_name = "NAME", help_heading = "Agent")]
        node_name: Option<String>,
    },
    /// Say what on this host is not as Services need it: kernel, kernel settings, conntrack, other programs' tables. Changes nothing.
    /// Fails if Services cannot work
    Check,
    /// Print what happens to a packet on this node, and why
    Explain {
        /// Explain a packet to this destination
        #[arg(value_name = "IP:PORT/PROTO")]
        to: Frontend,
        /// Explain a packet from this source [default: outside the node]
        #[arg(long, value_name = "IP")]
        from: Option<IpAddr>,
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
            Self::Check => return check(),
            Self::Dump { all } => DebugCommand::Dump { all },
            Self::Explain { to, from } => {
                DebugCommand::Explain(PacketQuery::new(to, from).map_err(anyhow::Error::msg)?)
            }
        };
        print!("{}", send_command(&command)?);
        Ok(())
    }
}

fn check() -> anyhow::Result<()> {
    let findings = host_facts()
        .context("cannot reach nftables: run this as root on the node, or in the agent's pod")?
        .findings();
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

fn healthz_ports(given: Vec<u16>, kube_proxy_replacement: bool) -> Vec<u16> {
    let [kube_proxy, agent] = HEALTHZ_PORTS;
    match (given.is_empty(), kube_proxy_replacement) {
        (false, _) => given,
        (true, true) => vec![kube_proxy, agent],
        (true, false) => vec![agent],
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
        assert_eq!(args.agent.nodeport_addresses, NodePortAddresses::Primary);
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
        assert_eq!(healthz_ports(Vec::new(), false), [10356], "kube-proxy serves the other one");
        assert_eq!(healthz_ports(Vec::new(), true), [10256, 10356]);
        let args = Args::parse_from(["steerage-agent", "--node-name=a", "--healthz-port=1,2"]);
        assert_eq!(healthz_ports(args.agent.healthz_port, true), [1, 2]);
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

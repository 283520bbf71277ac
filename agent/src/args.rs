// SPDX-License-Identifier: Apache-2.0
//! The agent's flags.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use steerage_agent::announce::withdraw;
use steerage_agent::debug_socket::{DebugCommand, DebugSocket, ask};
use steerage_agent::explain::PacketQuery;
use steerage_agent::kernel::clean_up;
use steerage_agent::plan::Frontend;
use steerage_agent::sandbox::{FilterMode, SandboxError, confine};
use steerage_agent::settings::{AddressRange, NodePortAddresses};
use steerage_model::names;
use steerage_process::{Component, EXIT_FAILED, ProcessArgs, run};
use steerage_watch::{ClientArgs, client};

mod compose;

/// Where the administration server listens unless a flag says otherwise.
const ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), 10358);
/// The node's health: kube-proxy's port, where there is no kube-proxy, and ours, which is asked for Services labelled for us.
const NODE_HEALTH: [u16; 2] = [10256, 10356];

/// Which Services are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Services {
    /// Those labelled service.kubernetes.io/service-proxy-name: steerage; kube-proxy serves the others
    Labelled,
    /// All but those labelled for another service proxy; there is no kube-proxy
    All,
}

/// How this node's pods are told from everything else.
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

/// What becomes of system calls that the agent has no use for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SeccompMode {
    /// They fail
    Enforce,
    /// They are done, and stand in the kernel's audit log
    Log,
    /// They are done
    Off,
}

impl SeccompMode {
    /// Puts the filter on this process.
    fn confine(self) -> Result<(), SandboxError> {
        match self {
            Self::Enforce => confine(FilterMode::Enforce),
            Self::Log => confine(FilterMode::Log),
            Self::Off => Ok(()),
        }
    }
}

/// Serves Services on this node, and answers load balancers' health checks.
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
    /// Which Services are served; `all` needs --api-server
    #[arg(long, env = "STEERAGE_SERVICES", value_enum, default_value = "labelled")]
    services: Services,
    /// The name of this node
    #[arg(long, env = "NODE_NAME", required = true)]
    node_name: Option<String>,
    /// Where node ports and health-check ports are served: `primary`, or networks of the host's addresses, separated by commas
    #[arg(
        long,
        env = "STEERAGE_NODEPORT_ADDRESSES",
        default_value = "primary",
        value_name = "primary|CIDR,…"
    )]
    nodeport_addresses: NodePortAddresses,
    /// How this node's pods are told from everything else
    #[arg(long, env = "STEERAGE_DETECT_LOCAL", value_enum, default_value = "node-cidr")]
    detect_local: DetectLocalMode,
    /// The pods' networks, for --detect-local cluster-cidr
    #[arg(long, env = "STEERAGE_CLUSTER_CIDR", value_delimiter = ',', value_name = "CIDR,…")]
    cluster_cidr: Vec<IpNet>,
    /// The bridge that all pods are behind, for --detect-local bridge-interface
    #[arg(long, env = "STEERAGE_POD_BRIDGE_INTERFACE", value_name = "NAME", value_parser = interface)]
    pod_bridge_interface: Option<String>,
    /// What the names of all pods' interfaces, and no others, begin with, for --detect-local interface-name-prefix
    #[arg(long, env = "STEERAGE_POD_INTERFACE_NAME_PREFIX", value_name = "PREFIX", value_parser = interface)]
    pod_interface_name_prefix: Option<String>,
    /// Addresses that only Services may be reached at, such as a load balancer's pools: a network, an address, or first-last; what is
    /// sent there and matches no Service is dropped. Not for addresses at which a load balancer terminates connections (ipMode
    /// Proxy). May be given several times
    #[arg(long, env = "STEERAGE_DROP_UNSERVED", value_name = "CIDR", value_delimiter = ',')]
    drop_unserved: Vec<AddressRange>,
    /// HealthCheckPorts of the node's /healthz and /livez; 10356, and where all Services are served 10256 too
    #[arg(long, env = "STEERAGE_HEALTHZ_PORT", value_name = "PORT,…", value_delimiter = ',')]
    healthz_port: Vec<u16>,
    /// Seconds without a word from the API server after which health checks fail; 0: never. Off by default: while the API
    /// server is away the rules go on serving, and a whole cluster that fails its health checks at once serves nobody. Answers
    /// come about once a minute on a quiet watch
    #[arg(long, env = "STEERAGE_MAX_API_SILENCE", value_name = "SECONDS", default_value_t = 0, value_parser = silence)]
    max_api_silence: u64,
    /// What becomes of system calls that the agent has no use for: starting programs, and whatever else a service proxy does not
    /// do. A kubeconfig that starts a credential plugin needs `off`
    #[arg(long, env = "STEERAGE_SECCOMP", value_enum, default_value = "enforce")]
    seccomp: SeccompMode,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Takes the agent's tables out of this host's kernel, and its annotation off the Node
    Cleanup {
        #[command(flatten)]
        client: ClientArgs,
        /// The name of this node; without, its annotation stays
        #[arg(long, env = "NODE_NAME")]
        node_name: Option<String>,
    },
    /// Asks the agent that runs on this node what becomes of a packet, and why
    Explain {
        /// Where the packet is sent to
        #[arg(value_name = "IP:PORT/PROTO")]
        to: Frontend,
        /// Who sends it; without, somebody outside the node
        #[arg(long, value_name = "IP")]
        from: Option<IpAddr>,
    },
    /// Prints what the agent that runs on this node means the kernel to hold, and where the kernel differs
    Dump {
        /// Print the elements that do not differ, too
        #[arg(long)]
        all: bool,
    },
}

impl Command {
    fn run(self) -> anyhow::Result<()> {
        let request = match self {
            Self::Cleanup { client, node_name } => {
                let _none_runs = DebugSocket::open().context("an agent would write the tables again")?;
                clean_up().context("cannot delete the tables")?;
                if let Err(error) = withdraw_from(node_name.as_deref(), &client) {
                    // The tables were what mattered; the API may be out of reach for good.
                    let node = node_name.unwrap_or_else(|| "NODE".to_owned());
                    eprintln!(
                        "steerage-agent: the tables are deleted, but the Node's annotation {0} stays ({error:#}): \
                         kubectl annotate node {node} {0}-",
                        names::NODE_AGENT
                    );
                }
                return Ok(());
            }
            Self::Dump { all } => DebugCommand::Dump { all },
            Self::Explain { to, from } => {
                DebugCommand::Explain(PacketQuery::new(to, from).map_err(anyhow::Error::msg)?)
            }
        };
        print!("{}", ask(&request)?);
        Ok(())
    }
}

/// Takes the annotation off the Node.
fn withdraw_from(node: Option<&str>, args: &ClientArgs) -> anyhow::Result<()> {
    let node = node.context("--node-name is missing")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = client("agent", env!("CARGO_PKG_VERSION"), args).await?;
        withdraw(client, node).await
    })
}

/// The ports of the node's health.
fn node_health(asked_for: Vec<u16>, all_services: bool) -> Vec<u16> {
    let [kube_proxy, ours] = NODE_HEALTH;
    match (asked_for.is_empty(), all_services) {
        (false, _) => asked_for,
        (true, true) => vec![kube_proxy, ours],
        (true, false) => vec![ours],
    }
}

/// A limit that a quiet watch does not reach.
fn silence(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(seconds) if seconds == 0 || seconds >= 120 => Ok(seconds),
        Ok(_) => Err("a quiet watch is silent for a minute or more: 0, or at least 120".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The name of a network interface, or the beginning of one.
fn interface(text: &str) -> Result<String, &'static str> {
    let fits = (1..16).contains(&text.len()) && !text.contains(|c: char| c == '/' || c.is_whitespace());
    if fits {
        Ok(text.to_owned())
    } else {
        Err("an interface's name has 1 to 15 characters, without blanks and slashes")
    }
}

impl Args {
    /// Runs the agent to its end.
    pub(crate) fn run(self) -> ExitCode {
        let failed = |error: anyhow::Error| {
            eprintln!("steerage-agent: {error:#}");
            ExitCode::from(EXIT_FAILED)
        };
        if let Some(command) = self.command {
            return command.run().map_or_else(failed, |()| ExitCode::SUCCESS);
        }
        // Before anything is opened: the other agent's ports would be found busy, which says less.
        let debug_socket = match DebugSocket::open() {
            Ok(debug_socket) => debug_socket,
            Err(error) => return failed(error.into()),
        };
        let component = Component { name: "agent", version: env!("CARGO_PKG_VERSION"), admin: ADMIN };
        let process = self.process.clone();
        // Before there are threads, which inherit it.
        let confined = self.seccomp.confine();
        run(component, &process, |process| {
            if let Err(error) = confined {
                tracing::warn!(
                    error = format!("{:#}", anyhow::Error::from(error)),
                    "system calls are not filtered"
                );
            }
            self.compose(process, debug_socket)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_charts_command_line_is_understood() {
        let line = "steerage-agent --log-level=info --log-format=text --admin-address=[::]:10358 --services=all \
                    --api-server=10.77.0.2:6443 --node-name=a";
        let args = Args::parse_from(line.split_whitespace());
        assert_eq!((args.services, args.node_name.as_deref()), (Services::All, Some("a")));
        assert_eq!(args.nodeport_addresses, NodePortAddresses::Primary);
    }

    #[test]
    fn pods_are_told_by_interfaces_that_can_exist() {
        let parse = |name: &str| {
            Args::try_parse_from([
                "steerage-agent",
                "--node-name=a",
                &format!("--pod-bridge-interface={name}"),
            ])
        };
        assert_eq!(parse("cni0").unwrap().pod_bridge_interface.as_deref(), Some("cni0"));
        for bad in ["", "a/b", "a b", "sixteen-letters-"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_nodes_health_is_where_the_controller_asks_for_it() {
        assert_eq!(node_health(Vec::new(), false), [10356], "kube-proxy has the other one");
        assert_eq!(node_health(Vec::new(), true), [10256, 10356]);
        let args = Args::parse_from(["steerage-agent", "--node-name=a", "--healthz-port=1,2"]);
        assert_eq!(node_health(args.healthz_port, true), [1, 2]);
    }

    #[test]
    fn a_limit_on_silence_is_longer_than_a_quiet_watch_is_silent() {
        let limit = |text: &str| {
            let args = Args::try_parse_from(["steerage-agent", "--node-name=a", "--max-api-silence", text]);
            args.ok().map(|args| args.max_api_silence)
        };
        assert_eq!([limit("0"), limit("30"), limit("120")], [Some(0), None, Some(120)]);
    }

    #[test]
    fn cleaning_up_needs_nothing() {
        let args = Args::parse_from(["steerage-agent", "cleanup"]);
        assert!(matches!(args.command, Some(Command::Cleanup { node_name: None, .. })));
    }
}

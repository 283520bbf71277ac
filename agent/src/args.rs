// SPDX-License-Identifier: Apache-2.0
//! The agent's flags, and how its parts are put together from them.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand, ValueEnum};
use futures::{Stream, StreamExt};
use ipnet::IpNet;
use steerage_agent::agent::{Agent, Input};
use steerage_agent::announce::{announce, announcement, withdraw};
use steerage_agent::desk::{Desk, Request, ask};
use steerage_agent::explain::Question;
use steerage_agent::health::{Listeners, Plane, Ports, allow_many_connections, serve_node_health};
use steerage_agent::kernel::{AddressWatch, Cleaner, Dataplane, clean_up};
use steerage_agent::metrics::Metrics;
use steerage_agent::place::{AddressRange, DetectLocal, NodePortAddresses, Settings};
use steerage_agent::plan::Frontend;
use steerage_model::names;
use steerage_process::{Component, EXIT_FAILED, Process, ProcessArgs, run};
use steerage_watch::events::Recorder;
use steerage_watch::{ClientArgs, Watches, client};
use tokio::sync::{mpsc, watch};

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
enum Detect {
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
    detect_local: Detect,
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
    /// Ports of the node's /healthz and /livez; 10356, and where all Services are served 10256 too
    #[arg(long, env = "STEERAGE_HEALTHZ_PORT", value_name = "PORT,…", value_delimiter = ',')]
    healthz_port: Vec<u16>,
    /// Seconds without a word from the API server after which health checks fail; 0: never. Off by default: while the API
    /// server is away the rules go on serving, and a whole cluster that fails its health checks at once serves nobody. Answers
    /// come about once a minute on a quiet watch
    #[arg(long, env = "STEERAGE_MAX_API_SILENCE", value_name = "SECONDS", default_value_t = 0, value_parser = silence)]
    max_api_silence: u64,
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
                let _none_runs = Desk::open().context("an agent would write the tables again")?;
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
            Self::Dump { all } => Request::Dump { all },
            Self::Explain { to, from } => {
                Request::Explain(Question::new(to, from).map_err(anyhow::Error::msg)?)
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
        let desk = match Desk::open() {
            Ok(desk) => desk,
            Err(error) => return failed(error.into()),
        };
        let component = Component { name: "agent", version: env!("CARGO_PKG_VERSION"), admin: ADMIN };
        let process = self.process.clone();
        run(component, &process, |process| self.compose(process, desk))
    }

    async fn compose(self, process: Process, desk: Desk) -> anyhow::Result<()> {
        let Self {
            command: _,
            process: _,
            client: client_args,
            services,
            node_name,
            nodeport_addresses,
            detect_local,
            cluster_cidr,
            pod_bridge_interface,
            pod_interface_name_prefix,
            drop_unserved,
            healthz_port,
            max_api_silence,
        } = self;
        allow_many_connections();
        let node = node_name.context("--node-name is missing")?;
        let all_services = services == Services::All;
        if all_services && client_args.api_server.is_none() && client_args.kubeconfig.is_none() {
            bail!("--services all needs --api-server: nobody else would serve the address of the API server");
        }
        let detect_local = match detect_local {
            Detect::NodeCidr => DetectLocal::NodeCidrs,
            Detect::ClusterCidr if cluster_cidr.is_empty() => bail!("--cluster-cidr is missing"),
            Detect::ClusterCidr => DetectLocal::ClusterCidrs(cluster_cidr),
            Detect::BridgeInterface => {
                DetectLocal::Bridge(pod_bridge_interface.context("--pod-bridge-interface is missing")?)
            }
            Detect::InterfaceNamePrefix => DetectLocal::InterfacePrefix(
                pod_interface_name_prefix.context("--pod-interface-name-prefix is missing")?,
            ),
            Detect::None => DetectLocal::Nothing,
        };
        let settings = Settings {
            node: node.clone(),
            all_services,
            node_port_addresses: nodeport_addresses,
            detect_local,
        };
        let Component { name, version, .. } = process.component();
        let first = process.readiness().task("rules");
        let client = client(name, version, &client_args).await?;
        let metrics = process.metrics().register(name, Metrics::new);
        process.metrics().register_as("kubeproxy", |registry| metrics.kube_proxy.register(registry));
        let (recorder, writer) =
            process.metrics().register(name, |registry| Recorder::new(client.clone(), name, &node, registry));
        tokio::spawn(writer);

        let flows = metrics.flows.clone();
        let count = move |deleted| {
            flows.inc_by(u64::try_from(deleted).unwrap_or(u64::MAX));
        };
        let cleaner = Cleaner::start(count).context("cannot reach conntrack")?;
        let mut dataplane = Dataplane::open().context("cannot reach nftables")?;
        dataplane.drop_unserved(drop_unserved.into_iter().flat_map(|range| range.0).collect());
        let (inputs, queue) = mpsc::unbounded_channel();
        tokio::spawn(desk.serve(inputs.clone()));
        let others = inputs.clone();
        dataplane.tell(
            move |foreign| {
                if foreign { others.send(Input::Foreign).is_ok() } else { !others.is_closed() }
            },
        );
        if matches!(settings.node_port_addresses, NodePortAddresses::In(_)) {
            watch_addresses(inputs.clone())?;
        }

        let watches = process.metrics().register(name, |registry| Watches::new(client.clone(), registry));
        follow(watches.services(), inputs.clone(), Input::Service);
        follow(watches.slices(), inputs.clone(), Input::Slice);
        follow(watches.node(&node), inputs, Input::Node);

        let (ask, asked) = watch::channel(false);
        let value = announcement(all_services, version);
        tokio::spawn(announce(client, node, value.clone(), asked));
        let (ports, plane) = (Ports::default(), Plane::default());
        if max_api_silence > 0 {
            let staleness = watches.staleness().clone();
            let longest = move || staleness.longest().map(|(_, silent)| silent);
            plane.distrust_after(Duration::from_secs(max_api_silence), longest);
        }
        tokio::spawn(serve_node_health(node_health(healthz_port, all_services), plane.clone()));

        let listeners = Listeners::new(ports.clone(), plane.clone());
        let agent = Agent {
            settings,
            dataplane,
            cleaner,
            ports,
            plane,
            listeners,
            recorder,
            announcement: (ask, value),
            metrics,
            first: Some(first),
        };
        agent.run(queue, process.shutdown().clone()).await
    }
}

/// Hands a watch's events to the loop.
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

/// Tells the loop when addresses of this host come and go.
fn watch_addresses(inputs: mpsc::UnboundedSender<Input>) -> anyhow::Result<()> {
    let watch = AddressWatch::open().context("cannot watch the host's addresses")?;
    tokio::spawn(async move {
        loop {
            if let Err(error) = watch.changed().await {
                tracing::error!(%error, "changes of the host's addresses are not noticed any more");
                return;
            }
            if inputs.send(Input::Addresses).is_err() {
                return;
            }
        }
    });
    Ok(())
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

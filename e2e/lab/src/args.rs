// SPDX-License-Identifier: Apache-2.0
//! The verbs of `hack/lab` and their flags. Each calls the library.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::{Args as Flags, Parser, Subcommand};
use nix::sys::signal::Signal;
use steerage_lab::addresses::{Cloud, Plan, Role, ServiceProxy};
use steerage_lab::{
    Lab, control_plane, down, edge, images, install, netns, node, node_init, off_link, report, topology, up,
};

/// Run real Kubernetes clusters in network namespaces of this machine.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Flags)]
struct Name {
    /// Use the lab of this name.
    #[arg(long, env = "STEERAGE_LAB_NAME", default_value = "lab")]
    name: String,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a lab and wait until its nodes are ready.
    Up {
        #[command(flatten)]
        name: Name,
        /// Make this many nodes.
        #[arg(long, default_value_t = 3)]
        workers: u8,
        /// Make this many edge hosts [default: 1, with a cloud 0].
        #[arg(long)]
        edges: Option<u8>,
        /// Choose the service proxy of the nodes; with `agent`, none runs before `install`.
        #[arg(long, value_enum, default_value = "kube-proxy")]
        service_proxy: ServiceProxy,
        /// Simulate this cloud, whose load balancers take the place of the edge.
        #[arg(long, value_enum)]
        cloud: Option<Cloud>,
        /// Mark a node `NotReady` after this long without a heartbeat.
        #[arg(long, value_name = "DURATION", default_value = "50s")]
        node_monitor_grace_period: String,
    },
    /// Build the images, install the chart, start the edges, and wait until all are ready.
    Install {
        #[command(flatten)]
        name: Name,
        /// Set a chart value, as `helm --set` does; repeatable.
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
        /// Use the existing images.
        #[arg(long)]
        no_build: bool,
        /// Take the chart and hack/images from this checkout.
        #[arg(long, env = "STEERAGE_ROOT", default_value = ".")]
        root: PathBuf,
    },
    /// Print shell lines with the lab's addresses and names: eval "$(hack/lab env)".
    Env {
        #[command(flatten)]
        name: Name,
    },
    /// Run a command on a host: a node, an edge host, a client, cp.
    Exec {
        #[command(flatten)]
        name: Name,
        /// Name of a node, an edge host, a client, or cp.
        host: String,
        /// The command and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run kubectl as administrator.
    #[command(disable_help_flag = true)]
    Kubectl {
        #[command(flatten)]
        name: Name,
        /// kubectl's arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Load a container image into every running node.
    LoadImage {
        #[command(flatten)]
        name: Name,
        /// The archive (docker-archive or OCI layout).
        archive: PathBuf,
    },
    /// Kill a node, as a power failure does.
    KillNode {
        #[command(flatten)]
        name: Name,
        /// Name of the node, such as node1.
        node: String,
    },
    /// Start a killed node and wait until it is ready.
    StartNode {
        #[command(flatten)]
        name: Name,
        /// Name of the node, such as node1.
        node: String,
    },
    /// Disconnect a host from its network.
    Partition {
        #[command(flatten)]
        name: Name,
        /// Name of a node, an edge host, a client, or cp.
        node: String,
    },
    /// Reconnect a partitioned host.
    Heal {
        #[command(flatten)]
        name: Name,
        /// Name of a node, an edge host, a client, or cp.
        node: String,
    },
    /// Move a node off the link of the edge hosts, behind two gateways whose routes the edge hosts learn by BGP.
    OffLink {
        #[command(flatten)]
        name: Name,
        /// Name of the node, such as node1.
        node: String,
    },
    /// Move a node back to the link of the edge hosts.
    OnLink {
        #[command(flatten)]
        name: Name,
        /// Name of the node, such as node1.
        node: String,
    },
    /// Send a signal to the edge process of an edge host.
    KillEdge {
        #[command(flatten)]
        name: Name,
        /// Name of the edge host, such as edge1.
        edge: String,
        /// Send this signal.
        #[arg(long, default_value = "SIGKILL")]
        signal: Signal,
    },
    /// Start the edge process of an edge host and wait until it is ready.
    StartEdge {
        #[command(flatten)]
        name: Name,
        /// Name of the edge host, such as edge1.
        edge: String,
        /// Flags of steerage-edge.
        #[arg(last = true)]
        flags: Vec<String>,
    },
    /// Stop the edge process of an edge host (SIGTERM) and start it again.
    RestartEdge {
        #[command(flatten)]
        name: Name,
        /// Name of the edge host, such as edge1.
        edge: String,
        /// Flags of steerage-edge.
        #[arg(last = true)]
        flags: Vec<String>,
    },
    /// Kill the API server (SIGKILL).
    StopApiserver {
        #[command(flatten)]
        name: Name,
    },
    /// Start the API server and wait until it is ready.
    StartApiserver {
        #[command(flatten)]
        name: Name,
    },
    /// Show which processes and namespaces run.
    Status {
        #[command(flatten)]
        name: Name,
    },
    /// Print a component's log: kube-apiserver, node1-kubelet, edge1, …
    Logs {
        #[command(flatten)]
        name: Name,
        /// Name of the log, such as node1-kubelet.
        component: String,
    },
    /// Delete a lab.
    Down {
        #[command(flatten)]
        name: Name,
    },
    /// A node's first process.
    #[command(hide = true)]
    NodeInit {
        #[command(flatten)]
        name: Name,
        /// Name of the node, such as node1.
        node: String,
    },
}

impl Args {
    /// Runs the verb.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let open = |name: &Name| Lab::open(&name.name);
        match self.verb {
            Verb::Up {
                name: Name { name },
                workers,
                edges,
                service_proxy,
                cloud,
                node_monitor_grace_period,
            } => {
                let edges = edges.unwrap_or(u8::from(cloud.is_none()));
                up::up(Plan { name, workers, edges, service_proxy, cloud, node_monitor_grace_period })?;
            }
            Verb::Install { name, set, no_build, root } => {
                let root = root.canonicalize().with_context(|| format!("reading {}", root.display()))?;
                install::install(&open(&name)?, &install::Options { root, set, build: !no_build })?;
            }
            Verb::Env { name } => print!("{}", report::env(&open(&name)?)),
            Verb::Exec { name, host, command } => return exec(&open(&name)?, &host, &command),
            Verb::Kubectl { name, arguments } => {
                return become_command(open(&name)?.kubectl().args(arguments));
            }
            Verb::LoadImage { name, archive } => {
                let lab = open(&name)?;
                let archive =
                    archive.canonicalize().with_context(|| format!("reading {}", archive.display()))?;
                images::load(&lab, &node::all_running(&lab), &[archive])?;
            }
            Verb::KillNode { name, node } => {
                let lab = open(&name)?;
                node::kill(&lab, &lab.plan.find_node(&node)?.0)?;
            }
            Verb::StartNode { name, node } => {
                let lab = open(&name)?;
                node::revive(&lab, &lab.plan.find_node(&node)?.0)?;
            }
            Verb::Partition { name, node } => {
                let lab = open(&name)?;
                topology::cut(&lab.plan, &lab.plan.find(&node)?)?;
            }
            Verb::Heal { name, node } => {
                let lab = open(&name)?;
                topology::join(&lab.plan, &lab.plan.find(&node)?)?;
            }
            Verb::OffLink { name, node } => {
                let lab = open(&name)?;
                off_link::take_off(&lab, &lab.plan.find_node(&node)?.0)?;
            }
            Verb::OnLink { name, node } => {
                let lab = open(&name)?;
                off_link::put_back(&lab, &lab.plan.find_node(&node)?.0)?;
            }
            Verb::KillEdge { name, edge, signal } => {
                let lab = open(&name)?;
                edge::signal(&lab, &edge::find(&lab, &edge)?, signal)?;
            }
            Verb::StartEdge { name, edge, flags } => {
                let lab = open(&name)?;
                edge::start(&lab, &edge::find(&lab, &edge)?, &flags)?;
            }
            Verb::RestartEdge { name, edge, flags } => {
                let lab = open(&name)?;
                edge::restart(&lab, &edge::find(&lab, &edge)?, &flags)?;
            }
            Verb::StopApiserver { name } => control_plane::stop_api_server(&open(&name)?)?,
            Verb::StartApiserver { name } => control_plane::start_api_server(&open(&name)?)?,
            Verb::Status { name } => print!("{}", report::status(&open(&name)?)),
            Verb::Logs { name, component } => print!("{}", report::log(&open(&name)?, &component)?),
            Verb::Down { name } => down::down(&name.name)?,
            Verb::NodeInit { name, node } => {
                let lab = open(&name)?;
                node_init::run(&lab, &lab.plan.find(&node)?)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs a command on a host with the caller's terminal, and returns its exit status.
fn exec(lab: &Lab, host: &str, command: &[String]) -> anyhow::Result<ExitCode> {
    let host = lab.plan.find(host)?;
    let [program, arguments @ ..] = command else {
        anyhow::bail!("command missing: use exec HOST -- COMMAND")
    };
    if let Role::Node(_) = host.role {
        return become_command(node::command(lab, &host, program.as_ref())?.args(arguments));
    }
    let mut inside = Command::new("nsenter");
    inside
        .arg(format!("--net={}", netns::path(&host.netns).display()))
        .arg("--")
        .arg(program)
        .args(arguments);
    become_command(&mut inside)
}

fn become_command(command: &mut Command) -> anyhow::Result<ExitCode> {
    Err(command.exec()).with_context(|| format!("running {}", command.get_program().to_string_lossy()))
}

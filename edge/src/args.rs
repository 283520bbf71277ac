// SPDX-License-Identifier: Apache-2.0
//! The flags, and the composition root: everything is wired together here, and nothing is decided.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as Flags, Parser, Subcommand};
use steerage_edge_api::{EdgeLoadBalancer, EdgeNodeSet};
use steerage_process::{Component, Process, ProcessArgs};
use steerage_watch::ClientArgs;
use tokio::sync::{mpsc, watch};

use crate::engine::{Engine, Inputs, Outputs, ReadinessGates};
use crate::forward::{self, Device, NftWriter};
use crate::index::Event;
use crate::link::announce::Announcer;
use crate::link::conflicts::{AddressConflicts, ConflictDetection};
use crate::link::election::HeartbeatTiming;
use crate::link::heartbeat;
use crate::link::membership::{HeartbeatLoop, Identity};
use crate::link::route::{Link, Rtnetlink};
use crate::metrics::Metrics;
use crate::prober::Prober;
use crate::source;
use crate::status::{HostStatus, StatusSink, StatusWriter};

/// Events that may wait for the engine before the watches do.
const EVENTS: usize = 1024;

/// Steerage's edge: forwards packets for load balancers to the nodes that can serve them
#[derive(Parser, Debug)]
#[command(version, name = "steerage-edge")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    edge: EdgeArgs,
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    process: ProcessArgs,
}

#[derive(Subcommand, Clone, Copy, Debug)]
enum Command {
    /// Takes the forwarding table and all virtual addresses off this host, and ends
    Cleanup,
}

#[derive(Flags, Clone, Debug)]
#[command(next_help_heading = "Edge")]
struct EdgeArgs {
    /// Interface on the link that clients' routers and nodes share; the one of the default route unless given
    #[arg(long, env = "STEERAGE_INTERFACE", value_name = "NAME")]
    interface: Option<String>,
    /// Name of this host among the edge hosts; its host name unless given
    #[arg(long, env = "STEERAGE_HOST_NAME", value_name = "NAME", value_parser = host_name)]
    host_name: Option<String>,
    /// Namespace of the edge's objects
    #[arg(long, env = "STEERAGE_NAMESPACE", value_name = "NAME", default_value = "steerage-system")]
    namespace: String,
    /// Edge hosts on one link that serve different clusters need different groups
    #[arg(long, env = "STEERAGE_EDGE_GROUP", value_name = "NAME", default_value = "default")]
    group: String,
    /// Milliseconds from one heartbeat between edge hosts to the next
    #[arg(long, env = "STEERAGE_HEARTBEAT_INTERVAL", value_name = "MILLISECONDS", default_value_t = 200,
          value_parser = clap::value_parser!(u16).range(20..=10_000))]
    heartbeat_interval: u16,
    /// Missing heartbeats after which the active host counts as gone
    #[arg(long, env = "STEERAGE_HEARTBEAT_MISSES", value_name = "NUMBER", default_value_t = 3,
          value_parser = clap::value_parser!(u8).range(2..=100))]
    heartbeat_misses: u8,
    /// Without a cluster: take EdgeLoadBalancer and EdgeNodeSet objects from the JSON files of this folder
    #[arg(long, env = "STEERAGE_OBJECTS", value_name = "FOLDER", requires = "reports")]
    objects: Option<PathBuf>,
    /// Without a cluster: write what is reported to this folder
    #[arg(long, env = "STEERAGE_REPORTS", value_name = "FOLDER", requires = "objects")]
    reports: Option<PathBuf>,
}

/// A name that can be part of an object's name.
fn host_name(text: &str) -> Result<String, String> {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
            && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    let fits = text.len() <= 63 && text.split('.').all(part);
    let rule = "must be at most 63 lower-case letters, digits, `-` and `.`, each part with a letter or digit at both ends";
    if fits { Ok(text.to_owned()) } else { Err(format!("`{text}` {rule}")) }
}

impl Args {
    /// Runs until the process may exit.
    pub(crate) fn run(self) -> ExitCode {
        let Self { command, edge, client, process } = self;
        match command {
            Some(Command::Cleanup) => match cleanup() {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("steerage-edge cleanup: {error:#}");
                    ExitCode::from(steerage_process::EXIT_FAILED)
                }
            },
            None => {
                let component = Component {
                    name: "edge",
                    version: env!("CARGO_PKG_VERSION"),
                    admin: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 10359)),
                };
                steerage_process::run(component, &process, |process| start(edge, client, process))
            }
        }
    }
}

fn cleanup() -> anyhow::Result<()> {
    forward::remove().context("cannot remove the table netdev steerage-edge")?;
    let mut netlink = Rtnetlink::open()?;
    for (index, vip) in netlink.vips()? {
        netlink.remove_vip(index, vip)?;
    }
    Ok(())
}

async fn start(edge: EdgeArgs, client: ClientArgs, process: Process) -> anyhow::Result<()> {
    let EdgeArgs {
        interface,
        host_name: host,
        namespace,
        group,
        heartbeat_interval,
        heartbeat_misses,
        objects,
        reports,
    } = edge;
    let host = match host {
        Some(host) => host,
        None => own_name()?,
    };
    let metrics = Metrics::default();
    process.metrics().register("edge", |registry| metrics.register(registry));
    let gates = ReadinessGates {
        settled: Some(process.readiness().task("peers")),
        listed: Some(process.readiness().task("watches")),
        programmed: Some(process.readiness().task("kernel")),
    };
    let mut netlink = Rtnetlink::open()?;
    let link = choose(&mut netlink, interface)?;
    let device = Device { name: link.name.clone(), index: link.index };
    let kernel = NftWriter::open(device).context("cannot look at nftables (it needs CAP_NET_ADMIN)")?;

    let (addresses, addresses_told) = watch::channel(Vec::new());
    let (leave, leave_told) = watch::channel(false);
    let identity = Identity {
        index: link.index,
        mac: link.mac,
        host: host.clone(),
        group: heartbeat::group(&group),
        timing: HeartbeatTiming {
            interval: Duration::from_millis(heartbeat_interval.into()),
            misses: heartbeat_misses.into(),
        },
    };
    let raw = "cannot open a packet socket (it needs CAP_NET_RAW)";
    let (peers, membership) = HeartbeatLoop::open(identity, addresses_told, leave_told).context(raw)?;
    process.spawn("peers", peers.run());

    let (wanted, wanted_told) = watch::channel(std::collections::BTreeSet::new());
    let (peers, peers_told) = watch::channel(Vec::new());
    let (conflicts, conflicts_rx) = watch::channel(AddressConflicts::default());
    let (contested, contested_rx) = mpsc::unbounded_channel();
    let claimant = ConflictDetection {
        index: link.index,
        mac: link.mac,
        wanted: wanted_told,
        peers: peers_told,
        told: conflicts,
        contested,
    };
    process.spawn("conflicts", claimant.run());

    let (held, held_told) = watch::channel(std::collections::BTreeSet::new());
    let (announce, announce_told) = mpsc::unbounded_channel();
    let announcer = Announcer::open(link.index, link.mac, held_told, announce_told).context(raw)?;
    process.spawn("announcements", announcer.run());

    let (events, events_told) = mpsc::channel(EVENTS);
    let sink = if let Some((objects, reports)) = objects.zip(reports) {
        process.spawn("objects", source::folder(objects, events, process.shutdown().clone()));
        StatusSink::Folder(reports)
    } else {
        let client = steerage_watch::client("edge", env!("CARGO_PKG_VERSION"), &client).await?;
        watch_api(&process, &client, &namespace, &events);
        StatusSink::Api(Box::new(client), namespace)
    };
    let (reports, reports_told) = watch::channel(HostStatus::default());
    process.spawn("reports", StatusWriter::new(sink, host, metrics.clone()).run(reports_told));

    let (health, health_told) = mpsc::unbounded_channel();
    let prober = Prober::new(health, metrics.clone());
    let outputs = Outputs { addresses, peers, wanted, held, announce, reports, leave };
    let inputs = Inputs {
        events: events_told,
        health: health_told,
        membership,
        conflicts: conflicts_rx,
        contested: contested_rx,
        shutdown: process.shutdown().clone(),
    };
    let engine = Engine::new(link, netlink, kernel, prober, metrics, outputs, gates)?;
    process.spawn("engine", engine.run(inputs));
    process.shutdown().cancelled().await;
    Ok(())
}

fn watch_api(process: &Process, client: &kube::Client, namespace: &str, events: &mpsc::Sender<Event>) {
    let part = || (client.clone(), namespace.to_owned(), events.clone(), process.shutdown().clone());
    let (client, space, sender, stop) = part();
    process.spawn("watch of load balancers", source::watch::<EdgeLoadBalancer>(client, space, sender, stop));
    let (client, space, sender, stop) = part();
    process.spawn("watch of node sets", source::watch::<EdgeNodeSet>(client, space, sender, stop));
}

fn choose(netlink: &mut Rtnetlink, interface: Option<String>) -> anyhow::Result<Link> {
    let name = match interface {
        Some(name) => name,
        None => netlink.default_interface()?.context("there is no default route: give --interface")?,
    };
    let link =
        netlink.link(&name)?.with_context(|| format!("there is no interface {name}: see --interface"))?;
    if link.mac == [0; 6] {
        anyhow::bail!("{name} has no Ethernet address: the edge needs an Ethernet link, see --interface");
    }
    if !link.up {
        tracing::warn!(interface = name, "the interface is down");
    }
    Ok(link)
}

fn own_name() -> anyhow::Result<String> {
    let name = nix::unistd::gethostname().context("cannot read the host name")?;
    let name = name.to_string_lossy().to_lowercase();
    host_name(&name).map_err(anyhow::Error::msg).context("the host name cannot be used: give --host-name")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn flags_are_well_formed_and_optional() {
        Args::command().debug_assert();
        let args = Args::try_parse_from(["steerage-edge"]).expect("no flag is needed");
        assert_eq!((args.edge.namespace.as_str(), args.edge.heartbeat_interval), ("steerage-system", 200));
    }

    #[test]
    fn host_names_must_fit_into_object_names() {
        for name in ["edge-1", "a.example", "7"] {
            assert!(host_name(name).is_ok(), "{name}");
        }
        for name in ["", "Edge", "a_b", "-a", "a-", "a..b", &"a".repeat(64)] {
            assert!(host_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn objects_dir_and_status_dir_require_each_other() {
        assert!(Args::try_parse_from(["steerage-edge", "--objects", "/x"]).is_err());
        assert!(Args::try_parse_from(["steerage-edge", "--objects", "/x", "--reports", "/y"]).is_ok());
        assert!(Args::try_parse_from(["steerage-edge", "--heartbeat-misses", "1"]).is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The composition root: connects the parts of the edge as the flags say, and decides nothing else.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::statfs::{BPF_FS_MAGIC, Statfs, statfs};
use steerage_edge_dataplane::{Dataplane, Options, Sizes};
use steerage_process::Process;
use steerage_watch::{ClientArgs, Timing, Watches};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::api_contact::{self, ContactTiming};
use crate::args::{EdgeArgs, RouteArgs, TunnelArgs, host_name};
use crate::cluster::{self, Cluster};
use crate::engine::{Engine, Inputs, Outputs, ReadinessGates};
use crate::index::IndexEvent;
use crate::kernel::Kernel;
use crate::leftovers;
use crate::link::ability::AbilityReport;
use crate::link::announce::Announcer;
use crate::link::conflicts::{AddressConflicts, ConflictDetection};
use crate::link::election::HeartbeatTiming;
use crate::link::heartbeat;
use crate::link::mac::Mac;
use crate::link::membership::{HeartbeatLoop, LocalHost, Membership};
use crate::link::route::{Link, Rtnetlink};
use crate::metrics::{Metrics, register_traffic};
use crate::peers::{self, FlowExchange, KeySource, PeerInputs, PeerOptions, SharedKey};
use crate::pin_names;
use crate::prober::Prober;
use crate::routes::{self, RouteExporter, RouteInputs};
use crate::source;
use crate::status::{HostStatus, StatusSink, StatusWriter};
use crate::tunnel::TunnelKeeper;
use crate::vips::{LeaseRenewer, ServedVips, VipLeases, WITHHELD, lease_time};

/// Events that may wait for the engine; then the watches wait.
const EVENT_BUFFER: usize = 1024;
/// Answers of nodes that may wait for the engine; then no node is asked again.
const STATEMENT_BUFFER: usize = 16;
const NEEDS_NET_RAW: &str = "cannot open a packet socket (it needs CAP_NET_RAW)";

/// Errors of the removal of a directory that has to stay.
const IS_LEFT: [ErrorKind; 3] = [ErrorKind::NotFound, ErrorKind::DirectoryNotEmpty, ErrorKind::ResourceBusy];

/// Removes the eBPF programs and maps of all links, the multicast groups, the routes of VIPs and the tunnel's device; none of these is
/// success.
pub(crate) fn cleanup(bpf_dir: &Path) -> anyhow::Result<()> {
    let mut netlink = Rtnetlink::open()?;
    for (index, address) in netlink.marked()? {
        netlink.remove(index, address)?;
    }
    leftovers::remove(&mut netlink)?;
    routes::remove_all(&mut netlink)?;
    steerage_tunnel::remove(steerage_tunnel::SENDER)?;
    let entries = match fs::read_dir(bpf_dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("there is no {}: the edge has no program here", bpf_dir.display());
            return Ok(());
        }
        entries => entries.with_context(|| format!("cannot read {}", bpf_dir.display()))?,
    };
    for pins in entries.flatten() {
        let interface = pin_names::interface(&pins.file_name().to_string_lossy());
        steerage_edge_dataplane::remove(&interface, &pins.path())
            .with_context(|| format!("cannot remove the eBPF program from {interface}"))?;
    }
    match fs::remove_dir(bpf_dir) {
        // What is left is not the edge's: another program's files, or the file system itself.
        Err(error) if !IS_LEFT.contains(&error.kind()) => {
            Err(error).with_context(|| format!("cannot remove {}", bpf_dir.display()))
        }
        _ => Ok(()),
    }
}

/// Starts all parts, and returns at shutdown.
pub(crate) async fn start(edge: EdgeArgs, client: ClientArgs, process: Process) -> anyhow::Result<()> {
    let EdgeArgs {
        interface,
        bpf_dir,
        host_name: host,
        namespace,
        group,
        heartbeat_interval,
        heartbeat_misses,
        statements_port,
        peers_port,
        peers_key_secret,
        peers_key_file,
        hand_over_wait,
        routes,
        tunnel,
        objects_dir,
        status_dir,
    } = edge;
    // Other hosts take over, and the next process adopts the program and its maps.
    process.end_on_panic();
    // What this host serves is followed until it has handed over, which the engine does; it ends with the engine, however that ends.
    let ending = CancellationToken::new();
    let engine_ends = ending.clone().drop_guard();
    let host = host.map_or_else(local_host_name, Ok)?;
    let metrics = Metrics::default();
    process.metrics().register("edge", |registry| metrics.register(registry));
    let gates = readiness_gates(&process);
    let mut netlink = Rtnetlink::open()?;
    let link = find_link(&mut netlink, interface)?;
    let (dataplane, tunnel) = load(&link, &bpf_dir, tunnel)?;
    process.metrics().register("edge", |registry| register_traffic(registry, dataplane.counts().clone()));

    let (mac, mac_rx) = watch::channel(link.mac);
    let (own_addresses, own_addresses_rx) = watch::channel(Vec::new());
    let (leaving, leaving_rx) = watch::channel(false);
    let (abilities, abilities_rx) = watch::channel(AbilityReport::new(std::time::Instant::now()));
    let (informed, informed_rx) = watch::channel(BTreeSet::new());
    let (heard, heard_rx) = watch::channel(BTreeSet::new());
    let has_cluster = objects_dir.is_none();
    let (cluster, cluster_rx) = watch::channel(if has_cluster { Cluster::Unread } else { Cluster::None });
    let (lost_contact, lost_contact_rx) = watch::channel(false);
    let timing = HeartbeatTiming { interval: heartbeat_interval, misses: heartbeat_misses.into() };
    let local = LocalHost {
        index: link.index,
        mac: mac_rx.clone(),
        name: host.clone(),
        group: heartbeat::group_id(&group),
        cluster: cluster_rx,
        lost_contact: lost_contact_rx,
        timing,
    };
    let (heartbeats, membership) =
        HeartbeatLoop::open(local, own_addresses_rx, leaving_rx, abilities_rx, informed_rx, metrics.clone())
            .context(NEEDS_NET_RAW)?;
    process.spawn("heartbeats", heartbeats.run());

    let (secret_key, secret_key_rx) = watch::channel(None);
    let key = KeySource::choose(peers_key_file, has_cluster, secret_key_rx);
    let options = PeerOptions { port: peers_port, key, has_routes: routes.route_table != 0 };
    let inputs = PeerInputs::new(&link, own_addresses.subscribe(), &membership, informed, heard, &metrics);
    let exchange = FlowExchange::start(options, inputs, &dataplane, &process)?;

    let DetectedConflicts { monitored_vips, conflicts, claims } =
        detect_conflicts(&process, &link, mac_rx.clone(), &membership, &metrics);

    let leases = VipLeases::new(dataplane.leases(), timing, routes.withdraw_wait());
    let (held, held_rx) = watch::channel(BTreeSet::new());
    let (announcements, announcements_rx) = mpsc::unbounded_channel();
    let announcer =
        Announcer::open(link.index, mac_rx, held_rx, membership.clone(), leases.clone(), announcements_rx)
            .context(NEEDS_NET_RAW)?;
    process.spawn("announcements", announcer.run());

    let secret = PeersSecret { name: peers_key_secret, key: secret_key };
    let (news, directories) = (ClusterNews { cluster, lost_contact }, objects_dir.zip(status_dir));
    let (sink, events) =
        watch_objects(&process, directories, &client, namespace, news, secret, ending).await?;
    let (status, status_rx) = watch::channel(HostStatus::default());
    process.spawn("status", StatusWriter::new(sink, host, metrics.clone()).run(status_rx));

    allow_many_connections();
    let (health, health_rx) = mpsc::unbounded_channel();
    let (statements, statements_rx) = mpsc::channel(STATEMENT_BUFFER);
    let prober = Prober::new(statements_port, health, statements, metrics.clone());
    process.spawn("lease", LeaseRenewer::new(&leases, &membership, &leaving, &abilities).run());
    let inputs = RouteInputs::new(&held, &membership, &abilities, &leaving, heard_rx);
    export_routes(&process, &mut netlink, routes, lease_time(timing), inputs, &leases, &metrics)?;
    let vips = ServedVips::new(leases, served_vips(&dataplane), timing.timeout(), held, announcements);
    let outputs = Outputs { mac, addresses: own_addresses, monitored_vips, status, leaving, abilities };
    let inputs = Inputs {
        events,
        health: health_rx,
        statements: statements_rx,
        membership,
        conflicts,
        claims,
        shutdown: process.shutdown().clone(),
        hand_over_wait,
        engine_ends,
    };
    let kernel = Kernel::new(dataplane, exchange, tunnel, metrics.clone())?;
    let engine = Engine::new(link, kernel, vips, prober, metrics, outputs, gates)?;
    process.spawn("engine", engine.run(inputs));
    process.shutdown().cancelled().await;
    Ok(())
}

/// The engine's side of the conflict detection.
struct DetectedConflicts {
    monitored_vips: watch::Sender<BTreeSet<IpAddr>>,
    conflicts: watch::Receiver<AddressConflicts>,
    claims: mpsc::UnboundedReceiver<(IpAddr, Mac)>,
}

fn detect_conflicts(
    process: &Process,
    link: &Link,
    mac: watch::Receiver<Mac>,
    membership: &watch::Receiver<Membership>,
    metrics: &Metrics,
) -> DetectedConflicts {
    let (monitored_vips, monitored_vips_rx) = watch::channel(BTreeSet::new());
    let (conflicts, conflicts_rx) = watch::channel(AddressConflicts::default());
    let (claims, claims_rx) = mpsc::unbounded_channel();
    let detection = ConflictDetection {
        index: link.index,
        mac,
        vips: monitored_vips_rx,
        membership: membership.clone(),
        metrics: metrics.clone(),
        conflicts,
        claims,
    };
    process.spawn("conflict detection", detection.run());
    DetectedConflicts { monitored_vips, conflicts: conflicts_rx, claims: claims_rx }
}

fn readiness_gates(process: &Process) -> ReadinessGates {
    ReadinessGates {
        settled: Some(process.readiness().task("peers")),
        synced: Some(process.readiness().task("watches")),
        programmed: Some(process.readiness().task("kernel")),
    }
}

/// Starts the task that keeps a route for each VIP, if the flags ask for it.
fn export_routes(
    process: &Process,
    netlink: &mut Rtnetlink,
    flags: RouteArgs,
    lifetime: Duration,
    inputs: RouteInputs,
    leases: &VipLeases,
    metrics: &Metrics,
) -> anyhow::Result<()> {
    let RouteArgs { route_table, route_withdraw_wait } = flags;
    if route_table == 0 {
        routes::warn_of_other_tables(netlink, None)?;
        return Ok(());
    }
    let exporter = RouteExporter::new(
        route_table,
        route_withdraw_wait,
        lifetime,
        inputs,
        leases.clone(),
        metrics.clone(),
    )?;
    process.spawn("routes", exporter.run());
    Ok(())
}

/// The VIPs for which the kernel answers since an earlier process.
fn served_vips(dataplane: &Dataplane) -> BTreeSet<IpAddr> {
    let written = dataplane.written().into_iter().flat_map(|written| &written.vips);
    written.filter(|(_, lease)| **lease != WITHHELD).map(|(vip, _)| *vip).collect()
}

/// Raises the limit of open descriptors: each node holds a request, and the usual limit is 1024.
fn allow_many_connections() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "limit of open descriptors not raised; continuing with less");
    }
}

/// The Secret with the key of the edge group, and where the key goes.
struct PeersSecret {
    name: String,
    key: watch::Sender<Option<SharedKey>>,
}

/// What is known of the cluster itself.
struct ClusterNews {
    cluster: watch::Sender<Cluster>,
    /// Whether the API server does not answer.
    lost_contact: watch::Sender<bool>,
}

/// Starts what reads the objects, until `ending`. Returns where the status goes, and what is read.
async fn watch_objects(
    process: &Process,
    directories: Option<(PathBuf, PathBuf)>,
    client: &ClientArgs,
    namespace: String,
    news: ClusterNews,
    secret: PeersSecret,
    ending: CancellationToken,
) -> anyhow::Result<(StatusSink, mpsc::Receiver<IndexEvent>)> {
    let (events, events_rx) = mpsc::channel(EVENT_BUFFER);
    let sink = if let Some((objects, status)) = directories {
        process.spawn("objects", source::watch_directory(objects, events, ending));
        StatusSink::Directory(status)
    } else {
        watch_cluster(process, client, namespace, events, news, secret, ending).await?
    };
    Ok((sink, events_rx))
}

/// Starts what needs the API server, and returns where the status goes.
async fn watch_cluster(
    process: &Process,
    client: &ClientArgs,
    namespace: String,
    events: mpsc::Sender<IndexEvent>,
    news: ClusterNews,
    secret: PeersSecret,
    ending: CancellationToken,
) -> anyhow::Result<StatusSink> {
    let client = steerage_watch::client("edge", env!("CARGO_PKG_VERSION"), client).await?;
    let ClusterNews { cluster, lost_contact } = news;
    process.spawn("cluster", cluster::read(client.clone(), cluster, ending.clone()));
    let asking = api_contact::watch(client.clone(), ContactTiming::default(), lost_contact, ending.clone());
    process.spawn("contact to the API server", asking);
    if !secret.key.is_closed() {
        let PeersSecret { name, key } = secret;
        let read = peers::read_secret(client.clone(), namespace.clone(), name, key, ending.clone());
        process.spawn("key of the edge group", read);
    }
    let retries = Timing { max_backoff: source::MAX_BACKOFF, ..Timing::default() };
    let watches = process
        .metrics()
        .register("edge_watch", |registry| Watches::with_timing(client.clone(), registry, retries));
    process.spawn("watches", source::watch(watches, namespace.clone(), events, ending));
    Ok(StatusSink::Api { client: Box::new(client), namespace })
}

/// Makes the tunnel's device, loads the program, and adopts what an earlier process has left for the link.
fn load(
    link: &Link,
    bpf_dir: &Path,
    tunnel: TunnelArgs,
) -> anyhow::Result<(Dataplane, Option<TunnelKeeper>)> {
    if let Err(error) = fs::create_dir_all(bpf_dir)
        && error.kind() == ErrorKind::PermissionDenied
    {
        return Err(error).with_context(|| {
            format!(
                "cannot make {}: run as uid 0, or set --bpf-dir; names there have no dots",
                bpf_dir.display()
            )
        });
    }
    let is_bpf = |found: Statfs| found.filesystem_type() == BPF_FS_MAGIC;
    if !statfs(bpf_dir).is_ok_and(is_bpf) {
        anyhow::bail!(
            "{} is not on a BPF file system: mount one with `mount -t bpf bpf /sys/fs/bpf`, or set --bpf-dir",
            bpf_dir.display()
        );
    }
    // The program of an earlier process, which forwards by the same maps, is told the index as well.
    let tunnel = TunnelKeeper::start(tunnel);
    let options = Options {
        interface: link.name.clone(),
        mac: link.mac,
        tunnel: tunnel.as_ref().and_then(TunnelKeeper::index),
        pins: Some(bpf_dir.join(pin_names::folder(&link.name))),
        sizes: Sizes::default(),
        hook: None,
    };
    let dataplane = Dataplane::load(options)
        .context("cannot load the data plane (it needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN)")?;
    Ok((dataplane, tunnel))
}

fn find_link(netlink: &mut Rtnetlink, interface: Option<String>) -> anyhow::Result<Link> {
    let name = match interface {
        Some(name) => name,
        None => netlink.default_interface()?.context("there is no default route: set --interface")?,
    };
    let link =
        netlink.link(&name)?.with_context(|| format!("there is no interface {name}: set --interface"))?;
    if link.mac == [0; 6] {
        anyhow::bail!("{name} has no Ethernet address: set --interface to an Ethernet interface");
    }
    if !link.up {
        tracing::warn!(interface = name, "interface is down; no VIP is reachable until it is up");
    }
    Ok(link)
}

fn local_host_name() -> anyhow::Result<String> {
    let name = nix::unistd::gethostname().context("cannot read the host name")?;
    let name = name.to_string_lossy().to_lowercase();
    host_name(&name)
        .map_err(anyhow::Error::msg)
        .with_context(|| format!("the host name {name} is unusable: set --host-name"))
}

// SPDX-License-Identifier: Apache-2.0
//! Faults under load: what two clients live through, one on a Service in each kind of steering, while something happens.
//!
//! The first client uses `api` steering over IPv4, the second `health-check` steering over IPv6. What must cost nothing fails the
//! test when it does; everything is printed.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{EvictParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use steerage_model::Family::{V4, V6};
use steerage_model::names;
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::boot::Boot;
use crate::meter::capture::now;
use crate::meter::load::{AFTER, BEFORE, Client, Load};
use crate::meter::loss::{Loss, Measurement};
use crate::pods::{deployment, has};
use crate::report::fine_ms;
use crate::scene::Scene;
use crate::self_test;
use crate::services::{PORT, Spec, Vips};
use crate::suite::ECHO;
use crate::system;
use crate::wait::{SOON, until};

/// How long a backend goes on serving after SIGTERM.
const LINGER: u32 = 8;
/// How long the API server is away.
const ABSENCE: Duration = Duration::from_mins(1);

/// What an event may cost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Promise {
    /// Not one packet.
    NothingLost,
    /// Anything: it is only reported.
    None,
}

pub(super) async fn a_killed_controller_costs_no_connection(scene: Arc<Scene>) -> Result<()> {
    let leader = system::leader(&scene.suite).await?;
    let pods = system::pods(&scene.suite, system::CONTROLLER).await?;
    let pod =
        pods.iter().find(|pod| leader.contains(&pod.name_any())).context("the leader is no pod of ours")?;
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    under_load(&scene, "controller killed (-9)", Promise::NothingLost, clients, async || {
        system::kill(&scene.suite, pod)
    })
    .await?;
    system::recovered(&scene.suite, system::CONTROLLER, pod).await
}

/// With kube-proxy in the cluster the Services are labelled, so that it is the agent that serves them.
pub(super) async fn a_killed_agent_costs_no_connection(scene: Arc<Scene>) -> Result<()> {
    let agents = system::pods(&scene.suite, system::AGENT).await?;
    ensure!(agents.len() == scene.nodes().len(), "{} agents run", agents.len());
    let labelled = |spec: Spec| match scene.suite.boot {
        Boot::KubeProxy => spec.labelled(names::PROXY_NAME_LABEL, names::PROXY_NAME),
        Boot::Agent => spec,
    };
    let clients = expose(&scene, ECHO, labelled).await?;
    let kill = async || agents.iter().try_for_each(|agent| system::kill(&scene.suite, agent));
    under_load(&scene, "agent killed (-9) on every node", Promise::NothingLost, clients, kill).await?;
    for agent in &agents {
        system::recovered(&scene.suite, system::AGENT, agent).await?;
    }
    Ok(())
}

pub(super) async fn a_killed_edge_costs_no_connection(scene: Arc<Scene>) -> Result<()> {
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    let edges = scene.suite.cluster(|cluster| cluster.edges());
    let edge = edges.first().context("no edge host")?;
    let kill = async || {
        scene.suite.cluster(|cluster| cluster.kill_edge(&edge.name))?;
        sleep(Duration::from_secs(2)).await;
        scene.suite.cluster(|cluster| cluster.start_edge(&edge.name))
    };
    under_load(&scene, "edge killed (-9), started after 2 s", Promise::NothingLost, clients, kill).await
}

pub(super) async fn an_absent_api_server_costs_no_connection(scene: Arc<Scene>) -> Result<()> {
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    let away = async || {
        scene.suite.cluster(|cluster| cluster.stop_api_server())?;
        sleep(ABSENCE).await;
        scene.suite.cluster(|cluster| cluster.start_api_server())
    };
    under_load(&scene, "API server away for 60 s", Promise::NothingLost, clients, away).await?;
    // A controller that lost its Lease comes back when the kubelet's patience allows.
    scene.create(&Spec::new("after", ECHO)).await?;
    let what = "the addresses of a Service made after the API server's return";
    until(what, SOON * 5, async || Vips::of(&scene.service("after").await?)).await?;
    // kube-proxy's watches back off for up to a minute; until then its node keeps what is deleted, too.
    for node in scene.suite.cluster(|cluster| cluster.nodes()) {
        let what = format!("{} serving a Service made after the API server's return", node.name);
        let known = async || {
            ensure!(scene.is_named(&node, "after")?, "its rules do not name it");
            Ok(())
        };
        until(what, SOON * 5, known).await?;
    }
    Ok(())
}

pub(super) async fn rolling_update(scene: Arc<Scene>) -> Result<()> {
    let clients = deploy(&scene, 3).await?;
    let update = async || {
        let change = json!({ "spec": { "template": { "metadata": { "annotations": { "e2e": "2" } } } } });
        let deployment: Deployment = scene.patch_any("web", change).await?;
        rolled_out(&scene, deployment.metadata.generation).await
    };
    under_load(&scene, "rolling update of 3 pods", Promise::None, clients, update).await
}

pub(super) async fn scale_down(scene: Arc<Scene>) -> Result<()> {
    let clients = deploy(&scene, 3).await?;
    let scale = async || {
        let change = json!({ "spec": { "replicas": 1 } });
        scene.patch_any::<Deployment>("web", change).await.map(drop)
    };
    under_load(&scene, "scale down from 3 pods to 1", Promise::None, clients, scale).await
}

pub(super) async fn policy_flip(scene: Arc<Scene>) -> Result<()> {
    let clients = expose_one_backend(&scene).await?;
    let flip = async || {
        for policy in ["Cluster", "Local"] {
            for mode in MODES {
                scene.patch(mode, json!({ "spec": { "externalTrafficPolicy": policy } })).await?;
            }
            sleep(Duration::from_secs(5)).await;
        }
        Ok(())
    };
    under_load(&scene, "policy flip to Cluster and back", Promise::None, clients, flip).await
}

pub(super) async fn mode_flip(scene: Arc<Scene>) -> Result<()> {
    let clients = expose_one_backend(&scene).await?;
    let flip = async || {
        for (name, mode) in [("api", "health-check"), ("health-check", "api")] {
            scene.patch(name, json!({ "metadata": { "annotations": { names::STEERING: mode } } })).await?;
        }
        Ok(())
    };
    under_load(&scene, "mode flip to the other steering", Promise::None, clients, flip).await
}

pub(super) async fn node_drain(scene: Arc<Scene>) -> Result<()> {
    let clients = deploy(&scene, 3).await?;
    let nodes: Api<Node> = Api::all(scene.client().clone());
    let node = scene.nodes()[0].name.clone();
    let cordon = async |on: bool| {
        let change = json!({ "spec": { "unschedulable": on } });
        nodes.patch(&node, &PatchParams::default(), &Patch::Merge(change)).await
    };
    let drain = async || {
        cordon(true).await?;
        for pod in scene.pods("web").await? {
            if pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&node) {
                scene.api::<Pod>().evict(&pod.name_any(), &EvictParams::default()).await?;
            }
        }
        Ok(())
    };
    let outcome = under_load(&scene, "node drain (cordon, evict)", Promise::None, clients, drain).await;
    cordon(false).await?;
    outcome
}

pub(super) async fn node_death(scene: Arc<Scene>) -> Result<()> {
    let clients = deploy(&scene, 3).await?;
    // Neither the first node, where a single controller may run and which has most of DNS, nor a node without a backend.
    let nodes = scene.nodes();
    let node = nodes.last().context("no nodes")?;
    let kill = async || scene.suite.cluster(|cluster| cluster.kill_node(&node.name));
    let outcome = under_load(&scene, "node death", Promise::None, clients, kill).await;
    scene.suite.cluster(|cluster| cluster.start_node(&node.name))?;
    outcome
}

const MODES: [&str; 2] = ["api", "health-check"];

/// Backends of a Deployment, and a Service in each mode before them.
async fn deploy(scene: &Scene, replicas: usize) -> Result<Vec<Client>> {
    let made = deployment("web", "web", replicas, LINGER)?;
    let deployments = scene.api::<Deployment>();
    until("a Deployment", SOON, async || deployments.create(&PostParams::default(), &made).await).await?;
    rolled_out(scene, Some(1)).await?;
    expose(scene, "web", |spec| spec).await
}

/// One backend, on the last node: a packet that any other node gets under policy Local is lost.
async fn expose_one_backend(scene: &Scene) -> Result<Vec<Client>> {
    let nodes = scene.nodes();
    let node = nodes.last().context("no nodes")?;
    scene.backend("only", "web", &node.name, true, LINGER).await?;
    expose(scene, "web", |spec| spec).await
}

async fn rolled_out(scene: &Scene, generation: Option<i64>) -> Result<()> {
    until("ready backends", SOON * 3, async || -> Result<()> {
        let deployment = scene.api::<Deployment>().get("web").await?;
        let wanted = deployment.spec.and_then(|spec| spec.replicas);
        let status = deployment.status.unwrap_or_default();
        ensure!(status.observed_generation >= generation, "not observed yet");
        ensure!(
            status.updated_replicas == wanted && status.ready_replicas == wanted && status.replicas == wanted,
            "{status:?}"
        );
        Ok(())
    })
    .await
}

/// A Service in each mode, named after it, and a client for each. Returns when every node knows the addresses and the edge sees every
/// node with a backend as healthy.
///
/// No client connects before: a node that does not know an address yet tracks the connection untranslated for two minutes, and would
/// drop a later one from the same port. For the same reason no test has the addresses of another.
async fn expose(scene: &Scene, app: &str, adapt: impl Fn(Spec) -> Spec) -> Result<Vec<Client>> {
    static NEXT: AtomicU8 = AtomicU8::new(0x60);
    let mut clients = Vec::new();
    for ((mode, family), host) in MODES.into_iter().zip([V4, V6]).zip(scene.suite.clients()) {
        let last = NEXT.fetch_add(1, Ordering::Relaxed);
        let addresses = format!("10.77.200.{last},fd77::c8{last:02x}");
        let spec = Spec::new(mode, app).steered(mode).annotated(names::ADDRESSES, &addresses);
        let (_, vips) = scene.expose(&adapt(spec)).await?;
        scene.known(mode, vips).await?;
        scene.answers(vips, PORT).await?;
        clients.push(Client { host, to: vips.at(family, PORT), what: format!("{mode}, {family}") });
    }
    let pods = scene.pods(app).await?;
    let ready = pods.iter().filter(|pod| has(pod, "Ready"));
    let mut nodes: Vec<_> = ready.filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    for mode in MODES {
        scene.healthy(mode, &nodes).await?;
    }
    Ok(clients)
}

/// Fails when the event cost more than its promise allows. No measurement counts unless the meter has passed its own test.
async fn under_load(
    scene: &Scene,
    event: &str,
    promise: Promise,
    clients: Vec<Client>,
    happen: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    self_test::run(scene).await.context("the loss meter does not work")?;
    let load = Load::start(clients);
    sleep(BEFORE).await;
    let at = now();
    let happened = happen().await;
    sleep(AFTER).await;
    let measurements = block_in_place(|| load.end())?;
    happened.with_context(|| event.to_owned())?;
    let mut broken = String::new();
    for (what, measured) in &measurements {
        record(scene, event, at, what, measured);
        let kept = match promise {
            Promise::NothingLost => measured.losses.is_empty(),
            Promise::None => true,
        };
        if !kept {
            let times = times(at, &measured.losses);
            let _ =
                write!(broken, "\n{what}: {} failed; lost: {}; {times}", measured.failed, measured.kinds());
        }
        let ran = measured.connections > 0 && measured.exchanges > 0 && measured.datagrams > 0;
        ensure!(ran, "{what}: the load did not run: {measured:?}");
    }
    ensure!(broken.is_empty(), "{event}:{broken}");
    Ok(())
}

fn record(scene: &Scene, event: &str, at: Duration, what: &str, measured: &Measurement) {
    let columns = [
        "event",
        "client",
        "connections",
        "requests",
        "datagrams",
        "lost",
        "when",
        "failed connections",
        "closed by server",
        "slowest handshake ms",
        "slowest datagram ms",
        "retransmissions (needed / spurious / FIN / by server)",
    ];
    let again = measured.retransmissions;
    let row = vec![
        event.to_owned(),
        what.to_owned(),
        measured.connections.to_string(),
        measured.exchanges.to_string(),
        measured.datagrams.to_string(),
        measured.kinds(),
        times(at, &measured.losses),
        measured.failed.to_string(),
        measured.closed_by_server.to_string(),
        fine_ms(measured.slowest_handshake),
        fine_ms(measured.slowest_datagram),
        format!("{} / {} / {} / {}", again.needed, again.spurious, again.fins, again.by_server),
    ];
    scene.suite.report.row("Loss while something happens, by packets", &columns, row);
}

/// The times of the first and the last loss relative to the event.
fn times(event: Duration, losses: &[Loss]) -> String {
    let offset = |loss: &Loss| format!("{:+.2} s", loss.at.as_secs_f64() - event.as_secs_f64());
    match losses {
        [] => "–".to_owned(),
        [only] => offset(only),
        [first, .., last] => format!("{} … {}", offset(first), offset(last)),
    }
}

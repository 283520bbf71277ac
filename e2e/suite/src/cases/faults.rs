// SPDX-License-Identifier: Apache-2.0
//! Faults under load: what two clients live through, one on a Service in each kind of steering, while something happens.
//!
//! The first client uses `api` steering over IPv4, the second `health-check` steering over IPv6. What must cost nothing fails the
//! test when it does; everything is printed.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{EvictParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use steerage_model::Family::{V4, V6};
use steerage_model::names;
use tokio::time::sleep;

use crate::args::Boot;
use crate::load::{AFTER, BEFORE, Client, Failure, Load, Tally};
use crate::pods::{deployment, has};
use crate::scene::Scene;
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
enum May {
    CostNothing,
    BePrinted,
}

pub(super) async fn a_killed_controller_costs_no_connection(scene: Arc<Scene>) -> Result<()> {
    let leader = system::leader(&scene.suite).await?;
    let pods = system::pods(&scene.suite, system::CONTROLLER).await?;
    let pod =
        pods.iter().find(|pod| leader.contains(&pod.name_any())).context("the leader is no pod of ours")?;
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    under_load(&scene, "controller killed (-9)", May::CostNothing, clients, async || {
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
    under_load(&scene, "agent killed (-9) on every node", May::CostNothing, clients, kill).await?;
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
    under_load(&scene, "edge killed (-9), started after 2 s", May::CostNothing, clients, kill).await
}

pub(super) async fn an_absent_api_server_costs_no_connection(scene: Arc<Scene>) -> Result<()> {
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    let away = async || {
        scene.suite.cluster(|cluster| cluster.stop_api_server())?;
        sleep(ABSENCE).await;
        scene.suite.cluster(|cluster| cluster.start_api_server())
    };
    under_load(&scene, "API server away for 60 s", May::CostNothing, clients, away).await?;
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
    under_load(&scene, "rolling update of 3 pods", May::BePrinted, clients, update).await
}

pub(super) async fn scale_down(scene: Arc<Scene>) -> Result<()> {
    let clients = deploy(&scene, 3).await?;
    let scale = async || {
        let change = json!({ "spec": { "replicas": 1 } });
        scene.patch_any::<Deployment>("web", change).await.map(drop)
    };
    under_load(&scene, "scale down from 3 pods to 1", May::BePrinted, clients, scale).await
}

pub(super) async fn policy_flip(scene: Arc<Scene>) -> Result<()> {
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    let flip = async || {
        for policy in ["Cluster", "Local"] {
            for mode in MODES {
                scene.patch(mode, json!({ "spec": { "externalTrafficPolicy": policy } })).await?;
            }
            sleep(Duration::from_secs(5)).await;
        }
        Ok(())
    };
    under_load(&scene, "policy flip to Cluster and back", May::BePrinted, clients, flip).await
}

pub(super) async fn mode_flip(scene: Arc<Scene>) -> Result<()> {
    let clients = expose(&scene, ECHO, |spec| spec).await?;
    let flip = async || {
        for (name, mode) in [("api", "health-check"), ("health-check", "api")] {
            scene.patch(name, json!({ "metadata": { "annotations": { names::STEERING: mode } } })).await?;
        }
        Ok(())
    };
    under_load(&scene, "mode flip to the other steering", May::BePrinted, clients, flip).await
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
    let outcome = under_load(&scene, "node drain (cordon, evict)", May::BePrinted, clients, drain).await;
    cordon(false).await?;
    outcome
}

pub(super) async fn node_death(scene: Arc<Scene>) -> Result<()> {
    let clients = deploy(&scene, 3).await?;
    // Neither the first node, where a single controller may run and which has most of DNS, nor a node without a backend.
    let nodes = scene.nodes();
    let node = nodes.last().context("no nodes")?;
    let kill = async || scene.suite.cluster(|cluster| cluster.kill_node(&node.name));
    let outcome = under_load(&scene, "node death", May::BePrinted, clients, kill).await;
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

async fn under_load(
    scene: &Scene,
    what: &str,
    may: May,
    clients: Vec<Client>,
    event: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let load = Load::start(clients);
    sleep(BEFORE).await;
    let at = Instant::now();
    let happened = event().await;
    sleep(AFTER).await;
    let tallies = load.end()?;
    happened.with_context(|| what.to_owned())?;
    let mut failures = String::new();
    for tally in &tallies {
        print(scene, what, at, tally);
        if !tally.failed.is_empty() || !tally.broken.is_empty() {
            let (failed, broken) = (first(at, &tally.failed), first(at, &tally.broken));
            let _ = write!(
                failures,
                "\n{}: {} of {} new failed ({failed}), {} long broke ({broken})",
                tally.what,
                tally.failed.len(),
                tally.opened + tally.failed.len(),
                tally.broken.len()
            );
        }
        ensure!(tally.opened > 0 && tally.exchanges > 0, "{}: the load did not run: {tally:?}", tally.what);
    }
    ensure!(may == May::BePrinted || failures.is_empty(), "{what} cost connections:{failures}");
    Ok(())
}

fn print(scene: &Scene, what: &str, at: Instant, tally: &Tally) {
    let columns = [
        "event",
        "client",
        "new",
        "failed",
        "first failure",
        "exchanges on long ones",
        "long ones broken",
        "first break",
    ];
    let row = vec![
        what.to_owned(),
        tally.what.clone(),
        (tally.opened + tally.failed.len()).to_string(),
        tally.failed.len().to_string(),
        first(at, &tally.failed),
        tally.exchanges.to_string(),
        tally.broken.len().to_string(),
        first(at, &tally.broken),
    ];
    scene.suite.report.row("Connections under way while something happens", &columns, row);
}

/// The first failure, its time relative to the event, and the last one's.
fn first(event: Instant, failures: &[Failure]) -> String {
    let offset = |failure: &Failure| match failure.at.checked_duration_since(event) {
        Some(after) => format!("+{:.2}", after.as_secs_f64()),
        None => format!("-{:.2}", (event - failure.at).as_secs_f64()),
    };
    match failures {
        [] => "–".to_owned(),
        [only] => format!("{} s: {}", offset(only), only.what),
        [first, .., last] => format!("{} s: {}; last {} s", offset(first), first.what, offset(last)),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The story of `hack/demo`, told in the terminal while it happens on a real cluster.
//!
//! Uses the suite's means and measures as the suite does; it asserts nothing, it shows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use steerage_edge_api::TargetState;
use steerage_model::Family;
use steerage_model::Family::{V4, V6};

use crate::boot::Boot;
use crate::cases::moves::{self, Following};
use crate::cluster::lab::Lab;
use crate::edge;
use crate::net;
use crate::pods;
use crate::report::ms;
use crate::scene::Scene;
use crate::services::{PORT, Spec, Vips, health_port};
use crate::session::inside;
use crate::suite::Suite;
use crate::wait::{SOON, until};

/// The namespace of the demo's objects.
const NAMESPACE: &str = "demo";
/// Moves per kind of steering.
const MOVES: usize = 5;

/// Tells on a running lab what Steerage does.
#[derive(Debug, Parser)]
#[command(disable_version_flag = true)]
pub struct Args {
    /// The lab's name.
    #[arg(long, default_value = "demo")]
    name: String,
}

impl Args {
    /// Tells the story and leaves its objects in place.
    pub fn run(self) -> Result<()> {
        let Self { name } = self;
        let cluster = Box::new(Lab::open(&name)?);
        inside(Boot::KubeProxy, cluster, "demo-logs".into(), |suite, runtime| {
            runtime.block_on(tell(Arc::clone(suite)))
        })
    }
}

async fn tell(suite: Arc<Suite>) -> Result<()> {
    suite.make_namespace(NAMESPACE).await?;
    let scene = Scene { suite, namespace: NAMESPACE.to_owned() };
    let mut pods = deploy(&scene).await?;
    let vips = expose(&scene).await?;
    addresses(&scene, vips).await?;
    target_table(&scene, "web").await?;
    let mut rows = Vec::new();
    for mode in ["health-check", "api"] {
        rows.push((mode, follow(&scene, &mut pods, mode).await?));
    }
    target_table(&scene, "web").await?;
    summary(&rows);
    Ok(())
}

fn chapter(title: &str) {
    println!("\n\u{1b}[1m{title}\u{1b}[0m");
}

/// An echo application on the first two nodes; the others have none.
async fn deploy(scene: &Scene) -> Result<Vec<Pod>> {
    chapter("An echo application");
    let mut made = Vec::new();
    for node in scene.nodes().iter().take(2) {
        let name = format!("echo-{}", node.name);
        let pod = scene.backend(&name, "echo", &node.name, true, 0).await?;
        println!("  pod {name} is ready on {} with {}", node.name, pods::address(&pod, V4)?);
        made.push(pod);
    }
    for node in scene.nodes().iter().skip(2) {
        println!("  {} has none: under externalTrafficPolicy Local it would drop what it is sent", node.name);
    }
    Ok(made)
}

async fn expose(scene: &Scene) -> Result<Vips> {
    chapter("A Service of type LoadBalancer, externalTrafficPolicy Local, steering health-check");
    let start = Instant::now();
    let (_, vips) = scene.expose(&Spec::new("web", "echo").steered("health-check")).await?;
    println!("  after {:>5} ms it has the addresses {} and {}", ms(start.elapsed()), vips.ipv4, vips.ipv6);
    scene.answers(vips, PORT).await?;
    println!("  after {:>5} ms it answers over IPv4 and IPv6, TCP and UDP", ms(start.elapsed()));
    Ok(vips)
}

/// What the pod sees of the client under Local, and under Cluster for comparison.
async fn addresses(scene: &Scene, vips: Vips) -> Result<()> {
    chapter("Whom does the pod see?");
    let [client, _] = scene.suite.clients();
    for (family, port) in [(V4, 40_001), (V6, 40_002)] {
        let seen = net::get_from(port, vips.at(family, PORT), "/clientip").await?.body;
        let sent = SocketAddr::new(client.address(family), port);
        println!("  Local:   the client sends from {sent}; the pod sees {seen}");
    }
    let (_, vips) = scene.serve(&Spec::new("web-cluster", "echo").cluster()).await?;
    let seen = net::get_from(40_003, vips.at(V4, PORT), "/clientip").await?.body;
    let sent = SocketAddr::new(client.address(V4), 40_003);
    println!("  Cluster: the client sends from {sent}; the pod sees {seen}, a node's address");
    scene.delete("web-cluster").await
}

/// Every node, what its `/healthz` says, and what the edge makes of it.
async fn target_table(scene: &Scene, name: &str) -> Result<()> {
    chapter(&format!("The targets of {name}"));
    let service = scene.service(name).await?;
    let port = health_port(&service)?;
    let lb = scene.load_balancer(name).await?;
    let targets = edge::targets(scene.client(), &lb).await?;
    let health = until("the edge's word on every target", SOON, async || {
        let health = edge::health(scene.client(), &lb).await.map_err(|error| format!("{error:#}"))?;
        let known = health.spec.targets.iter().all(|target| target.state != TargetState::Initial);
        if known { Ok(health) } else { Err(format!("{:?}", health.spec.targets)) }
    })
    .await?;
    println!("  {:<8} {:<10} {:<22} {:<10} why", "node", "registered", "/healthz", "edge");
    for node in scene.nodes() {
        let healthz = match net::get(SocketAddr::new(node.address(Family::V4), port), "/healthz").await {
            Ok(answer) => {
                let weight = answer.header("X-Load-Balancing-Endpoint-Weight").unwrap_or("?");
                format!("{}, {weight} endpoint(s)", answer.status)
            }
            Err(_) => "no answer".to_owned(),
        };
        let seen =
            health.spec.targets.iter().find(|target| target.node == node.name && target.address.is_ipv4());
        let state = seen.map_or_else(|| "-".to_owned(), |target| format!("{:?}", target.state));
        let why = match seen {
            Some(target) if target.reason.is_empty() => "answers its health check",
            Some(target) => &target.reason,
            None => "has no ready endpoint",
        };
        let registered = if targets.contains(&node.name) { "yes" } else { "no" };
        println!("  {:<8} {registered:<10} {healthz:<22} {state:<10} {why}", node.name);
    }
    Ok(())
}

/// Moves an endpoint to and fro, and kills one, under one kind of steering.
async fn follow(scene: &Scene, pods: &mut [Pod], mode: &str) -> Result<Following> {
    chapter(&format!("Endpoints move: how soon does the edge follow under {mode} steering?"));
    scene
        .patch(
            "web",
            serde_json::json!({ "metadata": { "annotations": { steerage_model::names::STEERING: mode } } }),
        )
        .await?;
    let nodes: Vec<_> = scene.nodes().into_iter().take(2).collect();
    let writes = edge::writes(scene.client()).await?;
    let vips = scene.vips("web").await?;
    scene.set_ready(&pods[1], false).await?;
    let first = nodes.first().context("no node")?.name.as_str();
    if mode == "api" {
        scene.targets("web", &[first]).await?;
    } else {
        scene.healthy("web", &[first]).await?;
    }
    let following = moves::follow(scene, &nodes, pods, vips, MOVES, |count, joined, left| {
        println!(
            "  move {}: the new node gets packets after {:>5} ms, the old one gets its last after {:>5} ms",
            count + 1,
            ms(joined),
            ms(left)
        );
    })
    .await?;
    println!(
        "  writes to the load balancer's API meanwhile: {}",
        edge::writes(scene.client()).await? - writes
    );
    for pod in pods.iter_mut() {
        scene.set_ready(pod, true).await?;
    }
    let victim = pods.first().context("no pod")?.clone();
    let start = Instant::now();
    let lost = kill(scene, &victim, vips).await?;
    println!(
        "  a pod is killed: {lost} of the connections opened in the next {} s failed",
        start.elapsed().as_secs()
    );
    let node = victim.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
    pods[0] = scene.backend(&victim.name_any(), "echo", &node, true, 0).await?;
    Ok(following)
}

/// Ends a pod at once while a client opens connections; how many of them failed.
async fn kill(scene: &Scene, victim: &Pod, vips: Vips) -> Result<usize> {
    let to = vips.at(V4, PORT);
    let probe = async {
        let mut failed = 0;
        for _ in 0..100 {
            failed += usize::from(net::get(to, "/hostname").await.is_err());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        failed
    };
    let (failed, ended) = tokio::join!(probe, scene.end(victim, true));
    ended?;
    Ok(failed)
}

fn summary(rows: &[(&str, Following)]) {
    chapter("How soon each kind of steering follows (from the EndpointSlice's change, in ms)");
    println!(
        "  {:<14} {:>12} {:>12} {:>12} {:>12}",
        "steering", "joins, p50", "joins, max", "leaves, p50", "leaves, max"
    );
    for (mode, following) in rows {
        let [joined, left] = [&following.joined, &following.left].map(|times| {
            let mut times = times.clone();
            times.sort_unstable();
            [times[times.len() / 2], times[times.len() - 1]].map(ms)
        });
        println!("  {mode:<14} {:>12} {:>12} {:>12} {:>12}", joined[0], joined[1], left[0], left[1]);
    }
}

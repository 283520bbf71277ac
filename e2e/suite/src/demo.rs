// SPDX-License-Identifier: Apache-2.0
//! The demonstration of `hack/demo`: shows in the terminal what Steerage does on a running lab.
//!
//! Measures as the suite does, and asserts nothing.

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

use crate::cases::moves::{self, MoveTimes};
use crate::cluster::lab::Lab;
use crate::edge;
use crate::net;
use crate::pods;
use crate::report::ms;
use crate::service_proxy::ServiceProxy;
use crate::services::{PORT, ServiceBuilder, Vips, health_port};
use crate::session::inside;
use crate::suite::Suite;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// The namespace of the demo's objects.
const NAMESPACE: &str = "demo";
/// Moves per kind of steering.
const MOVES: usize = 5;

/// Show on a running lab what Steerage does.
#[derive(Debug, Parser)]
#[command(disable_version_flag = true)]
pub struct Args {
    /// Use the lab of this name.
    #[arg(long, default_value = "demo")]
    name: String,
}

impl Args {
    /// Runs the demonstration and leaves its objects in place.
    pub fn run(self) -> Result<()> {
        let Self { name } = self;
        let cluster = Box::new(Lab::open(&name)?);
        inside(ServiceProxy::KubeProxy, cluster, "demo-logs".into(), |suite, runtime| {
            runtime.block_on(show(Arc::clone(suite)))
        })
    }
}

async fn show(suite: Arc<Suite>) -> Result<()> {
    suite.make_namespace(NAMESPACE).await?;
    let test = TestContext { suite, namespace: NAMESPACE.to_owned() };
    let mut pods = deploy(&test).await?;
    let vips = expose(&test).await?;
    addresses(&test, vips).await?;
    target_table(&test, "web").await?;
    let mut rows = Vec::new();
    for mode in ["health-check", "api"] {
        rows.push((mode, show_moves(&test, &mut pods, mode).await?));
    }
    target_table(&test, "web").await?;
    summary(&rows);
    Ok(())
}

fn chapter(title: &str) {
    println!("\n\u{1b}[1m{title}\u{1b}[0m");
}

/// An echo application on the first two nodes; the others have none.
async fn deploy(test: &TestContext) -> Result<Vec<Pod>> {
    chapter("An echo application");
    let mut made = Vec::new();
    for node in test.nodes().iter().take(2) {
        let name = format!("echo-{}", node.name);
        let pod = test.backend(&name, "echo", &node.name, true, 0).await?;
        println!("  pod {name} is ready on {} with {}", node.name, pods::address(&pod, V4)?);
        made.push(pod);
    }
    for node in test.nodes().iter().skip(2) {
        println!("  {} has none: under externalTrafficPolicy Local it would drop what it is sent", node.name);
    }
    Ok(made)
}

async fn expose(test: &TestContext) -> Result<Vips> {
    chapter("A Service of type LoadBalancer, externalTrafficPolicy Local, steering health-check");
    let start = Instant::now();
    let (_, vips) = test.expose(&ServiceBuilder::new("web", "echo").steered("health-check")).await?;
    println!("  after {:>5} ms it has the addresses {} and {}", ms(start.elapsed()), vips.ipv4, vips.ipv6);
    test.wait_answers(vips, PORT).await?;
    println!("  after {:>5} ms it answers over IPv4 and IPv6, TCP and UDP", ms(start.elapsed()));
    Ok(vips)
}

/// The source address that the pod sees under Local, and under Cluster for comparison.
async fn addresses(test: &TestContext, vips: Vips) -> Result<()> {
    chapter("Which source address does the pod see?");
    let [client, _] = test.suite.clients();
    for (family, port) in [(V4, 40_001), (V6, 40_002)] {
        let seen = net::get_from(port, vips.at(family, PORT), "/clientip").await?.body;
        let sent = SocketAddr::new(client.address(family), port);
        println!("  Local:   the client sends from {sent}; the pod sees {seen}");
    }
    let (_, vips) = test.serve(&ServiceBuilder::new("web-cluster", "echo").cluster()).await?;
    let seen = net::get_from(40_003, vips.at(V4, PORT), "/clientip").await?.body;
    let sent = SocketAddr::new(client.address(V4), 40_003);
    println!("  Cluster: the client sends from {sent}; the pod sees {seen}, a node's address");
    test.delete("web-cluster").await
}

/// Every node with its `/healthz` and its state at the edge.
async fn target_table(test: &TestContext, name: &str) -> Result<()> {
    chapter(&format!("The targets of {name}"));
    let service = test.service(name).await?;
    let port = health_port(&service)?;
    let lb = test.load_balancer(name).await?;
    let targets = edge::targets(test.client(), &lb).await?;
    let health = until("a state of every target at the edge", TIMEOUT, async || {
        let health = edge::health(test.client(), &lb).await.map_err(|error| format!("{error:#}"))?;
        let known = health.iter().all(|target| target.state != TargetState::Initial);
        if known { Ok(health) } else { Err(format!("{health:?}")) }
    })
    .await?;
    println!("  {:<8} {:<10} {:<22} {:<10} why", "node", "registered", "/healthz", "edge");
    for node in test.nodes() {
        let healthz = match net::get(SocketAddr::new(node.address(Family::V4), port), "/healthz").await {
            Ok(answer) => {
                let weight = answer.header("X-Load-Balancing-Endpoint-Weight").unwrap_or("?");
                format!("{}, {weight} endpoint(s)", answer.status)
            }
            Err(_) => "no answer".to_owned(),
        };
        let seen = health.iter().find(|target| target.node == node.name && target.address.is_ipv4());
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

/// Moves an endpoint back and forth, and deletes a pod, under one kind of steering.
async fn show_moves(test: &TestContext, pods: &mut [Pod], mode: &str) -> Result<MoveTimes> {
    chapter(&format!("Endpoints move: how soon does the edge follow under {mode} steering?"));
    test.patch(
        "web",
        serde_json::json!({ "metadata": { "annotations": { steerage_model::names::STEERING: mode } } }),
    )
    .await?;
    let nodes: Vec<_> = test.nodes().into_iter().take(2).collect();
    let writes = edge::writes(test.client()).await?;
    let vips = test.wait_vips("web").await?;
    test.set_ready(&pods[1], false).await?;
    let first = nodes.first().context("no node")?.name.as_str();
    if mode == "api" {
        test.wait_targets("web", &[first]).await?;
    } else {
        test.wait_healthy("web", &[first]).await?;
    }
    let following = moves::measure_moves(test, &nodes, pods, vips, MOVES, |count, joined, left| {
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
        edge::writes(test.client()).await? - writes
    );
    for pod in pods.iter_mut() {
        test.set_ready(pod, true).await?;
    }
    let victim = pods.first().context("no pod")?.clone();
    let start = Instant::now();
    let lost = kill_pod(test, &victim, vips).await?;
    println!(
        "  a pod is deleted: {lost} of the connections opened in the next {} s failed",
        start.elapsed().as_secs()
    );
    let node = victim.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
    pods[0] = test.backend(&victim.name_any(), "echo", &node, true, 0).await?;
    Ok(following)
}

/// Deletes a pod while a client opens connections; returns how many of them failed.
async fn kill_pod(test: &TestContext, victim: &Pod, vips: Vips) -> Result<usize> {
    let to = vips.at(V4, PORT);
    let probe = async {
        let mut failed = 0;
        for _ in 0..100 {
            failed += usize::from(net::get(to, "/hostname").await.is_err());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        failed
    };
    let (failed, ended) = tokio::join!(probe, test.delete_pod(victim, true));
    ended?;
    Ok(failed)
}

fn summary(rows: &[(&str, MoveTimes)]) {
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

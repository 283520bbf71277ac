// SPDX-License-Identifier: Apache-2.0
//! How soon the edge follows an endpoint: moves from node to node with each steering, at the same time, timed on the nodes'
//! interfaces.
//!
//! A move makes the endpoint on one node ready and then the one on the other unready. Time runs from the `EndpointSlice`'s
//! change, as a watch of the test's own sees it, to the first datagram at the node that joined and the last at the one that left.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt;
use kube_runtime::{WatchStreamExt as _, watcher};
use steerage_model::Family::V4;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::{interval, sleep, timeout};

use crate::cluster::Host;
use crate::net;
use crate::pods;
use crate::report::{ms, percentile};
use crate::services::{PORT, ServiceBuilder, Vips};
use crate::sniff::Sniffer;
use crate::test_context::TestContext;
use steerage_meter::capture::now;

/// With a steering that hears of endpoints from the controller.
const FAST_MOVES: usize = 50;
/// Fewer, since each waits for several health checks on both nodes.
const HEALTH_CHECK_MOVES: usize = 25;
/// Between two health checks; shorter than the default, so that the moves take less time. Thresholds are the default.
const INTERVAL: &str = "250ms";
/// Between two datagrams, each from a port of its own.
const EVERY: Duration = Duration::from_millis(5);
/// Silence of this length at a node means that it has left.
const SILENCE: Duration = Duration::from_millis(150);
/// How long a move may take.
const LIMIT: Duration = Duration::from_secs(20);

pub(super) async fn all_steerings_follow_endpoint_moves(test: Arc<TestContext>) -> Result<()> {
    let (api, fused, health_check) = tokio::try_join!(
        moves_with(&test, "api", FAST_MOVES),
        moves_with(&test, "fused", FAST_MOVES),
        moves_with(&test, "health-check", HEALTH_CHECK_MOVES)
    )?;
    let all = [("api", api), ("fused", fused), ("health-check", health_check)];
    for (mode, MoveTimes { mut joined, mut left }) in all {
        for (what, times) in [("joins", &mut joined), ("leaves", &mut left)] {
            times.sort_unstable();
            let mode = format!("{mode}, health checks every {INTERVAL}");
            let mut row = vec![mode, what.to_owned(), times.len().to_string()];
            row.extend([50, 90, 99, 100].map(|percent| ms(percentile(times, percent))));
            let columns = ["steering", "a target", "moves", "p50 ms", "p90 ms", "p99 ms", "max ms"];
            test.suite.report.row(
                "From an EndpointSlice's change to the edge's first or last packet",
                &columns,
                row,
            );
        }
    }
    Ok(())
}

async fn moves_with(test: &TestContext, mode: &str, moves: usize) -> Result<MoveTimes> {
    let nodes: Vec<_> = test.nodes().into_iter().take(2).collect();
    let mut pods = Vec::new();
    for (node, ready) in nodes.iter().zip([true, false]) {
        pods.push(test.backend(&format!("{mode}-on-{}", node.name), mode, &node.name, ready, 0).await?);
    }
    let spec = ServiceBuilder::new(mode, mode)
        .steered(mode)
        .annotated("steerage.dev/health-check-interval", INTERVAL);
    let (_, vips) = test.serve(&spec).await?;
    measure_moves(test, &nodes, &pods, vips, moves, |_, _, _| ()).await
}

/// How long the edge took for each move.
pub(crate) struct MoveTimes {
    /// To the first packet at the node that joined.
    pub(crate) joined: Vec<Duration>,
    /// To the last packet at the node that left.
    pub(crate) left: Vec<Duration>,
}

/// Moves an endpoint between two nodes, whose pods are given in the nodes' order. At first only the first node's pod is ready.
/// Reports each move as it ends.
pub(crate) async fn measure_moves(
    test: &TestContext,
    nodes: &[Host],
    pods: &[Pod],
    vips: Vips,
    moves: usize,
    mut report: impl FnMut(usize, Duration, Duration),
) -> Result<MoveTimes> {
    ensure!(nodes.len() == 2 && pods.len() == 2, "this takes two nodes");
    let IpAddr::V4(vip) = vips.ipv4 else { anyhow::bail!("{:?} is no IPv4 address", vips.ipv4) };
    let mut changes = ready_pods(test, pods);
    let sniffer = Sniffer::start(nodes, vip)?;
    let stop = Arc::new(AtomicBool::new(false));
    let probes = tokio::spawn(send_datagrams(vips.at(V4, PORT), Arc::clone(&stop)));
    let mut times = MoveTimes { joined: Vec::new(), left: Vec::new() };
    let work = async {
        for count in 0..moves {
            let (joined, left) = measure_move(test, pods, count, &mut changes, &sniffer)
                .await
                .with_context(|| format!("move {count}"))?;
            report(count, joined, left);
            times.joined.push(joined);
            times.left.push(left);
        }
        anyhow::Ok(())
    };
    let outcome = work.await;
    stop.store(true, Ordering::Relaxed);
    probes.await??;
    outcome.map(|()| times)
}

async fn measure_move(
    test: &TestContext,
    pods: &[Pod],
    count: usize,
    changes: &mut mpsc::UnboundedReceiver<(Duration, Vec<String>)>,
    sniffer: &Sniffer,
) -> Result<(Duration, Duration)> {
    let (to, from) = ((count + 1) % 2, count % 2);
    pods::set_ready(test.client(), &pods[to], true).await?;
    let start = changed(changes, |ready| ready.contains(&pods[to].name_any())).await?;
    let joined = first_arrival(sniffer, start, to).await?;
    pods::set_ready(test.client(), &pods[from], false).await?;
    let start = changed(changes, |ready| !ready.contains(&pods[from].name_any())).await?;
    Ok((joined, last_arrival(sniffer, start, from).await?))
}

async fn first_arrival(sniffer: &Sniffer, start: Duration, node: usize) -> Result<Duration> {
    let end = start + LIMIT;
    while now() < end {
        if let Some((at, _)) = sniffer.since(start).into_iter().find(|(_, seen)| *seen == node) {
            return Ok(at.saturating_sub(start));
        }
        sleep(Duration::from_millis(10)).await;
    }
    anyhow::bail!("no packet reaches the node that joined")
}

async fn last_arrival(sniffer: &Sniffer, start: Duration, node: usize) -> Result<Duration> {
    let end = start + LIMIT;
    while now() < end {
        let seen = sniffer.since(start);
        let last = seen.iter().rev().find(|(_, at)| *at == node).map_or(start, |(at, _)| *at);
        // Packets at the other node prove that the sender did not just pause.
        let others = seen.iter().filter(|(at, _)| *at > last).count();
        if now().saturating_sub(last) > SILENCE && others > 20 {
            return Ok(last.saturating_sub(start));
        }
        sleep(Duration::from_millis(10)).await;
    }
    anyhow::bail!("packets still reach the node that left")
}

async fn changed(
    changes: &mut mpsc::UnboundedReceiver<(Duration, Vec<String>)>,
    fits: impl Fn(&[String]) -> bool,
) -> Result<Duration> {
    let wait = async {
        while let Some((at, ready)) = changes.recv().await {
            if fits(&ready) {
                return Ok(at);
            }
        }
        anyhow::bail!("the watch of EndpointSlices ended")
    };
    timeout(LIMIT, wait).await.context("the EndpointSlice does not change")?
}

/// The names of the ready ones among these pods, whenever the IPv4 `EndpointSlice` with any of them changes.
fn ready_pods(test: &TestContext, pods: &[Pod]) -> mpsc::UnboundedReceiver<(Duration, Vec<String>)> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let slices = test.api::<EndpointSlice>();
    let pods: Vec<_> = pods.iter().map(ResourceExt::name_any).collect();
    tokio::spawn(async move {
        let stream = watcher(slices, watcher::Config::default()).default_backoff().applied_objects();
        let mut stream = stream.boxed();
        while let Some(slice) = stream.next().await {
            let Ok(slice) = slice else { continue };
            if slice.address_type != "IPv4" {
                continue;
            }
            let endpoints = slice.endpoints.into_iter().flatten().filter_map(|endpoint| {
                let name = endpoint.target_ref?.name?;
                pods.contains(&name)
                    .then(|| (name, endpoint.conditions.and_then(|of| of.ready) == Some(true)))
            });
            let endpoints: Vec<_> = endpoints.collect();
            if endpoints.is_empty() {
                continue;
            }
            let ready =
                endpoints.into_iter().filter_map(|(name, is_ready)| is_ready.then_some(name)).collect();
            if sender.send((now(), ready)).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Sends datagrams, each from a port of its own, until told to stop.
async fn send_datagrams(to: std::net::SocketAddr, stop: Arc<AtomicBool>) -> Result<()> {
    let mut ticks = interval(EVERY);
    // Kept open for a while, so that answers cause no ICMP error and ports are not reused at once.
    let mut sockets = VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        let socket = UdpSocket::bind(net::any(to, 0)).await?;
        // An ICMP error for an earlier datagram may be reported here.
        let _ = socket.send_to(b"hostname", to).await;
        sockets.push_back(socket);
        if sockets.len() > 100 {
            sockets.pop_front();
        }
    }
    Ok(())
}

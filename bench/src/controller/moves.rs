// SPDX-License-Identifier: Apache-2.0
//! Endpoints that move from node to node, and how soon the targets follow: from the API server's response to the change, to the
//! event in which the load balancer has the new targets.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::json;
use steerage_edge_api::EdgeLoadBalancer;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::objects;
use super::world::{NAMESPACE, World};

/// How long the last targets may take.
const LIMIT: Duration = Duration::from_secs(30);

/// What was measured.
pub(super) struct Moved {
    /// Changes per second that the API server took.
    pub(super) per_second: f64,
    /// One for each change.
    pub(super) delays: Vec<Duration>,
}

/// Changes whose targets were not seen yet, by Service: the wanted nodes, and when the API server answered.
type Pending = Arc<Mutex<HashMap<String, (Vec<String>, Instant)>>>;

/// Moves the endpoints of one Service with api steering after the other.
pub(super) fn run(world: &World, rate: u32, period: Duration) -> Result<Moved> {
    world.runtime.block_on(async {
        let pending = Pending::default();
        let (seen, delays) = tokio::sync::mpsc::unbounded_channel();
        let watching = tokio::spawn(watch(world.client.clone(), Arc::clone(&pending), seen));
        let slices: Api<EndpointSlice> = Api::namespaced(world.client.clone(), NAMESPACE);
        let mut ticks = interval(Duration::from_secs(1) / rate);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let (begun, mut count) = (Instant::now(), 0_u32);
        let by_api = world.services().div_ceil(2);
        while begun.elapsed() < period {
            ticks.tick().await;
            let (service, round) = (count % by_api * 2, 1 + count / by_api);
            let nodes = objects::endpoint_nodes(service, round, world.endpoints, world.nodes());
            let name = objects::service_name(service);
            let change = Patch::Merge(json!({"endpoints": objects::endpoints(service, &nodes)}));
            lock(&pending).insert(name.clone(), (nodes.clone(), Instant::now()));
            slices.patch_metadata(&name, &PatchParams::default(), &change).await?;
            // The event may be faster than the response; then it counts from the request.
            if let Some(change) = lock(&pending).get_mut(&name).filter(|change| change.0 == nodes) {
                change.1 = Instant::now();
            }
            count += 1;
        }
        let per_second = f64::from(count) / begun.elapsed().as_secs_f64();
        let all_seen = async {
            while !lock(&pending).is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LIMIT, all_seen).await.context("some targets never followed")?;
        watching.abort();
        let mut delays = delays;
        let mut list = Vec::new();
        while let Ok(delay) = delays.try_recv() {
            list.push(delay);
        }
        // A Service that moved again before its targets were seen counts once.
        ensure!(!list.is_empty(), "no change was seen");
        Ok(Moved { per_second, delays: list })
    })
}

async fn watch(
    client: kube::Client,
    pending: Pending,
    seen: tokio::sync::mpsc::UnboundedSender<Duration>,
) -> Result<()> {
    let balancers: Api<EdgeLoadBalancer> = Api::namespaced(client, NAMESPACE);
    let mut version = balancers
        .list_metadata(&ListParams::default().limit(1))
        .await?
        .metadata
        .resource_version
        .unwrap_or_default();
    loop {
        let mut events = balancers.watch(&WatchParams::default(), &version).await?.boxed();
        while let Some(event) = events.next().await {
            let (WatchEvent::Modified(balancer) | WatchEvent::Added(balancer)) = event? else { continue };
            version = balancer.metadata.resource_version.clone().unwrap_or(version);
            let mut nodes: Vec<String> =
                balancer.spec.targets.into_iter().map(|target| target.node).collect();
            nodes.sort_unstable();
            let mut pending = lock(&pending);
            if let Some((wanted, at)) = pending.get(&balancer.spec.service.name)
                && *wanted == nodes
            {
                let _ = seen.send(at.elapsed());
                pending.remove(&balancer.spec.service.name);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

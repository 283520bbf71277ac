// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use http::Response;
use serde_json::Value;
use steerage_provider_api::{
    Compare, GroupTargets, LoadBalancer, Outcome, Progress, Provider as _, Target, TargetSet,
};
use tokio::time::sleep;

use super::*;
use crate::client::{Call, Calls};
use crate::config::Config;
use crate::config::tests::config;
use crate::desired::tests::web;
use crate::error::{CallError, Result};
use crate::object::Kind;
use crate::scripted::Scripted;

/// A cloud whose VMs of the zone `r-b` may not be read.
#[derive(Clone)]
struct Partial {
    cloud: Scripted,
    is_broken: Arc<AtomicBool>,
    /// Requests for the endpoints of a group.
    looks: Arc<AtomicUsize>,
}

#[async_trait]
impl Calls for Partial {
    async fn send(&self, call: Call) -> Result<Value> {
        if self.is_broken.load(Ordering::Relaxed) && call.path.ends_with("zones/r-b/instances") {
            return Err(CallError::answered(call.action, &Response::builder().status(503).body("").unwrap()));
        }
        if call.action == "networkEndpointGroups.listNetworkEndpoints" {
            self.looks.fetch_add(1, Ordering::Relaxed);
        }
        self.cloud.send(call).await
    }
}

impl Partial {
    /// With `node-0` in the zone `r-a`, and `node-1` in `r-b`.
    fn new() -> Self {
        let cloud = Scripted::new();
        cloud.set_machine("r-a", "node-0", true);
        cloud.set_machine("r-b", "node-1", true);
        Self { cloud, is_broken: Arc::default(), looks: Arc::default() }
    }

    fn provider(&self) -> Gce {
        Gce::over(Config { poll: Duration::from_millis(500), ..config() }, Arc::new(self.clone()))
    }

    /// The VMs to which packets go, or will go when all that runs has ended.
    fn serving(&self) -> Vec<String> {
        let all = self.cloud.resources();
        let groups = all.iter().filter(|(_, found)| found.kind == Kind::Group);
        groups.flat_map(|(path, _)| self.cloud.staying(path)).collect()
    }
}

fn nodes(names: &[&str]) -> TargetSet {
    let target = |name: &&str| {
        let zone = if name.ends_with('1') { "r-b" } else { "r-a" };
        Target {
            node: (*name).to_owned(),
            addresses: vec![[10, 0, 0, 1].into()],
            provider_id: Some(format!("gce://p/{zone}/{name}")),
            zone: Some(zone.to_owned()),
            pod_cidrs: Vec::new(),
            weight: 1,
        }
    };
    TargetSet::own(names.iter().map(target))
}

/// Applies until it is complete. Something serves after each call, once it has.
async fn complete(cloud: &Partial, gce: &Gce, lb: &LoadBalancer) -> Outcome {
    let mut has_served = !cloud.serving().is_empty();
    for _ in 0..50 {
        let outcome = gce.apply(lb, Compare::Remembered).await.unwrap();
        let serves = !cloud.serving().is_empty();
        assert!(serves || !has_served, "nothing serves any more: {outcome:?}");
        has_served |= serves;
        match outcome.progress {
            Progress::Done => return outcome,
            Progress::Again(after) => sleep(after).await,
        }
    }
    panic!("it is never complete");
}

#[tokio::test(start_paused = true)]
async fn last_endpoint_stays_while_the_zone_of_the_next_one_cannot_be_read() {
    let cloud = Partial::new();
    let gce = cloud.provider();
    complete(&cloud, &gce, &web().with_nodes(nodes(&["node-0"]))).await;
    cloud.is_broken.store(true, Ordering::Relaxed);
    let moved = web().with_nodes(nodes(&["node-1"]));
    let outcome = complete(&cloud, &gce, &moved).await;
    assert_eq!(cloud.serving(), ["node-0"]);
    assert_eq!(outcome.refused.len(), 1, "it is reported: {outcome:?}");
    let targets = GroupTargets::of_nodes(moved.nodes());
    gce.set_targets(&moved.owner, &targets).await.unwrap();
    assert_eq!(cloud.serving(), ["node-0"], "also while the structure is refused");
    cloud.is_broken.store(false, Ordering::Relaxed);
    sleep(outcome.retry_refused.unwrap()).await;
    complete(&cloud, &gce, &moved).await;
    assert_eq!(cloud.serving(), ["node-1"]);
    complete_without(&cloud, &gce).await;
}

/// The last endpoint of a Service that has none leaves.
async fn complete_without(cloud: &Partial, gce: &Gce) {
    for _ in 0..20 {
        let outcome = gce.apply(&web(), Compare::Remembered).await.unwrap();
        match outcome.progress {
            Progress::Done => break,
            Progress::Again(after) => sleep(after).await,
        }
    }
    assert!(cloud.serving().is_empty());
}

/// As when its VM is made anew under its name, or somebody detached it.
#[tokio::test(start_paused = true)]
async fn endpoint_that_is_gone_is_attached_again_before_another_one_leaves() {
    for is_refused in [false, true] {
        let cloud = Partial::new();
        let gce = cloud.provider();
        complete(&cloud, &gce, &web().with_nodes(nodes(&["node-0", "node-1"]))).await;
        sleep(Duration::from_mins(1)).await;
        for (path, found) in cloud.cloud.resources() {
            if found.endpoints.contains_key("node-1") {
                assert!(cloud.cloud.change(&path, |found| {
                    found.endpoints.clear();
                    Some(())
                }));
            }
        }
        let left = web().with_nodes(nodes(&["node-1"]));
        if is_refused {
            let targets = GroupTargets::of_nodes(left.nodes());
            for _ in 0..20 {
                gce.set_targets(&left.owner, &targets).await.unwrap();
                assert!(!cloud.serving().is_empty(), "nothing serves any more");
                sleep(Duration::from_secs(1)).await;
            }
        } else {
            complete(&cloud, &gce, &left).await;
        }
        assert_eq!(cloud.serving(), ["node-1"], "refused: {is_refused}");
    }
}

/// Many Services would wait for that while a node leaves.
#[tokio::test(start_paused = true)]
async fn nothing_is_read_before_an_endpoint_leaves_where_many_stay() {
    let cloud = Partial::new();
    let gce = cloud.provider();
    let all = ["node-0", "node-2", "node-4", "node-6", "node-8"];
    for name in all {
        cloud.cloud.set_machine("r-a", name, true);
    }
    complete(&cloud, &gce, &web().with_nodes(nodes(&all))).await;
    for (stay, looks) in [(4, 0), (3, 1), (2, 1)] {
        sleep(Duration::from_mins(1)).await;
        cloud.looks.store(0, Ordering::Relaxed);
        complete(&cloud, &gce, &web().with_nodes(nodes(&all[..stay]))).await;
        assert_eq!(cloud.serving(), all[..stay]);
        assert_eq!(cloud.looks.load(Ordering::Relaxed), looks, "{stay} stay");
    }
}

/// A process ended before it said the address, and the Service is refused since then.
#[tokio::test(start_paused = true)]
async fn address_that_serves_is_published_of_a_refused_service() {
    let cloud = Partial::new();
    let lb = web().with_nodes(nodes(&["node-0"]));
    let ingress = complete(&cloud, &cloud.provider(), &lb).await.ingress;
    let gce = cloud.provider();
    let mut outcome = gce.set_targets(&lb.owner, &lb.targets()).await.unwrap();
    for _ in 0..5 {
        sleep(Duration::from_secs(1)).await;
        outcome = gce.set_targets(&lb.owner, &lb.targets()).await.unwrap();
    }
    assert_eq!((outcome.progress, outcome.ingress), (Progress::Done, ingress));
}

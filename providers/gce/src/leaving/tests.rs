// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use http::Response;
use serde_json::{Map, Value};
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
use crate::object::{Kind, url};
use crate::scripted::{SUBNETS, Scripted};

/// A cloud whose VMs of the zone `r-b` may not be read.
#[derive(Clone)]
struct Partial {
    cloud: Scripted,
    is_broken: Arc<AtomicBool>,
    /// Whether `node-0` is in another subnet than the other VMs, so that its group goes with it.
    has_subnets: bool,
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
        let is_list_of_vms = call.action == "instances.list";
        let mut answer = self.cloud.send(call).await?;
        if is_list_of_vms && self.has_subnets {
            let all = answer["items"].as_array_mut().into_iter().flatten();
            for vm in all.filter(|vm| vm["name"] == "node-0") {
                vm["networkInterfaces"][0]["subnetwork"] = url(SUBNETS[1].0).into();
            }
        }
        Ok(answer)
    }
}

impl Partial {
    /// With `node-0` and `node-2` in the zone `r-a`, and `node-1` in `r-b`.
    fn new(has_subnets: bool) -> Self {
        let cloud = Scripted::new();
        for (zone, name) in [("r-a", "node-0"), ("r-a", "node-2"), ("r-b", "node-1")] {
            cloud.set_machine(zone, name, true);
        }
        Self { cloud, is_broken: Arc::default(), has_subnets, looks: Arc::default() }
    }

    fn provider(&self) -> Gce {
        Gce::over(Config { poll: Duration::from_millis(500), ..config() }, Arc::new(self.clone()))
    }

    /// The VMs to which packets go, or will go when all that runs has ended.
    fn serving(&self) -> Vec<String> {
        let all = self.cloud.resources();
        let backends = |data: &Map<String, Value>| Tree::backends(&Value::from(data.clone()));
        let services = all.values().filter(|found| found.kind == Kind::BackendService);
        let groups: BTreeSet<String> = services
            .flat_map(|service| {
                let next = service.changing.as_ref().map(backends);
                let is_staying = move |path: &String| next.as_ref().is_none_or(|next| next.contains(path));
                backends(&service.data).into_iter().filter(is_staying)
            })
            .collect();
        let mut vms: Vec<String> = groups.iter().flat_map(|path| self.cloud.staying(path)).collect();
        vms.sort();
        vms
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
async fn last_endpoints_stay_while_the_zone_of_the_next_one_cannot_be_read() {
    for has_subnets in [false, true] {
        let cloud = Partial::new(has_subnets);
        let gce = cloud.provider();
        complete(&cloud, &gce, &web().with_nodes(nodes(&["node-0", "node-2"]))).await;
        cloud.is_broken.store(true, Ordering::Relaxed);
        let moved = web().with_nodes(nodes(&["node-1"]));
        let outcome = complete(&cloud, &gce, &moved).await;
        assert_eq!(cloud.serving(), ["node-0", "node-2"], "several subnets: {has_subnets}");
        assert_eq!(outcome.refused.len(), 1, "it is reported: {outcome:?}");
        let targets = GroupTargets::of_nodes(moved.nodes());
        gce.set_targets(&moved.owner, &targets).await.unwrap();
        assert_eq!(cloud.serving(), ["node-0", "node-2"], "also while the structure is refused");
        cloud.is_broken.store(false, Ordering::Relaxed);
        sleep(outcome.retry_refused.unwrap()).await;
        complete(&cloud, &gce, &moved).await;
        assert_eq!(cloud.serving(), ["node-1"], "several subnets: {has_subnets}");
        complete_without(&cloud, &gce).await;
    }
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
    for (is_refused, has_subnets) in [(false, false), (false, true), (true, false), (true, true)] {
        let cloud = Partial::new(has_subnets);
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
        assert_eq!(cloud.serving(), ["node-1"], "refused: {is_refused}, several subnets: {has_subnets}");
    }
}

/// Many Services would wait for that while a node leaves.
#[tokio::test(start_paused = true)]
async fn nothing_is_read_before_an_endpoint_leaves_where_many_stay() {
    let cloud = Partial::new(false);
    let gce = cloud.provider();
    let all = ["node-0", "node-2", "node-4", "node-6", "node-8"];
    for name in &all[2..] {
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
    let cloud = Partial::new(false);
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

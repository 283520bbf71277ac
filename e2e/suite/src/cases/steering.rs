// SPDX-License-Identifier: Apache-2.0
//! The nodes that a load balancer may send to, with each steering.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use steerage_model::Family::V4;
use steerage_model::{annotations, names};
use tokio::time::sleep;

use crate::edge;
use crate::net;
use crate::services::{PORT, ServiceBuilder};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// Nodes with a ready endpoint; if none anywhere is ready, nodes with a serving and terminating one.
pub(super) async fn api_targets_are_exactly_the_members(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { anyhow::bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    test.expose(&ServiceBuilder::new("web", "web").steered("api")).await?;
    test.wait_targets("web", &[]).await?;
    let one = test.backend("one", "web", first, true, 0).await?;
    test.wait_targets("web", &[first]).await?;
    let two = test.backend("two", "web", second, false, 20).await?;
    test.wait_targets("web", &[first]).await?;
    test.set_ready(&two, true).await?;
    test.wait_targets("web", &[first, second]).await?;
    test.set_ready(&one, false).await?;
    test.wait_targets("web", &[second]).await?;
    // A serving and terminating endpoint counts only while none is ready.
    test.delete_pod(&two, false).await?;
    let vip = test.wait_vips("web").await?.at(V4, PORT);
    net::only_page(vip, "/hostname").await?;
    test.wait_targets("web", &[second]).await?;
    test.set_ready(&one, true).await?;
    test.wait_targets("web", &[first]).await?;
    test.delete_pod(&one, true).await?;
    test.wait_targets("web", &[second]).await
}

pub(super) async fn health_check_keeps_all_nodes_and_writes_nothing(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { anyhow::bail!("this takes two nodes") };
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    test.expose(&ServiceBuilder::new("web", "web").steered("health-check")).await?;
    test.wait_targets("web", &all).await?;
    test.wait_healthy("web", &[first]).await?;
    let before = wait_no_writes(&test).await?;
    test.set_ready(&two, true).await?;
    test.wait_healthy("web", &[first, second]).await?;
    test.set_ready(&one, false).await?;
    test.wait_healthy("web", &[second]).await?;
    test.set_ready(&one, true).await?;
    test.wait_healthy("web", &[first, second]).await?;
    test.delete_pod(&two, true).await?;
    test.wait_healthy("web", &[first]).await?;
    test.wait_targets("web", &all).await?;
    let writes = edge::writes(test.client()).await? - before;
    ensure!(writes == 0, "{writes} writes while endpoints moved");
    Ok(())
}

/// The targets are those of `health-check` steering all the time, also when the steering changes, and the load balancer has the names of
/// the nodes with an endpoint.
pub(super) async fn fused_keeps_all_nodes_and_names_those_with_an_endpoint(
    test: Arc<TestContext>,
) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { anyhow::bail!("this takes two nodes") };
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 20).await?;
    test.expose(&ServiceBuilder::new("web", "web").steered("health-check")).await?;
    test.wait_targets("web", &all).await?;
    test.wait_healthy("web", &[first]).await?;
    test.wait_endpoint_nodes("web", None).await?;
    let steer = async |mode: &str| {
        test.patch("web", json!({ "metadata": { "annotations": { names::STEERING: mode } } })).await
    };
    steer("fused").await?;
    test.wait_endpoint_nodes("web", Some(&[first])).await?;
    test.set_ready(&two, true).await?;
    test.wait_endpoint_nodes("web", Some(&[first, second])).await?;
    test.wait_healthy("web", &[first, second]).await?;
    test.set_ready(&one, false).await?;
    test.wait_endpoint_nodes("web", Some(&[second])).await?;
    test.wait_healthy("web", &[second]).await?;
    // A serving and terminating endpoint counts only while none is ready.
    test.delete_pod(&two, false).await?;
    let vip = test.wait_vips("web").await?.at(V4, PORT);
    net::only_page(vip, "/hostname").await?;
    test.wait_endpoint_nodes("web", Some(&[second])).await?;
    test.set_ready(&one, true).await?;
    test.wait_endpoint_nodes("web", Some(&[first])).await?;
    test.wait_healthy("web", &[first]).await?;
    test.wait_targets("web", &all).await?;
    steer("health-check").await?;
    test.wait_endpoint_nodes("web", None).await?;
    test.wait_healthy("web", &[first]).await
}

/// The number of writes once writes for earlier Services have ended.
pub(super) async fn wait_no_writes(test: &TestContext) -> Result<u64> {
    let mut last = 0;
    until("an end of other writes to the edge", TIMEOUT, async || -> Result<u64> {
        let now = edge::writes(test.client()).await?;
        let same = now == last;
        last = now;
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        ensure!(same, "{now} writes");
        Ok(now)
    })
    .await
}

pub(super) async fn excluded_node_leaves_the_targets_of_all_steerings(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let Some((&last, rest)) = all.split_last() else { anyhow::bail!("no nodes") };
    let modes = ["api", "health-check", "fused"];
    for mode in modes {
        let spec = ServiceBuilder::new(&format!("exclude-{mode}"), ECHO).steered(mode);
        test.serve(&spec).await?;
        test.wait_targets(&format!("exclude-{mode}"), &all).await?;
    }
    let api: Api<Node> = Api::all(test.client().clone());
    let label = async |value: Option<&str>| {
        let change = json!({ "metadata": { "labels": { names::EXCLUDE_LABEL: value } } });
        api.patch(last, &PatchParams::default(), &Patch::Merge(change)).await
    };
    label(Some("")).await?;
    let wait = async |targets: &[&str]| -> Result<()> {
        for mode in modes {
            test.wait_targets(&format!("exclude-{mode}"), targets).await?;
        }
        Ok(())
    };
    let left = wait(rest).await;
    label(None).await?;
    left?;
    wait(&all).await
}

/// Targets follow the labels. Where no node has them any more, the last that had them stays, unless endpoints decide.
pub(super) async fn labels_choose_the_target_nodes_of_both_steerings(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { anyhow::bail!("this takes two nodes") };
    let api: Api<Node> = Api::all(test.client().clone());
    let label = async |node: &str, value: Option<&str>| {
        let labels = json!({ "e2e-pool": value, "e2e-disk": value.map(|_| "") });
        let change = json!({ "metadata": { "labels": labels } });
        api.patch(node, &PatchParams::default(), &Patch::Merge(change)).await
    };
    let wait = async |targets: [&[&str]; 2], degraded: &str| -> Result<()> {
        for (mode, targets) in ["api", "health-check"].into_iter().zip(targets) {
            let name = format!("chosen-{mode}");
            test.wait_targets(&name, targets).await?;
            let (reason, _) = test.wait_condition(&name, names::DEGRADED, degraded).await?;
            let expected = if degraded == "True" { "NoNodeWithLabels" } else { "AsExpected" };
            ensure!(reason == expected, "the reason of {name} is {reason}");
        }
        Ok(())
    };
    label(first, Some("web")).await?;
    // The controller must see it before the Services: it would hold the removal of two of three targets for a while.
    sleep(Duration::from_secs(1)).await;
    let followed = async {
        for mode in ["api", "health-check"] {
            let spec = ServiceBuilder::new(&format!("chosen-{mode}"), ECHO).steered(mode);
            test.serve(&spec.annotated(annotations::TARGET_NODE_LABELS, "e2e-pool=web,e2e-disk=")).await?;
        }
        wait([&[first], &[first]], "False").await?;
        label(second, Some("web")).await?;
        wait([&[first, second], &[first, second]], "False").await?;
        label(second, None).await?;
        wait([&[first], &[first]], "False").await
    };
    let followed = followed.await;
    for node in [first, second] {
        label(node, None).await?;
    }
    followed?;
    wait([&all, &[first]], "True").await
}

// SPDX-License-Identifier: Apache-2.0
//! Which nodes a load balancer may send to, under both kinds of steering.

use std::sync::Arc;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use steerage_model::Family::V4;
use steerage_model::names;

use crate::edge;
use crate::net;
use crate::scene::Scene;
use crate::services::{PORT, Spec};
use crate::suite::ECHO;
use crate::wait::{SOON, until};

/// Nodes with a ready endpoint; if none anywhere is ready, nodes with a serving and terminating one.
pub(super) async fn api_targets_are_exactly_the_members(scene: Arc<Scene>) -> Result<()> {
    let nodes = scene.nodes();
    let [first, second, ..] = &nodes[..] else { anyhow::bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    scene.expose(&Spec::new("web", "web").steered("api")).await?;
    scene.targets("web", &[]).await?;
    let one = scene.backend("one", "web", first, true, 0).await?;
    scene.targets("web", &[first]).await?;
    let two = scene.backend("two", "web", second, false, 20).await?;
    scene.targets("web", &[first]).await?;
    scene.set_ready(&two, true).await?;
    scene.targets("web", &[first, second]).await?;
    scene.set_ready(&one, false).await?;
    scene.targets("web", &[second]).await?;
    // Terminating and serving: a member only while nobody is ready.
    scene.end(&two, false).await?;
    let vip = scene.vips("web").await?.at(V4, PORT);
    net::page(vip, "/hostname").await?;
    scene.targets("web", &[second]).await?;
    scene.set_ready(&one, true).await?;
    scene.targets("web", &[first]).await?;
    scene.end(&one, true).await?;
    scene.targets("web", &[second]).await
}

pub(super) async fn health_check_keeps_all_nodes_and_writes_nothing(scene: Arc<Scene>) -> Result<()> {
    let nodes = scene.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { anyhow::bail!("this takes two nodes") };
    let one = scene.backend("one", "web", first, true, 0).await?;
    let two = scene.backend("two", "web", second, false, 0).await?;
    scene.expose(&Spec::new("web", "web").steered("health-check")).await?;
    scene.targets("web", &all).await?;
    scene.healthy("web", &[first]).await?;
    let before = quiet(&scene).await?;
    scene.set_ready(&two, true).await?;
    scene.healthy("web", &[first, second]).await?;
    scene.set_ready(&one, false).await?;
    scene.healthy("web", &[second]).await?;
    scene.set_ready(&one, true).await?;
    scene.healthy("web", &[first, second]).await?;
    scene.end(&two, true).await?;
    scene.healthy("web", &[first]).await?;
    scene.targets("web", &all).await?;
    let writes = edge::writes(scene.client()).await? - before;
    ensure!(writes == 0, "{writes} writes while endpoints moved");
    Ok(())
}

/// The count of writes once those of other Services, which may still be on their way out, have ended.
pub(super) async fn quiet(scene: &Scene) -> Result<u64> {
    let mut last = 0;
    until("an end of other writes to the edge", SOON, async || -> Result<u64> {
        let now = edge::writes(scene.client()).await?;
        let same = now == last;
        last = now;
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        ensure!(same, "{now} writes");
        Ok(now)
    })
    .await
}

pub(super) async fn an_excluded_node_leaves_both_modes(scene: Arc<Scene>) -> Result<()> {
    let nodes = scene.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let Some((&last, rest)) = all.split_last() else { anyhow::bail!("no nodes") };
    for mode in ["api", "health-check"] {
        let spec = Spec::new(&format!("exclude-{mode}"), ECHO).steered(mode);
        scene.serve(&spec).await?;
        scene.targets(&format!("exclude-{mode}"), &all).await?;
    }
    let api: Api<Node> = Api::all(scene.client().clone());
    let label = async |value: Option<&str>| {
        let change = json!({ "metadata": { "labels": { names::EXCLUDE_LABEL: value } } });
        api.patch(last, &PatchParams::default(), &Patch::Merge(change)).await
    };
    label(Some("")).await?;
    let left = async {
        scene.targets("exclude-api", rest).await?;
        scene.targets("exclude-health-check", rest).await
    };
    let left = left.await;
    label(None).await?;
    left?;
    scene.targets("exclude-api", &all).await?;
    scene.targets("exclude-health-check", &all).await
}

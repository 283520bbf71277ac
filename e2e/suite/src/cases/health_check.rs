// SPDX-License-Identifier: Apache-2.0
//! The answers of every node on a Service's healthCheckNodePort, in both families.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use steerage_model::Family::{V4, V6};

use crate::net;
use crate::scene::Scene;
use crate::services::{PORT, Spec, health_port};
use crate::suite::ECHO;
use crate::wait::{SOON, holds, until};

/// Nodes without an endpoint fail on purpose.
pub(super) async fn status_weight_and_body_follow_the_endpoints(scene: Arc<Scene>) -> Result<()> {
    let nodes = scene.nodes();
    let [first, second, ..] = &nodes[..] else { anyhow::bail!("this takes two nodes") };
    let service = scene.create(&Spec::new("web", "web")).await?;
    counts(&scene, &service, &[]).await?;
    // An endpoint appears, and a second one beside it.
    let one = scene.backend("one", "web", &first.name, true, 0).await?;
    counts(&scene, &service, &[(&first.name, 1)]).await?;
    let two = scene.backend("two", "web", &first.name, true, 0).await?;
    counts(&scene, &service, &[(&first.name, 2)]).await?;
    // They move to another node.
    let three = scene.backend("three", "web", &second.name, true, 0).await?;
    scene.end(&one, true).await?;
    counts(&scene, &service, &[(&first.name, 1), (&second.name, 1)]).await?;
    scene.end(&two, true).await?;
    counts(&scene, &service, &[(&second.name, 1)]).await?;
    // The last becomes unready, ready, and vanishes.
    scene.set_ready(&three, false).await?;
    counts(&scene, &service, &[]).await?;
    scene.set_ready(&three, true).await?;
    counts(&scene, &service, &[(&second.name, 1)]).await?;
    scene.end(&three, true).await?;
    counts(&scene, &service, &[]).await
}

/// In `api` mode: under `health-check` the edge would use all nodes again once every check fails.
pub(super) async fn a_terminating_endpoint_serves_while_its_check_fails(scene: Arc<Scene>) -> Result<()> {
    let nodes = scene.nodes();
    let node = &nodes[0];
    let pod = scene.backend("last", "web", &node.name, true, 25).await?;
    let (service, vips) = scene.serve(&Spec::new("web", "web").steered("api")).await?;
    counts(&scene, &service, &[(&node.name, 1)]).await?;
    scene.end(&pod, false).await?;
    counts(&scene, &service, &[]).await?;
    holds("answers of a terminating backend", Duration::from_secs(5), async || {
        net::page(vips.at(V4, PORT), "/hostname").await?;
        net::page(vips.at(V6, PORT), "/hostname").await.map(drop)
    })
    .await
}

pub(super) async fn the_port_closes_with_the_policy(scene: Arc<Scene>) -> Result<()> {
    let service = scene.create(&Spec::new("health-policy", ECHO)).await?;
    let name = service.name_any();
    let all: Vec<_> = scene.nodes().into_iter().map(|node| node.name).collect();
    let all: Vec<_> = all.iter().map(|node| (node.as_str(), 1)).collect();
    counts(&scene, &service, &all).await?;
    let port = health_port(&service)?;
    scene.patch(&name, json!({ "spec": { "externalTrafficPolicy": "Cluster" } })).await?;
    for node in scene.nodes() {
        let to = SocketAddr::new(node.ipv4.into(), port);
        until(format!("a closed {to}"), SOON, async || match net::get(to, "/healthz").await {
            Ok(answer) if answer.status == 200 => Err(answer.body),
            _ => Ok(()),
        })
        .await?;
    }
    let service = scene.patch(&name, json!({ "spec": { "externalTrafficPolicy": "Local" } })).await?;
    counts(&scene, &service, &all).await
}

/// Returns when each node answers as its number of ready endpoints asks: 200 with that weight, or 503 with weight 0.
async fn counts(scene: &Scene, service: &Service, expected: &[(&str, u32)]) -> Result<()> {
    let port = health_port(service)?;
    for node in scene.nodes() {
        let count = expected.iter().find(|(name, _)| *name == node.name).map_or(0, |(_, count)| *count);
        for family in [V4, V6] {
            let to = SocketAddr::new(node.address(family), port);
            let what = format!("{count} local endpoints by /healthz of {} over {family}", node.name);
            until(what, SOON, async || answers(to, service, count).await).await?;
        }
    }
    Ok(())
}

async fn answers(to: SocketAddr, service: &Service, count: u32) -> Result<()> {
    let answer = net::get(to, "/healthz").await?;
    let status = if count > 0 { 200 } else { 503 };
    ensure!(answer.status == status, "{} {}", answer.status, answer.body);
    let weight = answer.header("X-Load-Balancing-Endpoint-Weight");
    ensure!(weight == Some(&count.to_string()), "weight {weight:?}");
    let body: Value = serde_json::from_str(&answer.body)?;
    let expected = json!({
        "service": { "namespace": service.namespace(), "name": service.name_any() },
        "localEndpoints": count,
        "serviceProxyHealthy": true,
    });
    ensure!(body == expected, "{body}");
    Ok(())
}

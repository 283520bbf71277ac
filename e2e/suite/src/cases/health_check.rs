// SPDX-License-Identifier: Apache-2.0
//! The answers of every node on a Service's `healthCheckNodePort`, in both families.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use steerage_model::Family::{V4, V6};

use crate::net;
use crate::services::{PORT, ServiceBuilder, health_port};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, holds, until};

pub(super) async fn status_weight_and_body_follow_the_endpoints(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { anyhow::bail!("this takes two nodes") };
    let service = test.create(&ServiceBuilder::new("web", "web")).await?;
    wait_endpoint_counts(&test, &service, &[]).await?;
    // An endpoint appears, and a second one beside it.
    let one = test.backend("one", "web", &first.name, true, 0).await?;
    wait_endpoint_counts(&test, &service, &[(&first.name, 1)]).await?;
    let two = test.backend("two", "web", &first.name, true, 0).await?;
    wait_endpoint_counts(&test, &service, &[(&first.name, 2)]).await?;
    // They move to another node.
    let three = test.backend("three", "web", &second.name, true, 0).await?;
    test.delete_pod(&one, true).await?;
    wait_endpoint_counts(&test, &service, &[(&first.name, 1), (&second.name, 1)]).await?;
    test.delete_pod(&two, true).await?;
    wait_endpoint_counts(&test, &service, &[(&second.name, 1)]).await?;
    // The last becomes unready, ready, and vanishes.
    test.set_ready(&three, false).await?;
    wait_endpoint_counts(&test, &service, &[]).await?;
    test.set_ready(&three, true).await?;
    wait_endpoint_counts(&test, &service, &[(&second.name, 1)]).await?;
    test.delete_pod(&three, true).await?;
    wait_endpoint_counts(&test, &service, &[]).await
}

/// Uses `api` steering: with `health-check` the edge uses all nodes once every check fails.
pub(super) async fn terminating_endpoint_serves_while_its_check_fails(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let node = &nodes[0];
    let pod = test.backend("last", "web", &node.name, true, 25).await?;
    let (service, vips) = test.serve(&ServiceBuilder::new("web", "web").steered("api")).await?;
    wait_endpoint_counts(&test, &service, &[(&node.name, 1)]).await?;
    test.delete_pod(&pod, false).await?;
    wait_endpoint_counts(&test, &service, &[]).await?;
    holds("answers of a terminating backend", Duration::from_secs(5), async || {
        net::only_page(vips.at(V4, PORT), "/hostname").await?;
        net::only_page(vips.at(V6, PORT), "/hostname").await.map(drop)
    })
    .await
}

pub(super) async fn port_closes_under_cluster_policy(test: Arc<TestContext>) -> Result<()> {
    let service = test.create(&ServiceBuilder::new("health-policy", ECHO)).await?;
    let name = service.name_any();
    let all: Vec<_> = test.nodes().into_iter().map(|node| node.name).collect();
    let all: Vec<_> = all.iter().map(|node| (node.as_str(), 1)).collect();
    wait_endpoint_counts(&test, &service, &all).await?;
    let port = health_port(&service)?;
    test.patch(&name, json!({ "spec": { "externalTrafficPolicy": "Cluster" } })).await?;
    for node in test.nodes() {
        let to = SocketAddr::new(node.ipv4.into(), port);
        until(format!("a closed {to}"), TIMEOUT, async || match net::get(to, "/healthz").await {
            Ok(answer) if answer.status == 200 => Err(answer.body),
            _ => Ok(()),
        })
        .await?;
    }
    let service = test.patch(&name, json!({ "spec": { "externalTrafficPolicy": "Local" } })).await?;
    wait_endpoint_counts(&test, &service, &all).await
}

/// Waits until each node's answer fits its number of ready endpoints: 200 with that weight, or 503 with weight 0.
async fn wait_endpoint_counts(test: &TestContext, service: &Service, expected: &[(&str, u32)]) -> Result<()> {
    let port = health_port(service)?;
    for node in test.nodes() {
        let count = expected.iter().find(|(name, _)| *name == node.name).map_or(0, |(_, count)| *count);
        for family in [V4, V6] {
            let to = SocketAddr::new(node.address(family), port);
            let what = format!("{count} local endpoints by /healthz of {} over {family}", node.name);
            until(what, TIMEOUT, async || answers_count(to, service, count).await).await?;
        }
    }
    Ok(())
}

async fn answers_count(to: SocketAddr, service: &Service, count: u32) -> Result<()> {
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

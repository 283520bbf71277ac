// SPDX-License-Identifier: Apache-2.0
//! Impossible requests get a condition and an event that say what to do, and other Services keep working.

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use steerage_edge_api::{AddressPool, TargetState};
use steerage_model::names;

use crate::edge;
use crate::events;
use crate::services::{ServiceBuilder, published};
use crate::suite::ECHO;
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// Waits until a Service has a warning and a condition whose messages contain `word`.
async fn wait_warning(test: &TestContext, name: &str, condition: (&str, &str), word: &str) -> Result<()> {
    let (kind, status) = condition;
    let (reason, message) = test.wait_condition(name, kind, status).await?;
    ensure!(message.contains(word), "condition {kind}={status} {reason} does not mention {word}: {message}");
    events::wait(test.client(), &test.namespace, name, &format!("a warning about {word}"), |event| {
        event.kind == "Warning" && event.note.contains(word)
    })
    .await
    .map(drop)
}

/// Makes another Service after the bad one and waits until it answers.
async fn other_services_work(test: &TestContext, name: &str) -> Result<()> {
    test.serve(&ServiceBuilder::new(&format!("{name}-neighbour"), ECHO))
        .await
        .map(drop)
        .context("another Service does not work")
}

pub(super) async fn address_outside_all_pools_is_rejected(test: Arc<TestContext>) -> Result<()> {
    test.create(&ServiceBuilder::new("outside", ECHO).annotated(names::ADDRESSES, "192.0.2.1")).await?;
    wait_warning(&test, "outside", (names::PROGRAMMED, "False"), "192.0.2.1").await?;
    other_services_work(&test, "outside").await
}

pub(super) async fn address_in_use_is_rejected(test: Arc<TestContext>) -> Result<()> {
    let (_, vips) = test.serve(&ServiceBuilder::new("first", ECHO)).await?;
    let taken = vips.ipv4.to_string();
    test.create(&ServiceBuilder::new("second", ECHO).annotated(names::ADDRESSES, &taken)).await?;
    wait_warning(&test, "second", (names::PROGRAMMED, "False"), &taken).await?;
    other_services_work(&test, "second").await?;
    test.wait_answers(vips, crate::services::PORT).await
}

pub(super) async fn exhausted_pool_is_reported_until_an_address_is_free(
    test: Arc<TestContext>,
) -> Result<()> {
    let (_, free) = test.expose(&ServiceBuilder::new("scout", ECHO)).await?;
    test.delete("scout").await?;
    test.wait_deleted("scout").await?;
    // A pool of two addresses outside of all other pools, on the same link.
    let [ipv4, ipv6] = free_addresses(free)?;
    let pools: Api<AddressPool> = Api::namespaced(test.client().clone(), system::NAMESPACE);
    let pool = json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool",
        "metadata": { "name": "e2e-tiny" },
        "spec": { "addresses": [ipv4, ipv6], "autoAssign": false },
    });
    pools.create(&PostParams::default(), &serde_json::from_value(pool)?).await?;
    let outcome = exhaust(&test).await;
    pools.delete("e2e-tiny", &DeleteParams::default()).await?;
    outcome
}

fn free_addresses(free: crate::services::Vips) -> Result<[String; 2]> {
    let (std::net::IpAddr::V4(ipv4), std::net::IpAddr::V6(ipv6)) = (free.ipv4, free.ipv6) else {
        anyhow::bail!("{free:?} is not one address of each family");
    };
    let [a, b, c, d] = ipv4.octets();
    let mut segments = ipv6.segments();
    // Beyond the block of 256 addresses that the scout's came from.
    segments[7] = (segments[7] | 0xff).wrapping_add(17);
    Ok([format!("{a}.{b}.{}.{d}", c.wrapping_add(1)), std::net::Ipv6Addr::from(segments).to_string()])
}

async fn exhaust(test: &TestContext) -> Result<()> {
    let tiny = |name: &str| ServiceBuilder::new(name, ECHO).annotated(names::ADDRESS_POOL, "e2e-tiny");
    test.serve(&tiny("lucky")).await?;
    test.create(&tiny("late")).await?;
    wait_warning(test, "late", (names::PROGRAMMED, "False"), "e2e-tiny").await?;
    other_services_work(test, "late").await?;
    // A released address goes to the waiting Service.
    test.delete("lucky").await?;
    let vips = test.wait_vips("late").await?;
    test.wait_answers(vips, crate::services::PORT).await?;
    test.delete("late").await?;
    test.wait_deleted("late").await
}

pub(super) async fn unknown_steering_is_rejected(test: Arc<TestContext>) -> Result<()> {
    test.create(&ServiceBuilder::new("steered-badly", ECHO).steered("by-wind")).await?;
    wait_warning(&test, "steered-badly", (names::PROGRAMMED, "False"), "by-wind").await?;
    other_services_work(&test, "steered-badly").await?;
    let service =
        test.patch("steered-badly", json!({ "metadata": { "annotations": { names::STEERING: "api" } } }));
    service.await?;
    let vips = test.wait_vips("steered-badly").await?;
    test.wait_answers(vips, crate::services::PORT).await
}

/// Another program listens on the port on every node: the service proxy warns, and no target is healthy.
pub(super) async fn busy_health_check_port_is_reported(test: Arc<TestContext>) -> Result<()> {
    // Of the ports that the API server gives to no Service by itself, unless all others are taken.
    const PORT: u16 = 30_079;
    let mut busy = Vec::new();
    for node in test.nodes() {
        for address in ["[::]", "0.0.0.0"] {
            let listen = || TcpListener::bind(format!("{address}:{PORT}"));
            // The first listener covers both families where it can. Then the second one fails.
            if let Ok(listener) = steerage_lab::in_netns(&node.netns, listen)? {
                busy.push(listener);
            }
        }
    }
    ensure!(!busy.is_empty(), "no listener could be opened");
    test.create(&ServiceBuilder::new("busy", ECHO).with("healthCheckNodePort", PORT).steered("health-check"))
        .await?;
    events::wait(test.client(), &test.namespace, "busy", "a warning about the port", |event| {
        event.kind == "Warning" && event.note.contains(&PORT.to_string())
    })
    .await?;
    test.wait_condition("busy", names::SERVING, "False").await?;
    other_services_work(&test, "busy").await?;
    drop(busy);
    Ok(())
}

pub(super) async fn service_without_selector_is_reported(test: Arc<TestContext>) -> Result<()> {
    test.create(&ServiceBuilder::new("lonely", ECHO).with("selector", Value::Null)).await?;
    let (_, message) = test.wait_condition("lonely", names::SERVING, "False").await?;
    ensure!(message.contains("selector"), "the condition does not mention the selector: {message}");
    events::wait(test.client(), &test.namespace, "lonely", "what to do without a selector", |event| {
        event.note.contains("selector")
    })
    .await?;
    other_services_work(&test, "lonely").await
}

pub(super) async fn target_off_the_link_is_refused(test: Arc<TestContext>) -> Result<()> {
    let nodes: Api<Node> = Api::all(test.client().clone());
    let node: Node = serde_json::from_value(json!({ "metadata": { "name": "e2e-far-away" } }))?;
    nodes.create(&PostParams::default(), &node).await?;
    let outcome = far_away(&test, &nodes).await;
    nodes.delete("e2e-far-away", &DeleteParams::default()).await?;
    outcome
}

async fn far_away(test: &TestContext, nodes: &Api<Node>) -> Result<()> {
    let status = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.9" }] } });
    nodes.patch_status("e2e-far-away", &PatchParams::default(), &Patch::Merge(status)).await?;
    let (_, vips) = test.serve(&ServiceBuilder::new("far", ECHO).steered("health-check")).await?;
    let lb = test.load_balancer("far").await?;
    until("a refused target", TIMEOUT, async || -> Result<()> {
        let health = edge::health(test.client(), &lb).await?;
        let found = health.iter().find(|target| target.node == "e2e-far-away");
        let target = found.with_context(|| format!("{health:?}"))?;
        ensure!(target.state == TargetState::Refused && !target.reason.is_empty(), "{target:?}");
        Ok(())
    })
    .await?;
    wait_warning(test, "far", (names::DEGRADED, "True"), "e2e-far-away").await?;
    test.wait_answers(vips, crate::services::PORT).await?;
    ensure!(
        !published(&test.service("far").await?).is_empty(),
        "one refused target removed the whole Service's addresses"
    );
    Ok(())
}

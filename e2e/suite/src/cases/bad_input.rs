// SPDX-License-Identifier: Apache-2.0
//! What cannot be had gives an event and a condition that say what to do, and harms nobody else.

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
use crate::scene::Scene;
use crate::services::{Spec, published};
use crate::suite::ECHO;
use crate::system;
use crate::wait::{SOON, until};

/// Returns when a Service has a warning and a condition that both speak of `word`.
async fn told(scene: &Scene, name: &str, condition: (&str, &str), word: &str) -> Result<()> {
    let (kind, status) = condition;
    let (reason, message) = scene.condition(name, kind, status).await?;
    ensure!(message.contains(word), "condition {kind}={status} {reason} does not speak of {word}: {message}");
    events::wait(scene.client(), &scene.namespace, name, &format!("a warning about {word}"), |event| {
        event.kind == "Warning" && event.note.contains(word)
    })
    .await
    .map(drop)
}

/// Somebody else's Service, made after the bad one.
async fn the_rest_goes_on(scene: &Scene, name: &str) -> Result<()> {
    scene
        .serve(&Spec::new(&format!("{name}-neighbour"), ECHO))
        .await
        .map(drop)
        .context("a neighbour is harmed")
}

pub(super) async fn an_address_outside_all_pools(scene: Arc<Scene>) -> Result<()> {
    scene.create(&Spec::new("outside", ECHO).annotated(names::ADDRESSES, "192.0.2.1")).await?;
    told(&scene, "outside", (names::PROGRAMMED, "False"), "192.0.2.1").await?;
    the_rest_goes_on(&scene, "outside").await
}

pub(super) async fn an_address_that_is_taken(scene: Arc<Scene>) -> Result<()> {
    let (_, vips) = scene.serve(&Spec::new("first", ECHO)).await?;
    let taken = vips.ipv4.to_string();
    scene.create(&Spec::new("second", ECHO).annotated(names::ADDRESSES, &taken)).await?;
    told(&scene, "second", (names::PROGRAMMED, "False"), &taken).await?;
    the_rest_goes_on(&scene, "second").await?;
    scene.answers(vips, crate::services::PORT).await
}

pub(super) async fn no_free_address(scene: Arc<Scene>) -> Result<()> {
    let (_, free) = scene.expose(&Spec::new("scout", ECHO)).await?;
    scene.delete("scout").await?;
    scene.gone("scout").await?;
    // A pool of two addresses that nobody has: the ones that the scout gave back, at the pools' other end.
    let [ipv4, ipv6] = spare(free)?;
    let pools: Api<AddressPool> = Api::namespaced(scene.client().clone(), system::NAMESPACE);
    let pool = json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool",
        "metadata": { "name": "e2e-tiny" },
        "spec": { "addresses": [ipv4, ipv6], "autoAssign": false },
    });
    pools.create(&PostParams::default(), &serde_json::from_value(pool)?).await?;
    let outcome = exhausted(&scene).await;
    pools.delete("e2e-tiny", &DeleteParams::default()).await?;
    outcome
}

fn spare(free: crate::services::Vips) -> Result<[String; 2]> {
    let (std::net::IpAddr::V4(ipv4), std::net::IpAddr::V6(ipv6)) = (free.ipv4, free.ipv6) else {
        anyhow::bail!("{free:?} is not one address of each family");
    };
    let [a, b, c, d] = ipv4.octets();
    let mut segments = ipv6.segments();
    // Just before the next block of 256: outside of the pools that gave the scout its addresses, on the same link.
    segments[7] = (segments[7] | 0xff).wrapping_add(17);
    Ok([format!("{a}.{b}.{}.{d}", c.wrapping_add(1)), std::net::Ipv6Addr::from(segments).to_string()])
}

async fn exhausted(scene: &Scene) -> Result<()> {
    let tiny = |name: &str| Spec::new(name, ECHO).annotated(names::ADDRESS_POOL, "e2e-tiny");
    scene.serve(&tiny("lucky")).await?;
    scene.create(&tiny("late")).await?;
    told(scene, "late", (names::PROGRAMMED, "False"), "e2e-tiny").await?;
    the_rest_goes_on(scene, "late").await?;
    // The address goes to who waits for it.
    scene.delete("lucky").await?;
    let vips = scene.vips("late").await?;
    scene.answers(vips, crate::services::PORT).await?;
    scene.delete("late").await?;
    scene.gone("late").await
}

pub(super) async fn an_unknown_steering(scene: Arc<Scene>) -> Result<()> {
    scene.create(&Spec::new("steered-badly", ECHO).steered("by-wind")).await?;
    told(&scene, "steered-badly", (names::PROGRAMMED, "False"), "by-wind").await?;
    the_rest_goes_on(&scene, "steered-badly").await?;
    let service =
        scene.patch("steered-badly", json!({ "metadata": { "annotations": { names::STEERING: "api" } } }));
    service.await?;
    let vips = scene.vips("steered-badly").await?;
    scene.answers(vips, crate::services::PORT).await
}

/// Another program has the port on every node: the service proxy warns, and no target is healthy.
pub(super) async fn a_busy_health_check_port(scene: Arc<Scene>) -> Result<()> {
    const PORT: u16 = 31_999;
    let mut busy = Vec::new();
    for node in scene.nodes() {
        for address in ["0.0.0.0", "[::]"] {
            let listen = || TcpListener::bind(format!("{address}:{PORT}"));
            // The second bind finds IPv4 covered already where the first took both families.
            if let Ok(listener) = steerage_lab::in_netns(&node.netns, listen)? {
                busy.push(listener);
            }
        }
    }
    ensure!(!busy.is_empty(), "no port could be made busy");
    scene.create(&Spec::new("busy", ECHO).with("healthCheckNodePort", PORT).steered("health-check")).await?;
    events::wait(scene.client(), &scene.namespace, "busy", "a warning about the port", |event| {
        event.kind == "Warning" && event.note.contains(&PORT.to_string())
    })
    .await?;
    scene.condition("busy", names::SERVING, "False").await?;
    the_rest_goes_on(&scene, "busy").await?;
    drop(busy);
    Ok(())
}

pub(super) async fn no_selector(scene: Arc<Scene>) -> Result<()> {
    scene.create(&Spec::new("lonely", ECHO).with("selector", Value::Null)).await?;
    let (_, message) = scene.condition("lonely", names::SERVING, "False").await?;
    ensure!(message.contains("selector"), "the condition does not speak of the selector: {message}");
    events::wait(scene.client(), &scene.namespace, "lonely", "what to do without a selector", |event| {
        event.note.contains("selector")
    })
    .await?;
    the_rest_goes_on(&scene, "lonely").await
}

pub(super) async fn a_target_off_the_link(scene: Arc<Scene>) -> Result<()> {
    let nodes: Api<Node> = Api::all(scene.client().clone());
    let node: Node = serde_json::from_value(json!({ "metadata": { "name": "e2e-far-away" } }))?;
    nodes.create(&PostParams::default(), &node).await?;
    let outcome = far_away(&scene, &nodes).await;
    nodes.delete("e2e-far-away", &DeleteParams::default()).await?;
    outcome
}

async fn far_away(scene: &Scene, nodes: &Api<Node>) -> Result<()> {
    let status = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.9" }] } });
    nodes.patch_status("e2e-far-away", &PatchParams::default(), &Patch::Merge(status)).await?;
    let (_, vips) = scene.serve(&Spec::new("far", ECHO).steered("health-check")).await?;
    let lb = scene.load_balancer("far").await?;
    until("a refused target", SOON, async || -> Result<()> {
        let health = edge::health(scene.client(), &lb).await?;
        let found = health.spec.targets.iter().find(|target| target.node == "e2e-far-away");
        let target = found.with_context(|| format!("{:?}", health.spec.targets))?;
        ensure!(target.state == TargetState::Refused && !target.reason.is_empty(), "{target:?}");
        Ok(())
    })
    .await?;
    told(scene, "far", (names::DEGRADED, "True"), "e2e-far-away").await?;
    scene.answers(vips, crate::services::PORT).await?;
    ensure!(!published(&scene.service("far").await?).is_empty(), "one bad node cost the whole Service");
    Ok(())
}

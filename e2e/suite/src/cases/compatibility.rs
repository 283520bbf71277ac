// SPDX-License-Identifier: Apache-2.0
//! Services written for the annotations of old, beside new ones in one cluster.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use serde_json::json;
use steerage_model::Family::V4;
use steerage_model::names;

use crate::events;
use crate::net;
use crate::scene::Scene;
use crate::services::{PORT, Spec};
use crate::suite::ECHO;
use crate::system;
use crate::wait::{SOON, holds, until};

/// The controller's flag.
const FLAG: &str = "--migrate-legacy-annotations";
/// A health-check port as an old Service would have asked for it.
const ASKED: i32 = 31_877;

fn old(name: &str) -> Spec {
    let [_, alpha] = names::LEGACY_EXTERNAL_TRAFFIC;
    let [_, alpha_port] = names::LEGACY_HEALTH_CHECK_NODE_PORT;
    Spec::new(name, ECHO).cluster().annotated(alpha, "OnlyLocal").annotated(alpha_port, &ASKED.to_string())
}

fn policy(service: &Service) -> Option<&str> {
    service.spec.as_ref()?.external_traffic_policy.as_deref()
}

pub(super) async fn an_old_annotation_is_answered_with_the_patch_to_make(scene: Arc<Scene>) -> Result<()> {
    scene.serve(&Spec::new("new-style", ECHO)).await?;
    scene.serve(&old("old-style")).await?;
    let event = events::wait(scene.client(), &scene.namespace, "old-style", "the patch to make", |event| {
        event.note.contains("externalTrafficPolicy") && event.note.contains("Local")
    })
    .await?;
    ensure!(event.note.contains(&ASKED.to_string()), "the patch leaves the port out: {}", event.note);
    let now = scene.service("old-style").await?;
    ensure!(policy(&now) == Some("Cluster"), "nobody allowed a change, yet the policy is {:?}", policy(&now));
    let seen: SocketAddr =
        net::page(scene.vips("new-style").await?.at(V4, PORT), "/clientip").await?.parse()?;
    let [client, _] = scene.suite.clients();
    ensure!(seen.ip() == client.ipv4, "the new-style Service shows {seen}");
    Ok(())
}

pub(super) async fn the_migration_flag_moves_old_services_once(scene: Arc<Scene>) -> Result<()> {
    let (_, vips) = scene.serve(&old("migrated")).await?;
    scene.serve(&Spec::new("untouched", ECHO).cluster()).await?;
    system::argument(&scene.suite, FLAG, true).await?;
    let outcome = migrated(&scene, vips.at(V4, PORT)).await;
    system::argument(&scene.suite, FLAG, false).await?;
    outcome
}

async fn migrated(scene: &Scene, to: SocketAddr) -> Result<()> {
    until("the migration of the old Service", SOON, async || -> Result<()> {
        let spec = scene.service("migrated").await?.spec.unwrap_or_default();
        ensure!(
            spec.external_traffic_policy.as_deref() == Some("Local"),
            "{:?}",
            spec.external_traffic_policy
        );
        ensure!(spec.health_check_node_port == Some(ASKED), "port {:?}", spec.health_check_node_port);
        Ok(())
    })
    .await?;
    let [client, _] = scene.suite.clients();
    until("the client's address after the migration", SOON, async || -> Result<()> {
        let seen: SocketAddr = net::page(to, "/clientip").await?.parse()?;
        ensure!(seen.ip() == client.ipv4, "{seen}");
        Ok(())
    })
    .await?;
    ensure!(policy(&scene.service("untouched").await?) == Some("Cluster"), "a new-style Service was changed");
    // What a user writes later wins.
    scene.patch("migrated", json!({ "spec": { "externalTrafficPolicy": "Cluster" } })).await?;
    holds("the user's own choice", Duration::from_secs(5), async || -> Result<()> {
        let now = scene.service("migrated").await?;
        ensure!(policy(&now) == Some("Cluster"), "{:?}", policy(&now));
        Ok(())
    })
    .await
}

// SPDX-License-Identifier: Apache-2.0
//! Services with legacy annotations beside Services with `externalTrafficPolicy`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use serde_json::json;
use steerage_model::Family::V4;
use steerage_model::annotations;

use crate::events;
use crate::net;
use crate::services::{PORT, ServiceBuilder};
use crate::suite::ECHO;
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, holds, until};

/// The controller's flag.
const FLAG: &str = "--migrate-legacy-annotations";
/// The health-check port in the legacy annotation: one that the API server gives to no Service by itself, unless all others are taken.
const ASKED: i32 = 30_077;

fn old(name: &str) -> ServiceBuilder {
    let alpha = annotations::ALPHA_EXTERNAL_TRAFFIC;
    let alpha_port = annotations::ALPHA_HEALTH_CHECK_NODE_PORT;
    ServiceBuilder::new(name, ECHO)
        .cluster()
        .annotated(alpha, "OnlyLocal")
        .annotated(alpha_port, &ASKED.to_string())
}

fn policy(service: &Service) -> Option<&str> {
    service.spec.as_ref()?.external_traffic_policy.as_deref()
}

pub(super) async fn legacy_annotation_gets_an_event_with_the_patch(test: Arc<TestContext>) -> Result<()> {
    test.serve(&ServiceBuilder::new("new-style", ECHO)).await?;
    test.serve(&old("old-style")).await?;
    let event = events::wait(test.client(), &test.namespace, "old-style", "the patch to make", |event| {
        event.note.contains("externalTrafficPolicy") && event.note.contains("Local")
    })
    .await?;
    ensure!(event.note.contains(&ASKED.to_string()), "the patch lacks the port: {}", event.note);
    let now = test.service("old-style").await?;
    ensure!(policy(&now) == Some("Cluster"), "the policy was changed without the flag: {:?}", policy(&now));
    let seen: SocketAddr =
        net::only_page(test.wait_vips("new-style").await?.at(V4, PORT), "/clientip").await?.parse()?;
    let [client, _] = test.suite.clients();
    ensure!(seen.ip() == client.ipv4, "the new-style Service shows {seen}");
    Ok(())
}

pub(super) async fn migration_flag_migrates_legacy_services_once(test: Arc<TestContext>) -> Result<()> {
    let (_, vips) = test.serve(&old("migrated")).await?;
    test.serve(&ServiceBuilder::new("untouched", ECHO).cluster()).await?;
    system::set_argument(&test.suite, FLAG, true).await?;
    let outcome = migrated(&test, vips.at(V4, PORT)).await;
    system::set_argument(&test.suite, FLAG, false).await?;
    outcome
}

async fn migrated(test: &TestContext, to: SocketAddr) -> Result<()> {
    until("the migration of the old Service", TIMEOUT, async || -> Result<()> {
        let spec = test.service("migrated").await?.spec.unwrap_or_default();
        ensure!(
            spec.external_traffic_policy.as_deref() == Some("Local"),
            "{:?}",
            spec.external_traffic_policy
        );
        ensure!(spec.health_check_node_port == Some(ASKED), "port {:?}", spec.health_check_node_port);
        Ok(())
    })
    .await?;
    let [client, _] = test.suite.clients();
    until("the client's address after the migration", TIMEOUT, async || -> Result<()> {
        let seen: SocketAddr = net::page(to, "/clientip").await?.parse()?;
        ensure!(seen.ip() == client.ipv4, "{seen}");
        Ok(())
    })
    .await?;
    ensure!(policy(&test.service("untouched").await?) == Some("Cluster"), "a new-style Service was changed");
    // A user's later change wins.
    test.patch("migrated", json!({ "spec": { "externalTrafficPolicy": "Cluster" } })).await?;
    holds("the user's own choice", Duration::from_secs(5), async || -> Result<()> {
        let now = test.service("migrated").await?;
        ensure!(policy(&now) == Some("Cluster"), "{:?}", policy(&now));
        Ok(())
    })
    .await
}

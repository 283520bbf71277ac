// SPDX-License-Identifier: Apache-2.0
//! The controller's binary with the edge's provider against a real API server: from a Service to its address and back.

#![allow(clippy::expect_used, clippy::panic, reason = "a test")]

mod support;

use std::time::Duration;

use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use steerage_requirements::requires;

use support::{Cluster, eventually};

#[tokio::test]
async fn a_service_gets_a_load_balancer_and_gives_it_back() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("life", 9).await;
    let controller = cluster.controller("one", &[]);
    let service = cluster.service("web", json!({})).await;
    assert_eq!(cluster.address("web").await, "10.9.0.1");
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    cluster.condition("web", "Serving", "False", "NoEndpoints").await;
    cluster.event("web", "EnsuredLoadBalancer").await;
    cluster.event("web", "NoEndpoints").await;
    let held = cluster.services().get("web").await.expect("service");
    assert_eq!(held.finalizers(), ["steerage.dev/load-balancer"]);
    let ingress = held.status.expect("status").load_balancer.expect("balancer").ingress.expect("ingress");
    assert_eq!(ingress[0].ip_mode.as_deref(), Some("VIP"));
    let balancer = cluster.balancer_of("web").await.expect("balancer");
    assert_eq!(balancer.name_any(), format!("lb-{}", service.uid().expect("uid")));
    assert_eq!(
        Some(i32::from(balancer.spec.health_check.port)),
        held.spec.expect("spec").health_check_node_port
    );
    cluster.targets("web", &["set:eligible"]).await;

    // Away and back.
    cluster.change("web", json!({"spec": {"type": "ClusterIP", "loadBalancerClass": null}})).await;
    let plain = eventually("the finalizer to go", async || {
        let service = cluster.services().get("web").await.ok()?;
        service.finalizers().is_empty().then_some(service)
    })
    .await;
    assert!(cluster.balancer_of("web").await.is_none());
    assert!(plain.status.and_then(|status| status.conditions).is_none_or(|list| list.is_empty()));
    assert!(plain.metadata.annotations.is_none_or(|list| list.is_empty()));
    let back = json!({"spec": {"type": "LoadBalancer", "loadBalancerClass": "steerage.dev/edge"}});
    cluster.change("web", back).await;
    cluster.address("web").await;
    cluster.condition("web", "Programmed", "True", "Programmed").await;

    cluster.delete("web").await;
    eventually("the Service to go", async || {
        cluster.services().get_opt("web").await.ok()?.is_none().then_some(())
    })
    .await;
    assert!(cluster.balancer_of("web").await.is_none());
    assert!(controller.stop(), "it ends in order");
}

#[tokio::test]
async fn endpoints_move_targets_in_api_mode_and_write_nothing_in_health_check_mode() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("steer", 9).await;
    let _controller = cluster.controller("one", &[]);
    cluster.service("probed", json!({})).await;
    cluster.service("told", json!({"metadata": {"annotations": {"steerage.dev/steering": "api"}}})).await;
    cluster.service("wide", json!({"spec": {"externalTrafficPolicy": "Cluster"}})).await;
    cluster.endpoints("told", &["node-a"]).await;
    cluster.endpoints("probed", &["node-a"]).await;
    cluster.targets("told", &["node-a"]).await;
    cluster.targets("probed", &["set:eligible"]).await;
    cluster.targets("wide", &["set:eligible"]).await;
    let told = cluster.balancer_of("told").await.expect("balancer").spec;
    assert_eq!(told.health_check.port, 10256, "under api steering the node's own health counts");
    cluster.endpoints("told", &["node-a", "node-b"]).await;
    cluster.targets("told", &["node-a", "node-b"]).await;
    cluster.endpoints("told", &["node-b", "node-b"]).await;
    cluster.targets("told", &["node-b"]).await;
    assert_eq!(cluster.balancer_of("told").await.expect("balancer").spec.targets[0].weight, 2);

    // What moves under health checks, and what does not move at all, costs no write.
    for service in ["probed", "told", "wide"] {
        cluster.condition(service, "Programmed", "True", "Programmed").await;
    }
    cluster.condition("probed", "Serving", "Unknown", "HealthUnknown").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let kinds = ["edgeloadbalancers", "edgenodesets", "addresspools", "services"];
    let before = cluster.writes(&kinds).await;
    for nodes in [&["node-b"][..], &["node-a", "node-b"], &["node-a"]] {
        cluster.endpoints("probed", nodes).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    assert_eq!(cluster.writes(&kinds).await, before);

    // Nodes come and go for all.
    cluster.node("node-c", "10.1.0.3").await;
    eventually("the new node to join the shared set", async || {
        let set = shared_set(&cluster).await?;
        (set == ["node-a", "node-b", "node-c"]).then_some(())
    })
    .await;
    // Without endpoints an api-steered Service has no targets, and says so.
    cluster.endpoints("told", &[]).await;
    cluster.targets("told", &[]).await;
    cluster.condition("told", "Serving", "False", "NoEndpoints").await;
}

async fn shared_set(cluster: &Cluster) -> Option<Vec<String>> {
    let api: kube::Api<steerage_edge_api::EdgeNodeSet> =
        kube::Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let set = api.get_opt("eligible").await.ok()??;
    Some(set.spec.targets.into_iter().map(|target| target.node).collect())
}

#[tokio::test]
async fn what_was_deleted_while_nobody_looked_is_cleaned_up() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("down", 9).await;
    let controller = cluster.controller("one", &[]);
    cluster.service("kept", json!({})).await;
    cluster.service("deleted", json!({})).await;
    cluster.service("stripped", json!({})).await;
    for service in ["kept", "deleted", "stripped"] {
        cluster.address(service).await;
    }
    controller.kill();
    cluster.delete("deleted").await;
    // As somebody who takes every finalizer away.
    let stripped = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    cluster.services().patch("stripped", &PatchParams::default(), &stripped).await.expect("strip");
    cluster.services().delete("stripped", &DeleteParams::default()).await.expect("delete");
    let kept = cluster.balancer_of("kept").await.expect("balancer");
    let _controller = cluster.controller("two", &[]);
    for service in ["deleted", "stripped"] {
        eventually(&format!("{service} to be cleaned up"), async || {
            let gone = cluster.services().get_opt(service).await.ok()?.is_none();
            (gone && cluster.balancer_of(service).await.is_none()).then_some(())
        })
        .await;
    }
    assert_eq!(
        cluster.balancer_of("kept").await.expect("balancer").metadata.generation,
        kept.metadata.generation
    );
}

#[tokio::test]
async fn a_standby_takes_over_and_changes_nothing() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("lease", 9).await;
    let leader = cluster.controller("one", &[]);
    cluster.service("web", json!({"metadata": {"annotations": {"steerage.dev/steering": "api"}}})).await;
    cluster.endpoints("web", &["node-a"]).await;
    cluster.targets("web", &["node-a"]).await;
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    let _standby = cluster.controller("two", &[]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = cluster.balancer_of("web").await.expect("balancer");
    leader.kill();
    cluster.endpoints("web", &["node-b"]).await;
    cluster.targets("web", &["node-b"]).await;
    let after = cluster.balancer_of("web").await.expect("balancer");
    assert_eq!(after.spec.addresses, before.spec.addresses);
    assert_eq!(
        after.metadata.generation,
        before.metadata.generation.map(|g| g + 1),
        "one write, of the targets"
    );
}

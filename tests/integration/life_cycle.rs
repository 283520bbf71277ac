// SPDX-License-Identifier: Apache-2.0
//! The controller's binary with the edge's provider against a real API server: the life of a load balancer.

use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use steerage_requirements::requires;

use crate::support::{Cluster, eventually};

#[tokio::test]
async fn a_service_gets_a_load_balancer_and_loses_it_with_its_type_or_deletion() {
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
    let pool = "steerage_controller_address_pool_addresses";
    let labels = "{pool=\"default\",family=\"IPv4\"}";
    controller.measures(&format!("{pool}{labels} 9")).await;
    controller.measures(&format!("{pool}_assigned{labels} 1")).await;

    // Another type, and back.
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
    assert!(controller.stop(), "the process exits successfully");
}

/// Each time: the second one looks as if the write after the first one had not been seen yet.
#[tokio::test]
async fn a_status_that_another_program_puts_back_is_restored() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("put-back", 9).await;
    let _controller = cluster.controller("one", &[]);
    cluster.service("web", json!({})).await;
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    let address = cluster.address("web").await;
    let none = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": null}}}));
    for _ in 0..3 {
        let put_back = cluster.services().patch_status("web", &PatchParams::default(), &none).await;
        let status = put_back.expect("written").status.expect("status");
        assert!(status.load_balancer.and_then(|balancer| balancer.ingress).is_none());
        assert_eq!(cluster.address("web").await, address);
    }
}

/// Neither its targets follow, nor is it deleted, nor is a change by hand repaired, until the pause ends.
#[tokio::test]
async fn a_paused_service_stays_as_it_is() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("paused", 9).await;
    let paused =
        |value: serde_json::Value| json!({"metadata": {"annotations": {"steerage.dev/paused": value}}});
    let controller = cluster.controller("one", &["--default-steering", "api"]);
    for service in ["live", "leaving"] {
        cluster.service(service, json!({})).await;
        cluster.endpoints(service, &["node-a"]).await;
        cluster.targets(service, &["node-a"]).await;
        cluster.condition(service, "Programmed", "True", "Programmed").await;
        cluster.change(service, paused(json!("true"))).await;
        cluster.condition(service, "Degraded", "True", "Paused").await;
        cluster.event(service, "Paused").await;
    }
    cluster.endpoints("live", &["node-b"]).await;
    cluster.delete("leaving").await;
    let by_hand = Patch::Merge(json!({"spec": {"targets": []}}));
    let balancer = cluster.balancer_of("live").await.expect("a load balancer").name_any();
    cluster.balancers().patch(&balancer, &PatchParams::default(), &by_hand).await.expect("a change by hand");
    // Also a controller that never saw the Service before.
    cluster.kill(controller).await;
    let _controller = cluster.controller("two", &["--default-steering", "api"]);
    cluster.service("after", json!({})).await;
    cluster.condition("after", "Programmed", "True", "Programmed").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.targets("live", &[]).await;
    cluster.targets("leaving", &["node-a"]).await;

    cluster.change("live", paused(json!(null))).await;
    cluster.targets("live", &["node-b"]).await;
    cluster.condition("live", "Degraded", "False", "AsExpected").await;
    cluster.change("leaving", paused(json!("false"))).await;
    eventually("the Service to go", async || {
        cluster.services().get_opt("leaving").await.ok()?.is_none().then_some(())
    })
    .await;
    assert!(cluster.balancer_of("leaving").await.is_none());
}

/// The load balancer has the shared set of nodes all the time, and the names of those with an endpoint under `fused` steering.
#[tokio::test]
async fn nodes_with_an_endpoint_follow_the_endpoints_under_fused_steering() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("fused", 9).await;
    let _controller = cluster.controller("one", &[]);
    cluster.service("web", json!({})).await;
    cluster.endpoints("web", &["node-a"]).await;
    cluster.targets("web", &["set:eligible"]).await;
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    let spec = async || cluster.balancer_of("web").await.expect("a load balancer").spec;
    let before = spec().await;
    assert_eq!(before.endpoint_nodes, None);
    let steering =
        |value: serde_json::Value| json!({"metadata": {"annotations": {"steerage.dev/steering": value}}});
    let listed = async |nodes: Option<&[&str]>| {
        let wanted = nodes.map(|nodes| nodes.iter().map(ToString::to_string).collect::<Vec<_>>());
        eventually("the nodes with an endpoint", async || {
            (spec().await.endpoint_nodes == wanted).then_some(())
        })
        .await;
        let now = spec().await;
        assert_eq!(steerage_edge_api::EdgeLoadBalancerSpec { endpoint_nodes: None, ..now }, before);
    };
    cluster.change("web", steering(json!("fused"))).await;
    listed(Some(&["node-a"])).await;
    for nodes in [&["node-a", "node-b"][..], &["node-b"], &[], &["node-a"]] {
        cluster.endpoints("web", nodes).await;
        listed(Some(nodes)).await;
    }
    cluster.change("web", steering(json!("health-check"))).await;
    listed(None).await;
}

#[tokio::test]
async fn endpoints_change_targets_under_api_steering_and_cost_no_write_under_health_check_steering() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("steer", 9).await;
    let _controller = cluster.controller("one", &[]);
    cluster.service("checked", json!({})).await;
    cluster.service("by-api", json!({"metadata": {"annotations": {"steerage.dev/steering": "api"}}})).await;
    cluster.service("wide", json!({"spec": {"externalTrafficPolicy": "Cluster"}})).await;
    cluster.endpoints("by-api", &["node-a"]).await;
    cluster.endpoints("checked", &["node-a"]).await;
    cluster.targets("by-api", &["node-a"]).await;
    cluster.targets("checked", &["set:eligible"]).await;
    cluster.targets("wide", &["set:eligible"]).await;
    let by_api = cluster.balancer_of("by-api").await.expect("balancer").spec;
    assert_eq!(by_api.health_check.port, 10256, "api steering checks the node");
    cluster.endpoints("by-api", &["node-a", "node-b"]).await;
    cluster.targets("by-api", &["node-a", "node-b"]).await;
    cluster.endpoints("by-api", &["node-b", "node-b"]).await;
    cluster.targets("by-api", &["node-b"]).await;
    assert_eq!(cluster.balancer_of("by-api").await.expect("balancer").spec.targets[0].weight, 2);

    // Neither changed endpoints under health-check steering nor a steady state cost a write.
    for service in ["checked", "by-api", "wide"] {
        cluster.condition(service, "Programmed", "True", "Programmed").await;
    }
    cluster.condition("checked", "Serving", "Unknown", "HealthUnknown").await;
    let kinds = ["edgeloadbalancers", "edgenodesets", "addresspools", "services"];
    let before = cluster.settled_writes(&kinds).await;
    for nodes in [&["node-b"][..], &["node-a", "node-b"], &["node-a"]] {
        cluster.endpoints("checked", nodes).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    assert_eq!(cluster.writes(&kinds).await, before);

    // A new node becomes a target of all Services, by one write.
    let [balancers, sets] = [&["edgeloadbalancers"][..], &["edgenodesets"]];
    let before = (cluster.writes(balancers).await, cluster.writes(sets).await);
    cluster.node("node-c", "10.1.0.3").await;
    eventually("the new node to join the shared set", async || {
        let set = shared_set(&cluster).await?;
        (set == ["node-a", "node-b", "node-c"]).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((cluster.writes(balancers).await, cluster.writes(sets).await), (before.0, before.1 + 1));

    // A node that becomes ineligible leaves the Services that have it as a target of their own.
    cluster.endpoints("by-api", &["node-a", "node-c"]).await;
    cluster.targets("by-api", &["node-a", "node-c"]).await;
    cluster.exclude("node-c").await;
    cluster.targets("by-api", &["node-a"]).await;
    eventually("the excluded node to leave the shared set", async || {
        (shared_set(&cluster).await? == ["node-a", "node-b"]).then_some(())
    })
    .await;
    // Without endpoints, a Service under api steering has no targets, and its condition says so.
    cluster.endpoints("by-api", &[]).await;
    cluster.targets("by-api", &[]).await;
    cluster.condition("by-api", "Serving", "False", "NoEndpoints").await;
}

async fn shared_set(cluster: &Cluster) -> Option<Vec<String>> {
    let api: kube::Api<steerage_edge_api::EdgeNodeSet> =
        kube::Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let set = api.get_opt("eligible").await.ok()??;
    Some(set.spec.targets.into_iter().map(|target| target.node).collect())
}

/// How long a load balancer without a Service is kept.
const GRACE: Duration = Duration::from_secs(5);

#[tokio::test]
async fn services_deleted_while_no_controller_ran_are_cleaned_up() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("down", 9).await;
    let controller = cluster.controller("one", &[]);
    cluster.service("kept", json!({})).await;
    cluster.service("deleted", json!({})).await;
    cluster.service("stripped", json!({})).await;
    for service in ["kept", "deleted", "stripped"] {
        cluster.address(service).await;
    }
    cluster.kill(controller).await;
    cluster.delete("deleted").await;
    // A user removes every finalizer.
    let stripped = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    cluster.services().patch("stripped", &PatchParams::default(), &stripped).await.expect("strip");
    cluster.services().delete("stripped", &DeleteParams::default()).await.expect("delete");
    let kept = cluster.balancer_of("kept").await.expect("balancer");
    let begun = Instant::now();
    let _controller = cluster.controller("two", &["--orphan-grace-period", &format!("{}s", GRACE.as_secs())]);
    for service in ["deleted", "stripped"] {
        eventually(&format!("{service} to be cleaned up"), async || {
            let gone = cluster.services().get_opt(service).await.ok()?.is_none();
            (gone && cluster.balancer_of(service).await.is_none()).then_some(())
        })
        .await;
        if service == "deleted" {
            let is_kept = cluster.balancer_of("stripped").await.is_some();
            assert!(is_kept || begun.elapsed() > GRACE, "deleted in its grace period");
        }
    }
    assert_eq!(
        cluster.balancer_of("kept").await.expect("balancer").metadata.generation,
        kept.metadata.generation
    );
}

#[tokio::test]
async fn a_standby_takes_over_and_changes_only_what_differs() {
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

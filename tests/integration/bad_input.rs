// SPDX-License-Identifier: Apache-2.0
//! Unsupported requests are reported by event and condition, existing load balancers are kept, and objects of others stay untouched.

use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::json;
use steerage_edge_api::{AddressPool, EdgeNodeSet};
use steerage_requirements::requires;

use crate::support::{Cluster, eventually};

#[tokio::test]
async fn unavailable_addresses_are_reported_and_assigned_once_available() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("addresses", 1).await;
    let _controller = cluster.controller("one", &[]);
    cluster.service("first", json!({})).await;
    assert_eq!(cluster.address("first").await, "10.9.0.1");
    cluster.service("second", json!({})).await;
    cluster.condition("second", "Programmed", "False", "NoFreeAddress").await;
    cluster.event("second", "NoFreeAddress").await;
    cluster.service("taken", json!({"spec": {"loadBalancerIP": "10.9.0.1"}})).await;
    cluster.condition("taken", "Programmed", "False", "AddressInUse").await;
    cluster
        .service("outside", json!({"metadata": {"annotations": {"steerage.dev/addresses": "10.77.0.1"}}}))
        .await;
    cluster.condition("outside", "Programmed", "False", "AddressOutsidePools").await;
    cluster
        .service("pool", json!({"metadata": {"annotations": {"steerage.dev/address-pool": "none"}}}))
        .await;
    cluster.condition("pool", "Programmed", "False", "UnknownPool").await;
    cluster.service("garbled", json!({"metadata": {"annotations": {"steerage.dev/addresses": "ten"}}})).await;
    cluster.condition("garbled", "Programmed", "False", "InvalidRequestedAddress").await;
    for service in ["taken", "outside", "garbled"] {
        cluster.delete(service).await;
    }
    cluster.delete("first").await;
    assert_eq!(cluster.address("second").await, "10.9.0.1");
    cluster.condition("second", "Programmed", "True", "Programmed").await;
    cluster.pool("none", "10.9.1.7").await;
    assert_eq!(cluster.address("pool").await, "10.9.1.7");
}

#[tokio::test]
async fn an_unknown_steering_keeps_the_previous_load_balancer() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("unknown", 9).await;
    let _controller = cluster.controller("one", &["--default-steering", "api"]);
    cluster.service("new", json!({"metadata": {"annotations": {"steerage.dev/steering": "magic"}}})).await;
    let message = cluster.condition("new", "Programmed", "False", "UnknownSteering").await;
    assert!(message.contains("magic") && message.contains("health-check"), "{message}");
    cluster.event("new", "UnknownSteering").await;
    assert!(cluster.balancer_of("new").await.is_none());

    cluster.service("live", json!({})).await;
    cluster.endpoints("live", &["node-a"]).await;
    cluster.targets("live", &["node-a"]).await;
    cluster.change("live", json!({"metadata": {"annotations": {"steerage.dev/steering": "magic"}}})).await;
    cluster.condition("live", "Programmed", "False", "UnknownSteering").await;
    cluster.condition("live", "Degraded", "True", "UnsupportedChange").await;
    cluster.endpoints("live", &["node-b"]).await;
    cluster.targets("live", &["node-b"]).await;
    cluster
        .change("live", json!({"metadata": {"annotations": {"steerage.dev/steering": "health-check"}}}))
        .await;
    cluster.targets("live", &["set:eligible"]).await;
    cluster.condition("live", "Degraded", "False", "AsExpected").await;
}

/// Rejected by the provider or by the plan, and also after a restart: the new controller never saw the accepted structure.
#[tokio::test]
async fn rejected_services_follow_their_endpoints() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("rejected", 9).await;
    let annotated = |name: &str, value: &str| json!({"metadata": {"annotations": {name: value}}});
    let controller = cluster.controller("one", &[]);
    for service in ["provider", "plan"] {
        cluster.service(service, annotated("steerage.dev/steering", "api")).await;
        cluster.endpoints(service, &["node-a"]).await;
        cluster.targets(service, &["node-a"]).await;
        cluster.condition(service, "Programmed", "True", "Programmed").await;
    }
    cluster.change("provider", annotated("steerage.dev/addresses", "10.77.0.1")).await;
    cluster.condition("provider", "Programmed", "False", "AddressOutsidePools").await;
    // The check in place passes on every node: the targets must not follow the steering that is rejected with the addresses.
    cluster.change("provider", annotated("steerage.dev/steering", "health-check")).await;
    cluster.change("plan", annotated("steerage.dev/health-check-interval", "often")).await;
    cluster.condition("plan", "Programmed", "False", "InvalidAnnotation").await;
    for service in ["provider", "plan"] {
        cluster.condition(service, "Degraded", "True", "UnsupportedChange").await;
        cluster.endpoints(service, &["node-b"]).await;
        cluster.targets(service, &["node-b"]).await;
    }

    // A rejected change of the policy: the check in place asks the node, which passes without an endpoint too.
    cluster.service("policy", json!({"spec": {"externalTrafficPolicy": "Cluster"}})).await;
    cluster.endpoints("policy", &["node-b"]).await;
    cluster.targets("policy", &["set:eligible"]).await;
    cluster.condition("policy", "Programmed", "True", "Programmed").await;
    let mut change = annotated("steerage.dev/addresses", "10.77.0.1");
    change["spec"] = json!({"externalTrafficPolicy": "Local"});
    cluster.change("policy", change).await;
    cluster.condition("policy", "Programmed", "False", "AddressOutsidePools").await;
    cluster.targets("policy", &["node-b"]).await;

    cluster.kill(controller).await;
    let _controller = cluster.controller("two", &[]);
    for service in ["provider", "plan"] {
        cluster.endpoints(service, &["node-a"]).await;
        cluster.targets(service, &["node-a"]).await;
        assert_eq!(cluster.programmed(service).await, "False");
    }
    cluster.change("provider", json!({"metadata": {"annotations": {"steerage.dev/addresses": null}}})).await;
    cluster.targets("provider", &["set:eligible"]).await;
    cluster.condition("provider", "Programmed", "True", "Programmed").await;
}

/// Not even after the requests that follow from the controller's own writes.
#[tokio::test]
async fn lost_load_balancer_without_an_address_stays_unprogrammed() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("lost", 1).await;
    let _controller = cluster.controller("one", &[]);
    cluster.pool("spare", "10.9.1.7").await;
    cluster
        .service("lost", json!({"metadata": {"annotations": {"steerage.dev/address-pool": "spare"}}}))
        .await;
    cluster.condition("lost", "Programmed", "True", "Programmed").await;
    let pools: Api<AddressPool> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    pools.delete("spare", &DeleteParams::default()).await.expect("delete the pool");
    let balancer = cluster.balancer_of("lost").await.expect("a load balancer").name_any();
    cluster.balancers().delete(&balancer, &DeleteParams::default()).await.expect("delete the load balancer");
    cluster.condition("lost", "Programmed", "False", "UnknownPool").await;
    for round in 0..5 {
        cluster.change("lost", json!({"metadata": {"labels": {"round": round.to_string()}}})).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(cluster.programmed("lost").await, "False");
    }
    cluster.pool("spare", "10.9.1.7").await;
    cluster.condition("lost", "Programmed", "True", "Programmed").await;
    assert_eq!(cluster.address("lost").await, "10.9.1.7");
}

/// A node set that another program deletes, or takes the name of, would leave its load balancers without targets.
#[tokio::test]
async fn deleted_node_set_is_restored_and_a_foreign_one_is_reported() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("sets", 1).await;
    let _controller = cluster.controller("one", &[]);
    cluster.service("web", json!({})).await;
    cluster.targets("web", &["set:eligible"]).await;
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    let sets: Api<EdgeNodeSet> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let restored = async |old: Option<String>| {
        eventually("the node set to be restored", async || {
            let set = sets.get_opt("eligible").await.ok()??;
            (set.uid() != old && set.spec.targets.len() == 2).then_some(())
        })
        .await;
    };
    let first = sets.get("eligible").await.expect("the node set").uid();
    sets.delete("eligible", &DeleteParams::default()).await.expect("delete the node set");
    restored(first).await;
    let change = json!({"spec": {"targets": []}});
    sets.patch("eligible", &PatchParams::default(), &Patch::Merge(change))
        .await
        .expect("change the node set");
    restored(None).await;

    let labels =
        json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": "another"}}, "spec": {"targets": []}});
    sets.patch("eligible", &PatchParams::default(), &Patch::Merge(labels)).await.expect("take the node set");
    cluster.condition("web", "Programmed", "False", "ObjectNotOwned").await;
    for round in 0..3 {
        cluster.change("web", json!({"metadata": {"labels": {"round": round.to_string()}}})).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(cluster.programmed("web").await, "False", "after the controller's own writes");
    }
    sets.delete("eligible", &DeleteParams::default()).await.expect("delete the foreign node set");
    cluster.condition("web", "Programmed", "True", "Programmed").await;
    restored(None).await;
}

#[tokio::test]
async fn services_of_other_classes_are_not_touched() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("classes", 9).await;
    let controller = cluster.controller("one", &[]);
    cluster.service("theirs", json!({"spec": {"loadBalancerClass": "example.com/other"}})).await;
    let unset = cluster.service("unset", json!({"spec": {"loadBalancerClass": null}})).await;
    let status = json!({"status": {
        "loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "VIP"}]},
        "conditions": [{"type": "example.com/Theirs", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }});
    let params = PatchParams::default();
    let theirs_then =
        cluster.services().patch_status("theirs", &params, &Patch::Merge(&status)).await.expect("status");
    cluster.service("ours", json!({})).await;
    cluster.address("ours").await;
    let foreign = json!({"status": {"conditions": [status["status"]["conditions"][0]]}});
    cluster.services().patch_status("ours", &params, &Patch::Strategic(&foreign)).await.expect("status");
    cluster.endpoints("ours", &["node-a"]).await;
    cluster.condition("ours", "Serving", "Unknown", "HealthUnknown").await;
    let same = async |old: &Service| {
        let now = cluster.services().get(&old.name_any()).await.expect("service");
        assert_eq!(now.resource_version(), old.resource_version(), "{}", old.name_any());
    };
    same(&theirs_then).await;
    same(&unset).await;

    cluster.kill(controller).await;
    let _controller = cluster.controller("two", &["--serve-unset-class"]);
    cluster.address("unset").await;
    let served = cluster.services().get("unset").await.expect("service");
    assert_eq!(served.finalizers(), ["service.kubernetes.io/load-balancer-cleanup"]);
    same(&theirs_then).await;

    cluster.change("ours", json!({"spec": {"type": "ClusterIP", "loadBalancerClass": null}})).await;
    let left = eventually("the finalizer to go", async || {
        let service = cluster.services().get("ours").await.ok()?;
        service.finalizers().is_empty().then_some(service)
    })
    .await;
    let kinds: Vec<String> =
        left.status.and_then(|s| s.conditions).unwrap_or_default().into_iter().map(|c| c.type_).collect();
    assert_eq!(kinds, ["example.com/Theirs"]);
}

#[tokio::test]
async fn legacy_annotations_are_reported_and_applied_once_if_enabled() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("legacy", 9).await;
    // The API server is shared with other tests. It gives none of their Services a port below 30086, unless the others are taken.
    let old = json!({
        "metadata": {"annotations": {
            "service.beta.kubernetes.io/external-traffic": "OnlyLocal",
            "service.beta.kubernetes.io/healthcheck-nodeport": "30077",
        }},
        "spec": {"externalTrafficPolicy": null},
    });
    let controller = cluster.controller("one", &[]);
    cluster.service("old", old).await;
    let note = cluster.event("old", "LegacyAnnotations").await;
    let command = r#"kubectl patch service --namespace legacy old --type merge --patch '{"spec":{"externalTrafficPolicy":"Local","healthCheckNodePort":30077}}'"#;
    assert!(note.contains(command), "{note}");
    let wrong = json!({
        "metadata": {"annotations": {"service.alpha.kubernetes.io/external-traffic": "onlylocal"}},
        "spec": {"externalTrafficPolicy": null},
    });
    cluster.service("wrong", wrong).await;
    cluster.event("wrong", "InvalidLegacyAnnotation").await;
    cluster.address("wrong").await;
    cluster.kill(controller).await;

    let _controller = cluster.controller("two", &["--migrate-legacy-annotations"]);
    let spec = eventually("the migration", async || {
        let spec = cluster.services().get("old").await.ok()?.spec?;
        (spec.external_traffic_policy.as_deref() == Some("Local")).then_some(spec)
    })
    .await;
    assert_eq!(spec.health_check_node_port, Some(30077));
    cluster.event("old", "LegacyAnnotationsMigrated").await;
    let user = json!({"spec": {"externalTrafficPolicy": "Cluster", "healthCheckNodePort": 0}});
    cluster.change("old", user).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let spec = cluster.services().get("old").await.expect("service").spec.expect("spec");
    assert_eq!(spec.external_traffic_policy.as_deref(), Some("Cluster"), "the user's later edit wins");
}

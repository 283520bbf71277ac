// SPDX-License-Identifier: Apache-2.0
//! `--dry-run` against a real API server: it says what the controller would do, and writes nothing.

use serde_json::json;
use steerage_requirements::requires;

use crate::support::Cluster;

/// What a controller writes and the API server does not.
const WRITTEN: [&str; 5] =
    ["services", "edgeloadbalancers", "edgenodesets", "addresspools", "endpointslices"];

/// The line of the log about a Service.
fn line<'a>(log: &'a str, service: &str) -> &'a str {
    let about = format!("dry/{service}\"");
    log.lines().find(|line| line.contains(&about)).unwrap_or_else(|| panic!("nothing of {service}: {log}"))
}

#[tokio::test]
async fn a_dry_run_names_each_action_and_writes_nothing() {
    requires!(KubeApiserver);
    let cluster = Cluster::new("dry", 9).await;
    let controller = cluster.controller("one", &[]);
    for service in ["same", "changed", "leaving"] {
        cluster.service(service, json!({})).await;
        cluster.condition(service, "Programmed", "True", "Programmed").await;
    }
    // Beside the controller that leads, and after it is killed: its Lease is still held.
    let (succeeded, log) = cluster.dry_run("edge", &[]).await;
    assert!(succeeded, "{log}");
    assert!(line(&log, "same").contains("\"none\""), "{log}");
    controller.kill();
    cluster.change("changed", json!({"spec": {"ports": [{"name": "web", "port": 81}]}})).await;
    cluster.delete("leaving").await;
    cluster.service("new", json!({})).await;
    let unknown = json!({"metadata": {"annotations": {"steerage.dev/steering": "fast"}}});
    cluster.service("refused", unknown).await;
    cluster.node("node-c", "10.1.0.3").await;
    let writes = cluster.settled_writes(&WRITTEN).await;
    let (events, leases) = (cluster.events().await, cluster.leases().await);
    assert_eq!(leases.len(), 1, "the killed controller's: {leases:?}");
    let (succeeded, log) = cluster.dry_run("edge", &[]).await;
    assert!(succeeded, "{log}");
    assert_eq!(cluster.writes(&WRITTEN).await, writes, "{log}");
    assert_eq!(cluster.leases().await, leases, "{log}");
    assert_eq!(cluster.events().await, events, "{log}");
    assert!(!log.contains("a dry run sends no"), "nothing even tries to write: {log}");
    for (service, action, details) in [
        ("same", "change", "patches EdgeNodeSet eligible, adds node-c"),
        ("changed", "change", "81"),
        ("leaving", "delete", "deletes the load balancer and removes the finalizer"),
        ("new", "create", "3 targets"),
        ("refused", "refuse", "UnknownSteering"),
    ] {
        let line = line(&log, service);
        assert!(line.contains(&format!("\"{action}\"")) && line.contains(details), "{line}");
    }
    assert!(log.contains("nothing was written"), "{log}");
    assert!(cluster.balancer_of("new").await.is_none());
}

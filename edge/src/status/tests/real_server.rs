// SPDX-License-Identifier: Apache-2.0
//! The same with a real API server: its defaults, its labels and its server-side apply.

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use steerage_edge_api::{EdgeHost, EdgeTargetHealth, field_manager};
use steerage_requirements::requires;
use steerage_testserver::Server;

use super::*;

const NAMESPACE: &str = "edge-reports";

/// The definitions, once they are served, and a namespace.
async fn install(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in steerage_edge_api::crds() {
        definitions.create(&PostParams::default(), &definition).await.expect("a definition");
    }
    let namespace = serde_json::json!({"metadata": {"name": NAMESPACE}});
    let namespace: Namespace = serde_json::from_value(namespace).expect("a namespace");
    Api::all(client.clone()).create(&PostParams::default(), &namespace).await.expect("a namespace");
    let hosts: Api<EdgeHost> = Api::namespaced(client.clone(), NAMESPACE);
    let reports: Api<EdgeTargetHealth> = Api::namespaced(client.clone(), NAMESPACE);
    for _ in 0..600 {
        let all = ListParams::default();
        if hosts.list(&all).await.is_ok() && reports.list(&all).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the definitions are not served");
}

/// The names and versions of all objects.
async fn versions(client: &Client) -> BTreeMap<String, String> {
    let hosts: Api<EdgeHost> = Api::namespaced(client.clone(), NAMESPACE);
    let reports: Api<EdgeTargetHealth> = Api::namespaced(client.clone(), NAMESPACE);
    let all = ListParams::default();
    let hosts =
        hosts.list(&all).await.expect("a list").into_iter().map(|o| (o.name_any(), o.resource_version()));
    let reports =
        reports.list(&all).await.expect("a list").into_iter().map(|o| (o.name_any(), o.resource_version()));
    hosts.chain(reports).map(|(name, version)| (name, version.unwrap_or_default())).collect()
}

/// When the host itself changed its `EdgeHost`.
async fn changed_by_host(client: &Client) -> Time {
    let hosts: Api<EdgeHost> = Api::namespaced(client.clone(), NAMESPACE);
    let host = hosts.get(HOST).await.expect("the host");
    let manager = Some(field_manager(HOST));
    let entry = host.managed_fields().iter().find(|entry| entry.manager == manager).expect("the manager");
    entry.time.clone().expect("a time")
}

/// As another client does.
async fn label_host(client: &Client) {
    let hosts: Api<EdgeHost> = Api::namespaced(client.clone(), NAMESPACE);
    let patch = Patch::Merge(serde_json::json!({"metadata": {"labels": {"site": "north"}}}));
    hosts.patch(HOST, &PatchParams::default(), &patch).await.expect("a label");
}

/// A process until it has nothing to do. Returns how many objects it wrote or deleted.
async fn run(client: &Client, status: &HostStatus) -> u64 {
    let sink = StatusSink::Api { client: Box::new(client.clone()), namespace: NAMESPACE.to_owned() };
    let metrics = Metrics::default();
    let mut writer = StatusWriter::new(sink, HOST.to_owned(), metrics.clone());
    let wanted = objects(status);
    for _ in 0..100 {
        let next = writer.step(&wanted).await;
        if next > Instant::now() + Duration::from_mins(1) {
            assert_eq!(metrics.status_write_failures.get(), 0);
            return metrics.status_writes.get();
        }
        tokio::time::sleep_until(next).await;
    }
    panic!("there is always something to do");
}

#[tokio::test]
async fn equal_objects_are_recognised_and_nothing_is_stored_twice() {
    requires!(KubeApiserver);
    let server = Server::start().expect("an API server");
    let client = server.client().await.expect("a client");
    install(&client).await;
    let mut status = host_status(5, 12);
    let dual = report(None, 2);
    let v6 = targets(IpFamily::V6, 3, TargetState::Initial);
    let v6 = Arc::new(GroupReport::new(
        None,
        IpFamily::V6,
        v6,
        UntrackedCounts { without_endpoint: 1, untried: 0 },
    ));
    status.load_balancers.change("lb-own-3", |own| {
        own.targets = vec![dual, v6];
        own.problem = "in use".to_owned();
    });
    assert_eq!(run(&client, &status).await, 1 + 5 + 12 + 1);
    let before = versions(&client).await;
    assert_eq!(before.len(), 19);

    assert_eq!(run(&client, &status).await, 1, "its EdgeHost");
    assert_eq!(versions(&client).await, before, "which is equal");
    let changed = changed_by_host(&client).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    label_host(&client).await;
    assert_eq!(run(&client, &status).await, 1);
    assert_ne!(versions(&client).await, before);
    assert_eq!(changed_by_host(&client).await, changed, "by which the controller knows the last host");
    status.active = Shards::NONE;
    assert_eq!(run(&client, &status).await, 1);
    assert!(changed_by_host(&client).await > changed);

    for (name, _) in host_status(5, 12).load_balancers.iter() {
        if name == "lb-own-1" || name.starts_with("lb-shared") && name != "lb-shared-100" {
            status.load_balancers.set(name, None);
        }
    }
    // Eleven load balancers that share, an own one and the shared report go, and the remaining one has its targets itself.
    assert_eq!(run(&client, &status).await, 1 + 1 + 13);
    assert_eq!(versions(&client).await.len(), 1 + 4 + 1);
}

// SPDX-License-Identifier: Apache-2.0
//! Watches and events with a real API server, and with a lost connection.

#![allow(clippy::expect_used, reason = "a test")]

use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node, Service};
use k8s_openapi::api::events::v1::Event as ApiEvent;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use steerage_model::{Key, TrafficPolicy};
use steerage_requirements::requires;
use steerage_testserver::Server;
use steerage_watch::events::{Notice, Recorder, Severity, Subject};
use steerage_watch::{ClientArgs, Event, Index, Object, Store, Watches, client};

const SOON: Duration = Duration::from_mins(1);

fn from<T: serde::de::DeserializeOwned>(json: Value) -> T {
    serde_json::from_value(json).expect("object")
}

fn service(name: &str) -> Service {
    from(json!({
        "metadata": { "name": name },
        "spec": { "type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{ "port": 80 }] }
    }))
}

async fn own_client(server: &Server) -> Client {
    let args = ClientArgs { api_server: None, kubeconfig: Some(server.kubeconfig().to_owned()) };
    client("test", "0", &args).await.expect("client")
}

/// Applies `events` to `store` until `wanted` holds.
async fn until<T: Object>(
    events: &mut (impl Stream<Item = Event<T>> + Unpin),
    store: &mut Store<T>,
    mut wanted: impl FnMut(&Store<T>) -> bool,
) {
    let fed = async {
        while !wanted(store) {
            store.apply(events.next().await.expect("endless"), |_, _| {});
        }
    };
    tokio::time::timeout(SOON, fed).await.expect("the store does not reach the wanted state");
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_survives_a_cut_and_deletes_missing_objects() {
    requires!(KubeApiserver);
    // A server of its own: the other tests need their connections.
    let server = tokio::task::spawn_blocking(Server::start).await.expect("thread").expect("server");
    let api: Api<Service> = Api::default_namespaced(server.client().await.expect("client"));
    for name in ["stays", "goes"] {
        api.create(&PostParams::default(), &service(name)).await.expect("create");
    }
    let watches = Watches::new(own_client(&server).await, &mut Registry::default());
    let mut services = watches.services();
    let mut store = Store::default();
    let key = |name: &str| Key::new("default", name);
    until(&mut services, &mut store, Store::has_synced).await;
    let projected = store.get(&key("stays")).expect("listed");
    assert_eq!(projected.external_policy, TrafficPolicy::Local);
    assert!(
        projected.health_port().is_some() && !projected.uid.is_empty() && !projected.cluster_ips.is_empty()
    );

    let server = tokio::task::spawn_blocking(move || {
        server.cut().expect("cut");
        server.heal().expect("heal");
        server
    })
    .await
    .expect("thread");
    api.delete("goes", &DeleteParams::default()).await.expect("delete");
    api.create(&PostParams::default(), &service("comes")).await.expect("create");
    until(&mut services, &mut store, |store| {
        store.get(&key("comes")).is_some() && store.get(&key("goes")).is_none()
    })
    .await;
    assert!(store.get(&key("stays")).is_some());
    tokio::task::spawn_blocking(move || drop(server)).await.expect("thread");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_kinds_reach_the_index() {
    requires!(KubeApiserver);
    let server = tokio::task::spawn_blocking(Server::shared).await.expect("thread");
    let admin = server.client().await.expect("client");
    let nodes: Api<Node> = Api::all(admin.clone());
    for name in ["n1", "n2"] {
        nodes
            .create(&PostParams::default(), &from(json!({ "metadata": { "name": name } })))
            .await
            .expect("create");
    }
    let slices: Api<k8s_openapi::api::discovery::v1::EndpointSlice> = Api::default_namespaced(admin);
    let slice = |name: &str, labels: Value| {
        from(json!({
            "metadata": { "name": name, "labels": labels }, "addressType": "IPv4", "ports": [{ "port": 80 }],
            "endpoints": [{ "addresses": ["10.0.0.1"], "nodeName": "n1" }]
        }))
    };
    let label = "kubernetes.io/service-name";
    let headless = "service.kubernetes.io/headless";
    for (name, labels) in
        [("s", json!({ label: "web" })), ("h", json!({ label: "web", headless: "" })), ("none", json!({}))]
    {
        slices.create(&PostParams::default(), &slice(name, labels)).await.expect("create");
    }
    let watches = Watches::new(own_client(server).await, &mut Registry::default());
    let (mut services, mut slices_events, mut node_events) =
        (watches.services(), watches.slices(), watches.nodes());
    let mut index = Index::default();
    let web = Key::new("default", "web");
    let fed = async {
        while !index.has_synced() {
            tokio::select! {
                event = services.next() => index.apply_service(event.expect("endless")),
                event = slices_events.next() => index.apply_slice(event.expect("endless")),
                event = node_events.next() => index.apply_node(event.expect("endless")),
            }
        }
    };
    tokio::time::timeout(SOON, fed).await.expect("synced");
    assert_eq!(index.slices(&web).map(|slice| slice.key.name()).collect::<Vec<_>>(), ["s"]);
    assert_eq!(index.nodes().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["n1", "n2"]);

    let mut one = watches.node("n2");
    let mut store = Store::default();
    until(&mut one, &mut store, Store::has_synced).await;
    assert_eq!((store.len(), store.get(&"n2".to_owned()).is_some()), (1, true));
    let patch = json!({ "metadata": { "annotations": { "steerage.dev/agent-mode": "labelled" } } });
    for name in ["n1", "n2"] {
        nodes.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patch");
    }
    until(&mut one, &mut store, |store| {
        store.iter().all(|node| node.agent.as_ref().is_some_and(|agent| agent.mode == "labelled"))
    })
    .await;
}

/// The deletion of a tenant's namespace would otherwise look like lost Events to the operator.
#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_terminating_namespace_are_not_counted_as_dropped() {
    requires!(KubeApiserver);
    let server = tokio::task::spawn_blocking(Server::shared).await.expect("thread");
    let namespaces: Api<Namespace> = Api::all(server.client().await.expect("client"));
    let named = |name: &str| -> Namespace { from(json!({ "metadata": { "name": name } })) };
    namespaces.create(&PostParams::default(), &named("leaving")).await.expect("create");
    // Nobody removes its finalizer here: it stays terminating.
    namespaces.delete("leaving", &DeleteParams::default()).await.expect("delete");
    let mut registry = Registry::default();
    let (recorder, writer) = Recorder::new(own_client(server).await, "controller", "pod-1", &mut registry);
    let writer = tokio::spawn(writer);
    for namespace in ["leaving", "no-such-namespace"] {
        let about = steerage_model::Service::new(Key::new(namespace, "web"));
        let (subject, note) = (Subject::service(&about), "The load balancer is gone.".to_owned());
        recorder.publish(Notice {
            subject,
            severity: Severity::Normal,
            reason: "Deleted",
            action: "Delete",
            note,
        });
    }
    drop(recorder);
    tokio::time::timeout(SOON, writer).await.expect("ends").expect("task");
    let mut text = String::new();
    encode(&mut text, &registry).expect("text");
    assert!(
        text.contains("events_dropped_total 1\n"),
        "only that of the namespace which does not exist: {text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_written_and_a_changed_note_is_a_new_event() {
    requires!(KubeApiserver);
    let server = tokio::task::spawn_blocking(Server::shared).await.expect("thread");
    let admin = server.client().await.expect("client");
    let mut about = steerage_model::Service::new(Key::new("default", "eventful"));
    about.uid = "0-1".into();
    let (recorder, writer) =
        Recorder::new(own_client(server).await, "controller", "pod-1", &mut Registry::default());
    let writer = tokio::spawn(writer);
    let notice = |note: &str| Notice {
        subject: Subject::service(&about),
        severity: Severity::Warning,
        reason: "NoAddress",
        action: "Allocate",
        note: note.to_owned(),
    };
    for note in ["pool a is full", "pool a is full", "pool b is full"] {
        recorder.publish(notice(note));
    }
    drop(recorder);
    tokio::time::timeout(SOON, writer).await.expect("ends").expect("task");
    let api: Api<ApiEvent> = Api::default_namespaced(admin);
    let events = api.list(&ListParams::default()).await.expect("list");
    let of = |event: &ApiEvent| event.regarding.as_ref().and_then(|object| object.name.clone());
    let mut notes: Vec<_> = events.iter().filter(|event| of(event).as_deref() == Some("eventful")).collect();
    notes.sort_by_key(|event| event.event_time.clone().map(|time| time.0));
    let said: Vec<_> = notes.iter().filter_map(|event| event.note.as_deref()).collect();
    assert_eq!(said, ["pool a is full", "pool b is full"]);
    assert_eq!(notes[0].reporting_controller.as_deref(), Some("steerage.dev/controller"));
}

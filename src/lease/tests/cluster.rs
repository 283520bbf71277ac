// SPDX-License-Identifier: Apache-2.0
//! Two candidates against a real API server.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::Api;
use steerage_requirements::requires;
use steerage_testserver::Server;
use tokio_util::sync::CancellationToken;

use crate::lease::{LeaseError, LeaseOptions, LeaseTiming, acquire};

const SOON: Duration = Duration::from_mins(1);

/// Long enough for a holder that has no core for some seconds.
const DURATION: Duration = Duration::from_secs(10);

fn options(name: &str, identity: &str) -> LeaseOptions {
    let timing = LeaseTiming {
        duration: DURATION,
        deadline: Duration::from_secs(9),
        retry: Duration::from_millis(300),
        call: Duration::from_secs(5),
    };
    LeaseOptions { namespace: "default".into(), name: name.into(), identity: identity.into(), timing }
}

async fn shared() -> Client {
    let server = tokio::task::spawn_blocking(Server::shared).await.expect("thread");
    server.client().await.expect("client")
}

async fn holder(client: &Client, name: &str) -> Option<String> {
    let lease = Api::<Lease>::default_namespaced(client.clone()).get(name).await.expect("lease");
    lease.spec.and_then(|spec| spec.holder_identity)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_waits_for_the_holder_and_takes_over_after_the_release() {
    requires!(KubeApiserver);
    let client = shared().await;
    let (stop_a, stop_b) = (CancellationToken::new(), CancellationToken::new());
    let a = acquire(client.clone(), options("handover", "a"), &stop_a).await.expect("no other candidate");
    let leadership_a = a.leadership();
    let keep_a = tokio::spawn(a.hold_until(stop_a.clone()));
    let mut b = Box::pin(acquire(client.clone(), options("handover", "b"), &stop_b));
    tokio::time::timeout(DURATION + Duration::from_secs(2), &mut b)
        .await
        .map(|_| ())
        .expect_err("a renews it repeatedly");
    assert!(leadership_a.is_held());

    stop_a.cancel();
    keep_a.await.expect("task").expect("released");
    assert!(!leadership_a.is_held());
    let b = tokio::time::timeout(SOON, b).await.expect("soon").expect("not stopped");
    assert!(b.leadership().is_held());
    assert_eq!(holder(&client, "handover").await.as_deref(), Some("b"));
    stop_b.cancel();
    b.hold_until(stop_b).await.expect("released");
    assert_eq!(holder(&client, "handover").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_holder_is_replaced_only_after_the_lease_duration() {
    requires!(KubeApiserver);
    let client = shared().await;
    let stop = CancellationToken::new();
    let a = acquire(client.clone(), options("crash", "a"), &stop).await.expect("no other candidate");
    let leadership = a.leadership();
    // Like a killed process: no renewal and no release.
    drop(a);
    let b = tokio::time::timeout(SOON, acquire(client.clone(), options("crash", "b"), &stop)).await;
    assert!(b.expect("soon").expect("not stopped").leadership().is_held());
    assert!(!leadership.is_held(), "the first holder had stopped before");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_cannot_renew_stops_before_others_may_take_over() {
    requires!(KubeApiserver);
    let server = tokio::task::spawn_blocking(Server::start).await.expect("thread").expect("server");
    let client = server.client().await.expect("client");
    let stop = CancellationToken::new();
    let held = acquire(client, options("cut", "a"), &stop).await.expect("no other candidate");
    let leadership = held.leadership();
    let kept = tokio::spawn(held.hold_until(stop));
    let server = tokio::task::spawn_blocking(move || server.cut().map(|()| server))
        .await
        .expect("thread")
        .expect("cut");
    let error = tokio::time::timeout(SOON, kept).await.expect("soon").expect("task").expect_err("lost");
    assert!(matches!(&error, LeaseError::Expired { name, .. } if name == "cut"), "{error}");
    assert!(!leadership.is_held());
    tokio::task::spawn_blocking(move || drop(server)).await.expect("thread");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_lease_is_taken_stops_at_once() {
    requires!(KubeApiserver);
    let client = shared().await;
    let stop = CancellationToken::new();
    let held = acquire(client.clone(), options("taken", "a"), &stop).await.expect("no other candidate");
    let kept = tokio::spawn(held.hold_until(stop));
    let patch = serde_json::json!({ "spec": { "holderIdentity": "a person" } });
    let api: Api<Lease> = Api::default_namespaced(client);
    let patch = kube::api::Patch::Merge(&patch);
    api.patch("taken", &kube::api::PatchParams::default(), &patch).await.expect("patch");
    let error = tokio::time::timeout(SOON, kept).await.expect("soon").expect("task").expect_err("lost");
    assert!(error.to_string().contains("a person"), "{error}");
}

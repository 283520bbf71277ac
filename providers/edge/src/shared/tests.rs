// SPDX-License-Identifier: Apache-2.0
//! What the provider learns from the responses to its own writes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{FutureExt as _, StreamExt as _};
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use steerage_watch::Event;

use super::*;
use crate::allocation::tests::{ip, load_balancer, owner, unreachable_client};

fn pool(version: &str, range: &str) -> Value {
    json!({"apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool", "spec": {"addresses": [range]},
        "metadata": {"name": "default", "namespace": "system", "uid": "u", "resourceVersion": version}})
}

/// A pool is enlarged while its status is written. The watch then reports nothing, because the response was newer.
#[tokio::test]
async fn edit_in_the_response_to_a_status_write_is_not_lost() {
    let patches = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&patches);
    let service = tower::service_fn(move |request: http::Request<Body>| {
        count.fetch_add(1, Ordering::AcqRel);
        assert_eq!(request.method(), http::Method::PATCH);
        async move {
            let text = pool("101", "10.9.0.0/24").to_string();
            Ok::<_, io::Error>(http::Response::new(Body::from(text.into_bytes())))
        }
    });
    let shared = Shared::new(&Client::new(service, "default"), "system");
    shared.activated.set(()).expect("set once");
    let known = Entry::parse(&pool("100", "10.9.0.1/32").to_string()).expect("a pool");
    shared.pools.cache.apply(Event::Apply(known));
    shared.allocate(&load_balancer("web", &["10.9.0.7"])).expect_err("outside the pool");
    let mut notified = shared.notifier.subscribe();
    assert!(shared.write_pools().await);
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner("web")));
    shared.stale_pools.notified().now_or_never().expect("the status of the edited pool differs, too");
    assert!(shared.write_pools().await);
    assert_eq!(patches.load(Ordering::Acquire), 2);

    // Every address that is assigned or released changes the status of its pool.
    shared.allocate(&load_balancer("web", &["10.8.0.7"])).expect_err("outside the pool");
    let entry = |range: &str, assigned: u64| {
        let mut pool = pool("101", range);
        pool["status"] = json!({"assigned": assigned});
        Some(Entry::parse(&pool.to_string()).expect("a pool"))
    };
    shared.on_pool(&Change { old: entry("10.9.0.0/24", 1), new: entry("10.9.0.0/24", 2) });
    assert_eq!(notified.next().now_or_never(), None);
    shared.on_pool(&Change { old: entry("10.9.0.0/24", 2), new: entry("10.8.0.0/24", 2) });
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner("web")));
}

/// The object of a creation whose answer was lost never appeared.
#[tokio::test]
async fn ended_reservation_wakes_the_owner_that_waits_for_its_address() {
    let shared = Shared::new(&unreachable_client(), "system");
    let known = Entry::parse(&pool("100", "10.9.0.7").to_string()).expect("a pool");
    shared.pools.cache.apply(Event::Apply(known));
    shared.allocate(&load_balancer("a", &[])).expect("free");
    shared.allocate(&load_balancer("b", &[])).expect_err("none is free");
    let mut notified = shared.notifier.subscribe();
    shared.end_reservation(&owner("a"));
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner("b")));
    assert_eq!(shared.allocate(&load_balancer("b", &[])).expect("free"), [ip("10.9.0.7")]);
}

/// The object of a load balancer with these targets, as the watch brings it.
fn balancer(version: &str, nodes: &[&str]) -> Entry<LoadBalancerContent> {
    let of = owner("web");
    let targets: Vec<Value> =
        nodes.iter().map(|node| json!({"node": node, "addresses": ["10.0.0.1"]})).collect();
    let mut metadata = serde_json::to_value(spec::metadata(&of)).expect("metadata");
    metadata["resourceVersion"] = json!(version);
    let check = json!({"protocol": "TCP", "port": 80, "intervalMilliseconds": 1000, "timeoutMilliseconds": 500,
        "healthyThreshold": 2, "unhealthyThreshold": 2});
    let service = json!({"namespace": of.service.namespace(), "name": of.service.name(), "uid": of.uid});
    let object = json!({"metadata": metadata, "spec": {
        "service": service, "addresses": ["10.9.0.7"], "listeners": [], "healthCheck": check, "targets": targets,
    }});
    let entry = Entry::parse(&object.to_string()).expect("an object");
    assert!(entry.content.is_ok(), "{:?}", entry.content);
    entry
}

/// Under load the watch is often faster. A notification would compare everything once more for every change.
#[tokio::test]
async fn own_write_that_the_watch_delivers_before_its_response_is_no_change_of_another_program() {
    let client = unreachable_client();
    let shared = Shared::new(&client, "system");
    let mut notified = shared.notifier.subscribe();
    let (old, new) = (balancer("1", &["a"]), balancer("2", &["b"]));
    let wanted = new.content.clone().expect("readable").spec;
    let change = Change { old: Some(old.clone()), new: Some(new) };
    let own = shared.begin_write(&spec::object_name(&owner("web")), &wanted);
    shared.on_balancer(&change);
    assert_eq!(notified.next().now_or_never(), None);
    shared.on_balancer(&Change { old: Some(old), new: Some(balancer("2", &["c"])) });
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner("web")), "of another program");
    drop(own);
    shared.on_balancer(&change);
    assert_eq!(
        notified.next().now_or_never().flatten(),
        Some(owner("web")),
        "after a write that was given up"
    );
}

/// The targets of a load balancer are written between the allocation and the write of its object, which may take long.
#[tokio::test(start_paused = true)]
async fn reservation_lasts_from_the_write_and_from_its_end_without_an_answer() {
    let client = unreachable_client();
    let shared = Shared::new(&client, "system");
    let known = Entry::parse(&pool("100", "10.9.0.0/24").to_string()).expect("a pool");
    shared.pools.cache.apply(Event::Apply(known));
    let name = spec::object_name(&owner("web"));
    let wanted = balancer("1", &["a"]).content.expect("readable").spec;
    shared.allocate(&load_balancer("web", &[])).expect("free");
    let whole = shared.unsettled(&name).expect("reserved");
    tokio::time::advance(whole).await;
    assert_eq!(shared.unsettled(&name), None);
    let own = shared.begin_write(&name, &wanted);
    assert_eq!(shared.unsettled(&name), Some(whole));
    tokio::time::advance(whole / 2).await;
    assert!(own.end(Ok(())).is_ok());
    assert_eq!(shared.unsettled(&name), Some(whole / 2));
    let given_up = shared.begin_write(&name, &wanted);
    tokio::time::advance(whole / 2).await;
    drop(given_up);
    assert_eq!(shared.unsettled(&name), Some(whole));
    let failed = shared.begin_write(&name, &wanted);
    tokio::time::advance(whole / 2).await;
    assert!(failed.end(Err(Failure::Deadline)).is_err());
    assert_eq!(shared.unsettled(&name), Some(whole));
}

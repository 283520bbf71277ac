// SPDX-License-Identifier: Apache-2.0
//! What the provider learns from the responses to its own writes.

use std::io;

use futures::{FutureExt as _, StreamExt as _};
use kube::client::Body;
use serde_json::json;
use steerage_model::Key;
use steerage_watch::Event;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::*;

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
    let known = serde_json::from_value(pool("100", "10.9.0.1/32")).expect("a pool");
    shared.pools.cache.apply(Event::Apply(Entry::new(known)));
    let owner = Owner { service: Key::new("shop", "web"), uid: "w".to_owned() };
    shared.allocation().waiting.insert(owner.clone());
    let mut notified = shared.notifier.subscribe();
    shared.pools_are_stale();
    shared.write_pools().await.expect("written");
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner));
    assert_eq!(patches.load(Ordering::Acquire), 2, "the status of the edited pool is written, too");
    assert!(!shared.stale_pools.load(Ordering::Acquire));
}

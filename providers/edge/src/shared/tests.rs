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

fn waiting(addresses: &[&str], pool: Option<&str>) -> WaitingRequest {
    WaitingRequest {
        families: vec![Family::V4],
        addresses: addresses.iter().map(|text| text.parse().expect("ip")).collect(),
        pool: pool.map(str::to_owned),
    }
}

/// A creation whose answer was lost may have succeeded.
#[tokio::test(start_paused = true)]
async fn reservation_lasts_until_the_object_is_known() {
    let service = tower::service_fn(|_: http::Request<Body>| async {
        Err::<http::Response<Body>, _>(io::Error::other("no call is made"))
    });
    let shared = Shared::new(&Client::new(service, "default"), "system");
    let known = serde_json::from_value(pool("100", "10.9.0.0/24")).expect("a pool");
    shared.pools.cache.apply(Event::Apply(Entry::new(known)));
    let address: IpAddr = "10.9.0.7".parse().expect("ip");
    shared.allocation().reserved.insert("lb-a".to_owned(), (vec![address], Instant::now()));
    let owner = Owner { service: Key::new("shop", "b"), uid: "b".to_owned() };
    shared.allocation().waiting.insert(owner.clone(), waiting(&[], None));
    let mut notified = shared.notifier.subscribe();

    assert!(shared.unsettled("lb-a").is_some() && shared.unsettled("lb-b").is_none());
    tokio::time::advance(LATEST_EFFECT).await;
    assert_eq!(shared.unsettled("lb-a"), None);
    assert!(shared.taken(&shared.allocation(), "lb-b").contains(&address));
    shared.confirm("lb-a");
    assert!(!shared.taken(&shared.allocation(), "lb-b").contains(&address));
    assert_eq!(notified.next().now_or_never(), Some(Some(owner)), "the address is free");
    assert_eq!(shared.allocation().resting(), [address].into(), "the nodes may still forward it");
    tokio::time::advance(REST).await;
    assert_eq!(shared.allocation().resting(), [].into());
}

/// Hundreds of Services may wait for addresses that stay in use.
#[tokio::test]
async fn released_address_wakes_only_those_who_may_use_it() {
    let service = tower::service_fn(|_: http::Request<Body>| async {
        Err::<http::Response<Body>, _>(io::Error::other("no call is made"))
    });
    let shared = Shared::new(&Client::new(service, "default"), "system");
    let known = serde_json::from_value(pool("100", "10.9.0.0/24")).expect("a pool");
    shared.pools.cache.apply(Event::Apply(Entry::new(known)));
    let requests = [
        ("any", waiting(&[], None)),
        ("its-pool", waiting(&[], Some("default"))),
        ("this", waiting(&["10.9.0.7"], None)),
        ("another", waiting(&["10.9.0.8"], None)),
        ("other-pool", waiting(&[], Some("other"))),
        ("ipv6", WaitingRequest { families: vec![Family::V6], ..waiting(&[], None) }),
    ];
    for (name, request) in requests {
        let owner = Owner { service: Key::new("shop", name), uid: name.to_owned() };
        shared.allocation().waiting.insert(owner, request);
    }
    let mut notified = shared.notifier.subscribe();
    let [released, kept] = ["10.9.0.7", "10.9.0.9"].map(|text| text.parse().expect("ip"));
    shared.on_release(&[released, kept], &[kept]);
    let mut woken = BTreeSet::new();
    while let Some(Some(owner)) = notified.next().now_or_never() {
        woken.insert(owner.uid);
    }
    assert_eq!(woken, ["any", "its-pool", "this"].map(str::to_owned).into());
    let left: Vec<String> = shared.allocation().waiting.keys().map(|owner| owner.uid.clone()).collect();
    assert_eq!(left, ["another", "ipv6", "other-pool"], "the others wait on");

    // Every address that is assigned or released changes the status of its pool.
    let entry = |range: &str, assigned: u64| {
        let mut pool = pool("101", range);
        pool["status"] = json!({"assigned": assigned});
        Some(Entry::new(serde_json::from_value(pool).expect("a pool")))
    };
    shared.on_pool(&Change { old: entry("10.9.0.0/24", 1), new: entry("10.9.0.0/24", 2) });
    assert_eq!(shared.allocation().waiting.len(), 3);
    shared.on_pool(&Change { old: entry("10.9.0.0/24", 2), new: entry("10.8.0.0/24", 2) });
    assert_eq!(shared.allocation().waiting.len(), 0);
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
    shared.allocation().waiting.insert(owner.clone(), waiting(&[], None));
    let mut notified = shared.notifier.subscribe();
    shared.pools_are_stale();
    shared.write_pools().await.expect("written");
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner));
    assert_eq!(patches.load(Ordering::Acquire), 2, "the status of the edited pool is written, too");
    assert!(!shared.stale_pools.load(Ordering::Acquire));
}

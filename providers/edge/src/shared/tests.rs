// SPDX-License-Identifier: Apache-2.0
//! What the provider learns from the responses to its own writes.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::{FutureExt as _, StreamExt as _};
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use steerage_provider_api::NoticeSubject;
use steerage_watch::{Event, Kind as _};

use super::*;
use crate::allocation::tests::{ip, load_balancer, owner, unreachable_client};
use crate::namespaces::NamespaceKind;

const PACE_OF_CHANGES: Duration = Duration::from_millis(100);

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

/// An API server that takes every status, and pools as the watch brings them.
struct PoolWorld {
    shared: Shared,
    statuses: Arc<Mutex<BTreeMap<String, Value>>>,
    version: u32,
}

impl PoolWorld {
    /// With one load balancer, of the Service `shop/web` at 10.9.0.7.
    fn new() -> Self {
        let statuses = Arc::new(Mutex::new(BTreeMap::<String, Value>::new()));
        let stored = Arc::clone(&statuses);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let stored = Arc::clone(&stored);
            async move {
                let name = request.uri().path().split('/').nth_back(1).expect("a name").to_owned();
                let body = request.into_body().collect_bytes().await.map_err(io::Error::other)?;
                let patch: Value = serde_json::from_slice(&body)?;
                let mut stored = stored.lock().expect("not poisoned");
                let status = stored.entry(name.clone()).or_insert_with(|| json!({}));
                for (field, value) in patch["status"].as_object().expect("a status") {
                    status[field] = value.clone();
                }
                status.as_object_mut().expect("a status").retain(|_, value| !value.is_null());
                let metadata = json!({"name": name, "uid": "u", "resourceVersion": "1"});
                let object = json!({"metadata": metadata, "spec": {"addresses": []}, "status": {}});
                Ok::<_, io::Error>(http::Response::new(Body::from(object.to_string().into_bytes())))
            }
        });
        let shared = Shared::new(&Client::new(service, "default"), "system");
        shared.activated.set(()).expect("set once");
        shared.balancers.cache.apply(Event::Init);
        shared.balancers.cache.apply(Event::InitApply(balancer("1", &["a"])));
        shared.balancers.cache.apply(Event::InitDone);
        shared.pools.cache.apply(Event::Init);
        shared.pools.cache.apply(Event::InitDone);
        Self { shared, statuses, version: 10 }
    }

    fn set(&mut self, name: &str, spec: &Value) {
        self.version += 1;
        let metadata = json!({"name": name, "uid": name, "resourceVersion": self.version.to_string()});
        let entry = Entry::parse(&json!({"metadata": metadata, "spec": spec}).to_string()).expect("a pool");
        assert!(entry.content.is_ok(), "{:?}", entry.content);
        for change in self.shared.pools.cache.apply(Event::Apply(entry)) {
            self.shared.on_pool(&change);
        }
    }

    fn delete(&mut self, name: &str) {
        self.version += 1;
        let event = Event::Delete { key: name.to_owned(), version: self.version.to_string() };
        for change in self.shared.pools.cache.apply(event) {
            self.shared.on_pool(&change);
        }
    }

    /// The problem in a pool's status, after it was written.
    async fn problem(&self, name: &str) -> String {
        assert!(self.shared.write_pools().await);
        let statuses = self.statuses.lock().expect("not poisoned");
        statuses.get(name).and_then(|status| status["problem"].as_str()).unwrap_or_default().to_owned()
    }
}

/// Whatever becomes of its pool, a Service keeps its address, and its user is told so once.
#[tokio::test(start_paused = true)]
async fn change_of_a_pool_takes_no_address_away_and_is_told_once() {
    let team = |value: &str| json!({"matchLabels": {"team": value}});
    let range = "10.9.0.0/24";
    let of = |field: &str, value: Value| {
        let mut spec = json!({"addresses": [range]});
        spec[field] = value;
        spec
    };
    let namespace = r#"{"metadata": {"name": "shop", "labels": {"team": "a"}}}"#;
    let namespace = NamespaceKind::project(namespace, &mut Vec::new()).expect("JSON").expect("a namespace");
    let mut web = load_balancer("web", &[]);
    web.labels = Arc::new([("team".to_owned(), "a".to_owned())].into());
    web.published = vec![ip("10.9.0.7")];
    let outside = ("in no AddressPool: 10.9.0.7 (Service shop/web).", "in no AddressPool any more");
    let refused =
        ("that the pool is not for have addresses of it: 10.9.0.7 (Service", "not for this Service any more");
    for (changed, (in_status, in_event)) in [
        (Some(json!({"addresses": ["10.9.0.8-10.9.0.20"]})), outside),
        (Some(of("excluded", json!(["10.9.0.7"]))), outside),
        (None, outside),
        (Some(of("namespaces", json!(["bank"]))), refused),
        (Some(of("serviceSelector", team("b"))), refused),
        (Some(of("namespaceSelector", team("b"))), refused),
    ] {
        let mut world = PoolWorld::new();
        world.set("other", &json!({"addresses": ["10.8.0.1"]}));
        let own = json!({"addresses": [range], "serviceSelector": team("a"), "namespaceSelector": team("a")});
        world.set("p", &own);
        for event in [Event::Init, Event::InitApply(namespace.clone()), Event::InitDone] {
            world.shared.on_namespace(event);
        }
        let mut notices = world.shared.notices.subscribe();
        assert_eq!(world.shared.allocate(&web).expect("its own"), [ip("10.9.0.7")]);
        assert_eq!(world.problem("p").await, "");
        assert_eq!(notices.next().now_or_never(), None);
        let told_at = if let Some(spec) = &changed {
            world.set("p", spec);
            "p"
        } else {
            world.delete("p");
            "other"
        };
        assert_eq!(world.shared.allocate(&web).expect("its own"), [ip("10.9.0.7")], "{changed:?}");
        let problem = world.problem(told_at).await;
        assert!(problem.contains(in_status), "{changed:?}: {problem}");
        world.shared.stale_pools.notified().now_or_never().expect("to be told later");
        tokio::time::advance(kept::NOTICE_DELAY).await;
        assert!(world.shared.write_pools().await);
        let notice = notices.next().now_or_never().flatten().expect("told");
        let about = (notice.subject, notice.reason);
        assert_eq!(about, (NoticeSubject::Service(owner("web")), kept::ADDRESS_KEPT));
        assert!(notice.note.contains(in_event) && notice.note.contains("keeps it"), "{}", notice.note);
        assert!(world.shared.write_pools().await);
        assert_eq!(notices.next().now_or_never(), None, "once");
        world.set("p", &json!({"addresses": [range]}));
        assert_eq!(world.problem("p").await, "", "and what was written is taken away");
    }
}

/// The labels of a Service change: it keeps its address, too.
#[tokio::test(start_paused = true)]
async fn labels_that_change_take_no_address_away() {
    let mut world = PoolWorld::new();
    let selector = json!({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]});
    world.set("p", &json!({"addresses": ["10.9.0.0/24"], "serviceSelector": selector}));
    let labelled = |value: &str| {
        let labels = Arc::new([("team".to_owned(), value.to_owned())].into());
        LoadBalancer { labels, published: vec![ip("10.9.0.7")], ..load_balancer("web", &[]) }
    };
    let mut notices = world.shared.notices.subscribe();
    assert_eq!(world.problem("p").await, "", "its labels are not known yet");
    assert_eq!(world.shared.allocate(&labelled("a")).expect("its own"), [ip("10.9.0.7")]);
    assert_eq!(world.problem("p").await, "");
    world.shared.stale_pools.notified().now_or_never();
    assert_eq!(world.shared.allocate(&labelled("b")).expect("its own"), [ip("10.9.0.7")]);
    world.shared.stale_pools.notified().now_or_never().expect("the status differs");
    assert!(world.problem("p").await.contains("that the pool is not for"));
    tokio::time::advance(kept::NOTICE_DELAY).await;
    assert!(world.shared.write_pools().await);
    assert!(notices.next().now_or_never().flatten().is_some());
    let other = LoadBalancer { owner: owner("other"), published: Vec::new(), ..labelled("b") };
    assert_eq!(world.shared.allocate(&other).expect_err("not for it").reason(), crate::NO_FREE_ADDRESS);
    let other = LoadBalancer { labels: labelled("a").labels, ..other };
    assert_eq!(world.shared.allocate(&other).expect("for it"), [ip("10.9.0.1")]);
}

#[tokio::test]
async fn pool_that_is_nearly_full_is_told_once_until_it_has_room() {
    let mut world = PoolWorld::new();
    let mut notices = world.shared.notices.subscribe();
    world.set("p", &json!({"addresses": ["10.9.0.7-10.9.0.16"]}));
    assert_eq!(world.problem("p").await, "");
    for n in 2..=9_u8 {
        let mut entry = balancer("1", &["a"]);
        entry.name = format!("lb-{n}");
        entry.content.as_mut().expect("readable").spec.addresses = vec![[10, 9, 0, 6 + n].into()];
        world.shared.balancers.cache.apply(Event::Apply(entry));
    }
    let problem = world.problem("p").await;
    assert!(problem.starts_with("1 of 10 IPv4 addresses are free."), "{problem}");
    let notice = notices.next().now_or_never().flatten().expect("told");
    assert_eq!(notice.reason, ADDRESS_POOL_NEARLY_FULL);
    let NoticeSubject::Object { kind, namespace, name, uid, .. } = notice.subject else { panic!("a pool") };
    assert_eq!((kind, &*namespace, &*name, &*uid), ("AddressPool", "system", "p", "p"));
    assert!(world.shared.write_pools().await);
    assert_eq!(notices.next().now_or_never(), None, "once");
    world.set("p", &json!({"addresses": ["10.9.0.7-10.9.0.17"]}));
    assert_eq!(world.problem("p").await, "");
    world.set("p", &json!({"addresses": ["10.9.0.7-10.9.0.16"]}));
    assert_ne!(world.problem("p").await, "");
    assert!(notices.next().now_or_never().flatten().is_some(), "again");
    world.set("p", &json!({"addresses": ["10.9.0.7-10.9.0.15"]}));
    assert_eq!(world.problem("p").await, "", "a pool of nine addresses may be full");
}

/// The controller restarts while addresses are kept for the Services that had them.
#[tokio::test(start_paused = true)]
async fn released_addresses_are_in_the_status_for_the_next_process() {
    let spec = json!({"addresses": ["10.9.0.7-10.9.0.8"], "reuseDelaySeconds": 600});
    let mut world = PoolWorld::new();
    world.set("p", &spec);
    let gone = spec::object_name(&owner("web"));
    let before = AssignedAddresses::of(&world.shared.balancers.cache.get(&gone).expect("an object"));
    world.shared.balancers.cache.apply(Event::Delete { key: gone.clone(), version: "5".to_owned() });
    world.shared.on_release(Some(&owner("web").service), &before, &AssignedAddresses::default());
    assert_eq!(world.problem("p").await, "");
    let status = world.statuses.lock().expect("not poisoned").get("p").cloned().expect("written");
    let released = &status["released"][0];
    assert_eq!((&released["address"], &released["name"]), (&json!("10.9.0.7"), &json!("web")), "{status}");

    let next = PoolWorld::new().shared;
    next.balancers.cache.apply(Event::Delete { key: gone, version: "5".to_owned() });
    let metadata = json!({"name": "p", "uid": "p", "resourceVersion": "20"});
    let pool = json!({"metadata": metadata, "spec": spec, "status": status});
    next.pools.cache.apply(Event::Apply(Entry::parse(&pool.to_string()).expect("a pool")));
    next.restore_released();
    assert_eq!(next.allocate(&load_balancer("new", &[])).expect("free"), [ip("10.9.0.8")]);
    let none = next.allocate(&load_balancer("late", &[])).expect_err("kept for another");
    assert!(none.to_string().contains("kept from other Services (reuseDelaySeconds): 1."), "{none}");
    let refused = next.allocate(&load_balancer("late", &["10.9.0.7"])).expect_err("kept for another");
    assert_eq!(refused.reason(), crate::ADDRESS_HELD);
    let mut notified = next.notifier.subscribe();
    let left = next.next_free().expect("it is kept");
    assert!(left <= Duration::from_mins(10) && left > Duration::from_secs(590), "{left:?}");
    tokio::time::advance(left).await;
    next.end_delays();
    assert_eq!(notified.next().now_or_never().flatten(), Some(owner("late")));
    assert_eq!(next.allocate(&load_balancer("late", &[])).expect("free"), [ip("10.9.0.7")]);
    assert_eq!(next.next_free(), None);
}

/// While statuses are written again and again, no wait for the end of a delay is reached.
#[tokio::test(start_paused = true)]
async fn reuse_delay_that_ends_while_statuses_are_written_wakes_who_waits() {
    let mut world = PoolWorld::new();
    world.set("p", &json!({"addresses": ["10.9.0.7"], "reuseDelaySeconds": 60}));
    let before = world.shared.balancers.cache.get(&spec::object_name(&owner("web"))).expect("listed");
    let gone = Event::Delete { key: before.name.clone(), version: "2".to_owned() };
    for change in world.shared.balancers.cache.apply(gone) {
        world.shared.on_balancer(&change);
    }
    let refused = world.shared.allocate(&load_balancer("late", &[])).expect_err("kept");
    assert_eq!(refused.reason(), crate::NO_FREE_ADDRESS);
    let mut notified = world.shared.notifier.subscribe();
    let shared = &world.shared;
    let changes = async {
        loop {
            shared.pools_are_stale();
            tokio::time::sleep(PACE_OF_CHANGES).await;
        }
    };
    let woken = async { while notified.next().await != Some(owner("late")) {} };
    tokio::select! {
        () = woken => {}
        () = changes => {}
        () = shared.keep_pool_statuses() => {}
        () = tokio::time::sleep(Duration::from_secs(90)) => panic!("still waits"),
    }
    assert_eq!(shared.allocate(&load_balancer("late", &[])).expect("free"), [ip("10.9.0.7")]);
}

/// The object of a load balancer with this address, of a Service of the same name.
fn balancer_at(name: &str, address: &str) -> Entry<LoadBalancerContent> {
    let mut object = json!({"metadata": spec::metadata(&owner(name)), "spec": {
        "service": {"namespace": "default", "name": name, "uid": "u"}, "addresses": [address], "listeners": [],
        "healthCheck": {"protocol": "TCP", "port": 80, "intervalMilliseconds": 1000, "timeoutMilliseconds": 500,
            "healthyThreshold": 2, "unhealthyThreshold": 2},
    }});
    object["metadata"]["uid"] = json!(name);
    Entry::parse(&object.to_string()).expect("an object")
}

fn edge_object<S: serde::de::DeserializeOwned + Eq>(
    name: &str,
    version: u32,
    spec: &Value,
) -> Event<Entry<S>> {
    let metadata = json!({"name": name, "uid": name, "resourceVersion": version.to_string()});
    let entry = Entry::parse(&json!({"metadata": metadata, "spec": spec}).to_string()).expect("an object");
    assert!(entry.content.is_ok(), "{name}");
    Event::Apply(entry)
}

/// Two load balancers whose reports of both hosts refer to shared ones.
#[tokio::test]
async fn owners_are_notified_of_a_shared_report_when_it_says_something_else() {
    let shared = Shared::new(&unreachable_client(), "system");
    // In the shards 48 and 122.
    for (name, address) in [("one", "10.0.200.1"), ("two", "10.0.200.2"), ("other", "10.0.200.3")] {
        shared.balancers.cache.apply(Event::Apply(balancer_at(name, address)));
    }
    let mut notified = shared.notifier.subscribe();
    let mut take = || {
        let mut names = BTreeSet::new();
        while let Some(Some(owner)) = notified.next().now_or_never() {
            names.insert(owner.service.name().to_owned());
        }
        names.into_iter().collect::<Vec<_>>()
    };
    let host = |name: &str, shards: &str, version| {
        let spec = json!({"version": "1", "interface": "eth0", "addresses": [], "active": true, "activeShards": shards});
        for change in shared.hosts.cache.apply(edge_object(name, version, &spec)) {
            shared.on_host(&change);
        }
    };
    let report = |name: &str, version, spec: Value| {
        for change in shared.health.cache.apply(edge_object(name, version, &spec)) {
            shared.on_health(&change);
        }
    };
    let counts = |host: &str, healthy: u32, failed: u32| json!({"host": host, "counts": [{"family": "IPv4", "total": healthy + failed, "healthy": healthy, "failed": failed}]});
    host("a", "0-127", 1);
    assert_eq!(take(), ["one", "other", "two"]);
    for (at, edge) in (10..).step_by(10).zip(["a", "b"]) {
        report(&format!("eligible.x.{edge}"), at, counts(edge, 5000, 0));
        for name in ["one", "two"] {
            let lb = spec::object_name(&owner(name));
            let refers =
                json!({"loadBalancer": lb, "host": edge, "sharedReports": [format!("eligible.x.{edge}")]});
            report(&format!("{lb}.{edge}"), at, refers);
        }
        assert_eq!(take(), if edge == "a" { vec!["one", "two"] } else { Vec::new() }, "{edge}");
    }
    let is_served = |name: &str| {
        let health = shared.health(&spec::object_name(&owner(name)));
        health.parts.iter().map(|part| part.is_served).collect::<Vec<_>>()
    };
    assert_eq!(is_served("one"), [Some(true)]);
    for (version, failed) in (41..60).zip(1..) {
        report("eligible.x.a", version, counts("a", 5000 - failed, failed));
        report("eligible.x.b", version, counts("b", 5000 - failed, failed));
    }
    assert_eq!(take(), [] as [&str; 0], "others are healthy");
    report("eligible.x.a", 60, counts("a", 0, 5000));
    assert_eq!((take(), is_served("two")), (vec!["one".to_owned(), "two".to_owned()], vec![Some(false)]));
    // A takeover of one shard concerns who has an address in it.
    host("b", "48", 70);
    assert_eq!((take(), is_served("one")), (vec!["one".to_owned()], vec![Some(true)]));
    host("b", "48", 71);
    host("a", "0-47,49-127", 72);
    assert_eq!(take(), [] as [&str; 0], "nothing else is said");
}

#[tokio::test]
async fn users_are_told_once_that_a_node_is_drained() {
    let shared = Shared::new(&unreachable_client(), "system");
    let other = shared.notices.subscribe();
    drop(other);
    let apply = |event| {
        for change in shared.hosts.cache.apply(event) {
            shared.on_host(&change);
        }
    };
    let host = |version, forwards: &[(&str, bool)]| {
        let nodes: Value =
            forwards.iter().map(|(node, forwards)| json!({"node": node, "forwards": forwards})).collect();
        let spec = json!({
            "version": "1", "interface": "eth0", "addresses": [], "active": true, "activeShards": "0-127", "drainingNodes": nodes,
        });
        edge_object("a", version, &spec)
    };
    for event in [Event::Init, Event::InitDone, host(1, &[("early", false)])] {
        apply(event);
    }
    let mut notices = shared.notices.subscribe();
    shared.tell_of_drained_nodes();
    let mut take = || {
        let mut nodes = Vec::new();
        while let Some(Some(notice)) = notices.next().now_or_never() {
            assert_eq!((notice.reason, notice.is_warning), (crate::DRAINED, false));
            let NoticeSubject::Node(node) = notice.subject else { panic!("{:?}", notice.subject) };
            nodes.push(node);
        }
        nodes
    };
    assert_eq!(take(), ["early"], "before, nobody would have heard");
    shared.tell_of_drained_nodes();
    assert_eq!(take(), Vec::<String>::new());
    apply(host(2, &[("n", true), ("m", false)]));
    assert_eq!(take(), ["m"]);
    apply(host(3, &[("n", false), ("m", false)]));
    assert_eq!(take(), ["n"], "once");
    apply(host(4, &[("m", false)]));
    apply(host(5, &[("n", true), ("m", false)]));
    assert_eq!(take(), Vec::<String>::new());
    apply(host(6, &[("n", false), ("m", false)]));
    assert_eq!(take(), ["n"], "another drain");
}

#[tokio::test]
async fn drained_nodes_are_told_once_all_hosts_are_listed() {
    let shared = Shared::new(&unreachable_client(), "system");
    let mut notices = shared.notices.subscribe();
    let spec = json!({
        "version": "1", "interface": "eth0", "addresses": [], "active": true, "activeShards": "0-127",
        "drainingNodes": [{"node": "n", "forwards": false}],
    });
    for change in shared.hosts.cache.apply(edge_object("a", 1, &spec)) {
        shared.on_host(&change);
    }
    shared.tell_of_drained_nodes();
    assert_eq!(notices.next().now_or_never(), None, "of some hosts alone nobody knows");
    let Event::Apply(host) = edge_object("a", 1, &spec) else { panic!("an object") };
    for event in [Event::Init, Event::InitApply(host), Event::InitDone] {
        for change in shared.hosts.cache.apply(event) {
            shared.on_host(&change);
        }
    }
    shared.hosts.cache.listed().await;
    shared.tell_of_drained_nodes();
    assert!(notices.next().now_or_never().flatten().is_some());
}

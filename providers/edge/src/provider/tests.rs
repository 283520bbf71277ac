// SPDX-License-Identifier: Apache-2.0
//! Writes whose answers are lost.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kube::client::Body;
use steerage_provider_api::{GroupKey, HealthCheck, HealthProtocol, Target, TargetGroup, Targets};
use steerage_watch::Event;

use super::*;
use crate::allocation::tests::{ip, load_balancer, unreachable_client};
use crate::cache::Cache;

const POOL: &str = r#"{"metadata": {"name": "default", "uid": "u", "resourceVersion": "1"}, "spec": {"addresses": ["10.9.0.0/24"]}}"#;

/// An empty list.
fn list<S: Clone + References>(cache: &Cache<S>) {
    cache.apply(Event::Init);
    cache.apply(Event::InitDone);
}

/// An API server with one object, whose answer to the first patch is lost. The watch brings nothing.
fn losing_an_answer() -> (Client, Arc<Mutex<Value>>) {
    let object = Arc::new(Mutex::new(json!(null)));
    let stored = Arc::clone(&object);
    let patches = Arc::new(AtomicUsize::new(0));
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (stored, patches) = (Arc::clone(&stored), Arc::clone(&patches));
        async move {
            let (head, body) = request.into_parts();
            let is_patch = head.method == http::Method::PATCH;
            if is_patch {
                let body = body.collect_bytes().await.map_err(io::Error::other)?;
                let patch: Value = serde_json::from_slice(&body)?;
                let mut object = stored.lock().expect("not poisoned");
                assert_eq!(patch["metadata"]["resourceVersion"], object["metadata"]["resourceVersion"]);
                for (field, value) in patch["spec"].as_object().expect("a spec") {
                    object["spec"][field].clone_from(value);
                }
                let version: u32 = object["metadata"]["resourceVersion"]
                    .as_str()
                    .expect("a version")
                    .parse()
                    .expect("a number");
                object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
            }
            if is_patch && patches.fetch_add(1, Ordering::AcqRel) == 0 {
                return Err(io::Error::other("connection reset"));
            }
            let text = stored.lock().expect("not poisoned").to_string();
            Ok(http::Response::new(Body::from(text.into_bytes())))
        }
    });
    (Client::new(service, "default"), object)
}

fn with_group(lb: LoadBalancer) -> LoadBalancer {
    let health_check = HealthCheck {
        protocol: HealthProtocol::Tcp,
        port: Some(80),
        is_of_service: false,
        interval: Duration::from_secs(1),
        timeout: Duration::from_secs(1),
        healthy_threshold: 1,
        unhealthy_threshold: 1,
    };
    let targets = Targets::Nodes(TargetSet::own(Vec::<Target>::new()));
    let group = TargetGroup { key: GroupKey::Vip, health_check, affinity: None, targets };
    LoadBalancer { groups: vec![group], published: vec![ip("10.9.0.1")], ..lb }
}

/// A provider that has listed nothing but the pool.
fn with_pool(client: &Client) -> EdgeProvider {
    let provider = EdgeProvider {
        shared: Arc::new(Shared::new(client, "system")),
        _stop: CancellationToken::new().drop_guard(),
    };
    let shared = &provider.shared;
    shared.activated.set(()).expect("set once");
    list(&shared.balancers.cache);
    list(&shared.node_sets.cache);
    list(&shared.pools.cache);
    list(&shared.health.cache);
    list(&shared.hosts.cache);
    shared.pools.cache.apply(Event::Apply(Entry::parse(POOL).expect("a pool")));
    provider
}

/// A creation failed, and from then on only the targets change: the Service asks for what is unsupported.
#[tokio::test(start_paused = true)]
async fn reservation_of_a_creation_that_failed_ends_by_a_change_of_targets() {
    let service = tower::service_fn(|request: http::Request<Body>| async move {
        if request.method() != http::Method::GET {
            return Err(io::Error::other("connection reset"));
        }
        let status =
            json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "message": "", "code": 404});
        let body = Body::from(status.to_string().into_bytes());
        Ok(http::Response::builder().status(404).body(body).expect("a response"))
    });
    let provider = with_pool(&Client::new(service, "default"));
    let lb = with_group(load_balancer("web", &[]));
    provider.apply(&lb, Compare::Remembered).await.expect_err("no answer");
    let name = spec::object_name(&lb.owner);
    let nodes = Some(TargetSet::own(Vec::<Target>::new()));
    let targets = GroupTargets { nodes, ..GroupTargets::default() };
    let waiting = provider.set_targets(&lb.owner, &targets).await.expect("no object");
    assert!(matches!(waiting.progress, Progress::Again(left) if !left.is_zero()), "{waiting:?}");
    assert!(provider.shared.is_reserved(&name));
    tokio::time::advance(Duration::from_secs(10)).await;
    let settled = provider.set_targets(&lb.owner, &targets).await.expect("no object");
    assert_eq!(settled.progress, Progress::Done);
    assert!(!provider.shared.is_reserved(&name));
}

/// The provider must not compare with what was there before the write: the watch may be late.
#[tokio::test(start_paused = true)]
async fn write_without_an_answer_is_read_before_the_next_one() {
    let (client, object) = losing_an_answer();
    let provider = with_pool(&client);
    let before = with_group(load_balancer("web", &[]));
    let other =
        LoadBalancer { source_ranges: vec!["192.0.2.0/24".parse().expect("a range")], ..before.clone() };
    let mut metadata = serde_json::to_value(spec::metadata(&before.owner)).expect("metadata");
    metadata["resourceVersion"] = json!("1");
    let structure = spec::structure(&before, vec![ip("10.9.0.1")]).expect("a spec");
    let known = json!({"metadata": metadata, "spec": structure});
    object.lock().expect("not poisoned").clone_from(&known);
    provider.shared.balancers.cache.apply(Event::Apply(Entry::parse(&known.to_string()).expect("an object")));

    provider.apply(&other, Compare::Remembered).await.expect_err("no answer");
    let ranges = || object.lock().expect("not poisoned")["spec"]["sourceRanges"].clone();
    assert_eq!(ranges(), json!(["192.0.2.0/24"]), "it had an effect");
    let outcome = provider.apply(&before, Compare::Remembered).await.expect("an answer");
    assert_eq!((outcome.progress, ranges()), (Progress::Done, json!(null)));
}

/// A request for another address had no answer, and is taken back before the watch shows that it succeeded.
#[tokio::test(start_paused = true)]
async fn address_of_a_write_without_an_answer_is_not_given_away() {
    let (client, object) = losing_an_answer();
    let provider = with_pool(&client);
    let shared = &provider.shared;
    let (before, requesting) =
        (with_group(load_balancer("web", &[])), with_group(load_balancer("web", &["10.9.0.7"])));
    let mut metadata = serde_json::to_value(spec::metadata(&before.owner)).expect("metadata");
    metadata["resourceVersion"] = json!("1");
    let structure = spec::structure(&before, vec![ip("10.9.0.1")]).expect("a spec");
    let known = json!({"metadata": metadata, "spec": structure});
    object.lock().expect("not poisoned").clone_from(&known);
    shared.balancers.cache.apply(Event::Apply(Entry::parse(&known.to_string()).expect("an object")));

    provider.apply(&requesting, Compare::Remembered).await.expect_err("no answer");
    let is_taken = |shared: &Shared, address| shared.allocate(&load_balancer("other", &[address])).is_err();
    let waiting = provider.apply(&before, Compare::Remembered).await.expect("nothing to write");
    assert!(matches!(waiting.progress, Progress::Again(left) if !left.is_zero()), "{waiting:?}");
    assert!(is_taken(shared, "10.9.0.7"), "the write may still have an effect");
    tokio::time::advance(Duration::from_secs(10)).await;
    let read = provider.apply(&before, Compare::Remembered).await.expect("nothing to write");
    // It had one, and nothing requests another address than the object has now.
    assert_eq!((read.progress, read.ingress[0].ip), (Progress::Done, Some(ip("10.9.0.7"))));
    assert!(is_taken(shared, "10.9.0.7"), "by the object");
    assert!(!is_taken(shared, "10.9.0.1"));
}

/// Nothing changes in the minute after which the second load balancer gets another address.
#[tokio::test(start_paused = true)]
async fn load_balancer_with_the_address_of_another_is_reconciled_again_in_time() {
    let client = unreachable_client();
    let provider = with_pool(&client);
    let lbs = ["a", "b"].map(|name| with_group(load_balancer(name, &[])));
    for lb in &lbs {
        let structure = spec::structure(lb, vec![ip("10.9.0.1")]).expect("a spec");
        let object = json!({"metadata": spec::metadata(&lb.owner), "spec": structure});
        let entry = Entry::parse(&object.to_string()).expect("an object");
        provider.shared.balancers.cache.apply(Event::Apply(entry));
    }
    let mut progress = Vec::new();
    for lb in &lbs {
        let outcome = provider.apply(lb, Compare::Remembered).await.expect("nothing to write");
        assert_eq!(outcome.ingress[0].ip, Some(ip("10.9.0.1")));
        progress.push(outcome.progress);
    }
    assert_eq!(progress, [Progress::Done, Progress::Again(Duration::from_mins(1))]);
}

/// Its clients would reach the pods of the Service that gets the address.
#[tokio::test(start_paused = true)]
async fn refused_service_keeps_its_published_address() {
    let client = unreachable_client();
    let address = |number: u32| IpAddr::from((0x0a00_0000 + 2 * number).to_be_bytes());
    let ranges: Vec<_> = (0..1001).map(|number| address(number).into()).collect();
    let refused = LoadBalancer { source_ranges: ranges, ..with_group(load_balancer("web", &[])) };
    let new = LoadBalancer { published: Vec::new(), ..refused.clone() };
    for (lb, keeps) in [(new, false), (refused, true)] {
        let provider = with_pool(&client);
        let error = provider.apply(&lb, Compare::Remembered).await.expect_err("too many ranges");
        assert_eq!(error.reason(), spec::TOO_MANY_SOURCE_RANGES);
        let other = provider.shared.allocate(&load_balancer("other", &["10.9.0.1"]));
        assert_eq!(other.is_err(), keeps);
    }
}

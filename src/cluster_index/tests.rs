// SPDX-License-Identifier: Apache-2.0
//! Events become requests, and what a snapshot shares.

use std::time::Duration;

use futures::FutureExt as _;
use steerage_model::{Endpoint, Family, ServiceKind};
use steerage_watch::Backoff;

use super::*;
use crate::queue::ReconcileOutcome;
use crate::queue::Which;
use crate::removal_hold::{HoldMetrics, LONGEST_HOLD};
use crate::request_queue::RequestBatch;

fn slice(ready: &[&str]) -> EndpointSlice {
    let service = Key::new("default", "web");
    let endpoints = ready.iter().map(|node| Endpoint::ready([10, 0, 0, 1].into(), node)).collect();
    EndpointSlice { endpoints, ..EndpointSlice::new(service.clone(), service, Family::V4) }
}

pub(crate) fn service() -> Service {
    let mut service = Service::new(Key::new("default", "web"));
    service.uid = "u".to_owned();
    service.kind = ServiceKind::LoadBalancer;
    service.class = Some("steerage.dev/edge".to_owned());
    service
}

fn owner() -> Owner {
    owner_of(&service())
}

fn listed() -> ClusterIndex {
    let backoff = Backoff::new(Duration::from_mins(1), Duration::from_mins(1));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let classes = ManagedClasses { provider: "edge", serve_unset: false, others: Vec::new() };
    let cluster = ClusterIndex::new(classes, requests, Arc::default());
    cluster.on_service(Event::Init);
    cluster.on_service(Event::InitApply(service()));
    cluster.on_service(Event::InitDone);
    cluster.on_node(Event::Init);
    cluster.on_node(Event::InitDone);
    cluster.on_slice(Event::Init);
    cluster.on_slice(Event::InitDone);
    cluster.requests.clear();
    cluster
}

fn next(cluster: &ClusterIndex) -> Option<ReconcileRequest> {
    let (key, RequestBatch(mut batch)) = cluster.requests.start_next(Which::All)?;
    cluster.requests.finish(&key, ReconcileOutcome::Done);
    let request = batch.remove(&owner()).expect("the Service's");
    assert!(batch.is_empty(), "{batch:?}");
    Some(request)
}

#[test]
fn every_change_of_a_service_becomes_one_merged_request() {
    let cluster = listed();
    while cluster.requests.changed().now_or_never().is_some() {}
    cluster.on_slice(Event::Apply(slice(&["a"])));
    let first = Instant::now();
    cluster.on_slice(Event::Apply(slice(&["b"])));
    assert!(cluster.requests.changed().now_or_never().is_some());
    let request = next(&cluster).expect("a request");
    assert!(request.endpoints_changed.expect("a time") <= first, "the first change counts");
    assert_eq!(next(&cluster), None);
    cluster.on_service(Event::Delete { key: service().key, version: String::new() });
    assert_eq!(next(&cluster), None, "nothing was applied for it");
    cluster.on_service(Event::Apply(service()));
    let request = ReconcileRequest { may_change: true, ..ReconcileRequest::default() };
    assert_eq!(next(&cluster), Some(request));
}

#[test]
fn services_of_other_classes_become_no_request() {
    let cluster = listed();
    let mut theirs = service();
    theirs.key = Key::new("default", "theirs");
    theirs.class = Some("example.com/other".to_owned());
    cluster.on_service(Event::Apply(theirs));
    assert_eq!(next(&cluster), None);
}

#[test]
fn only_a_changed_specification_ends_a_backoff() {
    let cluster = listed();
    let fail = |cluster: &ClusterIndex| {
        cluster.requests.add(&owner(), ReconcileRequest::default(), true);
        let (key, batch) = cluster.requests.start_next(Which::All).expect("due");
        cluster.requests.finish(&key, ReconcileOutcome::Failed(None, batch));
    };
    let mut state = crate::applied::AppliedState::default();
    state.fingerprint = Some(plan::fingerprint(&service()));
    cluster.applied.put(&owner(), state);
    fail(&cluster);
    cluster.on_slice(Event::Apply(slice(&["a"])));
    let mut written = service();
    written.finalizers.push(steerage_model::names::FINALIZER.to_owned());
    cluster.on_service(Event::Apply(written));
    assert_eq!(next(&cluster), None, "an own write and an endpoint leave the backoff");
    let mut edited = service();
    edited.load_balancer_ip = Some("10.0.0.1".to_owned());
    cluster.on_service(Event::Apply(edited));
    assert!(next(&cluster).is_some());
}

#[test]
fn nodes_are_prepared_once_for_many_plans() {
    let cluster = listed();
    let config = plan::Config::with_defaults(
        steerage_provider_edge::capabilities(),
        steerage_provider_api::Steering::Api,
    );
    let nodes = || cluster.snapshot(&owner(), &config).expect("the Service").nodes;
    assert!(Arc::ptr_eq(&nodes(), &nodes()));
    let before = nodes();
    cluster.on_slice(Event::Apply(slice(&["a"])));
    assert!(Arc::ptr_eq(&before, &nodes()));
    assert!(!cluster.requests.take_nodes_changed());
    cluster.on_node(Event::Apply(Node { name: "a".to_owned(), ..Node::default() }));
    assert!(cluster.requests.take_nodes_changed());
    assert!(!Arc::ptr_eq(&before, &nodes()));
}

fn node(name: &str, is_excluded: bool) -> Event<Node> {
    let addresses = vec!["10.0.0.1".parse().expect("ip")];
    Event::Apply(Node { name: name.to_owned(), addresses, excluded: is_excluded, ..Node::default() })
}

#[tokio::test]
async fn cordoned_nodes_drain_if_that_is_asked_for() {
    for drains in [false, true] {
        let cluster = listed().with_cordoned_nodes_drained(drains);
        cluster.on_node(node("a", false));
        let addresses = vec!["10.0.0.2".parse().expect("ip")];
        let cordoned = Node { name: "b".to_owned(), addresses, cordoned: true, ..Node::default() };
        cluster.on_node(Event::Apply(cordoned));
        let set = cluster.nodes().set(SharedSet::Eligible);
        assert_eq!((set.targets.len(), set.draining.len()), if drains { (1, 1) } else { (2, 0) });
    }
}

#[tokio::test(start_paused = true)]
async fn mass_removal_from_a_shared_set_is_held_and_then_a_change() {
    let cluster = listed().with_breaker(RemovalBreaker::new(LONGEST_HOLD, HoldMetrics::default()));
    let eligible = || -> String {
        let set = cluster.nodes().set(SharedSet::Eligible);
        set.targets.iter().map(|target| target.node.as_str()).collect()
    };
    for name in ["a", "b", "c", "d", "e", "f"] {
        cluster.on_node(node(name, false));
    }
    assert!(cluster.take_node_change().is_some_and(|change| change.sets == [SharedSet::Eligible]));
    for name in ["a", "b", "c", "d"] {
        cluster.on_node(node(name, true));
    }
    let change = cluster.take_node_change().expect("nodes changed");
    assert_eq!((change.sets, eligible()), (vec![], "abcdef".to_owned()));
    assert_eq!(cluster.next_release(), Some(Instant::now() + LONGEST_HOLD));
    let deleted = |key: &str| Event::Delete { key: key.to_owned(), version: String::new() };
    cluster.on_node(deleted("a"));
    assert_eq!(eligible(), "bcdef", "a deleted node leaves at once");
    cluster.on_node(node("b", false));
    assert!(cluster.take_node_change().is_some_and(|change| change.sets == [SharedSet::Eligible]));

    tokio::time::advance(Duration::from_secs(29)).await;
    while cluster.requests.take_nodes_changed() {}
    cluster.release_removals();
    assert!(!cluster.requests.take_nodes_changed(), "too early");
    let generation = cluster.nodes().generation;
    tokio::time::advance(Duration::from_secs(1)).await;
    cluster.release_removals();
    assert!(cluster.requests.take_nodes_changed());
    assert!(cluster.nodes().generation > generation, "plans and providers know the newer set");
    let change = cluster.take_node_change().expect("removals are released");
    assert_eq!((change.sets, eligible()), (vec![SharedSet::Eligible], "bef".to_owned()));
    assert_eq!(cluster.next_release(), None);
}

/// Also its first look at nodes: what is excluded there left at an unknown time.
#[tokio::test(start_paused = true)]
async fn process_that_knows_no_earlier_targets_holds_nothing() {
    let cluster = listed().with_breaker(RemovalBreaker::new(LONGEST_HOLD, HoldMetrics::default()));
    for (name, is_excluded) in [("a", true), ("b", true), ("c", true), ("d", false)] {
        cluster.on_node(node(name, is_excluded));
    }
    assert_eq!(cluster.nodes().set(SharedSet::Eligible).targets.len(), 1);
    assert_eq!(cluster.next_release(), None);
}

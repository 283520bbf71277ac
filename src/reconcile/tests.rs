// SPDX-License-Identifier: Apache-2.0
//! What a reconcile does while the cluster changes beside it.

use std::future::pending;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::stream::BoxStream;
use kube::Client;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use steerage_model::{
    Condition, Endpoint, EndpointSlice, Family, Ingress, Node, Pod, PodGate, Protocol, ServiceKind,
    ServicePort, TrafficPolicy,
};
use steerage_provider_api::{
    Addressing, Capabilities, Compare, GroupTargets, Health, LoadBalancer, Outcome, Provider,
    RequestedSources, Steering,
};
use steerage_watch::{Backoff, Event};

use super::*;
use crate::cluster_index::owner_of;
use crate::cluster_index::tests::service;
use crate::lease::Leadership;
use crate::plan::ManagedClasses;
use crate::pod_gates;
use crate::rate_limit::RateLimiter;
use crate::reasons;
use crate::removal_hold::LONGEST_HOLD;
use crate::repeated_logs::RepeatedLogs;
use crate::request_queue::RequestQueue;

mod polled;
mod refused;
mod removals;
mod visible_failures;

pub(crate) use polled::{Polled, Restriction};

/// A provider that counts deletions, gives prepared answers to previews, and answers nothing else.
#[derive(Default)]
pub(crate) struct Silent {
    deletions: AtomicUsize,
    pub(crate) refuses_deletions: bool,
    /// It reports no health; otherwise it does not answer.
    reports_no_health: bool,
    previews: Mutex<std::vec::IntoIter<Preview>>,
}

type Preview = Result<Option<Vec<String>>, Error>;

impl Silent {
    pub(crate) fn with_previews(answers: Vec<Preview>) -> Self {
        Self { previews: Mutex::new(answers.into_iter()), ..Self::default() }
    }

    pub(crate) fn without_health(self) -> Self {
        Self { reports_no_health: true, ..self }
    }
}

#[async_trait]
impl Provider for Silent {
    fn name(&self) -> &'static str {
        "edge"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            steerings: &[Steering::Api],
            protocols: &[Protocol::Tcp],
            addressing: Addressing::Vip,
            pod_targets: None,
            node_labels: None,
            shared_load_balancers: false,
            address_pools: false,
            ipv6: true,
            one_target_family: false,
            weights: true,
            shared_sets: true,
            affinity: true,
            fails_open: true,
            health_interval: (Duration::from_secs(1), Duration::from_mins(1)),
        }
    }

    async fn apply(&self, _: &LoadBalancer, _: Compare) -> Result<Outcome, Error> {
        pending().await
    }

    async fn set_targets(&self, _: &Owner, _: &GroupTargets) -> Result<Outcome, Error> {
        pending().await
    }

    async fn restrict_sources(&self, _: &Owner, _: &RequestedSources) -> Restriction {
        pending().await
    }

    fn reports_health(&self) -> bool {
        !self.reports_no_health
    }

    async fn target_health(&self, _: &Owner) -> Result<Health, Error> {
        if self.reports_no_health {
            return Ok(Health::default());
        }
        pending().await
    }

    async fn delete(&self, _: &Owner) -> Result<Progress, Error> {
        self.deletions.fetch_add(1, Ordering::Relaxed);
        if self.refuses_deletions {
            return Err(Error::invalid("OperationNotPermitted", "It is protected."));
        }
        Ok(Progress::Done)
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        pending().await
    }

    async fn preview(&self, _: &LoadBalancer) -> Preview {
        self.previews.lock().expect("lock").next().expect("an answer")
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        Box::pin(futures::stream::pending())
    }
}

/// An API server that never answers.
pub(crate) fn silent_client() -> Client {
    let service =
        tower::service_fn(|_| pending::<Result<http::Response<kube::client::Body>, std::io::Error>>());
    Client::new(service, "default")
}

/// An API server that accepts every write.
pub(crate) fn accepting() -> Client {
    let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"}});
        let body = kube::client::Body::from(service.to_string().into_bytes());
        Ok::<_, std::io::Error>(http::Response::new(body))
    });
    Client::new(service, "default")
}

/// An API server that accepts every write, and the bodies of these.
pub(crate) fn recording() -> (Client, Arc<Mutex<Vec<Value>>>) {
    recording_of("Service")
}

/// Shows the reconciler the status that it has written, as the watch would.
pub(crate) fn show_status(reconciler: &Reconciler, owner: &Owner, bodies: &[Value]) {
    let Some(Snapshot { mut service, .. }) = reconciler.cluster.snapshot(owner, &reconciler.config) else {
        return;
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let conditions = bodies.iter().filter_map(|body| body["status"]["conditions"].as_array()).flatten();
    for written in conditions {
        let condition = Condition {
            kind: text(&written["type"]),
            status: text(&written["status"]),
            reason: text(&written["reason"]),
            message: text(&written["message"]),
            observed_generation: written["observedGeneration"].as_i64(),
        };
        service.conditions.retain(|known| known.kind != condition.kind);
        service.conditions.push(condition);
    }
    reconciler.cluster.on_service(Event::Apply(service));
}

/// The same for writes of this kind.
pub(crate) fn recording_of(kind: &'static str) -> (Client, Arc<Mutex<Vec<Value>>>) {
    let bodies = Arc::<Mutex<Vec<Value>>>::default();
    let seen = Arc::clone(&bodies);
    let api_server = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let seen = Arc::clone(&seen);
        async move {
            let bytes = request.into_body().collect_bytes().await.expect("body");
            seen.lock().expect("lock").push(serde_json::from_slice(&bytes).unwrap_or_default());
            let answer = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": "web"}});
            let body = kube::client::Body::from(answer.to_string().into_bytes());
            Ok::<_, std::io::Error>(http::Response::new(body))
        }
    });
    (Client::new(api_server, "default"), bodies)
}

/// A reconciler that knows one Service.
pub(crate) fn reconciler(provider: Arc<dyn Provider>, client: Client) -> Reconciler {
    let classes = ManagedClasses { provider: "edge", serve_unset: false, others: Vec::new() };
    let backoff = Backoff::new(Duration::from_millis(250), Duration::from_mins(5));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let applied = Arc::<AppliedStates>::default();
    let cluster = Arc::new(ClusterIndex::new(classes.clone(), requests, Arc::clone(&applied)));
    for event in [Event::Init, Event::InitApply(service()), Event::InitDone] {
        cluster.on_service(event);
    }
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let (limiter, holds) = (RateLimiter::new(1000.0, 1000), metrics.holds.clone());
    Reconciler {
        cluster,
        config: Config::with_defaults(provider.capabilities(), Steering::Api),
        provider: LeaderProvider::new(provider, Leadership::held(), limiter, metrics.clone()),
        reader: ServiceReader::new(client.clone()),
        writer: ServiceWriter::new(client.clone(), "edge", Leadership::held()),
        recorder: Recorder::new(client, "controller", "test", &mut registry).0,
        metrics,
        applied,
        staleness: Staleness::default(),
        freeze_targets_after: None,
        breaker: RemovalBreaker::new(LONGEST_HOLD, holds),
        resync_period: Duration::from_mins(10),
        pod_gates: None,
        migrate_legacy_annotations: false,
        repeated_logs: RepeatedLogs::default(),
    }
}

/// Otherwise a change of a node, or the end of the Service, during the first reconcile would add no request for it.
#[tokio::test]
async fn owner_is_known_while_its_first_reconcile_runs() {
    let reconciler = reconciler(Arc::new(Silent::default()), silent_client());
    let owner = owner_of(&service());
    let request = ReconcileRequest::FULL;
    let mut running = std::pin::pin!(reconciler.reconcile(&owner, &request));
    assert!(futures::poll!(&mut running).is_pending());
    assert_eq!(reconciler.applied.owners(), std::slice::from_ref(&owner));
}

/// Reconciles an owner that the watch does not show, with an API server that gives this answer. Returns the number of deletions, and
/// whether the request is repeated.
async fn reconcile_orphan(status: u16, answer: Value) -> (usize, bool) {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        assert_eq!(request.uri().path(), "/api/v1/namespaces/default/services/lost");
        let body = kube::client::Body::from(answer.to_string().into_bytes());
        let response = http::Response::builder().status(status).body(body).unwrap();
        async { Ok::<_, std::io::Error>(response) }
    });
    let provider = Arc::<Silent>::default();
    let reconciler = reconciler(Arc::<Silent>::clone(&provider), Client::new(service, "default"));
    let owner = Owner { service: steerage_model::Key::new("default", "lost"), uid: "u-1".to_owned() };
    let request = ReconcileRequest { exists_at_provider: true, ..ReconcileRequest::default() };
    let outcome = reconciler.reconcile(&owner, &request).await;
    assert!(reconciler.applied.owners().is_empty(), "it stays unknown");
    (provider.deletions.load(Ordering::Relaxed), matches!(outcome, ReconcileOutcome::Failed(None, _)))
}

/// Deletion protection, for example. The resync brings the next try.
#[tokio::test(start_paused = true)]
async fn refused_deletion_keeps_the_finalizer_and_is_not_retried() {
    let provider = Arc::new(Silent { refuses_deletions: true, ..Silent::default() });
    let reconciler = reconciler(Arc::<Silent>::clone(&provider), silent_client());
    let mut leaving = service();
    leaving.finalizers = vec![plan::finalizer(&leaving).to_owned()];
    leaving.deleting = true;
    let owner = owner_of(&leaving);
    reconciler.cluster.on_service(Event::Apply(leaving));
    let request = ReconcileRequest::default();
    let outcome = tokio::time::timeout(Duration::from_secs(10), reconciler.reconcile(&owner, &request)).await;
    assert!(matches!(outcome.expect("no write"), ReconcileOutcome::Done));
    assert_eq!(provider.deletions.load(Ordering::Relaxed), 1);
}

/// A Service of the managed class with this UID and type.
fn stored(uid: &str, kind: &str) -> Value {
    let metadata = json!({"name": "lost", "namespace": "default", "uid": uid});
    json!({"metadata": metadata, "spec": {"type": kind, "loadBalancerClass": "steerage.dev/edge"}})
}

#[tokio::test]
async fn load_balancer_is_deleted_only_if_the_api_server_has_no_such_service() {
    let not_found = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
    assert_eq!(reconcile_orphan(404, not_found.clone()).await, (1, false));
    assert_eq!(reconcile_orphan(200, stored("u-2", "LoadBalancer")).await, (1, false), "created again");
    assert_eq!(reconcile_orphan(200, stored("u-1", "LoadBalancer")).await, (0, true), "missed by the watch");
    assert_eq!(reconcile_orphan(200, stored("u-1", "Unheard")).await, (0, true), "unreadable");
    assert_eq!(reconcile_orphan(404, json!("a proxy's page")).await, (0, true), "not an API server");
    for code in [403, 429, 500] {
        let failure = json!({"kind": "Status", "status": "Failure", "code": code});
        assert_eq!(reconcile_orphan(code, failure).await, (0, true), "{code}");
    }
}

/// Between the times that the provider gave, other requests read and try nothing.
#[tokio::test(start_paused = true)]
async fn health_and_refused_targets_are_looked_at_again_when_due() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    let mut whole = service();
    whole.cluster_ips = vec!["10.96.0.1".parse().expect("ip")];
    whole.ports = vec![ServicePort::new("", Protocol::Tcp, 80, Some(30080))];
    reconciler.cluster.on_service(Event::Apply(whole));
    let owner = owner_of(&service());
    let mut seen = Vec::new();
    for wait in [0, 1, 11, 60] {
        tokio::time::advance(Duration::from_secs(wait)).await;
        let outcome = reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
        let ReconcileOutcome::RequeueAfter(after, request) = outcome else { panic!("{outcome:?}") };
        assert_eq!(request, ReconcileRequest::default());
        assert!((1..=11).contains(&after.as_secs()), "{after:?}");
        seen.push((provider.applied.load(Ordering::Acquire), provider.health_read.load(Ordering::Acquire)));
    }
    assert_eq!(seen, [(1, 1), (1, 1), (1, 2), (2, 3)]);
    let count = |status| reconciler.metrics.conditions.count("edge", "Programmed", status);
    assert_eq!((count("True"), count("False"), count("Unknown")), (1, 0, 0), "counted once");
}

#[tokio::test(start_paused = true)]
async fn health_is_read_sooner_while_a_pod_waits_for_it() {
    let provider = Arc::new(Polled { is_slow: AtomicBool::new(true), ..Polled::default() });
    let mut reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    let pod = pod_gates::tests::pod(None);
    pod_gates::tests::add(&mut reconciler, pod.clone());
    let owner = owner_of(&service());
    let read_again = async |reconciler: &Reconciler| {
        let before = provider.health_read.load(Ordering::Acquire);
        reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
        tokio::time::advance(Duration::from_secs(11)).await;
        reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
        provider.health_read.load(Ordering::Acquire) - before
    };
    assert_eq!(read_again(&reconciler).await, 1, "without the flag only the first time");
    reconciler.pod_gates = Some(Arc::default());
    assert_eq!(read_again(&reconciler).await, 2);
    let due_at = reconciler.applied.get(&owner).and_then(|applied| applied.due_at()).expect("a time");
    assert!(due_at <= Instant::now() + Duration::from_secs(10), "and without another request");
    let met = PodGate { is_met: true, reason: String::new() };
    reconciler.cluster.on_pod(Event::Apply(Pod { gate: Some(met), ..pod }));
    assert_eq!(read_again(&reconciler).await, 1, "what was due");
    assert_eq!(read_again(&reconciler).await, 0);
}

/// A Service under the policy Local.
pub(crate) fn local_service() -> Service {
    let mut whole = service();
    whole.cluster_ips = vec!["10.96.0.1".parse().expect("ip")];
    whole.external_policy = TrafficPolicy::Local;
    whole.health_check_node_port = Some(32000);
    whole.ports = vec![ServicePort::new("", Protocol::Tcp, 80, Some(30080))];
    whole
}

/// Nodes with these names, a character each.
pub(crate) fn add_nodes(reconciler: &Reconciler, names: &str) {
    for name in names.chars() {
        let addresses = vec!["10.0.0.1".parse().expect("ip")];
        let node = Node { name: name.to_string(), addresses, ..Node::default() };
        reconciler.cluster.on_node(Event::Apply(node));
    }
}

/// Its endpoints, one on each of these nodes.
pub(super) fn set_endpoints(reconciler: &Reconciler, nodes: &str) {
    let endpoint = |node: char| Endpoint::ready([10, 2, 0, 1].into(), &node.to_string());
    let key = service().key;
    let slice = EndpointSlice::new(key.clone(), key, Family::V4);
    let slice = EndpointSlice { endpoints: nodes.chars().map(endpoint).collect(), ..slice };
    reconciler.cluster.on_slice(Event::Apply(slice));
}

/// A reconciler of [`local_service`] with an endpoint on node a, that Service, and the bodies of what is written.
pub(super) fn local_service_on_a(provider: &Arc<Polled>) -> (Reconciler, Service, Arc<Mutex<Vec<Value>>>) {
    let (client, bodies) = recording();
    let reconciler = reconciler(Arc::<Polled>::clone(provider), client);
    add_nodes(&reconciler, "a");
    set_endpoints(&reconciler, "a");
    let service = local_service();
    reconciler.cluster.on_service(Event::Apply(service.clone()));
    (reconciler, service, bodies)
}

/// The conditions of the last status that a full reconcile writes.
pub(super) async fn reconciled_conditions(
    (reconciler, service, bodies): &(Reconciler, Service, Arc<Mutex<Vec<Value>>>),
) -> Vec<Value> {
    bodies.lock().expect("lock").clear();
    reconciler.reconcile(&owner_of(service), &ReconcileRequest::FULL).await;
    let bodies = bodies.lock().expect("lock");
    let mut written = bodies.iter().filter_map(|body| body["status"]["conditions"].as_array());
    written.next_back().expect("a status").clone()
}

/// Workers are reserved for requests that change targets alone: a comparison that is due has a request of its own.
#[tokio::test(start_paused = true)]
async fn request_of_targets_compares_nothing() {
    let provider = Arc::new(Polled::default());
    let (reconciler, service, _) = local_service_on_a(&provider);
    add_nodes(&reconciler, "b");
    reconciler.reconcile(&owner_of(&service), &ReconcileRequest::FULL).await;
    tokio::time::advance(reconciler.resync_period * 2).await;
    set_endpoints(&reconciler, "b");
    let moved = ReconcileRequest {
        endpoints_changed: Some(Instant::now()),
        is_published: true,
        ..ReconcileRequest::default()
    };
    let outcome = reconciler.reconcile(&owner_of(&service), &moved).await;
    assert_eq!(*provider.targets.lock().expect("lock"), "b");
    assert!(!provider.compared.load(Ordering::Acquire));
    let ReconcileOutcome::RequeueAfter(after, mut next) = outcome else { panic!("{outcome:?}") };
    assert!(after <= Duration::from_secs(1), "{after:?}");
    // Not even a change of endpoints that comes first makes it one of targets alone.
    next.endpoints_changed = Some(Instant::now());
    assert!(!next.is_of_targets());
    reconciler.reconcile(&owner_of(&service), &next).await;
    assert!(provider.compared.load(Ordering::Acquire));
}

/// A Service that is of type LoadBalancer again before its load balancer is deleted gets another one.
#[tokio::test(start_paused = true)]
async fn service_that_returns_during_its_deletion_is_programmed_again() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "a");
    set_endpoints(&reconciler, "a");
    let reconcile = async |is_load_balancer: bool| {
        let kind = if is_load_balancer { ServiceKind::LoadBalancer } else { ServiceKind::ClusterIp };
        reconciler.cluster.on_service(Event::Apply(Service { kind, ..local_service() }));
        reconciler.reconcile(&owner_of(&local_service()), &ReconcileRequest::default()).await;
        provider.applied.load(Ordering::Acquire)
    };
    assert_eq!(reconcile(true).await, 1);
    provider.deletes.store(true, Ordering::Release);
    assert_eq!(reconcile(false).await, 1);
    assert_eq!(reconcile(true).await, 2);
}

/// Clients wait for targets, and the provider's budget keeps the rate.
#[tokio::test(start_paused = true)]
async fn throttled_targets_of_a_published_service_are_tried_again_soon() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "ab");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    set_endpoints(&reconciler, "a");
    let usual = ReconcileRequest::default();
    let done = reconciler.reconcile(&owner_of(&service()), &usual).await;
    assert!(!matches!(done, ReconcileOutcome::Failed(..)));
    provider.throttles.store(true, Ordering::Release);
    set_endpoints(&reconciler, "b");
    let changed = ReconcileRequest { endpoints_changed: Some(Instant::now()), is_published: true, ..usual };
    for (request, seconds) in [(changed, 1), (ReconcileRequest::FULL, 10)] {
        let outcome = reconciler.reconcile(&owner_of(&service()), &request).await;
        let ReconcileOutcome::Failed(after, _) = outcome else { panic!("{outcome:?}") };
        assert_eq!(after, Some(Duration::from_secs(seconds)));
    }
}

/// It is no failure: after these the controller waits longer and longer, also when endpoints change.
#[tokio::test(start_paused = true)]
async fn part_that_is_not_in_place_is_shown_and_delays_no_endpoint() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "ab");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let owner = owner_of(&service());
    for (is_incomplete, nodes) in [(true, "a"), (true, "b"), (true, "ab"), (false, "a")] {
        provider.is_incomplete.store(is_incomplete, Ordering::Release);
        set_endpoints(&reconciler, nodes);
        let outcome = reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
        let ReconcileOutcome::RequeueAfter(after, _) = outcome else { panic!("{outcome:?}") };
        assert!(after <= Duration::from_mins(1), "{after:?}");
        assert_eq!(*provider.targets.lock().expect("lock"), nodes);
        let count = |status| reconciler.metrics.conditions.count("edge", "Programmed", status);
        let programmed = (count("True"), count("False"));
        assert_eq!(programmed, if is_incomplete { (0, 1) } else { (1, 0) }, "{nodes}");
        let applied = reconciler.applied.get(&owner).expect("applied");
        assert_eq!((applied.ingress.len(), applied.incomplete.is_some()), (1, is_incomplete));
        let degraded = reconciler.metrics.conditions.degraded_count("edge", reasons::PARTLY_PROGRAMMED);
        assert_eq!(degraded, i64::from(is_incomplete), "{nodes}");
    }
}

/// Nobody waits for an hour because a gateway says so, nor for a time that no clock can show.
#[test]
fn waits_that_the_provider_asks_for_have_a_limit() {
    let seconds = Duration::from_secs;
    assert_eq!(throttled_wait(None, true), seconds(1));
    assert_eq!(throttled_wait(None, false), seconds(10));
    assert_eq!(throttled_wait(Some(seconds(17)), true), seconds(17));
    assert_eq!(throttled_wait(Some(seconds(3600)), true), seconds(30));
    assert_eq!(throttled_wait(Some(Duration::MAX), false), seconds(300));
}

/// Nodes and pods send everything for a published address to the Service, so one that the cluster needs is neither asked for nor published.
#[tokio::test(start_paused = true)]
async fn address_of_the_cluster_is_neither_requested_nor_published() {
    for (requested, applied) in [(Some("10.9.0.1"), 0), (None, 1)] {
        let provider = Arc::new(Polled::default());
        let (reconciler, mut service, bodies) = local_service_on_a(&provider);
        let addresses = vec!["10.9.0.1".parse().expect("ip")];
        let node = Node { name: "cp".to_owned(), addresses, ..Node::default() };
        reconciler.cluster.on_node(Event::Apply(node));
        service.load_balancer_ip = requested.map(str::to_owned);
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        let all = (reconciler, service, bodies);
        let conditions = reconciled_conditions(&all).await;
        let programmed = conditions.iter().find(|of| of["type"] == "steerage.dev/Programmed").expect("set");
        let message = programmed["message"].as_str().expect("text");
        assert!(
            programmed["reason"] == reasons::CLUSTER_ADDRESS
                && message.contains("10.9.0.1")
                && message.contains("the node cp"),
            "{programmed}"
        );
        assert_eq!(provider.applied_count(), applied);
        let (reconciler, mut service, bodies) = all;
        let published = |bodies: &Mutex<Vec<Value>>| {
            bodies.lock().expect("lock").iter().any(|body| body["status"].get("loadBalancer").is_some())
        };
        assert!(!published(&bodies), "{requested:?}");
        // What is published already stays: that the node has it is another matter.
        service.ingress = vec![Ingress { ip: "10.9.0.1".parse().ok(), hostname: None, ip_mode: None }];
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        let conditions = reconciled_conditions(&(reconciler, service, bodies)).await;
        let programmed = conditions.iter().find(|of| of["type"] == "steerage.dev/Programmed").expect("set");
        assert_eq!(programmed["reason"], reasons::PROGRAMMED, "{programmed}");
    }
}

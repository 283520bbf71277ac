// SPDX-License-Identifier: Apache-2.0
//! The task: what it writes, and when.

use std::sync::atomic::AtomicUsize;

use futures::FutureExt as _;
use kube::Client;
use serde_json::{Value, json};
use steerage_model::{
    Endpoint, EndpointPort, EndpointSlice, Family, PodGate, PodRef, Protocol, Service, ServicePort,
};
use steerage_provider_api::{HealthState, TargetsAnnotation};
use steerage_watch::Event;

use super::*;
use crate::cluster_index::owner_of;
use crate::cluster_index::tests::service;
use crate::lease::Leadership;
use crate::reconcile::tests::{Silent, reconciler, recording_of, silent_client};

pub(crate) fn pod(gate: Option<&str>) -> Pod {
    Pod {
        key: Key::new("default", "web-1"),
        uid: "pod".to_owned(),
        addresses: vec![[10, 0, 0, 1].into()],
        can_serve: true,
        gate: gate.map(|reason| PodGate { is_met: false, reason: reason.to_owned() }),
    }
}

fn with_pods() -> Service {
    let ports = vec![ServicePort::new("web", Protocol::Tcp, 80, None)];
    let mut service =
        Service { ports, families: vec![Family::V4], cluster_ips: vec![[10, 96, 0, 1].into()], ..service() };
    service.annotations.insert("targets".to_owned(), "pods".to_owned());
    service
}

fn slice() -> EndpointSlice {
    let (service, name) = (Key::new("default", "web"), "web-1".to_owned());
    let unready = Endpoint {
        ready: false,
        serving: false,
        unready_pod: Some(Box::new(PodRef { name, uid: "pod".to_owned() })),
        ..Endpoint::ready([10, 0, 0, 1].into(), "node")
    };
    let ports = [EndpointPort { name: "web".to_owned(), protocol: Protocol::Tcp, port: 80 }].into();
    EndpointSlice {
        ports,
        endpoints: vec![unready],
        ..EndpointSlice::new(service.clone(), service, Family::V4)
    }
}

/// A cluster with one waiting pod of one Service.
fn cluster(pod: Pod) -> Arc<Reconciler> {
    let mut reconciler = reconciler(Arc::new(Silent::default()), silent_client());
    add(&mut reconciler, pod);
    Arc::new(reconciler)
}

/// Adds a waiting pod, and the Service that has it as a target.
pub(crate) fn add(reconciler: &mut Reconciler, pod: Pod) {
    reconciler.config.pod_readiness_gates = true;
    let annotation = TargetsAnnotation { name: "targets", nodes: "nodes", pods: "pods" };
    reconciler.config.capabilities.pod_targets = Some(annotation);
    reconciler.cluster.on_service(Event::Apply(with_pods()));
    reconciler.cluster.on_slice(Event::Apply(slice()));
    reconciler.cluster.on_pod(Event::Apply(pod));
}

fn healthy() -> TargetHealth {
    let target = "10.0.0.1:80".to_owned();
    TargetHealth { target, family: None, state: HealthState::Healthy, reason: String::new() }
}

/// The task beside a test, until it is dropped.
struct Running {
    gates: Arc<PodGates>,
    reconciler: Arc<Reconciler>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    fn new(reconciler: Arc<Reconciler>, client: Client, leadership: Leadership) -> Self {
        let (gates, stop) = (Arc::<PodGates>::default(), CancellationToken::new());
        let writer = PodWriter::new(client, leadership);
        let task = tokio::spawn(run(Arc::clone(&reconciler), Arc::clone(&gates), writer, stop.clone()));
        Self { gates, reconciler, stop, task }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("the task");
    }
}

fn reasons_of(bodies: &std::sync::Mutex<Vec<Value>>) -> Vec<(Value, Value)> {
    let bodies = bodies.lock().expect("lock");
    let condition = |body: &Value| body["status"]["conditions"][0].clone();
    bodies.iter().map(condition).map(|c| (c["status"].clone(), c["reason"].clone())).collect()
}

#[tokio::test(start_paused = true)]
async fn waiting_pod_gets_its_condition_in_two_writes() {
    let (client, bodies) = recording_of("Pod");
    let running = Running::new(cluster(pod(None)), client, Leadership::held());
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(reasons_of(&bodies), [(json!("False"), json!("Registering"))], "and no second time");
    // As the watch shows it.
    running.reconciler.cluster.on_pod(Event::Apply(pod(Some("Registering"))));
    running.gates.record(&owner_of(&with_pods()), &[healthy()], Instant::now());
    tokio::time::sleep(Duration::from_secs(20)).await;
    let healthy = (json!("True"), json!("TargetHealthy"));
    assert_eq!(reasons_of(&bodies), [(json!("False"), json!("Registering")), healthy]);
    let met = PodGate { is_met: true, reason: "TargetHealthy".to_owned() };
    running.reconciler.cluster.on_pod(Event::Apply(Pod { gate: Some(met), ..pod(None) }));
    tokio::time::sleep(Duration::from_mins(20)).await;
    assert_eq!(bodies.lock().expect("lock").len(), 2, "a gate that is met is never written again");
    assert_eq!(running.gates.lock().len(), 0, "nothing is kept of a Service for which no pod waits");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn restart_writes_nothing_for_conditions_that_are_right() {
    let (client, bodies) = recording_of("Pod");
    let running = Running::new(cluster(pod(Some("Registering"))), client, Leadership::held());
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(reasons_of(&bodies), []);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn outage_of_the_provider_ends_the_wait_after_ten_minutes() {
    let (client, bodies) = recording_of("Pod");
    let running = Running::new(cluster(pod(Some("Registering"))), client, Leadership::held());
    tokio::time::sleep(Duration::from_secs(599)).await;
    assert_eq!(reasons_of(&bodies), []);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(reasons_of(&bodies), [(json!("True"), json!("TimedOut"))]);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rejected_writes_are_repeated_ever_less_often() {
    let writes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&writes);
    let refusing = tower::service_fn(move |_: http::Request<kube::client::Body>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {
            let status =
                json!({"kind": "Status", "status": "Failure", "code": 429, "reason": "TooManyRequests"});
            let body = kube::client::Body::from(status.to_string().into_bytes());
            Ok::<_, std::io::Error>(http::Response::builder().status(429).body(body).expect("a response"))
        }
    });
    let running = Running::new(cluster(pod(None)), Client::new(refusing, "default"), Leadership::held());
    tokio::time::sleep(Duration::from_mins(5)).await;
    let count = writes.load(Ordering::Relaxed);
    assert!((10..25).contains(&count), "{count}");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_without_the_lease() {
    let (client, bodies) = recording_of("Pod");
    let running = Running::new(cluster(pod(None)), client, Leadership::default());
    tokio::time::sleep(Duration::from_mins(15)).await;
    assert_eq!(reasons_of(&bodies), []);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pod_without_a_service_waits_for_slices_that_may_come() {
    let (client, bodies) = recording_of("Pod");
    let reconciler = cluster(Pod { uid: "another".to_owned(), ..pod(None) });
    let running = Running::new(reconciler, client, Leadership::held());
    let second = Duration::from_secs(1);
    tokio::time::sleep(SLICES_GRACE.saturating_sub(second)).await;
    assert_eq!(reasons_of(&bodies), []);
    tokio::time::sleep(3 * second).await;
    assert_eq!(reasons_of(&bodies), [(json!("True"), json!("NoLoadBalancer"))]);
    assert_eq!(bodies.lock().expect("lock")[0]["metadata"]["uid"], json!("another"));
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pods_of_many_services_share_the_reads_of_health() {
    let gates = PodGates::default();
    assert_eq!(gates.poll(), HEALTH_POLL);
    gates.groups.store(100, Ordering::Relaxed);
    assert_eq!(gates.poll(), Duration::from_secs(25));
    assert!(gates.changed.notified().now_or_never().is_none());
}

/// Also while the watch does not show what was written, or the answer was lost.
#[test]
fn met_gate_is_never_taken_back() {
    let now = Instant::now();
    let condition = |is_met, reason| GateCondition { is_met, reason, message: String::new() };
    let (met, unhealthy) = (condition(true, "TargetHealthy"), condition(false, "TargetNotHealthy"));
    let mut wait = Wait { sent: Some(condition(false, "Registering")), ..Wait::begin(now) };
    assert!(wait.may_send(&met, now) && wait.may_send(&unhealthy, now));
    wait.sent = Some(met);
    assert!(!wait.may_send(&unhealthy, now + Duration::from_mins(5)));
    assert!(wait.may_send(&condition(true, "TimedOut"), now));
}

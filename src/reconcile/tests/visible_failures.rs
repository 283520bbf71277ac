// SPDX-License-Identifier: Apache-2.0
//! Failures that last are seen by users, are tried again, and cause few calls: conflicts, panics, and a status that the API server
//! rejects.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt as _;
use http::StatusCode;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::workers::{self, WorkerOptions};

/// The reason of the condition `Programmed` that was written last, and the number of statuses written.
fn programmed(bodies: &Mutex<Vec<Value>>) -> (String, usize) {
    let bodies = bodies.lock().expect("lock");
    let written: Vec<_> = bodies.iter().filter_map(|body| body["status"]["conditions"].as_array()).collect();
    let last = written.last().and_then(|found| found.iter().find(|c| c["type"] == "steerage.dev/Programmed"));
    let reason = last.and_then(|condition| condition["reason"].as_str()).unwrap_or_default();
    (reason.to_owned(), written.len())
}

#[tokio::test(start_paused = true)]
async fn conflict_that_lasts_is_shown_once() {
    let provider = Arc::new(Polled::default());
    let (reconciler, service, bodies) = local_service_on_a(&provider);
    provider.conflicts.store(true, Ordering::Release);
    let reconcile = async || {
        let outcome = reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
        show_status(&reconciler, &owner_of(&service), &bodies.lock().expect("lock"));
        matches!(outcome, ReconcileOutcome::Failed(None, _))
    };
    for second in 0..10 {
        assert!(reconcile().await, "retried after the backoff");
        assert_eq!(programmed(&bodies).1, 0, "{second} s: the next try resolves most conflicts");
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    for _ in 0..10 {
        assert!(reconcile().await);
        // Each says something else of the same conflict.
        assert_eq!(programmed(&bodies), ("ProviderConflict".to_owned(), 1));
        tokio::time::advance(Duration::from_secs(10)).await;
    }
    provider.conflicts.store(false, Ordering::Release);
    reconcile().await;
    assert_eq!(programmed(&bodies), ("Programmed".to_owned(), 2));
    provider.conflicts.store(true, Ordering::Release);
    reconciler.reconcile(&owner_of(&service), &ReconcileRequest::FULL).await;
    assert_eq!(programmed(&bodies).1, 2, "another conflict is given its time too");
}

/// A provider may have to wait, or to read again, before it meets the next one.
#[tokio::test(start_paused = true)]
async fn waits_between_conflicts_do_not_hide_them() {
    let provider = Arc::new(Polled::default());
    let (reconciler, service, bodies) = local_service_on_a(&provider);
    for number in 0..20 {
        provider.conflicts.store(number % 2 == 0, Ordering::Release);
        provider.throttles.store(number % 2 == 1, Ordering::Release);
        reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
        tokio::time::advance(Duration::from_secs(10)).await;
    }
    let written = bodies.lock().expect("lock").clone();
    let mut reasons = written.iter().filter_map(|body| body["status"]["conditions"].as_array()).flatten();
    assert!(reasons.any(|condition| condition["reason"] == "ProviderConflict"), "{written:?}");
}

/// A range that a refused Service no longer has must leave, whatever else meets a conflict.
#[tokio::test(start_paused = true)]
async fn conflict_does_not_keep_source_ranges_of_a_refused_service() {
    let provider = Arc::new(Polled::default());
    let (reconciler, mut service, _) = local_service_on_a(&provider);
    reconciler.reconcile(&owner_of(&service), &ReconcileRequest::FULL).await;
    provider.conflicts_targets.store(true, Ordering::Release);
    provider.set_rejecting(true);
    service.source_ranges = vec!["192.0.2.0/24".parse().expect("range")];
    reconciler.cluster.on_service(Event::Apply(service.clone()));
    set_endpoints(&reconciler, "");
    reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
    assert_eq!(*provider.restricted.lock().expect("lock"), ["192.0.2.0/24"]);
}

/// An API server that rejects every status while `refuses`, or finalizers, and counts these and events.
#[derive(Default)]
struct Refusing {
    refuses: AtomicBool,
    refuses_finalizers: bool,
    finalizers: AtomicUsize,
    statuses: AtomicUsize,
    events: Mutex<Vec<String>>,
}

impl Refusing {
    fn client(self: Arc<Self>) -> Client {
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let server = Arc::clone(&self);
            async move {
                let path = request.uri().path().to_owned();
                let bytes = request.into_body().collect_bytes().await.expect("body");
                let (status, answer) =
                    server.answer(&path, &serde_json::from_slice(&bytes).unwrap_or_default());
                let body = kube::client::Body::from(answer.to_string().into_bytes());
                Ok::<_, std::io::Error>(
                    http::Response::builder().status(status).body(body).expect("response"),
                )
            }
        });
        Client::new(service, "default")
    }

    fn answer(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        if path.contains("/events") {
            self.events.lock().expect("lock").push(body["reason"].as_str().unwrap_or_default().to_owned());
            let event =
                json!({"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "web"}});
            return (StatusCode::CREATED, event);
        }
        let message = "admission webhook denied the request";
        let failure = json!({"kind": "Status", "status": "Failure", "code": 403, "message": message});
        if body["metadata"].get("$deleteFromPrimitiveList/finalizers").is_some() && self.refuses_finalizers {
            self.finalizers.fetch_add(1, Ordering::AcqRel);
            return (StatusCode::FORBIDDEN, failure);
        }
        if path.ends_with("/status") {
            self.statuses.fetch_add(1, Ordering::AcqRel);
            if self.refuses.load(Ordering::Acquire) {
                return (StatusCode::FORBIDDEN, failure);
            }
        }
        (StatusCode::OK, json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}))
    }
}

#[tokio::test(start_paused = true)]
async fn status_that_is_rejected_costs_no_comparison_and_delays_no_endpoint() {
    let provider = Arc::new(Polled { is_slow: AtomicBool::new(true), ..Polled::default() });
    let server = Arc::new(Refusing { refuses: AtomicBool::new(true), ..Refusing::default() });
    let mut reconciler = reconciler(Arc::<Polled>::clone(&provider), Arc::clone(&server).client());
    let (recorder, writer) =
        Recorder::new(Arc::clone(&server).client(), "controller", "test", &mut Registry::default());
    (reconciler.recorder, reconciler.resync_period) = (recorder, Duration::from_hours(24));
    let writer = tokio::spawn(writer);
    add_nodes(&reconciler, "ab");
    set_endpoints(&reconciler, "a");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let owner = owner_of(&local_service());
    let (began, mut request, mut writes) = (Instant::now(), ReconcileRequest::FULL, Vec::new());
    while began.elapsed() < Duration::from_mins(6) {
        let before = server.statuses.load(Ordering::Acquire);
        let outcome = reconciler.reconcile(&owner, &request).await;
        if server.statuses.load(Ordering::Acquire) > before {
            writes.push(began.elapsed().as_secs());
        }
        let ReconcileOutcome::RequeueAfter(after, again) = outcome else { panic!("{outcome:?}") };
        assert!(!again.full, "nothing is to be compared again");
        tokio::time::advance(after).await;
        request = again;
    }
    assert_eq!(writes, [0, 1, 3, 7, 15, 31, 63, 127, 247]);
    let mut applied = provider.applied_count();
    for nodes in ["b", "ab", "a"] {
        set_endpoints(&reconciler, nodes);
        let outcome = reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
        assert!(matches!(outcome, ReconcileOutcome::RequeueAfter(..)), "no backoff: {outcome:?}");
        assert_eq!(*provider.targets.lock().expect("lock"), nodes);
        applied += 1;
        assert_eq!(provider.applied_count(), applied);
    }
    assert!(server.statuses.load(Ordering::Acquire) <= writes.len() + 1, "and no write for each");
    server.refuses.store(false, Ordering::Release);
    tokio::time::advance(Duration::from_mins(2)).await;
    let before = server.statuses.load(Ordering::Acquire);
    reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
    let due = reconciler.applied.get(&owner).and_then(|applied| applied.due_at()).expect("health");
    // The index never shows the status here, which is looked at after a while.
    assert!(due > Instant::now() + Duration::from_secs(9), "nothing is left to write");
    assert_eq!(server.statuses.load(Ordering::Acquire), before + 1);
    drop(reconciler);
    writer.await.expect("events");
    let events = server.events.lock().expect("lock").clone();
    assert_eq!(events.iter().filter(|reason| *reason == "StatusNotWritten").count(), 1, "{events:?}");
}

/// What is rejected of one write delays no other one, and is not tried at every change.
#[tokio::test(start_paused = true)]
async fn finalizers_that_may_not_be_removed_delay_no_status() {
    let provider = Arc::new(Polled::default());
    let server = Arc::new(Refusing { refuses_finalizers: true, ..Refusing::default() });
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), Arc::clone(&server).client());
    add_nodes(&reconciler, "a");
    set_endpoints(&reconciler, "a");
    let mut service = local_service();
    service.finalizers = vec!["example.com/replaced".to_owned()];
    reconciler.cluster.on_service(Event::Apply(service.clone()));
    let mut statuses = 0;
    for generation in 0..60 {
        // Each writes another status: it names the generation.
        service.generation = Some(generation);
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
        statuses += 1;
        assert_eq!(server.statuses.load(Ordering::Acquire), statuses);
        tokio::time::advance(Duration::from_secs(10)).await;
    }
    assert!((5..15).contains(&server.finalizers.load(Ordering::Acquire)), "{:?}", server.finalizers);
}

/// A change that is not complete is looked at again after a minute, but what it means for users is written soon.
#[tokio::test(start_paused = true)]
async fn status_that_is_rejected_is_written_before_the_provider_is_asked_again() {
    let provider = Arc::new(Polled { is_incomplete: AtomicBool::new(true), ..Polled::default() });
    let server = Arc::new(Refusing { refuses: AtomicBool::new(true), ..Refusing::default() });
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), Arc::clone(&server).client());
    add_nodes(&reconciler, "a");
    set_endpoints(&reconciler, "a");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let outcome = reconciler.reconcile(&owner_of(&local_service()), &ReconcileRequest::FULL).await;
    let ReconcileOutcome::RequeueAfter(after, _) = outcome else { panic!("{outcome:?}") };
    assert!(after <= Duration::from_secs(1), "{after:?}");
}

/// The error of the provider has a wait of its own, which a rejected status must not replace.
#[tokio::test(start_paused = true)]
async fn status_that_is_rejected_hides_no_error_of_the_provider() {
    let provider = Arc::new(Polled::default());
    let server = Arc::new(Refusing { refuses: AtomicBool::new(true), ..Refusing::default() });
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), Arc::clone(&server).client());
    add_nodes(&reconciler, "a");
    set_endpoints(&reconciler, "a");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let owner = owner_of(&local_service());
    provider.throttles.store(true, Ordering::Release);
    let outcome = reconciler.reconcile(&owner, &ReconcileRequest::FULL).await;
    assert!(matches!(outcome, ReconcileOutcome::Failed(Some(_), _)), "{outcome:?}");
    provider.throttles.store(false, Ordering::Release);
    provider.set_down(true);
    let outcome = reconciler.reconcile(&owner, &ReconcileRequest::FULL).await;
    assert!(matches!(outcome, ReconcileOutcome::Unanswered(_)), "{outcome:?}");
}

/// What a task that panicked had changed is unknown.
#[tokio::test(start_paused = true)]
async fn panic_of_a_task_is_counted_and_retried_rarely_with_a_comparison() {
    let provider = Arc::new(Polled::default());
    let (reconciler, service, _) = local_service_on_a(&provider);
    let reconciler = Arc::new(reconciler);
    let options = WorkerOptions {
        workers: 8,
        resync_period: Duration::from_hours(24),
        orphan_grace_period: Duration::from_mins(10),
    };
    let (changes, stop) = (futures::stream::pending().boxed(), CancellationToken::new());
    let requests = reconciler.cluster.requests();
    let running =
        tokio::spawn(workers::run(Arc::clone(&reconciler), requests, changes, options, stop.clone()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let is_in_place =
        reconciler.applied.get(&owner_of(&service)).is_some_and(|state| state.in_place.is_some());
    assert!(is_in_place);
    provider.panics.store(true, Ordering::Release);
    let changed =
        Service { ports: vec![ServicePort::new("", Protocol::Tcp, 81, Some(30080))], ..service.clone() };
    reconciler.cluster.on_service(Event::Apply(changed));
    let before = provider.applied_count();
    tokio::time::sleep(Duration::from_hours(1)).await;
    let tries = provider.applied_count() - before;
    assert!((10..50).contains(&tries), "{tries} tries in an hour");
    assert_eq!(reconciler.metrics.reconciles_of("failed"), u64::try_from(tries).expect("few"));
    let before = provider.applied_count();
    provider.panics.store(false, Ordering::Release);
    while provider.applied_count() == before {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(provider.compared.load(Ordering::Acquire), "what the tasks had changed is unknown");
    stop.cancel();
    running.abort();
}

// SPDX-License-Identifier: Apache-2.0
//! Changes that the provider rejects or denies: targets follow, and what serves stays.

use super::*;

/// A permission may be missing for a part of the structure only, such as its tags.
#[tokio::test(start_paused = true)]
async fn targets_follow_while_the_structure_is_denied() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "abc");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let reconcile = async |nodes: &str| {
        set_endpoints(&reconciler, nodes);
        let outcome = reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::default()).await;
        let is_retried = matches!(outcome, ReconcileOutcome::Failed(..));
        (provider.targets.lock().expect("lock").clone(), is_retried)
    };
    assert_eq!(reconcile("ab").await, ("ab".to_owned(), false));
    provider.denies.store(true, Ordering::Release);
    let mut changed = local_service();
    changed.ports[0].node_port = Some(30081);
    reconciler.cluster.on_service(Event::Apply(changed));
    assert_eq!(reconcile("bc").await, ("bc".to_owned(), true));
    assert_eq!(reconcile("c").await, ("c".to_owned(), true));
    provider.denies.store(false, Ordering::Release);
    assert_eq!(reconcile("a").await, ("a".to_owned(), false));
}

/// Otherwise the next endpoints would wait for the backoff of the denied change, which lasts as long as the permission is missing.
#[tokio::test(start_paused = true)]
async fn denied_change_whose_targets_are_set_is_repeated_without_urgency() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "ab");
    set_endpoints(&reconciler, "a");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    provider.denies.store(true, Ordering::Release);
    let changed = ReconcileRequest {
        endpoints_changed: Some(Instant::now()),
        is_published: true,
        full: true,
        ..ReconcileRequest::default()
    };
    for conflicts in [false, true] {
        provider.conflicts_targets.store(conflicts, Ordering::Release);
        set_endpoints(&reconciler, if conflicts { "b" } else { "ab" });
        let outcome = reconciler.reconcile(&owner_of(&service()), &changed).await;
        let ReconcileOutcome::Failed(_, again) = outcome else { panic!("{outcome:?}") };
        assert!(again.full, "the change itself is tried as before");
        assert_eq!(again.is_urgent(), conflicts, "its targets are not set");
    }
}

/// The provider may reject a structure before it looks at source ranges, which follow with the targets: each rejection hands these
/// over again, but nothing else does.
#[tokio::test(start_paused = true)]
async fn rejected_change_hands_the_same_targets_over_again() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "ab");
    set_endpoints(&reconciler, "ab");
    let reconcile = async |port: u16| {
        let ports = vec![ServicePort::new("", Protocol::Tcp, port, Some(30080))];
        let changed = Service { ports, ..local_service() };
        reconciler.cluster.on_service(Event::Apply(changed));
        reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::default()).await;
        provider.targets_set.load(Ordering::Acquire)
    };
    assert_eq!(reconcile(80).await, 0);
    provider.rejects.store(true, Ordering::Release);
    assert_eq!(reconcile(81).await, 1);
    assert_eq!(reconcile(81).await, 1, "known to be rejected");
    assert_eq!(reconcile(82).await, 2);
}

/// The quota may grow, others leave, or refused targets be accepted: nothing of the Service changes then.
#[tokio::test(start_paused = true)]
async fn service_that_a_quota_or_its_targets_reject_is_tried_again() {
    for reason in ["QuotaExceeded", "AllTargetsRefused"] {
        let provider = Arc::new(Polled::default());
        *provider.rejection.lock().expect("lock") = Some(reason);
        let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
        add_nodes(&reconciler, "ab");
        set_endpoints(&reconciler, "ab");
        reconciler.cluster.on_service(Event::Apply(local_service()));
        let reconcile =
            async || reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::default()).await;
        provider.set_rejecting(true);
        let outcome = reconcile().await;
        provider.set_rejecting(false);
        let retried =
            matches!(outcome, ReconcileOutcome::RequeueAfter(after, _) if after <= Duration::from_mins(1));
        assert!(retried, "{outcome:?}");
        reconcile().await;
        provider.targets.lock().expect("lock").clear();
        tokio::time::sleep(Duration::from_mins(1)).await;
        reconcile().await;
        assert_eq!(*provider.targets.lock().expect("lock"), "ab");
        assert_eq!(provider.targets_set.load(Ordering::Acquire), 1, "the load balancer itself was tried");
    }
}

/// Each change of targets passes the provider a call, which does not begin the wait anew.
#[tokio::test(start_paused = true)]
async fn quota_is_tried_again_in_time_while_endpoints_move() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    add_nodes(&reconciler, "ab");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let reconcile = async |nodes: &str| {
        set_endpoints(&reconciler, nodes);
        reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::default()).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        provider.applied_count()
    };
    provider.set_rejecting(true);
    assert_eq!([reconcile("a").await, reconcile("b").await], [1, 1]);
    assert_eq!(reconcile("a").await, 2, "after half a minute");
    assert_eq!([reconcile("b").await, reconcile("a").await, reconcile("b").await], [2, 2, 3], "after one");
}

/// The provider may deny a change before it looks at source ranges.
#[tokio::test(start_paused = true)]
async fn source_ranges_of_a_service_whose_change_is_denied_leave_at_once() {
    let provider = Arc::new(Polled::default());
    let (reconciler, mut service, bodies) = local_service_on_a(&provider);
    reconciler.reconcile(&owner_of(&service), &ReconcileRequest::FULL).await;
    provider.denies.store(true, Ordering::Release);
    let only = steerage_provider_api::AdmittedSources::Only(["192.0.2.0/24".to_owned()].into());
    *provider.restrictions.lock().expect("lock") = vec![Ok(Some(only))].into_iter();
    for _ in 0..3 {
        service.source_ranges = vec!["192.0.2.0/24".parse().expect("range")];
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        let outcome = reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
        assert!(matches!(outcome, ReconcileOutcome::Failed(..)), "{outcome:?}");
        assert_eq!(*provider.restricted.lock().expect("lock"), ["192.0.2.0/24"]);
    }
    let written = json!(*bodies.lock().expect("lock")).to_string();
    assert!(written.contains("source ranges that the Service no longer has are removed"), "{written}");
}

/// A reconciler under `health-check` steering, with three nodes, of which the first one has an endpoint.
fn with_health_checks_on_abc(provider: &Arc<Polled>) -> Reconciler {
    let mut reconciler = reconciler(Arc::<Polled>::clone(provider), accepting());
    let steerings: &[_] = &[Steering::HealthCheck, Steering::Api];
    let capabilities = Capabilities { steerings, ..provider.capabilities() };
    reconciler.config = Config::with_defaults(capabilities, Steering::HealthCheck);
    add_nodes(&reconciler, "abc");
    set_endpoints(&reconciler, "a");
    reconciler
}

/// A rejected change leaves the health check in place, for which all nodes are right under `health-check` steering.
#[tokio::test(start_paused = true)]
async fn rejected_change_keeps_the_steering_in_place() {
    let provider = Arc::new(Polled::default());
    let reconciler = with_health_checks_on_abc(&provider);
    let reconcile = async |changed: Service| {
        reconciler.cluster.on_service(Event::Apply(changed));
        reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::default()).await;
        provider.targets.lock().expect("lock").clone()
    };
    assert_eq!(reconcile(local_service()).await, "abc");
    provider.rejects.store(true, Ordering::Release);
    let ports = vec![ServicePort::new("", Protocol::Tcp, 81, Some(30080))];
    assert_eq!(reconcile(Service { ports, ..local_service() }).await, "abc");
    let another_check = Service { health_check_node_port: Some(32001), ..local_service() };
    assert_eq!(reconcile(another_check).await, "a", "nobody knows which check is in place");
}

/// A release may need a permission more than the last one: its process knows no check in place.
#[tokio::test(start_paused = true)]
async fn denied_change_after_a_restart_keeps_the_planned_steering() {
    let provider = Arc::new(Polled::default());
    let reconciler = with_health_checks_on_abc(&provider);
    let reconcile = async |changed: Service| {
        reconciler.cluster.on_service(Event::Apply(changed));
        reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::FULL).await;
        provider.targets.lock().expect("lock").clone()
    };
    provider.denies.store(true, Ordering::Release);
    for _ in 0..2 {
        assert_eq!(reconcile(local_service()).await, "abc");
    }
    provider.denies.store(false, Ordering::Release);
    assert_eq!(reconcile(local_service()).await, "abc");
    provider.denies.store(true, Ordering::Release);
    let another_check = Service { health_check_node_port: Some(32001), ..local_service() };
    for _ in 0..2 {
        assert_eq!(reconcile(another_check.clone()).await, "a", "nobody knows which check is in place");
    }
}

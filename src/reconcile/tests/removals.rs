// SPDX-License-Identifier: Apache-2.0
//! Targets that stay for a while: mass removals are held, and a stale watch freezes them.

use super::*;

/// A watch that brings nothing says nothing about what is gone: targets stay, and follow again when it brings something.
#[tokio::test(start_paused = true)]
async fn stale_watch_freezes_targets_until_it_brings_data() {
    let provider = Arc::new(Polled::default());
    let (mut reconciler, service, bodies) = local_service_on_a(&provider);
    reconciler.freeze_targets_after = Some(Duration::from_mins(5));
    add_nodes(&reconciler, "b");
    let is_degraded = || {
        let bodies = bodies.lock().expect("lock");
        let conditions = bodies.iter().rev().find_map(|body| body["status"]["conditions"].as_array());
        conditions.is_some_and(|found| found.iter().any(|c| c["reason"] == reasons::TARGETS_FROZEN))
    };
    let targets = async |nodes: &str| {
        set_endpoints(&reconciler, nodes);
        let outcome = reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
        (provider.targets.lock().expect("lock").clone(), outcome)
    };
    reconciler.staleness.record("nodes");
    reconciler.staleness.record("endpointslices");
    assert_eq!(targets("a").await.0, "a");
    tokio::time::advance(Duration::from_secs(301)).await;
    // Only one of them is fresh, and what it shows may be half of a change.
    reconciler.staleness.record("endpointslices");
    let (frozen, outcome) = targets("b").await;
    assert_eq!(frozen, "a");
    assert!(is_degraded());
    // Its end is no event.
    let ReconcileOutcome::RequeueAfter(after, _) = outcome else { panic!("{outcome:?}") };
    assert!(after <= Duration::from_secs(5), "{after:?}");
    reconciler.staleness.record("nodes");
    tokio::time::advance(after).await;
    assert_eq!(targets("b").await.0, "b");
    assert!(!is_degraded());
    reconciler.freeze_targets_after = None;
    tokio::time::advance(Duration::from_hours(1)).await;
    set_endpoints(&reconciler, "a");
    reconciler.reconcile(&owner_of(&service), &ReconcileRequest::default()).await;
    assert_eq!(*provider.targets.lock().expect("lock"), "a", "off by default");
}

/// Under `api` steering a node without endpoint drops connections, so it leaves at once; an excluded node still serves.
#[tokio::test(start_paused = true)]
async fn mass_removal_from_a_services_own_set_is_held_unless_endpoints_went_away() {
    let provider = Arc::new(Polled::default());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let set_nodes = |excluded: &str| {
        for name in ["a", "b", "c", "d", "e"] {
            let addresses = vec!["10.0.0.1".parse().expect("ip")];
            let excluded = excluded.contains(name);
            let node = Node { name: name.to_owned(), addresses, excluded, ..Node::default() };
            reconciler.cluster.on_node(Event::Apply(node));
        }
    };
    let set_endpoints = |nodes: &str| set_endpoints(&reconciler, nodes);
    let own = crate::removal_hold::HoldingSet::Own(&service().key);
    let reconcile = async || {
        reconciler.reconcile(&owner_of(&service()), &ReconcileRequest::default()).await;
        let due = reconciler.applied.get(&owner_of(&service())).and_then(|state| state.hold.next_release());
        let due = due.map(|at| (at - Instant::now()).as_secs());
        (provider.targets.lock().expect("lock").clone(), due, reconciler.metrics.holds.held(own).1)
    };
    let seen = |targets: &str, due, holding| (targets.to_owned(), due, holding);
    set_nodes("");
    set_endpoints("abcde");
    assert_eq!(reconcile().await, seen("abcde", None, 0));
    set_endpoints("abcd");
    assert_eq!(reconcile().await, seen("abcd", None, 0), "an endpoint went away");
    set_nodes("bcd");
    assert_eq!(reconcile().await, seen("abcd", Some(30), 1));
    tokio::time::advance(Duration::from_secs(10)).await;
    set_endpoints("abc");
    assert_eq!(reconcile().await, seen("abc", Some(20), 1), "also of a node whose removal was held");
    set_endpoints("abce");
    assert_eq!(reconcile().await, seen("abce", Some(20), 1), "a new endpoint is added at once");
    tokio::time::advance(Duration::from_secs(20)).await;
    assert_eq!(reconcile().await, seen("ae", None, 0));
}

// SPDX-License-Identifier: Apache-2.0
//! Sources that a refused Service no longer admits.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;
use steerage_model::annotations;
use steerage_provider_api::{AdmittedSources, Error};
use steerage_watch::Event;

use crate::cluster_index::owner_of;
use crate::queue::ReconcileOutcome;
use crate::reconcile::tests::{Polled, Restriction, local_service, reconciler, recording};
use crate::request_queue::ReconcileRequest;

/// The message of the condition `Degraded` in the last written status that has one.
fn degraded(bodies: &[Value]) -> String {
    let conditions = bodies.iter().rev().filter_map(|body| body["status"]["conditions"].as_array()).flatten();
    let mut found = conditions.filter(|condition| condition["type"] == "steerage.dev/Degraded");
    found.next().and_then(|condition| condition["message"].as_str()).unwrap_or_default().to_owned()
}

/// Both where the controller refuses the Service itself, and once it is accepted again.
#[tokio::test(start_paused = true)]
async fn sources_of_a_refused_service_follow_it() {
    let provider = Arc::new(Polled::default());
    let (client, bodies) = recording();
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), client);
    let reconcile =
        async |ranges: &[&str], is_valid: bool, answer: Restriction, request: ReconcileRequest| {
            let mut service = local_service();
            service.class = Some("steerage.dev/edge".to_owned());
            service.source_ranges = ranges.iter().map(|range| range.parse().expect("range")).collect();
            if !is_valid {
                service.annotations.insert(annotations::STEERING.to_owned(), "wrong".to_owned());
            }
            reconciler.cluster.on_service(Event::Apply(service.clone()));
            provider.restricted.lock().expect("lock").clear();
            *provider.restrictions.lock().expect("lock") = vec![answer].into_iter();
            let outcome = reconciler.reconcile(&owner_of(&service), &request).await;
            let is_retried = matches!(outcome, ReconcileOutcome::Unanswered(_));
            let restricted = provider.restricted.lock().expect("lock").clone();
            (restricted, is_retried, degraded(&bodies.lock().expect("lock")))
        };
    let usual = ReconcileRequest::default();
    let only = |range: &str| Ok(Some(AdmittedSources::Only(BTreeSet::from([range.to_owned()]))));
    assert!(reconcile(&["10.0.0.0/8"], true, Ok(None), usual).await.0.is_empty(), "accepted");
    let office = only("10.1.0.0/16");
    let (restricted, is_retried, told) = reconcile(&["10.1.0.0/16"], false, office.clone(), usual).await;
    assert_eq!((restricted, is_retried), (vec!["10.1.0.0/16".to_owned()], false));
    assert!(told.contains("Only clients from 10.1.0.0/16 may connect"), "{told}");
    assert!(reconcile(&["10.1.0.0/16"], false, Ok(None), usual).await.0.is_empty(), "known");
    let full = ReconcileRequest::FULL;
    assert_eq!(reconcile(&["10.1.0.0/16"], false, office.clone(), full).await.0.len(), 1, "compared");
    let down = || Err(Error::Unavailable("no answer".to_owned()));
    let (_, is_retried, told) = reconcile(&["10.2.0.0/16"], false, down(), usual).await;
    assert!(
        is_retried && told.contains("may still connect: the provider does not remove them (Prov"),
        "{told}"
    );
    let throttled = Err(Error::throttled(None, "another text"));
    let (_, _, same) = reconcile(&["10.2.0.0/16"], false, throttled, usual).await;
    assert_eq!(same, told, "no further write, and no further event");
    let (_, is_retried, told) = reconcile(&["10.1.0.0/16", "10.3.0.0/16"], false, down(), usual).await;
    assert!(is_retried && !told.contains("may still connect"), "none left: {told}");
    let (restricted, is_retried, told) = reconcile(&["10.2.0.0/16"], false, only("10.2.0.0/16"), usual).await;
    assert!(restricted.len() == 1 && !is_retried && told.contains("10.2.0.0/16 may"), "{told}");
    let unreadable = Err(Error::invalid("InvalidAnnotation", "It has no range."));
    let (_, is_retried, told) = reconcile(&[], false, unreadable, usual).await;
    assert!(!is_retried && told.contains("source ranges stay as they were: It has no range."), "{told}");
    assert!(reconcile(&["10.1.0.0/16"], true, Ok(None), usual).await.0.is_empty(), "accepted again");
    assert_eq!(reconcile(&["10.1.0.0/16"], false, office, usual).await.0.len(), 1, "refused again");
}

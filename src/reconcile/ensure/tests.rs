// SPDX-License-Identifier: Apache-2.0
//! What a Service is told of its load balancer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::json;
use steerage_model::{annotations, names};
use steerage_watch::Event;

use crate::cluster_index::owner_of;
use crate::reconcile::tests::{
    Polled, local_service, local_service_on_a, reconciled_conditions, reconciler, recording,
};
use crate::request_queue::ReconcileRequest;

/// Another controller's finalizer goes only when all of its load balancer is taken over; Steerage's stays.
#[tokio::test(start_paused = true)]
async fn replaced_finalizer_leaves_when_the_load_balancer_is_complete() {
    let (provider, (client, bodies)) = (Arc::new(Polled::default()), recording());
    let reconciler = reconciler(Arc::<Polled>::clone(&provider), client);
    let mut service = local_service();
    service.finalizers =
        [names::FINALIZER, "example.com/replaced", "example.com/other"].map(str::to_owned).into();
    service.annotations.insert(annotations::PROVIDER.to_owned(), "edge".to_owned());
    let owner = owner_of(&service);
    reconciler.cluster.on_service(Event::Apply(service));
    for is_incomplete in [true, false] {
        provider.is_incomplete.store(is_incomplete, Ordering::Release);
        bodies.lock().expect("lock").clear();
        reconciler.reconcile(&owner, &ReconcileRequest::FULL).await;
        let written = bodies.lock().expect("lock").clone();
        let mut removed = written.iter().map(|body| &body["metadata"]["$deleteFromPrimitiveList/finalizers"]);
        let removes = removed.any(|finalizers| *finalizers == json!(["example.com/replaced"]));
        assert_eq!(removes, !is_incomplete, "{written:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn part_that_is_not_in_place_degrades_the_service_until_it_is() {
    let provider = Arc::new(Polled::default());
    let cluster = local_service_on_a(&provider);
    for is_incomplete in [true, false] {
        provider.is_incomplete.store(is_incomplete, Ordering::Release);
        let written = reconciled_conditions(&cluster).await;
        let degraded = written.iter().find(|found| found["type"] == json!(names::DEGRADED));
        let degraded = degraded.expect("a condition");
        let (status, reason) =
            if is_incomplete { ("True", "PartlyProgrammed") } else { ("True", "TargetsRefused") };
        assert_eq!((&degraded["status"], &degraded["reason"]), (&json!(status), &json!(reason)));
        let message = degraded["message"].as_str().expect("a message");
        assert_eq!(message.contains("not in place, and the rest works. EC2 does not answer."), is_incomplete);
    }
}

/// Where nothing is published, `Programmed` alone says why.
#[tokio::test(start_paused = true)]
async fn denied_change_degrades_a_published_service() {
    let provider = Arc::new(Polled::default());
    let cluster = local_service_on_a(&provider);
    let degraded = async |denies: bool| {
        provider.denies.store(denies, Ordering::Release);
        let written = reconciled_conditions(&cluster).await;
        let found = written.iter().find(|found| found["type"] == json!(names::DEGRADED));
        found.map(|found| found["message"].to_string()).unwrap_or_default()
    };
    let told = "A change of the Service is not in place.";
    let new = degraded(true).await;
    assert!(!new.contains(told), "{new}");
    degraded(false).await;
    let changed = degraded(true).await;
    assert!(changed.contains(told) && changed.contains("AddTags"), "{changed}");
}

/// Also where the provider has made a part, such as a load balancer whose only listener it rejects.
#[tokio::test(start_paused = true)]
async fn rejected_new_service_says_that_no_port_is_served() {
    let provider = Arc::new(Polled::default());
    let cluster = local_service_on_a(&provider);
    let conditions = async |rejects: bool| {
        provider.set_rejecting(rejects);
        let written = reconciled_conditions(&cluster).await;
        let text =
            |found: &serde_json::Value, field: &str| found[field].as_str().unwrap_or_default().to_owned();
        written.iter().map(|found| (text(found, "reason"), text(found, "message"))).collect::<Vec<_>>()
    };
    let new = conditions(true).await;
    assert_eq!(
        new[0],
        ("QuotaExceeded".to_owned(), "the quota. No port of the Service is served.".to_owned())
    );
    assert!(new[1].0 == "NotProgrammed" && new[1].1.contains("says why (QuotaExceeded)"), "{new:?}");
    conditions(false).await;
    let changed = conditions(true).await;
    assert_eq!(
        (changed[0].1.as_str(), changed[1].0.as_str()),
        ("the quota", "HealthUnknown"),
        "it has an address"
    );
    let (reason, message) = &changed[2];
    assert!(
        reason == "PartlyProgrammed" && message.contains("A quota of the provider is used up"),
        "{message}"
    );
    assert_eq!(cluster.0.metrics.conditions.unprogrammed_count("edge", "QuotaExceeded"), 1);
    conditions(false).await;
    assert_eq!(cluster.0.metrics.conditions.unprogrammed_count("edge", "QuotaExceeded"), 0);
}

/// A Service of another controller is refused before its load balancer is adopted, and nobody changes the targets of that one.
#[test]
fn refusal_promises_targets_only_for_load_balancers_that_are_certainly_steerages() {
    let told = |class: Option<&str>, reason: &str| {
        let mut service = local_service();
        service.class = class.map(str::to_owned);
        super::unsupported_change(&service, reason, None).1
    };
    let own = told(Some("steerage.dev/edge"), "NoFreeAddress");
    assert!(own.contains("its targets still follow") && !own.contains("another controller"), "{own}");
    for class in [None, Some("service.k8s.aws/nlb")] {
        let unsure = told(class, "UnknownAnnotation");
        assert!(unsure.contains("If it is another controller's, it is not adopted"), "{unsure}");
        let refused = told(class, "AdoptionRefused");
        assert!(!refused.contains("still follow"), "{refused}");
    }
}

/// The mark keeps the load balancer if the flag is removed.
#[tokio::test(start_paused = true)]
async fn class_of_another_controller_is_marked_with_the_finalizer() {
    let (provider, (client, bodies)) = (Arc::new(Polled::default()), recording());
    let mut reconciler = reconciler(provider, client);
    reconciler.config.classes.others = vec!["example.com/theirs".to_owned()];
    let mut service = local_service();
    service.class = Some("example.com/theirs".to_owned());
    let mut applied = crate::applied::AppliedState::default();
    reconciler.ensure_finalizer(&service, &mut applied).await.expect("written");
    let written = bodies.lock().expect("lock")[0]["metadata"].clone();
    assert_eq!(written["finalizers"], json!([names::FINALIZER]));
    assert_eq!(written["annotations"][annotations::SERVED_CLASS], json!("example.com/theirs"));
}

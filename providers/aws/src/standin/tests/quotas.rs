// SPDX-License-Identifier: Apache-2.0
//! Changes in an account whose quotas are used up.

use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider as _};

use super::driver::{apply, pause, provider, standin_with, wanted};
use super::refused_listeners::{GOOD, MISSING, refusal, served, with_tls};
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Quotas, StandIn};

fn registered(cloud: &StandIn) -> Vec<Vec<String>> {
    let mut groups: Vec<_> = cloud.cloud().groups.into_values().collect();
    groups.sort_by_key(|group| group.port);
    groups.iter().map(|group| group.registered().cloned().collect()).collect()
}

#[tokio::test(start_paused = true)]
async fn targets_are_replaced_at_the_quota() {
    let cloud = standin_with(1, Quotas { targets: 4, ..Quotas::default() });
    let ports = [(80, 30080), (81, 30081)];
    let aws = provider(&cloud);
    apply(&aws, &wanted(&ports, &[0, 1]), Compare::Remembered).await.unwrap();
    apply(&aws, &wanted(&ports, &[1, 2]), Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud), [["i-1", "i-2"], ["i-1", "i-2"]]);
    // All of them: one stays until another is registered.
    apply(&aws, &wanted(&ports, &[3, 4]), Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud), [["i-3", "i-4"], ["i-3", "i-4"]]);
}

#[tokio::test(start_paused = true)]
async fn exceeded_quota_is_reported_and_other_groups_follow() {
    let cloud = standin_with(1, Quotas { targets: 5, ..Quotas::default() });
    let ports = [(80, 30080), (81, 30081)];
    let aws = provider(&cloud);
    apply(&aws, &wanted(&ports, &[0, 1]), Compare::Remembered).await.unwrap();
    let more = wanted(&ports, &[1, 2, 3]);
    let outcome = apply(&aws, &more, Compare::Remembered).await.unwrap();
    let (reason, message) = refusal(&outcome);
    assert!(reason == "QuotaExceeded" && message.contains("Some targets are not registered"), "{outcome:?}");
    assert!(
        registered(&cloud).iter().all(|ids| !ids.contains(&"i-0".to_owned())),
        "{:?}",
        registered(&cloud)
    );
    // Where only targets are set, it is said too.
    let followed = aws.set_targets(&more.owner, &more.targets()).await.unwrap();
    assert!(followed.incomplete == outcome.incomplete && followed.retry_refused.is_some(), "{followed:?}");
    let fewer = wanted(&ports, &[1, 2]);
    let followed = aws.set_targets(&more.owner, &fewer.targets()).await.unwrap();
    assert_eq!((followed.incomplete, followed.retry_refused), (None, None), "all are registered");
}

/// The quota is raised. Nobody changes the Service, and the wait grows.
#[tokio::test(start_paused = true)]
async fn targets_without_room_are_tried_again() {
    let cloud = standin_with(1, Quotas::default());
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Each("RegisterTargets", "", Fault::Code("TooManyTargets")));
    let more = wanted(&[(80, 30080)], &[0, 1]);
    let mut waits = Vec::new();
    for _ in 0..3 {
        let outcome = aws.apply(&more, Compare::Remembered).await.unwrap();
        assert_eq!(refusal(&outcome).0, "QuotaExceeded");
        waits.push(outcome.retry_refused.unwrap().as_secs());
        tokio::time::sleep(outcome.retry_refused.unwrap()).await;
    }
    assert_eq!(waits, [30, 60, 120]);
    cloud.set_faults(Faults::None);
    let outcome = aws.apply(&more, Compare::Remembered).await.unwrap();
    assert_eq!((outcome.incomplete, outcome.retry_refused), (None, None));
    assert_eq!(registered(&cloud), [["i-0", "i-1"]]);
}

/// A new target group is seen a moment later; meanwhile the present ones follow as well as they can, and the change goes on.
#[tokio::test(start_paused = true)]
async fn change_of_the_structure_goes_on_at_the_quota_of_targets() {
    for (seed, node_port) in [(1, 30080), (2, 30080), (3, 30080)] {
        let cloud = standin_with(seed, Quotas { targets: 3, ..Quotas::default() });
        let aws = provider(&cloud);
        apply(&aws, &wanted(&[(80, node_port)], &[0, 1]), Compare::Remembered).await.unwrap();
        let more = wanted(&[(80, node_port), (81, 30081)], &[1, 2, 3, 4]);
        let first = aws.apply(&more, Compare::Remembered).await.unwrap();
        assert!(matches!(first.progress, Progress::Again(_)), "{first:?}");
    }
}

/// The old port leaves for the new one, which AWS refuses.
#[tokio::test(start_paused = true)]
async fn listener_that_left_for_a_refused_one_is_put_back() {
    let cloud = standin_with(1, Quotas::default());
    let aws = provider(&cloud);
    let ports = |all: std::ops::Range<u16>| all.map(|port| (port, 30000 + port)).collect::<Vec<_>>();
    apply(&aws, &wanted(&ports(1..51), &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    // Of three new ports two are refused for the same cause.
    let next = [ports(1..48), ports(90..91), ports(443..445)].concat();
    let next = with_tls(wanted(&next, &[0]), "443,444", MISSING);
    for compare in [Compare::Remembered, Compare::InPlace] {
        let outcome = apply(&aws, &next, compare).await.unwrap();
        let told = "Not served: ports 443, 444. Not requested any more, but served until AWS accepts the others: ports 49, 50.";
        assert!(refusal(&outcome).1.contains(told), "{outcome:?}");
        let at: Vec<u16> = served(&cloud).into_keys().collect();
        assert_eq!(at, [(1..48).collect::<Vec<_>>(), vec![49, 50, 90]].concat());
        assert!(served(&cloud).values().all(|(_, targets)| *targets == 1));
        pause().await;
    }
    let accepted = LoadBalancer { annotations: with_tls(next.clone(), "443,444", GOOD).annotations, ..next };
    assert_eq!(apply(&aws, &accepted, Compare::Remembered).await.unwrap().incomplete, None);
    assert!([443, 444].iter().all(|port| served(&cloud).contains_key(port)) && served(&cloud).len() == 50);
}

#[tokio::test(start_paused = true)]
async fn listeners_are_replaced_at_the_quota() {
    let cloud = standin_with(1, Quotas::default());
    let aws = provider(&cloud);
    let ports = |first: u16| (first..first + 50).map(|port| (port, 30000 + port)).collect::<Vec<_>>();
    apply(&aws, &wanted(&ports(1), &[0]), Compare::Remembered).await.unwrap();
    apply(&aws, &wanted(&ports(26), &[0]), Compare::Remembered).await.unwrap();
    let mut at: Vec<u16> = cloud.cloud().listeners.values().map(|listener| listener.port).collect();
    at.sort_unstable();
    assert_eq!(at, (26..76).collect::<Vec<_>>());
}

/// Ports 1 to 50, and the same with 443 instead of the last one.
fn full() -> (LoadBalancer, LoadBalancer) {
    let ports = |all: std::ops::Range<u16>| all.map(|port| (port, 30000 + port)).collect::<Vec<_>>();
    let next = [ports(1..50), ports(443..444)].concat();
    (wanted(&ports(1..51), &[0]), with_tls(wanted(&next, &[0]), "443", MISSING))
}

/// Calls fail between, or the user takes the change back.
#[tokio::test(start_paused = true)]
async fn listener_that_left_is_not_forgotten() {
    for (fault, is_taken_back) in [
        (Fault::Code("Throttling"), false),
        (Fault::Code("Throttling"), true),
        (Fault::Before, false),
        (Fault::Before, true),
    ] {
        let cloud = standin_with(1, Quotas::default());
        cloud.set_unlimited();
        let aws = provider(&cloud);
        let (before, next) = full();
        apply(&aws, &before, Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Once("CreateListener", fault));
        while cloud.has_faults() {
            let _ = aws.apply(&next, Compare::Remembered).await;
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        }
        assert_eq!(served(&cloud).len(), 49, "{fault:?}");
        if is_taken_back {
            // AWS refuses the next change as a whole, before any listener.
            let mut refused = before.clone();
            refused.annotations.insert(crate::annotations::SCHEME.to_owned(), "internet-facing".to_owned());
            let error = apply(&aws, &refused, Compare::Remembered).await.unwrap_err();
            assert_eq!(error.reason(), crate::reasons::SCHEME_IMMUTABLE, "{error}");
        } else {
            let outcome = apply(&aws, &next, Compare::Remembered).await.unwrap();
            assert!(refusal(&outcome).1.contains("until AWS accepts the others: port 50."), "{outcome:?}");
        }
        assert!(served(&cloud).contains_key(&50), "{fault:?} {is_taken_back}");
    }
}

/// It cannot come back, so no other one leaves.
#[tokio::test(start_paused = true)]
async fn no_listener_leaves_after_one_could_not_come_back() {
    let cloud = standin_with(1, Quotas::default());
    cloud.set_unlimited();
    let aws = provider(&cloud);
    let ports = |all: std::ops::Range<u16>| all.map(|port| (port, 30000 + port)).collect::<Vec<_>>();
    apply(&aws, &wanted(&ports(1..51), &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Each("CreateListener", "", Fault::Code("AccessDenied")));
    let next = wanted(&[ports(1..48), ports(443..446)].concat(), &[0]);
    for compare in [Compare::Remembered, Compare::InPlace] {
        let outcome = apply(&aws, &next, compare).await.unwrap();
        assert_eq!(refusal(&outcome).0, "ProviderDenied", "{outcome:?}");
        assert_eq!(served(&cloud).len(), 49, "{compare:?}");
        pause().await;
    }
    cloud.set_faults(Faults::Each("CreateListener", " 443", Fault::Code("AccessDenied")));
    let outcome = apply(&aws, &next, Compare::InPlace).await.unwrap();
    assert!(refusal(&outcome).1.contains("Not served: port 443."), "{outcome:?}");
    assert_eq!(served(&cloud).len(), 50, "the port of the last one that left, or another one");
    cloud.set_faults(Faults::None);
    pause().await;
    assert_eq!(apply(&aws, &next, Compare::InPlace).await.unwrap().incomplete, None);
    assert!((443..446).all(|port| served(&cloud).contains_key(&port)));
}

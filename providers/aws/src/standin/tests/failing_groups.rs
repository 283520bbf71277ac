// SPDX-License-Identifier: Apache-2.0
//! AWS fails with the targets of some target groups, or does not answer, and takes those of others.

use std::time::Duration;

use steerage_provider_api::{Compare, Error, GroupTargets, Progress, Provider as _};
use tokio::time::Instant;

use super::driver::{apply, apply_now, changes, pause, provider, set, standin, wanted};
use super::follow::registered;
use super::refused_listeners::served;
use super::shared::{config_of_web, sharing};
use super::unanswered::{groups_with, ten_ports};
use crate::Aws;
use crate::standin::faults::{Fault, Faults};

/// A call that hangs holds up no other target group, and the next call leaves its group out.
#[tokio::test(start_paused = true)]
async fn hanging_registration_holds_up_no_other_group() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &ten_ports(&[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.change(|cloud| cloud.hanging_groups = [30_080, 30_083].into());
    let lb = ten_ports(&[0, 1]);
    let change = aws.apply(&lb, Compare::Remembered);
    let others = async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        groups_with(&cloud, "i-1")
    };
    let (outcome, in_time) = futures::join!(change, others);
    assert_eq!(in_time, 8);
    let (reason, message) = outcome.unwrap().incomplete.expect("two groups");
    assert!(reason == Error::UNAVAILABLE && message.contains("port 80 (TCP), port 83 (TCP)"), "{message}");
    let began = Instant::now();
    aws.apply(&ten_ports(&[0, 1, 2]), Compare::Remembered).await.unwrap();
    assert!(groups_with(&cloud, "i-2") == 8 && began.elapsed() < Duration::from_secs(5));
    cloud.change(|cloud| cloud.hanging_groups.clear());
    let outcome = apply(&aws, &ten_ports(&[0, 1, 2]), Compare::Remembered).await.unwrap();
    assert_eq!((groups_with(&cloud, "i-2"), outcome.incomplete), (10, None));
}

/// The call was sent, and its caller gave it up: what it did is open, also after the groups were registered side by side.
#[tokio::test(start_paused = true)]
async fn abandoned_registration_is_made_again() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &ten_ports(&[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.change(|cloud| cloud.hanging_groups = [30_083].into());
    let lb = ten_ports(&[1]);
    let change = aws.apply(&lb, Compare::Remembered);
    assert!(tokio::time::timeout(Duration::from_secs(20), change).await.is_err());
    assert_eq!(registered(&cloud, 30_083), ["i-0"]);
    cloud.change(|cloud| cloud.hanging_groups.clear());
    changes(&cloud);
    apply(&aws, &ten_ports(&[0]), Compare::Remembered).await.unwrap();
    assert_eq!((groups_with(&cloud, "i-0"), groups_with(&cloud, "i-1")), (10, 0));
    // Of the group that hung, i-1 may be registered by the lost call.
    assert_eq!(changes(&cloud).iter().filter(|name| **name == "DeregisterTargets").count(), 10);
}

/// Its hostname is published, because its other ports are served, and its last port follows as soon as AWS takes the targets.
#[tokio::test(start_paused = true)]
async fn new_service_is_published_beside_a_failing_group() {
    for code in ["ServiceUnavailable", "AccessDenied"] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        cloud.change(|cloud| cloud.failing_groups = [(30_081, code)].into());
        let lb = wanted(&[(80, 30_080), (81, 30_081), (82, 30_082)], &[0, 1]);
        let mut outcome = apply_now(&aws, &lb, Compare::Remembered).await.unwrap();
        for _ in 0..60 {
            let Progress::Again(after) = outcome.progress else { panic!("{outcome:?}") };
            tokio::time::sleep(after).await;
            outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
        }
        assert!(!outcome.ingress.is_empty(), "{code}: {outcome:?}");
        let (reason, message) = outcome.incomplete.unwrap();
        assert_eq!(reason, if code == "AccessDenied" { "ProviderDenied" } else { "ProviderUnavailable" });
        assert!(message.contains("targets of port 81. Not served: port 81."), "{message}");
        assert_eq!(served(&cloud).into_keys().collect::<Vec<_>>(), [80, 82]);
        cloud.change(|cloud| cloud.failing_groups.clear());
        let began = Instant::now();
        assert_eq!(apply(&aws, &lb, Compare::Remembered).await.unwrap().incomplete, None);
        assert!(served(&cloud).contains_key(&81) && began.elapsed() <= Duration::from_secs(35), "{code}");
    }
}

/// The Service was refused, so that nobody used its groups, and nodes changed meanwhile. One answer that is lost when it is accepted
/// delays its port, and no more.
#[tokio::test(start_paused = true)]
async fn group_that_lagged_behind_and_hung_once_is_served() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = |nodes: &[usize]| wanted(&[(80, 30_080), (81, 30_081)], nodes);
    cloud.set_faults(Faults::Every(&["CreateListener"], Fault::Code("TooManyListeners")));
    let refused = apply(&aws, &lb(&[0]), Compare::Remembered).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    let moved = GroupTargets::of_nodes(set(&[1]));
    aws.set_targets(&lb(&[1]).owner, &moved).await.unwrap();
    cloud.set_faults(Faults::None);
    cloud.change(|cloud| cloud.hanging_groups = [30_081].into());
    // It runs out of time, and the next one goes on.
    drop(aws.apply(&lb(&[1]), Compare::Remembered).await);
    cloud.change(|cloud| cloud.hanging_groups.clear());
    let began = Instant::now();
    assert_eq!(apply(&aws, &lb(&[1]), Compare::Remembered).await.unwrap().incomplete, None);
    assert!(began.elapsed() < Duration::from_mins(3), "{:?}", began.elapsed());
    assert_eq!(served(&cloud).into_keys().collect::<Vec<_>>(), [80, 81]);
    assert_eq!(
        (registered(&cloud, 30_080), registered(&cloud, 30_081)),
        (vec!["i-1".to_owned()], vec!["i-1".to_owned()])
    );
}

/// A Service in line at a shared load balancer keeps its place while AWS fails with its targets.
#[tokio::test(start_paused = true)]
async fn failing_targets_cost_no_place_in_line() {
    for structure in [80, 81] {
        let cloud = standin(1);
        let aws = Aws::over(config_of_web(), cloud.clone() as _);
        let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
        for lb in [&a, &b] {
            apply(&aws, lb, Compare::Remembered).await.unwrap();
        }
        pause().await;
        let lock = aws.shared_uses.lock(&"web".to_owned(), || unreachable!("it is in use")).await;
        cloud.set_faults(Faults::Every(&["RegisterTargets"], Fault::Code("AccessDenied")));
        let next = sharing("web", "a", structure).with_nodes(set(&[0, 1, 2]));
        let outcome = aws.apply(&next, Compare::InPlace).await.unwrap();
        assert!(matches!(outcome.progress, Progress::Again(after) if after <= Duration::from_secs(5)));
        let (reason, message) = outcome.incomplete.unwrap();
        assert!(reason == "ProviderDenied" && message.contains("targets of port 80 (TCP)"), "{message}");
        drop(lock);
        // Another one comes, and is behind.
        cloud.take_calls();
        aws.apply(&b, Compare::InPlace).await.unwrap();
        assert_eq!(cloud.take_calls().len(), 0);
        cloud.set_faults(Faults::None);
        changes(&cloud);
        apply(&aws, &next, Compare::InPlace).await.unwrap();
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What other programs delete, or what AWS may have deleted, while calls fail.

use std::time::Duration;

use steerage_provider_api::{Compare, Error, Progress, Provider as _};

use super::driver::{apply, apply_now, changes, delete, pause, provider, standin, wanted};
use super::security_groups::assert_empty;
use crate::standin::{Fault, Faults, StandIn};

fn remove_listener(cloud: &StandIn, port: u16) {
    cloud.change(|cloud| cloud.listeners.retain(|_, found| found.port != port));
}

fn ports(cloud: &StandIn) -> Vec<u16> {
    cloud.cloud().listeners.values().map(|found| found.port).collect()
}

/// A comparison finds that a listener is gone, and cannot read the rest. What follows is no comparison.
#[tokio::test(start_paused = true)]
async fn change_after_a_comparison_that_failed_brings_back_what_is_gone() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0, 1]), Compare::Remembered).await.unwrap();
    pause().await;
    remove_listener(&cloud, 80);
    pause().await;
    cloud.set_faults(Faults::Once("DescribeLoadBalancers", Fault::Code("Throttling")));
    let failed = aws.apply(&wanted(&[(80, 30080)], &[0, 1]), Compare::InPlace).await;
    assert!(matches!(failed, Err(Error::Throttled { .. })), "{failed:?}");
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    assert_eq!(ports(&cloud), [80]);
}

/// A refused change left a group that AWS does not let go.
#[tokio::test(start_paused = true)]
async fn group_that_cannot_be_deleted_does_not_hold_up_a_change() {
    for fault in [Fault::Code("AccessDenied"), Fault::Code("Throttling"), Fault::Before, Fault::After] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Once("CreateListener", Fault::Code("TooManyListeners")));
        let refused = apply(&aws, &wanted(&[(80, 30080), (81, 30081)], &[0]), Compare::Remembered).await;
        assert!(refused.unwrap().incomplete.is_some());
        pause().await;
        cloud.set_faults(Faults::Once("DeleteTargetGroup", fault));
        let changed = wanted(&[(80, 30080), (82, 30082)], &[0]);
        let outcome = aws.apply(&changed, Compare::Remembered).await;
        assert!(outcome.is_ok(), "{fault:?}: {outcome:?}");
        apply(&aws, &changed, Compare::Remembered).await.unwrap();
        assert_eq!(ports(&cloud).len(), 2, "{fault:?}");
        pause().await;
        apply(&aws, &wanted(&[(80, 30080), (83, 30083)], &[0]), Compare::Remembered).await.unwrap();
        delete(&aws, &changed.owner).await.unwrap();
        assert_empty(&cloud, "after the deletion");
    }
}

/// An administrator deletes a load balancer that is not active yet.
#[tokio::test(start_paused = true)]
async fn new_load_balancer_that_vanishes_is_created_again() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080)], &[0]);
    let outcome = apply_now(&aws, &lb, Compare::Remembered).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
    cloud.change(|cloud| {
        cloud.balancers.clear();
        cloud.listeners.clear();
    });
    changes(&cloud);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert!(changes(&cloud).contains(&"CreateLoadBalancer"));
    assert_eq!(ports(&cloud), [80]);
}

/// AWS deletes the load balancer, and its answer is lost. The Service returns before AWS has released its target groups.
#[tokio::test(start_paused = true)]
async fn service_returns_after_a_deletion_whose_answer_was_lost() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080)], &[0]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Once("DeleteLoadBalancer", Fault::After));
    aws.delete(&lb.owner).await.unwrap_err();
    tokio::time::sleep(Duration::from_secs(1)).await;
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_eq!(ports(&cloud), [80]);
    pause().await;
    delete(&aws, &lb.owner).await.unwrap();
    assert_empty(&cloud, "after the deletion");
}

// SPDX-License-Identifier: Apache-2.0
//! What other programs delete, or what AWS may have deleted, while calls fail.

use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use steerage_provider_api::{Compare, Error, Progress, Provider as _};
use steerage_provider_cloud::marks;

use super::driver::{apply, apply_now, changes, delete, pause, provider, standin, wanted};
use super::security_groups::assert_empty;
use crate::standin::snapshot::snapshot;
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

/// An administrator deletes a load balancer, and the health of its targets says that nothing uses them. That of a load balancer which
/// lacks the zone of all targets says so, too.
#[tokio::test(start_paused = true)]
async fn load_balancer_is_compared_once_when_nothing_uses_its_targets() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080)], &[0]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    let mut found = aws.changes();
    pause().await;
    aws.target_health(&lb.owner).await.unwrap();
    assert_eq!(found.next().now_or_never(), None);
    let delete = || {
        cloud.change(|cloud| {
            cloud.balancers.clear();
            cloud.listeners.clear();
            cloud.groups.values_mut().for_each(|group| group.used = None);
        });
    };
    for _ in 0..2 {
        delete();
        pause().await;
        for _ in 0..3 {
            let health = aws.target_health(&lb.owner).await.unwrap();
            assert_eq!(health.targets[0].reason, "Target.NotInUse");
        }
        assert_eq!(found.next().now_or_never(), Some(Some(lb.owner.clone())));
        assert_eq!(found.next().now_or_never(), None, "once");
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        assert_eq!(ports(&cloud), [80]);
        pause().await;
        aws.target_health(&lb.owner).await.unwrap();
        assert_eq!(found.next().now_or_never(), None);
    }
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

/// Somebody removes one tag of each resource. The UIDs still say whose it is, so that it goes on as the Service's.
#[tokio::test(start_paused = true)]
async fn lost_tag_comes_back_where_the_others_say_whose_the_resource_is() {
    for key in [marks::CLUSTER, marks::SERVICE] {
        let cloud = standin(1);
        apply(&provider(&cloud), &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
        pause().await;
        let before = snapshot(&cloud.cloud());
        cloud.change(|cloud| {
            let balancers = cloud.balancers.values_mut().map(|found| &mut found.tags);
            let groups = cloud.groups.values_mut().map(|found| &mut found.tags);
            let listeners = cloud.listeners.values_mut().map(|found| &mut found.tags);
            balancers.chain(groups).chain(listeners).for_each(|tags| drop(tags.remove(key)));
        });
        pause().await;
        let aws = provider(&cloud);
        aws.owned().await.unwrap();
        apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::InPlace).await.unwrap();
        assert_eq!(snapshot(&cloud.cloud()), before, "{key}");
        delete(&aws, &wanted(&[], &[]).owner).await.unwrap();
        assert_empty(&cloud, key);
    }
}

/// Without one of the UIDs it may be another cluster's or an earlier Service's. The advice names the tag, and does no harm.
#[tokio::test(start_paused = true)]
async fn lost_uid_is_refused_with_the_tag_to_put_back() {
    for key in [marks::CLUSTER_UID, marks::UID] {
        let cloud = standin(1);
        apply(&provider(&cloud), &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
        let mut lost = None;
        cloud.change(|cloud| {
            lost = cloud.balancers.values_mut().find_map(|found| found.tags.remove(key));
        });
        pause().await;
        let aws = provider(&cloud);
        let refused = apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::InPlace).await.unwrap_err();
        let told = format!("put these tags back: {key} with the value `{}` (it is missing)", lost.unwrap());
        assert!(refused.to_string().contains(&told), "{refused}");
        assert!(!refused.to_string().contains("--aws-cluster-name"), "{refused}");
    }
}

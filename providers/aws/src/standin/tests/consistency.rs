// SPDX-License-Identifier: Apache-2.0
//! Reads that see an old state.

use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::{Compare, Error, Provider as _};

use super::driver::{apply, delete, provider, standin, wanted};
use crate::annotations::DISABLE_SECURITY_GROUP;
use crate::standin::snapshot::snapshot;
use crate::standin::{Delays, StandIn};

/// After a crash, a new process finds a load balancer whose tags another read does not show yet. That is no foreign load balancer:
/// the error would be final.
#[tokio::test(start_paused = true)]
async fn resource_whose_tags_are_not_visible_yet_is_not_foreign() {
    for seed in 0..40 {
        let cloud = standin(seed);
        let lb = wanted(&[(80, 30080)], &[0, 1]);
        let _ =
            tokio::time::timeout(Duration::from_secs(1), provider(&cloud).apply(&lb, Compare::InPlace)).await;
        let aws = provider(&cloud);
        let result = apply(&aws, &lb, Compare::InPlace).await;
        assert!(result.is_ok(), "seed {seed}: {result:?}");
    }
}

/// A call of which no answer came may have created something that no read shows yet.
#[tokio::test(start_paused = true)]
async fn deletion_right_after_an_unanswered_creation_leaves_nothing() {
    for seed in 0..40 {
        let cloud = standin(seed);
        let (aws, lb) = (provider(&cloud), wanted(&[(80, 30080)], &[0, 1]));
        for cut in [300, 450, 600, 700, 860] {
            let _ =
                tokio::time::timeout(Duration::from_millis(cut), aws.apply(&lb, Compare::Remembered)).await;
            delete(&aws, &lb.owner).await.unwrap();
            let left = cloud.cloud();
            let is_empty =
                left.balancers.is_empty() && left.groups.is_empty() && left.security_groups.is_empty();
            assert!(is_empty, "seed {seed}, cut {cut}: {left:?}");
        }
    }
}

/// A target that was deregistered a moment ago is not taken for registered.
#[tokio::test(start_paused = true)]
async fn target_that_returns_at_once_is_registered_again() {
    for seed in 0..40 {
        let cloud = standin(seed);
        let (mut aws, lb) = (provider(&cloud), wanted(&[(80, 30080)], &[0, 1]));
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        tokio::time::sleep(Duration::from_mins(10)).await;
        let fewer = wanted(&[(80, 30080)], &[0]);
        aws.apply(&fewer, Compare::Remembered).await.unwrap();
        aws.target_health(&lb.owner).await.unwrap();
        if seed % 2 == 0 {
            aws = provider(&cloud);
        }
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_secs(20)).await;
        aws.target_health(&lb.owner).await.unwrap();
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        let group = cloud.cloud().groups.into_values().next().unwrap();
        assert_eq!(group.registered().count(), 2, "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn vanished_resource_does_not_hide_the_others() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080), (81, 30081)], &[0]);
    apply(&aws, &lb, Compare::InPlace).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    // Reads still show the groups for a while.
    cloud.change(|cloud| drop(cloud.groups.pop_first()));
    for _ in 0..4 {
        assert_eq!(aws.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
    }
}

#[tokio::test(start_paused = true)]
async fn throttled_reads_are_reported() {
    let delays = Delays { call: Duration::from_millis(20), ..Delays::real() };
    let cloud = Arc::new(StandIn::new(delays, 1));
    let aws = provider(&cloud);
    let mut throttled = false;
    for _ in 0..200 {
        throttled |= matches!(aws.owned().await, Err(Error::Throttled { .. }));
    }
    assert!(throttled);
    assert!(cloud.take_calls().iter().all(|call| !call.kind.is_write() && call.name.starts_with("Describe")));
}

/// For a name that exists with the same settings, AWS returns the existing resource. Here it appeared after the provider's list. With
/// security groups, the settings of load balancers differ.
#[tokio::test(start_paused = true)]
async fn name_that_others_took_after_the_start_is_not_adopted() {
    for (of_group, is_open) in [(false, false), (false, true), (true, false), (true, true)] {
        let (cloud, account) = (standin(1), standin(1));
        let (aws, mut lb) = (provider(&cloud), wanted(&[(80, 30080)], &[0, 1]));
        if is_open {
            lb.annotations.insert(DISABLE_SECURITY_GROUP.to_owned(), "true".to_owned());
        }
        assert_eq!(aws.owned().await.unwrap(), []);
        // The same names, with the tags of another cluster.
        apply(&provider(&account), &lb, Compare::InPlace).await.unwrap();
        let mut others = account.cloud();
        others.listeners.clear();
        let tags = others.balancers.values_mut().map(|b| &mut b.tags);
        let tags = tags.chain(others.groups.values_mut().map(|g| &mut g.tags));
        let tags = tags.chain(others.security_groups.values_mut().map(|g| &mut g.tags));
        tags.for_each(|tags| drop(tags.insert("steerage.dev/cluster-uid".to_owned(), "other".to_owned())));
        for group in others.groups.values_mut() {
            group.targets.clear();
            group.attributes.insert("preserve_client_ip.enabled".to_owned(), "false".to_owned());
        }
        for group in others.security_groups.values_mut() {
            group.name.push_str("-other");
        }
        if of_group {
            others.balancers.clear();
        }
        cloud.change(|cloud| *cloud = others);
        let before = snapshot(&cloud.cloud());
        let error = apply(&aws, &lb, Compare::Remembered).await.unwrap_err();
        assert_eq!(error.reason(), "ObjectNotOwned");
        delete(&aws, &lb.owner).await.unwrap();
        assert_eq!(snapshot(&cloud.cloud()), before);
    }
}

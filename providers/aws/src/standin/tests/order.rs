// SPDX-License-Identifier: Apache-2.0
//! Replacements serve before others leave, within limits.

use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::{Compare, Progress, Provider as _};
use tokio::time::Instant;

use super::driver::{apply, apply_now, changes, own_set, pause, provider, standin, wanted};
use crate::Aws;
use crate::standin::StandIn;
use crate::standin::cloud::Group;

const LIMIT: Duration = Duration::from_secs(5 * 60 + 30);

/// A Service with target 0, healthy.
async fn serving() -> (Arc<StandIn>, Aws) {
    serving_with(3).await
}

async fn serving_with(seed: u64) -> (Arc<StandIn>, Aws) {
    let cloud = standin(seed);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    tokio::time::sleep(Duration::from_mins(5)).await;
    aws.target_health(&wanted(&[], &[]).owner).await.unwrap();
    cloud.take_calls();
    (cloud, aws)
}

fn group(cloud: &StandIn, node_port: u16) -> Option<Group> {
    cloud.cloud().groups.into_values().find(|group| group.port == node_port)
}

fn registered(cloud: &StandIn) -> Vec<String> {
    group(cloud, 30080).unwrap().registered().cloned().collect()
}

/// Whether healthy targets serve port 80, and not all registered ones because none is healthy.
fn is_healthy(cloud: &StandIn) -> bool {
    let now = cloud.cloud();
    let listener = now.listeners.values().next().unwrap();
    now.serving(&cloud.delays, &now.groups[&listener.group], Instant::now()).0
}

#[tokio::test(start_paused = true)]
async fn replaced_target_leaves_when_the_new_one_is_healthy() {
    let (cloud, aws) = serving().await;
    let lb = wanted(&[(80, 30080)], &[1]);
    let (start, mut calls) = (Instant::now(), 0);
    loop {
        let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
        calls += cloud.take_calls().len();
        assert!(is_healthy(&cloud), "after {:?}", start.elapsed());
        let Progress::Again(after) = outcome.progress else { break };
        assert_eq!(registered(&cloud), ["i-0", "i-1"]);
        tokio::time::sleep(after).await;
    }
    assert_eq!(registered(&cloud), ["i-1"]);
    assert!(start.elapsed() > Duration::from_mins(2) && start.elapsed() < Duration::from_mins(3));
    // The registration, the removal, and one look at health each 15 s.
    assert!(calls <= 12, "{calls}");
}

/// Its health check asks the node and not the Service, so it stays healthy.
#[tokio::test(start_paused = true)]
async fn target_without_an_endpoint_leaves_at_once() {
    let (cloud, aws) = serving().await;
    let lb = wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[1]));
    let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
    assert_eq!((outcome.progress, registered(&cloud)), (Progress::Done, vec!["i-1".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn target_of_a_dead_node_leaves_at_once() {
    let (cloud, aws) = serving().await;
    cloud.change(|cloud| {
        cloud.instances.get_mut("i-0").unwrap().passes = (false, Instant::now());
    });
    tokio::time::sleep(Duration::from_mins(1)).await;
    aws.target_health(&wanted(&[], &[]).owner).await.unwrap();
    let outcome = aws.apply(&wanted(&[(80, 30080)], &[1]), Compare::Remembered).await.unwrap();
    assert_eq!((outcome.progress, registered(&cloud)), (Progress::Done, vec!["i-1".to_owned()]));
}

/// Of two targets, the one that stays was never healthy, and somebody else deregistered it: the other must not leave before it is back.
#[tokio::test(start_paused = true)]
async fn last_target_leaves_after_one_that_somebody_else_took_away_is_back() {
    let (cloud, aws) = serving().await;
    let fails = (false, Instant::now());
    cloud.change(|cloud| cloud.instances.get_mut("i-1").unwrap().passes = fails);
    apply(&aws, &wanted(&[(80, 30080)], &[0, 1]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.change(|cloud| {
        cloud.groups.values_mut().for_each(|group| group.targets.retain(|(id, _), _| id != "i-1"));
        cloud.instances.get_mut("i-0").unwrap().passes = fails;
    });
    tokio::time::sleep(Duration::from_mins(2)).await;
    cloud.take_calls();
    aws.apply(&wanted(&[(80, 30080)], &[1]), Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud), ["i-1"]);
    assert_eq!(changes(&cloud), ["RegisterTargets", "DeregisterTargets"]);
}

#[tokio::test(start_paused = true)]
async fn target_does_not_wait_for_ever() {
    let (cloud, aws) = serving().await;
    cloud.change(|cloud| {
        cloud.instances.get_mut("i-1").unwrap().passes = (false, Instant::now());
    });
    let start = Instant::now();
    apply(&aws, &wanted(&[(80, 30080)], &[1]), Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud), ["i-1"]);
    assert!(start.elapsed() > Duration::from_mins(4) && start.elapsed() < LIMIT, "{:?}", start.elapsed());
}

/// A deregistered target is no longer wanted: with no target wanted, nothing replaces it.
#[tokio::test(start_paused = true)]
async fn last_target_leaves_at_once() {
    let (cloud, aws) = serving().await;
    let outcome = aws.apply(&wanted(&[(80, 30080)], &[]), Compare::Remembered).await.unwrap();
    assert_eq!((outcome.progress, registered(&cloud).len()), (Progress::Done, 0));
}

/// AWS keeps the connections of a switched listener on the old group for as long as this exists.
#[tokio::test(start_paused = true)]
async fn replaced_group_stays_until_the_new_one_is_healthy() {
    let (cloud, aws) = serving().await;
    let lb = wanted(&[(80, 30081)], &[0]);
    let start = Instant::now();
    loop {
        let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
        let Progress::Again(after) = outcome.progress else { break };
        assert!(group(&cloud, 30080).is_some());
        tokio::time::sleep(after).await;
    }
    assert!(is_healthy(&cloud) && group(&cloud, 30080).is_none());
    assert!(start.elapsed() > Duration::from_mins(2) && start.elapsed() < Duration::from_mins(3));
    // The steps, and a look each 15 s.
    assert!(cloud.take_calls().len() <= 18);
}

/// The port changes twice, to nodes that never become healthy: each old group has its own time.
#[tokio::test(start_paused = true)]
async fn replaced_group_has_its_own_time_while_an_older_one_leaves() {
    let (cloud, aws) = serving().await;
    cloud.change(|cloud| {
        let failing = ["i-1", "i-2"];
        cloud.instances.iter_mut().filter(|(id, _)| failing.contains(&id.as_str())).for_each(|(_, found)| {
            found.passes = (false, Instant::now());
        });
    });
    let (second, third) = (wanted(&[(80, 30081)], &[1]), wanted(&[(80, 30082)], &[2]));
    let minutes = |minutes| tokio::time::sleep(Duration::from_mins(minutes));
    apply_now(&aws, &second, Compare::Remembered).await.unwrap();
    minutes(4).await;
    apply_now(&aws, &third, Compare::Remembered).await.unwrap();
    assert!(group(&cloud, 30080).is_some() && group(&cloud, 30081).is_some());
    minutes(2).await;
    aws.apply(&third, Compare::Remembered).await.unwrap();
    assert!(group(&cloud, 30080).is_none(), "its time is over");
    assert!(group(&cloud, 30081).is_some(), "it left two minutes ago");
    minutes(4).await;
    aws.apply(&third, Compare::Remembered).await.unwrap();
    assert!(group(&cloud, 30081).is_none(), "its time is over too");
}

/// Right after its creation, AWS may not show the new group.
#[tokio::test(start_paused = true)]
async fn new_group_that_is_not_visible_yet_is_no_error() {
    for seed in 0..20 {
        let (_, aws) = serving_with(seed).await;
        let lb = wanted(&[(80, 30081)], &[0]);
        aws.apply(&lb, Compare::Remembered).await.unwrap();
        aws.target_health(&lb.owner).await.unwrap();
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A change of the structure gets no answer for half a minute, again and again, while endpoints move.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use steerage_model::Key;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress, Provider as _};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::driver::{apply, changes, own_set, pause, provider, standin, wanted};
use super::follow::registered;
use super::unanswered::{changed, waits_for};
use crate::Aws;
use crate::standin::StandIn;
use crate::standin::faults::{Fault, Faults};

const ACTION: &str = "CreateTargetGroup";

fn hang(cloud: &StandIn) {
    cloud.set_faults(Faults::Each(ACTION, "", Fault::Hang));
}

/// Calls, and returns the outcome with the targets that were registered a moment after the call began.
async fn soon_registered(aws: &Aws, cloud: &StandIn, nodes: &[usize]) -> (Outcome, Vec<String>) {
    let lb = changed(ACTION, nodes);
    let soon = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        registered(cloud, 30080)
    };
    let (outcome, soon) = futures::join!(aws.apply(&lb, Compare::Remembered), soon);
    (outcome.unwrap(), soon)
}

/// Each try sets the targets before it makes the change again, also the first one of another process.
#[tokio::test(start_paused = true)]
async fn targets_go_first_after_a_change_without_an_answer() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])), Compare::Remembered).await.unwrap();
    pause().await;
    hang(&cloud);
    let (outcome, _) = soon_registered(&aws, &cloud, &[0, 1]).await;
    tokio::time::sleep(waits_for(&outcome, ACTION)).await;
    let (outcome, soon) = soon_registered(&aws, &cloud, &[1, 2]).await;
    waits_for(&outcome, ACTION);
    assert_eq!(soon, ["i-1", "i-2"]);
    pause().await;
    let (outcome, soon) = soon_registered(&provider(&cloud), &cloud, &[2, 3]).await;
    waits_for(&outcome, ACTION);
    assert_eq!(soon, ["i-2", "i-3"]);
}

/// Targets follow at once, and with no other call, also where reads would already show what AWS has made. Another change of the Service
/// does not wait.
#[tokio::test(start_paused = true)]
async fn endpoints_do_not_start_a_failed_change_again() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])), Compare::Remembered).await.unwrap();
    pause().await;
    hang(&cloud);
    for _ in 0..2 {
        let (outcome, _) = soon_registered(&aws, &cloud, &[0]).await;
        tokio::time::sleep(waits_for(&outcome, ACTION)).await;
    }
    let (outcome, _) = soon_registered(&aws, &cloud, &[0]).await;
    let wait = waits_for(&outcome, ACTION);
    assert!(wait > Duration::from_secs(30), "{wait:?}");
    for nodes in [[1, 2], [2, 3]] {
        tokio::time::sleep(Duration::from_secs(15)).await;
        cloud.take_calls();
        let (outcome, soon) = soon_registered(&aws, &cloud, &nodes).await;
        assert!(waits_for(&outcome, ACTION) < wait);
        assert_eq!(soon, nodes.map(|node| format!("i-{node}")));
        let calls: Vec<_> = cloud.take_calls().into_iter().map(|call| call.name).collect();
        assert_eq!(calls, ["RegisterTargets", "DeregisterTargets"]);
    }
    cloud.set_faults(Faults::None);
    changes(&cloud);
    let other = wanted(&[(80, 30080), (82, 30082)], &[]).with_nodes(own_set(&[0]));
    aws.apply(&other, Compare::Remembered).await.unwrap();
    assert_eq!(changes(&cloud)[..3], ["RegisterTargets", "DeregisterTargets", "CreateTargetGroup"]);
}

/// The list of the start shows the target groups. That the first read of the rest fails says nothing about them.
#[tokio::test(start_paused = true)]
async fn targets_follow_after_a_restart_whose_reads_fail() {
    let cloud = standin(1);
    apply(&provider(&cloud), &wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])), Compare::Remembered)
        .await
        .unwrap();
    pause().await;
    let aws = provider(&cloud);
    aws.owned().await.unwrap();
    let reads = &["DescribeListeners", "DescribeTargetGroupAttributes"];
    cloud.set_faults(Faults::Every(reads, Fault::Code("ServiceUnavailable")));
    for nodes in [[1, 2], [2, 3], [3, 4]] {
        // Another structure than the list shows, so that everything is read.
        let lb = changed("ModifyTargetGroup", &nodes);
        assert!(aws.apply(&lb, Compare::InPlace).await.is_err());
        assert_eq!(registered(&cloud, 30080), nodes.map(|node| format!("i-{node}")));
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    cloud.set_faults(Faults::None);
    apply(&aws, &changed("ModifyTargetGroup", &[0]), Compare::InPlace).await.unwrap();
    assert_eq!(registered(&cloud, 30080), ["i-0"]);
}

/// While a change waits, endpoints that move do not start a registration again that hangs, where the Service has one target group.
#[tokio::test(start_paused = true)]
async fn single_group_that_hangs_has_its_wait_while_a_change_waits() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])), Compare::Remembered).await.unwrap();
    pause().await;
    hang(&cloud);
    for _ in 0..3 {
        let (outcome, _) = soon_registered(&aws, &cloud, &[0]).await;
        tokio::time::sleep(waits_for(&outcome, ACTION)).await;
    }
    soon_registered(&aws, &cloud, &[0]).await;
    cloud.change(|cloud| cloud.hanging_groups = [30_080].into());
    let mut took = Vec::new();
    for nodes in [[1], [2], [3]] {
        let began = Instant::now();
        aws.apply(&changed(ACTION, &nodes), Compare::Remembered).await.unwrap();
        took.push(began.elapsed() > Duration::from_secs(5));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(took, [true, false, false]);
    cloud.change(|cloud| cloud.hanging_groups.clear());
    tokio::time::sleep(Duration::from_secs(10)).await;
    aws.apply(&changed(ACTION, &[3]), Compare::Remembered).await.unwrap();
    assert_eq!(registered(&cloud, 30_080), ["i-3"]);
}

/// A Service of this namespace and number.
fn of(namespace: &str, number: usize, lb: LoadBalancer) -> LoadBalancer {
    let service = Key::new(namespace, format!("web-{number}"));
    LoadBalancer { owner: Owner { service, uid: format!("{namespace}-{number}") }, ..lb }
}

/// Calls again and again, at the latest after this time.
async fn keep_calling(aws: Arc<Aws>, lb: LoadBalancer, pause: Duration) {
    loop {
        let after = match aws.apply(&lb, Compare::Remembered).await {
            Ok(Outcome { progress: Progress::Again(after), .. }) => after,
            _ => pause,
        };
        tokio::time::sleep(after.min(pause)).await;
    }
}

/// The others come again all the time, and each change of theirs hangs for half a minute.
#[tokio::test(start_paused = true)]
async fn one_namespace_with_changes_that_hang_delays_another_by_one_of_them() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = Arc::new(provider(&cloud));
    let many = |nodes: &[usize]| {
        let lb = |number| of("many", number, changed("ModifyTargetGroup", nodes));
        (0..20).map(lb).collect::<Vec<_>>()
    };
    for number in 0..20 {
        let lb = of("many", number, wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])));
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    cloud.set_faults(Faults::Each("ModifyTargetGroup", "", Fault::Hang));
    let mut tasks = JoinSet::new();
    for lb in many(&[0]) {
        tasks.spawn(keep_calling(Arc::clone(&aws), lb, Duration::from_millis(100)));
    }
    tokio::time::sleep(Duration::from_mins(1)).await;
    for number in 0..3 {
        let began = Instant::now();
        let lb = of("one", number, wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])));
        while registered(&cloud, 30080).len() < 21 + number && began.elapsed() < Duration::from_mins(2) {
            let after = match aws.apply(&lb, Compare::Remembered).await {
                Ok(Outcome { progress: Progress::Again(after), incomplete: None, .. }) => after,
                Err(Error::Conflict(_)) => Duration::from_millis(500),
                answer => panic!("{answer:?}"),
            };
            tokio::time::sleep(after.min(Duration::from_secs(5))).await;
        }
        assert!(began.elapsed() <= Duration::from_secs(33), "{number}: {:?}", began.elapsed());
    }
    tasks.shutdown().await;
}

/// All that a new Service of the namespace hears without it is that it is being created.
#[tokio::test(start_paused = true)]
async fn change_that_waits_for_long_says_for_what() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = Arc::new(provider(&cloud));
    hang(&cloud);
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let lb = of("shop", number, wanted(&[(80, 30080)], &[0]));
        tasks.spawn(keep_calling(Arc::clone(&aws), lb, Duration::from_secs(1)));
    }
    tokio::time::sleep(Duration::from_secs(45)).await;
    let lb = of("shop", 100, wanted(&[(80, 30080)], &[0]));
    let (began, mut told) = (Instant::now(), None);
    while told.is_none() && began.elapsed() < Duration::from_mins(2) {
        let outcome = aws.apply(&lb, Compare::Remembered).await.unwrap();
        told = outcome.incomplete;
        let Progress::Again(after) = outcome.progress else { break };
        tokio::time::sleep(after).await;
    }
    let (reason, message) = told.unwrap();
    assert_eq!(reason, Error::THROTTLED);
    assert!(message.contains("namespaces take turns") && !message.contains("web-"), "{message}");
    assert!((30..42).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    tasks.shutdown().await;
}

/// A worker of the controller waits with each call.
#[tokio::test(start_paused = true)]
async fn few_services_at_a_time_try_changes_that_hang() {
    let named = |lb: LoadBalancer, number: usize| {
        let owner = Owner { service: Key::new("shop", format!("web-{number}")), uid: format!("u-{number}") };
        LoadBalancer { owner, ..lb }
    };
    let all = |nodes: &[usize]| (0..12).map(|i| named(changed(ACTION, nodes), i)).collect::<Vec<_>>();
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    for number in 0..12 {
        let lb = named(wanted(&[(80, 30080)], &[]).with_nodes(own_set(&[0])), number);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    hang(&cloud);
    join_all(all(&[0]).iter().map(|lb| aws.apply(lb, Compare::Remembered))).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    for compare in [Compare::Remembered, Compare::InPlace] {
        let next = all(&[0, 1]);
        let timed = next.iter().map(async |lb| {
            let began = Instant::now();
            (aws.apply(lb, compare).await, began.elapsed())
        });
        let ended = join_all(timed).await;
        let slow = ended.iter().filter(|(_, took)| *took > Duration::from_secs(5)).count();
        assert_eq!(slow, 3, "{compare:?}");
        for (outcome, _) in ended {
            let told =
                outcome.map_or_else(|error| error.to_string(), |outcome| outcome.incomplete.unwrap().1);
            assert!(told.contains(ACTION) || told.contains("waits for its turn"), "{told}");
        }
        assert_eq!(registered(&cloud, 30080).iter().filter(|id| *id == "i-1").count(), 12);
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    cloud.set_faults(Faults::None);
    for lb in all(&[1]) {
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
    }
    assert_eq!(registered(&cloud, 30081), vec!["i-1"; 12]);
}

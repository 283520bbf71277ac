// SPDX-License-Identifier: Apache-2.0
//! A change of the structure gets no answer for half a minute, again and again, while endpoints move.

use std::time::Duration;

use futures::future::join_all;
use steerage_model::Key;
use steerage_provider_api::{Compare, LoadBalancer, Outcome, Owner, Provider as _};
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
            assert!(told.contains(ACTION) || told.contains("of other Services"), "{told}");
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

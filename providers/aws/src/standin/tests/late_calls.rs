// SPDX-License-Identifier: Apache-2.0
//! Calls that wait for their budget: what was changed counts from when it was sent, not from when it was asked for.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::{Compare, Error, LoadBalancer, Owner, Progress, Provider as _, call_namespace};
use steerage_provider_cloud::ApiMetrics;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::driver::{apply, changes, delete, own_set, pause, set, standin, wanted};
use super::follow::registered;
use super::security_groups::assert_empty;
use super::shared::{config_of_web, has_ports, sharing, watch};
use super::unanswered::changed;
use crate::Aws;
use crate::paced::Paced;
use crate::standin::StandIn;
use crate::standin::faults::{Fault, Faults};

fn paced(cloud: &Arc<StandIn>) -> (Aws, Arc<Paced<StandIn>>) {
    let calls = Arc::new(Paced::new(Arc::clone(cloud), ApiMetrics::default()));
    (Aws::over(config_of_web(), Arc::clone(&calls) as _), calls)
}

/// One Service comes to a shared load balancer while the last other one leaves, and every change waits for some seconds. Reads do not
/// show the new listener at once.
#[tokio::test(start_paused = true)]
async fn load_balancer_is_not_deleted_under_a_listener_that_was_late() {
    for seed in 0..40 {
        let cloud = standin(seed);
        let (aws, calls) = paced(&cloud);
        let (last, new) = (sharing("web", "a", 80), sharing("web", "b", 443));
        apply(&aws, &last, Compare::Remembered).await.unwrap();
        pause().await;
        calls.slow_down();
        watch(&cloud, "shop/b");
        let leaving = async {
            tokio::time::sleep(Duration::from_secs(seed)).await;
            delete(&aws, &last.owner).await
        };
        let (come, left) = tokio::join!(apply(&aws, &new, Compare::Remembered), leaving);
        assert!(come.is_ok() && left.is_ok(), "seed {seed}: {come:?} {left:?}");
        assert_eq!(cloud.violations(), Vec::<String>::new(), "seed {seed}");
        has_ports(&cloud, &[(443, "shop/b")], "the new one");
    }
}

/// A rolling update moves pods every few seconds, and a call that hangs in one target group must not stop the others for half a minute.
#[tokio::test(start_paused = true)]
async fn registration_without_an_answer_is_given_up_after_ten_seconds() {
    let cloud = standin(1);
    let (aws, _) = paced(&cloud);
    let lb = |nodes: &[usize]| wanted(&[(80, 30_080), (81, 30_081)], nodes);
    apply(&aws, &lb(&[0]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.change(|cloud| cloud.hanging_groups = [30_081].into());
    for nodes in [[1, 2], [2, 3]] {
        let began = Instant::now();
        let outcome = aws.apply(&lb(&nodes), Compare::Remembered).await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
        assert!(outcome.incomplete.is_some_and(|(_, message)| message.contains("no answer within 10s")));
        let others = registered(&cloud, 30_080);
        assert!(nodes.iter().all(|node| others.contains(&format!("i-{node}"))), "{others:?}");
    }
    cloud.change(|cloud| cloud.hanging_groups.clear());
    assert_eq!(apply(&aws, &lb(&[0]), Compare::Remembered).await.unwrap().incomplete, None);
    assert_eq!(registered(&cloud, 30_081), ["i-0"]);
}

/// Endpoints move every few seconds: the Service's targets wait for the end of a change that hangs.
#[tokio::test(start_paused = true)]
async fn change_without_an_answer_is_given_up_after_ten_seconds() {
    for action in ["CreateListener", "ModifyTargetGroup", "CreateTargetGroup", "ModifyListener"] {
        let cloud = standin(1);
        let (aws, _) = paced(&cloud);
        let before = wanted(&[(80, 30_080)], &[]).with_nodes(own_set(&[0]));
        apply(&aws, &before, Compare::Remembered).await.unwrap();
        pause().await;
        cloud.set_faults(Faults::Each(action, "", Fault::Hang));
        for nodes in [[1], [2], [3], [4]] {
            let began = Instant::now();
            let outcome = aws.apply(&changed(action, &nodes), Compare::Remembered).await.unwrap();
            assert!(began.elapsed() < Duration::from_secs(15), "{action}: {:?}", began.elapsed());
            assert_eq!(registered(&cloud, 30_080), nodes.map(|node| format!("i-{node}")), "{action}");
            let Progress::Again(after) = outcome.progress else { continue };
            tokio::time::sleep(after).await;
        }
        cloud.set_faults(Faults::None);
        assert_eq!(apply(&aws, &changed(action, &[0]), Compare::Remembered).await.unwrap().incomplete, None);
    }
}

/// What is known of the load balancer stays known, so that the next try continues where this one stopped.
#[tokio::test(start_paused = true)]
async fn refused_wait_is_throttling_and_forgets_nothing() {
    let cloud = standin(1);
    let (aws, calls) = paced(&cloud);
    let lb = sharing("web", "a", 80);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    calls.slow_down();
    cloud.take_calls();
    let mut moved = lb.clone();
    moved.listeners[0].port = 81;
    let mut tries = 0;
    while let Err(error) = aws.apply(&moved, Compare::Remembered).await {
        assert!(
            matches!(error, Error::Throttled { after: Some(after), .. } if after >= Duration::from_secs(10)),
            "{error}"
        );
        tokio::time::sleep(Duration::from_secs(10)).await;
        tries += 1;
        assert!(tries < 20);
    }
    assert!(tries > 0);
    let reads = cloud.take_calls().iter().filter(|call| !call.kind.is_write()).count();
    assert!(reads <= 1, "{reads} reads in {tries} tries");
}

/// AWS takes no reads, so that a comparison cannot be made. Registrations have a limit of their own.
#[tokio::test(start_paused = true)]
async fn targets_follow_while_a_comparison_is_throttled() {
    let cloud = standin(1);
    let (aws, _) = paced(&cloud);
    let lb = sharing("web", "a", 80);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.take_calls();
    cloud.set_faults(Faults::Once("DescribeListeners", Fault::Code("Throttling")));
    let error = aws.apply(&lb.with_nodes(set(&[2, 3])), Compare::InPlace).await.unwrap_err();
    assert!(matches!(error, Error::Throttled { .. }), "{error}");
    assert!(changes(&cloud).contains(&"RegisterTargets"));
}

/// The user takes a deletion back that was throttled, or whose answer was lost. Clients know the hostname.
#[tokio::test(start_paused = true)]
async fn load_balancer_whose_deletion_was_not_made_stays_when_it_is_wanted_again() {
    for (fault, stays) in [(Fault::Code("Throttling"), true), (Fault::Before, true), (Fault::After, false)] {
        let cloud = standin(1);
        let aws = super::driver::provider(&cloud);
        let lb = wanted(&[(80, 30080)], &[0, 1]);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        pause().await;
        let before: Vec<String> = cloud.cloud().balancers.into_keys().collect();
        cloud.set_faults(Faults::Once("DeleteLoadBalancer", fault));
        aws.delete(&lb.owner).await.unwrap_err();
        apply(&aws, &lb.clone().with_nodes(set(&[0, 1, 2])), Compare::Remembered).await.unwrap();
        let after: Vec<String> = cloud.cloud().balancers.into_keys().collect();
        assert_eq!((after == before, after.len()), (stays, 1), "{fault:?}");
        let groups = cloud.cloud().groups;
        assert!(groups.values().all(|group| group.used.is_some() && group.registered().count() == 3));
        delete(&aws, &lb.owner).await.unwrap();
        assert_empty(&cloud, "after the deletion");
    }
}

/// One namespace's endpoints move all the time, in more Services than the account's rate allows.
#[tokio::test(start_paused = true)]
async fn registrations_of_namespaces_take_turns() {
    let cloud = standin(1);
    let (aws, _) = paced(&cloud);
    let aws = Arc::new(aws);
    let of = |namespace: &str, number: u16, nodes: &[usize]| {
        let service = Key::new(namespace, format!("web-{number}"));
        let owner = Owner { service, uid: format!("{namespace}-{number}") };
        LoadBalancer { owner, ..wanted(&[(80, 30_080 + number)], &[]).with_nodes(own_set(nodes)) }
    };
    let all: Vec<_> = (0..30).map(|number| of("many", number, &[0])).collect();
    for lb in all.iter().chain([&of("one", 100, &[0])]) {
        apply(&aws, lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    let mut tasks = JoinSet::new();
    for number in 0..30 {
        let aws = Arc::clone(&aws);
        tasks.spawn(async move {
            for round in 0.. {
                let lb = of("many", number, &[round % 5]);
                let _ = call_namespace::for_owner(&lb.owner, aws.apply(&lb, Compare::Remembered)).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    for nodes in [[1], [2], [3]] {
        tokio::time::sleep(Duration::from_secs(20)).await;
        let began = Instant::now();
        let lb = of("one", 100, &nodes);
        call_namespace::for_owner(&lb.owner, aws.apply(&lb, Compare::Remembered)).await.unwrap();
        assert_eq!(registered(&cloud, 30_180), nodes.map(|node| format!("i-{node}")));
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    }
    tasks.shutdown().await;
}

/// Others register at the same time. What AWS refuses at once is tried again a second later, whatever the wait for its turn.
#[tokio::test(start_paused = true)]
async fn wait_for_the_budget_is_no_sign_that_a_group_hangs() {
    for failing in [30_080, 30_081] {
        let cloud = standin(1);
        let (aws, calls) = paced(&cloud);
        let lb = |nodes: &[usize]| wanted(&[(80, 30_080), (81, 30_081)], nodes);
        apply(&aws, &lb(&[0]), Compare::Remembered).await.unwrap();
        pause().await;
        cloud.change(|cloud| cloud.failing_groups = [(failing, "ServiceUnavailable")].into());
        calls.slow_down();
        let began = Instant::now();
        let outcome = aws.apply(&lb(&[0, 1]), Compare::Remembered).await.unwrap();
        assert!(began.elapsed() > Duration::from_secs(8), "{:?}", began.elapsed());
        let after = outcome.retry_refused.or(match outcome.progress {
            Progress::Again(after) => Some(after),
            Progress::Done => None,
        });
        assert!(after.is_some_and(|after| after <= Duration::from_secs(1)), "{failing}: {outcome:?}");
    }
}

/// A Service with three groups that wait side by side would have three turns, and the last one would be refused.
#[tokio::test(start_paused = true)]
async fn groups_of_a_service_wait_for_the_budget_one_after_the_other() {
    let cloud = standin(1);
    let (aws, calls) = paced(&cloud);
    let lb = |nodes: &[usize]| wanted(&[(80, 30_080), (81, 30_081), (82, 30_082)], nodes);
    apply(&aws, &lb(&[0]), Compare::Remembered).await.unwrap();
    pause().await;
    calls.slow_down();
    aws.apply(&lb(&[0, 1]), Compare::Remembered).await.unwrap();
    for port in [30_080, 30_081, 30_082] {
        assert_eq!(registered(&cloud, port), ["i-0", "i-1"]);
    }
}

/// As while a hundred Services are created: the others' changes do not wait for this one.
#[tokio::test(start_paused = true)]
async fn change_that_waited_for_the_budget_and_failed_at_once_does_not_hang() {
    let cloud = standin(1);
    let (aws, calls) = paced(&cloud);
    apply(&aws, &wanted(&[(80, 30_080)], &[]).with_nodes(own_set(&[0])), Compare::Remembered).await.unwrap();
    pause().await;
    calls.slow_down();
    tokio::time::sleep(Duration::from_secs(3)).await;
    cloud.set_faults(Faults::Each("CreateTargetGroup", "", Fault::Code("ServiceUnavailable")));
    let began = Instant::now();
    let outcome = aws.apply(&changed("CreateTargetGroup", &[0]), Compare::Remembered).await.unwrap();
    assert!(began.elapsed() > Duration::from_secs(6), "{:?}", began.elapsed());
    assert_eq!(outcome.incomplete.unwrap().0, Error::UNAVAILABLE);
    let owner =
        |number: usize| Owner { service: Key::new("shop", format!("web-{number}")), uid: number.to_string() };
    let begun: Vec<_> = (0..20).filter_map(|number| aws.changes.enter(&owner(number), false).ok()).collect();
    assert_eq!(begun.len(), 20);
}

// SPDX-License-Identifier: Apache-2.0
//! The number of calls after a restart, and that what the first comparison leaves out follows.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use steerage_model::Key;
use steerage_provider_api::{Compare, LoadBalancer, Owner, Progress, Provider as _};
use steerage_provider_cloud::marks;

use super::driver::{apply, apply_now, delete, provider, standin, wanted};
use crate::annotations::DISABLE_SECURITY_GROUP;
use crate::standin::faults::Faults;
use crate::standin::{Delays, StandIn};

const SERVICES: usize = 100;

fn service(index: usize) -> LoadBalancer {
    let owner = Owner { service: Key::new("shop", format!("web-{index}")), uid: format!("uid-{index}") };
    LoadBalancer { owner, ..wanted(&[(80, 30080)], &[0, 1]) }
}

/// An account with this many Services in place.
async fn filled(services: usize) -> Arc<StandIn> {
    filled_with(standin(1), services).await
}

async fn filled_with(cloud: Arc<StandIn>, services: usize) -> Arc<StandIn> {
    let aws = provider(&cloud);
    for index in 0..services {
        apply(&aws, &service(index), Compare::Remembered).await.unwrap();
    }
    tokio::time::sleep(Duration::from_mins(5)).await;
    cloud.take_calls();
    cloud
}

#[tokio::test(start_paused = true)]
async fn restart_reads_lists_and_the_targets_of_each_group() {
    let cloud = filled(SERVICES).await;
    let aws = provider(&cloud);
    let mut owned = None;
    for index in 0..SERVICES {
        let lb = service(index);
        let outcome = apply(&aws, &lb, Compare::InPlace).await.unwrap();
        assert_eq!((outcome.progress, outcome.ingress.len()), (Progress::Done, 1));
        assert!(aws.target_health(&lb.owner).await.unwrap().targets.len() == 2);
        if owned.is_none() {
            owned = Some(aws.owned().await.unwrap().len());
        }
        // Spread over the time that AWS's rate allows.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(owned, Some(SERVICES));
    let calls = cloud.take_calls();
    assert!(calls.iter().all(|call| !call.kind.is_write()), "{calls:?}");
    let of = |name: &str| calls.iter().filter(|call| call.name == name).count();
    assert_eq!((of("DescribeLoadBalancers"), of("DescribeTargetGroups"), of("DescribeTags")), (1, 1, 10));
    assert_eq!(of("DescribeSecurityGroups"), 1);
    assert_eq!((of("DescribeTargetHealth"), calls.len()), (SERVICES, SERVICES + 13));
}

#[tokio::test(start_paused = true)]
async fn replaced_node_costs_two_calls_for_each_service() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    for index in 0..SERVICES {
        apply(&aws, &service(index), Compare::Remembered).await.unwrap();
    }
    tokio::time::sleep(Duration::from_mins(5)).await;
    for index in 0..SERVICES {
        aws.target_health(&service(index).owner).await.unwrap();
    }
    cloud.take_calls();
    for index in 0..SERVICES {
        let lb = service(index).with_nodes(super::driver::set(&[1, 2]));
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        // Spread over the time that AWS's rate allows.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let calls = cloud.take_calls();
    assert!(calls.len() <= 210, "{}", calls.len());
}

/// Throttled again and again, the lists of the start still make progress with every call that AWS answers. That of EC2 may fail: the
/// start continues without it after some tries.
#[tokio::test(start_paused = true)]
async fn throttled_lists_continue_where_they_stopped() {
    let cloud = filled(SERVICES).await;
    cloud.set_faults(Faults::Random(0.5));
    let (aws, mut tries) = (provider(&cloud), 1);
    while aws.owned().await.is_err() {
        tries += 1;
    }
    let (of_ec2, calls): (Vec<_>, Vec<_>) =
        cloud.take_calls().into_iter().partition(|call| call.kind.is_ec2());
    let (of_ec2, calls) = (of_ec2.len(), calls.len());
    assert!(tries > 1 && calls < 12 + tries, "{calls} calls in {tries} tries");
    assert!((1..=3).contains(&of_ec2), "{of_ec2} in {tries} tries");
}

/// The list of each resync takes long, and a Service that this process does not know yet does not wait for it.
#[tokio::test(start_paused = true)]
async fn later_lists_hold_up_no_service() {
    let cloud = filled(SERVICES).await;
    let aws = provider(&cloud);
    aws.owned().await.unwrap();
    aws.note_change();
    let new = service(SERVICES).owner;
    tokio::select! {
        biased;
        listed = aws.owned() => panic!("the list was first: {listed:?}"),
        health = aws.target_health(&new) => assert_eq!(health.unwrap().targets, []),
    }
}

/// A throttled account with very many resources: the lists need more time than a try has, and more than a minute.
#[tokio::test(start_paused = true)]
async fn slow_lists_end_after_some_tries() {
    let delays = Delays { call: Duration::from_secs(25), ..Delays::real() };
    let cloud = filled_with(Arc::new(StandIn::new(delays, 1)), SERVICES).await;
    let (aws, mut tries) = (provider(&cloud), 1);
    while tokio::time::timeout(Duration::from_mins(1), aws.owned()).await.is_err() {
        tries += 1;
        assert!(tries < 20, "{} calls", cloud.take_calls().len());
    }
    assert!(tries > 2, "{tries}");
}

/// Somebody changed an attribute and a listener while no provider ran. Lists do not show it.
#[tokio::test(start_paused = true)]
async fn what_lists_do_not_show_is_read_a_little_later() {
    let cloud = filled(3).await;
    let before = crate::standin::snapshot::snapshot(&cloud.cloud());
    cloud.change(|cloud| {
        let group = cloud.groups.values_mut().next().unwrap();
        group.attributes.insert("preserve_client_ip.enabled".to_owned(), "false".to_owned());
        cloud.listeners.values_mut().last().unwrap().port = 8080;
    });
    tokio::time::sleep(Duration::from_secs(10)).await;
    let aws = provider(&cloud);
    let mut due = Vec::new();
    for index in 0..3 {
        let outcome = apply(&aws, &service(index), Compare::InPlace).await.unwrap();
        assert_eq!(outcome.progress, Progress::Done);
        due.push(outcome.retry_refused.unwrap());
    }
    assert!(due[0] < due[2] && due[2] < Duration::from_mins(1), "{due:?}");
    cloud.take_calls();
    tokio::time::sleep(due[2]).await;
    for index in 0..3 {
        let outcome = apply(&aws, &service(index), Compare::Remembered).await.unwrap();
        assert_eq!(outcome.retry_refused, None);
    }
    let reads = cloud.take_calls().iter().filter(|call| !call.kind.is_write()).count();
    assert_eq!(reads, 3 * 3);
    assert_eq!(crate::standin::snapshot::snapshot(&cloud.cloud()), before);
}

/// Deleted Services do not count when health is read.
#[tokio::test(start_paused = true)]
async fn deleted_services_are_forgotten() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    for index in 0..200 {
        let lb = service(index).with_nodes(super::driver::set(&[]));
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        delete(&aws, &lb.owner).await.unwrap();
    }
    apply(&aws, &service(0), Compare::Remembered).await.unwrap();
    tokio::time::sleep(Duration::from_mins(5)).await;
    let health = aws.target_health(&service(0).owner).await.unwrap();
    assert_eq!(health.due, Some(Duration::from_mins(1)));
}

/// Without a security group, which EC2 may not know at once: then the next try reads everything.
fn open_service(index: usize) -> LoadBalancer {
    let mut lb = service(index);
    lb.annotations.insert(DISABLE_SECURITY_GROUP.to_owned(), "true".to_owned());
    lb
}

fn asked(cloud: &StandIn) -> usize {
    cloud.take_calls().iter().filter(|call| call.name == "DescribeLoadBalancers").count()
}

/// AWS makes them in 150 seconds, and each Service asks every ten seconds. One call answers for twenty.
#[tokio::test(start_paused = true)]
async fn new_load_balancers_are_asked_for_together() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    aws.owned().await.unwrap();
    cloud.take_calls();
    let start = tokio::time::Instant::now();
    let services: Vec<LoadBalancer> = (0..SERVICES).map(open_service).collect();
    let done = join_all(services.iter().map(|lb| apply(&aws, lb, Compare::Remembered))).await;
    assert!(done.iter().all(|outcome| outcome.as_ref().is_ok_and(|outcome| outcome.ingress.len() == 1)));
    let asked = asked(&cloud);
    assert!((60..=110).contains(&asked), "{asked} calls");
    assert!(start.elapsed() < Duration::from_secs(190), "{:?}", start.elapsed());
    // One alone asks for itself.
    let start = tokio::time::Instant::now();
    apply(&aws, &open_service(SERVICES), Compare::Remembered).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(165), "{:?}", start.elapsed());
    assert!((14..=17).contains(&self::asked(&cloud)));
}

/// AWS refuses the whole call because of one that is gone.
#[tokio::test(start_paused = true)]
async fn load_balancer_that_is_gone_keeps_no_other_from_being_published() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    let services: Vec<LoadBalancer> = (0..10).map(open_service).collect();
    for lb in &services {
        apply_now(&aws, lb, Compare::Remembered).await.unwrap();
    }
    tokio::time::sleep(Duration::from_mins(1)).await;
    let uid = services[0].owner.uid.clone();
    cloud.change(|cloud| cloud.balancers.retain(|_, found| found.tags[marks::UID] != uid));
    tokio::time::sleep(Duration::from_secs(10)).await;
    cloud.take_calls();
    // The first one is gone, and its Service does not ask.
    let done = join_all(services[1..].iter().map(|lb| apply(&aws, lb, Compare::Remembered))).await;
    assert!(done.iter().all(|outcome| outcome.as_ref().is_ok_and(|outcome| outcome.ingress.len() == 1)));
    let asked = asked(&cloud);
    assert!(asked <= 20, "{asked} calls");
}

/// AWS does not answer, and every worker has a Service that asks.
#[tokio::test(start_paused = true)]
async fn services_that_wait_for_a_look_that_fails_do_not_repeat_it() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    let services: Vec<LoadBalancer> = (0..10).map(open_service).collect();
    for lb in &services {
        apply_now(&aws, lb, Compare::Remembered).await.unwrap();
    }
    tokio::time::sleep(Duration::from_mins(1)).await;
    cloud.take_calls();
    cloud.set_faults(Faults::Random(1.0));
    let done = join_all(services.iter().map(|lb| aws.apply(lb, Compare::Remembered))).await;
    assert!(done.iter().all(Result::is_err), "{done:?}");
    assert_eq!(asked(&cloud), 1);
}

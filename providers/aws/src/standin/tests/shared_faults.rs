// SPDX-License-Identifier: Apache-2.0
//! Load balancers that several Services share, where reads of AWS are old, processes follow each other quickly, and Services get in each
//! other's way.

use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use steerage_provider_api::{ADOPTION_REFUSED, Compare, LoadBalancer, Outcome, Progress, Provider as _};

use super::driver::{apply, changes, delete, pause, set, standin, standin_with, wanted};
use super::security_groups::assert_empty;
use super::shared::{has_ports, provider, sharing, watch};
use super::zones;
use crate::Aws;
use crate::config::{Config, Peer};
use crate::desired::MAX_LISTENERS;
use crate::desired::tests::config;
use crate::standin::faults::{Fault, Faults};
use crate::standin::snapshot::snapshot;
use crate::standin::{Quotas, StandIn};
use crate::{reasons, shared};

/// Calls until the Service has its listener, and no longer: reads do not show it yet.
async fn listen(aws: &Aws, cloud: &StandIn, lb: &LoadBalancer) {
    let port = lb.listeners[0].port;
    for _ in 0..20 {
        let outcome = aws.apply(lb, Compare::Remembered).await;
        if cloud.cloud().listeners.values().any(|found| found.port == port) {
            return;
        }
        match outcome {
            Ok(Outcome { progress: Progress::Again(after), .. }) => tokio::time::sleep(after).await,
            _ => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
    panic!("no listener on port {port}");
}

/// The only Service, created again without the end of the first one: the second one's load balancer must not go with the first.
#[tokio::test(start_paused = true)]
async fn predecessor_takes_nothing_of_its_successor_along() {
    for seed in 0..10 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let first = sharing("web", "a", 80);
        apply(&aws, &first, Compare::Remembered).await.unwrap();
        pause().await;
        let mut second = first.clone();
        second.owner.uid = "uid-2".to_owned();
        apply(&aws, &second, Compare::Remembered).await.unwrap();
        watch(&cloud, "shop/a");
        delete(&aws, &first.owner).await.unwrap();
        pause().await;
        has_ports(&cloud, &[(80, "shop/a")], "the successor");
        assert_eq!(cloud.violations(), Vec::<String>::new());
        delete(&aws, &second.owner).await.unwrap();
        assert_empty(&cloud, "after both");
    }
}

/// The operator moves the load balancer to another subnet: the old one stays until the new one has had its minutes, whoever looks.
#[tokio::test(start_paused = true)]
async fn zone_leaves_for_all_services_only_after_the_hold() {
    let at = |cloud: &_, subnet: &str| {
        let text = format!(
            r#"{{"web": {{"namespaces": ["*"], "annotations": {{
                "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true",
                "service.beta.kubernetes.io/aws-load-balancer-subnets": "{subnet}"}}}}}}"#
        );
        let shared_load_balancers = shared::read(&text, &config()).unwrap();
        Aws::over(Config { shared_load_balancers, ..config() }, Arc::clone(cloud) as _)
    };
    for seed in 0..5 {
        let cloud = standin(seed);
        zones::plant(&cloud);
        pause().await;
        let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
        let aws = at(&cloud, "subnet-a");
        for lb in [&a, &b] {
            apply(&aws, lb, Compare::Remembered).await.unwrap();
        }
        pause().await;
        zones::watch(&cloud);
        let aws = at(&cloud, "subnet-b");
        let (first, second) =
            tokio::join!(apply(&aws, &a, Compare::Remembered), apply(&aws, &b, Compare::Remembered));
        assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
        assert_eq!(cloud.violations(), Vec::<String>::new());
        let balancer = cloud.cloud().balancers.into_values().next().unwrap();
        assert_eq!(balancer.placed.into_keys().collect::<Vec<_>>(), ["subnet-b"]);
    }
}

/// Reads do not show another Service's change yet, so a comparison waits, and is made when they do.
#[tokio::test(start_paused = true)]
async fn postponed_comparison_is_not_forgotten() {
    let text = r#"{"web": {"namespaces": ["*"], "annotations": {
        "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true",
        "service.beta.kubernetes.io/aws-load-balancer-subnets": "subnet-a,name-b"}}}"#;
    let shared_load_balancers = shared::read(text, &config()).unwrap();
    let cloud = standin(1);
    zones::plant(&cloud);
    pause().await;
    let aws = Aws::over(Config { shared_load_balancers, ..config() }, Arc::clone(&cloud) as _);
    let a = sharing("web", "a", 80);
    let b = sharing("web", "b", 443);
    let two = wanted(&[(443, 30_443), (444, 30_444)], &[0, 1]);
    let two = LoadBalancer { owner: b.owner.clone(), annotations: b.annotations.clone(), ..two };
    for lb in [&a, &two] {
        apply(&aws, lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    // The operator gives the name to a subnet of another zone.
    cloud.change(|cloud| {
        for found in &mut cloud.subnets {
            let name = if found.id == "subnet-c" { "name-b" } else { "none" };
            found.tags.insert("Name".to_owned(), name.to_owned());
        }
    });
    pause().await;
    aws.apply(&b, Compare::Remembered).await.unwrap();
    let outcome = loop {
        match aws.apply(&a, Compare::InPlace).await {
            Ok(outcome) => break outcome,
            // Reads show a part of the change.
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    };
    tokio::time::sleep(outcome.retry_refused.expect("a comparison that waits")).await;
    cloud.take_calls();
    apply(&aws, &a, Compare::Remembered).await.unwrap();
    let repeats = cloud.take_calls().iter().any(|call| call.name == "DescribeListeners");
    assert!(!repeats, "only what waits is compared: changes by others would lead to one after another");
    let balancer = cloud.cloud().balancers.into_values().next().unwrap();
    assert_eq!(balancer.placed.into_keys().collect::<Vec<_>>(), ["subnet-a", "subnet-c"]);
}

/// Reads do not show what was just created: the wish to move is refused all the same.
#[tokio::test(start_paused = true)]
async fn service_that_moves_at_once_leaves_nothing_behind() {
    for seed in 0..20 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let here = sharing("web", "a", 80);
        let mut there = here.clone();
        there.annotations.clear();
        listen(&aws, &cloud, &here).await;
        let refused = apply(&aws, &there, Compare::Remembered).await.unwrap_err();
        assert_eq!(refused.reason(), reasons::SHARED_LOAD_BALANCER_IMMUTABLE, "{refused}");
        // Also where the answer to the first change was lost.
        let other = sharing("web", "b", 443);
        let mut moved = other.clone();
        moved.annotations.clear();
        cloud.set_faults(Faults::Once("CreateListener", Fault::After));
        listen(&aws, &cloud, &other).await;
        assert!(!cloud.has_faults());
        let refused = apply(&aws, &moved, Compare::Remembered).await.unwrap_err();
        assert_eq!(refused.reason(), reasons::SHARED_LOAD_BALANCER_IMMUTABLE, "{refused}");
        for owner in [&here.owner, &other.owner] {
            delete(&aws, owner).await.unwrap();
        }
        assert_empty(&cloud, "after both");
    }
}

/// A process begins while reads do not show yet what the one before it created.
#[tokio::test(start_paused = true)]
async fn new_process_does_not_delete_under_a_listener_that_it_cannot_see() {
    for seed in 0..40 {
        let cloud = standin(seed);
        let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
        let before = provider(&cloud);
        apply(&before, &a, Compare::Remembered).await.unwrap();
        pause().await;
        listen(&before, &cloud, &b).await;
        watch(&cloud, "shop/b");
        delete(&provider(&cloud), &a.owner).await.unwrap();
        assert_eq!(cloud.violations(), Vec::<String>::new(), "seed {seed}");
        has_ports(&cloud, &[(443, "shop/b")], "the other");
    }
}

/// The first list of a process misses a Service that the one before it created, and that is deleted before its first call.
#[tokio::test(start_paused = true)]
async fn service_that_the_first_list_missed_is_deleted_as_an_orphan() {
    let mut missed = 0;
    for seed in 0..40 {
        let cloud = standin(seed);
        let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
        let before = provider(&cloud);
        apply(&before, &a, Compare::Remembered).await.unwrap();
        pause().await;
        listen(&before, &cloud, &b).await;
        let aws = provider(&cloud);
        delete(&aws, &b.owner).await.unwrap();
        pause().await;
        if aws.owned().await.unwrap().contains(&b.owner) {
            missed += 1;
            delete(&aws, &b.owner).await.unwrap();
        }
        has_ports(&cloud, &[(80, "shop/a")], "the orphan is gone");
    }
    assert!(missed > 0, "every list showed everything");
}

/// What a Service remembers of the ports of others is no reason to refuse it.
#[tokio::test(start_paused = true)]
async fn port_that_became_free_is_given_to_a_service_that_remembers_it_as_taken() {
    for seed in 0..10 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let a = sharing("web", "a", 80);
        for lb in [&a, &sharing("web", "b", 81)] {
            apply(&aws, lb, Compare::Remembered).await.unwrap();
        }
        pause().await;
        delete(&aws, &a.owner).await.unwrap();
        apply(&aws, &sharing("web", "b", 80), Compare::Remembered).await.unwrap();
        has_ports(&cloud, &[(80, "shop/b")], "the second");
    }
}

/// Only those who wait for a port are called when it becomes free, however it does.
#[tokio::test(start_paused = true)]
async fn only_services_that_wait_for_the_port_are_called() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let mut called = aws.changes();
    for (name, port) in [("a", 80), ("b", 443)] {
        apply(&aws, &sharing("web", name, port), Compare::Remembered).await.unwrap();
    }
    let (late, later) = (sharing("web", "c", 80), sharing("web", "d", 443));
    for lb in [&late, &later] {
        apply(&aws, lb, Compare::Remembered).await.unwrap_err();
    }
    pause().await;
    apply(&aws, &sharing("web", "a", 8080), Compare::Remembered).await.unwrap();
    assert_eq!(called.next().now_or_never(), Some(Some(late.owner.clone())));
    assert_eq!(called.next().now_or_never(), None, "the other port is still in use");
    // A Service that is gone waits for nothing.
    delete(&aws, &later.owner).await.unwrap();
    delete(&aws, &sharing("web", "b", 443).owner).await.unwrap();
    assert_eq!(called.next().now_or_never(), None);
}

/// A call that takes long holds up neither targets nor the workers of the controller.
#[tokio::test(start_paused = true)]
async fn slow_change_of_one_service_holds_up_no_other() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
    for lb in [&a, &b] {
        apply(&aws, lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    let slow = aws.shared_uses.lock(&"web".to_owned(), || unreachable!("it is in use")).await;
    let moved = b.clone().with_nodes(set(&[2]));
    changes(&cloud);
    aws.apply(&moved, Compare::Remembered).await.unwrap();
    assert!(changes(&cloud).contains(&"RegisterTargets"));
    for (lb, compare) in [(&b, Compare::InPlace), (&moved, Compare::Remembered), (&b, Compare::InPlace)] {
        let outcome = aws.apply(lb, compare).await.unwrap();
        assert_eq!((outcome.progress, outcome.ingress.len()), (Progress::Done, 1));
        assert!(changes(&cloud).contains(&"RegisterTargets"));
        assert_eq!(outcome.retry_refused, Some(Duration::from_millis(500)), "the comparison comes later");
    }
    let mut changed = b.clone();
    changed.listeners[0].port = 444;
    assert!(matches!(aws.apply(&changed, Compare::Remembered).await.unwrap().progress, Progress::Again(_)));
    assert_eq!(changes(&cloud), [""; 0], "a change of the structure waits");
    assert_eq!(aws.delete(&a.owner).await.unwrap(), Progress::Again(Duration::from_secs(1)));
    drop(slow);
    cloud.take_calls();
    aws.apply(&b, Compare::Remembered).await.unwrap();
    let reads = cloud.take_calls();
    assert!(reads.iter().any(|call| call.name == "DescribeListeners"), "the comparison: {reads:?}");
}

/// Another Service that fails again and again keeps no finalizer.
#[tokio::test(start_paused = true)]
async fn failing_service_holds_no_deletion_of_another() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let (a, mut b) = (sharing("web", "a", 80), sharing("web", "b", 443));
    apply(&aws, &a, Compare::Remembered).await.unwrap();
    pause().await;
    for round in 0_u16.. {
        assert!(round < 20, "the deletion does not end");
        cloud.set_faults(Faults::Once("CreateListener", Fault::Code("UnsupportedProtocol")));
        b.listeners[0].port = 1000 + round;
        // Perhaps it is not refused yet, but called again.
        drop(aws.apply(&b, Compare::Remembered).await);
        match aws.delete(&a.owner).await.unwrap() {
            Progress::Done => break,
            Progress::Again(after) => tokio::time::sleep(after).await,
        }
    }
}

/// Somebody took the load balancer's tags away: whose it is, is unknown, and the user is told.
#[tokio::test(start_paused = true)]
async fn load_balancer_without_tags_is_reported() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let a = sharing("web", "a", 80);
    apply(&aws, &a, Compare::Remembered).await.unwrap();
    cloud.change(|cloud| cloud.balancers.values_mut().for_each(|found| found.tags.clear()));
    pause().await;
    let before = snapshot(&cloud.cloud());
    let refused = delete(&aws, &a.owner).await.unwrap_err();
    assert_eq!(refused.reason(), reasons::OBJECT_NOT_OWNED, "{refused}");
    assert_eq!(snapshot(&cloud.cloud()), before);
}

/// The listeners of others count too.
#[tokio::test(start_paused = true)]
async fn port_changes_at_a_load_balancer_that_is_full() {
    let quotas = Quotas { listeners: MAX_LISTENERS, ..Quotas::default() };
    let cloud = standin_with(1, quotas);
    let aws = provider(&cloud);
    let mut many =
        super::driver::wanted(&(1..50).map(|port| (1000 + port, 31_000 + port)).collect::<Vec<_>>(), &[0]);
    many.annotations.clone_from(&sharing("web", "a", 80).annotations);
    apply(&aws, &many, Compare::Remembered).await.unwrap();
    apply(&aws, &sharing("web", "a", 80), Compare::Remembered).await.unwrap();
    apply(&aws, &sharing("web", "a", 81), Compare::Remembered).await.unwrap();
    assert_eq!(cloud.cloud().listeners.len(), MAX_LISTENERS);
    let refused = apply(&aws, &sharing("web", "b", 82), Compare::Remembered).await.unwrap_err();
    assert_eq!(refused.reason(), reasons::QUOTA_EXCEEDED, "{refused}");
}

/// While load balancers are adopted, none that a Service publishes is given up for a shared one.
#[tokio::test(start_paused = true)]
async fn service_with_another_controllers_load_balancer_is_refused() {
    let cloud = standin(1);
    let shared_load_balancers = provider(&cloud).config.shared_load_balancers;
    let adopt = [Peer::AwsLoadBalancerController].into();
    let aws = Aws::over(Config { shared_load_balancers, adopt, ..config() }, Arc::clone(&cloud) as _);
    let mut lb = sharing("web", "a", 80);
    lb.published_hostnames =
        vec!["k8s-shop-a-0123456789-0123456789abcdef.elb.us-east-1.amazonaws.com".to_owned()];
    let refused = apply(&aws, &lb, Compare::Remembered).await.unwrap_err();
    assert_eq!(refused.reason(), ADOPTION_REFUSED, "{refused}");
    assert_empty(&cloud, "refused before anything is created");
    lb.published_hostnames.clear();
    let ingress = apply(&aws, &lb, Compare::Remembered).await.unwrap().ingress;
    lb.published_hostnames = ingress.into_iter().filter_map(|found| found.hostname).collect();
    apply(&aws, &lb, Compare::InPlace).await.unwrap();
}

/// It would hold it until it is thought to be gone, and nobody would change the load balancer meanwhile.
#[tokio::test(start_paused = true)]
async fn service_that_is_refused_or_in_place_leaves_the_line() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
    for lb in [&a, &b] {
        apply(&aws, lb, Compare::Remembered).await.unwrap();
    }
    let line = "web".to_owned();
    let join = |lb: &LoadBalancer| {
        let who = (&lb.owner, lb.owner.service.namespace());
        aws.shared_lines.join(&line, who, |_| Duration::from_mins(1))
    };
    for is_refused in [true, false] {
        assert_eq!((join(&a), join(&b)), (0, 1));
        if is_refused {
            aws.set_targets(&a.owner, &a.targets()).await.unwrap();
        } else {
            aws.apply(&a, Compare::Remembered).await.unwrap();
        }
        assert_eq!(join(&b), 0, "refused: {is_refused}");
        aws.shared_lines.leave(&line, &b.owner);
    }
}

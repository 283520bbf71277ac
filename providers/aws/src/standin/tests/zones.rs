// SPDX-License-Identifier: Apache-2.0
//! Subnets that an existing load balancer gets or loses.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steerage_model::Key;
use steerage_provider_api::{Compare, LoadBalancer, Outcome, Progress, Provider as _};
use tokio::time::Instant;

use super::driver::{apply, changes, own_set, provider, standin, wanted};
use crate::Aws;
use crate::annotations::SUBNETS;
use crate::client::Tags;
use crate::config::Config;
use crate::desired::tests::config;
use crate::standin::StandIn;
use crate::standin::faults::{Fault, Faults};
use crate::subnets::Subnet;

/// How long a zone that leaves waits for one that came.
const HOLD: Duration = Duration::from_mins(5);

/// Adds the subnets `subnet-a`, `subnet-b` and `subnet-c`, each in a zone of its own, and `subnet-a2` in the first one's.
pub(super) fn plant(cloud: &StandIn) {
    let subnet = |id: &str, zone: &str| Subnet {
        id: id.to_owned(),
        zone: zone.to_owned(),
        tags: Tags::from([("Name".to_owned(), id.replacen("subnet-", "name-", 1))]),
        free: 200,
        has_ipv6: true,
        is_on_outpost: false,
    };
    let all = [("subnet-a", "a"), ("subnet-a2", "a"), ("subnet-b", "b"), ("subnet-c", "c")];
    cloud.change(|cloud| cloud.subnets = all.map(|(id, zone)| subnet(id, zone)).into());
}

fn naming(subnets: &str) -> LoadBalancer {
    let mut lb = wanted(&[(80, 30080)], &[0, 1]);
    if !subnets.is_empty() {
        lb.annotations.insert(SUBNETS.to_owned(), subnets.to_owned());
    }
    lb
}

fn placed(cloud: &StandIn) -> Vec<String> {
    let [balancer] = &cloud.cloud().balancers.into_values().collect::<Vec<_>>()[..] else {
        panic!("one load balancer")
    };
    balancer.placed.keys().cloned().collect()
}

/// A load balancer in these subnets, seen by every read.
async fn in_place(seed: u64, subnets: &str) -> (Arc<StandIn>, Aws) {
    let cloud = standin(seed);
    plant(&cloud);
    let aws = provider(&cloud);
    pause().await;
    apply(&aws, &naming(subnets), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.take_calls();
    (cloud, aws)
}

async fn pause() {
    tokio::time::sleep(Duration::from_mins(2)).await;
}

/// Counts it as a violation if a zone leaves less than [`HOLD`] after another one came.
pub(super) fn watch(cloud: &StandIn) {
    let added = Mutex::new(None::<Instant>);
    cloud.set_invariant(Box::new(move |before, after| {
        let zones = |cloud: &crate::standin::Cloud| -> BTreeSet<String> {
            cloud.balancers.values().flat_map(|found| found.placed.keys().cloned()).collect()
        };
        let (before, after) = (zones(before), zones(after));
        let mut added = added.lock().unwrap();
        if !after.is_subset(&before) {
            *added = Some(Instant::now());
        }
        let is_soon = added.is_some_and(|added| added.elapsed() < HOLD);
        (is_soon && !before.is_subset(&after)).then(|| format!("{before:?} became {after:?}"))
    }));
}

#[tokio::test(start_paused = true)]
async fn zones_follow_the_annotation_and_come_before_others_leave() {
    let (cloud, aws) = in_place(1, "subnet-a").await;
    watch(&cloud);
    for (named, expected, steps) in [
        ("subnet-a,name-b", &["subnet-a", "subnet-b"][..], 1),
        ("subnet-b", &["subnet-b"], 1),
        ("subnet-c", &["subnet-c"], 2),
        ("subnet-a,subnet-b,subnet-c", &["subnet-a", "subnet-b", "subnet-c"], 1),
    ] {
        let start = Instant::now();
        let outcome = apply(&aws, &naming(named), Compare::Remembered).await.unwrap();
        assert_eq!((outcome.incomplete, outcome.ingress.len()), (None, 1));
        assert_eq!(
            (placed(&cloud), changes(&cloud)),
            (expected.iter().map(|id| (*id).to_owned()).collect(), vec!["SetSubnets"; steps])
        );
        let waits = start.elapsed() > HOLD.mul_f64(0.9);
        assert_eq!(waits, expected.len() == 1, "{named}: {:?}", start.elapsed());
    }
    assert_eq!(cloud.violations(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn another_subnet_of_a_zone_is_refused_and_the_rest_follows() {
    let (cloud, aws) = in_place(1, "subnet-a").await;
    let lb = naming("subnet-a2,subnet-b").with_nodes(own_set(&[2]));
    let more = wanted(&[(80, 30080), (81, 30081)], &[0]);
    let lb = LoadBalancer { listeners: more.listeners, groups: more.groups, ..lb }.with_nodes(own_set(&[2]));
    for compare in [Compare::Remembered, Compare::Remembered, Compare::InPlace] {
        let outcome = apply(&aws, &lb, compare).await.unwrap();
        let (reason, message) = outcome.incomplete.unwrap();
        assert!(reason == "SubnetsImmutable" && message.contains("subnet-a2"), "{reason}: {message}");
    }
    let now = cloud.cloud();
    assert!(
        now.listeners.len() == 2 && now.groups.values().all(|group| group.registered().any(|id| id == "i-2"))
    );
    assert_eq!(placed(&cloud), ["subnet-a"]);
    // As the message says.
    for (named, expected) in
        [("subnet-b", &["subnet-b"][..]), ("subnet-b,subnet-a2", &["subnet-a2", "subnet-b"])]
    {
        assert_eq!(apply(&aws, &naming(named), Compare::Remembered).await.unwrap().incomplete, None);
        assert_eq!(placed(&cloud), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn faults_at_every_call_end_with_the_named_subnets() {
    let faults =
        [Fault::Before, Fault::After, Fault::Code("ThrottlingException"), Fault::Code("InternalFailure")];
    for (seed, call) in (0..).zip(["SetSubnets", "DescribeSubnets", "DescribeLoadBalancers"]) {
        for fault in faults {
            for is_restarted in [false, true] {
                let what = format!("{call} {fault:?}, restarted: {is_restarted}");
                let (cloud, mut aws) = in_place(seed, "subnet-a").await;
                if !is_restarted {
                    // A new process does not know when a zone came.
                    watch(&cloud);
                }
                for (named, expected) in
                    [("name-a,name-b", &["subnet-a", "subnet-b"][..]), ("name-c", &["subnet-c"])]
                {
                    cloud.set_faults(Faults::Once(call, fault));
                    if is_restarted {
                        let _ = aws.apply(&naming(named), Compare::InPlace).await;
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        aws = provider(&cloud);
                    }
                    apply(&aws, &naming(named), Compare::InPlace).await.unwrap();
                    assert_eq!(placed(&cloud), expected, "{what}");
                    assert_eq!(cloud.violations(), [""; 0], "{what}");
                    pause().await;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refused_subnets_are_reported_and_not_tried_with_every_change() {
    let (cloud, aws) = in_place(1, "subnet-a").await;
    for targets in [[1, 2], [2, 3]] {
        let lb = naming("subnet-a,subnet-none").with_nodes(own_set(&targets));
        let (reason, message) = apply(&aws, &lb, Compare::Remembered).await.unwrap().incomplete.unwrap();
        assert!(reason == "RejectedByProvider" && message.contains("subnet-none"), "{reason}: {message}");
    }
    let tries = |calls: Vec<&str>| calls.iter().filter(|name| **name == "SetSubnets").count();
    assert_eq!(tries(changes(&cloud)), 1);
    let error = apply(&aws, &naming("subnet-a,subnet-none"), Compare::InPlace).await.unwrap().incomplete;
    assert_eq!((error.unwrap().0, tries(changes(&cloud))), ("RejectedByProvider", 1));
    assert_eq!(placed(&cloud), ["subnet-a"]);
}

/// A comparison notices what somebody changed at the load balancer itself.
#[tokio::test(start_paused = true)]
async fn drift_of_named_subnets_is_repaired() {
    let (cloud, aws) = in_place(1, "subnet-a,subnet-b").await;
    cloud
        .change(|cloud| cloud.balancers.values_mut().for_each(|found| drop(found.placed.remove("subnet-a"))));
    pause().await;
    apply(&aws, &naming("subnet-a,subnet-b"), Compare::InPlace).await.unwrap();
    assert_eq!(placed(&cloud), ["subnet-a", "subnet-b"]);
}

#[tokio::test(start_paused = true)]
async fn load_balancer_that_somebody_deleted_is_created_with_the_named_subnets() {
    let (cloud, aws) = in_place(1, "subnet-a").await;
    cloud.change(|cloud| {
        cloud.balancers.clear();
        cloud.listeners.clear();
    });
    pause().await;
    apply(&aws, &naming("subnet-a,subnet-b"), Compare::Remembered).await.unwrap();
    assert_eq!(placed(&cloud), ["subnet-a", "subnet-b"]);
}

#[tokio::test(start_paused = true)]
async fn zone_that_the_flag_adds_follows_and_none_leaves() {
    let (cloud, _) = in_place(1, "").await;
    let with = |subnets: &[&str]| {
        let subnets = subnets.iter().map(|id| (*id).to_owned()).collect();
        Aws::over(Config { subnets, ..config() }, Arc::clone(&cloud) as _)
    };
    for (flag, expected) in [
        (&["subnet-a2", "subnet-b"][..], &["subnet-a", "subnet-b"][..]),
        (&["subnet-b"], &["subnet-a", "subnet-b"]),
    ] {
        let aws = with(flag);
        apply(&aws, &naming(""), Compare::InPlace).await.unwrap();
        // What the lists of the start do not show is read later.
        pause().await;
        apply(&aws, &naming(""), Compare::InPlace).await.unwrap();
        assert_eq!(placed(&cloud), expected);
    }
}

/// EC2's timeout, one Service after the other, would keep all of them from following their endpoints.
#[tokio::test(start_paused = true)]
async fn services_share_one_read_of_subnets_and_one_failure() {
    let cloud = standin(1);
    plant(&cloud);
    cloud.change(|cloud| {
        for subnet in &mut cloud.subnets {
            subnet.tags.insert("kubernetes.io/role/internal-elb".to_owned(), "1".to_owned());
        }
    });
    pause().await;
    let aws = Aws::over(Config { subnets: Vec::new(), ..config() }, Arc::clone(&cloud) as _);
    let service = |index: usize| {
        let mut lb = naming("");
        lb.owner.service = Key::new("shop", format!("web-{index}"));
        lb
    };
    for index in 0..10 {
        apply(&aws, &service(index), Compare::Remembered).await.unwrap();
    }
    pause().await;
    cloud.take_calls();
    let lookups = || cloud.take_calls().iter().filter(|call| call.name == "DescribeSubnets").count();
    for index in 0..10 {
        apply(&aws, &service(index), Compare::InPlace).await.unwrap();
    }
    assert_eq!(lookups(), 1, "one read for all of them");
    pause().await;
    cloud.fail_ec2(Some(""));
    for index in 0..10 {
        let lb = service(index).with_nodes(own_set(&[1, 2]));
        let Outcome { progress, .. } = aws.apply(&lb, Compare::InPlace).await.unwrap();
        // The security group is another matter.
        assert!(matches!(progress, Progress::Again(_)));
    }
    assert_eq!(lookups(), 1, "one try");
    assert!(cloud.cloud().groups.values().all(|group| group.registered().any(|id| id == "i-2")));
}

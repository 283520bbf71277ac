// SPDX-License-Identifier: Apache-2.0
//! Security groups that an annotation names: they replace Steerage's own one, and are replaced by it, without a moment in which nobody may
//! connect.

use std::collections::BTreeSet;
use std::time::Duration;

use steerage_provider_api::{Compare, LoadBalancer, Outcome, Progress, Provider as _};
use steerage_provider_cloud::marks;
use tokio::time::Instant;

use super::driver::{apply, changes, delete, own_set, pause, provider, standin};
use super::security_groups::{ALL, assert_secured, from, in_place, is_done, registered, web};
use crate::annotations::{DISABLE_SECURITY_GROUP, SECURITY_GROUPS};
use crate::client::Tags;
use crate::desired::tests::config;
use crate::security_group::SecurityGroup;
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Cloud, Quotas, StandIn};

/// The IDs of the planted groups. Each is also the name of its group.
pub(super) const PLANTED: [&str; 2] = ["sg-front", "sg-office"];

/// Adds security groups of others, which admit everybody to these ports.
pub(super) fn plant(cloud: &StandIn, ports: std::ops::RangeInclusive<u16>) {
    let rules = ports
        .flat_map(|port| ["tcp", "udp"].map(|protocol| super::security_groups::rule(protocol, port, ALL)));
    let others: BTreeSet<_> = rules.collect();
    cloud.change(|cloud| {
        for id in PLANTED {
            let group = SecurityGroup {
                id: id.to_owned(),
                name: format!("{id} of others"),
                vpc: config().vpc,
                tags: Tags::from([("Name".to_owned(), id.replacen("sg-", "name-", 1))]),
                others: others.clone(),
                ..SecurityGroup::default()
            };
            cloud.security_groups.insert(id.to_owned(), group);
        }
    });
}

fn naming(groups: &str) -> LoadBalancer {
    let mut lb = from(&[]);
    lb.annotations.insert(SECURITY_GROUPS.to_owned(), groups.to_owned());
    lb
}

/// The groups of the only load balancer.
fn attached(cloud: &StandIn) -> Vec<String> {
    let [balancer] = &cloud.cloud().balancers.into_values().collect::<Vec<_>>()[..] else {
        panic!("one load balancer")
    };
    balancer.security_groups.iter().cloned().collect()
}

/// Steerage's groups.
fn own(cloud: &StandIn) -> Vec<SecurityGroup> {
    let all = cloud.cloud().security_groups.into_values();
    all.filter(|group| group.tags.contains_key(marks::UID)).collect()
}

fn assert_own(cloud: &StandIn, what: &str) {
    let own = own(cloud);
    let [group] = &own[..] else { panic!("{what}: {own:?}") };
    assert_eq!((&group.own, attached(cloud)), (&web(&[ALL]), vec![group.id.clone()]), "{what}");
}

fn assert_named(cloud: &StandIn, ids: &[&str], what: &str) {
    assert_eq!(
        (attached(cloud), own(cloud).len()),
        (ids.iter().map(|id| (*id).to_owned()).collect(), 0),
        "{what}"
    );
}

/// The load balancer has `sg-front` if the Service names it, and otherwise its own group.
fn assert_is(cloud: &StandIn, lb: &LoadBalancer, what: &str) {
    if lb.annotations.is_empty() {
        assert_own(cloud, what);
    } else {
        assert_named(cloud, &["sg-front"], what);
    }
}

/// Counts it as a violation if a load balancer comes to groups that admit nobody to port 80, or if a planted group changes.
fn watch(cloud: &StandIn) {
    let admits = |cloud: &Cloud| {
        let ids = cloud.balancers.values().flat_map(|found| &found.security_groups);
        let mut groups = ids.filter_map(|id| cloud.security_groups.get(id));
        groups.any(|group| group.own.union(&group.others).any(|rule| rule.port == 80))
    };
    let planted = |cloud: &Cloud| PLANTED.map(|id| cloud.security_groups.get(id).cloned());
    cloud.set_invariant(Box::new(move |before, after| {
        if planted(before) != planted(after) {
            return Some("a group of others changed".to_owned());
        }
        let is_closed = !after.balancers.is_empty() && !admits(after);
        is_closed.then(|| "nobody may connect".to_owned())
    }));
}

#[tokio::test(start_paused = true)]
async fn new_load_balancer_has_exactly_the_named_groups() {
    let cloud = standin(1);
    plant(&cloud, 80..=80);
    watch(&cloud);
    let (aws, lb) = (provider(&cloud), naming("name-front,sg-office"));
    pause().await;
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_named(&cloud, &PLANTED, "created");
    let calls = cloud.take_calls();
    assert!(calls.iter().all(|call| !call.kind.is_ec2() || !call.kind.is_write()), "{calls:?}");
    for aws in [&aws, &provider(&cloud)] {
        pause().await;
        apply(aws, &lb, Compare::InPlace).await.unwrap();
        apply(aws, &lb, Compare::Remembered).await.unwrap();
    }
    assert_eq!(changes(&cloud), [""; 0]);
    delete(&aws, &lb.owner).await.unwrap();
    let left = cloud.cloud();
    assert!(left.balancers.is_empty() && left.security_groups.len() == PLANTED.len());
    assert_eq!(cloud.violations(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn named_groups_replace_the_own_one_and_back() {
    for is_restarted in [false, true] {
        let (cloud, mut aws) = in_place(&from(&[]), Quotas::default()).await;
        plant(&cloud, 80..=80);
        watch(&cloud);
        for (lb, calls) in [
            (naming("sg-front"), &["SetSecurityGroups", "DeleteSecurityGroup"][..]),
            (naming("name-office,sg-front"), &["SetSecurityGroups"]),
            (naming("sg-office"), &["SetSecurityGroups"]),
            (from(&[]), &["CreateSecurityGroup", "AuthorizeSecurityGroupIngress", "SetSecurityGroups"]),
        ] {
            pause().await;
            if is_restarted {
                aws = provider(&cloud);
            }
            changes(&cloud);
            apply(&aws, &lb, Compare::Remembered).await.unwrap();
            let mut made = changes(&cloud);
            // EC2 and ELBv2 may not know a new group at once.
            made.dedup();
            assert!(made.starts_with(&calls[..1]) && made.ends_with(&calls[calls.len() - 1..]), "{made:?}");
            match lb.annotations.get(SECURITY_GROUPS).map(String::as_str) {
                Some("sg-front") => assert_named(&cloud, &["sg-front"], "one"),
                Some("sg-office") => assert_named(&cloud, &["sg-office"], "another"),
                Some(_) => assert_named(&cloud, &PLANTED, "both"),
                None => assert_own(&cloud, "none"),
            }
            apply(&aws, &lb, Compare::Remembered).await.unwrap();
            assert_eq!(changes(&cloud), [""; 0]);
        }
        assert_eq!(cloud.violations(), [""; 0], "restarted: {is_restarted}");
    }
}

/// Every call of the way there and back is lost, or its answer, or fails; and the process may end afterwards.
#[tokio::test(start_paused = true)]
async fn faults_at_every_call_end_with_what_is_wanted() {
    let calls = [
        "SetSecurityGroups",
        "DeleteSecurityGroup",
        "DescribeSecurityGroups",
        "CreateSecurityGroup",
        "AuthorizeSecurityGroupIngress",
    ];
    let faults = [Fault::Before, Fault::After, Fault::Code("Throttling"), Fault::Code("InternalFailure")];
    for (seed, call) in (0..).zip(calls) {
        for fault in faults {
            for is_restarted in [false, true] {
                let what = format!("{call} {fault:?}, restarted: {is_restarted}");
                let (cloud, mut aws) =
                    super::security_groups::in_place_with(seed, &from(&[]), Quotas::default()).await;
                plant(&cloud, 80..=80);
                watch(&cloud);
                pause().await;
                for lb in [naming("name-front"), from(&[])] {
                    cloud.set_faults(Faults::Once(call, fault));
                    if is_restarted {
                        let _ = aws.apply(&lb, Compare::InPlace).await;
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        aws = provider(&cloud);
                    }
                    apply(&aws, &lb, Compare::InPlace).await.unwrap();
                    pause().await;
                    apply(&aws, &lb, Compare::InPlace).await.unwrap();
                    assert_is(&cloud, &lb, &what);
                    assert_eq!(cloud.violations(), [""; 0], "{what}");
                }
            }
        }
    }
}

/// The process ends, or gives the call up, at any moment.
#[tokio::test(start_paused = true)]
async fn abandoned_changes_are_completed() {
    for cut in (50..1200).step_by(90) {
        for is_restarted in [false, true] {
            let what = format!("cut {cut}, restarted: {is_restarted}");
            let (cloud, mut aws) = in_place(&from(&[]), Quotas::default()).await;
            plant(&cloud, 80..=80);
            watch(&cloud);
            pause().await;
            for lb in [naming("name-front"), from(&[])] {
                let _ =
                    tokio::time::timeout(Duration::from_millis(cut), aws.apply(&lb, Compare::InPlace)).await;
                if is_restarted {
                    tokio::time::sleep(Duration::from_secs(5)).await;
                    aws = provider(&cloud);
                }
                apply(&aws, &lb, Compare::InPlace).await.unwrap();
                assert_is(&cloud, &lb, &what);
                assert_eq!(cloud.violations(), [""; 0], "{what}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_groups_are_reported_and_present_ones_kept() {
    for (groups, reason) in [("name-none", "SecurityGroupsNotFound"), ("sg-none", "RejectedByProvider")] {
        let cloud = standin(1);
        let error = apply(&provider(&cloud), &naming(groups), Compare::Remembered).await.unwrap_err();
        assert_eq!((error.reason(), cloud.cloud().balancers.len()), (reason, 0));
        assert!(error.to_string().contains(groups), "{error}");

        let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
        // Endpoints that move do not repeat what AWS has refused.
        for targets in [[0, 1], [1, 2], [2, 3]] {
            let lb = naming(groups).with_nodes(own_set(&targets));
            let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
            assert_eq!(outcome.incomplete.unwrap().0, reason);
            assert_eq!(registered(&cloud), targets.map(|index| format!("i-{index}")));
        }
        let tries = cloud.take_calls();
        let tries =
            tries.iter().filter(|call| matches!(call.name, "SetSecurityGroups" | "DescribeSecurityGroups"));
        assert_eq!(tries.count(), 1);
        assert_secured(&cloud, &web(&[ALL]), groups);
        plant(&cloud, 80..=80);
        pause().await;
        let outcome = apply(&aws, &naming("sg-front"), Compare::Remembered).await.unwrap();
        assert_eq!(outcome.incomplete, None);
        assert_named(&cloud, &["sg-front"], groups);
    }
}

#[tokio::test(start_paused = true)]
async fn own_group_cannot_be_named() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    let id = attached(&cloud).remove(0);
    let outcome = apply(&aws, &naming(&id), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "InvalidAnnotation");
    assert_own(&cloud, "kept");
}

#[tokio::test(start_paused = true)]
async fn load_balancer_without_groups_gets_none() {
    let mut open = from(&[]);
    open.annotations.insert(DISABLE_SECURITY_GROUP.to_owned(), "true".to_owned());
    let (cloud, aws) = in_place(&open, Quotas::default()).await;
    plant(&cloud, 80..=80);
    for aws in [&aws, &provider(&cloud)] {
        pause().await;
        let error = apply(aws, &naming("sg-front"), Compare::InPlace).await.unwrap_err();
        assert_eq!(error.reason(), "SecurityGroupImmutable");
    }
    assert!(attached(&cloud).is_empty());
}

/// A comparison notices what somebody changed at the load balancer itself.
#[tokio::test(start_paused = true)]
async fn drift_of_named_groups_is_repaired() {
    let cloud = standin(1);
    plant(&cloud, 80..=80);
    let (aws, lb) = (provider(&cloud), naming("sg-front"));
    pause().await;
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    for changed in [&["sg-office"][..], &PLANTED] {
        cloud.change(|cloud| {
            let balancer = cloud.balancers.values_mut().next().unwrap();
            balancer.security_groups = changed.iter().map(|id| (*id).to_owned()).collect();
        });
        pause().await;
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        assert_named(&cloud, &["sg-front"], &format!("{changed:?}"));
    }
}

#[tokio::test(start_paused = true)]
async fn load_balancer_that_somebody_deleted_is_created_with_the_named_groups() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    plant(&cloud, 80..=80);
    cloud.change(|cloud| {
        cloud.balancers.clear();
        cloud.listeners.clear();
    });
    pause().await;
    apply(&aws, &naming("sg-front"), Compare::Remembered).await.unwrap();
    apply(&aws, &naming("sg-front"), Compare::InPlace).await.unwrap();
    assert_named(&cloud, &["sg-front"], "created again");
}

#[tokio::test(start_paused = true)]
async fn comparison_costs_one_read_more_and_nothing_without_the_annotation() {
    let cloud = standin(1);
    plant(&cloud, 80..=80);
    pause().await;
    for (lb, expected) in [
        (from(&[]), &["DescribeListeners", "DescribeSecurityGroups", "DescribeTargetGroups"][..]),
        (
            naming("sg-front"),
            &["DescribeListeners", "DescribeLoadBalancers", "DescribeSecurityGroups", "DescribeTargetGroups"],
        ),
    ] {
        let aws = provider(&cloud);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        pause().await;
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        pause().await;
        cloud.take_calls();
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        let mut calls: Vec<_> = cloud.take_calls().iter().map(|call| call.name).collect();
        calls.sort_unstable();
        assert_eq!(calls, expected);
    }
}

/// AWS does not release it. The Service, which no longer needs it, is complete.
#[tokio::test(start_paused = true)]
async fn own_group_that_stays_in_use_does_not_hold_the_service_up() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    plant(&cloud, 80..=80);
    cloud.change(|cloud| cloud.security_group_references.extend(cloud.security_groups.keys().cloned()));
    let start = Instant::now();
    let Outcome { incomplete, retry_refused, .. } =
        apply(&aws, &naming("sg-front"), Compare::Remembered).await.unwrap();
    assert!((10..14).contains(&(start.elapsed().as_secs() / 60)), "{:?}", start.elapsed());
    assert_eq!((incomplete, own(&cloud).len()), (None, 1));
    cloud.change(|cloud| cloud.security_group_references.clear());
    tokio::time::sleep(retry_refused.unwrap()).await;
    apply(&aws, &naming("sg-front"), Compare::Remembered).await.unwrap();
    assert_named(&cloud, &["sg-front"], "released");
}

/// The annotation comes and goes before AWS released the own group.
#[tokio::test(start_paused = true)]
async fn own_group_that_is_still_there_is_used_again() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    plant(&cloud, 80..=80);
    watch(&cloud);
    cloud.change(|cloud| cloud.security_group_references.extend(cloud.security_groups.keys().cloned()));
    let before = own(&cloud).remove(0).id;
    let outcome = aws.apply(&naming("sg-front"), Compare::Remembered).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)));
    assert_eq!(attached(&cloud), ["sg-front"]);
    apply(&aws, &from(&[]), Compare::Remembered).await.unwrap();
    assert_own(&cloud, "taken back");
    assert_eq!(own(&cloud).remove(0).id, before);
    assert_eq!(cloud.violations(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn only_names_wait_for_ec2() {
    for (groups, needs_ec2) in [("sg-front", false), ("name-front", true)] {
        let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
        plant(&cloud, 80..=80);
        pause().await;
        cloud.fail_ec2(Some(""));
        let lb = naming(groups).with_nodes(own_set(&[1, 2]));
        let result = aws.apply(&lb, Compare::Remembered).await;
        assert!(!is_done(&result));
        assert_eq!(result.unwrap().incomplete.is_some(), needs_ec2, "{groups}");
        assert_eq!(
            (registered(&cloud), attached(&cloud) == ["sg-front"]),
            (vec!["i-1".to_owned(), "i-2".to_owned()], !needs_ec2)
        );
        cloud.fail_ec2(None);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        assert_named(&cloud, &["sg-front"], groups);
    }
}

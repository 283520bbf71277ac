// SPDX-License-Identifier: Apache-2.0
//! The security group of a load balancer: its rules, its end, and an EC2 that fails.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use steerage_model::Protocol;
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Progress, Provider as _};
use steerage_provider_cloud::marks;
use tokio::time::Instant;

use super::driver::{
    apply, apply_now, changes, delete, own_set, pause, provider, set, standin, standin_with, wanted,
};
use crate::Aws;
use crate::annotations::{DISABLE_SECURITY_GROUP, SSL_CERT, SSL_PORTS};
use crate::client::Tags;
use crate::desired::tests::{config, planned};
use crate::names;
use crate::security_group::{Rule, SecurityGroup, Source};
use crate::standin::faults::{Fault, Faults};
use crate::standin::harness::start_instances;
use crate::standin::snapshot::snapshot;
use crate::standin::{Delays, Quotas, StandIn};

pub(super) const ALL: &str = "0.0.0.0/0";
pub(super) const OFFICE: &str = "10.0.0.0/8";

/// A Service with port 80 and these source ranges.
pub(super) fn from(ranges: &[&str]) -> LoadBalancer {
    let source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
    LoadBalancer { source_ranges, ..wanted(&[(80, 30080)], &[0, 1]) }
}

/// The same without a security group.
fn open_from(ranges: &[&str]) -> LoadBalancer {
    let mut lb = from(ranges);
    lb.annotations.insert(DISABLE_SECURITY_GROUP.to_owned(), "true".to_owned());
    lb
}

pub(super) fn rule(protocol: &'static str, port: u16, source: &str) -> Rule {
    Rule { protocol, port, source: Source::Range(source.parse().unwrap()) }
}

/// Rules for port 80.
pub(super) fn web(sources: &[&str]) -> BTreeSet<Rule> {
    sources.iter().map(|source| rule("tcp", 80, source)).collect()
}

/// The only security group.
pub(super) fn group(cloud: &StandIn) -> SecurityGroup {
    let all: Vec<_> = cloud.cloud().security_groups.into_values().collect();
    let [one] = &all[..] else { panic!("{all:?}") };
    one.clone()
}

fn change_group(cloud: &StandIn, change: impl FnOnce(&mut SecurityGroup)) {
    cloud.change(|cloud| change(cloud.security_groups.values_mut().next().unwrap()));
}

/// The instances of the only target group.
pub(super) fn registered(cloud: &StandIn) -> Vec<String> {
    let group = cloud.cloud().groups.into_values().next().unwrap();
    group.registered().cloned().collect()
}

/// The only load balancer has the only security group, with these rules.
pub(super) fn assert_secured(cloud: &StandIn, rules: &BTreeSet<Rule>, what: &str) {
    let (found, balancer) = (group(cloud), cloud.cloud().balancers.into_values().next().unwrap());
    assert_eq!(found.own, *rules, "{what}");
    assert_eq!(balancer.security_groups, BTreeSet::from([found.id]), "{what}");
}

pub(super) fn assert_empty(cloud: &StandIn, what: &str) {
    assert!(snapshot(&cloud.cloud()).is_empty(), "{what}: {:?}", snapshot(&cloud.cloud()));
}

/// Counts it as a violation if a change leaves a security group without its last rule.
fn watch_rules(cloud: &StandIn) {
    cloud.set_invariant(Box::new(|before, after| {
        let is_closed = |id: &String| after.security_groups.get(id).is_some_and(|found| found.own.is_empty());
        let mut open = before.security_groups.iter().filter(|(_, found)| !found.own.is_empty());
        open.find(|(id, _)| is_closed(id)).map(|(id, _)| format!("{id} has no rule any more"))
    }));
}

pub(super) fn is_done(result: &Result<Outcome, Error>) -> bool {
    result.as_ref().is_ok_and(|outcome| outcome.progress == Progress::Done)
}

/// A Service with a load balancer and a security group, both known everywhere.
pub(super) async fn in_place(lb: &LoadBalancer, quotas: Quotas) -> (Arc<StandIn>, Aws) {
    in_place_with(1, lb, quotas).await
}

pub(super) async fn in_place_with(seed: u64, lb: &LoadBalancer, quotas: Quotas) -> (Arc<StandIn>, Aws) {
    let cloud = standin_with(seed, quotas);
    let aws = provider(&cloud);
    apply(&aws, lb, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.take_calls();
    (cloud, aws)
}

#[tokio::test(start_paused = true)]
async fn new_load_balancer_has_a_group_with_a_rule_for_each_port() {
    use Protocol::{Tcp, Udp};
    for seed in 0..20 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let ports =
            [(Tcp, 53, 30053), (Udp, 53, 30053), (Tcp, 80, 30080), (Udp, 99, 30099), (Tcp, 443, 30443)];
        let mut lb = planned(&ports).with_nodes(set(&[0]));
        for (name, value) in [(SSL_CERT, "arn:aws:acm:::a"), (SSL_PORTS, "443")] {
            lb.annotations.insert(name.to_owned(), value.to_owned());
        }
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        let expected = [("tcp", 53), ("udp", 53), ("tcp", 80), ("udp", 99), ("tcp", 443)];
        let expected = BTreeSet::from(expected.map(|(protocol, port)| rule(protocol, port, ALL)));
        assert_secured(&cloud, &expected, &format!("seed {seed}"));
        let found = group(&cloud);
        assert_eq!((found.vpc, found.tags), (config().vpc, marks::of_owner(&config().cluster, &lb.owner)));
        assert!(found.name.starts_with(&names::prefix(&config().cluster)), "{}", found.name);
        delete(&aws, &lb.owner).await.unwrap();
        assert_empty(&cloud, &format!("seed {seed}"));
    }
}

/// Without the lag of AWS, which repeats calls.
#[tokio::test(start_paused = true)]
async fn group_costs_two_calls_when_created_and_two_when_deleted() {
    let cloud = Arc::new(StandIn::new(Delays { lag: Duration::ZERO, ..Delays::real() }, 1));
    start_instances(&cloud, 2);
    let (aws, lb) = (provider(&cloud), from(&[]));
    let of_ec2 = || {
        let calls = cloud.take_calls();
        calls.iter().filter(|call| call.kind.is_ec2()).map(|call| call.name).collect::<Vec<_>>()
    };
    aws.owned().await.unwrap();
    assert_eq!(of_ec2(), ["DescribeSecurityGroups"]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_eq!(of_ec2(), ["CreateSecurityGroup", "AuthorizeSecurityGroupIngress"]);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_eq!(of_ec2(), [""; 0]);
    pause().await;
    apply(&aws, &lb, Compare::InPlace).await.unwrap();
    assert_eq!(of_ec2(), ["DescribeSecurityGroups"]);
    delete(&aws, &lb.owner).await.unwrap();
    let mut calls = of_ec2();
    // AWS refuses some tries, while the deleted load balancer still uses the group.
    calls.dedup();
    assert_eq!(calls, ["DescribeSecurityGroups", "DeleteSecurityGroup"]);
    assert_empty(&cloud, "deleted");
}

/// AWS releases the target group and the security group before the first try to delete each.
#[tokio::test(start_paused = true)]
async fn deletion_costs_five_calls() {
    let release = Duration::from_secs(4);
    let cloud = Arc::new(StandIn::new(Delays { lag: Duration::ZERO, release, ..Delays::real() }, 1));
    start_instances(&cloud, 2);
    let (aws, lb) = (provider(&cloud), from(&[]));
    aws.owned().await.unwrap();
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.take_calls();
    delete(&aws, &lb.owner).await.unwrap();
    let calls: Vec<_> = cloud.take_calls().iter().map(|call| call.name).collect();
    assert_eq!(
        calls,
        [
            "DescribeTags",
            "DeleteLoadBalancer",
            "DeleteTargetGroup",
            "DescribeSecurityGroups",
            "DeleteSecurityGroup"
        ]
    );
    assert_empty(&cloud, "deleted");
}

/// AWS releases a security group minutes after its load balancer.
#[tokio::test(start_paused = true)]
async fn late_release_costs_few_tries() {
    let release = Duration::from_mins(2);
    let cloud = Arc::new(StandIn::new(Delays { lag: Duration::ZERO, release, ..Delays::real() }, 1));
    start_instances(&cloud, 2);
    let (aws, lb) = (provider(&cloud), from(&[]));
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    // The target groups would be in use as long.
    cloud.change(|cloud| cloud.listeners.clear());
    cloud.take_calls();
    delete(&aws, &lb.owner).await.unwrap();
    let tries = cloud.take_calls().iter().filter(|call| call.name == "DeleteSecurityGroup").count();
    assert!((2..=9).contains(&tries), "{tries}");
    assert_empty(&cloud, "deleted");
}

#[tokio::test(start_paused = true)]
async fn changed_source_ranges_open_before_they_close() {
    let (cloud, mut aws) = in_place(&from(&[]), Quotas::default()).await;
    watch_rules(&cloud);
    for is_restarted in [false, true] {
        for (ranges, expected) in [
            (&[OFFICE][..], &[OFFICE][..]),
            (&["192.0.2.0/24", "198.51.100.0/24"], &["192.0.2.0/24", "198.51.100.0/24"]),
            (&[], &[ALL]),
        ] {
            pause().await;
            if is_restarted {
                aws = provider(&cloud);
            }
            changes(&cloud);
            apply(&aws, &from(ranges), Compare::InPlace).await.unwrap();
            let what = format!("{ranges:?}, restarted: {is_restarted}");
            assert_secured(&cloud, &web(expected), &what);
            let expected = ["AuthorizeSecurityGroupIngress", "RevokeSecurityGroupIngress"];
            assert_eq!(changes(&cloud), expected, "{what}");
        }
    }
    assert_eq!(cloud.violations(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn rules_follow_the_ports() {
    let (cloud, aws) = in_place(&from(&[OFFICE]), Quotas::default()).await;
    let ports = [(80, 30080), (443, 30443)];
    let both = LoadBalancer { source_ranges: from(&[OFFICE]).source_ranges, ..wanted(&ports, &[0, 1]) };
    apply(&aws, &both, Compare::Remembered).await.unwrap();
    let expected = BTreeSet::from([rule("tcp", 80, OFFICE), rule("tcp", 443, OFFICE)]);
    assert_secured(&cloud, &expected, "two ports");
    apply(&aws, &from(&[OFFICE]), Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[OFFICE]), "one port");
}

#[tokio::test(start_paused = true)]
async fn rules_of_others_stay_and_revoked_ones_return() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    let others = BTreeSet::from([rule("tcp", 22, "203.0.113.0/24"), rule("tcp", 80, OFFICE)]);
    change_group(&cloud, |group| {
        group.own.clear();
        group.others.clone_from(&others);
    });
    pause().await;
    apply(&aws, &from(&[]), Compare::InPlace).await.unwrap();
    assert_secured(&cloud, &web(&[ALL]), "revoked");
    assert_eq!(group(&cloud).others, others);
    // Somebody else's rule serves as well.
    for (ranges, expected) in
        [(&[OFFICE][..], &[][..]), (&[OFFICE, "192.0.2.0/24"], &["192.0.2.0/24"]), (&[], &[ALL])]
    {
        pause().await;
        apply(&aws, &from(ranges), Compare::InPlace).await.unwrap();
        assert_secured(&cloud, &web(expected), &format!("{ranges:?}"));
        assert_eq!(group(&cloud).others, others);
    }
    delete(&aws, &from(&[]).owner).await.unwrap();
    assert_empty(&cloud, "deleted");
}

/// Somebody added a wanted rule, or revoked an unwanted one, of which no read tells.
#[tokio::test(start_paused = true)]
async fn rules_that_others_changed_unseen_do_not_stop_a_change() {
    let (cloud, aws) = in_place(&from(&["192.0.2.0/24"]), Quotas::default()).await;
    change_group(&cloud, |group| {
        group.own.clear();
        group.others = web(&[OFFICE]);
    });
    apply(&aws, &from(&[OFFICE, "198.51.100.0/24"]), Compare::Remembered).await.unwrap();
    let found = group(&cloud);
    assert_eq!((found.own, found.others), (web(&["198.51.100.0/24"]), web(&[OFFICE])));
}

#[tokio::test(start_paused = true)]
async fn rules_are_replaced_at_the_quota() {
    let quotas = Quotas { rules: 2, ..Quotas::default() };
    let (cloud, aws) = in_place(&from(&[OFFICE, "192.0.2.0/24"]), quotas).await;
    for ranges in [["198.51.100.0/24", "203.0.113.0/24"], [OFFICE, "203.0.113.0/24"]] {
        apply(&aws, &from(&ranges), Compare::Remembered).await.unwrap();
        assert_secured(&cloud, &web(&ranges), &format!("{ranges:?}"));
    }
}

#[tokio::test(start_paused = true)]
async fn too_many_rules_are_reported_and_those_with_room_are_there() {
    let (cloud, aws) = in_place(&from(&[]), Quotas { rules: 2, ..Quotas::default() }).await;
    let ranges = [OFFICE, "192.0.2.0/24", "198.51.100.0/24"];
    let many = from(&ranges).with_nodes(own_set(&[1, 2]));
    for _ in 0..2 {
        let outcome = apply(&aws, &many, Compare::Remembered).await.unwrap();
        assert_eq!(outcome.incomplete.unwrap().0, "QuotaExceeded");
        assert_eq!(outcome.ingress.len(), 1, "the load balancer serves those that fit");
        let own = group(&cloud).own;
        assert!(own.len() == 2 && own.is_subset(&web(&ranges)), "{own:?}");
        pause().await;
    }
    assert!(registered(&cloud).contains(&"i-2".to_owned()));
    apply(&aws, &from(&ranges[1..]), Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&ranges[1..]), "two ranges");
}

#[tokio::test(start_paused = true)]
async fn targets_do_not_wait_for_ec2() {
    for (code, is_restarted) in
        [("", false), ("", true), ("UnauthorizedOperation", false), ("UnauthorizedOperation", true)]
    {
        let what = format!("code '{code}', restarted: {is_restarted}");
        let (cloud, mut aws) = in_place(&from(&[]), Quotas::default()).await;
        cloud.fail_ec2(Some(code));
        let mut compare = Compare::Remembered;
        if is_restarted {
            (aws, compare) = (provider(&cloud), Compare::InPlace);
        }
        let lb = from(&[OFFICE]).with_nodes(own_set(&[1, 2]));
        let start = Instant::now();
        while start.elapsed() < Duration::from_mins(6) {
            // Not an error: the controller would wait longer and longer, also when endpoints change.
            let outcome = aws.apply(&lb, compare).await.unwrap();
            let Progress::Again(wait) = outcome.progress else { panic!("{what}") };
            assert!(wait <= Duration::from_mins(1) && outcome.incomplete.is_some(), "{what}");
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        assert_eq!(registered(&cloud), ["i-1", "i-2"], "{what}");
        assert_secured(&cloud, &web(&[ALL]), &what);
        cloud.fail_ec2(None);
        apply(&aws, &lb, compare).await.unwrap();
        assert_secured(&cloud, &web(&[OFFICE]), &what);
    }
}

/// A change of targets comes with it, and each call to `ELBv2` may wait for half a minute.
#[tokio::test(start_paused = true)]
async fn removed_sources_do_not_wait_for_elb() {
    let (cloud, aws) = in_place(&from(&[OFFICE, "198.51.100.0/24"]), Quotas::default()).await;
    watch_rules(&cloud);
    cloud.hang_elb(Some(Duration::from_secs(30)));
    let lb = from(&[OFFICE]).with_nodes(own_set(&[1, 2]));
    let change = aws.apply(&lb, Compare::Remembered);
    let first = tokio::time::timeout(Duration::from_secs(5), change).await;
    assert!(first.is_err() && group(&cloud).own == web(&[OFFICE]), "{:?}", group(&cloud).own);
    // The answer to the abandoned call says nothing to the next one.
    cloud.hang_elb(None);
    pause().await;
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[OFFICE]), "at last");
    assert_eq!(registered(&cloud), ["i-1", "i-2"]);
    // Neither do targets wait for EC2.
    cloud.fail_ec2(Some(""));
    let outcome = aws.apply(&from(&[OFFICE]).with_nodes(own_set(&[3])), Compare::Remembered).await.unwrap();
    assert_eq!((registered(&cloud), outcome.incomplete), (vec!["i-3".to_owned()], None));
    assert_eq!(cloud.violations(), Vec::<String>::new());
}

/// EC2 fails once, and is asked no second time in the same try.
#[tokio::test(start_paused = true)]
async fn failed_removal_of_sources_is_reported_and_retried() {
    let (cloud, aws) = in_place(&from(&[OFFICE, "198.51.100.0/24"]), Quotas::default()).await;
    cloud.fail_ec2(Some(""));
    let outcome = aws.apply(&from(&[OFFICE]), Compare::Remembered).await.unwrap();
    let calls = cloud.take_calls().iter().filter(|call| call.kind.is_ec2()).count();
    assert_eq!((calls, outcome.incomplete.map(|(reason, _)| reason)), (1, Some("ProviderUnavailable")));
    assert!(matches!(outcome.progress, Progress::Again(_)));
    cloud.fail_ec2(None);
    apply(&aws, &from(&[OFFICE]), Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[OFFICE]), "at last");
}

/// AWS could not add the group later.
#[tokio::test(start_paused = true)]
async fn load_balancer_is_not_created_without_its_group() {
    let (cloud, lb) = (standin(1), from(&[]));
    cloud.fail_ec2(Some(""));
    let aws = provider(&cloud);
    for _ in 0..10 {
        assert!(!is_done(&aws.apply(&lb, Compare::Remembered).await));
        assert!(cloud.cloud().balancers.is_empty());
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    cloud.fail_ec2(None);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[ALL]), "created");
}

#[tokio::test(start_paused = true)]
async fn deletion_is_not_done_while_ec2_fails() {
    for is_restarted in [false, true] {
        let (cloud, mut aws) = in_place(&from(&[]), Quotas::default()).await;
        cloud.fail_ec2(Some(""));
        if is_restarted {
            aws = provider(&cloud);
        }
        for _ in 0..20 {
            let result = aws.delete(&from(&[]).owner).await;
            assert!(!matches!(result, Ok(Progress::Done)), "restarted: {is_restarted}");
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        cloud.fail_ec2(None);
        delete(&aws, &from(&[]).owner).await.unwrap();
        assert_empty(&cloud, &format!("restarted: {is_restarted}"));
    }
}

#[tokio::test(start_paused = true)]
async fn disabled_group_is_not_created_and_not_looked_for() {
    let cloud = standin(1);
    let (aws, lb) = (provider(&cloud), open_from(&[]));
    // The list of the start.
    aws.owned().await.unwrap();
    cloud.take_calls();
    let error = apply(&aws, &open_from(&[OFFICE]), Compare::Remembered).await.unwrap_err();
    assert_eq!((error.reason(), cloud.take_calls().len()), ("ConflictingAnnotations", 0));
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    apply(&aws, &lb, Compare::InPlace).await.unwrap();
    let calls = cloud.take_calls();
    assert!(calls.iter().all(|call| !call.kind.is_ec2()), "{calls:?}");
    let left = cloud.cloud();
    assert!(left.security_groups.is_empty());
    assert!(left.balancers.values().all(|found| found.security_groups.is_empty()));
    delete(&aws, &lb.owner).await.unwrap();
    assert_empty(&cloud, "deleted");
}

#[tokio::test(start_paused = true)]
async fn existing_load_balancer_neither_gets_nor_loses_its_group() {
    // Without the annotation and without ranges, a load balancer without a group is as good.
    for (made, same, other) in
        [(open_from(&[]), from(&[]), from(&[OFFICE])), (from(&[]), from(&[OFFICE]), open_from(&[]))]
    {
        let (cloud, aws) = in_place(&made, Quotas::default()).await;
        let attached = |cloud: &StandIn| {
            let balancer = cloud.cloud().balancers.into_values().next().unwrap();
            balancer.security_groups
        };
        let before = attached(&cloud);
        for aws in [&aws, &provider(&cloud)] {
            for compare in [Compare::Remembered, Compare::InPlace] {
                pause().await;
                let error = apply(aws, &other, compare).await.unwrap_err();
                assert_eq!(error.reason(), "SecurityGroupImmutable");
            }
            pause().await;
            apply(aws, &same, Compare::InPlace).await.unwrap();
            assert_eq!(
                (attached(&cloud), cloud.cloud().security_groups.len()),
                (before.clone(), before.len())
            );
        }
        delete(&aws, &made.owner).await.unwrap();
        assert_empty(&cloud, "deleted");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_calls_and_answers_leave_one_group() {
    for seed in 0..10 {
        for name in ["CreateSecurityGroup", "AuthorizeSecurityGroupIngress", "CreateLoadBalancer"] {
            for fault in [Fault::Before, Fault::After] {
                let (cloud, what) = (standin(seed), format!("seed {seed}, {name} {fault:?}"));
                let aws = provider(&cloud);
                cloud.set_faults(Faults::Once(name, fault));
                apply(&aws, &from(&[]), Compare::Remembered).await.unwrap();
                assert_secured(&cloud, &web(&[ALL]), &what);
                cloud.set_faults(Faults::Once("RevokeSecurityGroupIngress", fault));
                apply(&aws, &from(&[OFFICE]), Compare::Remembered).await.unwrap();
                assert_secured(&cloud, &web(&[OFFICE]), &what);
                cloud.set_faults(Faults::Once("DeleteSecurityGroup", fault));
                delete(&aws, &from(&[]).owner).await.unwrap();
                assert_empty(&cloud, &what);
            }
        }
    }
}

/// The process ends between the creations of the group and of the load balancer.
#[tokio::test(start_paused = true)]
async fn group_without_load_balancer_is_found_after_restart() {
    for (seed, is_wanted) in [(1, false), (2, false), (3, false), (1, true), (2, true), (3, true)] {
        let (cloud, lb) = (standin(seed), from(&[]));
        cloud.set_faults(Faults::Once("CreateLoadBalancer", Fault::Before));
        assert!(!is_done(&provider(&cloud).apply(&lb, Compare::Remembered).await));
        cloud.set_faults(Faults::None);
        let left = cloud.cloud();
        assert_eq!((left.security_groups.len(), left.balancers.len()), (1, 0), "seed {seed}");
        tokio::time::sleep(Duration::from_secs(5)).await;
        let aws = provider(&cloud);
        assert_eq!(aws.owned().await.unwrap(), std::slice::from_ref(&lb.owner), "seed {seed}");
        if is_wanted {
            apply(&aws, &lb, Compare::InPlace).await.unwrap();
            assert_secured(&cloud, &web(&[ALL]), &format!("seed {seed}"));
        }
        delete(&aws, &lb.owner).await.unwrap();
        assert_empty(&cloud, &format!("seed {seed}"));
        pause().await;
        assert_eq!(aws.owned().await.unwrap(), [], "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn group_that_another_group_names_is_reported() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    cloud.change(|cloud| cloud.security_group_references.extend(cloud.security_groups.keys().cloned()));
    let (start, owner) = (Instant::now(), from(&[]).owner);
    for _ in 0..2 {
        let error = delete(&aws, &owner).await.unwrap_err();
        assert_eq!(error.reason(), "SecurityGroupInUse");
        let text = error.to_string();
        assert!(text.contains(&group(&cloud).id) && !text.contains("  "), "{text}");
        let minutes = start.elapsed().as_secs() / 60;
        assert!((10..14).contains(&minutes), "after {minutes} minutes");
    }
    let left = cloud.cloud();
    assert!(left.balancers.is_empty() && left.groups.is_empty() && left.listeners.is_empty());
    cloud.change(|cloud| cloud.security_group_references.clear());
    delete(&aws, &owner).await.unwrap();
    assert_empty(&cloud, "deleted");
}

/// AWS gives a name in a VPC once.
#[tokio::test(start_paused = true)]
async fn group_of_others_with_the_name_is_left_alone() {
    let (account, lb) = (standin(1), from(&[]));
    apply(&provider(&account), &lb, Compare::Remembered).await.unwrap();
    let mut of_cluster = group(&account).tags;
    of_cluster.insert(marks::CLUSTER_UID.to_owned(), "other".to_owned());
    for tags in [of_cluster, Tags::from([("team".to_owned(), "other".to_owned())]), Tags::new()] {
        let cloud = standin(1);
        let other = SecurityGroup { id: "sg-other".to_owned(), tags, ..group(&account) };
        cloud.change(|cloud| drop(cloud.security_groups.insert(other.id.clone(), other)));
        let before = snapshot(&cloud.cloud());
        for compare in [Compare::Remembered, Compare::InPlace] {
            let aws = provider(&cloud);
            for _ in 0..10 {
                assert!(!is_done(&aws.apply(&lb, compare).await));
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
            delete(&aws, &lb.owner).await.unwrap();
            assert_eq!(snapshot(&cloud.cloud()), before);
        }
    }
}

/// EC2 refuses to remove rules, and other ones are still added.
#[tokio::test(start_paused = true)]
async fn refused_removal_of_sources_does_not_hold_up_others() {
    let (cloud, aws) = in_place(&from(&[OFFICE, "198.51.100.0/24"]), Quotas::default()).await;
    cloud.set_faults(Faults::Each("RevokeSecurityGroupIngress", "", Fault::Code("UnauthorizedOperation")));
    let more = LoadBalancer {
        source_ranges: from(&[OFFICE]).source_ranges,
        ..wanted(&[(80, 30080), (81, 30081)], &[0, 1])
    };
    let outcome = apply_now(&aws, &more, Compare::Remembered).await.unwrap();
    assert!(group(&cloud).own.contains(&rule("tcp", 81, OFFICE)), "{:?}", group(&cloud).own);
    assert_eq!(outcome.incomplete.unwrap().0, "ProviderDenied");
    cloud.set_faults(Faults::None);
    apply(&aws, &more, Compare::Remembered).await.unwrap();
    assert_eq!(group(&cloud).own, BTreeSet::from([rule("tcp", 80, OFFICE), rule("tcp", 81, OFFICE)]));
}

/// Whose group it is, is not known any more.
#[tokio::test(start_paused = true)]
async fn sources_stay_in_a_group_without_its_tags() {
    let (cloud, aws) = in_place(&from(&[OFFICE, "198.51.100.0/24"]), Quotas::default()).await;
    let mut tags = Tags::new();
    change_group(&cloud, |group| std::mem::swap(&mut group.tags, &mut tags));
    pause().await;
    let outcome = aws.apply(&from(&[OFFICE, "198.51.100.0/24"]), Compare::InPlace).await.unwrap();
    pause().await;
    assert_eq!(changes(&cloud), [""; 0], "{outcome:?}");
    let outcome = aws.apply(&from(&[OFFICE]), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "ObjectNotOwned");
    assert_eq!(changes(&cloud), [""; 0]);
    change_group(&cloud, |group| group.tags = tags);
    pause().await;
    apply(&aws, &from(&[OFFICE]), Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[OFFICE]), "with its tags");
}

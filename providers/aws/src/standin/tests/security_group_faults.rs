// SPDX-License-Identifier: Apache-2.0
//! Security groups while something else goes wrong: a refused structure, a lost answer, a predecessor, a full group.

use std::time::Duration;

use steerage_provider_api::{Compare, LoadBalancer, Owner, Progress, Provider as _};
use steerage_provider_cloud::marks;
use tokio::time::Instant;

use super::driver::{apply, delete, own_set, provider, standin_with, wanted};
use super::security_groups::{
    ALL, OFFICE, assert_empty, assert_secured, from, group, in_place, registered, rule, web,
};
use crate::standin::Quotas;
use crate::standin::faults::{Fault, Faults};

/// The listener of the new port is refused, so that of the old one stays: clients that may connect still reach it, others do not.
#[tokio::test(start_paused = true)]
async fn served_port_keeps_its_rules_while_its_replacement_is_refused() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    let other =
        LoadBalancer { source_ranges: from(&[OFFICE]).source_ranges, ..wanted(&[(443, 30443)], &[0, 1]) };
    cloud.set_faults(Faults::Once("CreateListener", Fault::Code("UnsupportedProtocol")));
    let outcome = apply(&aws, &other, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "RejectedByProvider");
    assert_eq!(cloud.cloud().listeners.values().next().unwrap().port, 80);
    assert_eq!(group(&cloud).own, [rule("tcp", 80, OFFICE), rule("tcp", 443, OFFICE)].into());
    apply(&aws, &other, Compare::InPlace).await.unwrap();
    assert_secured(&cloud, &[rule("tcp", 443, OFFICE)].into(), "the new port");
}

/// Nobody reads the group until the next comparison, so what was sent must not be forgotten.
#[tokio::test(start_paused = true)]
async fn change_that_is_taken_back_after_a_lost_answer_is_undone() {
    for (first, second, call) in [
        (&[OFFICE][..], &[][..], "AuthorizeSecurityGroupIngress"),
        (&[OFFICE, "192.0.2.0/24"], &[OFFICE], "RevokeSecurityGroupIngress"),
    ] {
        let (cloud, aws) = in_place(&from(first), Quotas::default()).await;
        cloud.set_faults(Faults::Once(call, Fault::After));
        let outcome = aws.apply(&from(second), Compare::Remembered).await.unwrap();
        assert!(outcome.incomplete.is_some(), "{call}");
        aws.apply(&from(first), Compare::Remembered).await.unwrap();
        assert_secured(&cloud, &web(first), call);
    }
}

/// AWS releases a group minutes after its load balancer, or never. The Service that takes the name does not wait.
#[tokio::test(start_paused = true)]
async fn successor_does_not_wait_for_the_group_of_its_predecessor() {
    for waits in [1, 200] {
        let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
        cloud.change(|cloud| cloud.security_group_references.extend(cloud.security_groups.keys().cloned()));
        for _ in 0..waits {
            // The finalizer is taken away then.
            let _ = aws.delete(&from(&[]).owner).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        let owner = Owner { uid: "u2".to_owned(), ..from(&[]).owner };
        let next = LoadBalancer { owner, ..from(&[OFFICE]) };
        let start = Instant::now();
        while !cloud.cloud().balancers.values().any(|found| found.tags[marks::UID] == "u2") {
            assert!(start.elapsed() < Duration::from_mins(1), "after {waits} deletions");
            let _ = aws.apply(&next, Compare::Remembered).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(cloud.cloud().security_groups.len(), 2);
        let outcome = apply(&aws, &next, Compare::Remembered).await.unwrap();
        assert!(outcome.incomplete.is_none() && outcome.retry_refused.is_some());
        cloud.change(|cloud| cloud.security_group_references.clear());
        tokio::time::sleep(outcome.retry_refused.unwrap()).await;
        apply(&aws, &next, Compare::Remembered).await.unwrap();
        assert_secured(&cloud, &web(&[OFFICE]), "the predecessor's group is gone");
        delete(&aws, &next.owner).await.unwrap();
        assert_empty(&cloud, "deleted");
    }
}

#[tokio::test(start_paused = true)]
async fn new_load_balancer_with_too_many_ranges_serves_those_that_fit() {
    let cloud = standin_with(1, Quotas { rules: 2, ..Quotas::default() });
    let (aws, ranges) = (provider(&cloud), [OFFICE, "192.0.2.0/24", "198.51.100.0/24"]);
    let outcome = apply(&aws, &from(&ranges), Compare::Remembered).await.unwrap();
    assert_eq!((outcome.ingress.len(), outcome.incomplete.unwrap().0), (1, "QuotaExceeded"));
    let own = group(&cloud).own;
    assert!(own.len() == 2 && own.is_subset(&web(&ranges)), "{own:?}");
}

/// Somebody's clean-up took a tag away. Whose the group is, is unknown then.
#[tokio::test(start_paused = true)]
async fn group_without_its_tags_is_reported_and_not_changed() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    let tag = |value: Option<&str>| {
        cloud.change(|cloud| {
            let tags = &mut cloud.security_groups.values_mut().next().unwrap().tags;
            tags.remove(marks::UID);
            tags.extend(value.map(|value| (marks::UID.to_owned(), value.to_owned())));
        });
    };
    tag(None);
    tokio::time::sleep(Duration::from_mins(1)).await;
    let lb = from(&[OFFICE]).with_nodes(own_set(&[1, 2]));
    for compare in [Compare::InPlace, Compare::Remembered, Compare::InPlace] {
        let outcome = apply(&aws, &lb, compare).await.unwrap();
        assert_eq!(outcome.incomplete.unwrap().0, "ObjectNotOwned", "{compare:?}");
        tokio::time::sleep(Duration::from_mins(1)).await;
    }
    assert_eq!(
        (group(&cloud).own, registered(&cloud)),
        (web(&[ALL]), vec!["i-1".to_owned(), "i-2".to_owned()])
    );
    tag(Some(&lb.owner.uid));
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(apply(&aws, &lb, Compare::Remembered).await.unwrap().incomplete, None);
    assert_secured(&cloud, &web(&[OFFICE]), "restored");
}

/// Sent again one by one, a thousand doubtful rules would use up the account's rate.
#[tokio::test(start_paused = true)]
async fn many_rules_whose_answer_was_lost_cost_one_read() {
    let ranges = |net: u8| -> Vec<String> { (0..50).map(|host| format!("10.{net}.{host}.0/24")).collect() };
    let of = |all: &[String]| from(&all.iter().map(String::as_str).collect::<Vec<_>>());
    let (cloud, aws) = in_place(&of(&ranges(1)), Quotas { rules: 500, ..Quotas::default() }).await;
    for net in [2, 3, 4] {
        cloud.set_faults(Faults::Once("AuthorizeSecurityGroupIngress", Fault::After));
        let _ = aws.apply(&of(&ranges(net)), Compare::Remembered).await;
    }
    cloud.take_calls();
    apply(&aws, &of(&ranges(5)), Compare::Remembered).await.unwrap();
    let calls = cloud.take_calls();
    assert!(calls.len() < 10, "{calls:?}");
    assert_eq!(group(&cloud).own, of_ranges(&ranges(5)));
}

fn of_ranges(all: &[String]) -> std::collections::BTreeSet<crate::security_group::Rule> {
    web(&all.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Endpoints that move must not repeat what AWS has refused.
#[tokio::test(start_paused = true)]
async fn rules_without_room_are_not_tried_with_every_change_of_targets() {
    let (cloud, aws) = in_place(&from(&[]), Quotas { rules: 2, ..Quotas::default() }).await;
    let many = from(&[OFFICE, "192.0.2.0/24", "198.51.100.0/24"]);
    apply(&aws, &many, Compare::Remembered).await.unwrap();
    cloud.take_calls();
    let moved = many.clone().with_nodes(own_set(&[1, 2]));
    let outcome = apply(&aws, &moved, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "QuotaExceeded");
    assert!(cloud.take_calls().iter().all(|call| !call.kind.is_ec2()));
    pause(&cloud).await;
    apply(&aws, &moved, Compare::InPlace).await.unwrap();
    assert!(cloud.take_calls().iter().any(|call| call.name == "AuthorizeSecurityGroupIngress"));
}

async fn pause(cloud: &crate::standin::StandIn) {
    tokio::time::sleep(Duration::from_mins(1)).await;
    cloud.take_calls();
}

/// A load balancer that AWS refuses leaves no group behind, which would count against the account's quota.
#[tokio::test(start_paused = true)]
async fn refused_load_balancer_leaves_no_group() {
    let cloud = standin_with(1, Quotas::default());
    let aws = provider(&cloud);
    cloud.set_faults(Faults::Once("CreateLoadBalancer", Fault::Code("TooManyLoadBalancers")));
    let mut refused = None;
    while refused.is_none() {
        // EC2 and ELBv2 may not know the new group at once.
        refused = aws
            .apply(&from(&[]), Compare::Remembered)
            .await
            .err()
            .filter(|error| error.reason() == "QuotaExceeded");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(cloud.cloud().security_groups.is_empty());
    apply(&aws, &from(&[]), Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[ALL]), "later");
}

/// A hanging list would keep every Service from following its endpoints after a restart.
#[tokio::test(start_paused = true)]
async fn start_does_not_wait_for_ec2() {
    let (cloud, _) = in_place(&from(&[]), Quotas::default()).await;
    cloud.fail_ec2(Some(""));
    let aws = provider(&cloud);
    let lb = from(&[]).with_nodes(own_set(&[1, 2]));
    let start = Instant::now();
    let outcome = aws.apply(&lb, Compare::InPlace).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(30) && matches!(outcome.progress, Progress::Again(_)));
    assert_eq!(registered(&cloud), ["i-1", "i-2"]);
}

// SPDX-License-Identifier: Apache-2.0
//! The security group that nodes admit: every load balancer has it beside its own, or beside named ones whose Service asks for it.

use std::sync::Arc;

use steerage_provider_api::{Compare, LoadBalancer, Outcome, Provider as _};
use steerage_provider_cloud::marks;

use super::driver::{apply, changes, delete, own_set, pause, standin, standin_with};
use super::named_groups::plant;
use super::security_groups::from;
use crate::annotations::{DISABLE_SECURITY_GROUP, MANAGE_BACKEND_RULES, SECURITY_GROUPS};
use crate::config::Config;
use crate::desired::tests::config;
use crate::provider::Aws;
use crate::security_group::SecurityGroup;
use crate::standin::{Quotas, StandIn};

/// One of the planted groups.
const BACKEND: &str = "sg-office";

fn provider_with(cloud: &Arc<StandIn>, backend: Option<&str>) -> Aws {
    let config = Config { backend_security_group: backend.map(str::to_owned), ..config() };
    Aws::over(config, Arc::clone(cloud) as _)
}

/// The names of the groups of the only load balancer; `own` for Steerage's.
fn attached(cloud: &StandIn) -> Vec<String> {
    let cloud = cloud.cloud();
    let balancer = cloud.balancers.values().next().expect("a load balancer");
    let name = |id: &String| match cloud.security_groups.get(id) {
        Some(group) if group.tags.contains_key(marks::UID) => "own".to_owned(),
        _ => id.clone(),
    };
    let mut names: Vec<_> = balancer.security_groups.iter().map(name).collect();
    names.sort();
    names
}

#[tokio::test(start_paused = true)]
async fn new_load_balancer_has_the_backend_group_from_the_start() {
    let cloud = standin(1);
    plant(&cloud, 80..=80);
    let aws = provider_with(&cloud, Some(BACKEND));
    pause().await;
    apply(&aws, &from(&[]), Compare::Remembered).await.unwrap();
    assert_eq!(attached(&cloud), ["own", BACKEND]);
    assert!(!changes(&cloud).contains(&"SetSecurityGroups"));
    for aws in [&aws, &provider_with(&cloud, Some(BACKEND))] {
        pause().await;
        apply(aws, &from(&[]), Compare::InPlace).await.unwrap();
        apply(aws, &from(&[]), Compare::Remembered).await.unwrap();
    }
    assert_eq!(changes(&cloud), [""; 0]);
    delete(&aws, &from(&[]).owner).await.unwrap();
    let left = cloud.cloud();
    assert!(left.balancers.is_empty() && left.security_groups.contains_key(BACKEND));
    assert!(left.security_groups.values().all(|group| !group.tags.contains_key(marks::UID)));
    assert_eq!(cloud.violations(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn flag_reaches_existing_load_balancers_and_leaves_groups_of_others() {
    let cloud = standin(1);
    plant(&cloud, 80..=80);
    pause().await;
    apply(&provider_with(&cloud, None), &from(&[]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.change(|cloud| {
        let balancer = cloud.balancers.values_mut().next().unwrap();
        balancer.security_groups.insert("sg-front".to_owned());
    });
    // AWS shows it only then.
    pause().await;
    cloud.take_calls();
    let aws = provider_with(&cloud, Some(BACKEND));
    for _ in 0..2 {
        apply(&aws, &from(&[]), Compare::Remembered).await.unwrap();
        pause().await;
    }
    assert_eq!(attached(&cloud), ["own", "sg-front", BACKEND]);
    assert_eq!(changes(&cloud), ["SetSecurityGroups"]);
    // Without the flag it stays: Steerage does not know whose it is.
    apply(&provider_with(&cloud, None), &from(&[]), Compare::Remembered).await.unwrap();
    assert_eq!((attached(&cloud).len(), changes(&cloud)), (3, vec![]));
}

#[tokio::test(start_paused = true)]
async fn unknown_backend_group_is_reported_and_delays_no_targets() {
    let cloud = standin(1);
    pause().await;
    let error =
        apply(&provider_with(&cloud, Some(BACKEND)), &from(&[]), Compare::Remembered).await.unwrap_err();
    assert_eq!((error.reason(), cloud.cloud().balancers.len()), ("RejectedByProvider", 0));
    assert!(error.to_string().contains(BACKEND) && error.to_string().contains("--aws-"), "{error}");

    apply(&provider_with(&cloud, None), &from(&[]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.take_calls();
    let aws = provider_with(&cloud, Some(BACKEND));
    for targets in [[0, 1], [1, 2], [2, 3]] {
        let lb = from(&[]).with_nodes(own_set(&targets));
        let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
        let (reason, message) = outcome.incomplete.unwrap();
        assert!(reason == "RejectedByProvider" && message.contains(BACKEND), "{message}");
        assert_eq!(super::security_groups::registered(&cloud), targets.map(|index| format!("i-{index}")));
    }
    let calls = cloud.take_calls();
    assert_eq!(calls.iter().filter(|call| call.name == "SetSecurityGroups").count(), 1);
    plant(&cloud, 80..=80);
    pause().await;
    let outcome = apply(&aws, &from(&[]), Compare::InPlace).await.unwrap();
    assert_eq!((outcome.incomplete, attached(&cloud)), (None, vec!["own".to_owned(), BACKEND.to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn named_groups_have_it_beside_them_if_the_service_asks() {
    let naming = |manage: &str| {
        let mut lb: LoadBalancer = from(&[]);
        lb.annotations.insert(SECURITY_GROUPS.to_owned(), "sg-front".to_owned());
        lb.annotations.insert(MANAGE_BACKEND_RULES.to_owned(), manage.to_owned());
        lb
    };
    let cloud = standin(1);
    plant(&cloud, 80..=80);
    pause().await;
    let aws = provider_with(&cloud, Some(BACKEND));
    for (manage, groups) in
        [("false", vec!["sg-front"]), ("true", vec!["sg-front", BACKEND]), ("false", vec!["sg-front"])]
    {
        apply(&aws, &naming(manage), Compare::Remembered).await.unwrap();
        assert_eq!(attached(&cloud), groups, "{manage}");
        pause().await;
    }
    cloud.take_calls();
    let aws = provider_with(&cloud, None);
    let error = aws.apply(&naming("true"), Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "AnnotationNotSupported");
    assert!(error.to_string().contains("--aws-backend-security-group"), "{error}");
    assert_eq!((attached(&cloud), changes(&cloud)), (vec!["sg-front".to_owned()], vec![]));
}

/// Rules may lack room for days.
#[tokio::test(start_paused = true)]
async fn rules_without_room_do_not_keep_the_backend_group_away() {
    let cloud = standin_with(1, Quotas { rules: 2, ..Quotas::default() });
    plant(&cloud, 80..=80);
    pause().await;
    let crowded = from(&["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"]);
    let full = |outcome: Outcome| outcome.incomplete.map(|(reason, _)| reason);
    let outcome = apply(&provider_with(&cloud, None), &crowded, Compare::Remembered).await.unwrap();
    assert_eq!((full(outcome), attached(&cloud)), (Some("QuotaExceeded"), vec!["own".to_owned()]));
    pause().await;
    let outcome = apply(&provider_with(&cloud, Some(BACKEND)), &crowded, Compare::Remembered).await.unwrap();
    assert_eq!(full(outcome), Some("QuotaExceeded"));
    assert_eq!(attached(&cloud), ["own", BACKEND]);
}

/// An unknown group must keep no Service open, remove nobody's group, and leave no group behind.
#[tokio::test(start_paused = true)]
async fn unknown_backend_group_changes_nothing_else() {
    let cloud = standin(1);
    pause().await;
    let unknown = provider_with(&cloud, Some("sg-none"));
    apply(&unknown, &from(&[]), Compare::Remembered).await.unwrap_err();
    assert!(cloud.cloud().security_groups.is_empty(), "of a load balancer that is not created");

    plant(&cloud, 80..=80);
    pause().await;
    let mut named = from(&[]);
    named.annotations.insert(SECURITY_GROUPS.to_owned(), "sg-front".to_owned());
    apply(&unknown, &named, Compare::Remembered).await.unwrap();
    pause().await;
    let outcome = apply(&unknown, &from(&["192.0.2.0/24"]), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "RejectedByProvider");
    assert_eq!(attached(&cloud), ["own"]);
    pause().await;
    cloud.change(|cloud| {
        let balancer = cloud.balancers.values_mut().next().unwrap();
        balancer.security_groups.insert("sg-front".to_owned());
    });
    pause().await;
    cloud.change(|cloud| {
        let found = cloud.security_groups[BACKEND].clone();
        cloud
            .security_groups
            .insert("sg-none".to_owned(), SecurityGroup { id: "sg-none".to_owned(), ..found });
    });
    pause().await;
    apply(&unknown, &from(&["192.0.2.0/24"]), Compare::InPlace).await.unwrap();
    assert_eq!(attached(&cloud), ["own", "sg-front", "sg-none"]);
}

#[tokio::test(start_paused = true)]
async fn load_balancer_without_groups_cannot_be_admitted_by_one() {
    let cloud = standin(1);
    let mut lb = from(&[]);
    for name in [DISABLE_SECURITY_GROUP, MANAGE_BACKEND_RULES] {
        lb.annotations.insert(name.to_owned(), "true".to_owned());
    }
    let error = provider_with(&cloud, Some(BACKEND)).apply(&lb, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "ConflictingAnnotations");
}

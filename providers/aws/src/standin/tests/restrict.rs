// SPDX-License-Identifier: Apache-2.0
//! Sources that a Service no longer admits while it is refused.

use std::collections::BTreeSet;

use steerage_provider_api::{AdmittedSources, Compare, Error, LoadBalancer, Provider as _, RequestedSources};

use super::driver::{apply, changes, own_set, pause, provider};
use super::named_groups::{PLANTED, plant};
use super::security_groups::{OFFICE, assert_secured, from, in_place, web};
use crate::Aws;
use crate::annotations::{DISABLE_SECURITY_GROUP, SECURITY_GROUPS, SOURCE_RANGES};
use crate::standin::Quotas;

fn requested(lb: &LoadBalancer) -> RequestedSources {
    RequestedSources { ranges: lb.source_ranges.clone(), annotations: lb.annotations.clone() }
}

/// Refuses the Service, and then restricts its sources, as the controller does.
async fn refuse(aws: &Aws, lb: &LoadBalancer) -> Result<Option<AdmittedSources>, Error> {
    let mut lb = lb.clone();
    lb.annotations
        .insert("service.beta.kubernetes.io/aws-load-balancer-tpye".to_owned(), "external".to_owned());
    let refused = apply(aws, &lb, Compare::Remembered).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    aws.restrict_sources(&lb.owner, &requested(&lb)).await
}

fn only(sources: &[&str]) -> AdmittedSources {
    AdmittedSources::Only(sources.iter().map(ToString::to_string).collect())
}

#[tokio::test(start_paused = true)]
async fn refused_service_loses_sources_and_gains_none() {
    let (cloud, aws) = in_place(&from(&[OFFICE, "192.0.2.0/24"]), Quotas::default()).await;
    let changed = from(&["10.1.0.0/16", "203.0.113.0/24"]);
    assert_eq!(refuse(&aws, &changed).await.unwrap(), Some(only(&["10.1.0.0/16"])));
    assert_secured(&cloud, &web(&["10.1.0.0/16"]), "removed");
    pause().await;
    let targets = changed.clone().with_nodes(own_set(&[1])).targets();
    aws.set_targets(&changed.owner, &targets).await.unwrap();
    assert_secured(&cloud, &web(&["10.1.0.0/16"]), "targets change");

    let mut unreadable = from(&[]);
    unreadable.annotations.insert(SOURCE_RANGES.to_owned(), "10.1.0.0/16;".to_owned());
    let error = refuse(&aws, &unreadable).await.unwrap_err();
    assert!(error.to_string().contains(SOURCE_RANGES), "{error}");
    assert_secured(&cloud, &web(&["10.1.0.0/16"]), "unreadable");

    // Another process does not know what was accepted.
    let aws = provider(&cloud);
    for (ranges, left) in
        [(&[][..], &["10.1.0.0/16"][..]), (&["10.1.2.0/24", "10.9.0.0/16"], &["10.1.2.0/24"])]
    {
        assert_eq!(refuse(&aws, &from(ranges)).await.unwrap(), Some(only(left)));
        assert_secured(&cloud, &web(left), "after a restart");
    }
    pause().await;
    cloud.take_calls();
    assert_eq!(refuse(&aws, &from(&["10.1.2.0/24"])).await.unwrap(), Some(only(&["10.1.2.0/24"])));
    assert!(changes(&cloud).is_empty(), "nothing differs");
    assert_eq!(refuse(&aws, &from(&["192.0.2.0/24"])).await.unwrap(), Some(only(&[])));
    assert_secured(&cloud, &BTreeSet::new(), "nothing in common");

    apply(&aws, &changed, Compare::Remembered).await.unwrap();
    pause().await;
    apply(&aws, &changed, Compare::InPlace).await.unwrap();
    assert_secured(&cloud, &web(&["10.1.0.0/16", "203.0.113.0/24"]), "accepted");
}

/// Steerage changes no rule of others, and gives no load balancer its first group.
#[tokio::test(start_paused = true)]
async fn refused_service_without_rules_of_steerage_says_who_decides() {
    let mut open = from(&[]);
    open.annotations.insert(DISABLE_SECURITY_GROUP.to_owned(), "true".to_owned());
    let (_, aws) = in_place(&open, Quotas::default()).await;
    open.source_ranges = from(&[OFFICE]).source_ranges;
    assert_eq!(refuse(&aws, &open).await.unwrap(), Some(AdmittedSources::Everybody));

    let mut named = from(&[]);
    let (cloud, aws) = in_place(&named, Quotas::default()).await;
    plant(&cloud, 80..=80);
    named.annotations.insert(SECURITY_GROUPS.to_owned(), PLANTED[0].to_owned());
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    pause().await;
    named.source_ranges = from(&[OFFICE]).source_ranges;
    cloud.take_calls();
    for aws in [aws, provider(&cloud)] {
        assert_eq!(refuse(&aws, &named).await.unwrap(), Some(AdmittedSources::Foreign));
    }
    assert!(changes(&cloud).is_empty());
}

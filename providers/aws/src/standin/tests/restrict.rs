// SPDX-License-Identifier: Apache-2.0
//! Sources that a Service no longer admits while it is refused.

use std::collections::BTreeSet;

use steerage_provider_api::{AdmittedSources, Compare, Error, LoadBalancer, Provider as _, RequestedSources};

use super::driver::{apply, changes, own_set, pause, provider};
use super::named_groups::{PLANTED, plant};
use super::security_groups::{OFFICE, assert_secured, from, in_place, rule, web};
use crate::Aws;
use crate::annotations::{DISABLE_SECURITY_GROUP, PREFIX_LISTS, SCHEME, SECURITY_GROUPS, SOURCE_RANGES};
use crate::security_group::{Rule, SecurityGroup, Source};
use crate::standin::Quotas;
use crate::standin::faults::{Fault, Faults};

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

/// No client of a load balancer without IPv6 has an address in these ranges, and nobody else is admitted.
#[tokio::test(start_paused = true)]
async fn ranges_with_ipv6_alone_leave_no_client_of_a_load_balancer_with_ipv4() {
    let (cloud, aws) = in_place(&from(&[]), Quotas::default()).await;
    let mut lb = from(&["2001:db8::/32"]);
    for (lists, admitted) in [("pl-1", only(&["pl-1"])), ("", only(&[]))] {
        lb.annotations = [(PREFIX_LISTS.to_owned(), lists.to_owned())].into();
        lb.annotations.retain(|_, lists| !lists.is_empty());
        let refused = apply(&aws, &lb, Compare::Remembered).await.unwrap_err();
        assert_eq!(refused.reason(), "ConflictingAnnotations", "{refused}");
        assert_eq!(aws.restrict_sources(&lb.owner, &requested(&lb)).await.unwrap(), Some(admitted));
    }
    assert_secured(&cloud, &BTreeSet::new(), "nobody");
    lb.source_ranges.extend(from(&[OFFICE]).source_ranges);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_secured(&cloud, &web(&[OFFICE]), "ranges with IPv4 too");
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

/// The same with another scheme, which AWS cannot change.
fn internal(ranges: &[&str]) -> LoadBalancer {
    let mut lb = from(ranges);
    lb.annotations.insert(SCHEME.to_owned(), "internal".to_owned());
    lb
}

/// Whoever asks for a private load balancer and drops the ranges does not open the public one that stays. Also where the first tries fail
/// before Steerage refuses the change.
#[tokio::test(start_paused = true)]
async fn refusal_of_a_private_load_balancer_opens_nothing() {
    let public = |ranges: &[&str]| {
        let mut lb = from(ranges);
        lb.annotations.insert(SCHEME.to_owned(), "internet-facing".to_owned());
        lb
    };
    for (failing, known) in [(false, true), (true, true), (false, false)] {
        let (cloud, first) = in_place(&public(&[OFFICE]), Quotas::default()).await;
        let aws = if known { first } else { provider(&cloud) };
        let lb = internal(&[]);
        if failing {
            for call in 0..6 {
                cloud.set_faults(Faults::Nth(call, Fault::Before));
                aws.apply(&internal(&[]), Compare::InPlace).await.unwrap_err();
                assert_secured(&cloud, &web(&[OFFICE]), &format!("call {call} fails"));
                aws.set_targets(&lb.owner, &lb.targets()).await.ok();
                assert_secured(&cloud, &web(&[OFFICE]), &format!("targets after {call}"));
                pause().await;
            }
            cloud.set_faults(Faults::None);
        }
        let refused = apply(&aws, &lb, Compare::Remembered).await.unwrap_err();
        assert_eq!(refused.reason(), "SchemeImmutable");
        for _ in 0..2 {
            aws.set_targets(&lb.owner, &lb.clone().with_nodes(own_set(&[1])).targets()).await.unwrap();
            assert_secured(&cloud, &web(&[OFFICE]), "targets follow");
            let admitted = aws.restrict_sources(&lb.owner, &requested(&lb)).await.unwrap();
            assert_eq!(admitted, Some(only(&[OFFICE])));
            pause().await;
        }
        let narrower = internal(&["10.1.0.0/16", "192.0.2.0/24"]);
        apply(&aws, &narrower, Compare::Remembered).await.unwrap_err();
        aws.set_targets(&lb.owner, &lb.targets()).await.unwrap();
        assert_secured(&cloud, &web(&["10.1.0.0/16"]), "only narrower");
        // Neither do ranges come back that a refused Service had before.
        apply(&aws, &internal(&[OFFICE]), Compare::Remembered).await.unwrap_err();
        aws.set_targets(&lb.owner, &lb.targets()).await.unwrap();
        assert_secured(&cloud, &web(&["10.1.0.0/16"]), "gone");
        apply(&aws, &public(&[OFFICE]), Compare::Remembered).await.unwrap();
        assert_secured(&cloud, &web(&[OFFICE]), "accepted");
    }
}

/// Ranges for which the group has no room replace no rule of which they need a part: nobody who is requested loses access.
#[tokio::test(start_paused = true)]
async fn sources_without_room_keep_the_wider_rules() {
    let (cloud, aws) =
        in_place(&from(&["0.0.0.0/1", "192.0.2.0/24"]), Quotas { rules: 5, ..Quotas::default() }).await;
    let many = |count: u32| -> Vec<String> {
        (0..count).map(|i| format!("10.{}.{}.0/24", i / 256, i % 256)).collect()
    };
    for count in [6, 1001] {
        let ranges = many(count);
        let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
        let wide = AdmittedSources::Wider(BTreeSet::from(["0.0.0.0/1".to_owned()]));
        for _ in 0..2 {
            assert_eq!(refuse(&aws, &from(&ranges)).await.unwrap(), Some(wide.clone()), "{count}");
            assert_secured(&cloud, &web(&["0.0.0.0/1"]), "no room");
            pause().await;
        }
    }
    let ranges = many(4);
    let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
    assert_eq!(refuse(&aws, &from(&ranges)).await.unwrap(), Some(only(&ranges)));
    assert_secured(&cloud, &web(&ranges), "room");
    // In the place of as many others.
    let (cloud, aws) = in_place(&from(&[OFFICE]), Quotas { rules: 1, ..Quotas::default() }).await;
    assert_eq!(refuse(&aws, &from(&["10.1.0.0/16"])).await.unwrap(), Some(only(&["10.1.0.0/16"])));
    assert_secured(&cloud, &web(&["10.1.0.0/16"]), "replaced");
}

/// Rules of others stay, and are no secret.
#[tokio::test(start_paused = true)]
async fn rules_of_others_are_told() {
    let (cloud, aws) = in_place(&from(&[OFFICE]), Quotas::default()).await;
    let change = |change: fn(&mut SecurityGroup)| {
        cloud.change(|cloud| cloud.security_groups.values_mut().for_each(change));
    };
    let narrow = from(&["10.1.0.0/16"]);
    let others = AdmittedSources::WithOthers(BTreeSet::from(["10.1.0.0/16".to_owned()]));
    change(|group| group.others.extend(web(&["0.0.0.0/0"])));
    pause().await;
    assert_eq!(refuse(&aws, &narrow).await.unwrap(), Some(others.clone()));
    change(|group| group.others.clear());
    pause().await;
    assert_eq!(refuse(&aws, &narrow).await.unwrap(), Some(only(&["10.1.0.0/16"])));
    change(|group| group.has_more = true);
    pause().await;
    assert_eq!(refuse(&aws, &narrow).await.unwrap(), Some(others.clone()));
    // A rule that somebody marked as Steerage's is one that the Service does not request.
    change(|group| {
        group.has_more = false;
        group.own.insert(rule("tcp", 80, "0.0.0.0/0"));
    });
    pause().await;
    assert_eq!(refuse(&aws, &narrow).await.unwrap(), Some(only(&["10.1.0.0/16"])));
    assert_secured(&cloud, &web(&["10.1.0.0/16"]), "found by reading");
    cloud.change(|cloud| {
        let balancer = cloud.balancers.values_mut().next().unwrap();
        balancer.security_groups.insert("sg-other".to_owned());
    });
    pause().await;
    let aws = provider(&cloud);
    assert_eq!(refuse(&aws, &narrow).await.unwrap(), Some(others));
}

/// A typing error in one annotation keeps no range that the field no longer has.
#[tokio::test(start_paused = true)]
async fn unreadable_prefix_lists_hold_up_no_range() {
    let mut lb = from(&[OFFICE, "192.0.2.0/24"]);
    lb.annotations.insert(PREFIX_LISTS.to_owned(), "pl-1,pl-2".to_owned());
    let (cloud, aws) = in_place(&lb, Quotas::default()).await;
    lb.source_ranges.pop();
    lb.annotations.insert(PREFIX_LISTS.to_owned(), "pl-1,lp-2".to_owned());
    assert_eq!(refuse(&aws, &lb).await.unwrap(), Some(only(&[OFFICE, "pl-1", "pl-2"])));
    let list = |id: &str| Rule { source: Source::PrefixList(id.to_owned()), ..rule("tcp", 80, OFFICE) };
    let left: BTreeSet<Rule> = web(&[OFFICE]).into_iter().chain([list("pl-1"), list("pl-2")]).collect();
    assert_secured(&cloud, &left, "lists stay");
}

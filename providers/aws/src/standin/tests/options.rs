// SPDX-License-Identifier: Apache-2.0
//! Attributes and further tags by annotations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use steerage_model::Affinity;
use steerage_provider_api::{Compare, Error, LoadBalancer, Owner, Provider as _};

use super::driver::{apply, changes, delete, pause, provider, standin, wanted};
use crate::annotations::{
    ACCESS_LOG_BUCKET, ATTRIBUTES, BACKEND_PROTOCOL, CROSS_ZONE, GROUP_ATTRIBUTES, PRIVATE_ADDRESSES,
    PROXY_PROTOCOL, SSL_CERT, SSL_POLICY, SUBNETS, TAGS,
};
use crate::placement::Address;
use crate::standin::StandIn;
use crate::standin::cloud::{Group, NetworkLb};
use crate::tls::Tls;

const CROSSING: &str = "load_balancing.cross_zone.enabled";
const ENDING: &str = "deregistration_delay.connection_termination.enabled";

fn with(annotations: &[(&str, &str)]) -> LoadBalancer {
    let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    LoadBalancer { annotations: pairs.collect(), ..wanted(&[(80, 30080)], &[0, 1]) }
}

fn balancer(cloud: &StandIn) -> NetworkLb {
    cloud.cloud().balancers.into_values().next().unwrap()
}

fn group(cloud: &StandIn) -> Group {
    cloud.cloud().groups.into_values().next().unwrap()
}

#[tokio::test(start_paused = true)]
async fn preview_refuses_wrong_annotations_without_a_call() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    assert_eq!(aws.preview(&with(&[(CROSS_ZONE, "true")])).await.unwrap(), None);
    let error = aws.preview(&with(&[(CROSS_ZONE, "yes")])).await.unwrap_err();
    assert_eq!(error.reason(), "InvalidAnnotation");
    assert!(cloud.take_calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn named_attributes_are_set_and_return_to_the_defaults() {
    let (cloud, crossing) = (standin(1), format!("{ENDING}=true,preserve_client_ip.enabled=false"));
    let named = with(&[(CROSS_ZONE, "true"), (GROUP_ATTRIBUTES, &crossing)]);
    let mut aws = provider(&cloud);
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    assert_eq!(balancer(&cloud).attributes[CROSSING], "true");
    assert_eq!(
        (
            group(&cloud).attributes[ENDING].as_str(),
            &group(&cloud).attributes["preserve_client_ip.enabled"][..]
        ),
        ("true", "false")
    );
    for is_restarted in [false, true] {
        pause().await;
        apply(&aws, &named, Compare::InPlace).await.unwrap();
        pause().await;
        if is_restarted {
            aws = provider(&cloud);
        }
        apply(&aws, &with(&[]), Compare::InPlace).await.unwrap();
        assert_eq!(balancer(&cloud).attributes[CROSSING], "false", "restarted: {is_restarted}");
        assert_eq!(
            (
                group(&cloud).attributes[ENDING].as_str(),
                &group(&cloud).attributes["preserve_client_ip.enabled"][..]
            ),
            ("false", "true")
        );
        let tags: Vec<_> = balancer(&cloud).tags.into_keys().chain(group(&cloud).tags.into_keys()).collect();
        assert!(!tags.contains(&"steerage.dev/attributes".to_owned()), "{tags:?}");
    }
}

/// Somebody set it, no annotation names it: it stays, also beside others that annotations name.
#[tokio::test(start_paused = true)]
async fn attribute_that_no_annotation_names_is_left_alone() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &with(&[]), Compare::Remembered).await.unwrap();
    cloud.change(|cloud| {
        let found = cloud.balancers.values_mut().next().unwrap();
        found.attributes.insert(CROSSING.to_owned(), "true".to_owned());
    });
    let shifting = with(&[(ATTRIBUTES, "zonal_shift.config.enabled=true")]);
    for (lb, shift) in [(&shifting, "true"), (&with(&[]), "false")] {
        pause().await;
        apply(&aws, lb, Compare::InPlace).await.unwrap();
        let attributes = balancer(&cloud).attributes;
        assert_eq!(
            (attributes["zonal_shift.config.enabled"].as_str(), &attributes[CROSSING][..]),
            (shift, "true")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn drift_is_repaired_by_a_comparison_with_one_call_more() {
    let (cloud, named) = (standin(1), with(&[(CROSS_ZONE, "true")]));
    let aws = provider(&cloud);
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    pause().await;
    // The first one also reads the targets.
    apply(&aws, &named, Compare::InPlace).await.unwrap();
    cloud.take_calls();
    apply(&aws, &named, Compare::InPlace).await.unwrap();
    assert_eq!(cloud.take_calls().len(), 4);
    cloud.change(|cloud| {
        let found = cloud.balancers.values_mut().next().unwrap();
        found.attributes.insert(CROSSING.to_owned(), "false".to_owned());
    });
    pause().await;
    apply(&aws, &named, Compare::InPlace).await.unwrap();
    assert_eq!(changes(&cloud), ["ModifyLoadBalancerAttributes"]);
    assert_eq!(balancer(&cloud).attributes[CROSSING], "true");
}

async fn restarted(cloud: &Arc<StandIn>, lb: &LoadBalancer) -> Vec<&'static str> {
    pause().await;
    cloud.take_calls();
    apply(&provider(cloud), lb, Compare::InPlace).await.unwrap();
    cloud.take_calls().iter().map(|call| call.name).collect()
}

/// Lists show tags, but no values of attributes.
#[tokio::test(start_paused = true)]
async fn restart_with_tags_reads_only_the_lists_first() {
    for (annotations, rest) in [
        (&[(TAGS, "team=shop")][..], &[][..]),
        (
            &[(CROSS_ZONE, "true"), (TAGS, "team=shop")],
            &[
                "DescribeListeners",
                "DescribeTags",
                "DescribeLoadBalancerAttributes",
                "DescribeTargetGroupAttributes",
            ],
        ),
    ] {
        let (cloud, named) = (standin(1), with(annotations));
        apply(&provider(&cloud), &named, Compare::Remembered).await.unwrap();
        let (of_ec2, calls): (Vec<_>, Vec<_>) =
            restarted(&cloud, &named).await.into_iter().partition(|name| *name == "DescribeSecurityGroups");
        // That of the list, and at most one with those of this Service.
        assert!((1..=1 + usize::from(!rest.is_empty())).contains(&of_ec2.len()), "{of_ec2:?}");
        let lists = ["DescribeLoadBalancers", "DescribeTargetGroups", "DescribeTags"];
        // Targets follow before everything else is read.
        assert_eq!(calls, [&lists[..], &["DescribeTargetHealth"], rest].concat());
    }
}

/// The annotations changed while no process ran: what they name is in place as soon as the next one says so.
#[tokio::test(start_paused = true)]
async fn changed_values_are_in_place_after_the_first_comparison() {
    let (cert, other) = ((SSL_CERT, "arn:aws:acm:::a"), (SSL_CERT, "arn:aws:acm:::b"));
    let delay = |seconds: &str| format!("deregistration_delay.timeout_seconds={seconds}");
    let (short, long) = (delay("5"), delay("600"));
    for (from, to, expected) in [
        (&[cert][..], &[other][..], "ModifyListener"),
        (&[cert], &[cert, (SSL_POLICY, "ELBSecurityPolicy-TLS13-1-2-2021-06")], "ModifyListener"),
        (
            &[(GROUP_ATTRIBUTES, short.as_str())],
            &[(GROUP_ATTRIBUTES, long.as_str())],
            "ModifyTargetGroupAttributes",
        ),
        (&[(CROSS_ZONE, "true")], &[(CROSS_ZONE, "false")], "ModifyLoadBalancerAttributes"),
    ] {
        for compare in [Compare::InPlace, Compare::Remembered] {
            let cloud = standin(1);
            apply(&provider(&cloud), &with(from), Compare::Remembered).await.unwrap();
            pause().await;
            changes(&cloud);
            let outcome = apply(&provider(&cloud), &with(to), compare).await.unwrap();
            assert_eq!((changes(&cloud), outcome.retry_refused), (vec![expected], None), "{to:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refused_attribute_is_reported_while_clients_are_served() {
    let cloud = standin(1);
    let (aws, logs) = (provider(&cloud), "access_logs.s3.enabled=true,access_logs.s3.bucket=");
    let to = |bucket: &str| with(&[(ATTRIBUTES, &format!("{logs}{bucket}"))]);
    let error = apply(&aws, &to("foreign"), Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), "RejectedByProvider");
    assert!(error.to_string().contains("Access Denied for bucket: foreign"), "{error}");
    assert_eq!((cloud.cloud().listeners.len(), group(&cloud).registered().count()), (1, 2));
    apply(&aws, &to("writable"), Compare::Remembered).await.unwrap();
    assert_eq!(balancer(&cloud).attributes["access_logs.s3.bucket"], "writable");
    pause().await;
    apply(&aws, &with(&[]), Compare::Remembered).await.unwrap();
    assert_eq!(balancer(&cloud).attributes["access_logs.s3.enabled"], "false");
}

/// Whoever requested the protection, Steerage does not lift it to delete.
#[tokio::test(start_paused = true)]
async fn protected_load_balancer_is_not_deleted() {
    let (cloud, named) = (standin(1), with(&[(ATTRIBUTES, "deletion_protection.enabled=true")]));
    let aws = provider(&cloud);
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    for _ in 0..2 {
        let error = delete(&aws, &named.owner).await.unwrap_err();
        assert_eq!(error.reason(), "OperationNotPermitted");
        assert!(error.to_string().contains("Key=deletion_protection.enabled,Value=false"), "{error}");
        assert!(matches!(error, Error::Invalid { .. }));
        pause().await;
    }
    // Nor for a Service created again, whose load balancer it would be in the way of.
    let again = LoadBalancer { owner: Owner { uid: "u2".to_owned(), ..named.owner.clone() }, ..with(&[]) };
    let error = apply(&provider(&cloud), &again, Compare::InPlace).await.unwrap_err();
    assert_eq!(error.reason(), "OperationNotPermitted");
    let left = cloud.cloud();
    assert_eq!((left.balancers.len(), left.groups.len(), left.listeners.len()), (1, 1, 1));
    cloud.change(|cloud| {
        let found = cloud.balancers.values_mut().next().unwrap();
        found.attributes.insert("deletion_protection.enabled".to_owned(), "false".to_owned());
    });
    delete(&aws, &named.owner).await.unwrap();
    assert!(cloud.cloud().balancers.is_empty() && cloud.cloud().groups.is_empty());
}

/// The type of the Service was changed and changed back: its load balancer is wanted again, with changes.
#[tokio::test(start_paused = true)]
async fn protected_load_balancer_is_kept_when_the_service_wants_it_back() {
    let (cloud, named) = (standin(1), with(&[(ATTRIBUTES, "deletion_protection.enabled=true")]));
    let aws = provider(&cloud);
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    assert_eq!(delete(&aws, &named.owner).await.unwrap_err().reason(), "OperationNotPermitted");
    let back = LoadBalancer { annotations: BTreeMap::new(), ..wanted(&[(80, 30080), (443, 30443)], &[0, 1]) };
    apply(&aws, &back, Compare::Remembered).await.unwrap();
    let left = cloud.cloud();
    assert_eq!((left.balancers.len(), left.groups.len(), left.listeners.len()), (1, 2, 2));
    assert_eq!(balancer(&cloud).attributes["deletion_protection.enabled"], "false");
}

/// AWS takes no empty name of a bucket, so nothing is to be done when the annotation is removed.
#[tokio::test(start_paused = true)]
async fn bucket_without_logs_is_written_once() {
    let (cloud, named) = (standin(1), with(&[(ACCESS_LOG_BUCKET, "logs")]));
    let mut aws = provider(&cloud);
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    assert_eq!(balancer(&cloud).attributes["access_logs.s3.bucket"], "logs");
    changes(&cloud);
    for is_restarted in [false, true] {
        pause().await;
        if is_restarted {
            aws = provider(&cloud);
        }
        apply(&aws, &named, Compare::InPlace).await.unwrap();
        assert_eq!(changes(&cloud), [""; 0]);
    }
    apply(&aws, &with(&[]), Compare::InPlace).await.unwrap();
    pause().await;
    changes(&cloud);
    apply(&aws, &with(&[]), Compare::InPlace).await.unwrap();
    assert_eq!(changes(&cloud), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn requested_addresses_are_those_of_the_creation() {
    let cloud = standin(1);
    let of = |subnets: &str, addresses: &str| with(&[(SUBNETS, subnets), (PRIVATE_ADDRESSES, addresses)]);
    let (aws, named) = (provider(&cloud), of("subnet-z,subnet-b", "10.0.1.9,10.0.0.9"));
    apply(&aws, &named, Compare::Remembered).await.unwrap();
    let made = balancer(&cloud).made.subnets;
    let placed = |subnet: &str, ip: &str| (subnet.to_owned(), Some(Address::Private(ip.parse().unwrap())));
    assert_eq!(made, [placed("subnet-z", "10.0.1.9"), placed("subnet-b", "10.0.0.9")]);
    assert_eq!(restarted(&cloud, &named).await.len(), 5);
    changes(&cloud);
    let changed = of("subnet-z,subnet-b", "10.0.1.9,10.0.0.8");
    for aws in [&aws, &provider(&cloud)] {
        pause().await;
        let error = apply(aws, &changed, Compare::InPlace).await.unwrap_err();
        assert_eq!(error.reason(), "AddressesImmutable");
    }
    // In another order they are the same; without annotations nothing is requested.
    for same in [of("subnet-b,subnet-z", "10.0.0.9,10.0.1.9"), with(&[])] {
        apply(&aws, &same, Compare::InPlace).await.unwrap();
    }
    assert_eq!((changes(&cloud), balancer(&cloud).placed), (vec![], made.into_iter().collect()));
}

#[tokio::test(start_paused = true)]
async fn tls_changes_in_place_and_drift_is_repaired() {
    let cloud = standin(1);
    let (aws, a, b, c) = (provider(&cloud), "arn:aws:acm:::a", "arn:aws:acm:::b", "arn:aws:acm:::c");
    let listener = || cloud.cloud().listeners.into_iter().next().unwrap();
    let others = |all: &[&str]| all.iter().map(|arn| (*arn).to_owned()).collect::<BTreeSet<_>>();
    apply(&aws, &with(&[]), Compare::Remembered).await.unwrap();
    let (arn, _) = listener();
    for (certificates, policy, calls) in [
        (format!("{a},{b}"), "", &["ModifyListener", "AddListenerCertificates"][..]),
        (
            format!("{b},{a},{c}"),
            "",
            &["AddListenerCertificates", "AddListenerCertificates", "ModifyListener"],
        ),
        (format!("{b},{a},{c}"), "ELBSecurityPolicy-TLS13-1-2-2021-06", &["ModifyListener"]),
        (a.to_owned(), "", &["ModifyListener", "RemoveListenerCertificates", "RemoveListenerCertificates"]),
    ] {
        pause().await;
        changes(&cloud);
        let mut lb = with(&[(SSL_CERT, &certificates)]);
        if !policy.is_empty() {
            lb.annotations.insert(SSL_POLICY.to_owned(), policy.to_owned());
        }
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        assert_eq!(changes(&cloud), calls);
        let (same, found) = listener();
        assert_eq!((same, found.protocol.as_str()), (arn.clone(), "TLS"));
        let all: Vec<&str> = certificates.split(',').collect();
        let tls = found.tls.unwrap().without_default();
        assert_eq!((tls.certificate.as_str(), tls.others), (all[0], others(&all[1..])));
    }
    let named = with(&[(SSL_CERT, &format!("{a},{b}"))]);
    apply(&aws, &named, Compare::InPlace).await.unwrap();
    let whole = listener().1.tls.map(Tls::without_default);
    for change in [
        |tls: &mut Tls| tls.policy.push('x'),
        |tls: &mut Tls| tls.others.clear(),
        |tls: &mut Tls| tls.certificate.push('x'),
    ] {
        cloud.change(|cloud| change(cloud.listeners.values_mut().next().unwrap().tls.as_mut().unwrap()));
        pause().await;
        apply(&aws, &named, Compare::InPlace).await.unwrap();
        assert_eq!(listener().1.tls.map(Tls::without_default), whole);
    }
    pause().await;
    apply(&aws, &with(&[]), Compare::InPlace).await.unwrap();
    assert_eq!((listener().0, listener().1.protocol.as_str(), listener().1.tls), (arn, "TCP", None));
    let missing = with(&[(SSL_CERT, "arn:aws:acm:::missing")]);
    let outcome = apply(&aws, &missing, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "RejectedByProvider");
    assert_eq!(listener().1.protocol, "TCP", "the listener stays as it was");
}

/// A call for a certificate fails: those before it count, and the next try makes the rest.
#[tokio::test(start_paused = true)]
async fn certificates_are_changed_one_by_one() {
    let (cloud, arn) = (standin(1), |name: &str| format!("arn:aws:acm:::{name}"));
    let of = |names: &[&str]| {
        let all: Vec<String> = names.iter().map(|name| arn(name)).collect();
        with(&[(SSL_CERT, &all.join(","))])
    };
    let aws = provider(&cloud);
    apply(&aws, &of(&["a"]), Compare::Remembered).await.unwrap();
    changes(&cloud);
    let outcome = apply(&aws, &of(&["a", "b", "c", "missing"]), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, "RejectedByProvider");
    assert_eq!(changes(&cloud), ["AddListenerCertificates"; 3]);
    apply(&aws, &of(&["a", "b", "c", "d"]), Compare::Remembered).await.unwrap();
    assert_eq!(changes(&cloud), ["AddListenerCertificates"], "the others are known to be there");
    apply(&aws, &of(&["d", "e"]), Compare::Remembered).await.unwrap();
    let expected = ["AddListenerCertificates", "ModifyListener"].into_iter();
    let expected: Vec<_> = expected.chain(["RemoveListenerCertificates"; 2]).collect();
    assert_eq!(changes(&cloud), expected);
}

/// The further tags of all resources, without Steerage's own.
fn tags(cloud: &StandIn) -> Vec<BTreeMap<String, String>> {
    let cloud = cloud.cloud();
    let all = cloud
        .balancers
        .values()
        .map(|found| &found.tags)
        .chain(cloud.groups.values().map(|found| &found.tags));
    let all = all.chain(cloud.listeners.values().map(|found| &found.tags));
    let others = |tags: &BTreeMap<String, String>| {
        let others = tags.iter().filter(|(key, _)| !key.starts_with("steerage.dev/"));
        others.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    all.map(others).collect()
}

#[tokio::test(start_paused = true)]
async fn all_further_tags_are_replaced_within_the_limits_of_aws() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    for range in [0..36, 36..72, 0..36] {
        let pairs: Vec<_> = range.map(|index| (format!("key-{index}"), "x".to_owned())).collect();
        let text: Vec<_> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        apply(&aws, &with(&[(TAGS, &text.join(","))]), Compare::Remembered).await.unwrap();
        assert_eq!(tags(&cloud), vec![pairs.into_iter().collect::<BTreeMap<_, _>>(); 3]);
        pause().await;
    }
}

/// AWS sends the header to the health check too, and an HTTP check would find every target unhealthy.
#[tokio::test(start_paused = true)]
async fn proxy_protocol_never_meets_an_http_check() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    cloud.set_invariant(Box::new(|_, cloud| {
        let sends = |group: &Group| group.attributes["proxy_protocol_v2.enabled"] == "true";
        let wrong = cloud.groups.values().find(|group| sends(group) && group.health.path.is_some());
        wrong.map(|group| format!("{} sends the header to its HTTP check", group.name))
    }));
    for lb in [with(&[]), with(&[(PROXY_PROTOCOL, "*")]), with(&[])] {
        apply(&aws, &lb, Compare::InPlace).await.unwrap();
        pause().await;
    }
    assert_eq!(cloud.violations(), [""; 0]);
    assert!(group(&cloud).health.path.is_some());
}

#[tokio::test(start_paused = true)]
async fn targets_with_tls_have_no_stickiness() {
    let (cloud, cert) = (standin(1), (SSL_CERT, "arn:aws:acm:::a"));
    let aws = provider(&cloud);
    apply(&aws, &with(&[cert, (BACKEND_PROTOCOL, "ssl")]), Compare::Remembered).await.unwrap();
    assert_eq!(group(&cloud).protocol, "TLS");
    let mut sticky = with(&[cert, (BACKEND_PROTOCOL, "ssl")]);
    sticky.groups[0].affinity = Some(Affinity { timeout: Duration::from_mins(1) });
    cloud.take_calls();
    let error = apply(&aws, &sticky, Compare::Remembered).await.unwrap_err();
    assert_eq!((error.reason(), cloud.take_calls().len()), ("ConflictingAnnotations", 0));
}

#[tokio::test(start_paused = true)]
async fn further_tags_follow_the_annotation_and_leave_those_of_others() {
    let cloud = standin(1);
    let mut aws = provider(&cloud);
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    apply(&aws, &with(&[(TAGS, "team=shop,stage=test")]), Compare::Remembered).await.unwrap();
    assert_eq!(tags(&cloud), vec![BTreeMap::from([pair("stage", "test"), pair("team", "shop")]); 3]);
    cloud.change(|cloud| {
        for found in cloud.balancers.values_mut() {
            found.tags.insert("cost".to_owned(), "12".to_owned());
        }
    });
    pause().await;
    changes(&cloud);
    apply(&aws, &with(&[(TAGS, "team=web")]), Compare::Remembered).await.unwrap();
    let made = changes(&cloud);
    assert!(made.len() == 9 && made.iter().all(|name| name.ends_with("Tags")), "{made:?}");
    let mut expected = vec![BTreeMap::from([pair("team", "web")]); 3];
    expected[0].insert("cost".to_owned(), "12".to_owned());
    assert_eq!(tags(&cloud)[1..], expected[1..]);
    // Only a read of all shows what others did.
    pause().await;
    aws = provider(&cloud);
    apply(&aws, &with(&[]), Compare::InPlace).await.unwrap();
    assert_eq!(tags(&cloud), [BTreeMap::from([pair("cost", "12")]), BTreeMap::new(), BTreeMap::new()]);
}

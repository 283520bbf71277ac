// SPDX-License-Identifier: Apache-2.0
//! Load balancers with IPv6 for their clients, and targets that are reached over either family.

use std::sync::Arc;

use steerage_model::{Family, Protocol};
use steerage_provider_api::{Compare, GroupKey, GroupTargets, LoadBalancer, PodTarget};

use super::driver::{apply, changes, pause, provider, set, standin, standin_with, wanted};
use super::security_groups::{group, registered};
use super::shared::{self, sharing};
use crate::annotations::IP_ADDRESS_TYPE;
use crate::desired::tests::{planned, planned_with_pods};
use crate::ip_address_type::IpAddressType::{self, DualStack, Ipv4};
use crate::standin::{Quotas, StandIn};

fn of(families: &[Family], lb: LoadBalancer) -> LoadBalancer {
    LoadBalancer { families: families.to_vec(), ..lb }
}

fn annotated(value: &str, mut lb: LoadBalancer) -> LoadBalancer {
    lb.annotations.insert(IP_ADDRESS_TYPE.to_owned(), value.to_owned());
    lb
}

/// The type of the only load balancer, and whether the groups in use have IPv6.
fn shown(cloud: &StandIn) -> (IpAddressType, Vec<bool>) {
    let cloud = cloud.cloud();
    let kind = cloud.balancers.values().next().unwrap().ip_address_type;
    let used = cloud.listeners.values().map(|listener| cloud.groups[&listener.group].is_ipv6);
    (kind, used.collect())
}

/// The sources that the only security group admits.
fn sources(cloud: &StandIn) -> Vec<String> {
    group(cloud).own.iter().map(|rule| rule.source.to_string()).collect()
}

#[tokio::test(start_paused = true)]
async fn families_change_on_a_live_load_balancer() {
    use Family::{V4, V6};
    let cloud = standin(1);
    let aws = provider(&cloud);
    let web = || wanted(&[(80, 30080)], &[0, 1]);
    apply(&aws, &of(&[V4], web()), Compare::Remembered).await.unwrap();
    assert_eq!(shown(&cloud), (Ipv4, vec![false]));
    assert_eq!(sources(&cloud), ["0.0.0.0/0"]);
    for (lb, kind, is_ipv6, admitted, calls) in [
        (of(&[V4, V6], web()), DualStack, false, &["0.0.0.0/0", "::/0"][..], 2),
        (annotated("ipv4", of(&[V4, V6], web())), Ipv4, false, &["0.0.0.0/0"], 2),
        (annotated("dualstack", of(&[V4], web())), DualStack, false, &["0.0.0.0/0", "::/0"], 2),
        // Another group with its attributes and targets, then the listener.
        (of(&[V6], web()), DualStack, true, &["0.0.0.0/0", "::/0"], 4),
        (of(&[V4], web()), Ipv4, false, &["0.0.0.0/0"], 6),
    ] {
        pause().await;
        changes(&cloud);
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        assert_eq!(shown(&cloud), (kind, vec![is_ipv6]), "{:?}", lb.families);
        assert_eq!(sources(&cloud), admitted, "{:?}", lb.families);
        let made: Vec<_> = changes(&cloud).into_iter().filter(|call| *call != "DeleteTargetGroup").collect();
        assert_eq!(made.len(), calls, "{made:?}");
        // Another process changes nothing.
        pause().await;
        apply(&provider(&cloud), &lb, Compare::InPlace).await.unwrap();
        let late: Vec<_> = changes(&cloud).into_iter().filter(|call| *call != "DeleteTargetGroup").collect();
        assert_eq!(late, [""; 0]);
    }
}

/// AWS takes UDP and IPv6 only one after the other.
#[tokio::test(start_paused = true)]
async fn ports_with_udp_replace_ipv6_and_the_reverse() {
    use Family::{V4, V6};
    let cloud = standin(1);
    let aws = provider(&cloud);
    let tcp = || of(&[V4, V6], wanted(&[(80, 30080)], &[0]));
    let with_udp = || {
        let ports = [(Protocol::Tcp, 80, 30080), (Protocol::Udp, 53, 30053), (Protocol::Tcp, 53, 30053)];
        of(&[V4], planned(&ports).with_nodes(set(&[0])))
    };
    for (lb, kind, listeners) in [(tcp(), DualStack, 1), (with_udp(), Ipv4, 2), (tcp(), DualStack, 1)] {
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
        assert_eq!((shown(&cloud).0, shown(&cloud).1.len()), (kind, listeners));
        pause().await;
    }
}

/// Where AWS refuses another type, all else follows, and the rules are those of the type that it has.
#[tokio::test(start_paused = true)]
async fn refused_type_holds_up_nothing() {
    use Family::{V4, V6};
    let cloud = standin(1);
    let aws = provider(&cloud);
    let refuse = |is_refused| cloud.change(|cloud| cloud.keeps_ip_address_types = is_refused);
    apply(&aws, &of(&[V4], wanted(&[(80, 30080)], &[0])), Compare::Remembered).await.unwrap();
    pause().await;
    refuse(true);
    let both = |targets: &[usize]| of(&[V4, V6], wanted(&[(80, 30080), (443, 30443)], targets));
    let outcome = apply(&aws, &both(&[1]), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.map(|(reason, _)| reason), Some("RejectedByProvider"));
    assert_eq!(shown(&cloud), (Ipv4, vec![false, false]), "both ports serve");
    assert!(registered(&cloud).contains(&"i-1".to_owned()));
    changes(&cloud);
    apply(&aws, &both(&[2]), Compare::Remembered).await.unwrap();
    assert!(!changes(&cloud).contains(&"SetIpAddressType"), "it is asked again only by a comparison");
    refuse(false);
    pause().await;
    let outcome = apply(&aws, &both(&[2]), Compare::InPlace).await.unwrap();
    assert_eq!((outcome.incomplete, shown(&cloud).0), (None, DualStack));
    pause().await;
    refuse(true);
    let v4 = annotated("ipv4", both(&[2]));
    let outcome = apply(&aws, &v4, Compare::Remembered).await.unwrap();
    assert!(outcome.incomplete.is_some());
    assert!(sources(&cloud).contains(&"::/0".to_owned()), "clients are still told IPv6 addresses");
    refuse(false);
    pause().await;
    apply(&aws, &v4, Compare::InPlace).await.unwrap();
    assert_eq!((shown(&cloud).0, sources(&cloud)), (Ipv4, vec!["0.0.0.0/0".to_owned(); 2]));
}

/// Clients learn of IPv6 when its rules are there, and forget it before they go.
#[tokio::test(start_paused = true)]
async fn rules_come_first_and_go_last() {
    use Family::{V4, V6};
    let cloud = standin(1);
    let aws = provider(&cloud);
    let web = || wanted(&[(80, 30080)], &[0]);
    apply(&aws, &of(&[V4], web()), Compare::Remembered).await.unwrap();
    pause().await;
    changes(&cloud);
    apply(&aws, &of(&[V4, V6], web()), Compare::Remembered).await.unwrap();
    assert_eq!(changes(&cloud), ["AuthorizeSecurityGroupIngress", "SetIpAddressType"]);
    pause().await;
    apply(&aws, &of(&[V4], web()), Compare::Remembered).await.unwrap();
    assert_eq!(changes(&cloud), ["SetIpAddressType", "RevokeSecurityGroupIngress"]);
}

/// Each family has its own quota of rules.
#[tokio::test(start_paused = true)]
async fn full_quota_of_one_family_leaves_the_other_alone() {
    let cloud = standin_with(1, Quotas { rules: 2, ..Quotas::default() });
    let aws = provider(&cloud);
    let lb = of(&[Family::V4, Family::V6], wanted(&[(80, 30080), (443, 30443)], &[0]));
    let ranges = ["192.0.2.0/24", "2001:db8:1::/48", "2001:db8:2::/48"].map(|range| range.parse().unwrap());
    let lb = LoadBalancer { source_ranges: ranges.to_vec(), ..lb };
    let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.map(|(reason, _)| reason), Some("QuotaExceeded"));
    let v4 = sources(&cloud).into_iter().filter(|source| source == "192.0.2.0/24").count();
    assert_eq!((v4, sources(&cloud).len()), (2, 4));
}

/// Somebody else's change is found and repaired.
#[tokio::test(start_paused = true)]
async fn ip_address_type_is_repaired() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = of(&[Family::V4, Family::V6], wanted(&[(80, 30080)], &[0]));
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    pause().await;
    cloud.change(|cloud| cloud.balancers.values_mut().for_each(|found| found.ip_address_type = Ipv4));
    pause().await;
    changes(&cloud);
    apply(&aws, &lb, Compare::InPlace).await.unwrap();
    assert_eq!((shown(&cloud).0, changes(&cloud)), (DualStack, vec!["SetIpAddressType"]));
}

#[tokio::test(start_paused = true)]
async fn pods_of_the_first_family_are_targets() {
    use Family::{V4, V6};
    let (v4, v6) = ("10.2.0.1:8080", "[2001:db8::1]:8080");
    for (families, expected) in [(&[V4][..], v4), (&[V4, V6], v4), (&[V6, V4], v6), (&[V6], v6)] {
        let cloud = standin(1);
        cloud.change(|cloud| {
            let known = cloud.instances["10.2.0.1"].clone();
            cloud.instances.insert("2001:db8::1".to_owned(), known);
        });
        let aws = provider(&cloud);
        let lb = of(families, planned_with_pods(&[(Protocol::Tcp, 80, 8080)]));
        let pods = [v4, v6].map(|address| PodTarget { address: address.parse().unwrap(), zone: None });
        let GroupKey::Pods(port) = lb.groups[0].key.clone() else { panic!("no pods") };
        let targets = GroupTargets { nodes: None, pods: [(port, Arc::from(pods))].into() };
        apply(&aws, &lb.with_targets(&targets), Compare::Remembered).await.unwrap();
        let cloud = cloud.cloud();
        let group = cloud.groups.values().next().unwrap();
        let found: Vec<_> = group.targets.keys().map(|(id, _)| id.clone()).collect();
        let expected = expected.parse::<std::net::SocketAddr>().unwrap().ip().to_string();
        assert_eq!((found, group.is_ipv6), (vec![expected], families[0] == V6));
    }
}

#[tokio::test(start_paused = true)]
async fn the_operator_decides_for_shared_load_balancers() {
    let cloud = standin(1);
    let aws = shared::provider(&cloud);
    let families = [Family::V4, Family::V6];
    let refused =
        apply(&aws, &of(&families, sharing("web", "a", 80)), Compare::Remembered).await.unwrap_err();
    assert_eq!(refused.reason(), "ConflictingAnnotations");
    assert!(refused.to_string().contains("shared load balancer has IPv4"), "{refused}");
    assert!(cloud.cloud().balancers.is_empty());
    for lb in [of(&families, sharing("dual", "a", 80)), sharing("dual", "b", 443)] {
        apply(&aws, &lb, Compare::Remembered).await.unwrap();
    }
    assert_eq!(shown(&cloud), (DualStack, vec![false, false]));
}

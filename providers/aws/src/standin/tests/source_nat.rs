// SPDX-License-Identifier: Apache-2.0
//! UDP on load balancers with IPv6, which takes prefixes for source NAT.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv6Net;
use steerage_model::{Family, Protocol};
use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider as _};

use super::driver::{apply, changes, delete, pause, provider, set, standin, standin_with, wanted};
use super::shared::{self, sharing};
use super::zones;
use crate::Aws;
use crate::annotations::{IP_ADDRESS_TYPE, SOURCE_NAT, SOURCE_NAT_PREFIXES, SUBNETS};
use crate::client::{BalancerCalls as _, Tags};
use crate::desired::tests::planned;
use crate::ip_address_type::IpAddressType;
use crate::reasons;
use crate::source_nat::{Prefixes, SourceNat};
use crate::standin::cloud::{Forward, NetworkLb};
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Cloud, Quotas, StandIn};

const TCP: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);
const UDP: (Protocol, u16, u16) = (Protocol::Udp, 53, 30053);
/// Together with [`UDP`], one listener for both.
const TCP_ON_UDP: (Protocol, u16, u16) = (Protocol::Tcp, 53, 30053);
const GIVEN: [&str; 2] = ["2001:db8:0:1:2::/80", "2001:db8:0:1:3::/80"];

/// A Service with IPv6 first.
fn service(ports: &[(Protocol, u16, u16)]) -> LoadBalancer {
    LoadBalancer { families: vec![Family::V6, Family::V4], ..planned(ports).with_nodes(set(&[0, 1])) }
}

fn with(annotations: &[(&str, &str)], mut lb: LoadBalancer) -> LoadBalancer {
    let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    lb.annotations.extend(pairs);
    lb
}

fn balancer(cloud: &StandIn) -> NetworkLb {
    cloud.cloud().balancers.into_values().next().unwrap()
}

fn prefixes(cloud: &StandIn) -> Prefixes {
    let SourceNat::On(prefixes) = balancer(cloud).source_nat else { panic!("off") };
    prefixes
}

fn is_on(cloud: &StandIn) -> bool {
    balancer(cloud).source_nat.is_on()
}

/// The changes of the load balancer and its listeners.
fn made(cloud: &StandIn) -> Vec<&'static str> {
    let made = changes(cloud).into_iter();
    let is_other = |call: &&str| call.contains("Target") || call.contains("SecurityGroup");
    made.filter(|call| !is_other(call)).collect()
}

/// A load balancer of this Service, with all that reads show of it.
async fn in_place(lb: &LoadBalancer) -> (Arc<StandIn>, Aws) {
    let cloud = standin(1);
    zones::plant(&cloud);
    let aws = provider(&cloud);
    pause().await;
    apply(&aws, lb, Compare::Remembered).await.unwrap();
    pause().await;
    changes(&cloud);
    (cloud, aws)
}

/// Another process finds everything in place.
async fn settles(cloud: &Arc<StandIn>, lb: &LoadBalancer, what: &str) {
    pause().await;
    made(cloud);
    let outcome = apply(&provider(cloud), lb, Compare::InPlace).await.unwrap();
    assert_eq!((outcome.incomplete, made(cloud)), (None, vec![]), "{what}");
}

#[tokio::test(start_paused = true)]
async fn it_is_on_before_the_first_listener_with_udp_and_off_after_the_last() {
    let (cloud, aws) = in_place(&service(&[TCP])).await;
    assert!(!is_on(&cloud));
    for (ports, on, calls) in [
        (&[TCP, UDP][..], true, &["SetSubnets", "CreateListener"][..]),
        (&[TCP, UDP, TCP_ON_UDP], true, &["ModifyListener"]),
        (&[TCP], false, &["DeleteListener", "SetSubnets"]),
        (&[UDP], true, &["SetSubnets", "CreateListener", "DeleteListener"]),
    ] {
        apply(&aws, &service(ports), Compare::Remembered).await.unwrap();
        let found = made(&cloud);
        assert_eq!((is_on(&cloud), found.as_slice()), (on, calls), "{ports:?}");
        settles(&cloud, &service(ports), "after a change").await;
    }
}

#[tokio::test(start_paused = true)]
async fn new_load_balancer_with_udp_is_created_with_it() {
    for ports in [&[UDP][..], &[UDP, TCP_ON_UDP]] {
        let (cloud, aws) = in_place(&service(ports)).await;
        assert!(is_on(&cloud));
        apply(&aws, &service(ports), Compare::InPlace).await.unwrap();
        assert_eq!(made(&cloud), [""; 0]);
        settles(&cloud, &service(ports), "after the creation").await;
    }
}

#[tokio::test(start_paused = true)]
async fn annotation_decides_without_udp() {
    let said = |value| with(&[(SOURCE_NAT, value)], service(&[TCP]));
    let (cloud, aws) = in_place(&service(&[TCP])).await;
    for (value, on) in [("on", true), ("off", false)] {
        apply(&aws, &said(value), Compare::Remembered).await.unwrap();
        assert_eq!((is_on(&cloud), made(&cloud)), (on, vec!["SetSubnets"]), "{value}");
        settles(&cloud, &said(value), value).await;
    }
    let refused = apply(&aws, &with(&[(SOURCE_NAT, "off")], service(&[UDP])), Compare::Remembered).await;
    assert_eq!(refused.unwrap_err().reason(), "ConflictingAnnotations");
}

/// A refusal of one more listener says nothing certain about it, and subnets change by the same call.
#[tokio::test(start_paused = true)]
async fn refused_listener_with_udp_ends_it_nowhere() {
    let named = |subnets: &str, ports: &[_]| with(&[(SUBNETS, subnets)], service(ports));
    let (cloud, aws) = in_place(&named("subnet-a", &[TCP, UDP])).await;
    cloud.set_faults(Faults::Once("CreateListener", Fault::Code("InvalidConfigurationRequest")));
    let more = named("subnet-a,subnet-b", &[TCP, UDP, (Protocol::Udp, 54, 30054)]);
    let outcome = apply(&aws, &more, Compare::Remembered).await.unwrap();
    let (_, message) = outcome.incomplete.unwrap();
    assert!(message.contains("port 54.") && message.contains("CreateListener"), "{message}");
    assert_eq!(made(&cloud), ["CreateListener", "SetSubnets"], "{message}");
    assert_eq!((prefixes(&cloud).len(), balancer(&cloud).placed.len()), (2, 2));
    settles_after(&cloud, &aws, &more).await;
}

/// AWS accepts what it refused.
async fn settles_after(cloud: &Arc<StandIn>, aws: &Aws, lb: &LoadBalancer) {
    pause().await;
    let outcome = apply(aws, lb, Compare::InPlace).await.unwrap();
    assert_eq!((outcome.incomplete, made(cloud)), (None, vec!["CreateListener"]));
}

/// AWS replaces the subnets by the same call: neither zones nor prefixes change by the way.
#[tokio::test(start_paused = true)]
async fn zones_and_prefixes_change_one_without_the_other() {
    let named = |subnets: &str, ports: &[_]| with(&[(SUBNETS, subnets)], service(ports));
    let (cloud, aws) = in_place(&named("subnet-a", &[UDP])).await;
    let of = |id: &str| prefixes(&cloud)[id];
    let first = of("subnet-a");
    apply(&aws, &named("subnet-a,subnet-b", &[UDP]), Compare::Remembered).await.unwrap();
    let second = of("subnet-b");
    assert_eq!((of("subnet-a"), made(&cloud)), (first, vec!["SetSubnets"]));
    apply(&aws, &named("name-b", &[UDP]), Compare::Remembered).await.unwrap();
    assert_eq!(prefixes(&cloud), Prefixes::from([("subnet-b".to_owned(), second)]));
    // Somebody adds a zone, which nobody named.
    let (cloud, aws) = in_place(&service(&[TCP])).await;
    cloud.change(|cloud| {
        let found = cloud.balancers.values_mut().next().unwrap();
        found.placed.insert("subnet-c".to_owned(), None);
    });
    pause().await;
    apply(&aws, &service(&[TCP, UDP]), Compare::Remembered).await.unwrap();
    let subnets: Vec<String> = balancer(&cloud).placed.into_keys().collect();
    assert_eq!((subnets.len(), prefixes(&cloud).into_keys().collect()), (2, subnets));
}

#[tokio::test(start_paused = true)]
async fn given_prefixes_are_those_of_the_named_subnets() {
    let of = |subnets: &str, given: &str| {
        with(&[(SUBNETS, subnets), (SOURCE_NAT_PREFIXES, given)], service(&[UDP]))
    };
    let [one, two] = GIVEN.map(|text| text.parse::<Ipv6Net>().unwrap());
    let (cloud, aws) = in_place(&of("subnet-b,name-a", &format!("{one},auto_assigned"))).await;
    let before = prefixes(&cloud);
    assert!(before["subnet-b"] == one && before["subnet-a"] != one);
    // A new zone with its prefix, and another prefix in one that stays.
    for (subnets, given, expected) in [
        ("subnet-b,name-a,subnet-c", format!("{one},auto_assigned,{two}"), [before["subnet-a"], one, two]),
        ("subnet-a,subnet-b,subnet-c", format!("{two},auto_assigned,{two}"), [two, one, two]),
    ] {
        let lb = of(subnets, &given);
        let outcome = apply(&aws, &lb, Compare::Remembered).await.unwrap();
        let found: Vec<Ipv6Net> = prefixes(&cloud).into_values().collect();
        assert_eq!((outcome.incomplete, made(&cloud)), (None, vec!["SetSubnets"]));
        assert_eq!(found, expected);
        settles(&cloud, &lb, subnets).await;
    }
}

/// A listener with UDP of a load balancer with IPv6 that has no source NAT, or targets with IPv4.
fn breaks_udp(cloud: &Cloud) -> bool {
    cloud.listeners.values().filter(|found| found.protocol.ends_with("UDP")).any(|listener| {
        let found = &cloud.balancers[&listener.balancer];
        let is_dual = found.ip_address_type == IpAddressType::DualStack;
        is_dual && (!found.source_nat.is_on() || !cloud.groups[&listener.group].is_ipv6)
    })
}

/// The process dies at any call, before or after AWS handled it.
#[tokio::test(start_paused = true)]
async fn every_change_continues_after_a_crash() {
    let first = |lb: LoadBalancer| LoadBalancer { families: vec![Family::V4], ..lb };
    let named =
        |lb| with(&[(SUBNETS, "subnet-a,name-b"), (SOURCE_NAT_PREFIXES, "auto_assigned,auto_assigned")], lb);
    let changes_of = [
        (service(&[TCP]), service(&[TCP, UDP]), true),
        (service(&[TCP, UDP]), service(&[TCP]), false),
        (service(&[UDP, TCP_ON_UDP]), named(service(&[UDP])), true),
        // The first family of a Service changes by a detour over another type of Service.
        (service(&[TCP, UDP]), first(service(&[TCP, UDP])), false),
        (first(service(&[UDP, TCP])), service(&[TCP, UDP]), true),
        (first(service(&[UDP, TCP])), service(&[TCP]), false),
    ];
    for (number, (from, to, on)) in changes_of.iter().enumerate() {
        for fault in [Fault::Before, Fault::After] {
            for call in 0.. {
                let (cloud, aws) = in_place(from).await;
                cloud.set_invariant(Box::new(|_, after| breaks_udp(after).then(|| "broken".to_owned())));
                cloud.set_faults(Faults::Nth(call, fault));
                // Until the fault, and then never again by this process.
                while cloud.has_faults() {
                    let Progress::Again(after) = aws
                        .apply(to, Compare::Remembered)
                        .await
                        .map_or(Progress::Done, |outcome| outcome.progress)
                    else {
                        break;
                    };
                    tokio::time::sleep(after).await;
                }
                let was_hit = !cloud.has_faults();
                cloud.set_faults(Faults::None);
                tokio::time::sleep(Duration::from_secs(5)).await;
                let aws = provider(&cloud);
                let what = format!("change {number}, {fault:?} call {call}");
                for compare in [Compare::Remembered, Compare::InPlace] {
                    let outcome = apply(&aws, to, compare).await.expect(&what);
                    assert_eq!(outcome.incomplete, None, "{what}");
                    pause().await;
                }
                assert_eq!((is_on(&cloud), cloud.violations()), (*on, vec![]), "{what}");
                assert_eq!(cloud.cloud().listeners.len(), to.listeners.len(), "{what}");
                settles(&cloud, to, &what).await;
                if !was_hit {
                    assert!(call > 5, "{what}");
                    break;
                }
            }
        }
    }
}

/// No load balancer has UDP of both families: the present one goes when the next one only lacks its listener.
#[tokio::test(start_paused = true)]
async fn udp_stays_while_its_next_target_group_is_refused() {
    let of_v4 = |nodes: &[usize]| {
        let lb = planned(&[TCP, UDP]).with_nodes(set(nodes));
        LoadBalancer { families: vec![Family::V4], ..lb }
    };
    let cloud = standin_with(1, Quotas { groups: 2, ..Quotas::default() });
    zones::plant(&cloud);
    let aws = provider(&cloud);
    pause().await;
    apply(&aws, &of_v4(&[0, 1]), Compare::Remembered).await.unwrap();
    pause().await;
    let ports = |cloud: &StandIn| {
        let all = cloud.cloud().listeners.into_values().map(|found| (found.port, found.protocol));
        all.collect::<BTreeMap<_, _>>()
    };
    let before = ports(&cloud);
    let error = apply(&aws, &service(&[TCP, UDP]), Compare::Remembered).await.unwrap_err();
    assert_eq!((error.reason(), ports(&cloud)), (reasons::QUOTA_EXCEEDED, before), "{error}");
    assert!(error.to_string().contains("Served, but not as requested: port"), "{error}");
}

/// A member without UDP takes nothing from one with it, nor from one that is about to get it.
#[tokio::test(start_paused = true)]
async fn members_of_a_shared_load_balancer_turn_it_on_and_never_off() {
    for seed in 0..20 {
        let cloud = standin(seed);
        zones::plant(&cloud);
        let aws = shared::provider(&cloud);
        pause().await;
        let udp = |name: &str, port: u16| {
            let lb = sharing("dual", name, port);
            let of = planned(&[(Protocol::Udp, port, 30_000 + port)]).with_nodes(set(&[0]));
            LoadBalancer { listeners: of.listeners, groups: of.groups, families: vec![Family::V6], ..lb }
        };
        let tcp = sharing("dual", "a", 80);
        apply(&aws, &tcp, Compare::Remembered).await.unwrap();
        assert!(!is_on(&cloud));
        cloud.set_invariant(Box::new(|_, after| breaks_udp(after).then(|| "broken".to_owned())));
        let (one, other) = (udp("b", 53), udp("c", 54));
        let (first, second, third) = tokio::join!(
            apply(&aws, &one, Compare::Remembered),
            apply(&aws, &other, Compare::Remembered),
            apply(&aws, &tcp, Compare::InPlace),
        );
        for done in [first, second, third] {
            assert_eq!(done.unwrap().incomplete, None);
        }
        let chosen = prefixes(&cloud);
        pause().await;
        changes(&cloud);
        for lb in [&one, &tcp, &other] {
            apply(&aws, lb, Compare::InPlace).await.unwrap();
        }
        assert_eq!((changes(&cloud), prefixes(&cloud)), (vec![], chosen.clone()));
        for lb in [&one, &other] {
            delete(&aws, &lb.owner).await.unwrap();
            pause().await;
            apply(&shared::provider(&cloud), &tcp, Compare::InPlace).await.unwrap();
            assert_eq!(prefixes(&cloud), chosen, "another may be about to need it");
        }
        assert_eq!(cloud.violations(), [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn changes_of_others_are_repaired() {
    let (with_udp, without) = (service(&[TCP, UDP]), service(&[TCP]));
    let switch = |cloud: &StandIn, to: &SourceNat| {
        cloud.change(|cloud| cloud.balancers.values_mut().for_each(|found| found.source_nat = to.clone()));
    };
    let on = SourceNat::On(Prefixes::new());
    let (cloud, aws) = in_place(&without).await;
    switch(&cloud, &on);
    pause().await;
    // A listener of somebody else needs it.
    let foreign = cloud.cloud().listeners.into_values().next().unwrap();
    let udp = Forward { port: 99, protocol: "UDP".to_owned(), tags: Tags::new(), ..foreign };
    cloud.change(|cloud| drop(cloud.listeners.insert("listener/theirs".to_owned(), udp)));
    pause().await;
    let outcome = apply(&aws, &without, Compare::InPlace).await.unwrap();
    assert_eq!((is_on(&cloud), made(&cloud), outcome.incomplete), (true, vec![], None));
    cloud.change(|cloud| drop(cloud.listeners.remove("listener/theirs")));
    pause().await;
    apply(&aws, &without, Compare::InPlace).await.unwrap();
    assert_eq!((is_on(&cloud), made(&cloud)), (false, vec!["SetSubnets"]));
    // It was on, and somebody turned it off before the port with UDP came.
    let said = with(&[(SOURCE_NAT, "on")], service(&[TCP]));
    let (cloud, aws) = in_place(&said).await;
    switch(&cloud, &SourceNat::Off);
    pause().await;
    let refused = apply(&aws, &with_udp, Compare::Remembered).await.unwrap().incomplete;
    assert_eq!(refused.unwrap().0, "RejectedByProvider", "nobody read it");
    assert!(is_on(&cloud));
    assert_eq!(apply(&aws, &with_udp, Compare::InPlace).await.unwrap().incomplete, None);
    // Later AWS refuses that.
    let arn = cloud.cloud().balancers.into_keys().next().unwrap();
    let placed = balancer(&cloud).placed;
    assert!(cloud.set_subnets(&arn, &placed, None).await.is_err());
}

/// IPv6 for clients of targets with IPv4 excludes UDP.
#[tokio::test(start_paused = true)]
async fn udp_of_targets_with_ipv4_is_refused_on_a_load_balancer_with_ipv6() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let lb = LoadBalancer { families: vec![Family::V4, Family::V6], ..service(&[TCP, UDP]) };
    let error = apply(&aws, &lb, Compare::Remembered).await.unwrap_err();
    assert!(error.reason() == "ConflictingAnnotations" && error.to_string().contains("targets with IPv6"));
    let lb = with(&[(IP_ADDRESS_TYPE, "ipv4")], lb);
    apply(&aws, &lb, Compare::Remembered).await.unwrap();
    assert!(!is_on(&cloud));
    assert!(apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.is_ok());
}

/// AWS refuses what must come before the next UDP: the present one comes back, also if calls were throttled between.
#[tokio::test(start_paused = true)]
async fn udp_comes_back_if_its_load_balancer_cannot_change() {
    let of_v4 = LoadBalancer { families: vec![Family::V4], ..service(&[TCP, UDP]) };
    let ports = |cloud: &StandIn| {
        let all = cloud.cloud().listeners.into_values().map(|found| (found.port, found.protocol));
        all.collect::<BTreeMap<_, _>>()
    };
    for throttled in [false, true] {
        let (cloud, aws) = in_place(&of_v4).await;
        let before = ports(&cloud);
        cloud.change(|cloud| cloud.keeps_ip_address_types = true);
        if throttled {
            cloud.set_faults(Faults::Once("SetIpAddressType", Fault::Code("Throttling")));
            while cloud.has_faults() {
                let _ = aws.apply(&service(&[TCP, UDP]), Compare::Remembered).await;
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            assert_ne!(ports(&cloud), before, "it has gone for a moment");
        }
        let error = apply(&aws, &service(&[TCP, UDP]), Compare::Remembered).await.unwrap_err();
        assert_eq!((error.reason(), ports(&cloud)), (reasons::REJECTED_BY_PROVIDER, before), "{error}");
        cloud.change(|cloud| cloud.keeps_ip_address_types = false);
        pause().await;
        apply(&aws, &service(&[TCP, UDP]), Compare::InPlace).await.unwrap();
        settles(&cloud, &service(&[TCP, UDP]), "at last").await;
    }
}

/// AWS takes IPv6 away only after the last listener for it, and there is no room for any other before.
#[tokio::test(start_paused = true)]
async fn udp_of_the_other_family_comes_at_the_limit_of_listeners() {
    let of = |family, udp: &[u16], tcp: std::ops::Range<u16>| {
        let tcp = tcp.map(|port| (Protocol::Tcp, port, 30000 + port));
        let all: Vec<_> = udp.iter().map(|port| (Protocol::Udp, *port, 30000 + port)).chain(tcp).collect();
        LoadBalancer { families: vec![family], ..planned(&all).with_nodes(set(&[0])) }
    };
    let cloud = standin(1);
    cloud.set_unlimited();
    zones::plant(&cloud);
    let aws = provider(&cloud);
    pause().await;
    apply(&aws, &of(Family::V6, &[], 1..51), Compare::Remembered).await.unwrap();
    pause().await;
    let outcome = apply(&aws, &of(Family::V4, &[101, 102], 1..49), Compare::Remembered).await.unwrap();
    assert_eq!((outcome.incomplete, cloud.cloud().listeners.len()), (None, 50));
}

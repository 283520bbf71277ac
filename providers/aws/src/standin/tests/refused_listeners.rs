// SPDX-License-Identifier: Apache-2.0
//! AWS refuses one listener of a Service: the others become what is wanted, and it stays as it is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use steerage_model::{Family, Protocol};
use steerage_provider_api::{Compare, HealthState, LoadBalancer, Outcome, Progress, Provider as _};

use super::driver::{apply, apply_now, changes, delete, pause, provider, set, standin, standin_with, wanted};
use super::pods::with_pods;
use super::security_groups::{ALL, assert_empty, group, rule};
use super::shared::{self, has_ports, sharing};
use super::zones;
use crate::annotations::{SSL_CERT, SSL_PORTS, SUBNETS};
use crate::desired::tests::{planned, planned_with_pods};
use crate::ip_address_type::IpAddressType;
use crate::reasons;
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Quotas, StandIn};

pub(super) const GOOD: &str = "arn:aws:acm:::a";
pub(super) const MISSING: &str = "arn:aws:acm:::missing";

/// The ports, of which `tls` has TLS with this certificate.
pub(super) fn with_tls(mut lb: LoadBalancer, tls: &str, certificate: &str) -> LoadBalancer {
    lb.annotations.insert(SSL_CERT.to_owned(), certificate.to_owned());
    lb.annotations.insert(SSL_PORTS.to_owned(), tls.to_owned());
    lb
}

pub(super) fn web(certificate: &str) -> LoadBalancer {
    with_tls(wanted(&[(80, 30080), (81, 30081), (443, 30443)], &[0, 1]), "443", certificate)
}

/// The node port and the number of targets behind each port.
pub(super) fn served(cloud: &StandIn) -> BTreeMap<u16, (u16, usize)> {
    let cloud = cloud.cloud();
    let behind = |arn: &String| cloud.groups.get(arn).map(|group| (group.port, group.registered().count()));
    cloud.listeners.values().filter_map(|found| Some((found.port, behind(&found.group)?))).collect()
}

/// The reason and the message of what is not in place.
#[track_caller]
pub(super) fn refusal(outcome: &Outcome) -> (&'static str, &str) {
    let (reason, message) = outcome.incomplete.as_ref().unwrap();
    assert!(outcome.progress == Progress::Done && outcome.ingress.len() == 1, "{outcome:?}");
    (reason, message)
}

/// Counts it as a violation if a port loses its listener or its targets.
fn watch(cloud: &StandIn, port: u16) {
    cloud.set_invariant(Box::new(move |before, after| {
        let targets = |cloud: &crate::standin::Cloud| {
            let found = cloud.listeners.values().find(|found| found.port == port)?;
            Some(cloud.groups.get(&found.group)?.registered().count())
        };
        let is_lost = targets(before).is_some_and(|count| count > 0) && targets(after).unwrap_or(0) == 0;
        is_lost.then(|| format!("port {port} is cut off"))
    }));
}

#[tokio::test(start_paused = true)]
async fn new_load_balancer_serves_the_ports_that_aws_accepts() {
    for seed in 0..5 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let outcome = apply(&aws, &web(MISSING), Compare::Remembered).await.unwrap();
        let (reason, message) = refusal(&outcome);
        assert_eq!(reason, reasons::REJECTED_BY_PROVIDER);
        let begin = "AWS rejects the listener of port 443. Not served: port 443. AWS rejects the request: ";
        assert!(message.starts_with(begin) && message.contains("CertificateNotFound"), "{message}");
        assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (81, (30081, 2))]));
        pause().await;
        cloud.take_calls();
        // Targets follow, and ask AWS nothing else.
        let followed =
            apply(&aws, &web(MISSING).with_nodes(set(&[0, 1, 2])), Compare::Remembered).await.unwrap();
        assert_eq!(followed.incomplete, outcome.incomplete);
        assert_eq!(changes(&cloud), ["RegisterTargets"; 3]);
        pause().await;
        // A resync tries once.
        let compared =
            apply(&aws, &web(MISSING).with_nodes(set(&[0, 1, 2])), Compare::InPlace).await.unwrap();
        assert_eq!(compared.incomplete, outcome.incomplete);
        assert_eq!(changes(&cloud), ["CreateListener"]);
        let health = aws.target_health(&web("").owner).await.unwrap();
        assert!(health.targets.iter().all(|target| target.state != HealthState::Unused), "{health:?}");
        assert!(health.parts.iter().all(|part| !part.name.contains("443")), "{health:?}");
        watch(&cloud, 80);
        let corrected = apply(&aws, &web(GOOD).with_nodes(set(&[0, 1, 2])), Compare::Remembered).await;
        assert_eq!(corrected.unwrap().incomplete, None);
        assert_eq!(changes(&cloud), ["CreateListener"]);
        assert_eq!(served(&cloud)[&443], (30443, 3));
        assert_eq!(cloud.violations(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn restart_tries_the_refused_listener_once_and_changes_nothing_else() {
    for seed in 0..5 {
        let cloud = standin(seed);
        let first = apply(&provider(&cloud), &web(MISSING), Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_mins(10)).await;
        changes(&cloud);
        let aws = provider(&cloud);
        for compare in [Compare::Remembered, Compare::Remembered] {
            let outcome = apply(&aws, &web(MISSING), compare).await.unwrap();
            assert_eq!((&outcome.incomplete, &outcome.ingress), (&first.incomplete, &first.ingress));
        }
        assert_eq!(changes(&cloud), ["CreateListener"]);
        delete(&provider(&cloud), &web("").owner).await.unwrap();
        assert_empty(&cloud, "after the deletion by another process");
    }
}

#[tokio::test(start_paused = true)]
async fn deletion_removes_what_a_refused_listener_left() {
    for serves in [false, true] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        if serves {
            apply(&aws, &web(GOOD), Compare::Remembered).await.unwrap();
            pause().await;
        }
        let moved = with_tls(wanted(&[(80, 30080), (443, 31443)], &[0, 1]), "443", MISSING);
        apply(&aws, &moved, Compare::Remembered).await.unwrap();
        delete(&aws, &moved.owner).await.unwrap();
        assert_empty(&cloud, "after the deletion");
    }
}

/// Any one call fails beside the refusal.
#[tokio::test(start_paused = true)]
async fn failed_call_beside_a_refusal_leaves_the_same() {
    let moved = with_tls(wanted(&[(80, 31080), (443, 31443), (8443, 30445)], &[0, 1]), "443,8443", MISSING);
    for fault in [Fault::Before, Fault::After, Fault::Code("Throttling")] {
        for number in 0.. {
            let cloud = standin(number as u64);
            let aws = provider(&cloud);
            apply(&aws, &web(GOOD), Compare::Remembered).await.unwrap();
            pause().await;
            watch(&cloud, 443);
            cloud.set_faults(Faults::Nth(number, fault));
            let outcome = apply(&aws, &moved, Compare::Remembered).await.unwrap();
            let is_over = cloud.has_faults();
            cloud.set_faults(Faults::None);
            let states = "Not served: port 8443. Served, but not as requested: port 443. Not requested any more, but served until \
                          AWS accepts the others: port 81. AWS";
            assert!(refusal(&outcome).1.contains(states), "{number} {fault:?}: {outcome:?}");
            let ports = [(80, (31080, 2)), (81, (30081, 2)), (443, (30443, 2))];
            assert_eq!(served(&cloud), BTreeMap::from(ports), "{number} {fault:?}");
            assert_eq!(cloud.violations(), Vec::<String>::new(), "{number} {fault:?}");
            delete(&aws, &moved.owner).await.unwrap();
            assert_empty(&cloud, "after the deletion");
            if is_over {
                break;
            }
        }
    }
}

/// The node port of the refused port changes: its listener keeps the old target group, with targets that follow.
#[tokio::test(start_paused = true)]
async fn refused_listener_keeps_its_target_group_while_others_switch() {
    for restarts in [false, true] {
        let cloud = standin(1);
        let mut aws = provider(&cloud);
        apply(&aws, &web(GOOD), Compare::Remembered).await.unwrap();
        pause().await;
        watch(&cloud, 443);
        let moved = with_tls(wanted(&[(80, 31080), (443, 31443)], &[0, 1]), "443", MISSING);
        let outcome = apply(&aws, &moved, Compare::Remembered).await.unwrap();
        let (_, message) = refusal(&outcome);
        assert!(message.contains("port 443. Served, but not as requested: port 443. AWS "), "{message}");
        assert_eq!(served(&cloud), BTreeMap::from([(80, (31080, 2)), (443, (30443, 2))]));
        tokio::time::sleep(Duration::from_mins(10)).await;
        apply(&aws, &moved, Compare::InPlace).await.unwrap();
        let ports = |cloud: &StandIn| {
            let mut ports: Vec<_> = cloud.cloud().groups.values().map(|group| group.port).collect();
            ports.sort_unstable();
            ports
        };
        assert_eq!(ports(&cloud), [30443, 31080, 31443], "those that no listener needs are gone");
        pause().await;
        changes(&cloud);
        if restarts {
            aws = provider(&cloud);
            let again = apply(&aws, &moved, Compare::Remembered).await.unwrap();
            assert_eq!(again.incomplete, outcome.incomplete);
            assert_eq!(changes(&cloud), ["ModifyListener"]);
        }
        apply(&aws, &moved.clone().with_nodes(set(&[1, 2])), Compare::Remembered).await.unwrap();
        assert_eq!(served(&cloud), BTreeMap::from([(80, (31080, 2)), (443, (30443, 2))]));
        changes(&cloud);
        let corrected = with_tls(moved, "443", GOOD).with_nodes(set(&[1, 2]));
        let outcome = apply(&aws, &corrected, Compare::Remembered).await.unwrap();
        assert_eq!(outcome.incomplete, None);
        assert_eq!(changes(&cloud), ["ModifyListener", "DeleteTargetGroup"]);
        assert_eq!(served(&cloud), BTreeMap::from([(80, (31080, 2)), (443, (31443, 2))]));
        assert_eq!((ports(&cloud).len(), cloud.violations()), (2, Vec::<String>::new()));
    }
}

/// A port may have become another one, which AWS refuses. The old one is served until then, and goes where no new one is refused.
#[tokio::test(start_paused = true)]
async fn port_that_moved_stays_until_the_new_one_is_accepted() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &web(GOOD), Compare::Remembered).await.unwrap();
    pause().await;
    let fewer = with_tls(wanted(&[(80, 30080), (443, 30443)], &[0, 1]), "443", MISSING);
    apply(&aws, &fewer, Compare::Remembered).await.unwrap();
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (443, (30443, 2))]));
    let rules =
        |cloud: &StandIn| [80, 81, 443, 8443].map(|port| group(cloud).own.contains(&rule("tcp", port, ALL)));
    assert_eq!(rules(&cloud), [true, false, true, false]);
    let moved = |certificate| with_tls(wanted(&[(80, 30080), (8443, 30443)], &[0, 1]), "8443", certificate);
    let outcome = apply(&aws, &moved(MISSING), Compare::Remembered).await.unwrap();
    let states = "Not served: port 8443. Not requested any more, but served until AWS accepts the others: port 443. AWS";
    assert!(refusal(&outcome).1.contains(states), "{outcome:?}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (443, (30443, 2))]));
    assert_eq!(rules(&cloud), [true, false, true, true], "clients may connect");
    let outcome = apply(&aws, &moved(GOOD), Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete, None);
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (8443, (30443, 2))]));
    assert_eq!(rules(&cloud), [true, false, false, true]);
}

/// No port is served, so no address is published.
#[tokio::test(start_paused = true)]
async fn service_all_of_whose_listeners_are_rejected_alike_costs_two_calls() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let ports: Vec<_> = (0..20).map(|i| (80 + i, 30_000 + i)).collect();
    let all = with_tls(wanted(&ports, &[0]), "*", MISSING);
    let error = apply(&aws, &all, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), reasons::REJECTED_BY_PROVIDER);
    assert!(error.to_string().contains("port 80. Not served: ports 80, 81, 82,"), "{error}");
    let tried = changes(&cloud).iter().filter(|call| **call == "CreateListener").count();
    assert_eq!((tried, cloud.cloud().listeners.len()), (2, 0));
    // One port more, without TLS: the others still do not cost a call each.
    let ports: Vec<_> = (0..21).map(|i| (80 + i, 30_000 + i)).collect();
    let names: Vec<_> = ports[..20].iter().map(|(port, _)| port.to_string()).collect();
    let all_but_one = with_tls(wanted(&ports, &[0]), &names.join(","), MISSING);
    let outcome = apply(&aws, &all_but_one, Compare::Remembered).await.unwrap();
    assert!(refusal(&outcome).1.contains("98, 99. AWS rejects"), "{outcome:?}");
    let tried = changes(&cloud).iter().filter(|call| **call == "CreateListener").count();
    assert_eq!((tried, served(&cloud)), (3, BTreeMap::from([(100, (30020, 1))])));
}

/// A quota leaves room for some of the ports.
#[tokio::test(start_paused = true)]
async fn ports_are_served_up_to_the_quota_of_listeners() {
    let cloud = standin_with(1, Quotas { listeners: 2, ..Quotas::default() });
    let aws = provider(&cloud);
    let ports = [(80, 30080), (81, 30081), (82, 30082)];
    let outcome = apply(&aws, &wanted(&ports, &[0]), Compare::Remembered).await.unwrap();
    assert_eq!(refusal(&outcome).0, reasons::QUOTA_EXCEEDED);
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 1)), (81, (30081, 1))]));
}

/// A port with both protocols is one listener. AWS refuses to take one of them away: clients of both may still connect.
#[tokio::test(start_paused = true)]
async fn refused_change_of_protocols_keeps_the_rules_of_both() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let both = [(Protocol::Tcp, 53, 30053), (Protocol::Udp, 53, 30053), (Protocol::Tcp, 80, 30080)];
    apply(&aws, &planned(&both).with_nodes(set(&[0])), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Once("ModifyListener", Fault::Code("InvalidConfigurationRequest")));
    let changed = [(Protocol::Udp, 53, 30053), (Protocol::Tcp, 80, 31080)];
    let changed = planned(&changed).with_nodes(set(&[0]));
    let outcome = apply(&aws, &changed, Compare::Remembered).await.unwrap();
    assert!(refusal(&outcome).1.contains("Served, but not as requested: port 53."), "{outcome:?}");
    assert_eq!(served(&cloud), BTreeMap::from([(53, (30053, 1)), (80, (31080, 1))]));
    let rules =
        |cloud: &StandIn| ["tcp", "udp"].map(|protocol| group(cloud).own.contains(&rule(protocol, 53, ALL)));
    assert_eq!(rules(&cloud), [true, true]);
    pause().await;
    let outcome = apply(&aws, &changed, Compare::InPlace).await.unwrap();
    assert_eq!((outcome.incomplete, rules(&cloud)), (None, [false, true]));
}

/// Pods instead of nodes are wanted, and one listener keeps its nodes: the controller must give both kinds, so the Service is refused.
#[tokio::test(start_paused = true)]
async fn listener_that_keeps_targets_of_another_kind_refuses_the_service() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080), (81, 30081)], &[0, 1]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Once("ModifyListener", Fault::Code("InvalidConfigurationRequest")));
    let pods = planned_with_pods(&[(Protocol::Tcp, 80, 8080), (Protocol::Tcp, 81, 8081)]);
    let pods = with_pods(&pods, &[0, 1]);
    let error = apply_now(&aws, &pods, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), reasons::REJECTED_BY_PROVIDER, "{error}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (30080, 2)), (81, (8081, 2))]));
    pause().await;
    assert_eq!(apply(&aws, &pods, Compare::InPlace).await.unwrap().incomplete, None);
    assert_eq!(served(&cloud), BTreeMap::from([(80, (8080, 2)), (81, (8081, 2))]));
}

/// The targets of a port of pods that is no longer requested are not given, so they would not be followed.
#[tokio::test(start_paused = true)]
async fn listener_that_keeps_pods_of_another_port_refuses_the_service() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let of = |a, b| with_pods(&planned_with_pods(&[(Protocol::Tcp, 80, a), (Protocol::Tcp, 81, b)]), &[0, 1]);
    apply(&aws, &of(8080, 8081), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Once("ModifyListener", Fault::Code("InvalidConfigurationRequest")));
    let changed = of(9090, 9091);
    let error = apply_now(&aws, &changed, Compare::Remembered).await.unwrap_err();
    assert_eq!(error.reason(), reasons::REJECTED_BY_PROVIDER, "{error}");
    assert_eq!(served(&cloud), BTreeMap::from([(80, (8080, 2)), (81, (9091, 2))]));
    pause().await;
    assert_eq!(apply(&aws, &changed, Compare::InPlace).await.unwrap().incomplete, None);
    assert_eq!(served(&cloud), BTreeMap::from([(80, (9090, 2)), (81, (9091, 2))]));
}

/// Clients learn of IPv6 only when everything for it is there. That has nothing to do with a refused listener.
#[tokio::test(start_paused = true)]
async fn refused_listener_hides_no_failure_of_the_subnets() {
    let cloud = standin(1);
    zones::plant(&cloud);
    let aws = provider(&cloud);
    pause().await;
    let of = |certificate, subnets: &str, families: &[Family]| {
        let mut lb = web(certificate);
        lb.annotations.insert(SUBNETS.to_owned(), subnets.to_owned());
        LoadBalancer { families: families.to_vec(), ..lb }
    };
    apply(&aws, &of(GOOD, "subnet-a", &[Family::V4]), Compare::Remembered).await.unwrap();
    pause().await;
    cloud.set_faults(Faults::Once("SetSubnets", Fault::Code("InvalidSubnet")));
    let changed = of(MISSING, "subnet-a,subnet-b", &[Family::V4, Family::V6]);
    let outcome = apply(&aws, &changed, Compare::Remembered).await.unwrap();
    let (_, message) = refusal(&outcome);
    assert!(message.contains("CertificateNotFound") && message.contains("InvalidSubnet"), "{message}");
    let kind = |cloud: &StandIn| cloud.cloud().balancers.into_values().next().unwrap().ip_address_type;
    assert_eq!(kind(&cloud), IpAddressType::Ipv4);
    pause().await;
    let outcome = apply(&aws, &changed, Compare::InPlace).await.unwrap();
    let (_, message) = refusal(&outcome);
    assert!(message.contains("CertificateNotFound") && !message.contains("InvalidSubnet"), "{message}");
    assert_eq!(kind(&cloud), IpAddressType::DualStack);
}

#[tokio::test(start_paused = true)]
async fn refused_listener_holds_up_no_other_service_of_a_shared_load_balancer() {
    for seed in 0..5 {
        let cloud: Arc<StandIn> = standin(seed);
        let aws = shared::provider(&cloud);
        let a = |certificate| {
            let LoadBalancer { owner, annotations, .. } = sharing("web", "a", 80);
            let lb = wanted(&[(80, 30080), (443, 30443)], &[0, 1]);
            with_tls(LoadBalancer { owner, annotations, ..lb }, "443", certificate)
        };
        let b = sharing("web", "b", 81);
        let refused = a(MISSING);
        let (first, second) =
            tokio::join!(apply(&aws, &refused, Compare::Remembered), apply(&aws, &b, Compare::Remembered));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(refusal(&first).1.contains("Not served: port 443."), "{first:?}");
        assert_eq!((&second.incomplete, &second.ingress), (&None, &first.ingress));
        has_ports(&cloud, &[(80, "shop/a"), (81, "shop/b")], "the accepted ones");
        pause().await;
        changes(&cloud);
        // Another process too.
        let aws = shared::provider(&cloud);
        assert_eq!(apply(&aws, &b, Compare::Remembered).await.unwrap().incomplete, None);
        let again = apply(&aws, &refused, Compare::Remembered).await.unwrap();
        assert_eq!(again.incomplete, first.incomplete);
        assert_eq!(changes(&cloud), ["CreateListener"]);
        shared::watch(&cloud, "shop/b");
        if seed % 2 == 0 {
            assert_eq!(apply(&aws, &a(GOOD), Compare::Remembered).await.unwrap().incomplete, None);
            has_ports(&cloud, &[(80, "shop/a"), (81, "shop/b"), (443, "shop/a")], "corrected");
        }
        delete(&aws, &refused.owner).await.unwrap();
        has_ports(&cloud, &[(81, "shop/b")], "without the first");
        assert_eq!(cloud.violations(), Vec::<String>::new());
        delete(&aws, &b.owner).await.unwrap();
        assert_empty(&cloud, "after both");
    }
}

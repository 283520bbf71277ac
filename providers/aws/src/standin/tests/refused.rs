// SPDX-License-Identifier: Apache-2.0
//! A Service that AWS refuses again and again takes no more than its share of the account.

use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::{
    Compare, Error, GroupTargets, HealthState, LoadBalancer, Outcome, Progress, Provider as _,
};

use super::driver::{
    apply, apply_now, changes, delete, own_set, pause, provider, standin, standin_with, wanted,
};
use super::security_groups::assert_empty;
use crate::annotations::SSL_CERT;
use crate::reasons;
use crate::standin::cloud::Group;
use crate::standin::{Fault, Faults, Quotas, StandIn};

const PORTS: u16 = 20;

/// Ports with TLS, on other node ports in each generation. The certificate may be one that AWS does not know.
fn with_tls(generation: u16, certificate: &str) -> LoadBalancer {
    let ports: Vec<_> = (0..PORTS).map(|i| (80 + i, 30_000 + generation * 100 + i)).collect();
    let mut lb = wanted(&ports, &[0, 1]);
    lb.annotations.insert(SSL_CERT.to_owned(), certificate.to_owned());
    lb
}

/// Why AWS refuses the Service, or some of its listeners.
fn refused(answer: &Result<Outcome, Error>) -> Option<&'static str> {
    match answer {
        Ok(outcome) => outcome.incomplete.as_ref().map(|(reason, _)| *reason),
        Err(error) => Some(error.reason()),
    }
}

fn unlimited() -> Arc<StandIn> {
    let cloud = standin(1);
    cloud.set_unlimited();
    cloud
}

fn reads(cloud: &StandIn) -> usize {
    cloud.take_calls().iter().filter(|call| !call.kind.is_write()).count()
}

/// The Service is refused while AWS still creates its load balancer, which is kept: clients need its name.
#[tokio::test(start_paused = true)]
async fn load_balancer_of_a_refused_service_is_published_when_it_is_active() {
    let cloud = unlimited();
    let aws = provider(&cloud);
    let lb = wanted(&[(80, 30080)], &[0, 1]);
    let made = apply_now(&aws, &lb, Compare::Remembered).await.unwrap();
    assert!(made.ingress.is_empty() && made.progress != Progress::Done, "{made:?}");
    let targets = GroupTargets { nodes: Some(own_set(&[0, 2])), ..GroupTargets::default() };
    let kept = loop {
        let kept = aws.set_targets(&lb.owner, &targets).await.unwrap();
        match kept.progress {
            Progress::Done => break kept,
            Progress::Again(after) => tokio::time::sleep(after).await,
        }
    };
    assert!(kept.ingress.first().is_some_and(|ingress| ingress.hostname.is_some()), "{kept:?}");
    // It stays so, without another read.
    reads(&cloud);
    let again = aws.set_targets(&lb.owner, &targets).await.unwrap();
    assert_eq!((again.ingress, reads(&cloud)), (kept.ingress, 0));
}

/// The same where another process takes over before it is active. It knows no listeners, but the list of the start says that there is one.
#[tokio::test(start_paused = true)]
async fn load_balancer_of_a_refused_service_is_published_after_a_restart() {
    let cloud = unlimited();
    let lb = wanted(&[(80, 30080)], &[0, 1]);
    apply_now(&provider(&cloud), &lb, Compare::Remembered).await.unwrap();
    pause().await;
    let aws = provider(&cloud);
    let targets = GroupTargets { nodes: Some(own_set(&[0, 2])), ..GroupTargets::default() };
    let kept = loop {
        let kept = aws.set_targets(&lb.owner, &targets).await.unwrap();
        match kept.progress {
            Progress::Done => break kept,
            Progress::Again(after) => tokio::time::sleep(after).await,
        }
    };
    assert!(kept.ingress.first().is_some_and(|ingress| ingress.hostname.is_some()), "{kept:?}");
}

/// The user names a certificate that does not exist, and patches the ports again and again. The earlier ports serve meanwhile, if there
/// are any.
#[tokio::test(start_paused = true)]
async fn refused_service_uses_up_no_target_groups() {
    for serves in [false, true] {
        let cloud = unlimited();
        let aws = provider(&cloud);
        let in_place = if serves { usize::from(PORTS) } else { 0 };
        if serves {
            apply(&aws, &with_tls(0, "arn:aws:acm:::a"), Compare::Remembered).await.unwrap();
            pause().await;
        }
        for generation in 1..10 {
            let lb = with_tls(generation, "arn:aws:acm:::missing");
            let answer = apply(&aws, &lb, Compare::Remembered).await;
            assert_eq!(refused(&answer), Some(reasons::REJECTED_BY_PROVIDER), "{answer:?}");
            assert_eq!(answer.is_ok(), serves, "{answer:?}");
            assert_eq!(cloud.cloud().groups.len(), in_place + usize::from(PORTS), "serves: {serves}");
            pause().await;
        }
        // The resync compares, and need not read everything.
        reads(&cloud);
        let answer = apply(&aws, &with_tls(9, "arn:aws:acm:::missing"), Compare::InPlace).await;
        assert!(refused(&answer).is_some(), "{answer:?}");
        let compared = reads(&cloud);
        // The targets of a Service that serves are compared too.
        assert!(compared <= 4 + 2 * in_place, "{compared} reads");
        let listeners = cloud.cloud().listeners;
        assert_eq!(listeners.len(), in_place, "serves: {serves}");
        pause().await;
        if serves {
            apply(&aws, &with_tls(1, "arn:aws:acm:::a"), Compare::Remembered).await.unwrap();
            assert_eq!(cloud.cloud().groups.len(), usize::from(PORTS));
            pause().await;
        }
        reads(&cloud);
        delete(&aws, &with_tls(0, "").owner).await.unwrap();
        // The tags of the load balancer and its groups, and the security group.
        let looked = reads(&cloud);
        assert!(looked <= 5, "{looked} reads");
        assert_empty(&cloud, "after the deletion");
    }
}

/// Established connections live on the old groups until those that replaced them have a healthy target. What comes after these is
/// refused, and takes nothing from that time.
#[tokio::test(start_paused = true)]
async fn groups_that_just_left_stay_while_later_changes_are_refused() {
    let cloud = unlimited();
    let aws = provider(&cloud);
    apply(&aws, &with_tls(0, "arn:aws:acm:::a"), Compare::Remembered).await.unwrap();
    pause().await;
    apply_now(&aws, &with_tls(1, "arn:aws:acm:::a"), Compare::Remembered).await.unwrap();
    let old = |cloud: &StandIn| cloud.cloud().groups.values().filter(|group| group.port < 30_100).count();
    for generation in 2..4 {
        let lb = with_tls(generation, "arn:aws:acm:::missing");
        assert!(refused(&apply_now(&aws, &lb, Compare::InPlace).await).is_some());
        assert_eq!(old(&cloud), usize::from(PORTS), "connections live there");
        pause().await;
    }
    tokio::time::sleep(Duration::from_mins(2)).await;
    let lb = with_tls(4, "arn:aws:acm:::missing");
    assert!(refused(&apply_now(&aws, &lb, Compare::InPlace).await).is_some());
    assert_eq!((old(&cloud), cloud.cloud().groups.len()), (0, 2 * usize::from(PORTS)));
}

/// Under `health-check` steering a try registers all nodes, and after its refusal the controller asks for those with an endpoint: nobody
/// knows which check is in place. In groups that no listener uses that would be calls for nothing, at each try.
#[tokio::test(start_paused = true)]
async fn refused_tries_do_not_register_and_remove_nodes_in_turn() {
    let of = |certificate: &str, nodes: &[usize]| {
        let mut lb = wanted(&[(443, 30443), (8443, 30444)], nodes);
        lb.annotations.insert(SSL_CERT.to_owned(), certificate.to_owned());
        lb
    };
    let cloud = unlimited();
    let aws = provider(&cloud);
    let targets =
        |cloud: &StandIn| changes(cloud).iter().filter(|call| call.ends_with("egisterTargets")).count();
    let refused = of("arn:aws:acm:::missing", &[0, 1, 2]);
    for (number, expected) in [2, 0, 0].into_iter().enumerate() {
        apply_now(&aws, &refused, Compare::InPlace).await.unwrap_err();
        aws.set_targets(&refused.owner, &GroupTargets::of_nodes(own_set(&[1]))).await.unwrap();
        assert_eq!(targets(&cloud), expected, "try {number}");
        pause().await;
    }
    // No client reaches a node that is no target any more.
    cloud.set_invariant(Box::new(|_, after| {
        let used = after.listeners.values().filter_map(|found| after.groups.get(&found.group));
        let stale = used.flat_map(Group::registered).find(|id| *id == "i-0");
        stale.map(|id| format!("a listener forwards to {id}"))
    }));
    apply(&aws, &of("arn:aws:acm:::a", &[1, 2]), Compare::Remembered).await.unwrap();
    for group in cloud.cloud().groups.values() {
        assert_eq!(group.registered().collect::<Vec<_>>(), ["i-1", "i-2"]);
    }
    assert_eq!(cloud.violations(), Vec::<String>::new());
}

/// Another process does not know which groups were not followed.
#[tokio::test(start_paused = true)]
async fn restart_lets_no_listener_lead_to_a_node_that_left() {
    let of = |certificate: &str, nodes: &[usize]| {
        let mut lb = wanted(&[(443, 30443), (8443, 30444)], nodes);
        lb.annotations.insert(SSL_CERT.to_owned(), certificate.to_owned());
        lb
    };
    let cloud = unlimited();
    apply_now(&provider(&cloud), &of("arn:aws:acm:::missing", &[0, 1, 2]), Compare::InPlace)
        .await
        .unwrap_err();
    pause().await;
    cloud.set_invariant(Box::new(|_, after| {
        let used = after.listeners.values().filter_map(|found| after.groups.get(&found.group));
        let stale = used.flat_map(Group::registered).find(|id| *id == "i-0");
        stale.map(|id| format!("a listener forwards to {id}"))
    }));
    apply(&provider(&cloud), &of("arn:aws:acm:::a", &[1, 2]), Compare::Remembered).await.unwrap();
    assert_eq!(cloud.violations(), Vec::<String>::new());
}

/// Nodes leave a group that a listener may use: a read a moment after the change does not show it, or the listener forwards to several.
#[tokio::test(start_paused = true)]
async fn group_that_a_read_does_not_show_in_use_is_followed() {
    let of = |certificate: &str, nodes: &[usize]| {
        let mut lb = wanted(&[(80, 30080), (443, 30443)], nodes);
        lb.annotations.insert(SSL_CERT.to_owned(), certificate.to_owned());
        lb.annotations.insert(crate::annotations::SSL_PORTS.to_owned(), "443".to_owned());
        lb
    };
    for seed in 0..10 {
        let cloud = standin(seed);
        cloud.set_unlimited();
        let aws = provider(&cloud);
        let lb = of("arn:aws:acm:::a", &[0, 1]);
        cloud.set_faults(Faults::Once("CreateListener", Fault::After));
        while cloud.has_faults() {
            let _ = aws.apply(&lb, Compare::Remembered).await;
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        }
        let targets = GroupTargets::of_nodes(own_set(&[1]));
        loop {
            match aws.set_targets(&lb.owner, &targets).await {
                Ok(outcome) if outcome.progress == Progress::Done => break,
                _ => tokio::time::sleep(std::time::Duration::from_millis(500)).await,
            }
        }
        let cloud = cloud.cloud();
        for group in cloud.listeners.values().map(|found| &cloud.groups[&found.group]) {
            assert_eq!(group.registered().collect::<Vec<_>>(), ["i-1"], "{seed}");
        }
    }
}

/// There is no room for another group while an old one waits to leave. The next try finds it.
#[tokio::test(start_paused = true)]
async fn group_that_left_makes_room_at_the_quota() {
    let cloud = standin_with(1, Quotas { groups: 2, ..Quotas::default() });
    let aws = provider(&cloud);
    apply(&aws, &wanted(&[(80, 30080)], &[0]), Compare::Remembered).await.unwrap();
    pause().await;
    apply_now(&aws, &wanted(&[(80, 30081)], &[0]), Compare::Remembered).await.unwrap();
    let third = wanted(&[(80, 30082)], &[0]);
    let outcome = apply_now(&aws, &third, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete.unwrap().0, reasons::QUOTA_EXCEEDED);
    tokio::time::sleep(Duration::from_mins(10)).await;
    changes(&cloud);
    let outcome = apply_now(&aws, &third, Compare::Remembered).await.unwrap();
    assert_eq!(outcome.incomplete, None);
    assert_eq!(changes(&cloud)[..2], ["DeleteTargetGroup", "CreateTargetGroup"]);
}

/// AWS checks no target of a group that no listener uses.
#[tokio::test(start_paused = true)]
async fn refused_listener_does_not_make_the_other_ports_look_unhealthy() {
    let cloud = standin_with(1, Quotas::default());
    let aws = provider(&cloud);
    let ports = [(80, 30080), (81, 30081)];
    apply(&aws, &wanted(&ports[..1], &[0, 1]), Compare::Remembered).await.unwrap();
    tokio::time::sleep(Duration::from_mins(10)).await;
    cloud.set_faults(Faults::Once("CreateListener", Fault::Code("TooManyListeners")));
    let answer = apply(&aws, &wanted(&ports, &[0, 1]), Compare::Remembered).await;
    assert_eq!(refused(&answer), Some(reasons::QUOTA_EXCEEDED), "{answer:?}");
    let health = aws.target_health(&wanted(&ports, &[]).owner).await.unwrap();
    let states: Vec<_> = health.targets.iter().map(|target| target.state).collect();
    assert_eq!(states, [HealthState::Healthy; 2]);
}

// SPDX-License-Identifier: Apache-2.0
//! Load balancers that several Services share: each has its own ports there and touches no other's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use steerage_model::Key;
use steerage_model::annotations::SHARED_LOAD_BALANCER;
use steerage_provider_api::{Compare, LoadBalancer, Owner, Provider as _};
use steerage_provider_cloud::marks;

use super::driver::{apply, changes, delete, pause, set, standin, wanted};
use super::security_groups::assert_empty;
use crate::Aws;
use crate::config::Config;
use crate::desired::tests::config;
use crate::standin::faults::{Fault, Faults};
use crate::standin::harness::start_instances;
use crate::standin::snapshot::snapshot;
use crate::standin::{Cloud, Delays, StandIn};
use crate::{reasons, shared};

const FILE: &str = r#"{
    "web": {"namespaces": ["*"], "annotations": {"service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true"}},
    "dual": {"namespaces": ["*"], "annotations": {
        "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true",
        "service.beta.kubernetes.io/aws-load-balancer-ip-address-type": "dualstack"}},
    "kept": {"namespaces": ["*"], "annotations": {
        "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true",
        "service.beta.kubernetes.io/aws-load-balancer-attributes": "deletion_protection.enabled=true"}}
}"#;

pub(super) fn provider(cloud: &Arc<StandIn>) -> Aws {
    Aws::over(config_of_web(), Arc::clone(cloud) as _)
}

/// With the shared load balancers of these tests.
pub(super) fn config_of_web() -> Config {
    let shared_load_balancers = shared::read(FILE, &config()).unwrap();
    Config { shared_load_balancers, ..config() }
}

/// A Service of this name with one port, at the shared load balancer.
pub(super) fn sharing(shared: &str, service: &str, port: u16) -> LoadBalancer {
    let mut lb = wanted(&[(port, 30_000 + port)], &[0, 1]);
    lb.owner = Owner { service: Key::new("shop", service), uid: format!("uid-{service}") };
    lb.annotations.insert(SHARED_LOAD_BALANCER.to_owned(), shared.to_owned());
    lb
}

/// The ports with the Service of each, and the names of the load balancers.
fn ports(cloud: &Cloud) -> BTreeMap<u16, String> {
    let service = |tags: &crate::client::Tags| tags.get(marks::SERVICE).cloned().unwrap_or_default();
    cloud.listeners.values().map(|found| (found.port, service(&found.tags))).collect()
}

pub(super) fn has_ports(cloud: &StandIn, wanted: &[(u16, &str)], what: &str) {
    let wanted = wanted.iter().map(|(port, service)| (*port, (*service).to_owned())).collect();
    assert_eq!(ports(&cloud.cloud()), wanted, "{what}");
}

/// Counts it as a violation if a Service's port goes, or loses its targets, without that Service being deleted.
pub(super) fn watch(cloud: &StandIn, service: &'static str) {
    cloud.set_invariant(Box::new(move |before, after| {
        let of = |cloud: &Cloud| {
            let mut own = cloud
                .listeners
                .values()
                .filter(|f| f.tags.get(marks::SERVICE).is_some_and(|of| of == service));
            own.next().map(|f| cloud.groups.get(&f.group).map_or(0, |group| group.registered().count()))
        };
        (of(before).is_some_and(|targets| targets > 0) && of(after).unwrap_or(0) == 0)
            .then(|| format!("{service} is cut off"))
    }));
}

#[tokio::test(start_paused = true)]
async fn services_share_one_load_balancer_and_one_hostname() {
    for seed in 0..20 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
        // At the same time.
        let (first, second) =
            tokio::join!(apply(&aws, &a, Compare::Remembered), apply(&aws, &b, Compare::Remembered));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(first.ingress == second.ingress && !first.ingress.is_empty(), "{first:?} {second:?}");
        assert_eq!(cloud.cloud().balancers.len(), 1);
        has_ports(&cloud, &[(80, "shop/a"), (443, "shop/b")], "both");
        pause().await;
        changes(&cloud);
        for lb in [&a, &b] {
            apply(&aws, lb, Compare::InPlace).await.unwrap();
        }
        assert!(changes(&cloud).is_empty(), "nothing is wanted");
        watch(&cloud, "shop/b");
        delete(&aws, &a.owner).await.unwrap();
        has_ports(&cloud, &[(443, "shop/b")], "the other stays");
        apply(&aws, &b, Compare::InPlace).await.unwrap();
        assert_eq!(cloud.violations(), Vec::<String>::new());
        delete(&aws, &b.owner).await.unwrap();
        assert_empty(&cloud, "after the last");
    }
}

/// No tenant takes another's port, whoever asks again or restarts.
#[tokio::test(start_paused = true)]
async fn port_is_the_first_services_until_it_leaves() {
    for seed in 0..20 {
        let cloud = standin(seed);
        let aws = provider(&cloud);
        let (a, mut b) = (sharing("web", "a", 80), sharing("web", "b", 80));
        apply(&aws, &a, Compare::Remembered).await.unwrap();
        watch(&cloud, "shop/a");
        for (aws, compare) in
            [(&aws, Compare::Remembered), (&aws, Compare::InPlace), (&provider(&cloud), Compare::Remembered)]
        {
            let refused = apply(aws, &b, compare).await.unwrap_err();
            assert_eq!(refused.reason(), reasons::PORT_IN_USE, "{refused}");
            assert!(!refused.to_string().contains("shop/a"), "{refused}");
            has_ports(&cloud, &[(80, "shop/a")], "the first");
        }
        let other = std::mem::replace(&mut b, sharing("web", "b", 81));
        apply(&aws, &b, Compare::Remembered).await.unwrap();
        has_ports(&cloud, &[(80, "shop/a"), (81, "shop/b")], "another port");
        assert_eq!(cloud.violations(), Vec::<String>::new());
        let mut called = aws.changes();
        apply(&aws, &other, Compare::InPlace).await.unwrap_err();
        delete(&aws, &a.owner).await.unwrap();
        assert_eq!(called.next().await, Some(other.owner.clone()));
        apply(&aws, &other, Compare::InPlace).await.unwrap();
        has_ports(&cloud, &[(80, "shop/b")], "the first has left");
    }
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_everything_and_deletes_what_is_deleted_then() {
    for seed in 0..20 {
        let cloud = standin(seed);
        let services: Vec<LoadBalancer> =
            [("a", 80), ("b", 443), ("c", 53)].map(|(name, port)| sharing("web", name, port)).into();
        for lb in &services {
            apply(&provider(&cloud), lb, Compare::Remembered).await.unwrap();
        }
        pause().await;
        let before = snapshot(&cloud.cloud());
        let aws = provider(&cloud);
        let mut owners = aws.owned().await.unwrap();
        owners.sort();
        assert_eq!(owners, services.iter().map(|lb| lb.owner.clone()).collect::<Vec<_>>());
        changes(&cloud);
        for lb in &services {
            apply(&aws, lb, Compare::Remembered).await.unwrap();
        }
        assert_eq!(
            (changes(&cloud), snapshot(&cloud.cloud())),
            (Vec::new(), before),
            "a restart writes nothing"
        );
        // The Service is gone when the process starts.
        delete(&provider(&cloud), &services[1].owner).await.unwrap();
        has_ports(&cloud, &[(53, "shop/c"), (80, "shop/a")], "the others");
        let mut moved = services[0].clone().with_nodes(set(&[2]));
        moved.listeners[0].port = 81;
        apply(&aws, &moved, Compare::Remembered).await.unwrap();
        has_ports(&cloud, &[(53, "shop/c"), (81, "shop/a")], "another port");
    }
}

/// The hostname that clients know stays.
#[tokio::test(start_paused = true)]
async fn service_cannot_move_between_load_balancers() {
    let own = |lb: &LoadBalancer| {
        let mut own = lb.clone();
        own.annotations.clear();
        own
    };
    for restarts in [false, true] {
        for (from, to) in [("own", "web"), ("web", "own"), ("web", "kept")] {
            let cloud = standin(1);
            let mut aws = provider(&cloud);
            let request = |place: &str| {
                if place == "own" { own(&sharing("web", "a", 80)) } else { sharing(place, "a", 80) }
            };
            apply(&aws, &request(from), Compare::Remembered).await.unwrap();
            pause().await;
            if restarts {
                aws = provider(&cloud);
            }
            let before = snapshot(&cloud.cloud());
            let refused = apply(&aws, &request(to), Compare::Remembered).await.unwrap_err();
            assert_eq!(refused.reason(), reasons::SHARED_LOAD_BALANCER_IMMUTABLE, "{refused}");
            assert_eq!(snapshot(&cloud.cloud()), before, "{from} to {to}");
            apply(&aws, &request(from), Compare::InPlace).await.unwrap();
            assert_eq!(snapshot(&cloud.cloud()), before, "{from} again");
            delete(&aws, &request(from).owner).await.unwrap();
            let left = snapshot(&cloud.cloud());
            assert!(left.is_empty(), "{from} {to}: {left:?}");
        }
    }
}

/// What was refused before anything was created holds nobody.
#[tokio::test(start_paused = true)]
async fn refused_service_may_choose_another_load_balancer() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let (first, second) = (sharing("web", "a", 80), sharing("web", "b", 80));
    apply(&aws, &first, Compare::Remembered).await.unwrap();
    apply(&aws, &second, Compare::Remembered).await.unwrap_err();
    let mut alone = second.clone();
    alone.annotations.clear();
    apply(&aws, &alone, Compare::Remembered).await.unwrap();
    assert_eq!(cloud.cloud().balancers.len(), 2);
    delete(&aws, &second.owner).await.unwrap();
    has_ports(&cloud, &[(80, "shop/a")], "the first");
}

/// A Service created again under its name takes the place of the earlier one, and nobody else's.
#[tokio::test(start_paused = true)]
async fn created_again_service_replaces_its_predecessor() {
    for restarts in [false, true] {
        let cloud = standin(1);
        let mut aws = provider(&cloud);
        let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
        for lb in [&a, &b] {
            apply(&aws, lb, Compare::Remembered).await.unwrap();
        }
        pause().await;
        if restarts {
            aws = provider(&cloud);
        }
        watch(&cloud, "shop/b");
        let mut again = a.clone();
        again.owner.uid = "uid-2".to_owned();
        apply(&aws, &again, Compare::Remembered).await.unwrap();
        pause().await;
        delete(&aws, &a.owner).await.unwrap();
        has_ports(&cloud, &[(80, "shop/a"), (443, "shop/b")], "after the predecessor");
        let found = cloud.cloud().listeners.into_values().find(|found| found.port == 80).unwrap();
        assert_eq!(found.tags[marks::UID], "uid-2");
        assert_eq!(cloud.violations(), Vec::<String>::new());
        for lb in [&again, &b] {
            delete(&aws, &lb.owner).await.unwrap();
        }
        assert_empty(&cloud, "after all");
    }
}

/// The process dies, or loses an answer, at each call in turn.
#[tokio::test(start_paused = true)]
async fn nothing_leaks_and_nobody_else_is_cut_wherever_a_process_ends() {
    for fault in [Fault::Before, Fault::After, Fault::Code("Throttling")] {
        for number in 0.. {
            let what = format!("{fault:?} at call {number}");
            let cloud = standin(1);
            let (a, b, c) = (sharing("web", "a", 80), sharing("web", "b", 443), sharing("web", "c", 53));
            apply(&provider(&cloud), &a, Compare::Remembered).await.unwrap();
            pause().await;
            watch(&cloud, "shop/a");
            cloud.set_faults(Faults::Nth(number, fault));
            // Each process ends after its first failure, and another begins.
            for round in 0..50 {
                let aws = provider(&cloud);
                let created = async {
                    aws.apply(&b, Compare::Remembered).await?;
                    aws.apply(&c, Compare::Remembered).await?;
                    aws.delete(&b.owner).await
                };
                let is_broken = !cloud.has_faults() || created.await.is_err();
                pause().await;
                if is_broken || round > 3 {
                    break;
                }
            }
            let is_over = cloud.has_faults();
            cloud.set_faults(Faults::None);
            let aws = provider(&cloud);
            apply(&aws, &a, Compare::InPlace).await.unwrap();
            assert_eq!(cloud.violations(), Vec::<String>::new(), "{what}");
            for lb in [&b, &c, &a] {
                delete(&aws, &lb.owner).await.unwrap();
            }
            assert_empty(&cloud, &what);
            if is_over {
                break;
            }
        }
    }
}

/// A process may end between the creation of the load balancer and that of the first listener.
#[tokio::test(start_paused = true)]
async fn load_balancer_that_nobody_uses_is_deleted_after_a_while() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let a = sharing("web", "a", 80);
    cloud.set_faults(Faults::Once("CreateTargetGroup", Fault::Before));
    aws.apply(&a, Compare::Remembered).await.unwrap_err();
    assert_eq!(cloud.cloud().balancers.len(), 1);
    let aws = provider(&cloud);
    delete(&aws, &a.owner).await.unwrap();
    assert_eq!(cloud.cloud().balancers.len(), 1, "nothing says that this Service has to do with it");
    aws.owned().await.unwrap();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_mins(5)).await;
        aws.owned().await.unwrap();
        assert_eq!(cloud.cloud().balancers.len(), 1, "a Service may be about to use it");
    }
    tokio::time::sleep(Duration::from_mins(5)).await;
    aws.preview_owned().await.unwrap();
    assert_eq!(cloud.cloud().balancers.len(), 1, "a preview writes nothing");
    aws.owned().await.unwrap();
    assert_empty(&cloud, "a quarter of an hour later");
}

/// The protection is of the load balancer: no Service waits for it.
#[tokio::test(start_paused = true)]
async fn protected_load_balancer_outlives_its_services() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let (a, b) = (sharing("kept", "a", 80), sharing("kept", "b", 80));
    let hostname = apply(&aws, &a, Compare::Remembered).await.unwrap().ingress;
    delete(&aws, &a.owner).await.unwrap();
    assert_eq!((cloud.cloud().balancers.len(), ports(&cloud.cloud())), (1, BTreeMap::new()));
    pause().await;
    assert_eq!(apply(&aws, &b, Compare::Remembered).await.unwrap().ingress, hostname);
}

/// Without its settings, a Service of a shared load balancer is refused and keeps what it has.
#[tokio::test(start_paused = true)]
async fn service_follows_its_nodes_and_can_be_deleted_after_the_setting_is_gone() {
    let cloud = standin(1);
    let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
    for lb in [&a, &b] {
        apply(&provider(&cloud), lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    let aws = super::driver::provider(&cloud);
    let refused = apply(&aws, &a, Compare::Remembered).await.unwrap_err();
    assert_eq!(refused.reason(), reasons::SHARED_LOAD_BALANCER_NOT_PERMITTED);
    for _ in 0..20 {
        aws.set_targets(&a.owner, &a.clone().with_nodes(set(&[2])).targets()).await.unwrap();
        pause().await;
    }
    let group = |cloud: &StandIn| {
        let groups = cloud.cloud().groups;
        let of_a = groups.into_values().find(|found| found.tags[marks::SERVICE] == "shop/a").unwrap();
        of_a.registered().cloned().collect::<Vec<_>>()
    };
    assert_eq!(group(&cloud), ["i-2"]);
    delete(&aws, &a.owner).await.unwrap();
    has_ports(&cloud, &[(443, "shop/b")], "the other");
}

/// Several Services change all the time, as slowly as a throttled account lets them. Another one waits for its turn, not for a gap that it
/// meets by chance: without turns one of these Services got none in a thousand seconds.
#[tokio::test(start_paused = true)]
async fn services_that_always_change_delay_others_by_one_change_each() {
    const BUSY: u16 = 12;
    for seed in 0..2 {
        let delays = Delays { call: Duration::from_secs(4), ..Delays::real() };
        let cloud = Arc::new(StandIn::new(delays, seed));
        start_instances(&cloud, 6);
        let aws = provider(&cloud);
        let names: Vec<String> = (0..BUSY).map(|number| format!("busy-{number}")).collect();
        apply(&aws, &sharing("web", &names[0], 80), Compare::Remembered).await.unwrap();
        let changing = names.iter().zip(0..).map(|(name, number)| {
            let (aws, first) = (&aws, 100 + 10 * number);
            async move {
                for port in (first..first + 2).cycle() {
                    apply(aws, &sharing("web", name, port), Compare::Remembered).await.unwrap();
                }
            }
        });
        let other = async {
            let mut longest = Duration::ZERO;
            for port in 1001..1005 {
                let began = tokio::time::Instant::now();
                apply(&aws, &sharing("web", "other", port), Compare::Remembered).await.unwrap();
                longest = longest.max(began.elapsed());
            }
            longest
        };
        tokio::select! {
            // A change takes up to a minute.
            longest = other => assert!(longest < Duration::from_mins(BUSY.into()), "seed {seed}: {longest:?}"),
            _ = futures::future::join_all(changing) => {}
        }
    }
}

/// Somebody gives it the UID of a Service that shares it. It does not become that Service's own, which would be deleted with the Service.
/// What the Service has there gets lost tags back.
#[tokio::test(start_paused = true)]
async fn shared_load_balancer_does_not_become_one_services_own() {
    let cloud = standin(1);
    let (a, b) = (sharing("web", "a", 80), sharing("web", "b", 443));
    for lb in [&a, &b] {
        apply(&provider(&cloud), lb, Compare::Remembered).await.unwrap();
    }
    pause().await;
    let before = snapshot(&cloud.cloud());
    cloud.change(|cloud| {
        let groups = cloud.groups.values_mut().map(|found| &mut found.tags);
        let listeners = cloud.listeners.values_mut().map(|found| &mut found.tags);
        groups.chain(listeners).for_each(|tags| drop(tags.remove(marks::SERVICE)));
    });
    pause().await;
    for lb in [&a, &b] {
        apply(&provider(&cloud), lb, Compare::InPlace).await.unwrap();
    }
    assert_eq!(snapshot(&cloud.cloud()), before);
    pause().await;
    cloud.change(|cloud| {
        for found in cloud.balancers.values_mut() {
            found.tags.insert(marks::UID.to_owned(), a.owner.uid.clone());
        }
    });
    pause().await;
    for lb in [&a, &b] {
        let refused = apply(&provider(&cloud), lb, Compare::InPlace).await.unwrap_err();
        assert_eq!(refused.reason(), reasons::OBJECT_NOT_OWNED, "{refused}");
    }
    assert!(cloud.cloud().balancers.values().all(|found| !found.tags.contains_key(marks::SERVICE)));
    let _ = delete(&provider(&cloud), &a.owner).await;
    assert!(cloud.cloud().listeners.values().any(|found| found.port == 443));
}

// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeMap;

use futures::{FutureExt as _, StreamExt as _};
use serde_json::json;
use steerage_model::annotations::SHARED_LOAD_BALANCER;
use steerage_model::{Key, Protocol};
use steerage_provider_api::{GroupTargets, Provider as _};

use super::*;
use crate::desired::tests::planned;
use crate::scripted::{Scripted, deleted, ids, settle};

/// The operator removed the name from the file before the Services went.
#[tokio::test(start_paused = true)]
async fn shared_load_balancer_goes_when_the_file_does_not_name_it_any_more() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let annotations = BTreeMap::from([(SHARED_LOAD_BALANCER.to_owned(), "web".to_owned())]);
    let lb = LoadBalancer { annotations, ..planned(&[(Protocol::Tcp, 80, 30080)], &[1]) };
    settle(&provider, &lb).await.unwrap();
    // The cloud of tests does not show this by itself.
    let of = serde_json::json!({ "loadbalancers": [{ "id": cloud.all("loadbalancers")[0]["id"] }] });
    for kind in ["listeners", "pools"] {
        for part in cloud.all(kind) {
            cloud.set(kind, ("id", part["id"].as_str().unwrap()), &of);
        }
    }
    let without = cloud.provider();
    assert_eq!(without.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
    deleted(&without, &lb.owner).await;
    assert!(cloud.all("loadbalancers").is_empty() && cloud.all("floatingips").is_empty());
}

fn sharing(cloud: &Scripted) -> crate::provider::OpenStack {
    let file = r#"{"web": {"namespaces": ["*"]}, "other": {"namespaces": ["*"]}}"#;
    cloud.provider_with(|config| {
        config.shared_load_balancers = serde_json::from_str(file).unwrap_or_default();
    })
}

fn service(name: &str, port: u16) -> LoadBalancer {
    let annotations = BTreeMap::from([(SHARED_LOAD_BALANCER.to_owned(), "web".to_owned())]);
    let owner = Owner { service: Key::new("shop", name), uid: format!("uid-of-{name}") };
    let ports = [(Protocol::Tcp, port, 30_000 + port)];
    LoadBalancer { annotations, owner, ..planned(&ports, &[1]) }
}

/// The load balancer of the listener on a port.
fn home(cloud: &Scripted, port: u16) -> String {
    let all = cloud.all("listeners");
    let found: Vec<_> = all.iter().filter(|listener| listener["protocol_port"] == json!(port)).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0]["loadbalancer_id"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn creation_without_an_answer_is_not_repeated_at_once() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    cloud.lose("POST loadbalancers");
    cloud.hide("loadbalancers");
    settle(&provider, &service("a", 80)).await.unwrap_err();
    for lb in [service("a", 80), service("b", 81)] {
        tokio::time::advance(Duration::from_mins(1)).await;
        let error = settle(&provider, &lb).await.unwrap_err();
        assert!(error.to_string().contains("did not answer"), "{error}");
    }
    assert_eq!(ids(&cloud).len(), 1);
    // It is there after all.
    cloud.show();
    settle(&provider, &service("a", 80)).await.unwrap();
    settle(&provider, &service("b", 81)).await.unwrap();
    assert_eq!(ids(&cloud).len(), 1);
    // Of another one, nothing comes.
    cloud.remove("loadbalancers", &ids(&cloud)[0]);
    cloud.fail("POST loadbalancers", 504, "no answer");
    settle(&provider, &service("c", 82)).await.unwrap_err();
    tokio::time::advance(UNANSWERED).await;
    settle(&provider, &service("c", 82)).await.unwrap();
}

/// The answer to a creation was lost, and no list showed it for minutes.
#[tokio::test(start_paused = true)]
async fn second_load_balancer_of_a_name_takes_nobody_s_address() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let (a, b, c) = (service("a", 80), service("b", 81), service("c", 82));
    cloud.lose("POST loadbalancers");
    cloud.hide("loadbalancers");
    settle(&provider, &a).await.unwrap_err();
    tokio::time::advance(UNANSWERED).await;
    let address = settle(&provider, &a).await.unwrap().ingress;
    let all = ids(&cloud);
    let (lost, used) = (&all[0], &all[1]);
    cloud.show();
    // As after a restart.
    let provider = sharing(&cloud);
    assert_eq!(settle(&provider, &b).await.unwrap().ingress, address);
    assert_eq!(&home(&cloud, 81), used);
    let attached = || {
        let all = cloud.all("floatingips");
        assert_eq!(all.len(), 1, "{all:?}");
        all[0]["port_id"].as_str().unwrap().to_owned()
    };
    assert_eq!(attached(), format!("port-of-{used}"));
    // What a Service has in the other one goes, and that one with it.
    deleted(&sharing(&cloud), &a.owner).await;
    assert_eq!(ids(&cloud), std::slice::from_ref(used));
    assert_eq!((attached(), home(&cloud, 81)), (format!("port-of-{used}"), used.clone()));
    assert_eq!(settle(&provider, &c).await.unwrap().ingress, address);
    // One that the process knows, and that is the wrong one by now, takes no address back.
    let mut copy = cloud.all("loadbalancers")[0].clone();
    for (key, value) in [("id", lost.as_str()), ("vip_port_id", "x"), ("created_at", "2025")] {
        copy[key] = value.into();
    }
    cloud.add("loadbalancers", &copy);
    cloud.set("floatingips", ("port_id", &attached()), &json!({ "port_id": "x" }));
    let ports = [(Protocol::Tcp, 82, 30_082), (Protocol::Tcp, 83, 30_083)];
    let changed = LoadBalancer { annotations: c.annotations, owner: c.owner, ..planned(&ports, &[1]) };
    let error = settle(&provider, &changed).await.unwrap_err();
    assert_eq!((error.reason(), attached().as_str()), ("ProviderConflict", "x"));
    assert_eq!(settle(&provider, &changed).await.unwrap().ingress, address);
    assert_eq!((attached().as_str(), home(&cloud, 83)), ("x", lost.clone()));
    assert_eq!(home(&cloud, 82), *lost);
}

#[tokio::test(start_paused = true)]
async fn service_that_is_complete_leaves_the_second_load_balancer() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let a = service("a", 80);
    cloud.lose("POST loadbalancers");
    cloud.hide("loadbalancers");
    settle(&provider, &a).await.unwrap_err();
    tokio::time::advance(UNANSWERED).await;
    let address = settle(&provider, &a).await.unwrap().ingress;
    let used = ids(&cloud)[1].clone();
    cloud.show();
    provider.apply(&a, Compare::InPlace).await.unwrap();
    assert_eq!(settle(&provider, &a).await.unwrap().ingress, address);
    assert_eq!((ids(&cloud), home(&cloud, 80)), (vec![used.clone()], used));
}

#[tokio::test(start_paused = true)]
async fn address_of_a_shared_load_balancer_stays_if_that_is_not_deleted() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let a = service("a", 80);
    settle(&provider, &a).await.unwrap();
    cloud.fail("DELETE loadbalancers", 409, "Load Balancer is immutable and cannot be updated.");
    cloud.writes();
    assert!(matches!(provider.delete(&a.owner).await.unwrap(), Progress::Again(_)));
    assert_eq!(cloud.writes(), ["DELETE loadbalancers"]);
    assert_eq!(cloud.all("floatingips").len(), 1);
    deleted(&provider, &a.owner).await;
    assert!(cloud.all("loadbalancers").is_empty() && cloud.all("floatingips").is_empty());
}

/// A Service that is refused at a shared load balancer does not count as its user, also if that took several calls.
#[tokio::test(start_paused = true)]
async fn address_of_a_shared_load_balancer_goes_though_a_refused_service_names_it() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let (own, a) = (planned(&[(Protocol::Tcp, 80, 30080)], &[1]), service("a", 81));
    settle(&provider, &a).await.unwrap();
    settle(&provider, &own).await.unwrap();
    let naming = LoadBalancer { annotations: a.annotations.clone(), ..own.clone() };
    let lock = provider.lock_shared("web").await.unwrap();
    let outcome = provider.apply(&naming, Compare::Remembered).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)), "another Service changes the load balancer");
    drop(lock);
    assert!(matches!(settle(&provider, &naming).await, Err(Error::Invalid { .. })));
    deleted(&provider, &a.owner).await;
    assert_eq!(
        (cloud.all("loadbalancers").len(), cloud.all("floatingips").len()),
        (1, 1),
        "those of its own"
    );

    // It was refused, and nobody asked again before it named none.
    settle(&provider, &a).await.unwrap();
    let lock = provider.lock_shared("web").await.unwrap();
    provider.apply(&naming, Compare::Remembered).await.unwrap();
    drop(lock);
    settle(&provider, &own).await.unwrap();
    deleted(&provider, &a.owner).await;
    assert_eq!(
        (cloud.all("loadbalancers").len(), cloud.all("floatingips").len()),
        (1, 1),
        "those of its own"
    );

    // It was refused only after the last user had gone.
    settle(&provider, &a).await.unwrap();
    let lock = provider.lock_shared("web").await.unwrap();
    provider.apply(&naming, Compare::Remembered).await.unwrap();
    drop(lock);
    deleted(&provider, &a.owner).await;
    assert_eq!(cloud.all("floatingips").len(), 2, "it may still use the load balancer");
    assert!(matches!(settle(&provider, &naming).await, Err(Error::Invalid { .. })));
    assert_eq!(
        (cloud.all("loadbalancers").len(), cloud.all("floatingips").len()),
        (1, 1),
        "those of its own"
    );
}

/// After a restart, one that is refused may be the first that is looked at, and those that use the load balancer are not known yet.
#[tokio::test(start_paused = true)]
async fn refused_service_leaves_the_address_of_a_shared_load_balancer_that_it_never_used() {
    let cloud = Scripted::new();
    let (own, a) = (planned(&[(Protocol::Tcp, 80, 30080)], &[1]), service("a", 81));
    let provider = sharing(&cloud);
    let address = settle(&provider, &a).await.unwrap().ingress;
    settle(&provider, &own).await.unwrap();
    // Its operator deleted the load balancer, which was in ERROR.
    cloud.remove("loadbalancers", &home(&cloud, 81));
    let naming = LoadBalancer { annotations: a.annotations.clone(), ..own.clone() };
    for then in ["is refused", "names none", "is deleted"] {
        let provider = sharing(&cloud);
        let lock = provider.lock_shared("web").await.unwrap();
        provider.apply(&naming, Compare::Remembered).await.unwrap();
        drop(lock);
        match then {
            "is refused" => assert!(matches!(settle(&provider, &naming).await, Err(Error::Invalid { .. }))),
            "names none" => drop(settle(&provider, &own).await.unwrap()),
            _ => deleted(&provider, &own.owner).await,
        }
        let mark = marks::shared_floating(&provider.config.cluster, "web");
        let left = cloud.all("floatingips").into_iter().filter(|ip| ip["description"] == json!(mark));
        assert_eq!(left.count(), 1, "{then}");
    }
    assert_eq!(settle(&sharing(&cloud), &a).await.unwrap().ingress, address);
}

/// Nothing else tells a Service that the port it was refused is free.
#[tokio::test(start_paused = true)]
async fn service_that_was_refused_a_port_is_called_when_one_becomes_free() {
    let cloud = Scripted::strict();
    let provider = sharing(&cloud);
    let mut called = provider.changes();
    let (a, b) = (service("a", 80), service("b", 80));
    for is_deleted in [true, false] {
        settle(&provider, &a).await.unwrap();
        let error = settle(&provider, &b).await.unwrap_err();
        assert_eq!(error.reason(), "PortInUse", "{error}");
        assert!(called.next().now_or_never().is_none());
        if is_deleted {
            deleted(&provider, &a.owner).await;
        } else {
            settle(&provider, &service("a", 81)).await.unwrap();
        }
        assert_eq!(called.next().now_or_never().flatten(), Some(b.owner.clone()));
        settle(&provider, &b).await.unwrap();
        deleted(&provider, &b.owner).await;
    }
    // Also if the one that freed it does not complete: its address is not known, or it is refused before it looks.
    for is_refused in [false, true] {
        settle(&provider, &a).await.unwrap();
        settle(&provider, &b).await.unwrap_err();
        let moved = service("a", 81);
        if is_refused {
            while cloud.all("listeners").iter().any(|listener| listener["protocol_port"] == json!(80)) {
                provider.apply(&moved, Compare::Remembered).await.unwrap();
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            let targets = GroupTargets::of_nodes(moved.nodes().clone());
            while provider.set_targets(&moved.owner, &targets).await.unwrap().progress != Progress::Done {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        } else {
            cloud.fail("GET floatingips", 503, "down");
            settle(&provider, &moved).await.unwrap_err();
        }
        assert_eq!(called.next().now_or_never().flatten(), Some(b.owner.clone()), "{is_refused}");
        settle(&provider, &b).await.unwrap();
        deleted(&provider, &b.owner).await;
    }
    settle(&provider, &service("a", 81)).await.unwrap();
    // Who does not wait any more is not called.
    settle(&provider, &service("c", 81)).await.unwrap_err();
    deleted(&provider, &service("c", 81).owner).await;
    deleted(&provider, &a.owner).await;
    assert!(called.next().now_or_never().is_none());
}

/// A Service whose `type` was changed and changed back comes with another name, or none, while what it had is being deleted.
#[tokio::test(start_paused = true)]
async fn service_that_comes_back_waits_until_what_it_had_is_deleted() {
    let names = [Some("web"), Some("other"), None];
    for (from, to) in [(0, 1), (0, 2), (2, 0)].map(|(from, to)| (names[from], names[to])) {
        let cloud = Scripted::strict();
        let provider = sharing(&cloud);
        let naming = |name: Option<&str>| {
            let annotations = name.map(|name| (SHARED_LOAD_BALANCER.to_owned(), name.to_owned()));
            LoadBalancer { annotations: annotations.into_iter().collect(), ..service("a", 80) }
        };
        settle(&provider, &naming(from)).await.unwrap();
        while cloud.all("loadbalancers")[0]["provisioning_status"] != "PENDING_DELETE" {
            let _ = provider.delete(&naming(from).owner).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let error = provider.apply(&naming(to), Compare::Remembered).await.unwrap_err();
        assert!(matches!(error, Error::Busy(_)), "{from:?} {to:?}: {error}");
        tokio::time::sleep(Duration::from_secs(10)).await;
        settle(&provider, &naming(to)).await.unwrap();
        assert_eq!(cloud.all("floatingips").len(), 1, "{from:?} {to:?}: {:?}", cloud.all("floatingips"));
        deleted(&provider, &naming(to).owner).await;
        assert!(cloud.all("loadbalancers").is_empty() && cloud.all("floatingips").is_empty());
    }
}

/// The same where others use the load balancer, so that listeners and pools go one by one.
#[tokio::test(start_paused = true)]
async fn service_that_comes_back_waits_until_it_has_left_what_others_use() {
    let of_a = |cloud: &Scripted| {
        let parts = [cloud.all("listeners"), cloud.all("pools")].concat();
        let is_its = |part: &&serde_json::Value| part["tags"].to_string().contains("service=shop/a\"");
        parts.iter().filter(is_its).map(|part| part["loadbalancer_id"].clone()).collect::<Vec<_>>()
    };
    for to in [Some("other"), None, Some("web")] {
        // Of two listeners and two pools.
        for left in 1..4 {
            let cloud = Scripted::strict();
            let provider = sharing(&cloud);
            let naming = |name: Option<&str>| {
                let annotations = name.map(|name| (SHARED_LOAD_BALANCER.to_owned(), name.to_owned()));
                let ports = [(Protocol::Tcp, 80, 30_080), (Protocol::Tcp, 443, 30_443)];
                let LoadBalancer { owner, .. } = service("a", 80);
                let annotations = annotations.into_iter().collect();
                LoadBalancer { annotations, owner, ..planned(&ports, &[1]) }
            };
            let (a, b) = (naming(Some("web")), service("b", 81));
            settle(&provider, &a).await.unwrap();
            settle(&provider, &b).await.unwrap();
            while of_a(&cloud).len() > left {
                let _ = provider.delete(&a.owner).await.unwrap();
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let back = naming(to);
            let mut waits = 0;
            while let Err(error) = settle(&provider, &back).await {
                assert!(matches!(error, Error::Busy(_)), "{to:?} {left}: {error}");
                waits += 1;
                assert!(waits < 60, "it does not end");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            assert_eq!(waits == 0, to == Some("web"), "{to:?} {left}");
            let home_of_a = home(&cloud, 80);
            assert!(of_a(&cloud).iter().all(|of| *of == json!(home_of_a)), "{to:?} {left}");
            assert_eq!(home_of_a == home(&cloud, 81), to == Some("web"), "{to:?} {left}");
            // Once it is complete, its address is kept again, also while an earlier Service of the name is deleted.
            let earlier = Owner { uid: "earlier".to_owned(), ..a.owner.clone() };
            assert_eq!(provider.delete(&earlier).await.unwrap(), Progress::Done);
            let another = if to == Some("web") { "other" } else { "web" };
            let error = settle(&provider, &naming(Some(another))).await.unwrap_err();
            assert_eq!(error.reason(), "SharedLoadBalancerImmutable", "{to:?} {left}");
        }
    }
}

/// A Service of two ports, of which one is gone from the shared load balancer, because its deletion has begun.
async fn half_deleted(cloud: &Scripted, provider: &crate::provider::OpenStack) -> LoadBalancer {
    let LoadBalancer { annotations, owner, .. } = service("a", 80);
    let ports = [(Protocol::Tcp, 80, 30_080), (Protocol::Tcp, 443, 30_443)];
    let a = LoadBalancer { annotations, owner, ..planned(&ports, &[1]) };
    settle(provider, &a).await.unwrap();
    settle(provider, &service("c", 81)).await.unwrap();
    assert_eq!(settle(provider, &service("b", 80)).await.unwrap_err().reason(), "PortInUse");
    while has_listener(cloud, 80) {
        let _ = provider.delete(&a.owner).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(has_listener(cloud, 443), "they go one by one");
    a
}

fn has_listener(cloud: &Scripted, port: u16) -> bool {
    cloud.all("listeners").iter().any(|listener| listener["protocol_port"] == json!(port))
}

/// The address that it serves is kept, however long the Service stays refused.
#[tokio::test(start_paused = true)]
async fn service_that_comes_back_and_is_refused_a_port_keeps_the_others() {
    let cloud = Scripted::strict();
    let provider = sharing(&cloud);
    let a = half_deleted(&cloud, &provider).await;
    settle(&provider, &service("b", 80)).await.unwrap();
    assert_eq!(settle(&provider, &a).await.unwrap_err().reason(), "PortInUse");
    for name in [Some("other"), None] {
        let annotations = name.map(|name| (SHARED_LOAD_BALANCER.to_owned(), name.to_owned()));
        let moved = LoadBalancer { annotations: annotations.into_iter().collect(), ..a.clone() };
        let error = settle(&provider, &moved).await.unwrap_err();
        assert_eq!(error.reason(), "SharedLoadBalancerImmutable", "{name:?}: {error}");
    }
    assert!(has_listener(&cloud, 443));
}

#[tokio::test(start_paused = true)]
async fn freed_port_is_told_though_the_deletion_gets_no_further() {
    let cloud = Scripted::strict();
    let provider = sharing(&cloud);
    let mut called = provider.changes();
    let a = half_deleted(&cloud, &provider).await;
    for _ in 0..20 {
        cloud.fail("GET floatingips", 503, "down");
        let _ = provider.delete(&a.owner).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(has_listener(&cloud, 443));
    assert_eq!(called.next().now_or_never().flatten(), Some(service("b", 80).owner));
}

#[tokio::test(start_paused = true)]
async fn shared_load_balancer_that_cannot_be_deleted_holds_up_no_other_service() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let (own, a) = (planned(&[(Protocol::Tcp, 80, 30080)], &[1]), service("a", 80));
    settle(&provider, &a).await.unwrap();
    // A crash leaves it without its ports.
    for kind in ["listeners", "pools"] {
        for part in cloud.all(kind) {
            cloud.remove(kind, part["id"].as_str().unwrap());
        }
    }
    let left = ids(&cloud);
    settle(&provider, &own).await.unwrap();
    cloud.calls();
    deleted(&provider, &own.owner).await;
    assert_eq!(ids(&cloud), left, "only who shared something looks");
    cloud.fail("DELETE loadbalancers", 500, "the driver is disabled");
    assert_eq!(provider.delete(&a.owner).await.unwrap(), Progress::Done);
    assert_eq!(ids(&cloud), left);
    deleted(&sharing(&cloud), &service("b", 81).owner).await;
    assert!(ids(&cloud).is_empty() && cloud.all("floatingips").is_empty());
}

#[tokio::test(start_paused = true)]
async fn shared_load_balancer_that_stays_pending_is_told() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let (a, b) = (service("a", 80), service("b", 81));
    settle(&provider, &a).await.unwrap();
    settle(&provider, &b).await.unwrap();
    let id = ids(&cloud)[0].clone();
    cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "PENDING_UPDATE" }));
    cloud.calls();
    let mut waits = Vec::new();
    let error = loop {
        match provider.delete(&a.owner).await {
            Ok(Progress::Again(wait)) => waits.push(wait),
            Ok(Progress::Done) => panic!("it is done"),
            Err(error) => break error,
        }
        assert!(waits.len() < 200, "it is never told");
        tokio::time::advance(waits[waits.len() - 1]).await;
    };
    assert!(error.to_string().contains(&id), "{error}");
    assert!(waits.iter().sum::<Duration>() >= Duration::from_mins(10), "{waits:?}");
    // After the first look, only the load balancer is asked for.
    assert!(cloud.calls().len() < waits.len() + 10);
    cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "ACTIVE" }));
    deleted(&provider, &a.owner).await;
    assert_eq!(home(&cloud, 81), id);
}

/// Somebody deletes the whole, and what the other Service had is gone first.
#[tokio::test(start_paused = true)]
async fn address_stays_while_another_service_names_the_load_balancer() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let (a, b) = (service("a", 80), service("b", 81));
    settle(&provider, &a).await.unwrap();
    let address = settle(&provider, &b).await.unwrap().ingress;
    let id = ids(&cloud)[0].clone();
    cloud.set("loadbalancers", ("id", &id), &json!({ "provisioning_status": "PENDING_DELETE" }));
    for listener in cloud.all("listeners").iter().filter(|listener| listener["protocol_port"] == json!(81)) {
        cloud.remove("pools", listener["default_pool_id"].as_str().unwrap());
        cloud.remove("listeners", listener["id"].as_str().unwrap());
    }
    assert!(matches!(provider.delete(&a.owner).await.unwrap(), Progress::Again(_)));
    cloud.remove("loadbalancers", &id);
    deleted(&provider, &a.owner).await;
    assert_eq!(cloud.all("floatingips").len(), 1);
    provider.apply(&b, Compare::InPlace).await.unwrap();
    assert_eq!(settle(&provider, &b).await.unwrap().ingress, address);
    deleted(&provider, &b.owner).await;
    assert!(cloud.all("loadbalancers").is_empty() && cloud.all("floatingips").is_empty());
}

/// The load balancer was never made, or somebody deleted it.
#[tokio::test(start_paused = true)]
async fn address_goes_with_the_last_service_that_names_the_load_balancer() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    let (a, b) = (service("a", 80), service("b", 81));
    settle(&provider, &a).await.unwrap();
    cloud.fail("POST pools", 500, "oops");
    settle(&provider, &b).await.unwrap_err();
    deleted(&provider, &a.owner).await;
    assert_eq!((ids(&cloud).len(), cloud.all("floatingips").len()), (0, 1), "`b` is about to use it");
    deleted(&provider, &b.owner).await;
    assert!(cloud.all("floatingips").is_empty());
}

/// Without floating IPs, the Services publish the VIP.
#[tokio::test(start_paused = true)]
async fn shared_load_balancer_with_services_is_not_left_for_an_empty_one() {
    let cloud = Scripted::new();
    let provider = sharing(&cloud);
    settle(&provider, &service("a", 80)).await.unwrap();
    let used = cloud.all("loadbalancers")[0].clone();
    let ip = cloud.all("floatingips")[0]["id"].as_str().unwrap().to_owned();
    cloud.remove("floatingips", &ip);
    let mut empty = used.clone();
    for (key, value) in [("id", "empty"), ("vip_port_id", "x"), ("created_at", "2027")] {
        empty[key] = value.into();
    }
    cloud.add("loadbalancers", &empty);
    let id = used["id"].as_str().unwrap();
    cloud.set("loadbalancers", ("id", id), &json!({ "provisioning_status": "ERROR" }));
    let order = provider.shared_by_preference("web").await.unwrap();
    assert_eq!(order.iter().map(|found| found.id.as_str()).collect::<Vec<_>>(), [id, "empty"]);
}

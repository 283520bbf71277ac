// SPDX-License-Identifier: Apache-2.0
//! A live Service gets another address.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Value, json};
use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider as _};

use crate::annotations;
use crate::config::tests::config;
use crate::desired::tests::{annotated, planned};
use crate::scripted::{GROUP, Scripted, gone, parts, settle};

/// The addresses with a frontend and a rule in one of the load balancers.
fn serving(cloud: &Scripted) -> BTreeSet<IpAddr> {
    let mut serving = BTreeSet::new();
    for balancer in cloud.all("loadBalancers") {
        for front in parts(&balancer, "frontendIPConfigurations") {
            let has_rule = |rule: &Value| rule["properties"]["frontendIPConfiguration"]["id"] == front["id"];
            if !parts(&balancer, "loadBalancingRules").any(has_rule) {
                continue;
            }
            let of = &front["properties"];
            let public = of["publicIPAddress"]["id"].as_str().and_then(|id| cloud.get(id));
            let ip =
                public.map_or(of["privateIPAddress"].clone(), |ip| ip["properties"]["ipAddress"].clone());
            serving.insert(ip.as_str().unwrap().parse().unwrap());
        }
    }
    serving
}

/// The addresses that rules of the security group with this access name.
fn addresses_in_rules(cloud: &Scripted, access: &str) -> BTreeSet<IpAddr> {
    let group = cloud.get(GROUP).unwrap();
    let rules = parts(&group, "securityRules").filter(|rule| rule["properties"]["access"] == access);
    let all =
        rules.flat_map(|rule| rule["properties"]["destinationAddressPrefixes"].as_array().unwrap().clone());
    all.map(|ip| ip.as_str().unwrap().parse().unwrap()).collect()
}

fn moves() -> Vec<LoadBalancer> {
    let lb = planned(&[80], &[1, 2]);
    let internal = annotated(lb.clone(), annotations::INTERNAL, "true");
    let requested =
        LoadBalancer { requested_addresses: vec!["10.0.5.200".parse().unwrap()], ..internal.clone() };
    vec![
        lb.clone(),
        annotated(lb.clone(), annotations::PIP_NAME, "mine"),
        annotated(lb.clone(), annotations::PIP_NAME, "other"),
        internal.clone(),
        requested,
        annotated(internal, annotations::SUBNET, "elsewhere"),
        annotated(lb.clone(), annotations::PIP_NAME, "mine"),
        lb,
    ]
}

/// What clients know from the Service's status goes on until the new address was handed over, also if the process restarts.
#[tokio::test(start_paused = true)]
async fn old_address_serves_until_the_new_one_was_handed_over() {
    for (is_restarted, is_limited) in [(false, false), (true, false), (false, true), (true, true)] {
        let cloud = Scripted::new();
        for (name, ip) in [("mine", "203.0.113.7"), ("other", "203.0.113.8")] {
            let body = json!({ "location": "westeurope", "sku": { "name": "Standard" },
                "properties": { "ipAddress": ip, "publicIPAllocationMethod": "Static" } });
            cloud.put(&config().public_ip_path(None, name), body);
        }
        let mut provider = cloud.with_group();
        let mut published: Option<IpAddr> = None;
        for (step, mut lb) in moves().into_iter().enumerate() {
            if is_limited {
                lb.source_ranges = vec!["192.0.2.0/24".parse().unwrap()];
            }
            let (before, mut calls) = (published, 0);
            loop {
                lb.published = published.into_iter().collect();
                let outcome = provider.apply(&lb, Compare::Remembered).await.unwrap();
                let serving = serving(&cloud);
                assert!(
                    published.is_none_or(|ip| serving.contains(&ip)),
                    "{step}: {published:?} {serving:?}"
                );
                if is_limited {
                    assert!(serving.is_subset(&addresses_in_rules(&cloud, "Deny")), "{step}: {serving:?}");
                } else if let Some(ip) = published.filter(|ip| !ip.to_string().starts_with("10.")) {
                    assert!(addresses_in_rules(&cloud, "Allow").contains(&ip), "{step}");
                }
                published = outcome.ingress.first().map(|one| one.ip.unwrap()).or(published);
                if outcome.progress == Progress::Done {
                    break;
                }
                calls += 1;
                assert!(
                    calls < 100,
                    "{step} {is_restarted} {is_limited}: it is never done {outcome:?} {:?}",
                    cloud.calls().into_iter().rev().take(30).collect::<Vec<_>>()
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
                // At the latest when the new address was handed over.
                if is_restarted && (calls % 5 == 0 || !outcome.ingress.is_empty()) {
                    provider = cloud.with_group();
                }
            }
            assert_ne!(published, before, "{step}");
            assert_eq!(serving(&cloud), published.into_iter().collect(), "{step}: the old one is gone");
            let named = &addresses_in_rules(&cloud, "Allow") | &addresses_in_rules(&cloud, "Deny");
            assert!(named.is_subset(&published.into_iter().collect()), "{step}: {named:?}");
        }
        gone(&provider, &moves()[0].owner).await.unwrap();
        assert_eq!((cloud.all("loadBalancers").len(), cloud.all("publicIPAddresses").len()), (0, 2));
    }
}

/// Somebody gave its frontend another public IP.
#[tokio::test(start_paused = true)]
async fn drift_of_a_frontend_is_repaired() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let lb = planned(&[80], &[1]);
    let ip = settle(&provider, &lb).await.unwrap().ingress[0].ip.unwrap();
    let body = json!({ "location": "westeurope", "properties": { "ipAddress": "203.0.113.9" } });
    cloud.put(&config().public_ip_path(None, "theirs"), body);
    let path = cloud.all("loadBalancers")[0]["id"].as_str().unwrap().to_owned();
    cloud.change(&path, |balancer| {
        let front = &mut balancer["properties"]["frontendIPConfigurations"][0]["properties"];
        front["publicIPAddress"]["id"] = json!(config().public_ip_path(None, "theirs"));
    });
    // What was read is old by then.
    tokio::time::sleep(Duration::from_mins(1)).await;
    while provider.apply(&lb, Compare::InPlace).await.unwrap().progress != Progress::Done {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(serving(&cloud), [ip].into());
}

/// The status cannot be written for a while: clients know nothing but the old address.
#[tokio::test(start_paused = true)]
async fn old_address_stays_until_the_status_has_the_new_one() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let lb = planned(&[80], &[1]);
    let old = settle(&provider, &lb).await.unwrap().ingress[0].ip.unwrap();
    let mut internal = annotated(lb, annotations::INTERNAL, "true");
    internal.published = vec![old];
    let mut new = None;
    for _ in 0..100 {
        let outcome = provider.apply(&internal, Compare::Remembered).await.unwrap();
        assert!(matches!(outcome.progress, Progress::Again(_)) && serving(&cloud).contains(&old));
        new = outcome.ingress.first().and_then(|one| one.ip).or(new);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    internal.published = vec![new.unwrap()];
    settle(&provider, &internal).await.unwrap();
    assert_eq!(serving(&cloud), new.into_iter().collect());
}

/// A Service that moves again and again does not fill the load balancer.
#[tokio::test(start_paused = true)]
async fn service_that_moves_again_has_two_addresses_at_most() {
    for is_internal in [false, true] {
        let cloud = Scripted::new();
        let provider = cloud.with_group();
        let to = |index: u8| {
            let lb = planned(&[80], &[1]);
            if is_internal {
                let ip = format!("10.0.5.{}", 200 + index).parse().unwrap();
                let lb = annotated(lb, annotations::INTERNAL, "true");
                return LoadBalancer { requested_addresses: vec![ip], ..lb };
            }
            let path = config().public_ip_path(None, &format!("mine-{index}"));
            let body = json!({ "location": "westeurope", "sku": { "name": "Standard" },
                "properties": { "ipAddress": format!("203.0.113.{index}"), "publicIPAllocationMethod": "Static" } });
            if cloud.get(&path).is_none() {
                cloud.put(&path, body);
            }
            annotated(lb, annotations::PIP_NAME, &format!("mine-{index}"))
        };
        let old = settle(&provider, &to(1)).await.unwrap().ingress[0].ip.unwrap();
        let mut new = None;
        for index in 2..6 {
            let lb = LoadBalancer { published: vec![old], ..to(index) };
            new = None;
            for _ in 0..200 {
                let outcome = provider.apply(&lb, Compare::Remembered).await.unwrap();
                let serving = serving(&cloud);
                assert!(serving.contains(&old) && serving.len() <= 2, "{index}: {serving:?}");
                new = outcome.ingress.first().and_then(|one| one.ip);
                if new.is_some() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            assert!(new.is_some(), "{index}: it is never handed over");
        }
        let lb = LoadBalancer { published: new.into_iter().collect(), ..to(5) };
        settle(&provider, &lb).await.unwrap();
        assert_eq!(serving(&cloud), new.into_iter().collect());
        let named = &addresses_in_rules(&cloud, "Allow") | &addresses_in_rules(&cloud, "Deny");
        assert!(named.is_subset(&new.into_iter().collect()), "{named:?}");
    }
}

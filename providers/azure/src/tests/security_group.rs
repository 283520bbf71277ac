// SPDX-License-Identifier: Apache-2.0
//! Who may connect, in the nodes' network security group.

use std::time::Duration;

use serde_json::json;
use steerage_model::Family;
use steerage_provider_api::{AdmittedSources, Compare, Error, LoadBalancer, Provider as _, RequestedSources};

use crate::annotations;
use crate::config::tests::config;
use crate::desired::tests::{annotated, planned};
use crate::marks::Mark;
use crate::merge::Layout;
use crate::scripted::{GROUP, Scripted, gone, settle};

fn limited(is_internal: bool) -> LoadBalancer {
    let lb = LoadBalancer { source_ranges: vec!["10.0.0.0/8".parse().unwrap()], ..planned(&[80], &[1]) };
    if is_internal { annotated(lb, annotations::INTERNAL, "true") } else { lb }
}

/// Rules that deny come before ports that serve, and go after them.
#[tokio::test(start_paused = true)]
async fn nobody_is_admitted_for_a_moment_whom_the_service_denies() {
    for is_internal in [false, true] {
        let cloud = Scripted::new();
        let provider = cloud.with_group();
        let lb = limited(is_internal);
        settle(&provider, &lb).await.unwrap();
        let writes: Vec<String> =
            cloud.writes().into_iter().filter(|call| !call.ends_with("publicIPAddresses")).collect();
        let (balancer, group) = ("PUT loadBalancers", "PUT networkSecurityGroups");
        if is_internal {
            assert_eq!(writes, [balancer, group, balancer], "the address is known after the first one");
        } else {
            assert_eq!(writes, [group, balancer]);
        }
        gone(&provider, &lb.owner).await.unwrap();
        let writes: Vec<String> =
            cloud.writes().into_iter().filter(|call| !call.ends_with("publicIPAddresses")).collect();
        assert_eq!(writes, [balancer, group, "DELETE loadBalancers"]);
    }
}

#[tokio::test(start_paused = true)]
async fn sources_are_taken_away_also_of_a_refused_service() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let lb = planned(&[80], &[1]);
    settle(&provider, &lb).await.unwrap();
    let requested =
        RequestedSources { ranges: vec!["10.0.0.0/8".parse().unwrap()], ..RequestedSources::default() };
    let admitted = loop {
        match provider.restrict_sources(&lb.owner, &requested).await {
            Err(error) => assert_eq!(error.reason(), "ProviderBusy"),
            Ok(admitted) => break admitted,
        }
    };
    assert_eq!(admitted, Some(AdmittedSources::Only(["10.0.0.0/8".to_owned()].into())));
    assert_eq!(cloud.all("networkSecurityGroups").len(), 1);
    let without_group = cloud.provider();
    assert_eq!(
        without_group.restrict_sources(&lb.owner, &requested).await.unwrap(),
        Some(AdmittedSources::Foreign)
    );
    let other = crate::desired::tests::named("other", &[80], &[1]);
    assert_eq!(provider.restrict_sources(&other.owner, &requested).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn rules_and_tags_of_others_stay() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let theirs = json!({ "name": "theirs", "properties": { "priority": 2000, "direction": "Inbound", "access": "Deny", "protocol": "*",
        "sourceApplicationSecurityGroups": [{ "id": "/asg" }], "destinationAddressPrefixes": ["192.0.2.1"] } });
    cloud.change(GROUP, |group| {
        group["tags"] = json!({ "team": "a" });
        group["properties"]["securityRules"] = json!([theirs]);
        group["properties"]["flushConnection"] = json!(true);
    });
    let lb = limited(false);
    settle(&provider, &lb).await.unwrap();
    let group = cloud.get(GROUP).unwrap();
    assert_eq!(group["properties"]["securityRules"].as_array().unwrap().len(), 3);
    gone(&provider, &lb.owner).await.unwrap();
    let group = cloud.get(GROUP).unwrap();
    let rules = &group["properties"]["securityRules"];
    assert_eq!(
        (
            rules.as_array().unwrap().len(),
            &rules[0]["properties"]["sourceApplicationSecurityGroups"][0]["id"]
        ),
        (1, &json!("/asg"))
    );
    assert_eq!(
        (&group["tags"]["team"], &group["properties"]["flushConnection"]),
        (&json!("a"), &json!(true))
    );
}

#[tokio::test(start_paused = true)]
async fn missing_group_is_told_and_nothing_serves_before_it() {
    let cloud = Scripted::new();
    cloud.remove(GROUP);
    let provider = cloud.with_group();
    assert_eq!(provider.check().await.unwrap_err().reason(), "NoSecurityGroup");
    assert_eq!(settle(&provider, &limited(false)).await.unwrap_err().reason(), "NoSecurityGroup");
    assert!(cloud.all("loadBalancers").is_empty());
    gone(&provider, &limited(false).owner).await.unwrap();
}

/// Its rules would come before a frontend that Azure does not take, and go again.
#[tokio::test(start_paused = true)]
async fn refused_service_writes_no_rules_until_its_load_balancer_is_tried_again() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    cloud.refuse(false, |body| {
        let frontends = body["properties"]["frontendIPConfigurations"].as_array()?;
        (!frontends.is_empty()).then(|| ("InvalidFrontend", "no frontends".to_owned()))
    });
    let lb = limited(false);
    settle(&provider, &lb).await.unwrap_err();
    tokio::time::sleep(Duration::from_secs(5)).await;
    settle(&provider, &lb).await.unwrap_err();
    assert!(!rules(&cloud).contains("Allow"), "{}", rules(&cloud));
    cloud.writes();
    for compare in [Compare::InPlace, Compare::Remembered] {
        for _ in 0..3 {
            assert!(provider.apply(&lb, compare).await.is_err());
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    assert_eq!(cloud.writes(), [""; 0]);
    cloud.refuse(false, |_| None);
    tokio::time::sleep(Duration::from_mins(1)).await;
    settle(&provider, &lb).await.unwrap();
}

/// It is tried again every few minutes, and the security group takes one change at a time.
#[tokio::test(start_paused = true)]
async fn service_for_which_the_load_balancer_has_no_room_writes_no_rules() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let of_others = |i: usize| {
        let properties =
            json!({ "frontendIPConfiguration": { "id": "/f" }, "protocol": "Tcp", "frontendPort": i });
        json!({ "name": format!("theirs-{i}"), "properties": properties })
    };
    let all: Vec<_> = (1..=crate::merge::MOST_RULES).map(of_others).collect();
    let tags = crate::marks::of_balancer(&config().cluster);
    let body = json!({ "location": "westeurope", "tags": tags, "properties": { "loadBalancingRules": all } });
    cloud.put(&Layout { config: config(), is_internal: false }.path(), body);
    for _ in 0..4 {
        let error = settle(&provider, &limited(false)).await.unwrap_err();
        assert_eq!(error.reason(), "QuotaExceeded", "{error}");
        tokio::time::sleep(Duration::from_mins(1)).await;
    }
    let writes = cloud.writes();
    assert!(writes.iter().all(|write| write == "PUT publicIPAddresses"), "{writes:?}");
}

/// A rule comes before the frontend of a Service that limits its clients. The Service is deleted in between.
#[tokio::test(start_paused = true)]
async fn rules_go_with_a_service_that_never_had_a_frontend() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let public_ip = |address: &str| json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": { "ipAddress": address, "publicIPAllocationMethod": "Static" } });
    cloud.put(&config().public_ip_path(None, "mine"), public_ip("203.0.113.7"));
    let lb = annotated(limited(false), annotations::PIP_NAME, "mine");
    for _ in 0..100 {
        let _ = provider.apply(&lb, Compare::Remembered).await;
        if rules(&cloud).contains("203.0.113.7") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(rules(&cloud).contains("203.0.113.7") && cloud.all("loadBalancers").is_empty());
    gone(&provider, &lb.owner).await.unwrap();
    assert!(!rules(&cloud).contains("203.0.113.7"), "{}", rules(&cloud));
}

/// Somebody takes the frontend away.
#[tokio::test(start_paused = true)]
async fn rules_go_with_a_service_whose_frontend_is_gone() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let lb = limited(false);
    let outcome = settle(&provider, &lb).await.unwrap();
    let address = outcome.ingress[0].ip.unwrap().to_string();
    assert!(rules(&cloud).contains(&address));
    cloud.remove(&Layout { config: config(), is_internal: false }.path());
    for ip in cloud.all("publicIPAddresses") {
        cloud.remove(ip["id"].as_str().unwrap());
    }
    tokio::time::sleep(Duration::from_mins(2)).await;
    gone(&provider, &lb.owner).await.unwrap();
    assert!(!rules(&cloud).contains(&address), "{}", rules(&cloud));
}

/// Services of others request the same public IP of the user, at the same time or later, and admit other clients.
#[tokio::test(start_paused = true)]
async fn refused_request_of_a_public_ip_changes_no_rules() {
    let public_ip = json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": { "ipAddress": "203.0.113.7", "publicIPAllocationMethod": "Static" } });
    for is_late in [false, true] {
        let cloud = Scripted::new();
        let provider = cloud.with_group();
        cloud.put(&config().public_ip_path(None, "mine"), public_ip.clone());
        let lb = annotated(limited(false), annotations::PIP_NAME, "mine");
        let thief = crate::desired::tests::named("thief", &[80], &[1]);
        let thief = LoadBalancer { source_ranges: vec!["192.0.2.0/24".parse().unwrap()], ..thief };
        let by_name = annotated(thief.clone(), annotations::PIP_NAME, "mine");
        let by_address = LoadBalancer { requested_addresses: vec!["203.0.113.7".parse().unwrap()], ..thief };
        if is_late {
            settle(&provider, &lb).await.unwrap();
        } else {
            let _ = provider.apply(&lb, Compare::Remembered).await.unwrap();
        }
        // Also one that does not know who asked first.
        for provider in [provider, cloud.with_group()].iter().take(1 + usize::from(is_late)) {
            for thief in [&by_name, &by_address] {
                let error = settle(provider, thief).await.unwrap_err();
                assert_eq!(error.reason(), "AddressNotAvailable", "{error}");
                // Nothing says whose it is.
                let mark = Mark::new(&config().cluster, &lb.owner).part("");
                assert!(!error.to_string().contains(&mark), "{error}");
                let before = rules(&cloud);
                assert!(!before.contains("192.0.2.0/24"), "{before}");
                gone(provider, &thief.owner).await.unwrap();
                assert_eq!(rules(&cloud), before, "the deletion of who was refused");
                let _ = settle(provider, thief).await.unwrap_err();
                settle(provider, &lb).await.unwrap();
                let is_admitting = || {
                    let rules = rules(&cloud);
                    rules.contains("203.0.113.7") && rules.contains("10.0.0.0/8")
                };
                assert!(is_admitting(), "{}", rules(&cloud));
                // It gets an address that nobody has.
                let mut corrected = LoadBalancer { requested_addresses: Vec::new(), ..thief.clone() };
                corrected.annotations.clear();
                settle(provider, &corrected).await.unwrap();
                assert!(is_admitting(), "{}", rules(&cloud));
                gone(provider, &thief.owner).await.unwrap();
                assert!(is_admitting(), "{}", rules(&cloud));
            }
        }
    }
}

/// Who is refused does not keep what it requested from others.
#[tokio::test(start_paused = true)]
async fn refused_request_keeps_no_address_from_others() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    for (name, last) in [("one", 7), ("two", 8)] {
        let address = format!("203.0.113.{last}");
        let body = json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": { "ipAddress": address, "publicIPAllocationMethod": "Static" } });
        cloud.put(&config().public_ip_path(None, name), body);
    }
    let naming = |lb: LoadBalancer, name: &str| annotated(lb, annotations::PIP_NAME, name);
    let never = crate::desired::tests::named("never", &[80], &[1]);
    let never = LoadBalancer { families: vec![Family::V4, Family::V6], ..never };
    // Azure refuses its part of the load balancer, after its rules were written.
    let ranged = LoadBalancer {
        source_ranges: vec!["192.0.2.0/24".parse().unwrap()],
        families: vec![Family::V4],
        ..never.clone()
    };
    settle(&provider, &ranged).await.unwrap();
    cloud.fail("PUT loadBalancers", 400, "InvalidResource", false);
    let error = settle(&provider, &naming(ranged.clone(), "one")).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert!(!rules(&cloud).contains("203.0.113.7"), "{}", rules(&cloud));
    assert!(
        rules(&cloud).contains("192.0.2.0/24"),
        "those of the address that it has stay: {}",
        rules(&cloud)
    );
    // It is refused while its rules are being written.
    let late = naming(ranged.clone(), "two");
    let _ = provider.apply(&late, Compare::Remembered).await.unwrap();
    let late = annotated(late, "service.beta.kubernetes.io/azure-load-balancer-mode", "x");
    for _ in 0..2 {
        let _ = settle(&provider, &late).await.unwrap_err();
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert!(!rules(&cloud).contains("203.0.113.8"), "{}", rules(&cloud));
    // It is refused while it gets its frontend there, which must not be without its rules.
    let late = naming(ranged.clone(), "two");
    cloud.writes();
    while !cloud.writes().iter().any(|write| write == "PUT loadBalancers") {
        let _ = provider.apply(&late, Compare::Remembered).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let late = annotated(late, "service.beta.kubernetes.io/azure-load-balancer-mode", "x");
    for _ in 0..3 {
        let _ = settle(&provider, &late).await.unwrap_err();
        let has_it = cloud.all("loadBalancers").iter().any(|found| found.to_string().contains("/two"));
        assert_eq!(has_it, rules(&cloud).contains("203.0.113.8"), "{}", rules(&cloud));
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    gone(&provider, &ranged.owner).await.unwrap();
    for name in ["one", "two"] {
        let never = annotated(naming(never.clone(), name), annotations::PIP_NAME_IPV6, "missing");
        let error = settle(&provider, &never).await.unwrap_err();
        assert_eq!(error.reason(), "AddressNotAvailable", "{error}");
        let _ = provider.apply(&never, Compare::Remembered).await.unwrap_err();
        // The case of a name means nothing to Azure.
        let lb = naming(limited(false), &name.to_uppercase());
        settle(&provider, &lb).await.unwrap();
        provider.apply(&lb, Compare::InPlace).await.unwrap();
        let known = provider.public_ips.all(&cloud, Duration::MAX).await.unwrap();
        assert_eq!(known.keys().collect::<Vec<_>>(), ["one", "two"]);
    }
}

fn rules(cloud: &Scripted) -> String {
    cloud.all("networkSecurityGroups")[0]["properties"]["securityRules"].to_string()
}

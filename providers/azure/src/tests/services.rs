// SPDX-License-Identifier: Apache-2.0
//! One Service and what becomes of it.

use std::time::Duration;

use serde_json::json;
use steerage_model::Family;
use steerage_provider_api::{Compare, LoadBalancer, Progress, Provider as _, SharedSet, Target, TargetSet};
use steerage_provider_cloud::ClusterId;

use crate::annotations;
use crate::config::tests::config;
use crate::desired::tests::{annotated, named, node, planned};
use crate::scripted::{GROUP, Scripted, gone, settle};

#[tokio::test(start_paused = true)]
async fn service_is_a_public_ip_and_one_change_of_the_load_balancer() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let lb = planned(&[80], &[1, 2]);
    let outcome = settle(&provider, &lb).await.unwrap();
    assert_eq!(
        cloud.calls(),
        [
            "GET publicIPAddresses",
            "GET loadBalancers",
            "GET loadBalancers",
            "GET publicIPAddresses",
            "PUT publicIPAddresses",
            "GET operations",
            "GET operations",
            "GET publicIPAddresses",
            "GET loadBalancers",
            "PUT loadBalancers",
            "GET operations",
            "GET operations",
            "GET loadBalancers",
        ]
    );
    assert_eq!(outcome.ingress[0].ip.unwrap().to_string(), "192.0.2.1");
    gone(&provider, &lb.owner).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn scheme_of_a_live_service_changes_and_its_addresses_with_it() {
    let cloud = Scripted::new();
    let provider = cloud.with_group();
    let external = planned(&[80], &[1, 2]);
    let internal = annotated(external.clone(), annotations::INTERNAL, "true");
    for lb in [&external, &internal, &external] {
        let is_internal = !lb.annotations.is_empty();
        let ip = settle(&provider, lb).await.unwrap().ingress[0].ip.unwrap();
        assert_eq!(ip.to_string().starts_with("10."), is_internal, "{ip}");
        assert_eq!(cloud.all("loadBalancers").len(), 1, "the other one is gone");
        assert_eq!(cloud.all("publicIPAddresses").len(), usize::from(!is_internal));
        let rules = cloud.get(GROUP).unwrap()["properties"]["securityRules"].clone();
        assert_eq!(rules.as_array().unwrap().len(), usize::from(!is_internal), "{rules}");
        assert_eq!(provider.owned().await.unwrap(), std::slice::from_ref(&lb.owner));
    }
    gone(&cloud.with_group(), &external.owner).await.unwrap();
    assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
}

#[tokio::test(start_paused = true)]
async fn public_ip_of_the_user_is_used_where_it_is_free_and_never_deleted() {
    let cloud = Scripted::new();
    let path = config().public_ip_path(None, "mine");
    let theirs = "/subscriptions/sub/resourceGroups/rg/providers/Microsoft.Network/loadBalancers/kubernetes/frontendIPConfigurations/a1b2";
    let named = annotated(planned(&[80], &[1]), annotations::PIP_NAME, "mine");
    let mut addressed = planned(&[80], &[1]);
    addressed.requested_addresses = vec!["203.0.113.7".parse().unwrap()];
    assert_eq!(settle(&cloud.provider(), &named).await.unwrap_err().reason(), "AddressNotAvailable");
    for lb in [&named, &addressed] {
        let provider = cloud.provider();
        // The other controller still uses it.
        let used = json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": { "ipAddress": "203.0.113.7", "publicIPAllocationMethod": "Static", "ipConfiguration": { "id": theirs } } });
        cloud.put(&path, used);
        let error = settle(&provider, lb).await.unwrap_err();
        assert!(error.reason() == "AddressNotAvailable" && error.to_string().contains(theirs), "{error}");
        assert!(cloud.all("loadBalancers").is_empty());
        cloud.change(&path, |ip| drop(ip["properties"].as_object_mut().unwrap().remove("ipConfiguration")));
        // It still counts it as its own, as another cluster's Steerage does.
        let of_others = crate::marks::of_public_ip(
            &ClusterId { uid: "c2".to_owned(), ..config().cluster },
            &planned(&[], &[]).owner,
        );
        for tags in [json!({ "K8s-Azure-Service": "shop/web" }), json!(of_others)] {
            cloud.change(&path, |ip| ip["tags"] = tags);
            let error = settle(&provider, lb).await.unwrap_err();
            assert!(error.reason() == "AddressNotAvailable" && error.to_string().contains("tag"), "{error}");
        }
        let another = crate::desired::tests::named("other", &[80], &[1]).owner;
        let of_another = crate::marks::of_public_ip(&config().cluster, &another);
        cloud.change(&path, |ip| ip["tags"] = json!(of_another));
        let told = settle(&provider, lb).await.unwrap_err().to_string();
        assert!(told.contains("for another Service."), "{told}");
        assert!(!told.contains(&another.service.to_string()), "a tenant learns nothing of others: {told}");
        cloud.change(&path, |ip| ip["tags"] = json!({}));
        let outcome = settle(&provider, lb).await.unwrap();
        assert_eq!(outcome.ingress[0].ip.unwrap().to_string(), "203.0.113.7");
        assert_eq!(cloud.provider().owned().await.unwrap(), std::slice::from_ref(&lb.owner));
        gone(&cloud.provider(), &lb.owner).await.unwrap();
        assert!(cloud.get(&path).is_some() && cloud.all("loadBalancers").is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn dual_stack_has_a_frontend_and_a_pool_for_each_family() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let mut lb = planned(&[80], &[1]);
    lb.families = vec![Family::V6, Family::V4];
    let ingress = settle(&provider, &lb).await.unwrap().ingress;
    let addresses: Vec<String> = ingress.iter().map(|one| one.ip.unwrap().to_string()).collect();
    assert_eq!(addresses, ["2001:db8::1", "192.0.2.1"], "in the Service's order");
    lb.families = vec![Family::V4];
    assert_eq!(settle(&provider, &lb).await.unwrap().ingress.len(), 1);
    assert_eq!(cloud.all("publicIPAddresses").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn errors_pass_and_what_they_left_is_found() {
    for (action, status, code) in [
        ("PUT publicIPAddresses", 409, "AnotherOperationInProgress"),
        ("PUT publicIPAddresses", 500, "InternalServerError"),
        ("PUT loadBalancers", 400, "ReferencedResourceNotProvisioned"),
        ("PUT loadBalancers", 429, "RetryableError"),
        ("PUT loadBalancers", 503, "ServiceUnavailable"),
        ("GET operations", 500, "InternalServerError"),
        ("GET loadBalancers", 500, "InternalServerError"),
    ] {
        for is_done in [false, true] {
            let cloud = Scripted::new();
            let provider = cloud.provider();
            let lb = planned(&[80], &[1]);
            cloud.fail(action, status, code, is_done);
            let first = settle(&provider, &lb).await;
            let outcome = if first.is_ok() { first } else { settle(&provider, &lb).await };
            assert!(!outcome.unwrap().ingress.is_empty(), "{action} {code}");
            assert_eq!(cloud.all("publicIPAddresses").len(), 1);
            gone(&provider, &lb.owner).await.unwrap();
            assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
        }
    }
}

/// The controller hands over a set once for all Services that use it.
#[tokio::test(start_paused = true)]
async fn shared_set_changes_by_one_write() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let set = |generation, nodes: &[u8]| TargetSet {
        shared: Some(SharedSet::Eligible),
        generation,
        ..TargetSet::own(nodes.iter().map(|index| node(*index)))
    };
    for name in ["web", "other"] {
        settle(&provider, &named(name, &[80], &[]).with_nodes(set(1, &[1, 2]))).await.unwrap();
    }
    cloud.calls();
    provider.set_shared(&set(3, &[1, 2, 3])).await.unwrap();
    assert_eq!(cloud.writes(), ["PUT loadBalancers"]);
    provider.set_shared(&set(2, &[1])).await.unwrap();
    assert!(cloud.writes().is_empty(), "an older one");
    let pools = cloud.all("loadBalancers")[0]["properties"]["backendAddressPools"].clone();
    assert_eq!(pools.as_array().unwrap().len(), 1);
    assert_eq!(pools[0]["properties"]["loadBalancerBackendAddresses"].as_array().unwrap().len(), 3);
}

/// A new node has the name of one whose address another one has.
#[tokio::test(start_paused = true)]
async fn names_and_addresses_of_nodes_change_hands() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let lb = planned(&[80], &[1, 2]);
    settle(&provider, &lb).await.unwrap();
    let named = |index, name: String| Target { node: name, ..node(index) };
    let targets = [named(1, "fresh".to_owned()), named(3, node(1).node)];
    settle(&provider, &lb.with_nodes(TargetSet::own(targets))).await.unwrap();
    let pools = cloud.all("loadBalancers")[0]["properties"]["backendAddressPools"].to_string();
    assert!(pools.contains("\"fresh\"") && !pools.contains(&node(2).node), "{pools}");
}

/// A role without the right to read operations, one that Azure has forgotten, and one that never ends.
#[tokio::test(start_paused = true)]
async fn change_whose_progress_cannot_be_read_is_found_in_the_resource() {
    for status in [403, 404, 410, 500] {
        let cloud = Scripted::new();
        cloud.block("GET operations", status);
        let (provider, lb) = (cloud.provider(), planned(&[80], &[1]));
        let mut rounds = 0;
        while !provider.apply(&lb, Compare::Remembered).await.is_ok_and(|done| !done.ingress.is_empty()) {
            rounds += 1;
            assert!(rounds < 300, "{status}: it is never done");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    let cloud = Scripted::new();
    cloud.never_end();
    let (provider, lb) = (cloud.provider(), planned(&[80], &[1]));
    let mut rounds = 0;
    while !provider.apply(&lb, Compare::Remembered).await.is_ok_and(|done| !done.ingress.is_empty()) {
        rounds += 1;
        assert!(rounds < 300, "it is never done");
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn public_ip_whose_last_change_failed_is_not_used() {
    let cloud = Scripted::new();
    let path = config().public_ip_path(None, "mine");
    let properties = json!({ "ipAddress": "203.0.113.7", "publicIPAllocationMethod": "Static" });
    cloud.put(
        &path,
        json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": properties }),
    );
    cloud.fail_state(&path);
    let lb = annotated(planned(&[80], &[1]), annotations::PIP_NAME, "mine");
    assert_eq!(settle(&cloud.provider(), &lb).await.unwrap_err().reason(), "AddressNotAvailable");
}

/// The write that brings a Service in place runs while it is deleted, or while its scheme changes.
#[tokio::test(start_paused = true)]
async fn service_does_not_come_back_after_its_deletion() {
    for is_moved in [false, true] {
        for steps in 1..12 {
            let cloud = Scripted::new();
            let provider = cloud.with_group();
            let other = named("other", &[80], &[1]);
            settle(&provider, &other).await.unwrap();
            let lb = planned(&[80], &[1]);
            let internal = annotated(lb.clone(), annotations::INTERNAL, "true");
            for _ in 0..steps {
                provider.apply(&internal, Compare::Remembered).await.unwrap();
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
            if is_moved {
                settle(&provider, &lb).await.unwrap();
            }
            gone(&provider, &lb.owner).await.unwrap();
            // Whatever still runs, and whatever others bring in place.
            let moved = annotated(other.clone(), annotations::INTERNAL, "true");
            settle(&provider, &moved).await.unwrap();
            settle(&provider, &other).await.unwrap();
            assert_eq!(provider.owned().await.unwrap(), std::slice::from_ref(&other.owner), "{steps}");
        }
    }
}

/// A policy of Azure writes tags otherwise, or takes them away: that is told, and not written again.
#[tokio::test(start_paused = true)]
async fn public_ip_whose_tags_do_not_stay_serves() {
    for to in [Some("Team"), None] {
        let cloud = Scripted::new();
        cloud.rename_tag("team", to);
        let lb = annotated(planned(&[80], &[1]), annotations::PIP_TAGS, "team=a");
        let provider = cloud.provider();
        for _ in 0..3 {
            let outcome = settle(&provider, &lb).await.unwrap();
            assert_eq!(outcome.incomplete.is_some(), to.is_none(), "{outcome:?}");
            assert!(outcome.incomplete.is_none_or(|(reason, message)| {
                reason == "OperationNotPermitted" && message.contains("team")
            }));
            tokio::time::sleep(Duration::from_mins(10)).await;
            while provider.apply(&lb, Compare::InPlace).await.unwrap().progress != Progress::Done {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        let calls = cloud.writes();
        let writes = calls.iter().filter(|call| call.ends_with("publicIPAddresses")).count();
        assert_eq!(writes, 1, "{calls:?}");
        // Another wish is tried.
        let other = annotated(lb.clone(), annotations::PIP_TAGS, "team=b");
        settle(&provider, &other).await.unwrap();
        assert_eq!(cloud.writes(), ["PUT publicIPAddresses"]);
        gone(&provider, &lb.owner).await.unwrap();
    }
}

/// Somebody makes a public IP of the name after the list was read.
#[tokio::test(start_paused = true)]
async fn public_ip_that_another_made_meanwhile_is_not_overwritten() {
    let cloud = Scripted::new();
    let (provider, lb) = (cloud.provider(), planned(&[80], &[1]));
    provider.check().await.unwrap();
    let name = crate::marks::Mark::new(&config().cluster, &lb.owner).part("v4");
    let theirs = json!({ "location": "westeurope", "tags": { "team": "a" }, "properties": { "ipAddress": "203.0.113.7" } });
    cloud.put(&config().public_ip_path(None, &name), theirs);
    assert_eq!(settle(&provider, &lb).await.unwrap_err().reason(), "ObjectNotOwned");
    assert_eq!(cloud.all("publicIPAddresses")[0]["tags"], json!({ "team": "a" }));
    cloud.remove(&config().public_ip_path(None, &name));
    settle(&provider, &lb).await.unwrap();
}

/// The list of another resource group is read once for an address.
#[tokio::test(start_paused = true)]
async fn public_ip_of_another_group_is_read_by_its_name() {
    let cloud = Scripted::new();
    let provider = cloud.provider();
    let path = config().public_ip_path(Some("net"), "mine");
    let body = json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": { "ipAddress": "203.0.113.7" } });
    cloud.put(&path, body);
    let mut lb = annotated(planned(&[80], &[1]), annotations::RESOURCE_GROUP, "net");
    lb.requested_addresses = vec!["203.0.113.7".parse().unwrap()];
    settle(&provider, &lb).await.unwrap();
    let lists = |cloud: &Scripted| {
        cloud
            .targets()
            .into_iter()
            .filter(|of| of.contains("/net/") && of.ends_with("publicIPAddresses"))
            .count()
    };
    assert_eq!(lists(&cloud), 1);
    let moved = LoadBalancer {
        requested_addresses: lb.requested_addresses.clone(),
        ..annotated(planned(&[80, 81], &[1]), annotations::RESOURCE_GROUP, "net")
    };
    settle(&provider, &moved).await.unwrap();
    assert_eq!(lists(&cloud), 0);
    // Another one has the address now.
    cloud.change(&path, |ip| ip["properties"]["ipAddress"] = json!("203.0.113.8"));
    let other = config().public_ip_path(Some("net"), "other");
    cloud.put(&other, json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": { "ipAddress": "203.0.113.7" } }));
    settle(&provider, &lb).await.unwrap();
    assert!(
        cloud.all("loadBalancers")[0]
            .to_string()
            .contains("/net/providers/Microsoft.Network/publicIPAddresses/other")
    );
}

/// The controller ended, or lost the API server, between the write of the load balancer and that of the status.
#[tokio::test(start_paused = true)]
async fn address_of_a_refused_service_is_handed_over_with_few_requests() {
    let public = planned(&[80], &[1]);
    for lb in [public.clone(), annotated(public, annotations::INTERNAL, "true")] {
        let cloud = Scripted::new();
        let served = settle(&cloud.with_group(), &lb).await.unwrap().ingress;
        let provider = cloud.with_group();
        let refused = annotated(lb.clone(), annotations::IDLE_TIMEOUT, "soon");
        for round in 0..2 {
            let error = provider.apply(&refused, Compare::Remembered).await.unwrap_err();
            assert_eq!(error.reason(), "InvalidAnnotation");
            cloud.calls();
            let outcome = provider.set_targets(&lb.owner, &lb.targets()).await.unwrap();
            assert_eq!((outcome.progress, outcome.ingress), (Progress::Done, served.clone()));
            let calls = cloud.calls();
            let of_ips = calls.iter().filter(|call| call.contains("publicIPAddresses")).count();
            let is_first_public = round == 0 && lb.annotations.is_empty();
            assert_eq!(of_ips, usize::from(is_first_public), "{calls:?}");
            assert!(round == 0 || calls.is_empty(), "{calls:?}");
        }
        gone(&provider, &lb.owner).await.unwrap();
        let outcome = provider.set_targets(&lb.owner, &lb.targets()).await.unwrap();
        assert!(outcome.ingress.is_empty(), "it is gone: {outcome:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn address_of_a_refused_service_without_ports_is_not_handed_over() {
    let cloud = Scripted::new();
    let lb = planned(&[80], &[1]);
    settle(&cloud.provider(), &lb).await.unwrap();
    let path = cloud.all("loadBalancers")[0]["id"].as_str().unwrap().to_owned();
    cloud.change(&path, |body| body["properties"]["loadBalancingRules"] = json!([]));
    let outcome = cloud.provider().set_targets(&lb.owner, &lb.targets()).await.unwrap();
    assert!(outcome.ingress.is_empty(), "{outcome:?}");
}

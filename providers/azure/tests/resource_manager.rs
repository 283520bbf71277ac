// SPDX-License-Identifier: Apache-2.0
//! The provider on a stand-in of Azure Resource Manager that knows Azure's schemas: the conformance suite.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod cloud;

use cloud::Cloud;
use serde_json::{Value, json};
use steerage_provider_azure::annotations;
use steerage_provider_conformance::{converge_deleted, converge_remembered, fixture};
use steerage_requirements::requires;

/// Runs the suite. Operations end at once: a check makes hundreds of calls.
async fn conforms(is_internal: bool) {
    let cloud = Cloud::start(is_internal, 0.0).await.unwrap();
    steerage_provider_conformance::run(&cloud).await.unwrap();
    // What the stand-in does not know, the provider may not rely on.
    let calls = cloud.server.control("GET", "calls", None).unwrap();
    let calls = calls["log"].as_array().unwrap();
    let unknown: Vec<&Value> =
        calls.iter().filter(|call| [500, 501].contains(&call["status"].as_u64().unwrap())).collect();
    assert!(unknown.is_empty() && !calls.is_empty(), "{unknown:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn provider_conforms_with_public_ips() {
    requires!(Clouds);
    conforms(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn provider_conforms_with_private_addresses() {
    requires!(Clouds);
    conforms(true).await;
}

/// Operations end after other calls came.
#[tokio::test(flavor = "multi_thread")]
async fn provider_conforms_where_operations_take_their_time() {
    requires!(Clouds);
    let cloud = Cloud::start(false, 0.01).await.unwrap();
    let names = [
        "second_run_writes_nothing",
        "targets_follow_without_a_structure",
        "removed_sources_leave_without_a_structure",
        "recreated_service_replaces_old_resources",
        "any_order_of_calls_leads_to_the_goal",
        "services_do_not_disturb_each_other",
    ];
    steerage_provider_conformance::run_only(&cloud, &names).await.unwrap();
}

/// The old and the new address are beside each other for a while, which Azure's rules for frontends, ports and public IPs have to allow.
#[tokio::test(flavor = "multi_thread")]
async fn addresses_change_on_a_live_service() {
    requires!(Clouds);
    let cloud = Cloud::start(false, 0.0).await.unwrap();
    for name in ["mine", "other"] {
        let body = json!({ "location": cloud.config.location, "sku": { "name": "Standard" },
            "properties": { "publicIPAllocationMethod": "Static" } });
        cloud.server.network("PUT", &format!("publicIPAddresses/{name}"), Some(&body)).unwrap();
    }
    let own = fixture::with_targets(&cloud, &fixture::first(&cloud, &fixture::owner("moves", 1)), &[0, 1]);
    let annotated = |pairs: &[(&str, &str)]| {
        let mut lb = own.clone();
        lb.annotations.extend(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        lb
    };
    let internal = (annotations::INTERNAL, "true");
    let provider = cloud.provider();
    let mut before = None;
    for lb in [
        own.clone(),
        annotated(&[(annotations::PIP_NAME, "mine")]),
        annotated(&[(annotations::PIP_NAME, "other")]),
        annotated(&[internal]),
        annotated(&[internal, (annotations::SUBNET, "other")]),
        own.clone(),
    ] {
        let address = converge_remembered(&provider, &lb).await.unwrap().ingress[0].ip;
        assert_ne!(address, before);
        let balancers = cloud.all("loadBalancers");
        let fronts: Vec<&Value> =
            balancers.values().flat_map(|body| cloud::parts(body, "frontendIPConfigurations")).collect();
        assert_eq!(fronts.len(), 1, "{fronts:?}");
        before = address;
    }
    converge_deleted(&provider, &own.owner).await.unwrap();
    assert_eq!(cloud.all("publicIPAddresses").len(), 2);
}

/// Azure accepts the write that takes a Service out, and fails it later.
#[tokio::test(flavor = "multi_thread")]
async fn deletion_that_fails_late_disturbs_nobody() {
    requires!(Clouds);
    let cloud = Cloud::start(false, 0.01).await.unwrap();
    let provider = cloud.provider();
    let of = |name: &str, nodes: &[usize]| {
        let owner = fixture::owner(name, 1);
        fixture::with_targets(&cloud, &fixture::first(&cloud, &owner), nodes)
    };
    let [gone, other, third] = ["gone", "other", "third"].map(|name| of(name, &[0]));
    for lb in [&gone, &other, &third] {
        converge_remembered(&provider, lb).await.unwrap();
    }
    let failure = json!({ "code": "InternalServerError", "message": "An error occurred." });
    cloud
        .server
        .inject(&json!({ "call": "loadBalancers.createOrUpdate", "operation_error": failure }))
        .unwrap();
    let error = converge_deleted(&provider, &gone.owner).await.unwrap_err();
    assert!(error.to_string().contains("An error occurred"), "{error}");
    converge_remembered(&provider, &of("other", &[1])).await.unwrap();
    converge_deleted(&provider, &gone.owner).await.unwrap();
    converge_remembered(&provider, &of("third", &[1])).await.unwrap();
    let uid = gone.owner.uid.replace('-', "");
    let left = Value::from_iter(cloud.all("loadBalancers")).to_string();
    assert!(!left.contains(&uid), "{left}");
    assert_eq!(cloud.all("publicIPAddresses").len(), 2);
    for lb in [&other, &third] {
        converge_deleted(&provider, &lb.owner).await.unwrap();
    }
    assert!(cloud.all("loadBalancers").is_empty() && cloud.all("publicIPAddresses").is_empty());
}

// SPDX-License-Identifier: Apache-2.0
//! Who may connect, in the nodes' network security group.

use serde_json::json;
use steerage_provider_api::{AdmittedSources, LoadBalancer, Provider as _, RequestedSources};

use crate::annotations;
use crate::desired::tests::{annotated, planned};
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
        let provider = cloud.guarded();
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
    let provider = cloud.guarded();
    let lb = planned(&[80], &[1]);
    settle(&provider, &lb).await.unwrap();
    let requested =
        RequestedSources { ranges: vec!["10.0.0.0/8".parse().unwrap()], ..RequestedSources::default() };
    let admitted = loop {
        match provider.restrict_sources(&lb.owner, &requested).await {
            Err(error) => assert_eq!(error.reason(), "ProviderConflict"),
            Ok(admitted) => break admitted,
        }
    };
    assert_eq!(admitted, Some(AdmittedSources::Only(["10.0.0.0/8".to_owned()].into())));
    assert_eq!(cloud.all("networkSecurityGroups").len(), 1);
    let unguarded = cloud.provider();
    assert_eq!(
        unguarded.restrict_sources(&lb.owner, &requested).await.unwrap(),
        Some(AdmittedSources::Foreign)
    );
    let other = crate::desired::tests::named("other", &[80], &[1]);
    assert_eq!(provider.restrict_sources(&other.owner, &requested).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn rules_and_tags_of_others_stay() {
    let cloud = Scripted::new();
    let provider = cloud.guarded();
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
    let provider = cloud.guarded();
    assert_eq!(provider.check().await.unwrap_err().reason(), "NoSecurityGroup");
    assert_eq!(settle(&provider, &limited(false)).await.unwrap_err().reason(), "NoSecurityGroup");
    assert!(cloud.all("loadBalancers").is_empty());
    gone(&provider, &limited(false).owner).await.unwrap();
}

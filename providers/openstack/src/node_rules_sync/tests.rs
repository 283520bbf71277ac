// SPDX-License-Identifier: Apache-2.0
//! The nodes' security group over scripted answers.

use serde_json::json;
use steerage_model::Protocol;
use steerage_provider_api::{Compare, LoadBalancer, Provider as _};

use super::*;
use crate::desired::tests::planned;
use crate::scripted::{Scripted, deleted, settle};

const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);
const RULES: &str = "security-group-rules";

fn managing(cloud: &Scripted) -> OpenStack {
    cloud.provider_with(|config| config.security_group = Some("nodes".to_owned()))
}

fn service(name: &str) -> LoadBalancer {
    let owner = Owner { service: Key::new("shop", name), uid: name.to_owned() };
    LoadBalancer { owner, ..planned(&[WEB], &[1]) }
}

/// Somebody's rule in the group.
fn plant(cloud: &Scripted) {
    let rule = json!({ "security_group_id": "nodes", "direction": "ingress", "ethertype": "IPv4", "protocol": "tcp",
        "port_range_min": 22, "port_range_max": 22, "remote_ip_prefix": "10.0.0.0/24", "description": "ssh" });
    cloud.add(RULES, &rule);
}

#[tokio::test(start_paused = true)]
async fn shared_rule_stays_until_the_last_service_goes() {
    let cloud = Scripted::new();
    plant(&cloud);
    let provider = managing(&cloud);
    for name in ["a", "b"] {
        settle(&provider, &service(name)).await.unwrap();
    }
    assert_eq!(cloud.all(RULES).len(), 2, "{:?}", cloud.all(RULES));
    assert_eq!(cloud.writes().iter().filter(|write| write.contains("rules")).count(), 1);
    deleted(&provider, &service("a").owner).await;
    assert_eq!(cloud.all(RULES).len(), 2);
    // After a start, nobody has asked for `b` yet.
    settle(&provider, &service("c")).await.unwrap();
    let restarted = managing(&cloud);
    deleted(&restarted, &service("c").owner).await;
    assert_eq!(cloud.all(RULES).len(), 2);
    deleted(&restarted, &service("b").owner).await;
    let left = cloud.all(RULES);
    assert_eq!((left.len(), &left[0]["description"]), (1, &json!("ssh")));
}

/// Versions before made the rule of the proxy's check port, where it is in the range of node ports, one of the Service's own.
#[tokio::test(start_paused = true)]
async fn rule_that_all_services_share_now_takes_the_place_of_a_services_own() {
    let cloud = Scripted::new();
    cloud.add("subnets", &json!({ "id": "other", "cidr": "10.9.0.0/24", "ip_version": 4 }));
    let provider = || {
        cloud.provider_with(|config| {
            config.security_group = Some("nodes".to_owned());
            config.node_ports = 10_000..=32_767;
        })
    };
    let mut lb = service("a");
    lb.annotations.insert(crate::annotations::MEMBER_SUBNET.to_owned(), "other".to_owned());
    for group in &mut lb.groups {
        (group.health_check.port, group.health_check.is_of_service) = (Some(10_256), false);
    }
    settle(&provider(), &lb).await.unwrap();
    let admits = || {
        let all = cloud.all(RULES);
        let found = all.iter().filter(|rule| rule["port_range_min"] == json!(10_256));
        found.map(|rule| rule["description"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let of_all = marks::shared_rule(&provider().config.cluster);
    assert_eq!(admits(), std::slice::from_ref(&of_all));
    let own = json!({ "description": marks::floating(&provider().config.cluster, &lb.owner) });
    cloud.set(RULES, ("description", &of_all), &own);
    assert_eq!(admits(), [own["description"].as_str().unwrap()]);
    let provider = provider();
    provider.apply(&lb, Compare::InPlace).await.unwrap();
    settle(&provider, &lb).await.unwrap();
    assert_eq!(admits(), [of_all]);
}

/// As where the project sees it no more.
#[tokio::test(start_paused = true)]
async fn missing_member_subnet_keeps_all_rules() {
    let cloud = Scripted::new();
    settle(&managing(&cloud), &service("a")).await.unwrap();
    let before = cloud.all(RULES);
    assert!(!before.is_empty());
    cloud.remove("subnets", "members");
    let outcome = settle(&managing(&cloud), &service("a")).await.unwrap();
    assert!(outcome.incomplete.is_some_and(|(_, message)| message.contains("members")));
    assert_eq!(cloud.all(RULES), before);
}

/// Each change ends in a new process, which knows nothing, or in one that knew the earlier Service.
#[tokio::test(start_paused = true)]
async fn rules_that_nothing_needs_any_more_go_with_the_change() {
    let cloud = Scripted::new();
    let first = managing(&cloud);
    let both =
        LoadBalancer { owner: service("a").owner, ..planned(&[WEB, (Protocol::Udp, 53, 30053)], &[1]) };
    settle(&first, &both).await.unwrap();
    assert_eq!(cloud.all(RULES).len(), 2);
    let unused = cloud.all(RULES).into_iter().find(|rule| rule["protocol"] == "udp").unwrap();
    settle(&first, &service("a")).await.unwrap();
    assert_eq!(cloud.all(RULES).len(), 1);
    // The process ended before its last request: the load balancer is complete.
    cloud.add(RULES, &unused);
    settle(&managing(&cloud), &service("a")).await.unwrap();
    assert_eq!(cloud.all(RULES).len(), 1);
    settle(&first, &both).await.unwrap();
    let mut again = service("a");
    "u2".clone_into(&mut again.owner.uid);
    settle(&first, &again).await.unwrap();
    assert_eq!(cloud.all(RULES).len(), 1);
    deleted(&first, &again.owner).await;
    assert!(cloud.all(RULES).is_empty());
}

#[tokio::test(start_paused = true)]
async fn rule_beyond_the_quota_is_told_and_holds_up_nothing() {
    let cloud = Scripted::new();
    let provider = managing(&cloud);
    for _ in 0..2 {
        cloud.fail(
            "POST security-group-rules",
            409,
            "Quota exceeded for resources: ['security_group_rule'].",
        );
    }
    let outcome = settle(&provider, &service("a")).await.unwrap();
    let (reason, message) = outcome.incomplete.unwrap();
    assert!(reason == "QuotaExceeded" && message.contains("tcp 30000-32767 from 10.0.0.0/24"), "{message}");
    assert!(!outcome.ingress.is_empty() && outcome.retry_refused.is_some());
    let outcome = settle(&provider, &service("a")).await.unwrap();
    assert_eq!((outcome.incomplete, outcome.retry_refused, cloud.all(RULES).len()), (None, None, 1));
}

fn ovn(cloud: &Scripted) -> OpenStack {
    cloud.provider_with(|config| {
        "ovn".clone_into(&mut config.provider);
        config.security_group = Some("nodes".to_owned());
    })
}

/// Neutron fails or refuses: members change, and the Service goes.
#[tokio::test(start_paused = true)]
async fn failing_rules_hold_up_nothing() {
    for (status, reason) in [(500, "ProviderUnavailable"), (403, "ProviderDenied")] {
        let cloud = Scripted::new();
        let provider = ovn(&cloud);
        for _ in 0..2 {
            cloud.fail("GET security-group-rules", status, "oops");
        }
        let outcome = settle(&provider, &service("a")).await.unwrap();
        let (found, message) = outcome.incomplete.unwrap();
        assert!(found == reason && message.contains("oops"), "{found} {message}");
        assert!(outcome.retry_refused.is_some());
        let more = LoadBalancer { groups: planned(&[WEB], &[1, 2]).groups, ..service("a") };
        cloud.fail("GET security-group-rules", status, "oops");
        settle(&provider, &more).await.unwrap();
        assert_eq!(cloud.all("pools")[0]["members"].as_array().unwrap().len(), 2);
        let outcome = settle(&provider, &more).await.unwrap();
        assert_eq!((outcome.incomplete, cloud.all(RULES).len()), (None, 1));
    }
    let cloud = Scripted::new();
    let provider = ovn(&cloud);
    settle(&provider, &service("a")).await.unwrap();
    cloud.fail("GET security-group-rules", 403, "no");
    deleted(&provider, &service("a").owner).await;
    assert!(cloud.all("loadbalancers").is_empty());
    cloud.fail("GET security-group-rules", 403, "no");
    provider.owned().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn refused_service_opens_nothing() {
    let cloud = Scripted::new();
    let provider = ovn(&cloud);
    settle(&provider, &service("a")).await.unwrap();
    let changed = [(crate::annotations::SUBNET.to_owned(), "other".to_owned())];
    let wrong = LoadBalancer {
        owner: service("a").owner,
        annotations: changed.into(),
        ..planned(&[(Protocol::Tcp, 80, 30081)], &[1])
    };
    assert_eq!(settle(&provider, &wrong).await.unwrap_err().reason(), "AddressImmutable");
    assert_eq!(cloud.all(RULES).len(), 1);
    assert_eq!(cloud.all(RULES)[0]["port_range_min"], 30080);
}

/// Many rules are made by several calls; a quota ends them at once.
#[tokio::test(start_paused = true)]
async fn each_call_makes_a_bounded_number_of_rules() {
    let many = |count: u8| LoadBalancer {
        source_ranges: (0..count).map(|index| format!("192.0.{index}.0/24").parse().unwrap()).collect(),
        ..service("a")
    };
    let cloud = Scripted::new();
    let provider = ovn(&cloud);
    let posts = |cloud: &Scripted| {
        cloud.writes().iter().filter(|write| *write == "POST security-group-rules").count()
    };
    provider.apply(&many(50), Compare::InPlace).await.unwrap();
    assert_eq!(posts(&cloud), MAX_REQUESTS);
    settle(&provider, &many(50)).await.unwrap();
    assert_eq!(cloud.all(RULES).len(), 51);
    posts(&cloud);
    for _ in 0..3 {
        cloud.fail(
            "POST security-group-rules",
            409,
            "Quota exceeded for resources: ['security_group_rule'].",
        );
    }
    let other = planned(&[(Protocol::Tcp, 80, 30081)], &[1]);
    let more = LoadBalancer { owner: service("b").owner, source_ranges: many(50).source_ranges, ..other };
    provider.apply(&more, Compare::InPlace).await.unwrap();
    assert_eq!(posts(&cloud), 1);
}

/// Room comes when the unused rules go.
#[tokio::test(start_paused = true)]
async fn full_quota_becomes_free_with_the_change() {
    let cloud = Scripted::new();
    let provider = ovn(&cloud);
    settle(&provider, &service("a")).await.unwrap();
    let moved = LoadBalancer { owner: service("a").owner, ..planned(&[(Protocol::Tcp, 80, 30081)], &[1]) };
    for _ in 0..4 {
        cloud.fail(
            "POST security-group-rules",
            409,
            "Quota exceeded for resources: ['security_group_rule'].",
        );
    }
    for _ in 0..6 {
        settle(&provider, &moved).await.unwrap();
    }
    let left = cloud.all(RULES);
    assert_eq!((left.len(), &left[0]["port_range_min"]), (1, &json!(30081)), "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn node_port_of_an_earlier_service_is_admitted_anew() {
    let cloud = Scripted::new();
    let provider = ovn(&cloud);
    settle(&provider, &service("a")).await.unwrap();
    let b = LoadBalancer { source_ranges: vec!["192.0.2.0/24".parse().unwrap()], ..service("b") };
    settle(&provider, &b).await.unwrap();
    let all = cloud.all(RULES);
    assert!(all.iter().all(|rule| rule["remote_ip_prefix"] != "0.0.0.0/0"), "{all:?}");
    assert!(all.iter().all(|rule| rule["description"].as_str().unwrap().contains("shop/b")), "{all:?}");
    settle(&provider, &service("b")).await.unwrap();
    deleted(&provider, &service("a").owner).await;
    assert_eq!(cloud.all(RULES).len(), 1);
}

/// Another Service goes while one changes: the old pools still need the old rule.
#[test]
fn old_needs_stay_until_the_change_is_complete() {
    let rule =
        |first| NodeRule { protocol: "tcp", first, last: first, source: "10.0.0.0/8".parse().unwrap() };
    let (old, new) = (BTreeSet::from([rule(1)]), BTreeSet::from([rule(2)]));
    let (mut needs, owner) = (SharedNeeds::default(), service("a").owner);
    let owners = BTreeSet::from([owner.clone()]);
    needs.add(&owner, &old);
    assert_eq!(needs.of_all(&owners), None, "what it used before is not known");
    needs.settle(&owner, &old);
    needs.add(&owner, &new);
    assert_eq!(needs.of_all(&owners), Some(BTreeSet::from([rule(1), rule(2)])));
    needs.settle(&owner, &new);
    assert_eq!(needs.of_all(&owners), Some(new));
}

#[tokio::test(start_paused = true)]
async fn changed_rules_are_repaired_and_unchanged_ones_cost_one_read() {
    let cloud = Scripted::new();
    let provider = managing(&cloud);
    settle(&provider, &service("a")).await.unwrap();
    let id = cloud.all(RULES)[0]["id"].as_str().unwrap().to_owned();
    cloud.remove(RULES, &id);
    cloud.calls();
    provider.apply(&service("a"), Compare::InPlace).await.unwrap();
    assert_eq!(cloud.all(RULES).len(), 1);
    cloud.calls();
    provider.apply(&service("a"), Compare::InPlace).await.unwrap();
    let calls = cloud.calls();
    assert_eq!(calls.iter().filter(|call| call.contains("rules")).count(), 1, "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn rules_that_outlive_their_service_are_found() {
    let cloud = Scripted::new();
    let provider = cloud.provider_with(|config| {
        "ovn".clone_into(&mut config.provider);
        config.security_group = Some("nodes".to_owned());
    });
    settle(&provider, &service("a")).await.unwrap();
    let id = cloud.all("loadbalancers")[0]["id"].as_str().unwrap().to_owned();
    for (kind, id) in [
        ("loadbalancers", id),
        ("floatingips", cloud.all("floatingips")[0]["id"].as_str().unwrap().to_owned()),
    ] {
        cloud.remove(kind, &id);
    }
    assert_eq!(provider.owned().await.unwrap(), [service("a").owner]);
    deleted(&provider, &service("a").owner).await;
    assert!(cloud.all(RULES).is_empty() && provider.owned().await.unwrap().is_empty());
}

// SPDX-License-Identifier: Apache-2.0
//! Tables of answers and what is read from them.

use super::*;

const BASE: &str = "https://www.googleapis.com/compute/v1/projects/p";

fn answers() -> Answers {
    let url = |path: &str| format!("{BASE}/{path}");
    let groups = ["a", "b"].map(|zone| url(&format!("zones/r-{zone}/networkEndpointGroups/web")));
    let service = json!({
        "healthChecks": [url("regions/r/healthChecks/nodes")],
        "backends": groups.each_ref().map(|group| json!({ "group": group })),
        "sessionAffinity": "NONE",
        "localityLbPolicy": "MAGLEV",
        "connectionDraining": { "drainingTimeoutSec": 30 },
    });
    let check = json!({
        "type": "HTTP", "checkIntervalSec": 3, "timeoutSec": 1, "healthyThreshold": 1, "unhealthyThreshold": 4,
        "httpHealthCheck": { "port": 10256, "requestPath": "/healthz" },
    });
    let rule = |name: &str, protocol: &str, address: &str| {
        json!({
            "name": name, "IPAddress": address, "IPProtocol": protocol, "ports": ["80", "443"], "loadBalancingScheme": "EXTERNAL",
            "backendService": url("regions/r/backendServices/web"),
        })
    };
    let firewall = |allowed: &str, priority: u32| {
        json!({
            "direction": "INGRESS", "priority": priority, "targetTags": ["node"], "sourceRanges": ["10.78.0.0/16"],
            "destinationRanges": ["198.18.0.7"], allowed: [{ "IPProtocol": "tcp", "ports": ["80", "90-99"] }],
        })
    };
    let endpoint = |zone: &str, last: u8| json!({ "instance": url(&format!("zones/r-{zone}/instances/n{last}")), "ipAddress": format!("10.77.1.{last}") });
    let instance = |last: u8| {
        let external = json!([{ "externalIpv6": format!("fd77::1:{last}") }]);
        json!({ "tags": { "items": ["node"] }, "networkInterfaces": [{ "ipv6AccessConfigs": external }] })
    };
    Answers {
        rules: vec![
            rule("tcp", "TCP", "198.18.0.7"),
            rule("udp", "UDP", "198.18.0.7"),
            rule("six", "TCP", "fd79:0:0:0:8000:0:0:0/96"),
        ],
        services: [(url("regions/r/backendServices/web"), service)].into(),
        checks: [(url("regions/r/healthChecks/nodes"), check)].into(),
        endpoints: [(groups[0].clone(), vec![endpoint("a", 1)]), (groups[1].clone(), vec![endpoint("b", 2)])]
            .into(),
        firewalls: vec![firewall("allowed", 1000), firewall("denied", 1000), firewall("allowed", 900)],
        instances: [("r-a/n1".to_owned(), instance(1)), ("r-b/n2".to_owned(), instance(2))].into(),
    }
}

#[test]
fn rule_has_a_pool_with_the_endpoints_of_all_zones() {
    let cloud = answers().cloud();
    let rule = &cloud.rules[0];
    assert_eq!((rule.vip, rule.transport), ([198, 18, 0, 7].into(), Transport::Tcp));
    assert_eq!((&rule.ports[..], rule.affinity), (&[80..=80, 443..=443][..], Affinity::Flow));
    assert!(rule.fails_open && !rule.is_weighted);
    let pool = &cloud.pools["tcp"];
    let targets: Vec<_> = pool.group.targets.iter().map(|(id, at)| (id.as_str(), at.to_string())).collect();
    assert_eq!(targets, [("r-a/n1", "10.77.1.1:0".to_owned()), ("r-b/n2", "10.77.1.2:0".to_owned())]);
    assert_eq!((pool.checked_at, pool.prober), (Some(rule.vip), [35, 191, 0, 1].into()));
    let Check { port, interval, timeout, healthy_threshold, unhealthy_threshold, .. } = pool.group.check;
    assert_eq!((port, healthy_threshold, unhealthy_threshold), (Some(10256), 1, 4));
    assert_eq!((interval, timeout), (Duration::from_secs(3), Duration::from_secs(1)));
}

#[test]
fn ipv6_rule_sends_to_the_vms_ipv6_addresses() {
    let cloud = answers().cloud();
    let rule = &cloud.rules[2];
    assert_eq!(rule.vip.to_string(), "fd79::8000:0:0:0");
    let targets = &cloud.pools["six"].group.targets;
    assert_eq!(targets["r-b/n2"].to_string(), "[fd77::1:2]:0");
}

#[test]
fn flows_stay_with_a_target_as_the_protocol_and_the_policy_say() {
    let ends = |policy: &str, rule: &str| {
        let mut answers = answers();
        let service = answers.services.values_mut().next().unwrap();
        service["connectionTrackingPolicy"] = json!({ "connectionPersistenceOnUnhealthyBackends": policy });
        answers.cloud().pools[rule].group.attributes.unhealthy_flows_end_after
    };
    for (policy, tcp, udp) in [
        ("DEFAULT_FOR_PROTOCOL", false, true),
        ("NEVER_PERSIST", true, true),
        ("ALWAYS_PERSIST", false, false),
    ] {
        assert_eq!(ends(policy, "tcp").is_some(), tcp, "{policy}");
        assert_eq!(ends(policy, "udp").is_some(), udp, "{policy}");
    }
    assert_eq!(answers().cloud().pools["tcp"].group.attributes.deregistration_delay, Duration::from_secs(30));
}

#[test]
fn ports_are_a_list_a_range_or_all() {
    let ports = |field: &str, value: Value| {
        let mut answers = answers();
        answers.rules[0]["ports"].take();
        answers.rules[0][field] = value;
        answers.cloud().rules[0].ports.clone()
    };
    assert_eq!(ports("portRange", "80-90".into()), [80..=90]);
    assert_eq!(ports("allPorts", true.into()), [0..=65535]);
}

#[test]
fn service_says_affinity_and_weights() {
    let mut answers = answers();
    let service = answers.services.values_mut().next().unwrap();
    service["sessionAffinity"] = "CLIENT_IP".into();
    service["localityLbPolicy"] = "WEIGHTED_MAGLEV".into();
    let rule = answers.cloud().rules.remove(0);
    assert!(rule.is_weighted && rule.affinity == Affinity::Client);
}

#[test]
fn what_refers_to_nothing_yet_is_left_out() {
    let mut answers = answers();
    answers.checks.clear();
    assert_eq!(answers.cloud().rules, []);
}

#[test]
fn firewall_rules_decide_by_priority_and_denials_first() {
    let allows =
        |answers: &Answers| answers.cloud().filters.iter().map(|filter| filter.allows).collect::<Vec<_>>();
    let mut answers = answers();
    assert_eq!(allows(&answers), [true, false, true]);
    let filter = &answers.cloud().filters[0];
    assert_eq!((filter.transport, &filter.ports[..]), (Some(Transport::Tcp), &[80..=80, 90..=99][..]));
    assert_eq!(filter.destinations, [IpNet::from(IpAddr::from([198, 18, 0, 7]))]);
    answers.firewalls[2]["disabled"] = true.into();
    answers.firewalls[1]["targetTags"] = json!(["other"]);
    assert_eq!(allows(&answers), [true], "only what applies to the nodes");
}

// SPDX-License-Identifier: Apache-2.0
//! Tables of answers and what is read from them.

use super::*;

fn answers() -> Answers {
    let id = |part: &str| json!({ "id": format!("/subscriptions/s/LB/{part}") });
    let address = |address: &str| json!({ "properties": { "ipAddress": address } });
    let rule = |front: &str, pool: &str, protocol: &str, floating: bool| {
        json!({ "properties": {
            "frontendIPConfiguration": id(front), "backendAddressPool": id(pool), "probe": id("probe"),
            "protocol": protocol, "frontendPort": 80, "backendPort": 80, "enableFloatingIP": floating,
        } })
    };
    let with_id = |part: &str, properties: Value| json!({ "id": format!("/subscriptions/S/lb/{part}"), "properties": properties });
    let balancer = json!({ "properties": {
        "frontendIPConfigurations": [
            with_id("web", json!({ "publicIPAddress": { "id": "/IPs/Web" } })),
            with_id("web6", json!({ "publicIPAddress": { "id": "/ips/web6" } })),
            with_id("internal", json!({ "privateIPAddress": "10.77.255.254" })),
        ],
        "backendAddressPools": [
            with_id("nodes", json!({ "loadBalancerBackendAddresses": [address("10.77.1.1"), address("10.77.1.2")] })),
            with_id("nodes6", json!({ "loadBalancerBackendAddresses": [address("fd77::1:1")] })),
        ],
        "probes": [with_id("probe", json!({
            "protocol": "Http", "port": 10256, "requestPath": "/healthz", "intervalInSeconds": 5, "probeThreshold": 2,
        }))],
        "loadBalancingRules": [
            rule("web", "nodes", "Tcp", true),
            rule("web6", "nodes6", "Udp", true),
            rule("internal", "nodes", "All", true),
            rule("web", "nodes", "Udp", false),
        ],
    } });
    let ip = |id: &str, address: &str| json!({ "id": id, "properties": { "ipAddress": address } });
    Answers {
        balancers: vec![balancer],
        public_ips: vec![ip("/ips/web", "198.19.0.4"), ip("/ips/web6", "fd79::4")],
        security_groups: Vec::new(),
    }
}

#[test]
fn rules_with_floating_ip_send_to_their_pools() {
    let cloud = answers().cloud();
    let shown = cloud.rules.iter().map(|rule| {
        let targets: Vec<_> = cloud.pools[&rule.pool].group.targets.keys().cloned().collect();
        format!("{} {} {:?} {}", rule.vip, rule.transport.as_str(), rule.ports, targets.join(" "))
    });
    assert_eq!(
        shown.collect::<Vec<_>>(),
        [
            "198.19.0.4 tcp [80..=80] 10.77.1.1 10.77.1.2",
            "fd79::4 udp [80..=80] fd77::1:1",
            "10.77.255.254 tcp [80..=80] 10.77.1.1 10.77.1.2",
            "10.77.255.254 udp [80..=80] 10.77.1.1 10.77.1.2",
        ]
    );
    assert_eq!(cloud.rules[0].pool, cloud.rules[2].pool, "probes are of a pool");
    assert!(cloud.rules.iter().all(|rule| !rule.fails_open && !rule.is_weighted));
    let pool = &cloud.pools[&cloud.rules[0].pool];
    assert_eq!((pool.checked_at, pool.prober), (None, [168, 63, 129, 16].into()));
    assert_eq!((pool.group.check.port, pool.group.check.path.as_deref()), (Some(10256), Some("/healthz")));
    assert_eq!(pool.group.check.unhealthy_threshold, 2);
}

#[test]
fn rule_says_affinity() {
    for (distribution, affinity) in
        [("Default", Affinity::Flow), ("SourceIP", Affinity::Client), ("SourceIPProtocol", Affinity::Client)]
    {
        let mut answers = answers();
        let rule = &mut answers.balancers[0]["properties"]["loadBalancingRules"][0]["properties"];
        rule["loadDistribution"] = distribution.into();
        assert_eq!(answers.cloud().rules[0].affinity, affinity, "{distribution}");
    }
}

#[test]
fn security_rules_decide_by_priority_and_the_defaults_last() {
    let rule = |priority: u32, access: &str, fields: Value| {
        let mut rule = json!({
            "priority": priority, "access": access, "direction": "Inbound", "protocol": "*", "sourceAddressPrefix": "*",
            "destinationAddressPrefix": "*", "destinationPortRange": "*",
        });
        rule.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({ "properties": rule })
    };
    let group = json!({ "properties": {
        "securityRules": [
            rule(2001, "Deny", json!({ "destinationAddressPrefix": "198.19.0.4" })),
            rule(2000, "Allow", json!({
                "protocol": "Tcp", "sourceAddressPrefix": null, "sourceAddressPrefixes": ["10.78.1.1", "192.0.2.0/24"],
                "destinationPortRange": null, "destinationPortRanges": ["80", "90-99"],
            })),
            rule(2002, "Allow", json!({ "sourceAddressPrefix": "AzureCloud" })),
            rule(2003, "Allow", json!({ "direction": "Outbound" })),
        ],
        "defaultSecurityRules": [
            rule(65000, "Allow", json!({
                "sourceAddressPrefix": "VirtualNetwork", "destinationAddressPrefix": "VirtualNetwork",
            })),
            rule(65001, "Allow", json!({ "sourceAddressPrefix": "AzureLoadBalancer" })),
            rule(65500, "Deny", json!({})),
        ],
    } });
    let filters = Answers { security_groups: vec![group], ..Answers::default() }.cloud().filters;
    let shown = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let shown: Vec<_> = filters
        .iter()
        .map(|filter| format!("{} {}", filter.allows, shown(&filter.sources)).trim().to_owned())
        .collect();
    let probers = "true 168.63.129.16/32 fe80::1234:5678:9abc/128";
    let network = "true 10.77.0.0/16 fd77::/64 10.78.0.0/16 fd78::/64";
    assert_eq!(shown, ["true 10.78.1.1/32 192.0.2.0/24", "false", network, probers, "false"]);
    assert_eq!(filters[0].ports, [80..=80, 90..=99]);
    assert_eq!(filters[0].transport, Some(Transport::Tcp));
}

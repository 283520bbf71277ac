// SPDX-License-Identifier: Apache-2.0
//! Rules of a security group of the nodes.

use super::*;

/// A security group of the cluster's project, as operators give one to all nodes.
fn security_group(cloud: &Cloud, name: &str) -> String {
    let body = json!({ "security_group": { "name": name } });
    let made = cloud.server.call("POST", "/network/v2.0/security-groups", Some(&body)).unwrap();
    id(&made["security_group"]).to_owned()
}

/// Ingress rules: protocol, ports, source.
fn rules(cloud: &Cloud, group: &str) -> Vec<String> {
    let path = format!("/network/v2.0/security-group-rules?security_group_id={group}&direction=ingress");
    let found = cloud.server.call("GET", &path, None).unwrap();
    let shown = |rule: &serde_json::Value| {
        let text = |key: &str| rule[key].to_string().replace('"', "");
        format!(
            "{} {}-{} {}",
            text("protocol"),
            text("port_range_min"),
            text("port_range_max"),
            text("remote_ip_prefix")
        )
    };
    let mut all: Vec<String> = found["security_group_rules"].as_array().unwrap().iter().map(shown).collect();
    all.sort();
    all
}

#[tokio::test]
async fn nodes_admit_amphorae_by_few_rules() {
    requires!(OpenStack);
    let cloud = Cloud::shared("rules").await.unwrap();
    let group = security_group(&cloud, "rules");
    let ssh = json!({ "security_group_rule": { "security_group_id": group, "direction": "ingress", "protocol": "tcp",
        "port_range_min": 22, "port_range_max": 22 } });
    cloud.server.call("POST", "/network/v2.0/security-group-rules", Some(&ssh)).unwrap();
    let config =
        steerage_provider_openstack::Config { security_group: Some(group.clone()), ..cloud.config.clone() };
    let provider = cloud.provider(config.clone()).unwrap();
    let lbs = ["rules-a", "rules-b"].map(|name| annotated(web(&cloud, name), INTERNAL, "true"));
    for lb in &lbs {
        converge_remembered(&provider, lb).await.unwrap();
    }
    let expected = ["tcp 22-22 null", "tcp 30000-32767 10.0.0.0/16"];
    assert_eq!(rules(&cloud, &group), expected);
    // Somebody deletes it.
    let path = format!("/network/v2.0/security-group-rules?security_group_id={group}&port_range_min=30000");
    let found = cloud.server.call("GET", &path, None).unwrap();
    let rule = id(&found["security_group_rules"][0]).to_owned();
    cloud.server.call("DELETE", &format!("/network/v2.0/security-group-rules/{rule}"), None).unwrap();
    let restarted = cloud.provider(config).unwrap();
    converge(&restarted, &lbs[0]).await.unwrap();
    assert_eq!(rules(&cloud, &group), expected);
    cloud.proxy().reset();
    converge(&restarted, &lbs[1]).await.unwrap();
    assert!(writes(&cloud).is_empty());
    converge_deleted(&restarted, &lbs[0].owner).await.unwrap();
    assert_eq!(rules(&cloud, &group), expected);
    converge_deleted(&restarted, &lbs[1].owner).await.unwrap();
    assert_eq!(rules(&cloud, &group), expected[..1]);
}

#[tokio::test]
async fn source_ranges_restrict_clients_of_ovn_by_rules() {
    requires!(OpenStack);
    let cloud = Cloud::shared("ovn-rules").await.unwrap();
    let group = security_group(&cloud, "ovn-rules");
    let config = steerage_provider_openstack::Config {
        provider: "ovn".to_owned(),
        security_group: Some(group.clone()),
        ..cloud.config.clone()
    };
    let provider = cloud.provider(config).unwrap();
    let mut lb = annotated(web(&cloud, "ovn-rules"), INTERNAL, "true");
    converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(rules(&cloud, &group), ["tcp 30080-30080 0.0.0.0/0"]);
    lb.source_ranges = vec!["192.0.2.0/24".parse().unwrap(), "198.51.100.0/24".parse().unwrap()];
    let restricted =
        ["tcp 30080-30080 10.0.0.0/16", "tcp 30080-30080 192.0.2.0/24", "tcp 30080-30080 198.51.100.0/24"];
    converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(rules(&cloud, &group), restricted);
    // The port of the nodes changes.
    let moved = fixture::with_listeners(lb.clone(), vec![listener(Protocol::Tcp, 80, 30081)]);
    let moved = fixture::with_targets(&cloud, &moved, &[0, 1]);
    converge_remembered(&provider, &moved).await.unwrap();
    assert_eq!(rules(&cloud, &group), restricted.map(|rule| rule.replace("30080", "30081")));
    // While the Service is refused, clients that it does not admit any more go.
    let requested = steerage_provider_api::RequestedSources {
        ranges: vec!["192.0.2.128/25".parse().unwrap()],
        ..Default::default()
    };
    let admitted = provider.restrict_sources(&lb.owner, &requested).await.unwrap().unwrap();
    assert!(matches!(&admitted, steerage_provider_api::AdmittedSources::WithOthers(_)), "{admitted:?}");
    assert_eq!(rules(&cloud, &group), ["tcp 30081-30081 10.0.0.0/16", "tcp 30081-30081 192.0.2.128/25"]);
    converge_deleted(&provider, &lb.owner).await.unwrap();
    assert_eq!(rules(&cloud, &group), [""; 0]);
}

// SPDX-License-Identifier: Apache-2.0
//! What is read from the stand-ins, of load balancers that were made through their APIs.

#![allow(clippy::unwrap_used)] // the helpers of a test may fail it too; the lint knows test functions only

use std::net::{IpAddr, SocketAddr};

use serde_json::{Value, json};
use steerage_nlb::cloud::Transport;
use steerage_passthrough::args::Node;
use steerage_passthrough::cloud::Cloud;
use steerage_passthrough::{azure, gce};
use steerage_requirements::requires;
use steerage_testclouds::{Cloud as Which, Server};

fn nodes() -> Vec<Node> {
    let node = |number: u8, zone: &str| Node {
        name: format!("node{number}"),
        ipv4: [10, 77, 1, number].into(),
        ipv6: format!("fd77::1:{number}").parse().unwrap(),
        zone: zone.to_owned(),
        netns: String::new(),
    };
    vec![node(1, "us-central1-a"), node(2, "us-central1-b")]
}

/// VIP, protocol and targets of each rule.
fn shown(cloud: &Cloud) -> Vec<String> {
    let mut rules: Vec<_> = cloud
        .rules
        .iter()
        .map(|rule| {
            let targets = cloud.pools[&rule.pool].group.targets.values();
            let targets: Vec<_> = targets.map(|target| target.ip().to_string()).collect();
            format!("{} {} {}", rule.vip, rule.transport.as_str(), targets.join(" "))
        })
        .collect();
    rules.sort();
    rules
}

fn admits(cloud: &Cloud, client: &str, vip: IpAddr) -> bool {
    cloud.admits(client.parse().unwrap(), SocketAddr::new(vip, 80), Transport::Tcp)
}

#[test]
fn load_balancer_of_gce_is_read_and_its_health_told() {
    requires!(Clouds);
    let settings = json!({ "external_range": "10.79.0.0/24", "unprobed": "UNHEALTHY", "anonymous": true });
    let server = Server::start(Which::Gce, &settings).unwrap();
    gce::seed(&server, &nodes(), &["fd79::/64".parse().unwrap()]).unwrap();
    let region = format!("regions/{}", server.setting("region"));
    let link = |path: &str| {
        let project = server.setting("project");
        format!("https://www.googleapis.com/compute/v1/projects/{project}/{path}")
    };
    let make = |path: &str, body: Value| server.compute("POST", path, Some(&body)).unwrap();
    let check = json!({ "name": "check", "type": "HTTP", "httpHealthCheck": { "port": 10256, "requestPath": "/healthz" } });
    make(&format!("{region}/healthChecks"), check);
    let mut backends = Vec::new();
    for (node, zone) in [("node1", "us-central1-a"), ("node2", "us-central1-b")] {
        let subnetwork = format!("{region}/subnetworks/{}", gce::SUBNET);
        let groups = format!("zones/{zone}/networkEndpointGroups");
        make(
            &groups,
            json!({
                "name": "web", "networkEndpointType": "GCE_VM_IP", "network": "global/networks/default", "subnetwork": subnetwork,
            }),
        );
        let endpoints = json!({ "networkEndpoints": [{ "instance": node }] });
        make(&format!("{groups}/web/attachNetworkEndpoints"), endpoints);
        backends.push(json!({ "group": link(&format!("{groups}/web")), "balancingMode": "CONNECTION" }));
    }
    make(
        &format!("{region}/backendServices"),
        json!({
            "name": "web", "protocol": "UNSPECIFIED", "healthChecks": [link(&format!("{region}/healthChecks/check"))], "backends": backends,
        }),
    );
    let service = link(&format!("{region}/backendServices/web"));
    let rule = |name: &str, more: Value| {
        let mut body =
            json!({ "name": name, "IPProtocol": "TCP", "ports": ["80"], "backendService": service });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        make(&format!("{region}/forwardingRules"), body);
    };
    rule("four", json!({}));
    let subnetwork = format!("{region}/subnetworks/{}", gce::SUBNET);
    rule("six", json!({ "IPProtocol": "UDP", "ipVersion": "IPV6", "subnetwork": subnetwork }));
    make(
        "global/firewalls",
        json!({
            "name": "web", "network": "global/networks/default", "allowed": [{ "IPProtocol": "tcp", "ports": ["80"] }],
            "sourceRanges": ["10.78.0.0/16"], "targetTags": [gce::TAG],
        }),
    );

    let cloud = gce::Answers::read(&server).unwrap().cloud();
    let rules = shown(&cloud);
    assert_eq!(rules, ["10.79.0.11 tcp 10.77.1.1 10.77.1.2", "fd79::8000:0:0 udp fd77::1:1 fd77::1:2"]);
    let vip = [10, 79, 0, 11].into();
    assert!(admits(&cloud, "10.78.1.1", vip) && !admits(&cloud, "10.80.1.1", vip));
    assert_eq!(cloud.pools["four"].group.check.path.as_deref(), Some("/healthz"));

    let state = || {
        let group = json!({ "group": backends[0]["group"] });
        let path = format!("{region}/backendServices/web/getHealth");
        let health = server.compute("POST", &path, Some(&group)).unwrap();
        health["healthStatus"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["healthState"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(state(), ["UNHEALTHY", "UNHEALTHY"]);
    let found = json!({ "state": "HEALTHY" });
    gce::report(&server, &[("four/us-central1-a/node1".to_owned(), found)].into()).unwrap();
    assert_eq!(state(), ["HEALTHY", "UNHEALTHY"]);
}

#[test]
fn load_balancer_of_azure_is_read() {
    requires!(Clouds);
    let server =
        Server::start(Which::Azure, &json!({ "public_range": "10.79.0.0/24", "anonymous": true })).unwrap();
    azure::seed(&server, &nodes()).unwrap();
    let location = server.setting("location").to_owned();
    let put = |resource: &str, properties: Value| {
        let body = json!({ "location": location, "sku": { "name": "Standard" }, "properties": properties });
        server.network("PUT", resource, Some(&body)).unwrap()
    };
    let ip = put("publicIPAddresses/web", json!({ "publicIPAllocationMethod": "Static" }));
    let vip: IpAddr = ip["properties"]["ipAddress"].as_str().unwrap().parse().unwrap();
    let part = |name: &str| json!({ "id": server.azure_id(&format!("loadBalancers/web/{name}")) });
    let network = json!({ "id": server.azure_id("virtualNetworks/lab") });
    let address = |node: &Node| json!({ "name": node.name, "properties": { "ipAddress": node.ipv4, "virtualNetwork": network } });
    let addresses: Vec<_> = nodes().iter().map(address).collect();
    let rule = json!({
        "frontendIPConfiguration": part("frontendIPConfigurations/web"),
        "backendAddressPool": part("backendAddressPools/nodes"),
        "probe": part("probes/nodes"),
        "protocol": "Tcp", "frontendPort": 80, "backendPort": 80, "enableFloatingIP": true,
    });
    let probe = json!({
        "protocol": "Http", "port": 10256, "requestPath": "/healthz", "intervalInSeconds": 5, "probeThreshold": 2,
    });
    put(
        "loadBalancers/web",
        json!({
            "frontendIPConfigurations": [{ "name": "web", "properties": { "publicIPAddress": { "id": ip["id"] } } }],
            "backendAddressPools": [{ "name": "nodes", "properties": { "loadBalancerBackendAddresses": addresses } }],
            "probes": [{ "name": "nodes", "properties": probe }],
            "loadBalancingRules": [{ "name": "web", "properties": rule }],
        }),
    );
    let allow = json!({
        "access": "Allow", "direction": "Inbound", "priority": 2000, "protocol": "Tcp", "sourcePortRange": "*",
        "sourceAddressPrefix": "10.78.0.0/16", "destinationAddressPrefix": vip, "destinationPortRange": "80",
    });
    let body = json!({ "location": location, "properties": { "securityRules": [{ "name": "web", "properties": allow }] } });
    server.network("PUT", "networkSecurityGroups/nodes", Some(&body)).unwrap();

    let cloud = azure::Answers::read(&server).unwrap().cloud();
    assert_eq!(shown(&cloud), [format!("{vip} tcp 10.77.1.1 10.77.1.2")]);
    assert!(admits(&cloud, "10.78.1.1", vip) && !admits(&cloud, "10.80.1.1", vip));
    let prober = SocketAddr::new([10, 77, 1, 1].into(), 10256);
    assert!(cloud.admits([168, 63, 129, 16].into(), prober, Transport::Tcp), "by the group's own rules");
}

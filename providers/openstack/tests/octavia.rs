// SPDX-License-Identifier: Apache-2.0
//! The provider on the APIs of Keystone, Neutron and Octavia: the conformance suite, and properties of Octavia. All tests but the suite
//! share the services.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod cloud;
mod features;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use cloud::{Cloud, INTERNAL, id, target};
use futures::future::join_all;
use serde_json::json;
use steerage_model::{Family, IpMode, Protocol};
use steerage_provider_api::{
    Compare, GroupKey, HealthState, Listener, LoadBalancer, Outcome, Progress, Provider as _, Steering,
    TargetSet,
};
use steerage_provider_conformance::{
    CannedResponse, Fault, Harness as _, Span, converge, converge_deleted, converge_remembered, fixture,
    in_two_tasks, run_shared,
};
use steerage_provider_openstack::{ApiMetrics, Credentials, OpenStack};
use steerage_requirements::requires;

const SUBNET: &str = "loadbalancer.openstack.org/subnet-id";
const PROXY_PROTOCOL: &str = "loadbalancer.openstack.org/proxy-protocol";

/// Octavia uses one core, and needs tens of milliseconds for each of thousands of calls: two of them share the checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn provider_conforms() {
    requires!(OpenStack);
    let run = |taken: Arc<AtomicUsize>| async move {
        let cloud = Cloud::start().await?;
        run_shared(&cloud, &taken).await
    };
    in_two_tasks(run).await.unwrap();
}

fn listener(protocol: Protocol, port: u16, node_port: u16) -> Listener {
    Listener { name: String::new(), protocol, port, group: GroupKey::NodePort(node_port) }
}

/// A load balancer with one TCP port and the targets 0 and 1.
fn web(cloud: &Cloud, name: &str) -> LoadBalancer {
    let lb = fixture::first(cloud, &fixture::owner(name, 1));
    let lb = fixture::with_listeners(lb, vec![listener(Protocol::Tcp, 80, 30080)]);
    fixture::with_targets(cloud, &lb, &[0, 1])
}

fn annotated(mut lb: LoadBalancer, name: &str, value: &str) -> LoadBalancer {
    lb.annotations.insert(name.to_owned(), value.to_owned());
    lb
}

fn address(outcome: &Outcome) -> IpAddr {
    outcome.ingress[0].ip.unwrap()
}

fn writes(cloud: &Cloud) -> Vec<String> {
    let writes = cloud.proxy().writes().into_iter().map(|call| call.name).collect();
    cloud.proxy().reset();
    writes
}

/// The refusal, whose reason and message are returned.
async fn refused(provider: &OpenStack, lb: &LoadBalancer) -> (&'static str, String) {
    let error = cloud::applied(provider, lb).await;
    (error.reason(), error.to_string())
}

#[tokio::test]
async fn new_load_balancer_is_one_request_and_a_floating_ip() {
    requires!(OpenStack);
    let cloud = Cloud::shared("new").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    provider.check().await.unwrap();
    let lb = web(&cloud, "new");
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(writes(&cloud), ["POST loadbalancers", "POST floatingips"]);
    let balancer = cloud.balancer(&lb.owner).unwrap();
    let ips = cloud.floating_ips(&format!("port_id={}", balancer["vip_port_id"].as_str().unwrap())).unwrap();
    assert_eq!(ips[0]["floating_ip_address"], address(&outcome).to_string());
    assert_eq!(outcome.ingress[0].ip_mode, Some(IpMode::Vip));
    let health = provider.target_health(&lb.owner).await.unwrap().targets;
    let states: Vec<_> = health.iter().map(|found| (found.target.as_str(), found.state)).collect();
    assert_eq!(states, [("node-0", HealthState::Healthy), ("node-1", HealthState::Healthy)]);
    assert_eq!(provider.preview(&lb).await.unwrap(), Some(Vec::new()));
    let changed = fixture::with_targets(&cloud, &lb, &[0]);
    let preview = provider.preview(&changed).await.unwrap().unwrap();
    assert!(matches!(preview.as_slice(), [line] if line.ends_with("members become node-0")), "{preview:?}");
    assert_eq!(provider.preview(&web(&cloud, "other")).await.unwrap(), None);
}

#[tokio::test]
async fn moved_endpoint_costs_one_change_and_reads_only_whether_they_are_complete() {
    requires!(OpenStack);
    let cloud = Cloud::shared("moved").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let lb = web(&cloud, "moved");
    converge_remembered(&provider, &lb).await.unwrap();
    cloud.proxy().reset();
    let moved = fixture::with_targets(&cloud, &lb, &[1, 2]);
    while provider.apply(&moved, Compare::Remembered).await.unwrap().progress != Progress::Done {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let calls = cloud.proxy().calls();
    let others: Vec<_> = calls.iter().filter(|call| call.name != "GET loadbalancers").collect();
    let names: Vec<_> = others.iter().map(|call| call.name.as_str()).collect();
    assert_eq!(names, ["PUT members", "GET status", "GET floatingips"]);
    // A weight changes in place, by one request.
    let nodes = TargetSet::own([1, 2].map(|index| {
        let mut target = cloud.target(index);
        target.weight = u32::try_from(index).unwrap();
        target
    }));
    let weighted = moved.with_nodes(nodes);
    converge_remembered(&provider, &weighted).await.unwrap();
    assert_eq!(writes(&cloud), ["PUT members"; 2]);
    // Where no node stays, the new ones come first.
    converge_remembered(&provider, &fixture::with_targets(&cloud, &lb, &[0])).await.unwrap();
    assert_eq!(writes(&cloud), ["PUT members"; 2]);
}

/// The lists of a project show what the single reads do.
#[tokio::test]
async fn restart_lists_what_many_services_have() {
    requires!(OpenStack);
    let cloud = Cloud::shared("restart").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let services = ["one", "two", "three", "four"].map(|name| annotated(web(&cloud, name), INTERNAL, "true"));
    join_all(services.iter().map(|lb| async { converge_remembered(&provider, lb).await.unwrap() })).await;
    let mut lists = Vec::new();
    for some in [&services[..1], &services] {
        cloud.proxy().reset();
        let restarted = cloud.fresh().await.unwrap();
        join_all(some.iter().map(|lb| async { converge(&restarted, lb).await.unwrap() })).await;
        let calls = cloud.proxy().calls();
        lists.push(calls.iter().filter(|call| ["GET listeners", "GET pools"].contains(&&*call.name)).count());
        assert!(writes(&cloud).is_empty());
    }
    assert!(lists[1] < services.len() * lists[0], "{lists:?}");
}

/// Another program changes the load balancer, or Octavia is slow: nothing is sent meanwhile, and nothing fails.
#[tokio::test]
async fn load_balancer_that_changes_is_left_alone() {
    requires!(OpenStack);
    let cloud = Cloud::shared("stuck").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let lb = web(&cloud, "stuck");
    converge_remembered(&provider, &lb).await.unwrap();
    let balancer = cloud.balancer(&lb.owner).unwrap();
    let path = format!("/load-balancer/v2.0/lbaas/loadbalancers/{}", id(&balancer));
    let body = json!({ "loadbalancer": { "description": "test:stuck" } });
    cloud.server.call("PUT", &path, Some(&body)).unwrap();
    cloud.proxy().reset();
    // What is remembered says that it can be changed: Octavia refuses.
    let changed = fixture::with_targets(&cloud, &lb, &[0]);
    for (instance, refusals) in [(&provider, 1), (&cloud.fresh().await.unwrap(), 0)] {
        for _ in 0..3 {
            let outcome = instance.apply(&changed, Compare::Remembered).await.unwrap();
            assert!(matches!(outcome.progress, Progress::Again(_)), "{outcome:?}");
        }
        assert_eq!(writes(&cloud).len(), refusals);
        assert!(matches!(instance.delete(&lb.owner).await.unwrap(), Progress::Again(_)));
        assert!(writes(&cloud).is_empty());
    }
}

#[tokio::test]
async fn load_balancer_in_error_is_replaced_with_the_same_address() {
    requires!(OpenStack);
    let cloud = Cloud::shared("error").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    for lb in [web(&cloud, "external"), annotated(web(&cloud, "internal"), INTERNAL, "true")] {
        let before = converge_remembered(&provider, &lb).await.unwrap();
        let balancer = cloud.balancer(&lb.owner).unwrap();
        let body = json!({ "loadbalancer": { "description": "test:error" } });
        cloud.change(id(&balancer), "PUT", &format!("loadbalancers/{}", id(&balancer)), Some(&body)).unwrap();
        assert_eq!(cloud.balancer(&lb.owner).unwrap()["provisioning_status"], "ERROR");
        cloud.proxy().reset();
        let after = converge(&provider, &lb).await.unwrap();
        assert_eq!(after.ingress, before.ingress);

        cloud.server.settled(id(&balancer)).unwrap();
        assert_ne!(id(&cloud.balancer(&lb.owner).unwrap()), id(&balancer));
        let (external, internal) = (
            &["POST loadbalancers", "PUT floatingips", "DELETE loadbalancers"][..],
            &["DELETE loadbalancers", "POST loadbalancers"][..],
        );
        assert_eq!(writes(&cloud), if lb.annotations.is_empty() { external } else { internal });
    }
}

#[tokio::test]
async fn what_others_delete_comes_back() {
    requires!(OpenStack);
    let cloud = Cloud::shared("drift").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let mut lb = annotated(web(&cloud, "drift"), INTERNAL, "true");
    let before = converge_remembered(&provider, &lb).await.unwrap();
    let balancer = cloud.balancer(&lb.owner).unwrap();
    let found = cloud.listener(id(&balancer), 80).unwrap();
    let pool = found["default_pool_id"].as_str().unwrap();
    let monitor = cloud.octavia(&format!("pools/{pool}")).unwrap()["pool"]["healthmonitor_id"].clone();
    for (path, expected) in [
        (format!("healthmonitors/{}", monitor.as_str().unwrap()), "POST healthmonitors"),
        (format!("listeners/{}", id(&found)), "POST listeners"),
    ] {
        cloud.change(id(&balancer), "DELETE", &path, None).unwrap();
        cloud.proxy().reset();
        assert_eq!(converge(&provider, &lb).await.unwrap().ingress, before.ingress);
        assert_eq!(writes(&cloud), [expected]);
    }
    // The status of the Service says which address clients know.
    let path = format!("loadbalancers/{}?cascade=true", id(&balancer));
    cloud.change(id(&balancer), "DELETE", &path, None).unwrap();
    lb.published = vec![address(&before)];
    let restarted = cloud.fresh().await.unwrap();
    assert_eq!(converge(&restarted, &lb).await.unwrap().ingress, before.ingress);
    // Somebody else has it by now.
    let balancer = cloud.balancer(&lb.owner).unwrap();
    let path = format!("loadbalancers/{}?cascade=true", id(&balancer));
    cloud.change(id(&balancer), "DELETE", &path, None).unwrap();
    let network = &cloud.server.access().network_id;
    let port =
        json!({ "port": { "network_id": network, "fixed_ips": [{ "ip_address": address(&before) }] } });
    cloud.server.call("POST", "/network/v2.0/ports", Some(&port)).unwrap();
    let after = converge(&cloud.fresh().await.unwrap(), &lb).await.unwrap();
    assert_ne!(after.ingress, before.ingress);
}

#[tokio::test]
async fn address_changes_in_place_and_the_users_is_never_deleted() {
    requires!(OpenStack);
    let cloud = Cloud::shared("address").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let lb = web(&cloud, "address");
    let internal = annotated(lb.clone(), INTERNAL, "true");
    let vip = converge_remembered(&provider, &internal).await.unwrap();
    let balancer = cloud.balancer(&lb.owner).unwrap();
    assert_eq!(address(&vip).to_string(), balancer["vip_address"].as_str().unwrap());
    let floating = converge_remembered(&provider, &lb).await.unwrap();
    assert_ne!(floating.ingress, vip.ingress);

    let network = cloud.config.floating_network.clone();
    let body = json!({ "floatingip": { "floating_network_id": network, "description": "the user's" } });
    let made = cloud.server.call("POST", "/network/v2.0/floatingips", Some(&body)).unwrap();
    let users: IpAddr = made["floatingip"]["floating_ip_address"].as_str().unwrap().parse().unwrap();
    let given = LoadBalancer { requested_addresses: vec![users], ..lb.clone() };
    assert_eq!(address(&converge_remembered(&provider, &given).await.unwrap()), users);
    let port = balancer["vip_port_id"].as_str().unwrap();
    assert_eq!(cloud.floating_ips(&format!("port_id={port}")).unwrap().len(), 1, "Steerage's own is deleted");
    // Another Service cannot have it.
    let other = LoadBalancer { owner: fixture::owner("other", 1), ..given.clone() };
    let (reason, message) = refused(&provider, &other).await;
    let id = balancer["id"].as_str().unwrap();
    assert!(reason == "AddressNotAvailable" && message.contains(id), "{message}");
    converge_deleted(&provider, &other.owner).await.unwrap();

    // And back: the user's is detached.
    let again = converge_remembered(&provider, &lb).await.unwrap();
    assert_ne!(address(&again), users);
    let kept = cloud.floating_ips(&format!("floating_ip_address={users}")).unwrap();
    assert_eq!(kept[0]["port_id"], json!(null));
    assert_eq!(converge_remembered(&provider, &internal).await.unwrap().ingress, vip.ingress);
    assert!(cloud.floating_ips(&format!("port_id={port}")).unwrap().is_empty());
    converge_remembered(&provider, &given).await.unwrap();
    converge_deleted(&provider, &lb.owner).await.unwrap();
    assert_eq!(cloud.floating_ips(&format!("floating_ip_address={users}")).unwrap().len(), 1);
    assert_eq!(provider.owned().await.unwrap(), []);
}

#[tokio::test]
async fn addresses_that_cannot_be_are_refused() {
    requires!(OpenStack);
    let cloud = Cloud::shared("immutable").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let internal = annotated(web(&cloud, "internal"), INTERNAL, "true");
    let requested = |ip: [u8; 4]| LoadBalancer { requested_addresses: vec![ip.into()], ..internal.clone() };
    let outcome = converge_remembered(&provider, &requested([10, 0, 77, 1])).await.unwrap();
    assert_eq!(address(&outcome), IpAddr::from([10, 0, 77, 1]));
    let second = LoadBalancer { owner: fixture::owner("second", 1), ..requested([10, 0, 77, 1]) };
    assert_eq!(refused(&provider, &second).await.0, "AddressNotAvailable");
    cloud.proxy().reset();
    assert_eq!(refused(&provider, &requested([10, 0, 77, 2])).await.0, "AddressImmutable");
    let access = cloud.server.access();
    let moved = annotated(internal.clone(), SUBNET, &access.ipv6_subnet_id);
    assert_eq!(refused(&provider, &moved).await.0, "AddressImmutable");
    let other = LoadBalancer { owner: fixture::owner("moved", 1), ..moved };
    assert_eq!(refused(&provider, &other).await.0, "SubnetFamilyDiffers");
    let nowhere = annotated(web(&cloud, "nowhere"), SUBNET, "00000000-0000-4000-8000-000000000000");
    let (reason, message) = refused(&provider, &nowhere).await;
    assert!(reason == "RejectedByProvider" && message.contains(SUBNET), "{message}");
    let unknown = LoadBalancer {
        requested_addresses: vec![[203, 0, 113, 250].into()],
        owner: fixture::owner("unknown", 1),
        ..web(&cloud, "unknown")
    };
    assert_eq!(refused(&provider, &unknown).await.0, "AddressNotAvailable");
    let lb = annotated(
        web(&cloud, "network"),
        "loadbalancer.openstack.org/floating-network-id",
        &access.network_id,
    );
    let (reason, message) = refused(&provider, &lb).await;
    assert!(reason == "RejectedByProvider" && message.contains("Neutron POST floatingips"), "{message}");
}

#[tokio::test]
async fn ipv6_service_has_an_address_of_its_subnet_and_no_floating_ip() {
    requires!(OpenStack);
    let cloud = Cloud::shared("ipv6").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let lb = annotated(web(&cloud, "ipv6"), SUBNET, &cloud.server.access().ipv6_subnet_id);
    let lb =
        annotated(lb, "loadbalancer.openstack.org/member-subnet-id", &cloud.server.access().ipv6_subnet_id);
    let lb = LoadBalancer {
        families: vec![Family::V6],
        source_ranges: vec!["2001:db8:2::/48".parse().unwrap(), "10.0.0.0/8".parse().unwrap()],
        ..lb.with_nodes(TargetSet::own([target("node-0", "2001:db8:1::11")]))
    };
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    assert!(address(&outcome).is_ipv6(), "{outcome:?}");
    let balancer = cloud.balancer(&lb.owner).unwrap();
    assert_eq!(cloud.listener(id(&balancer), 80).unwrap()["allowed_cidrs"], json!(["2001:db8:2::/48"]));
    cloud.proxy().reset();
    converge(&cloud.fresh().await.unwrap(), &lb).await.unwrap();
    assert!(writes(&cloud).is_empty());
}

#[tokio::test]
async fn proxy_protocol_is_switched_on_with_another_pool() {
    requires!(OpenStack);
    let cloud = Cloud::shared("proxy").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let lb = web(&cloud, "proxy");
    converge_remembered(&provider, &lb).await.unwrap();
    cloud.proxy().reset();
    let lb = annotated(lb, PROXY_PROTOCOL, "v2");
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(outcome.ingress[0].ip_mode, Some(IpMode::Proxy));
    let expected = ["POST pools", "POST healthmonitors", "PUT members", "PUT listeners", "DELETE pools"];
    assert_eq!(writes(&cloud), expected);
    let balancer = cloud.balancer(&lb.owner).unwrap();
    let pools = cloud.octavia(&format!("pools?loadbalancer_id={}", id(&balancer))).unwrap();
    let protocols: Vec<_> = pools["pools"].as_array().unwrap().iter().map(|pool| &pool["protocol"]).collect();
    assert_eq!(protocols, ["PROXYV2"]);
}

#[tokio::test]
async fn limits_affinity_and_algorithm_change_in_place() {
    requires!(OpenStack);
    let cloud = Cloud::shared("limits").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let mut lb = fixture::first(&cloud, &fixture::owner("limits", 1));
    lb = fixture::with_targets(&cloud, &lb, &[0]);
    converge_remembered(&provider, &lb).await.unwrap();
    cloud.proxy().reset();
    for (name, value) in
        [("timeout-client-data", "600000"), ("connection-limit", "100"), ("lb-method", "LEAST_CONNECTIONS")]
    {
        lb = annotated(lb, &format!("loadbalancer.openstack.org/{name}"), value);
    }
    for group in &mut lb.groups {
        group.affinity = Some(steerage_model::Affinity { timeout: Duration::from_mins(3) });
    }
    converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(writes(&cloud), ["PUT pools", "PUT pools", "PUT listeners", "PUT listeners"]);
    converge(&cloud.fresh().await.unwrap(), &lb).await.unwrap();
    assert!(writes(&cloud).is_empty());
    for name in ["timeout-client-data", "connection-limit", "lb-method"] {
        lb.annotations.remove(&format!("loadbalancer.openstack.org/{name}"));
    }
    for group in &mut lb.groups {
        group.affinity = None;
    }
    converge_remembered(&provider, &lb).await.unwrap();
    converge(&cloud.fresh().await.unwrap(), &lb).await.unwrap();
    assert_eq!(writes(&cloud), ["PUT pools", "PUT pools", "PUT listeners", "PUT listeners"]);
}

/// The driver in the tests refuses what OVN's refuses.
#[tokio::test]
async fn ovn_gets_only_what_it_has() {
    requires!(OpenStack);
    let cloud = Cloud::shared("ovn").await.unwrap();
    let config = steerage_provider_openstack::Config { provider: "ovn".to_owned(), ..cloud.config.clone() };
    let provider = cloud.provider(config).unwrap();
    let capabilities = provider.capabilities();
    assert_eq!(capabilities.steerings, [Steering::Api]);
    assert!(!capabilities.weights && !capabilities.affinity);
    let lb = fixture::first(&cloud, &fixture::owner("ovn", 1));
    let lb = fixture::with_targets(&cloud, &lb, &[0, 1]);
    converge_remembered(&provider, &lb).await.unwrap();
    let lb = fixture::with_targets(&cloud, &fixture::second(&cloud, &lb.owner), &[1, 2]);
    converge_remembered(&provider, &lb).await.unwrap();
    let balancer = cloud.balancer(&lb.owner).unwrap();
    assert_eq!(balancer["provider"], "ovn");
    // The flag names another driver: nothing is changed.
    cloud.proxy().reset();
    let (reason, message) = refused(&cloud.fresh().await.unwrap(), &lb).await;
    assert!(reason == "AddressImmutable" && message.contains("amphora-test"), "{message}");
    assert!(writes(&cloud).is_empty());
}

#[tokio::test]
async fn refused_token_leads_to_another_login_and_wrong_credentials_to_denied() {
    requires!(OpenStack);
    let cloud = Cloud::shared("login").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let expired = CannedResponse { status: 401, content_type: "text/plain", body: bytes::Bytes::new() };
    cloud.proxy().inject(2, Span::Once, Fault::Respond(expired));
    let lb = annotated(web(&cloud, "login"), INTERNAL, "true");
    converge_remembered(&provider, &lb).await.unwrap();
    assert!(cloud.proxy().fault_fired());

    let access = cloud.server.access();
    let wrong =
        Credentials::application(&access.auth_url, &access.application_credential_id, "SECRET").unwrap();
    let stranger = OpenStack::unlimited(cloud.config.clone(), wrong, ApiMetrics::default()).unwrap();
    let error = stranger.check().await.unwrap_err();
    assert_eq!(error.reason(), "ProviderDenied");
    assert!(error.to_string().contains("OpenStack does not accept the credentials"), "{error}");
    assert!(!error.to_string().contains("SECRET"), "{error}");
}

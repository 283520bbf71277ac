// SPDX-License-Identifier: Apache-2.0
//! The provider on a stand-in of Compute Engine: the conformance suite, and properties of GCE.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod cloud;
mod economy;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use cloud::{Cloud, refused, target};
use serde_json::{Value, json};
use steerage_model::{Family, IpMode, Protocol};
use steerage_provider_api::{
    Compare, GroupKey, HealthState, Listener, LoadBalancer, Outcome, Progress, Provider as _, TargetSet,
};
use steerage_provider_conformance::{
    Harness as _, converge, converge_deleted, converge_remembered, fixture, in_two_tasks, run_shared,
};
use steerage_provider_gce::{ApiMetrics, Config, Gce, permissions};
use steerage_requirements::requires;

const TYPE: &str = "networking.gke.io/load-balancer-type";
const ADDRESSES: &str = "networking.gke.io/load-balancer-ip-addresses";

/// Operations end at once and there is one zone: each check makes thousands of calls, and two of them share the work.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn provider_conforms() {
    requires!(Clouds);
    let run = |taken: Arc<AtomicUsize>| async move {
        let cloud = Cloud::start_in(&["us-central1-a"], json!({ "anonymous": true })).await?;
        run_shared(&cloud, &taken).await?;
        // Nothing is requested whose permission the guide does not list.
        for (method, _) in cloud.server.calls()? {
            let Some(method) = method.strip_prefix("compute.") else { continue };
            let is_listed = permissions::PERMISSIONS.iter().any(|(listed, _)| *listed == method);
            anyhow::ensure!(is_listed, "{method} is not listed");
        }
        Ok(())
    };
    in_two_tasks(run).await.unwrap();
}

/// Operations end after other calls came.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn provider_conforms_where_operations_take_their_time() {
    requires!(Clouds);
    let cloud = Cloud::start_with(json!({ "anonymous": true, "delay": 0.01 })).await.unwrap();
    let names = [
        "second_run_writes_nothing",
        "targets_follow_without_a_structure",
        "removed_sources_leave_without_a_structure",
        "recreated_service_replaces_old_resources",
        "any_order_of_calls_leads_to_the_goal",
    ];
    steerage_provider_conformance::run_only(&cloud, &names).await.unwrap();
}

fn listener(protocol: Protocol, port: u16) -> Listener {
    Listener { name: String::new(), protocol, port, group: GroupKey::Vip }
}

/// A load balancer with one TCP port and the targets 0 and 1.
fn web(cloud: &Cloud, name: &str) -> LoadBalancer {
    let lb = fixture::first(cloud, &fixture::owner(name, 1));
    let lb = fixture::with_listeners(lb, vec![listener(Protocol::Tcp, 80)]);
    fixture::with_targets(cloud, &lb, &[0, 1])
}

fn annotated(mut lb: LoadBalancer, name: &str, value: &str) -> LoadBalancer {
    lb.annotations.insert(name.to_owned(), value.to_owned());
    lb
}

/// With health checks of the Service, as under `externalTrafficPolicy: Local`.
fn local(mut lb: LoadBalancer) -> LoadBalancer {
    for group in &mut lb.groups {
        group.health_check.is_of_service = true;
    }
    lb
}

fn address(outcome: &Outcome) -> IpAddr {
    outcome.ingress[0].ip.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn new_load_balancer_is_one_request_for_each_resource() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    provider.check().await.unwrap();
    let lb = local(web(&cloud, "new"));
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(outcome.ingress[0].ip_mode, Some(IpMode::Vip));
    let mut writes = cloud.writes();
    writes.sort();
    let expected = [
        "POST addresses",
        "POST backendServices",
        "POST firewalls",
        "POST firewalls",
        "POST forwardingRules",
        "POST healthChecks",
        "POST networkEndpointGroups",
        "POST networkEndpointGroups",
        "attachNetworkEndpoints networkEndpointGroups",
        "attachNetworkEndpoints networkEndpointGroups",
    ];
    assert_eq!(writes, expected);
    let rule = &cloud.owned("forwardingRules", &lb.owner)[0];
    assert_eq!(rule["IPAddress"], address(&outcome).to_string());
    let firewalls = cloud.owned("firewalls", &lb.owner);
    let of_clients = firewalls.iter().find(|rule| rule.get("destinationRanges").is_some()).unwrap();
    assert_eq!(of_clients["destinationRanges"], json!([address(&outcome).to_string()]));
    let health = provider.target_health(&lb.owner).await.unwrap().targets;
    let states: Vec<_> = health.iter().map(|found| (found.target.as_str(), found.state)).collect();
    assert_eq!(states, [("node-0", HealthState::Healthy), ("node-1", HealthState::Healthy)]);
    assert_eq!(provider.preview(&lb).await.unwrap(), Some(Vec::new()));
    let preview = provider.preview(&fixture::with_targets(&cloud, &lb, &[0])).await.unwrap().unwrap();
    assert!(matches!(preview.as_slice(), [line] if line.ends_with("node-1 detached")), "{preview:?}");
    assert_eq!(provider.preview(&web(&cloud, "other")).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn moved_endpoint_costs_two_requests_and_reads_only_their_operations() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = local(web(&cloud, "moved"));
    converge_remembered(&provider, &lb).await.unwrap();
    cloud.proxy().reset();
    let moved = fixture::with_targets(&cloud, &lb, &[0, 3]);
    while provider.apply(&moved, Compare::Remembered).await.unwrap().progress != Progress::Done {}
    let calls: Vec<String> = cloud.proxy().calls().into_iter().map(|call| call.name).collect();
    let [attach, detach] =
        ["attach", "detach"].map(|verb| format!("{verb}NetworkEndpoints networkEndpointGroups"));
    let others: Vec<&String> = calls.iter().filter(|name| *name != "GET operations").collect();
    assert_eq!(others, [&attach, &detach]);
}

/// A change of the policy, and of the steering, swaps the health check: no rule is deleted.
#[tokio::test(flavor = "multi_thread")]
async fn policy_changes_without_an_interruption() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = web(&cloud, "policy");
    converge_remembered(&provider, &lb).await.unwrap();
    for (lb, check, deleted) in [
        // The shared check and its firewall rule are not needed any more.
        (local(lb.clone()), "POST healthChecks", &["DELETE healthChecks", "DELETE firewalls"][..]),
        (lb.clone(), "POST healthChecks", &["DELETE healthChecks", "DELETE firewalls"]),
    ] {
        cloud.proxy().reset();
        converge_remembered(&provider, &lb).await.unwrap();
        let mut writes = cloud.writes();
        writes.sort();
        let mut expected: Vec<&str> = deleted.to_vec();
        expected.extend(["PATCH backendServices", check, "POST firewalls"]);
        expected.sort_unstable();
        assert_eq!(writes, expected);
    }
}

/// The list for first looks is older than its deletion.
#[tokio::test(flavor = "multi_thread")]
async fn service_that_comes_back_soon_is_made_again() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let lb = fixture::with_targets(&cloud, &web(&cloud, "back"), &[]);
    converge_remembered(&cloud.provider(), &lb).await.unwrap();
    let provider = cloud.provider();
    converge_remembered(&provider, &web(&cloud, "other")).await.unwrap();
    converge_deleted(&provider, &lb.owner).await.unwrap();
    converge_remembered(&provider, &lb).await.unwrap();
    cloud.proxy().reset();
    converge_remembered(&cloud.provider(), &lb).await.unwrap();
    assert_eq!(cloud.writes(), Vec::<String>::new(), "another process finds all of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_operations_are_asked_for_and_never_waited_for() {
    requires!(Clouds);
    // None ends while this test looks, however busy the machine is.
    let delay = Duration::from_mins(10);
    let cloud = Cloud::start_with(json!({ "anonymous": true, "delay": delay.as_secs() })).await.unwrap();
    let provider = cloud.provider();
    let lb = web(&cloud, "slow");
    let outcome = provider.apply(&lb, Compare::Remembered).await.unwrap();
    assert!(matches!(outcome.progress, Progress::Again(_)) && outcome.ingress.is_empty(), "{outcome:?}");
    let first = cloud.writes();
    assert_eq!(first.len(), 3, "{first:?}");
    provider.apply(&lb, Compare::Remembered).await.unwrap();
    assert!(cloud.writes().is_empty(), "what runs is not sent again");
    let complete = loop {
        cloud.server.skip(delay).unwrap();
        let outcome = provider.apply(&lb, Compare::Remembered).await.unwrap();
        match outcome.progress {
            Progress::Done => break outcome,
            Progress::Again(after) => tokio::time::sleep(after).await,
        }
    };
    assert!(!complete.ingress.is_empty());
}

/// The answer to a request is lost, and what it started ends after the next read.
#[tokio::test(flavor = "multi_thread")]
async fn operation_whose_answer_was_lost_is_found() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let lb = local(web(&cloud, "lost"));
    let provider = cloud.provider();
    converge_remembered(&provider, &lb).await.unwrap();
    for instance in [&provider, &cloud.provider()] {
        let attach = "compute.networkEndpointGroups.attachNetworkEndpoints";
        let lost = json!({ "call": attach, "cut": "after", "operation_delay": 0.3 });
        cloud.server.inject(&lost).unwrap();
        let more = fixture::with_targets(&cloud, &lb, &[0, 1, 2]);
        assert_eq!(
            provider.apply(&more, Compare::Remembered).await.unwrap_err().reason(),
            "ProviderUnavailable"
        );
        // It is not wanted any more. Another process knows nothing of it.
        converge_remembered(instance, &lb).await.unwrap();
        tokio::time::sleep(Duration::from_millis(400)).await;
        let targets = cloud.targets(&lb.owner).await.unwrap();
        assert_eq!(targets.values().flatten().collect::<Vec<_>>(), ["node-0", "node-1"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_operation_is_told_with_what_to_do() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = web(&cloud, "quota");
    let quota = json!({ "status": 403, "code": "QUOTA_EXCEEDED", "message": "Quota 'FORWARDING_RULES' exceeded.  Limit: 1.0" });
    cloud
        .server
        .inject(&json!({ "call": "compute.forwardingRules.insert", "operation_error": quota }))
        .unwrap();
    let (reason, message) = refused(&provider, &lb).await;
    assert!(reason == "QuotaExceeded" && message.contains("FORWARDING_RULES"), "{reason} {message}");
    converge_remembered(&provider, &lb).await.unwrap();
    // A change by somebody else between reading and writing.
    let stale = json!({ "call": "compute.regionBackendServices.patch", "status": 412, "reason": "conditionNotMet", "message": "Invalid fingerprint." });
    cloud.server.inject(&stale).unwrap();
    converge_remembered(&provider, &local(lb)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn users_addresses_are_used_by_name_or_value_and_never_released() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let region = "regions/us-central1";
    cloud.server.compute("POST", &format!("{region}/addresses"), Some(&json!({ "name": "mine" }))).unwrap();
    let mine = cloud.server.compute("GET", &format!("{region}/addresses/mine"), None).unwrap();
    let ip: IpAddr = mine["address"].as_str().unwrap().parse().unwrap();
    let lb = web(&cloud, "address");
    let own = address(&converge_remembered(&provider, &lb).await.unwrap());
    // The one that it has can be requested: it stays Steerage's.
    let kept = LoadBalancer { requested_addresses: vec![own], ..lb.clone() };
    assert_eq!(address(&converge_remembered(&provider, &kept).await.unwrap()), own);
    assert_eq!(cloud.owned("addresses", &lb.owner).len(), 1);
    let thief = LoadBalancer { owner: fixture::owner("thief", 1), ..kept };
    assert_eq!(refused(&provider, &thief).await.0, "AddressNotAvailable");
    let named = annotated(lb.clone(), ADDRESSES, "mine");
    assert_eq!(address(&converge_remembered(&provider, &named).await.unwrap()), ip);
    assert!(cloud.owned("addresses", &lb.owner).is_empty(), "Steerage's own is released");
    // Another Service cannot have it, and is not told who has it.
    let (reason, message) = refused(&provider, &annotated(web(&cloud, "other"), ADDRESSES, "mine")).await;
    assert!(reason == "AddressNotAvailable" && message.contains("address mine is in use"), "{message}");
    assert!(!message.contains("forwardingRules"), "{message}");
    let valued = LoadBalancer { requested_addresses: vec![ip], ..lb.clone() };
    assert_eq!(address(&converge_remembered(&provider, &valued).await.unwrap()), ip);
    assert_ne!(address(&converge_remembered(&provider, &lb).await.unwrap()), ip);
    converge_remembered(&provider, &valued).await.unwrap();
    converge_deleted(&provider, &lb.owner).await.unwrap();
    let left = cloud.server.compute("GET", &format!("{region}/addresses/mine"), None).unwrap();
    assert_eq!(left["status"], "RESERVED");
    let unknown = LoadBalancer { requested_addresses: vec![own], ..web(&cloud, "unknown") };
    assert_eq!(refused(&provider, &unknown).await.0, "AddressNotAvailable");
    assert_eq!(refused(&provider, &annotated(lb, ADDRESSES, "nowhere")).await.0, "AddressNotAvailable");
}

/// Of two Services that request an address at the same time, the second one must not admit its clients to it.
#[tokio::test(flavor = "multi_thread")]
async fn address_is_of_the_service_that_requested_it_first() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    cloud.server.compute("POST", "regions/us-central1/addresses", Some(&json!({ "name": "mine" }))).unwrap();
    let of = |name: &str| annotated(web(&cloud, name), ADDRESSES, "mine");
    let (first, second) = (of("first"), of("second"));
    provider.apply(&first, Compare::Remembered).await.unwrap();
    assert_eq!(refused(&provider, &second).await.0, "AddressNotAvailable");
    assert!(cloud.owned("firewalls", &second.owner).is_empty());
    let served = address(&converge_remembered(&provider, &first).await.unwrap());
    converge_deleted(&provider, &first.owner).await.unwrap();
    assert_eq!(address(&converge_remembered(&provider, &second).await.unwrap()), served);
    converge_deleted(&provider, &second.owner).await.unwrap();
    // Who does not request one any more, and admits nobody to it, keeps it from nobody.
    let quota = json!({ "status": 403, "code": "QUOTA_EXCEEDED", "message": "Quota 'FIREWALLS' exceeded." });
    let call = "compute.firewalls.insert";
    cloud.server.inject(&json!({ "call": call, "times": 0, "operation_error": quota })).unwrap();
    let never = of("never");
    converge_remembered(&provider, &never).await.unwrap_err();
    cloud.server.clear_faults().unwrap();
    assert!(cloud.owned("firewalls", &never.owner).is_empty());
    refused(&provider, &annotated(never, ADDRESSES, "nowhere")).await;
    assert_eq!(address(&converge_remembered(&provider, &second).await.unwrap()), served);
}

/// The address that Google's controller gave a Service is promoted, and stays when its load balancer goes.
#[tokio::test(flavor = "multi_thread")]
async fn address_of_another_controller_is_kept_in_a_migration() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let region = "regions/us-central1";
    let server = &cloud.server;
    let service = json!({ "name": "a1", "protocol": "TCP", "loadBalancingScheme": "EXTERNAL" });
    server.compute("POST", &format!("{region}/backendServices"), Some(&service)).unwrap();
    let rule = json!({ "name": "a1", "IPProtocol": "TCP", "ports": ["80"], "loadBalancingScheme": "EXTERNAL",
                       "backendService": format!("projects/test-project/{region}/backendServices/a1") });
    let path = format!("projects/test-project/{region}/backendServices/a1");
    let rule = {
        let mut rule = rule;
        rule["backendService"] = path.into();
        rule
    };
    server.compute("POST", &format!("{region}/forwardingRules"), Some(&rule)).unwrap();
    let found = server.compute("GET", &format!("{region}/forwardingRules/a1"), None).unwrap();
    let ip = found["IPAddress"].clone();
    let promoted = json!({ "name": "kept", "address": ip });
    server.compute("POST", &format!("{region}/addresses"), Some(&promoted)).unwrap();
    let lb = annotated(web(&cloud, "migrated"), ADDRESSES, "kept");
    let provider = cloud.provider();
    assert_eq!(refused(&provider, &lb).await.0, "AddressNotAvailable");
    server.compute("DELETE", &format!("{region}/forwardingRules/a1"), None).unwrap();
    let outcome = converge(&provider, &lb).await.unwrap();
    assert_eq!(address(&outcome).to_string(), ip);
}

#[tokio::test(flavor = "multi_thread")]
async fn internal_load_balancers_have_tcp_and_udp_on_one_address() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = annotated(fixture::first(&cloud, &fixture::owner("internal", 1)), TYPE, "Internal");
    let lb = fixture::with_targets(&cloud, &lb, &[0]);
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    let rules = cloud.owned("forwardingRules", &lb.owner);
    let addresses: Vec<&Value> = rules.iter().map(|rule| &rule["IPAddress"]).collect();
    assert_eq!(addresses, [&json!(address(&outcome).to_string()); 2]);
    cloud.proxy().reset();
    let global = annotated(lb, "networking.gke.io/internal-load-balancer-allow-global-access", "true");
    assert_eq!(converge_remembered(&provider, &global).await.unwrap().ingress, outcome.ingress);
    assert_eq!(cloud.writes(), ["PATCH forwardingRules"; 2]);
    let fixed = LoadBalancer {
        requested_addresses: vec![[10, 128, 0, 200].into()],
        ..annotated(web(&cloud, "fixed"), TYPE, "Internal")
    };
    assert_eq!(address(&converge_remembered(&provider, &fixed).await.unwrap()), fixed.requested_addresses[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn new_address_is_returned_while_the_old_one_serves() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = web(&cloud, "replaced");
    let old = address(&converge_remembered(&provider, &lb).await.unwrap());
    let internal = annotated(lb.clone(), TYPE, "Internal");
    let mut first = None;
    while first.is_none() {
        let outcome = provider.apply(&internal, Compare::Remembered).await.unwrap();
        first = outcome.ingress.first().and_then(|found| found.ip);
    }
    let serve: Vec<Value> = cloud.owned("forwardingRules", &lb.owner);
    let serve: Vec<&str> = serve.iter().filter_map(|rule| rule["IPAddress"].as_str()).collect();
    assert!(
        serve.contains(&old.to_string().as_str()) && serve.contains(&first.unwrap().to_string().as_str())
    );
    assert_eq!(converge_remembered(&provider, &internal).await.unwrap().ingress[0].ip, first);
    assert_eq!(cloud.owned("forwardingRules", &lb.owner).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn dual_stack_services_have_an_address_of_each_family() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = LoadBalancer { families: vec![Family::V4, Family::V6], ..web(&cloud, "dual") };
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    let families: Vec<Family> = outcome.ingress.iter().filter_map(|found| found.ip.map(Family::of)).collect();
    assert_eq!(families, [Family::V4, Family::V6]);
    assert_eq!(cloud.owned("forwardingRules", &lb.owner).len(), 2);
    assert_eq!(cloud.owned("backendServices", &lb.owner).len(), 1);
    assert!(converge(&cloud.provider(), &lb).await.is_ok());
    cloud.proxy().reset();
    converge(&cloud.provider(), &lb).await.unwrap();
    assert!(cloud.writes().is_empty());
    let lb = LoadBalancer { families: vec![Family::V4], ..lb };
    converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(cloud.owned("forwardingRules", &lb.owner).len(), 1);
    let internal = annotated(web(&cloud, "internal-v6"), TYPE, "Internal");
    let internal = annotated(internal, "networking.gke.io/load-balancer-subnet", "internal-ipv6");
    let internal = LoadBalancer { families: vec![Family::V6], ..internal };
    let outcome = converge_remembered(&provider, &internal).await.unwrap();
    assert_eq!(Family::of(address(&outcome)), Family::V6);
    converge_deleted(&provider, &lb.owner).await.unwrap();
    converge_deleted(&provider, &internal.owner).await.unwrap();
    assert_eq!(provider.owned().await.unwrap(), []);
}

/// The network of another project, in which the credentials have no right.
fn shared_vpc(cloud: &Cloud) -> (Config, LoadBalancer) {
    let denied = json!({ "call": "compute.firewalls.*", "times": 0, "status": 403, "reason": "forbidden",
                         "message": "Required 'compute.firewalls.create' permission for 'projects/host'" });
    cloud.server.inject(&denied).unwrap();
    cloud.server.control("POST", "projects", Some(&json!({ "name": "host" }))).unwrap();
    let vm = json!({ "name": "shared", "zone": "us-central1-a", "address": "10.128.0.99", "tags": ["node"], "network_project": "host" });
    cloud.server.add_instances(&[vm]).unwrap();
    let config = Config {
        network: "projects/host/global/networks/default".to_owned(),
        subnetwork: "projects/host/regions/us-central1/subnetworks/default".to_owned(),
        ..cloud.config.clone()
    };
    let nodes = TargetSet::own([target("shared", "us-central1-a")]);
    (config, local(web(cloud, "shared")).with_nodes(nodes))
}

#[tokio::test(flavor = "multi_thread")]
async fn old_address_serves_while_firewall_rules_of_a_shared_vpc_can_neither_be_changed_nor_read() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let (config, lb) = shared_vpc(&cloud);
    let provider = Gce::unlimited(config, ApiMetrics::default()).unwrap();
    let before = converge_remembered(&provider, &lb).await.unwrap().ingress;
    let published = before.iter().filter_map(|found| found.ip).collect();
    let lb = LoadBalancer { published, ..lb };
    let internal = annotated(lb.clone(), TYPE, "Internal");
    let standard = annotated(lb.clone(), "cloud.google.com/network-tier", "Standard");
    for moved in [&internal, &standard, &internal] {
        let outcome = converge(&provider, moved).await.unwrap();
        let (_, message) = outcome.incomplete.unwrap();
        assert!(message.contains("may not read") && message.contains("The old address serves"), "{message}");
        assert_eq!(outcome.ingress, before);
        let rules = cloud.owned("forwardingRules", &lb.owner);
        assert_eq!(rules.len(), 2, "the one in between is known to nobody: {rules:?}");
    }
    cloud.server.clear_faults().unwrap();
    let outcome = converge(&provider, &internal).await.unwrap();
    assert!(outcome.incomplete.is_none() && outcome.ingress != before, "{outcome:?}");
    assert_eq!(cloud.owned("forwardingRules", &lb.owner).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn firewall_rules_of_a_shared_vpc_are_told_as_commands() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let (config, lb) = shared_vpc(&cloud);
    let provider = Gce::unlimited(config.clone(), ApiMetrics::default()).unwrap();
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    assert_eq!(outcome.ingress.len(), 1);
    let (reason, message) = outcome.incomplete.unwrap();
    assert_eq!(reason, "FirewallNotPermitted");
    let command = "--project=host --network=default --direction=INGRESS";
    assert_eq!(message.matches(command).count(), 2, "{message}");
    assert!(
        message.contains(&format!("--destination-ranges={}", outcome.ingress[0].ip.unwrap())),
        "{message}"
    );
    let (advice, _) = message.split_once(": gcloud ").unwrap();
    assert!(advice.contains("Grant compute.firewalls.*, compute.networks.updatePolicy"), "{message}");
    assert!(outcome.retry_refused.is_some_and(|again| again > Duration::from_mins(1)));
    cloud.proxy().reset();
    provider.apply(&lb, Compare::Remembered).await.unwrap();
    assert!(cloud.writes().is_empty(), "it is not tried again at once");
    // Somebody granted the right.
    cloud.server.clear_faults().unwrap();
    let outcome = converge(&provider, &lb).await.unwrap();
    assert_eq!((outcome.incomplete, cloud.owned("firewalls", &lb.owner).len()), (None, 2));
    // And took it away again: what is left is told.
    let denied =
        json!({ "call": "compute.firewalls.delete", "times": 0, "status": 403, "reason": "forbidden" });
    cloud.server.inject(&denied).unwrap();
    let error = converge_deleted(&provider, &lb.owner).await.unwrap_err().to_string();
    assert_eq!(error.matches("gcloud compute firewall-rules delete").count(), 2, "{error}");
    assert!(error.ends_with("--quiet"), "the commands can be copied: {error}");
    assert!(cloud.owned("forwardingRules", &lb.owner).is_empty());
    cloud.server.clear_faults().unwrap();
    let fresh = Gce::unlimited(config, ApiMetrics::default()).unwrap();
    converge_deleted(&fresh, &lb.owner).await.unwrap();
    assert!(cloud.owned("firewalls", &lb.owner).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn node_whose_vm_is_gone_is_refused_and_the_others_serve() {
    requires!(Clouds);
    let cloud = Cloud::start().await.unwrap();
    let provider = cloud.provider();
    let lb = web(&cloud, "gone");
    cloud.server.remove_instance("us-central1-b", "node-1").unwrap();
    let outcome = converge_remembered(&provider, &lb).await.unwrap();
    let [(node, why)] = outcome.refused.as_slice() else { panic!("{outcome:?}") };
    assert!(node == "node-1" && why.contains("no VM node-1"), "{why}");
    // One that is removed after its VM was read.
    let more = fixture::with_targets(&cloud, &lb, &[0, 2, 4]);
    cloud.server.remove_instance("us-central1-a", "node-4").unwrap();
    let outcome = converge_remembered(&provider, &more).await.unwrap();
    let [(node, why)] = outcome.refused.as_slice() else { panic!("{outcome:?}") };
    assert!(node == "node-4" && why.contains("VM node-4"), "{why}");
    let targets = cloud.targets(&lb.owner).await.unwrap();
    let nodes: Vec<&String> = targets.values().flatten().collect();
    assert_eq!(nodes, ["node-0", "node-2"]);
}

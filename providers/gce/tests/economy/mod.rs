// SPDX-License-Identifier: Apache-2.0
//! How many calls the life of Services costs. The numbers are in docs/performance.md beside those of Google's own controller: they must
//! not creep up.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use serde_json::json;
use steerage_model::Protocol;
use steerage_provider_api::{Compare, GroupKey, Listener, LoadBalancer, Progress, Provider as _};
use steerage_provider_conformance::{Harness as _, converge, converge_deleted, fixture};
use steerage_provider_gce::{ApiMetrics, Config, Gce};
use steerage_requirements::requires;

use crate::cloud::Cloud;

/// Operations have ended when they are first asked for.
const POLL: Duration = Duration::from_millis(400);

/// Services at once.
const SERVICES: usize = 20;

async fn start() -> Cloud {
    Cloud::start_with(json!({ "anonymous": true, "delay": 0.02 })).await.unwrap()
}

/// As the controller does after a change of the Service.
async fn apply(provider: &Gce, lb: &LoadBalancer) {
    while provider.apply(lb, Compare::Remembered).await.unwrap().progress != Progress::Done {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn provider(cloud: &Cloud) -> Gce {
    let config = Config { poll: POLL, ..cloud.config.clone() };
    Gce::unlimited(config, ApiMetrics::default()).unwrap()
}

/// As with `externalTrafficPolicy: Local` and `api` steering: one node has an endpoint.
fn web(cloud: &Cloud, name: &str) -> LoadBalancer {
    let lb = fixture::first(cloud, &fixture::owner(name, 1));
    let listener = Listener { name: String::new(), protocol: Protocol::Tcp, port: 80, group: GroupKey::Vip };
    fixture::with_targets(cloud, &fixture::with_listeners(lb, vec![listener]), &[0])
}

/// The calls since the last question: how many, and those of each kind.
fn calls(cloud: &Cloud) -> (usize, BTreeMap<String, usize>) {
    let mut counts = BTreeMap::new();
    for call in cloud.proxy().calls() {
        *counts.entry(call.name).or_default() += 1;
    }
    cloud.proxy().reset();
    (counts.values().sum(), counts)
}

fn expected(counts: &[(&str, usize)]) -> BTreeMap<String, usize> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn life_of_one_service_costs_few_calls() {
    requires!(Clouds);
    let cloud = start().await;
    let first = provider(&cloud);
    first.check().await.unwrap();
    let lb = web(&cloud, "one");
    apply(&first, &lb).await;
    let (total, counts) = calls(&cloud);
    assert!(total <= 23, "creation: {total} {counts:?}");

    let second = provider(&cloud);
    second.check().await.unwrap();
    second.owned().await.unwrap();
    converge(&second, &lb).await.unwrap();
    second.target_health(&lb.owner).await.unwrap();
    let restart = expected(&[
        ("GET addresses", 1),
        // One of them is of the check.
        ("GET backendServices", 2),
        ("GET firewalls", 1),
        ("GET forwardingRules", 1),
        ("GET healthChecks", 1),
        ("GET instances", 1),
        ("GET networkEndpointGroups", 1),
        ("GET operations", 1),
        ("getHealth backendServices", 1),
        ("listNetworkEndpoints networkEndpointGroups", 1),
    ]);
    assert_eq!(calls(&cloud), (11, restart));

    converge_deleted(&second, &lb.owner).await.unwrap();
    let deletion = expected(&[
        ("DELETE addresses", 1),
        ("DELETE backendServices", 1),
        // Also what Services share.
        ("DELETE firewalls", 2),
        ("DELETE forwardingRules", 1),
        ("DELETE healthChecks", 1),
        ("DELETE networkEndpointGroups", 2),
        // That nothing is left.
        ("GET addresses", 1),
        ("GET backendServices", 1),
        ("GET firewalls", 1),
        ("GET forwardingRules", 1),
        ("GET healthChecks", 1),
        ("GET networkEndpointGroups", 1),
        // After the rule; the backend service, the address and a firewall rule; the groups and the health check; the last firewall rule.
        ("GET operations", 4),
    ]);
    assert_eq!(calls(&cloud), (18, deletion));
    assert!(cloud.snapshot().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_services_share_their_reads() {
    requires!(Clouds);
    let cloud = start().await;
    let first = provider(&cloud);
    let all: Vec<LoadBalancer> = (0..SERVICES).map(|number| web(&cloud, &format!("web-{number}"))).collect();
    join_all(all.iter().map(|lb| apply(&first, lb))).await;
    // Also where many need the same health check at once, each request is made once.
    let writes = |counts: &BTreeMap<String, usize>| -> usize {
        let is_read = |name: &str| ["GET ", "list", "getH"].iter().any(|read| name.starts_with(read));
        counts.iter().filter(|(name, _)| !is_read(name)).map(|(_, count)| count).sum()
    };
    let (total, counts) = calls(&cloud);
    assert_eq!(writes(&counts), 7 * SERVICES + 2, "{counts:?}");
    assert_eq!(first.owned().await.unwrap().len(), SERVICES, "not the list of the first looks");
    calls(&cloud);
    assert!(total <= 12 * SERVICES, "creation: {total} {counts:?}");

    let second = provider(&cloud);
    second.owned().await.unwrap();
    for result in join_all(all.iter().map(|lb| converge(&second, lb))).await {
        result.unwrap();
    }
    let (total, counts) = calls(&cloud);
    assert_eq!(total, SERVICES + 8, "restart: {counts:?}");

    for result in join_all(all.iter().map(|lb| converge_deleted(&second, &lb.owner))).await {
        result.unwrap();
    }
    let (total, counts) = calls(&cloud);
    assert_eq!(writes(&counts), 6 * SERVICES + 2, "{counts:?}");
    assert!(total <= 9 * SERVICES, "deletion: {total} {counts:?}");
    assert!(cloud.snapshot().await.unwrap().is_empty());
}

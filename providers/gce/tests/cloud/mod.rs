// SPDX-License-Identifier: Apache-2.0
//! The stand-in of Compute Engine and a proxy for one test, as a harness of the conformance suite.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use steerage_provider_api::{Compare, LoadBalancer, Owner, Provider as _, Target};
use steerage_provider_conformance::{
    Call, CannedResponse, Harness, Proxy, Snapshot, Upstream, converge, converge_deleted, fixture,
};
use steerage_provider_gce::{ApiMetrics, ClusterId, Config, Gce};
use steerage_testclouds::gce::{classify, instance};
use steerage_testclouds::{Cloud as Which, Server};

/// Load balancers of these names have a health check of their own, as with `externalTrafficPolicy: Local`.
const LOCAL: [&str; 4] = ["crash-change", "any-order", "steady", "add-first"];
const TAG: &str = "node";

pub(crate) struct Cloud {
    pub(crate) server: Server,
    proxy: Proxy,
    pub(crate) config: Config,
}

impl Cloud {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        Self::start_with(json!({ "anonymous": true })).await
    }

    pub(crate) async fn start_with(settings: Value) -> anyhow::Result<Self> {
        Self::start_in(&["us-central1-a", "us-central1-b"], settings).await
    }

    /// With nodes, and a group of each Service, in each of these zones. Each check of the suite makes requests for each.
    pub(crate) async fn start_in(zones: &[&'static str], settings: Value) -> anyhow::Result<Self> {
        let server = tokio::task::spawn_blocking(move || Server::start(Which::Gce, &settings)).await??;
        let vms: Vec<Value> = (0..6)
            .map(|i| {
                let address = [10, 128, 0, u8::try_from(10 + i).unwrap_or_default()].into();
                instance(&format!("node-{i}"), zones[i % zones.len()], address, &[TAG])
            })
            .collect();
        server.add_instances(&vms)?;
        let proxy = Proxy::start(Upstream::http(server.addr()?), classify).await?;
        let project = server.setting("project").to_owned();
        let config = Config {
            cluster: ClusterId { name: "conformance".to_owned(), uid: "cluster-1".to_owned() },
            region: server.setting("region").to_owned(),
            network: format!("projects/{project}/global/networks/default"),
            subnetwork: format!("projects/{project}/regions/us-central1/subnetworks/default"),
            node_tags: vec![TAG.to_owned()],
            // A group in each; the rest of the region's zones would only cost time.
            zones: zones.iter().map(|zone| (*zone).to_owned()).collect(),
            endpoint: proxy.url(),
            poll: Duration::ZERO,
            project,
        };
        Ok(Self { server, proxy, config })
    }

    /// A provider whose requests go through the proxy.
    pub(crate) fn provider(&self) -> Gce {
        Gce::unlimited(self.config.clone(), ApiMetrics::default()).unwrap()
    }

    pub(crate) fn direct(&self) -> Gce {
        let config = Config { endpoint: self.server.url().to_owned(), ..self.config.clone() };
        Gce::unlimited(config, ApiMetrics::default()).unwrap()
    }

    /// Resources of a collection that an owner has, by name.
    pub(crate) fn owned(&self, collection: &str, owner: &Owner) -> Vec<Value> {
        let all = self.server.snapshot().unwrap();
        let is_owned = |path: &str, found: &Value| {
            path.contains(&format!("/{collection}/"))
                && found["description"].as_str().is_some_and(|text| text.contains(&owner.uid))
        };
        all.into_iter().filter(|(path, found)| is_owned(path, found)).map(|(_, found)| found).collect()
    }

    /// The names of the calls that changed something since the last question.
    pub(crate) fn writes(&self) -> Vec<String> {
        let writes = self.proxy.writes().into_iter().map(|call| call.name).collect();
        self.proxy.reset();
        writes
    }
}

pub(crate) fn target(name: &str, zone: &str) -> Target {
    Target {
        node: name.to_owned(),
        addresses: vec![[10, 128, 0, 9].into()],
        provider_id: Some(format!("gce://test-project/{zone}/{name}")),
        zone: Some(zone.to_owned()),
        pod_cidrs: Vec::new(),
        weight: 1,
    }
}

fn path_of(url: &str) -> &str {
    url.find("projects/").map_or(url, |at| &url[at..])
}

#[async_trait]
impl Harness for Cloud {
    type Provider = Gce;

    async fn fresh(&self) -> anyhow::Result<Gce> {
        Ok(self.provider())
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Addresses are replaced by the names of their reservations.
    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let mut all = self.server.snapshot()?;
        // In the order in which they came.
        for users in all.values_mut().filter_map(|found| found.get_mut("users")?.as_array_mut()) {
            users.sort_by_key(Value::to_string);
        }
        let reserved: Vec<(String, String)> = all
            .iter()
            .filter(|(path, _)| path.contains("/addresses/"))
            .filter_map(|(path, found)| Some((format!("\"{}", found["address"].as_str()?), path.clone())))
            .collect();
        let text = |found: &Value| {
            let mut text = format!("{found:#}");
            for (address, path) in &reserved {
                for end in ["\"", "/"] {
                    text = text.replace(&format!("{address}{end}"), &format!("\"{path}{end}"));
                }
            }
            text
        };
        Ok(all.iter().map(|(path, found)| (path.clone(), text(found))).collect())
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let all = self.server.snapshot()?;
        let mut targets = BTreeMap::new();
        for service in self.owned("backendServices", owner) {
            let mut nodes = BTreeSet::new();
            for backend in service["backends"].as_array().into_iter().flatten() {
                let group = &all[path_of(backend["group"].as_str().context("no group")?)];
                let endpoints = group["endpoints"].as_array().into_iter().flatten();
                nodes.extend(endpoints.filter_map(Value::as_str).map(str::to_owned));
            }
            targets.insert(service["name"].to_string(), nodes);
        }
        Ok(targets)
    }

    fn target(&self, index: usize) -> Target {
        target(&format!("node-{index}"), &self.config.zones[index % self.config.zones.len()])
    }

    /// Its VM does not exist.
    fn bad_target(&self) -> Target {
        target("node-0-bad", "us-central1-a")
    }

    fn throttle(&self) -> CannedResponse {
        let errors =
            [json!({ "reason": "rateLimitExceeded", "domain": "usageLimits", "message": "slow down" })];
        let body = json!({ "error": { "code": 403, "message": "slow down", "errors": errors } });
        CannedResponse { status: 403, content_type: "application/json", body: Bytes::from(body.to_string()) }
    }

    /// An address, a health check and a firewall rule with the provider's names: one without marks, the others with those of another
    /// cluster.
    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        let direct = self.direct();
        converge(&direct, lb).await?;
        let names: Vec<(String, String)> = ["addresses", "backendServices", "firewalls"]
            .iter()
            .map(|kind| {
                let name = self.owned(kind, &lb.owner)[0]["name"].as_str().unwrap_or_default().to_owned();
                ((*kind).to_owned(), name)
            })
            .collect();
        let theirs =
            self.owned("addresses", &lb.owner)[0]["description"].as_str().unwrap_or_default().to_owned();
        let theirs = theirs.replace("cluster-1", "another");
        converge_deleted(&direct, &lb.owner).await?;
        for (kind, name) in names {
            let (scope, body) = match kind.as_str() {
                "addresses" => ("regions/us-central1", json!({ "name": name, "description": "theirs" })),
                "backendServices" => (
                    "regions/us-central1",
                    json!({ "name": name, "description": theirs, "protocol": "TCP", "loadBalancingScheme": "EXTERNAL" }),
                ),
                _ => (
                    "global",
                    json!({ "name": name, "description": theirs, "network": self.config.network, "sourceRanges": ["192.0.2.0/24"],
                            "allowed": [{ "IPProtocol": "tcp" }] }),
                ),
            };
            self.server.compute("POST", &format!("{scope}/{kind}"), Some(&body))?;
        }
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        for (path, found) in self.server.snapshot()? {
            let description = found["description"].as_str().unwrap_or_default();
            if description == "theirs" || description.contains("another") {
                let path = path.split('/').skip(2).collect::<Vec<_>>().join("/");
                self.server.compute("DELETE", &path, None)?;
            }
        }
        Ok(())
    }

    async fn mark(&self, owner: &Owner) -> anyhow::Result<()> {
        for (kind, scope) in [("backendServices", "regions/us-central1"), ("firewalls", "global")] {
            let found = &self.owned(kind, owner)[0];
            let path = format!("{scope}/{kind}/{}", found["name"].as_str().unwrap_or_default());
            let mut body = json!({ "logConfig": { "enable": true } });
            let now = self.server.compute("GET", &path, None)?;
            if let Some(fingerprint) = now.get("fingerprint") {
                body["fingerprint"] = fingerprint.clone();
            }
            self.server.compute("PATCH", &path, Some(&body))?;
        }
        Ok(())
    }

    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool> {
        let is_marked =
            |kind: &str| self.owned(kind, owner).iter().any(|found| found["logConfig"]["enable"] == true);
        Ok(is_marked("backendServices") && is_marked("firewalls"))
    }

    fn adapt(&self, lb: &mut LoadBalancer) {
        let mut adapted = fixture::by_vip(lb.clone());
        let is_local = LOCAL.contains(&lb.owner.service.name());
        for group in &mut adapted.groups {
            group.health_check.is_of_service = is_local;
        }
        *lb = adapted;
    }

    fn nodes_in(&self, call: &Call) -> Option<BTreeSet<String>> {
        let body: Value = serde_json::from_slice(&call.body).ok()?;
        let endpoints = body.get("networkEndpoints")?.as_array()?;
        Some(
            endpoints.iter().filter_map(|endpoint| Some(endpoint["instance"].as_str()?.to_owned())).collect(),
        )
    }

    /// Six lists, the endpoints of each zone, and what Services share.
    fn steady_reads(&self) -> usize {
        8 + self.config.zones.len()
    }
}

/// Applies until it fails.
pub(crate) async fn refused(provider: &Gce, lb: &LoadBalancer) -> (&'static str, String) {
    for _ in 0..1000 {
        match provider.apply(lb, Compare::Remembered).await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(error) => return (error.reason(), error.to_string()),
        }
    }
    unreachable!("no error")
}

// SPDX-License-Identifier: Apache-2.0
//! The stand-in of Azure Resource Manager and a proxy for one test, as a harness of the conformance suite.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use serde_json::{Map, Value, json};
use steerage_provider_api::{LoadBalancer, Owner, Target};
use steerage_provider_azure::{ApiMetrics, Azure, ClusterId, Config, Credentials, annotations};
use steerage_provider_conformance::{
    CannedResponse, Harness, Proxy, Snapshot, Upstream, converge, converge_deleted, fixture,
};
use steerage_testclouds::azure::classify;
use steerage_testclouds::{Cloud as Which, Server};

pub(crate) struct Cloud {
    pub(crate) server: Server,
    proxy: Proxy,
    pub(crate) config: Config,
    is_internal: bool,
}

impl Cloud {
    /// One whose operations end after these seconds. The suite's Services have a private address if `is_internal`.
    pub(crate) async fn start(is_internal: bool, delay: f64) -> anyhow::Result<Self> {
        let settings = json!({ "anonymous": true, "retry_after": 0, "delay": delay });
        let server = tokio::task::spawn_blocking(move || Server::start(Which::Azure, &settings)).await??;
        let proxy = Proxy::start(Upstream::http(server.addr()?), classify).await?;
        let config = Config {
            cluster: ClusterId { name: "conformance".to_owned(), uid: "cluster-1".to_owned() },
            subscription: server.setting("subscription").to_owned(),
            resource_group: server.setting("resource_group").to_owned(),
            location: server.setting("location").to_owned(),
            network: server.azure_id("virtualNetworks/cluster"),
            subnet: Some("nodes".to_owned()),
            security_group: Some(server.azure_id("networkSecurityGroups/nodes")),
            priority: 2000,
            zones: vec!["1".to_owned(), "2".to_owned()],
            endpoint: proxy.url(),
            poll: Duration::ZERO,
        };
        Ok(Self { server, proxy, config, is_internal })
    }

    /// A provider whose requests go through the proxy.
    pub(crate) fn provider(&self) -> Azure {
        Azure::unlimited(self.config.clone(), Credentials::managed(None), ApiMetrics::default()).unwrap()
    }

    fn direct(&self) -> Azure {
        let config = Config { endpoint: self.server.url().to_owned(), ..self.config.clone() };
        Azure::unlimited(config, Credentials::managed(None), ApiMetrics::default()).unwrap()
    }

    /// Resources of a kind, by path.
    pub(crate) fn all(&self, kind: &str) -> BTreeMap<String, Value> {
        let mut all = self.server.snapshot().unwrap();
        all.retain(|path, _| path.starts_with(&format!("{kind}/")));
        all
    }

    /// Changes a resource as somebody else does.
    pub(crate) fn change(&self, resource: &str, change: impl FnOnce(&mut Value)) -> anyhow::Result<()> {
        let mut body = self.server.network("GET", resource, None)?;
        change(&mut body);
        self.server.network("PUT", resource, Some(&body)).map(drop)
    }

    /// The paths of the load balancers and, but for private addresses, of the public IPs.
    fn paths(&self) -> Vec<String> {
        let public = if self.is_internal { BTreeMap::new() } else { self.all("publicIPAddresses") };
        self.all("loadBalancers").into_keys().chain(public.into_keys()).collect()
    }
}

pub(crate) fn target(name: &str, address: &str) -> Target {
    Target {
        node: name.to_owned(),
        addresses: vec![address.parse().unwrap()],
        provider_id: None,
        zone: None,
        pod_cidrs: Vec::new(),
        weight: 1,
    }
}

pub(crate) fn parts<'a>(body: &'a Value, kind: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    body["properties"].get(kind).and_then(Value::as_array).into_iter().flatten()
}

/// Without what differs between equal histories: numbers of priority, and the order in lists.
fn plain(value: Value) -> Value {
    match value {
        Value::Object(all) => {
            let kept = all.into_iter().filter(|(key, value)| key != "priority" && *value != json!([]));
            Value::Object(kept.map(|(key, value)| (key, plain(value))).collect::<Map<_, _>>())
        }
        Value::Array(all) => {
            let mut all: Vec<Value> = all.into_iter().map(plain).collect();
            all.sort_by_key(ToString::to_string);
            Value::Array(all)
        }
        other => other,
    }
}

#[async_trait]
impl Harness for Cloud {
    type Provider = Azure;

    async fn fresh(&self) -> anyhow::Result<Azure> {
        Ok(self.provider())
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Addresses are replaced by the names of what has them.
    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let all = self.server.snapshot()?;
        let mut names: Vec<(String, String)> = Vec::new();
        for (path, body) in &all {
            if let Some(ip) = body["properties"]["ipAddress"].as_str() {
                names.push((format!("\"{ip}\""), format!("\"ip of {path}\"")));
            }
            for front in parts(body, "frontendIPConfigurations") {
                if let Some(ip) = front["properties"]["privateIPAddress"].as_str() {
                    names.push((format!("\"{ip}\""), format!("\"ip of {}\"", front["name"])));
                }
            }
        }
        let text = |body: Value| {
            let text = format!("{:#}", plain(body));
            names.iter().fold(text, |text, (ip, name)| text.replace(ip, name))
        };
        Ok(all.into_iter().map(|(path, body)| (path, text(body))).collect())
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let uid = owner.uid.replace('-', "");
        let names = |pool: &Value| {
            let all = parts(pool, "loadBalancerBackendAddresses");
            all.map(|address| address["name"].as_str().unwrap_or_default().to_owned()).collect()
        };
        let mut targets = BTreeMap::new();
        for balancer in self.all("loadBalancers").values() {
            let own =
                parts(balancer, "backendAddressPools").filter(|pool| pool["name"].to_string().contains(&uid));
            targets.extend(own.map(|pool| (pool["name"].to_string(), names(pool))));
        }
        Ok(targets)
    }

    fn target(&self, index: usize) -> Target {
        target(&format!("node-{index}"), &format!("10.240.0.{}", index + 10))
    }

    /// Its address is not in the virtual network.
    fn bad_target(&self) -> Target {
        target("node-0-bad", "10.9.9.9")
    }

    fn throttle(&self) -> CannedResponse {
        let body = json!({ "error": { "code": "TooManyRequests", "message": "slow down" } });
        CannedResponse { status: 429, content_type: "application/json", body: body.to_string().into() }
    }

    /// The load balancer and the public IP with the provider's names, without its tags.
    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        let direct = self.direct();
        converge(&direct, lb).await?;
        let paths = self.paths();
        anyhow::ensure!(!paths.is_empty(), "nothing was made");
        converge_deleted(&direct, &lb.owner).await?;
        let mut body = json!({ "location": self.config.location, "sku": { "name": "Standard" }, "tags": { "team": "theirs" } });
        for path in paths {
            if path.starts_with("publicIPAddresses/") {
                body["properties"] = json!({ "publicIPAllocationMethod": "Static" });
                self.server.network("PUT", &format!("{path}-x"), Some(&body))?;
            }
            self.server.network("PUT", &path, Some(&body))?;
            body["properties"] = json!({});
        }
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        for path in self.all("loadBalancers").keys().chain(self.all("publicIPAddresses").keys()) {
            if self.server.network("GET", path, None)?["tags"]["team"] == "theirs" {
                self.server.network("DELETE", path, None)?;
            }
        }
        Ok(())
    }

    async fn mark(&self, _: &Owner) -> anyhow::Result<()> {
        for path in self.paths() {
            self.change(&path, |body| {
                body["tags"]["team"] = json!("a");
                if path.starts_with("loadBalancers/") {
                    body["properties"]["frontendIPConfigurations"][0]["properties"]["gatewayLoadBalancer"] =
                        json!({ "id": self.server.azure_id("loadBalancers/gateway/frontendIPConfigurations/a") });
                }
            })
            .with_context(|| path.clone())?;
        }
        Ok(())
    }

    async fn marked(&self, _: &Owner) -> anyhow::Result<bool> {
        let mut is_marked = true;
        for path in self.paths() {
            let body = self.server.network("GET", &path, None)?;
            is_marked &= body["tags"]["team"] == "a";
            if let Some(front) = parts(&body, "frontendIPConfigurations").next() {
                is_marked &= front["properties"]["gatewayLoadBalancer"]["id"].is_string();
            }
        }
        Ok(is_marked)
    }

    fn adapt(&self, lb: &mut LoadBalancer) {
        *lb = fixture::by_vip(lb.clone());
        if self.is_internal {
            lb.annotations.insert(annotations::INTERNAL.to_owned(), "true".to_owned());
        }
    }

    /// Both load balancers, the public IPs and the security group: one read of each serves all Services.
    fn steady_reads(&self) -> usize {
        4
    }
}

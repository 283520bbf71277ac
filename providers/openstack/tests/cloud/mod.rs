// SPDX-License-Identifier: Apache-2.0
//! OpenStack's services and a proxy for one test, as a harness of the conformance suite.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use steerage_model::Family;
use steerage_provider_api::{Compare, LoadBalancer, Owner, Provider as _, Target};
use steerage_provider_conformance::{
    CannedResponse, Harness, Proxy, Snapshot, Upstream, converge, converge_deleted,
};
use steerage_provider_openstack::{ApiMetrics, ClusterId, Config, Credentials, OpenStack};
use steerage_testopenstack::{Server, classify};

pub(crate) const INTERNAL: &str = "service.beta.kubernetes.io/openstack-internal-load-balancer";
const FOREIGN: &str = "somebody=else";

pub(crate) struct Cloud {
    pub(crate) server: Arc<Server>,
    proxy: Proxy,
    pub(crate) config: Config,
    is_suite: bool,
}

impl Cloud {
    /// Services of its own.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let mut cloud = Self::over(Arc::new(Server::start(Duration::ZERO, &[])?)).await?;
        let body = json!({ "security_group": { "name": "nodes" } });
        let made = cloud.server.call("POST", "/network/v2.0/security-groups", Some(&body))?;
        cloud.config.security_group = Some(id(&made["security_group"]).to_owned());
        cloud.config.ipv6_subnet = Some(cloud.server.access().ipv6_subnet_id.clone());
        Ok(cloud)
    }

    /// The services that the tests of this process share; each has a cluster of its own. They end with the process.
    pub(crate) async fn shared(test: &str) -> anyhow::Result<Self> {
        static SHARED: OnceLock<Arc<Server>> = OnceLock::new();
        let server = tokio::task::spawn_blocking(|| {
            let start = || Server::start(Duration::ZERO, &[]).map(Arc::new);
            Arc::clone(SHARED.get_or_init(|| start().unwrap()))
        });
        let mut cloud = Self::over(server.await?).await?;
        cloud.is_suite = false;
        cloud.config.cluster = ClusterId { name: test.to_owned(), uid: format!("cluster-{test}") };
        Ok(cloud)
    }

    async fn over(server: Arc<Server>) -> anyhow::Result<Self> {
        let proxy = Proxy::start(Upstream::http(server.addr()?), classify).await?;
        let access = server.access();
        let config = Config {
            cluster: ClusterId { name: "conformance".to_owned(), uid: "cluster-1".to_owned() },
            subnet: access.subnet_id.clone(),
            member_subnet: access.subnet_id.clone(),
            ipv6_subnet: None,
            ipv6_member_subnet: None,
            security_group: None,
            node_ports: 30_000..=32_767,
            adopt: None,
            shared_load_balancers: BTreeMap::new(),
            floating_network: Some(access.floating_network_id.clone()),
            provider: "amphora-test".to_owned(),
            poll: Duration::ZERO,
        };
        Ok(Self { server, proxy, config, is_suite: true })
    }

    /// A provider whose requests go through the proxy.
    pub(crate) fn provider(&self, config: Config) -> anyhow::Result<OpenStack> {
        self.provider_at(config, &self.proxy.url())
    }

    fn provider_at(&self, config: Config, url: &str) -> anyhow::Result<OpenStack> {
        let access = self.server.access();
        let (id, secret) = (&access.application_credential_id, &access.secret);
        let credentials = Credentials::application(&access.auth_url, id, secret)?
            .at(format!("{url}/load-balancer"), format!("{url}/network"));
        Ok(OpenStack::unlimited(config, credentials, ApiMetrics::default())?)
    }

    pub(crate) fn octavia(&self, path: &str) -> anyhow::Result<Value> {
        self.server.call("GET", &format!("/load-balancer/v2.0/lbaas/{path}"), None)
    }

    pub(crate) fn floating_ips(&self, query: &str) -> anyhow::Result<Vec<Value>> {
        let answer = self.server.call("GET", &format!("/network/v2.0/floatingips?{query}"), None)?;
        Ok(answer["floatingips"].as_array().cloned().unwrap_or_default())
    }

    /// The owner's load balancer.
    pub(crate) fn balancer(&self, owner: &Owner) -> anyhow::Result<Value> {
        let (uid, cluster) = (&owner.uid, &self.config.cluster.uid);
        let tags = format!("steerage.dev/uid%3D{uid},steerage.dev/cluster-uid%3D{cluster}");
        let found = self.octavia(&format!("loadbalancers?tags={tags}"))?;
        found["loadbalancers"].get(0).cloned().context("no load balancer")
    }

    /// Its listener on this port.
    pub(crate) fn listener(&self, balancer: &str, port: u16) -> anyhow::Result<Value> {
        let found = self.octavia(&format!("listeners?loadbalancer_id={balancer}&protocol_port={port}"))?;
        found["listeners"].get(0).cloned().context("no listener")
    }

    fn delete_balancer(&self, id: &str) -> anyhow::Result<()> {
        self.change(id, "DELETE", &format!("loadbalancers/{id}?cascade=true"), None).map(drop)
    }

    pub(crate) fn change(
        &self,
        balancer: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        self.server.change(balancer, method, path, body)
    }

    fn tag(&self, balancer: &str, kind: &str, path: &str, present: &Value) -> anyhow::Result<()> {
        let mut tags = present["tags"].as_array().cloned().unwrap_or_default();
        tags.push(FOREIGN.into());
        self.change(balancer, "PUT", path, Some(&json!({ kind: { "tags": tags } }))).map(drop)
    }
}

pub(crate) fn id(of: &Value) -> &str {
    of["id"].as_str().unwrap_or_default()
}

fn has_mark(of: &Value) -> bool {
    of["tags"].as_array().is_some_and(|tags| tags.contains(&FOREIGN.into()))
}

pub(crate) fn target(node: &str, address: &str) -> Target {
    Target {
        node: node.to_owned(),
        addresses: vec![address.parse().unwrap()],
        provider_id: None,
        zone: None,
        pod_cidrs: Vec::new(),
        weight: 1,
    }
}

#[async_trait]
impl Harness for Cloud {
    type Provider = OpenStack;

    async fn fresh(&self) -> anyhow::Result<OpenStack> {
        self.provider(self.config.clone())
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let shown: BTreeMap<String, String> =
            serde_json::from_value(self.server.call("GET", "/test/snapshot", None)?)?;
        Ok(shown)
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let path = format!("/test/targets/{}", owner.uid);
        Ok(serde_json::from_value(self.server.call("GET", &path, None)?)?)
    }

    fn target(&self, index: usize) -> Target {
        target(&format!("node-{index}"), &format!("10.0.1.{}", index + 1))
    }

    /// Octavia does not take the address of the metadata service.
    fn bad_target(&self) -> Target {
        target("node-0-bad", "169.254.169.254")
    }

    fn throttle(&self) -> CannedResponse {
        CannedResponse { status: 429, content_type: "text/plain", body: Bytes::from_static(b"slow down") }
    }

    /// Load balancers with the provider's name, and with the tags of another cluster of the same name; and somebody's floating IP.
    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        let direct = self.provider_at(self.config.clone(), &self.server.access().url)?;
        converge(&direct, lb).await?;
        let balancer = self.balancer(&lb.owner)?;
        converge_deleted(&direct, &lb.owner).await?;
        let mut tags = balancer["tags"].clone();
        for tag in tags.as_array_mut().context("no tags")? {
            if tag.as_str().is_some_and(|tag| tag.starts_with("steerage.dev/cluster-uid=")) {
                *tag = "steerage.dev/cluster-uid=another".into();
            }
        }
        for more in [json!([]), tags] {
            let mut tags = vec![Value::from(FOREIGN)];
            tags.extend(more.as_array().cloned().unwrap_or_default());
            let body = json!({ "name": balancer["name"], "vip_subnet_id": self.config.subnet, "tags": tags });
            let path = "/load-balancer/v2.0/lbaas/loadbalancers";
            let made = self.server.call("POST", path, Some(&json!({ "loadbalancer": body })))?;
            self.server.settled(id(&made["loadbalancer"]))?;
        }
        let ip = json!({ "floating_network_id": self.config.floating_network, "description": FOREIGN });
        self.server.call("POST", "/network/v2.0/floatingips", Some(&json!({ "floatingip": ip })))?;
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        for balancer in self.octavia("loadbalancers")?["loadbalancers"].as_array().into_iter().flatten() {
            let name = balancer["tags"].to_string();
            if has_mark(balancer) && !name.contains(&format!("cluster-uid={}", self.config.cluster.uid)) {
                self.delete_balancer(id(balancer))?;
            }
        }
        for ip in self.floating_ips("description=somebody%3Delse")? {
            self.server.call("DELETE", &format!("/network/v2.0/floatingips/{}", id(&ip)), None)?;
        }
        Ok(())
    }

    /// A floating IP costs as much time as a load balancer: only what is about leaving things behind has one.
    fn adapt(&self, lb: &mut LoadBalancer) {
        let name = lb.owner.service.name();
        if self.is_suite && !["steady", "owned-half", "crash-create", "crash-replace"].contains(&name) {
            lb.annotations.insert(INTERNAL.to_owned(), "true".to_owned());
        }
        if self.is_suite && name == "crash-create" {
            lb.families = vec![Family::V4, Family::V6];
        }
    }

    async fn mark(&self, owner: &Owner) -> anyhow::Result<()> {
        let balancer = self.balancer(owner)?;
        let of = id(&balancer);
        self.tag(of, "loadbalancer", &format!("loadbalancers/{of}"), &balancer)?;
        let listener = self.listener(of, 80)?;
        self.tag(of, "listener", &format!("listeners/{}", id(&listener)), &listener)?;
        let body = json!({ "listener": { "description": "theirs" } });
        self.change(of, "PUT", &format!("listeners/{}", id(&listener)), Some(&body))?;
        Ok(())
    }

    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool> {
        let balancer = self.balancer(owner)?;
        let listener = self.listener(id(&balancer), 80)?;
        Ok(has_mark(&balancer) && has_mark(&listener) && listener["description"] == "theirs")
    }

    /// Load balancer, listeners, pools, health monitors, members of two pools, floating IP, the members' subnet, rules.
    fn steady_reads(&self) -> usize {
        9
    }

    fn seeds(&self) -> u64 {
        2
    }
}

/// Applies once, for what fails.
pub(crate) async fn applied(provider: &OpenStack, lb: &LoadBalancer) -> steerage_provider_api::Error {
    for _ in 0..1000 {
        match provider.apply(lb, Compare::Remembered).await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => return error,
        }
    }
    unreachable!("no error")
}

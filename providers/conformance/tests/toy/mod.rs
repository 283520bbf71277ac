// SPDX-License-Identifier: Apache-2.0
//! A toy cloud and its provider, for the tests of the suite itself.

mod provider;
mod server;

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use bytes::Bytes;
use hyper::Method;
use steerage_provider_api::{LoadBalancer, Owner, Target};
use steerage_provider_conformance::{
    Call, CallKind, CannedResponse, Harness, Proxy, Request, Snapshot, Upstream,
};

pub(crate) use provider::Bug;
use provider::Toy;
use server::{Server, line};

pub(crate) struct ToyHarness {
    server: Server,
    proxy: Proxy,
    bug: Option<Bug>,
}

impl ToyHarness {
    pub(crate) async fn start(bug: Option<Bug>) -> Self {
        let server = Server::start().await;
        let classify = |request: &Request| {
            let name = format!("{} {}", request.method(), request.uri().path());
            if request.method() == Method::GET { CallKind::Read(name) } else { CallKind::Write(name) }
        };
        let proxy = Proxy::start(Upstream::http(server.addr), classify).await.unwrap();
        Self { server, proxy, bug }
    }
}

#[async_trait]
impl Harness for ToyHarness {
    type Provider = Toy;

    async fn fresh(&self) -> anyhow::Result<Toy> {
        Ok(Toy::new(self.proxy.addr(), self.bug))
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        Ok(self.server.objects.lock().unwrap().iter().map(|(k, v)| (k.clone(), line(v))).collect())
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let prefix = format!("target/{}.{}/", owner.service.namespace(), owner.service.name());
        let objects = self.server.objects.lock().unwrap();
        let nodes = objects.keys().filter_map(|n| n.strip_prefix(&prefix)).map(str::to_owned).collect();
        Ok(BTreeMap::from([("all".to_owned(), nodes)]))
    }

    fn target(&self, index: usize) -> Target {
        Target { provider_id: Some(format!("toy-{index}")), ..bad(format!("node-{index}")) }
    }

    fn bad_target(&self) -> Target {
        bad("node-0-bad".to_owned())
    }

    fn throttle(&self) -> CannedResponse {
        CannedResponse { status: 429, content_type: "text/plain", body: Bytes::from_static(b"slow down") }
    }

    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        let key = &lb.owner.service;
        let mut objects = self.server.objects.lock().unwrap();
        let fields = BTreeMap::from([("color".to_owned(), "blue".to_owned())]);
        objects.insert(format!("lb/{}.{}", key.namespace(), key.name()), fields.clone());
        objects.insert(format!("target/{}.{}/guest", key.namespace(), key.name()), fields.clone());
        objects.insert(format!("lb/{}.{}-guest", key.namespace(), key.name()), fields);
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        self.server.objects.lock().unwrap().retain(|_, fields| !fields.contains_key("color"));
        Ok(())
    }

    async fn mark(&self, owner: &Owner) -> anyhow::Result<()> {
        let name = format!("lb/{}.{}", owner.service.namespace(), owner.service.name());
        let mut objects = self.server.objects.lock().unwrap();
        objects.entry(name).or_default().insert("mark".to_owned(), "mine".to_owned());
        Ok(())
    }

    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool> {
        let name = format!("lb/{}.{}", owner.service.namespace(), owner.service.name());
        Ok(self.server.objects.lock().unwrap().get(&name).is_some_and(|f| f.contains_key("mark")))
    }

    fn nodes_in(&self, call: &Call) -> Option<BTreeSet<String>> {
        let node = call.target.strip_prefix("/target/")?.split('/').nth(1)?;
        call.write.then(|| BTreeSet::from([node.to_owned()]))
    }
}

fn bad(node: String) -> Target {
    Target { node, addresses: Vec::new(), provider_id: None, zone: None, pod_cidrs: Vec::new(), weight: 1 }
}

// SPDX-License-Identifier: Apache-2.0
//! The suite of all providers, over a real API server, with a counting proxy between the two.

#![allow(clippy::expect_used, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderValue;
use http::header::AUTHORIZATION;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::client::ConfigExt as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, ResourceExt as _};
use prometheus_client::registry::Registry;
use serde_json::json;
use steerage_edge_api::{AddressPool, EdgeLoadBalancer, EdgeNodeSet};
use steerage_provider_api::{GroupTargets, LoadBalancer, Owner, Provider as _, SharedSet, Target, TargetSet};
use steerage_provider_conformance::{
    CallKind, CannedResponse, Harness, Proxy, Request, Snapshot, Upstream, converge, converge_deleted,
    fixture, run,
};
use steerage_provider_edge::{EdgeProvider, spec};
use steerage_requirements::requires;
use steerage_testserver::Server;
use steerage_watch::Watches;

const NAMESPACE: &str = "conformance-system";

struct Edge {
    proxy: Proxy,
    client: Client,
}

impl Edge {
    async fn start() -> anyhow::Result<Self> {
        let server = Server::shared();
        let client = server.client().await?;
        install(&client).await?;
        let kubeconfig = Kubeconfig::read_from(server.kubeconfig())?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let host = config.cluster_url.host().expect("a host").trim_matches(['[', ']']).to_owned();
        let address: IpAddr = host.parse()?;
        let port = config.cluster_url.port_u16().unwrap_or(443);
        let tls = Arc::new(config.rustls_client_config()?);
        let users: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(server.kubeconfig())?)?;
        let token = users["users"][0]["user"]["token"].as_str().expect("a token");
        let bearer = HeaderValue::try_from(format!("Bearer {token}"))?;
        let upstream = Upstream::tls(SocketAddr::new(address, port), &host, tls)?;
        let upstream = upstream.with_header(AUTHORIZATION, bearer);
        Ok(Self { proxy: Proxy::start(upstream, classify).await?, client })
    }

    fn balancers(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), NAMESPACE, &ApiResource::erase::<EdgeLoadBalancer>(&()))
    }

    fn node_sets(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), NAMESPACE, &ApiResource::erase::<EdgeNodeSet>(&()))
    }

    fn names(lb: &LoadBalancer) -> [String; 2] {
        let name = spec::object_name(&lb.owner);
        [format!("{name}-guest"), name]
    }
}

/// The CRDs, each spec with a field that only a later version knows, and a pool.
async fn install(client: &Client) -> anyhow::Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in steerage_edge_api::crds() {
        let mut value = serde_json::to_value(&crd)?;
        let spec = &mut value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        spec["properties"]["futureField"] = json!({"type": "string"});
        if spec["properties"].get("healthCheck").is_some() {
            spec["properties"]["healthCheck"]["properties"]["futureField"] = json!({"type": "string"});
        }
        let created = crds.create(&PostParams::default(), &serde_json::from_value(value)?).await?;
        let established = |crd: &CustomResourceDefinition| {
            let conditions = crd.status.as_ref().and_then(|status| status.conditions.clone());
            conditions.unwrap_or_default().iter().any(|c| c.type_ == "Established" && c.status == "True")
        };
        while !established(&crds.get(&created.name_any()).await?) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
    let namespace = serde_json::from_value(json!({"metadata": {"name": NAMESPACE}}))?;
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    let pool: AddressPool = serde_json::from_value(json!({
        "apiVersion": "steerage.dev/v1alpha1", "kind": "AddressPool",
        "metadata": {"name": "default"}, "spec": {"addresses": ["10.9.0.0/24"]},
    }))?;
    let pools: Api<AddressPool> = Api::namespaced(client.clone(), NAMESPACE);
    // The collection is served a moment after the CRD says so.
    let mut tries = 0;
    while let Err(error) = pools.create(&PostParams::default(), &pool).await {
        tries += 1;
        anyhow::ensure!(tries < 600, "cannot create the pool: {error}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    Ok(())
}

/// The provider's watches, the lists that they begin with, and the writes of the pools' statuses run on their own; all else is a call.
fn classify(request: &Request) -> CallKind {
    let name = format!("{} {}", request.method(), request.uri().path());
    let query = request.uri().query().unwrap_or_default();
    if request.uri().path().contains("/addresspools/") {
        CallKind::Background
    } else if request.method() != "GET" {
        CallKind::Write(name)
    } else if query.contains("watch=") || query.contains("limit=") {
        CallKind::Background
    } else {
        CallKind::Read(name)
    }
}

#[async_trait]
impl Harness for Edge {
    type Provider = EdgeProvider;

    async fn fresh(&self) -> anyhow::Result<EdgeProvider> {
        let mut config = Config::new(self.proxy.url().parse()?);
        config.default_retry = false;
        let client = Client::try_from(config)?;
        let watches = Watches::new(client.clone(), &mut Registry::default());
        let provider = EdgeProvider::new(&client, &watches, NAMESPACE);
        provider.listed().await;
        Ok(provider)
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let mut snapshot = Snapshot::new();
        for (kind, api) in [("balancer", self.balancers()), ("set", self.node_sets())] {
            for object in api.list(&ListParams::default()).await? {
                let shown = json!({"labels": object.labels(), "data": object.data});
                snapshot.insert(format!("{kind}/{}", object.name_any()), shown.to_string());
            }
        }
        Ok(snapshot)
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let Some(object) = self.balancers().get_opt(&spec::object_name(owner)).await? else {
            return Ok(BTreeMap::new());
        };
        let targets = object.data["spec"]["targets"].as_array().cloned().unwrap_or_default();
        let nodes = targets.iter().filter_map(|target| Some(target["node"].as_str()?.to_owned())).collect();
        Ok([("all".to_owned(), nodes)].into())
    }

    fn adapt(&self, lb: &mut LoadBalancer) {
        *lb = fixture::by_vip(lb.clone());
    }

    fn target(&self, index: usize) -> Target {
        let address = format!("10.1.0.{}", index + 1).parse().expect("an address");
        Target { addresses: vec![address], ..named(format!("node-{index}")) }
    }

    fn bad_target(&self) -> Target {
        named("node-0-bad".to_owned())
    }

    fn throttle(&self) -> CannedResponse {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "TooManyRequests", "code": 429,
            "message": "slow down", "details": {"retryAfterSeconds": 1},
        });
        CannedResponse { status: 429, content_type: "application/json", body: status.to_string().into() }
    }

    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        for name in Self::names(lb) {
            let object: DynamicObject = serde_json::from_value(json!({
                "apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeLoadBalancer",
                "metadata": {"name": name, "labels": {(spec::SERVICE_UID): lb.owner.uid}},
                "spec": {
                    "service": {"namespace": "default", "name": "guest", "uid": "guest"},
                    "addresses": ["10.9.0.200"],
                    "listeners": [{"protocol": "TCP", "port": 1}],
                    "healthCheck": {"protocol": "TCP", "port": 1, "intervalMilliseconds": 1000,
                        "timeoutMilliseconds": 1000, "healthyThreshold": 1, "unhealthyThreshold": 1},
                },
            }))?;
            self.balancers().create(&PostParams::default(), &object).await?;
        }
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        for object in self.balancers().list(&ListParams::default()).await? {
            if !object.labels().contains_key(spec::MANAGED_BY) {
                self.balancers().delete(&object.name_any(), &DeleteParams::default()).await?;
            }
        }
        Ok(())
    }

    async fn mark(&self, owner: &Owner) -> anyhow::Result<()> {
        let mark = json!({
            "metadata": {"labels": {"example.com/mark": "m"}, "annotations": {"example.com/mark": "m"}},
            "spec": {"futureField": "m", "healthCheck": {"futureField": "m"}},
        });
        let name = spec::object_name(owner);
        self.balancers().patch(&name, &PatchParams::default(), &Patch::Merge(mark)).await?;
        Ok(())
    }

    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool> {
        let object = self.balancers().get(&spec::object_name(owner)).await?;
        let spec = &object.data["spec"];
        Ok(object.labels().contains_key("example.com/mark")
            && object.annotations().contains_key("example.com/mark")
            && [&spec["futureField"], &spec["healthCheck"]["futureField"]]
                .iter()
                .all(|v| v.as_str() == Some("m")))
    }

    fn steady_reads(&self) -> usize {
        0
    }
}

fn named(node: String) -> Target {
    let (addresses, pod_cidrs) = (Vec::new(), Vec::new());
    Target { node, addresses, provider_id: None, zone: None, pod_cidrs, weight: 1 }
}

#[tokio::test(flavor = "multi_thread")]
async fn edge_provider_conforms() {
    requires!(KubeApiserver);
    let edge = Edge::start().await.expect("a harness");
    run(&edge).await.expect("conforms");
    shared_set_changes_for_all_its_users_by_one_write(&edge).await.expect("shared sets");
    nodes_with_an_endpoint_are_written_into_the_load_balancer_alone(&edge).await.expect("fused steering");
    edited_addresses_are_restored(&edge).await.expect("edited addresses");
}

/// Somebody changes an object's address to that of another Service.
async fn edited_addresses_are_restored(edge: &Edge) -> anyhow::Result<()> {
    let owners = ["first", "second"].map(|name| fixture::owner(name, 1));
    let addresses = async |owner| -> anyhow::Result<serde_json::Value> {
        Ok(edge.balancers().get(&spec::object_name(owner)).await?.data["spec"]["addresses"].take())
    };
    let provider = edge.fresh().await?;
    let mut balancers = owners.each_ref().map(|owner| fixture::first(edge, owner));
    for lb in &mut balancers {
        let ingress = converge(&provider, lb).await?.ingress;
        lb.published = ingress.iter().filter_map(|ingress| ingress.ip).collect();
    }
    let before = [addresses(&owners[0]).await?, addresses(&owners[1]).await?];
    let edit = json!({"spec": {"addresses": before[0]}});
    let name = spec::object_name(&owners[1]);
    edge.balancers().patch(&name, &PatchParams::default(), &Patch::Merge(edit)).await?;
    // As after a restart of the controller.
    let provider = edge.fresh().await?;
    for lb in &balancers {
        converge(&provider, lb).await?;
    }
    anyhow::ensure!([addresses(&owners[0]).await?, addresses(&owners[1]).await?] == before);
    for owner in &owners {
        converge_deleted(&provider, owner).await?;
    }
    Ok(())
}

/// Under `fused` steering an object has the nodes with an endpoint beside its shared set, and a change of them is one write of it alone.
async fn nodes_with_an_endpoint_are_written_into_the_load_balancer_alone(edge: &Edge) -> anyhow::Result<()> {
    let set = |nodes: Option<&[&str]>| {
        let nodes = nodes.map(|nodes| nodes.iter().map(|node| (*node).to_owned()).collect());
        let set = TargetSet {
            shared: Some(SharedSet::Eligible),
            generation: 1,
            ..TargetSet::own([edge.target(0)])
        };
        set.with_endpoint_nodes(nodes)
    };
    let (owner, provider) = (fixture::owner("fused", 1), edge.fresh().await?);
    let wanted = |nodes| fixture::first(edge, &owner).with_nodes(set(nodes));
    let found = async || -> anyhow::Result<serde_json::Value> {
        Ok(edge.balancers().get(&spec::object_name(&owner)).await?.data["spec"].clone())
    };
    converge(&provider, &wanted(None)).await?;
    let plain = found().await?;
    for nodes in [Some(&["node-0"][..]), Some(&["node-0", "node-1"]), Some(&[]), None] {
        edge.proxy().reset();
        converge(&provider, &wanted(nodes)).await?;
        let writes = edge.proxy().writes();
        anyhow::ensure!(writes.len() == 1, "{nodes:?}: {writes:?}");
        let mut spec = found().await?;
        let listed = spec.as_object_mut().and_then(|spec| spec.remove("endpointNodes"));
        anyhow::ensure!(listed == nodes.map(|nodes| json!(nodes)) && spec == plain, "{listed:?} {spec}");
        converge(&edge.fresh().await?, &wanted(nodes)).await?;
        anyhow::ensure!(edge.proxy().writes().len() == 1, "a second call writes nothing");
    }
    provider.set_targets(&owner, &GroupTargets::of_nodes(set(Some(&["node-1"])))).await?;
    anyhow::ensure!(found().await?["endpointNodes"] == json!(["node-1"]));
    converge_deleted(&provider, &owner).await?;
    Ok(())
}

/// An older value that comes later changes nothing, a set that nobody uses is not written, and the last user takes it away.
async fn shared_set_changes_for_all_its_users_by_one_write(edge: &Edge) -> anyhow::Result<()> {
    let set = |generation, nodes: &[usize]| TargetSet {
        shared: Some(SharedSet::Eligible),
        generation,
        ..TargetSet::own(nodes.iter().map(|node| edge.target(*node)))
    };
    let nodes = async || -> anyhow::Result<Vec<String>> {
        let object = edge.node_sets().get("eligible").await?;
        let targets = object.data["spec"]["targets"].as_array().cloned().unwrap_or_default();
        Ok(targets.iter().filter_map(|target| Some(target["node"].as_str()?.to_owned())).collect())
    };
    let provider = edge.fresh().await?;
    provider.set_shared(&set(1, &[0])).await?;
    anyhow::ensure!(edge.node_sets().get_opt("eligible").await?.is_none(), "nobody uses it");
    let owners = ["one", "two"].map(|name| fixture::owner(name, 1));
    for owner in &owners {
        converge(&provider, &fixture::first(edge, owner).with_nodes(set(1, &[0]))).await?;
    }
    anyhow::ensure!(nodes().await? == ["node-0"]);
    edge.proxy().reset();
    provider.set_shared(&set(2, &[0, 1])).await?;
    anyhow::ensure!(nodes().await? == ["node-0", "node-1"]);
    provider.set_shared(&set(1, &[0])).await?;
    converge(&provider, &fixture::first(edge, &owners[0]).with_nodes(set(1, &[0]))).await?;
    anyhow::ensure!(nodes().await? == ["node-0", "node-1"], "an older value came later");
    let writes = edge.proxy().writes();
    anyhow::ensure!(writes.len() == 1, "{writes:?}");
    for owner in &owners {
        converge_deleted(&provider, owner).await?;
    }
    anyhow::ensure!(edge.node_sets().get_opt("eligible").await?.is_none(), "nobody uses it any more");
    Ok(())
}

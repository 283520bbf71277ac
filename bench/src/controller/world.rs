// SPDX-License-Identifier: Apache-2.0
//! The API server of the controller's benchmark, and the objects in it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use steerage_edge_api::{AddressPool, EdgeLoadBalancer, EdgeNodeSet};
use steerage_testserver::{Options, Server};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use super::peer::Cluster;
use super::results::Writes;
use super::{Scale, objects};
use crate::api::create;

/// Concurrent requests while objects are created.
const PARALLEL: usize = 12;
/// Namespace of everything.
pub(super) const NAMESPACE: &str = "default";
/// Longest wait for the controller's write.
const LIMIT: Duration = Duration::from_mins(15);

/// A cluster without nodes that run: objects only.
pub(super) struct World {
    pub(super) runtime: Runtime,
    pub(super) client: Client,
    services: u32,
    /// Those that exist, and the number of the next one.
    nodes: u32,
    pub(super) endpoints: u32,
    // Last, so that it is dropped after its users.
    server: Server,
}

impl World {
    pub(super) fn start() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let arguments = [
            // More health-check node ports than the default range has.
            "--service-node-port-range=11000-31999",
            // The address allocator of 1.34 counts all addresses for each new one, so creating 10,000 Services takes minutes.
            "--emulated-version=1.33",
            "--feature-gates=MultiCIDRServiceAllocator=false,WatchList=true",
            "--service-cluster-ip-range=10.96.0.0/12",
        ];
        let arguments = arguments.map(str::to_owned).to_vec();
        let server = Server::start_with(Options { arguments, ..Options::default() })?;
        let client = runtime.block_on(server.client())?;
        Ok(Self { runtime, client, services: 0, nodes: 0, endpoints: 0, server })
    }

    pub(super) fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    pub(super) fn services(&self) -> u32 {
        self.services
    }

    pub(super) fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Creates what the peer reads, but no Services.
    pub(super) fn fill_for_peer(&mut self, scale: &Scale) -> Result<()> {
        (self.services, self.nodes) = (scale.services, scale.nodes);
        self.runtime.block_on(add_nodes(&self.client, self.nodes))
    }

    /// Creates everything that the controller reads.
    pub(super) fn fill(&mut self, scale: &Scale) -> Result<()> {
        (self.services, self.nodes, self.endpoints) = (scale.services, scale.nodes, scale.endpoints);
        let (client, nodes, endpoints) = (&self.client, self.nodes, self.endpoints);
        self.runtime.block_on(async {
            install(client).await?;
            add_nodes(client, nodes).await?;
            let make = |number| async move {
                create::<Service>(&Api::namespaced(client.clone(), NAMESPACE), objects::service(number))
                    .await?;
                let nodes = objects::endpoint_nodes(number, 0, endpoints, nodes);
                let slices = Api::namespaced(client.clone(), NAMESPACE);
                create::<EndpointSlice>(&slices, objects::slice(number, &nodes)).await.map(drop)
            };
            stream::iter(0..self.services)
                .map(|number| Ok(make(number)))
                .try_buffer_unordered(PARALLEL)
                .try_collect()
                .await
        })
    }

    /// Fails unless every Service has its load balancer.
    pub(super) fn ensure_programmed(&self) -> Result<()> {
        let balancers: Api<EdgeLoadBalancer> = Api::namespaced(self.client.clone(), NAMESPACE);
        let found = self.runtime.block_on(balancers.list_metadata(&kube::api::ListParams::default()))?;
        ensure!(found.items.len() == self.services as usize, "{} load balancers", found.items.len());
        Ok(())
    }

    /// Adds one node.
    pub(super) fn add_node(&mut self) -> Result<()> {
        self.runtime.block_on(add_node(&self.client, self.nodes))?;
        self.nodes += 1;
        Ok(())
    }

    /// Removes the node that was added last.
    pub(super) fn remove_node(&mut self) -> Result<()> {
        self.nodes -= 1;
        let nodes: Api<Node> = Api::all(self.client.clone());
        let name = objects::node_name(self.nodes);
        self.runtime.block_on(nodes.delete(&name, &DeleteParams::default()))?;
        Ok(())
    }

    /// Waits until the shared set has as many targets as there are nodes.
    pub(super) fn wait_node_set(&self) -> Result<()> {
        let sets: Api<EdgeNodeSet> = Api::namespaced(self.client.clone(), NAMESPACE);
        let begun = Instant::now();
        self.runtime.block_on(async {
            loop {
                let targets = sets.get("eligible").await?.spec.targets.len();
                if targets == self.nodes as usize {
                    return Ok(());
                }
                ensure!(begun.elapsed() < LIMIT, "the set has {targets} targets, not {}", self.nodes);
                sleep(Duration::from_millis(50)).await;
            }
        })
    }

    /// Provider calls: writes of load balancers and of shared node sets.
    pub(super) fn provider_calls(&self) -> Result<f64> {
        self.requests(&["edgeloadbalancers", "edgenodesets"])
    }

    pub(super) fn writes(&self) -> Result<Writes> {
        let objects = self.requests(&["services", "edgeloadbalancers", "edgenodesets", "addresspools"])?;
        Ok(Writes { objects, events: self.requests(&["events"])? })
    }

    /// Requests that write these resources, by the API server's own count.
    fn requests(&self, resources: &[&str]) -> Result<f64> {
        let request = http::Request::get("/metrics").body(Vec::new())?;
        let text = self.runtime.block_on(self.client.request_text(request))?;
        let counts = |line: &&str| {
            let has = |label: &str, values: &[&str]| {
                values.iter().any(|value| line.contains(&format!("{label}=\"{value}\"")))
            };
            line.starts_with("apiserver_request_total{")
                && has("verb", &["POST", "PUT", "PATCH", "APPLY", "DELETE"])
                && has("resource", resources)
        };
        let value = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<f64>().ok());
        Ok(text.lines().filter(counts).filter_map(value).sum())
    }
}

impl Cluster for World {
    fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    fn create_services(&mut self) -> Result<()> {
        let services: Api<Service> = Api::namespaced(self.client.clone(), NAMESPACE);
        let create = |number| create(&services, objects::unclassed(objects::service(number)));
        self.runtime.block_on(
            stream::iter(0..self.services)
                .map(|number| Ok(create(number)))
                .try_buffer_unordered(PARALLEL)
                .try_for_each(|_| async { Ok(()) }),
        )
    }

    fn add_node(&mut self) -> Result<()> {
        World::add_node(self)
    }

    fn remove_node(&mut self) -> Result<()> {
        World::remove_node(self)
    }

    fn writes(&self) -> Result<Writes> {
        World::writes(self)
    }

    fn last_list(&self) -> Option<Instant> {
        None
    }
}

async fn install(client: &Client) -> Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in steerage_edge_api::crds() {
        crds.create(&PostParams::default(), &crd).await?;
    }
    let pools: Api<AddressPool> = Api::namespaced(client.clone(), NAMESPACE);
    let begun = Instant::now();
    // A collection is served a moment after its definition was accepted.
    while let Err(error) = create(&pools, objects::pool()).await {
        ensure!(begun.elapsed() < Duration::from_secs(30), "cannot make the AddressPool: {error:#}");
        sleep(Duration::from_millis(200)).await;
    }
    for crd in steerage_edge_api::crds() {
        while !is_established(&crds.get(&crd.name_any()).await?) {
            sleep(Duration::from_millis(100)).await;
        }
    }
    Ok(())
}

fn is_established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|list| list.iter().any(|c| c.type_ == "Established" && c.status == "True"))
}

async fn add_nodes(client: &Client, count: u32) -> Result<()> {
    stream::iter(0..count)
        .map(|number| Ok(add_node(client, number)))
        .try_buffer_unordered(PARALLEL)
        .try_collect()
        .await
}

async fn add_node(client: &Client, number: u32) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    create(&nodes, objects::node(number)).await?;
    let status = Patch::Merge(objects::node_status(number));
    nodes.patch_status(&objects::node_name(number), &PatchParams::default(), &status).await?;
    Ok(())
}

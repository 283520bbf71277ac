// SPDX-License-Identifier: Apache-2.0
//! The driver's side of the API server: starts it, fills it, changes slices, reads who asked it for what.

use std::fs;
use std::future::Future;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use steerage_testserver::{Options, Server};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::objects::{self, Side};
use crate::subject::Who;
use crate::world::API;

/// Requests under way while the cluster is filled.
const PARALLEL: usize = 12;
/// Where Services live.
const NAMESPACE: &str = "default";

/// Where a Service is reached.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// Its cluster address.
    pub cluster: Ipv4Addr,
    /// The node port of its first port, and its load balancer's address.
    pub balanced: Option<(u16, Ipv4Addr)>,
    /// Where its health is asked.
    pub health: Option<u16>,
}

/// A running API server, and what has been put into it.
pub struct Cluster {
    runtime: Runtime,
    client: Client,
    folder: PathBuf,
    /// By number.
    services: Vec<Reached>,
    probe: Reached,
    health: Reached,
    // Last: it ends after those that use it.
    _server: Server,
}

impl Cluster {
    /// Starts one in the calling thread's namespace, with the node and the two Services that are watched.
    pub fn start(folder: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let policy = json!({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
            "rules": [
                { "level": "Metadata", "users": [Who::Ours.user(), Who::Peer.user()] },
                { "level": "None" },
            ],
        });
        fs::write(folder.join("policy.json"), policy.to_string())?;
        let file = |flag: &str, name: &str| format!("{flag}={}", folder.join(name).display());
        let server = Server::start_with(Options {
            address: API,
            arguments: vec![
                file("--audit-policy-file", "policy.json"),
                file("--audit-log-path", "audit.log"),
                // Room for more node ports than clusters have by default, above the ports of the programs themselves.
                "--service-node-port-range=11000-31999".to_owned(),
                // The allocator of addresses that 1.34 made the only one counts all of them at each new one: with it, 10,000
                // Services took minutes to make. The one before does not. Programs under test meet neither.
                "--emulated-version=1.33".to_owned(),
                "--feature-gates=MultiCIDRServiceAllocator=false".to_owned(),
            ],
            // Their tokens are no secrets: the server is alone in a namespace of its own, and holds nothing.
            administrators: Who::ALL.map(|who| (who.name().to_owned(), who.user().to_owned())).to_vec(),
        })?;
        let mut kubeconfig: Value = serde_json::from_slice(&fs::read(server.kubeconfig())?)?;
        for who in Who::ALL {
            kubeconfig["users"][0]["user"] = json!({ "token": who.name() });
            fs::write(kubeconfig_of(folder, who), kubeconfig.to_string())?;
        }
        let client = runtime.block_on(server.client())?;
        let (probe, health) = runtime.block_on(furnish(&client))?;
        let folder = folder.to_owned();
        Ok(Self { runtime, client, folder, services: Vec::new(), probe, health, _server: server })
    }

    /// Runs a future to its end.
    pub fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Starts a future beside the caller.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn(work)
    }

    /// The kubeconfig of a program under test.
    pub fn kubeconfig(&self, who: Who) -> PathBuf {
        kubeconfig_of(&self.folder, who)
    }

    /// Adds numbered Services until there are so many.
    pub fn fill(&mut self, count: u32) -> Result<()> {
        let present = u32::try_from(self.services.len())?;
        let client = &self.client;
        let made = stream::iter(present..count).map(|number| make(client, number)).buffered(PARALLEL);
        let made: Vec<_> = self.runtime.block_on(made.try_collect())?;
        self.services.extend(made);
        Ok(())
    }

    /// The numbered Services.
    pub fn services(&self) -> &[Reached] {
        &self.services
    }

    /// The Service whose first packets are watched for.
    pub fn probe(&self) -> Reached {
        self.probe
    }

    /// The Service whose health checks are asked.
    pub fn health(&self) -> Reached {
        self.health
    }

    /// What changes slices.
    pub fn slices(&self) -> Slices {
        Slices(Api::namespaced(self.client.clone(), NAMESPACE))
    }

    /// Moves the probe to other endpoints; returns when the API server had answered.
    pub fn move_probe(&self, side: Side) -> Result<Instant> {
        let endpoints = objects::endpoints(&objects::probe_addresses(side));
        self.wait(self.slices().change(objects::PROBE, endpoints))
    }

    /// Gives the health Service its endpoint, or takes it away; returns when the API server had answered.
    pub fn set_health(&self, present: bool) -> Result<Instant> {
        self.wait(self.slices().change(objects::HEALTH, objects::health_endpoints(present)))
    }

    /// How many requests a program has made, and how many of them were watches.
    pub fn requests(&self, who: Who) -> Result<(usize, usize)> {
        let log = fs::read_to_string(self.folder.join("audit.log")).unwrap_or_default();
        let (mut all, mut watches) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
        for line in log.lines() {
            // The last line may still be in the writing.
            let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
            if event["user"]["username"] != who.user() {
                continue;
            }
            let id = event["auditID"].as_str().unwrap_or_default().to_owned();
            if event["verb"] == "watch" {
                watches.insert(id.clone());
            }
            all.insert(id);
        }
        Ok((all.len(), watches.len()))
    }
}

/// Changes slices.
#[derive(Clone)]
pub struct Slices(Api<EndpointSlice>);

impl Slices {
    /// Changes a slice's endpoints; returns when the API server had answered.
    pub async fn change(&self, slice: &str, endpoints: Value) -> Result<Instant> {
        let change = Patch::Merge(json!({ "endpoints": endpoints }));
        self.0.patch_metadata(slice, &PatchParams::default(), &change).await?;
        Ok(Instant::now())
    }
}

fn kubeconfig_of(folder: &Path, who: Who) -> PathBuf {
    folder.join(format!("kubeconfig-{}", who.name()))
}

/// The node and the two Services that are watched.
async fn furnish(client: &Client) -> Result<(Reached, Reached)> {
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &objects::node()?).await.context("cannot make the node")?;
    let status = Patch::Merge(objects::node_status());
    nodes.patch_status(objects::NODE_NAME, &PatchParams::default(), &status).await?;
    let (service, slice) = objects::probe()?;
    let probe = create(client, &service, &slice, None).await?;
    let (service, slice) = objects::health()?;
    let health = create(client, &service, &slice, Some(objects::vip(60_000))).await?;
    Ok((probe, health))
}

async fn make(client: &Client, number: u32) -> Result<Reached> {
    let balancer = objects::is_balanced(number).then(|| objects::vip(number));
    create(client, &objects::service(number)?, &objects::slice(number)?, balancer).await
}

async fn create(
    client: &Client,
    service: &Service,
    slice: &EndpointSlice,
    balancer: Option<Ipv4Addr>,
) -> Result<Reached> {
    let services: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    let name = service.name_any();
    let made = services
        .create(&PostParams::default(), service)
        .await
        .with_context(|| format!("cannot make {name}"))?;
    if let Some(address) = balancer {
        let status = Patch::Merge(objects::balancer_status(address));
        services.patch_status(&name, &PatchParams::default(), &status).await?;
    }
    slices
        .create(&PostParams::default(), slice)
        .await
        .with_context(|| format!("cannot make slice {name}"))?;
    let spec = made.spec.context("an empty Service")?;
    let cluster = spec.cluster_ip.context("no cluster address")?.parse()?;
    let node_port = spec.ports.and_then(|ports| ports.first()?.node_port);
    Ok(Reached {
        cluster,
        balanced: node_port.map(u16::try_from).transpose()?.zip(balancer),
        health: spec.health_check_node_port.map(u16::try_from).transpose()?,
    })
}

// SPDX-License-Identifier: Apache-2.0
//! The driver's side of the API server: starts it, creates objects, changes EndpointSlices, and counts the programs' requests.

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

use crate::objects::{self, Shape, Side};
use crate::testbed::API;
use crate::who::Who;

/// Concurrent requests while objects are created.
const PARALLEL: usize = 12;
/// Namespace of all Services.
const NAMESPACE: &str = "default";

/// The addresses of a Service.
#[derive(Clone, Copy, Debug)]
pub struct ServiceAddresses {
    /// Cluster IP.
    pub cluster: Ipv4Addr,
    /// Node port of the first port, and VIP.
    pub load_balanced: Option<(u16, Ipv4Addr)>,
    /// Health-check node port.
    pub health: Option<u16>,
}

/// A running API server, and the Services in it.
pub struct Cluster {
    runtime: Runtime,
    client: Client,
    folder: PathBuf,
    /// By number.
    services: Vec<ServiceAddresses>,
    probe: ServiceAddresses,
    /// Of the probe Service.
    shape: Shape,
    health: ServiceAddresses,
    // Last, so that it is dropped after its users.
    _server: Server,
}

impl Cluster {
    /// Starts an API server in the calling thread's namespace, with the node, the probe Service and the health Service.
    pub fn start(folder: &Path, shape: Shape) -> Result<Self> {
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
                // More node ports than the default range has, above the ports of the programs.
                "--service-node-port-range=11000-31999".to_owned(),
                // The address allocator of 1.34 counts all addresses for each new one, so creating 10,000 Services takes minutes.
                // The older allocator does not. The programs under test use neither.
                "--emulated-version=1.33".to_owned(),
                // Lists are streamed, as 1.34 and later do by default.
                "--feature-gates=MultiCIDRServiceAllocator=false,WatchList=true".to_owned(),
            ],
            // The tokens are not secret: the server is alone in its network namespace and holds no data.
            administrators: Who::ALL.map(|who| (who.name().to_owned(), who.user().to_owned())).to_vec(),
        })?;
        let mut kubeconfig: Value = serde_json::from_slice(&fs::read(server.kubeconfig())?)?;
        for who in Who::ALL {
            kubeconfig["users"][0]["user"] = json!({ "token": who.name() });
            fs::write(kubeconfig_of(folder, who), kubeconfig.to_string())?;
        }
        let client = runtime.block_on(server.client())?;
        let (probe, health) = runtime.block_on(create_fixtures(&client, shape))?;
        let folder = folder.to_owned();
        Ok(Self { runtime, client, folder, services: Vec::new(), probe, shape, health, _server: server })
    }

    /// Runs a future to its end.
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Starts a future in the background.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn(work)
    }

    /// The kubeconfig of a program under test.
    pub fn kubeconfig(&self, who: Who) -> PathBuf {
        kubeconfig_of(&self.folder, who)
    }

    /// Creates numbered Services until `count` exist.
    pub fn fill(&mut self, count: u32) -> Result<()> {
        let present = u32::try_from(self.services.len())?;
        let (client, shape) = (&self.client, self.shape);
        let made = stream::iter(present..count).map(|number| make(client, number, shape)).buffered(PARALLEL);
        let made: Vec<_> = self.runtime.block_on(made.try_collect())?;
        self.services.extend(made);
        Ok(())
    }

    /// The numbered Services.
    pub fn services(&self) -> &[ServiceAddresses] {
        &self.services
    }

    /// The Service for measuring first packets.
    pub fn probe(&self) -> ServiceAddresses {
        self.probe
    }

    /// The Service for measuring health checks.
    pub fn health(&self) -> ServiceAddresses {
        self.health
    }

    /// A writer of EndpointSlices.
    pub fn slices(&self) -> Slices {
        Slices(Api::namespaced(self.client.clone(), NAMESPACE))
    }

    /// Changes the endpoints of the probe Service. Returns the time of the API server's response.
    pub fn move_probe(&self, side: Side) -> Result<Instant> {
        let endpoints = objects::endpoints(&objects::probe_addresses(side, self.shape));
        self.block_on(self.slices().change(objects::PROBE, endpoints))
    }

    /// Whether the probe Service has so many endpoints that a list holds them.
    pub fn has_large_probe(&self) -> bool {
        self.probe_endpoints() > objects::FEW
    }

    /// The number of endpoints of the probe Service.
    pub fn probe_endpoints(&self) -> u32 {
        objects::probe_endpoints(self.shape)
    }

    /// Gives the probe Service the endpoints of a side, of which the last one may be the other side's. Returns the time of the API server's
    /// response.
    pub fn change_one_of_probe(&self, side: Side, is_other: bool) -> Result<Instant> {
        let mut addresses = objects::probe_addresses(side, self.shape);
        let other = objects::probe_addresses(side.other(), self.shape).pop();
        if let (Some(last), Some(other), true) = (addresses.last_mut(), other, is_other) {
            *last = other;
        }
        self.block_on(self.slices().change(objects::PROBE, objects::endpoints(&addresses)))
    }

    /// Adds or removes the endpoint of the health Service. Returns the time of the API server's response.
    pub fn set_health(&self, present: bool) -> Result<Instant> {
        self.block_on(self.slices().change(objects::HEALTH, objects::health_endpoints(present)))
    }

    /// The number of requests of a program, and how many of them are watches.
    pub fn requests(&self, who: Who) -> Result<(usize, usize)> {
        let log = fs::read_to_string(self.folder.join("audit.log")).unwrap_or_default();
        let (mut all, mut watches) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
        for line in log.lines() {
            // The last line may be incomplete.
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

/// Writes EndpointSlices.
#[derive(Clone)]
pub struct Slices(Api<EndpointSlice>);

impl Slices {
    /// Changes the endpoints of an EndpointSlice. Returns the time of the API server's response.
    pub async fn change(&self, slice: &str, endpoints: Value) -> Result<Instant> {
        let change = Patch::Merge(json!({ "endpoints": endpoints }));
        self.0.patch_metadata(slice, &PatchParams::default(), &change).await?;
        Ok(Instant::now())
    }
}

fn kubeconfig_of(folder: &Path, who: Who) -> PathBuf {
    folder.join(format!("kubeconfig-{}", who.name()))
}

/// Creates the node, the probe Service and the health Service.
async fn create_fixtures(client: &Client, shape: Shape) -> Result<(ServiceAddresses, ServiceAddresses)> {
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &objects::node()?).await.context("cannot make the node")?;
    let status = Patch::Merge(objects::node_status());
    nodes.patch_status(objects::NODE_NAME, &PatchParams::default(), &status).await?;
    let (service, slice) = objects::probe(shape)?;
    let probe = create(client, &service, &[slice], None).await?;
    let (service, slice) = objects::health()?;
    let health = create(client, &service, &[slice], Some(objects::vip(60_000))).await?;
    Ok((probe, health))
}

async fn make(client: &Client, number: u32, shape: Shape) -> Result<ServiceAddresses> {
    let balancer = objects::has_load_balancer(number).then(|| objects::vip(number));
    create(client, &objects::service(number)?, &objects::slices(shape, number)?, balancer).await
}

async fn create(
    client: &Client,
    service: &Service,
    slices_of_it: &[EndpointSlice],
    balancer: Option<Ipv4Addr>,
) -> Result<ServiceAddresses> {
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
    for slice in slices_of_it {
        let made = slices.create(&PostParams::default(), slice).await;
        made.with_context(|| format!("cannot make a slice of {name}"))?;
    }
    let spec = made.spec.context("an empty Service")?;
    let cluster = spec.cluster_ip.context("no cluster address")?.parse()?;
    let node_port = spec.ports.and_then(|ports| ports.first()?.node_port);
    Ok(ServiceAddresses {
        cluster,
        load_balanced: node_port.map(u16::try_from).transpose()?.zip(balancer),
        health: spec.health_check_node_port.map(u16::try_from).transpose()?,
    })
}

// SPDX-License-Identifier: Apache-2.0
//! A real API server with objects only, moto in place of AWS, the changes that are measured, and whether AWS has followed them.

use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use steerage_testmoto::{Release, Server as Moto, peer};
use steerage_testserver::Server;
use tokio::runtime::Runtime;

use super::objects::{self, CLUSTER};
use super::recorder::Recorder;
use super::snapshot;
use crate::api::create;

/// Concurrent requests for the changes of a phase.
const PARALLEL: usize = 12;
/// Namespace of everything.
const NAMESPACE: &str = "default";
/// Nodes at the start, half of them in each zone. One more instance waits to replace one of them.
const NODES: usize = 6;

/// A node, and its instance.
#[derive(Clone, Debug)]
struct Member {
    name: String,
    instance: String,
    address: Ipv4Addr,
}

/// The cluster and its AWS.
pub(super) struct World {
    pub(super) runtime: Runtime,
    pub(super) recorder: Recorder,
    pub(super) vpc: String,
    pub(super) subnets: Vec<String>,
    client: Client,
    /// Nodes from the first one on; the last is the spare.
    members: Vec<Member>,
    /// Instances that belong into every target group.
    wanted: Vec<String>,
    /// Port of all Services.
    port: u16,
    services: u32,
    moto: Moto,
    // Last, so that it is dropped after its users.
    server: Server,
}

impl World {
    /// Nodes without Services.
    pub(super) fn start() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let server = Server::start()?;
        let client = runtime.block_on(server.client())?;
        let moto = Moto::start(Release::USUAL)?;
        let (vpc, subnets) = moto.network()?;
        let group = moto.security_group(&vpc, "nodes")?;
        let member = |number: usize| {
            let zone = number % subnets.len();
            let address = Ipv4Addr::new(10, 0, u8::try_from(zone * 4)?, u8::try_from(10 + number)?);
            let instance = moto.grouped_instance(&subnets[zone], address, &group)?;
            moto.tag(&instance, &peer::cluster_tag(CLUSTER), "owned")?;
            anyhow::Ok(Member { name: format!("node-{number}"), instance, address })
        };
        let members: Vec<_> = (0..=NODES).map(member).collect::<Result<_>>()?;
        let nodes: Api<Node> = Api::all(client.clone());
        runtime.block_on(async {
            for member in &members[..NODES] {
                join(&nodes, member).await?;
            }
            anyhow::Ok(())
        })?;
        let wanted = members[..NODES].iter().map(|member| member.instance.clone()).collect();
        let recorder = Recorder::start(&runtime, moto.addr())?;
        Ok(Self {
            runtime,
            recorder,
            vpc,
            subnets,
            client,
            members,
            wanted,
            port: 80,
            services: 0,
            moto,
            server,
        })
    }

    pub(super) fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    /// Creates Services, each with an endpoint on the first node.
    pub(super) fn create_services(&mut self, count: u32) -> Result<()> {
        self.services = count;
        let node = &self.members[0].name;
        self.each(|services, slices, number| async move {
            create(&slices, objects::slice(number, node)).await?;
            create(&services, objects::service(number)).await.map(drop)
        })
    }

    /// Moves all Services to another port, with the same node port.
    pub(super) fn change_port(&mut self) -> Result<()> {
        self.port += 1;
        let port = self.port;
        self.each(|services, _, number| async move {
            let name = objects::service_name(number);
            let found = services.get(&name).await?;
            let mut ports = found.spec.and_then(|spec| spec.ports).context("a Service without ports")?;
            ports[0].port = i32::from(port);
            let change = Patch::Merge(json!({"spec": {"ports": ports}}));
            services.patch(&name, &PatchParams::default(), &change).await?;
            Ok(())
        })
    }

    /// Moves the endpoint of every Service to the second node.
    pub(super) fn move_endpoints(&mut self) -> Result<()> {
        let node = &self.members[1].name;
        self.each(|_, slices, number| async move {
            let change = Patch::Merge(json!({"endpoints": objects::endpoints(number, node)}));
            slices.patch_metadata(&objects::service_name(number), &PatchParams::default(), &change).await?;
            Ok(())
        })
    }

    /// Excludes the last node from load balancers.
    pub(super) fn take_node_out(&mut self) -> Result<()> {
        let member = self.members[NODES - 1].clone();
        self.wanted.retain(|instance| *instance != member.instance);
        self.label(&member.name, &json!({objects::EXCLUDE: ""}))
    }

    /// Ends the exclusion.
    pub(super) fn put_node_back(&mut self) -> Result<()> {
        let member = self.members[NODES - 1].clone();
        self.wanted.push(member.instance);
        self.label(&member.name, &json!({objects::EXCLUDE: null}))
    }

    fn label(&self, node: &str, labels: &Value) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let change = Patch::Merge(json!({"metadata": {"labels": labels}}));
        self.runtime.block_on(nodes.patch_metadata(node, &PatchParams::default(), &change))?;
        Ok(())
    }

    /// Deletes the last node, and the spare instance joins at the same time.
    pub(super) fn replace_node(&mut self) -> Result<()> {
        let (old, new) = (self.members[NODES - 1].clone(), self.members[NODES].clone());
        let nodes: Api<Node> = Api::all(self.client.clone());
        self.runtime.block_on(async {
            nodes.delete(&old.name, &DeleteParams::default()).await?;
            join(&nodes, &new).await
        })?;
        self.wanted.retain(|instance| *instance != old.instance);
        self.wanted.push(new.instance);
        Ok(())
    }

    /// Deletes all Services.
    pub(super) fn delete_services(&mut self) -> Result<()> {
        let deleted = self.each(|services, slices, number| async move {
            let name = objects::service_name(number);
            services.delete(&name, &DeleteParams::default()).await?;
            slices.delete(&name, &DeleteParams::default()).await?;
            Ok(())
        });
        self.services = 0;
        deleted
    }

    /// What AWS or the API server lacks of what the Services ask for, if anything.
    pub(super) fn missing(&self) -> Result<Option<String>> {
        let text = self.moto.snapshot()?;
        if !snapshot::serves(&text, self.services, self.port, &self.wanted) {
            return Ok(Some(format!("not {} targets of each listener:\n{text}", self.wanted.len())));
        }
        let services: Api<Service> = Api::namespaced(self.client.clone(), NAMESPACE);
        let listed = self.runtime.block_on(services.list(&ListParams::default()))?.items;
        let is_ours = |service: &&Service| {
            service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) == Some("LoadBalancer")
        };
        let ours: Vec<_> = listed.iter().filter(is_ours).collect();
        let is_published = |service: &&&Service| {
            let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
            let ingress = status.and_then(|status| status.ingress.as_ref());
            ingress.is_some_and(|ingress| ingress.iter().any(|of| of.hostname.is_some()))
        };
        let (found, published) = (ours.len(), ours.iter().filter(is_published).count());
        let is_complete = found == published && found == self.services as usize;
        Ok((!is_complete)
            .then(|| format!("{published} host names of {found} Services, not {}", self.services)))
    }

    /// Target groups in AWS that no listener uses.
    pub(super) fn unused_target_groups(&self) -> Result<usize> {
        Ok(snapshot::unused_target_groups(&self.moto.snapshot()?))
    }

    /// Runs a change for every Service, some of them at a time.
    fn each<F>(&self, change: impl Fn(Api<Service>, Api<EndpointSlice>, u32) -> F) -> Result<()>
    where
        F: Future<Output = Result<()>>,
    {
        let services: Api<Service> = Api::namespaced(self.client.clone(), NAMESPACE);
        let slices: Api<EndpointSlice> = Api::namespaced(self.client.clone(), NAMESPACE);
        let changes = stream::iter(0..self.services)
            .map(|number| Ok(change(services.clone(), slices.clone(), number)))
            .try_buffer_unordered(PARALLEL)
            .try_collect();
        self.runtime.block_on(changes)
    }
}

async fn join(nodes: &Api<Node>, member: &Member) -> Result<()> {
    create(nodes, objects::node(&member.name, &member.instance)).await?;
    let status = Patch::Merge(objects::node_status(member.address));
    nodes.patch_status(&member.name, &PatchParams::default(), &status).await?;
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! A real API server with objects only, what stands for the cloud, the changes that are measured, and whether the cloud has followed
//! them.

use std::path::Path;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use steerage_testserver::Server;
use tokio::runtime::Runtime;

use super::cloud::{Cloud, Member, Vendor, Wanted};
use super::objects;
use super::recorder::Recorder;
use crate::api::create;
use crate::who::Who;

/// Concurrent requests for the changes of a phase.
const PARALLEL: usize = 12;
/// Namespace of everything.
const NAMESPACE: &str = "default";
/// Nodes at the start. One more machine waits to replace one of them.
const NODES: usize = 6;

/// The cluster and its cloud, for one program.
pub(super) struct World {
    who: Who,
    pub(super) cloud: Box<dyn Cloud>,
    client: Client,
    /// Nodes from the first one on; the last is the spare.
    members: Vec<Member>,
    /// Machines whose nodes are eligible.
    eligible: Vec<String>,
    /// The node with all endpoints, by its place.
    holder: usize,
    /// Port of all Services.
    port: u16,
    services: u32,
    // Last, so that they are dropped after their users.
    server: Server,
    runtime: Runtime,
}

impl World {
    /// Nodes without Services.
    pub(super) fn start(vendor: Vendor, who: Who) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let server = Server::start()?;
        let client = runtime.block_on(server.client())?;
        let cloud = vendor.start(&runtime)?;
        let members: Vec<_> = (0..=NODES).map(|number| cloud.member(number)).collect::<Result<_>>()?;
        let nodes: Api<Node> = Api::all(client.clone());
        runtime.block_on(async {
            for member in &members[..NODES] {
                join(&nodes, member).await?;
            }
            if vendor == Vendor::Gce {
                let services = Api::<Service>::namespaced(client.clone(), "kube-system");
                create(&services, objects::default_backend()).await?;
            }
            anyhow::Ok(())
        })?;
        let eligible = members[..NODES].iter().map(|member| member.id.clone()).collect();
        Ok(Self { who, cloud, client, members, eligible, holder: 0, port: 80, services: 0, server, runtime })
    }

    pub(super) fn recorder(&self) -> &Recorder {
        self.cloud.recorder()
    }

    pub(super) fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    /// The node with all endpoints.
    pub(super) fn holder(&self) -> &Member {
        &self.members[self.holder]
    }

    /// Creates Services, each with an endpoint on the first node.
    pub(super) fn create_services(&mut self, count: u32) -> Result<()> {
        self.services = count;
        let node = &self.holder().name;
        let annotations = &self.cloud.annotations();
        self.each(|services, slices, number| async move {
            create(&slices, objects::slice(number, node)).await?;
            create(&services, objects::service(number, annotations)).await.map(drop)
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
        self.holder = 1;
        let node = &self.holder().name;
        self.each(|_, slices, number| async move {
            let change = Patch::Merge(json!({"endpoints": objects::endpoints(number, node)}));
            slices.patch_metadata(&objects::service_name(number), &PatchParams::default(), &change).await?;
            Ok(())
        })
    }

    /// Excludes the last node from load balancers.
    pub(super) fn take_node_out(&mut self) -> Result<()> {
        let member = self.members[NODES - 1].clone();
        self.eligible.retain(|id| *id != member.id);
        self.label(&member.name, &json!({objects::EXCLUDE: ""}))
    }

    /// Ends the exclusion.
    pub(super) fn put_node_back(&mut self) -> Result<()> {
        let member = self.members[NODES - 1].clone();
        self.eligible.push(member.id);
        self.label(&member.name, &json!({objects::EXCLUDE: null}))
    }

    fn label(&self, node: &str, labels: &Value) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let change = Patch::Merge(json!({"metadata": {"labels": labels}}));
        self.runtime.block_on(nodes.patch_metadata(node, &PatchParams::default(), &change))?;
        Ok(())
    }

    /// Deletes the last node, and the spare machine joins at the same time.
    pub(super) fn replace_node(&mut self) -> Result<()> {
        let (old, new) = (self.members[NODES - 1].clone(), self.members[NODES].clone());
        let nodes: Api<Node> = Api::all(self.client.clone());
        self.runtime.block_on(async {
            nodes.delete(&old.name, &DeleteParams::default()).await?;
            join(&nodes, &new).await
        })?;
        self.eligible.retain(|id| *id != old.id);
        self.eligible.push(new.id);
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

    /// What the cloud or the API server lacks of what the Services ask for, if anything.
    pub(super) fn missing(&self) -> Result<Option<String>> {
        let wanted = Wanted {
            services: self.services,
            port: self.port,
            eligible: self.eligible.iter().map(String::as_str).collect(),
            endpoints: &self.members[self.holder].id,
        };
        if let Some(missing) = self.cloud.missing(self.who, &wanted)? {
            return Ok(Some(missing));
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
            ingress.is_some_and(|ingress| ingress.iter().any(|of| of.hostname.is_some() || of.ip.is_some()))
        };
        let (found, published) = (ours.len(), ours.iter().filter(is_published).count());
        let is_complete = found == published && found == self.services as usize;
        Ok((!is_complete)
            .then(|| format!("{published} addresses of {found} Services, not {}", self.services)))
    }

    /// Objects of the cloud that serve no Service any more.
    pub(super) fn left_over(&self) -> Result<usize> {
        self.cloud.left_over()
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
    // glbc waits for a range of each node.
    let pods = format!("10.244.{}.0/24", member.address.octets()[3]);
    create(nodes, objects::node(&member.name, &member.provider_id, &pods)).await?;
    let status = Patch::Merge(objects::node_status(member.address));
    nodes.patch_status(&member.name, &PatchParams::default(), &status).await?;
    Ok(())
}

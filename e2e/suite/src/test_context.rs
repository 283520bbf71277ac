// SPDX-License-Identifier: Apache-2.0
//! A running case's namespace, and operations on the objects there. Functions that wait fail after [`TIMEOUT`].

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use steerage_edge_api::{EdgeLoadBalancer, TargetState};
use steerage_model::Family;

use crate::cluster::Host;
use crate::edge;
use crate::net;
use crate::pods;
use crate::services::{PORT, ServiceBuilder, Vips, condition, conditions};
use crate::suite::Suite;
use crate::wait::{TIMEOUT, until};

/// What a running case works with.
pub struct TestContext {
    /// What all cases share.
    pub suite: Arc<Suite>,
    /// The case's namespace.
    pub namespace: String,
}

impl TestContext {
    /// An API client for one kind of object in the case's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.suite.client.clone(), &self.namespace)
    }

    /// An API client.
    pub fn client(&self) -> &kube::Client {
        &self.suite.client
    }

    /// The nodes.
    pub fn nodes(&self) -> Vec<Host> {
        self.suite.nodes()
    }

    /// Makes a Service.
    pub async fn create(&self, spec: &ServiceBuilder) -> Result<Service> {
        self.api().create(&PostParams::default(), &spec.build()?).await.context("making a Service")
    }

    /// Makes a Service and returns its addresses when it has them.
    pub async fn expose(&self, spec: &ServiceBuilder) -> Result<(Service, Vips)> {
        let service = self.create(spec).await?;
        let vips = self.wait_vips(&service.name_any()).await?;
        Ok((service, vips))
    }

    /// Makes a Service and returns its addresses when all four ways to it answer: both families, TCP and UDP.
    pub async fn serve(&self, spec: &ServiceBuilder) -> Result<(Service, Vips)> {
        let (service, vips) = self.expose(spec).await?;
        self.wait_programmed(&service.name_any(), &vips.both()).await?;
        self.wait_answers(vips, PORT).await?;
        Ok((service, vips))
    }

    /// Waits until every node has rules for this Service at these addresses. kube-proxy takes up to a second after they are published;
    /// until then rules of an earlier case's Service with the same addresses may answer, and a load balancer that keeps the address as
    /// destination sends connections to nodes that do not know it: such a connection is never translated.
    pub async fn wait_programmed(&self, service: &str, addresses: &[IpAddr]) -> Result<()> {
        for node in self.nodes() {
            // The agent's rules have addresses but no names.
            let ours = |address: &IpAddr| {
                let rules = self.rules(&node, &["table", nft_family(*address), "steerage"]);
                rules.is_ok_and(|rules| has_address(&rules, *address))
            };
            until(
                format!("rules of {} for {service} at {addresses:?}", node.name),
                TIMEOUT,
                async || -> Result<()> {
                    ensure!(
                        self.has_kube_proxy_rules(&node, service, addresses)? || addresses.iter().all(ours),
                        "no rules have its name and addresses"
                    );
                    Ok(())
                },
            )
            .await?;
        }
        Ok(())
    }

    /// Whether kube-proxy has rules for a Service at these addresses on this node: its chains carry the Service's name. It has them
    /// before the Service has addresses, and then waits up to a second. It writes one family after the other.
    fn has_kube_proxy_rules(&self, node: &Host, service: &str, addresses: &[IpAddr]) -> Result<bool> {
        let name = format!("{}/{service}/", self.namespace);
        for address in addresses {
            let rules = self.rules(node, &["ruleset", nft_family(*address)])?;
            if !(rules.contains(&name) && has_address(&rules, *address)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn rules(&self, node: &Host, what: &[&str]) -> Result<String> {
        let command = [&["nft", "list"], what].concat();
        self.suite.cluster(|cluster| cluster.exec(&node.name, &command))
    }

    /// Returns when both families answer over TCP and UDP.
    pub async fn wait_answers(&self, vips: Vips, port: u16) -> Result<()> {
        for family in [Family::V4, Family::V6] {
            let to = vips.at(family, port);
            until(format!("an answer of {to} over TCP"), TIMEOUT, async || net::page(to, "/hostname").await)
                .await?;
            until(format!("an answer of {to} over UDP"), TIMEOUT, async || net::ask(to, "hostname").await)
                .await?;
        }
        Ok(())
    }

    /// The addresses of a Service, once published.
    pub async fn wait_vips(&self, name: &str) -> Result<Vips> {
        let what = format!("addresses of {name}");
        let vips = until(what, TIMEOUT, async || Vips::of(&self.service(name).await?)).await?;
        self.suite.record_vips(vips);
        Ok(vips)
    }

    /// A Service as it is now.
    pub async fn service(&self, name: &str) -> Result<Service> {
        Ok(self.api::<Service>().get(name).await?)
    }

    /// Changes a Service.
    pub async fn patch(&self, name: &str, change: Value) -> Result<Service> {
        self.patch_any(name, change).await
    }

    /// Changes an object.
    pub async fn patch_any<K>(&self, name: &str, change: Value) -> Result<K>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
        K::DynamicType: Default,
    {
        self.api::<K>()
            .patch(name, &PatchParams::default(), &Patch::Merge(change))
            .await
            .context("changing an object")
    }

    /// Deletes a Service.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.api::<Service>().delete(name, &DeleteParams::default()).await.context("deleting a Service")?;
        Ok(())
    }

    /// Returns when a Service is gone.
    pub async fn wait_deleted(&self, name: &str) -> Result<()> {
        until(format!("the end of Service {name}"), TIMEOUT, async || {
            match self.api::<Service>().get_opt(name).await {
                Ok(None) => Ok(()),
                Ok(Some(left)) => {
                    Err(format!("finalizers {:?}, conditions {}", left.finalizers(), conditions(&left)))
                }
                Err(error) => Err(error.to_string()),
            }
        })
        .await
    }

    /// Returns when the edge has nothing of a Service.
    pub async fn wait_gone_from_edge(&self, name: &str) -> Result<()> {
        until(format!("the end of {name}'s load balancer"), TIMEOUT, async || {
            let left =
                edge::of(self.client(), &self.namespace, name).await.map_err(|error| format!("{error:#}"))?;
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{:?}", left.iter().map(|lb| &lb.spec).collect::<Vec<_>>()))
            }
        })
        .await
    }

    /// The load balancer of a Service, once there.
    pub async fn load_balancer(&self, name: &str) -> Result<EdgeLoadBalancer> {
        until(format!("a load balancer of {name}"), TIMEOUT, async || {
            edge::one(self.client(), &self.namespace, name).await
        })
        .await
    }

    /// Returns when the edge may send to exactly these nodes.
    pub async fn wait_targets(&self, name: &str, nodes: &[&str]) -> Result<()> {
        let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
        until(format!("targets {wanted:?} of {name}"), TIMEOUT, async || {
            let lb = edge::one(self.client(), &self.namespace, name)
                .await
                .map_err(|error| format!("{error:#}"))?;
            let seen = edge::targets(self.client(), &lb).await.map_err(|error| format!("{error:#}"))?;
            if seen == wanted { Ok(()) } else { Err(format!("{seen:?}")) }
        })
        .await
    }

    /// Returns when the edge is told that exactly these nodes have an endpoint; `None`: when it is told nothing.
    pub async fn wait_endpoint_nodes(&self, name: &str, nodes: Option<&[&str]>) -> Result<()> {
        let wanted = nodes.map(|nodes| nodes.iter().map(ToString::to_string).collect::<BTreeSet<_>>());
        until(format!("nodes with an endpoint {wanted:?} of {name}"), TIMEOUT, async || {
            let lb = edge::one(self.client(), &self.namespace, name)
                .await
                .map_err(|error| format!("{error:#}"))?;
            let seen = lb.spec.endpoint_nodes.map(|nodes| nodes.into_iter().collect::<BTreeSet<_>>());
            if seen == wanted { Ok(()) } else { Err(format!("{seen:?}")) }
        })
        .await
    }

    /// Returns when exactly these nodes are healthy at the edge.
    pub async fn wait_healthy(&self, name: &str, nodes: &[&str]) -> Result<()> {
        let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
        until(format!("healthy targets {wanted:?} of {name}"), TIMEOUT, async || {
            let lb = edge::one(self.client(), &self.namespace, name)
                .await
                .map_err(|error| format!("{error:#}"))?;
            let health = edge::health(self.client(), &lb).await.map_err(|error| format!("{error:#}"))?;
            // A node is probed in both families, and healthy when it is in both.
            let of = |healthy: bool| {
                let targets = health.iter();
                let chosen = targets.filter(move |target| (target.state == TargetState::Healthy) == healthy);
                chosen.map(|target| target.node.clone()).collect::<BTreeSet<_>>()
            };
            let seen = &of(true) - &of(false);
            if seen == wanted { Ok(()) } else { Err(format!("{health:?}")) }
        })
        .await
    }

    /// Returns when a condition of a Service has this status and fits; its reason and message.
    pub async fn wait_condition(&self, name: &str, kind: &str, status: &str) -> Result<(String, String)> {
        until(format!("condition {kind}={status} of {name}"), TIMEOUT, async || {
            let service = self.service(name).await.map_err(|error| format!("{error:#}"))?;
            match condition(&service, kind) {
                Some((now, reason, message)) if now == status => Ok((reason, message)),
                _ => Err(conditions(&service)),
            }
        })
        .await
    }

    /// Starts a backend on a node and returns it when its container runs; it is ready if `ready`.
    pub async fn backend(&self, name: &str, app: &str, node: &str, ready: bool, linger: u32) -> Result<Pod> {
        let pod = pods::create(self.client(), &self.namespace, &pods::echo(name, app, node, linger)?).await?;
        if ready {
            pods::set_ready(self.client(), &pod, true).await?;
            return pods::wait_ready(self.client(), &pod, true).await;
        }
        pods::wait_for(self.client(), &pod, "running containers", |pod| {
            pods::has_condition(pod, "ContainersReady")
        })
        .await
    }

    /// Sets a backend's readiness; returns when the kubelet has taken it over.
    pub async fn set_ready(&self, pod: &Pod, ready: bool) -> Result<()> {
        pods::set_ready(self.client(), pod, ready).await?;
        pods::wait_ready(self.client(), pod, ready).await.map(drop)
    }

    /// Asks a backend to end; returns when it is gone if it does not linger.
    pub async fn delete_pod(&self, pod: &Pod, wait: bool) -> Result<()> {
        let pods: Api<Pod> = self.api();
        pods.delete(&pod.name_any(), &DeleteParams::default()).await?;
        if !wait {
            return Ok(());
        }
        until(format!("the end of pod {}", pod.name_any()), TIMEOUT, async || {
            match pods.get_opt(&pod.name_any()).await {
                Ok(None) => Ok(()),
                Ok(Some(_)) => Err("it is there".to_owned()),
                Err(error) => Err(error.to_string()),
            }
        })
        .await
    }

    /// The pods labelled `app`.
    pub async fn pods(&self, app: &str) -> Result<Vec<Pod>> {
        Ok(self.api::<Pod>().list(&ListParams::default().labels(&format!("app={app}"))).await?.items)
    }

    /// Deletes the case's Services and waits for it, since they could disturb the next case; does not wait for the namespace. In AWS it
    /// does not wait either: deletion takes its time there, and no load balancer gets the address of an earlier one.
    pub async fn clear(&self) -> Result<()> {
        let services = self.api::<Service>().list(&ListParams::default()).await?;
        for service in &services {
            match self.api::<Service>().delete(&service.name_any(), &DeleteParams::default()).await {
                // Its deletion was complete already.
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                outcome => drop(outcome.context("deleting a Service")?),
            }
        }
        if self.suite.aws().is_none() {
            for service in &services {
                self.wait_deleted(&service.name_any()).await?;
            }
        }
        if self.namespace != crate::suite::COMMON {
            let namespaces: Api<Namespace> = Api::all(self.client().clone());
            namespaces.delete(&self.namespace, &DeleteParams::default()).await?;
        }
        Ok(())
    }
}

/// Whether a listing of rules or interfaces has this address, and not only one that begins or ends like it.
pub fn has_address(listing: &str, address: IpAddr) -> bool {
    let address = address.to_string();
    listing.split(|c: char| !c.is_ascii_hexdigit() && c != '.' && c != ':').any(|word| word == address)
}

/// nftables' name of an address' family.
fn nft_family(address: IpAddr) -> &'static str {
    match Family::of(address) {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

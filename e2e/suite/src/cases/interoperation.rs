// SPDX-License-Identifier: Apache-2.0
//! Inside traffic and outside traffic do not get in each other's way, whatever the policies.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::json;
use steerage_model::Family::{V4, V6};
use tokio::time::error::Elapsed;

use crate::net;
use crate::pods::{self, dial};
use crate::scene::Scene;
use crate::services::{PORT, Spec, Vips};
use crate::suite::ECHO;
use crate::wait::{SOON, until};

/// Pod to Service, pod to VIP, node to both, client to VIP: all with one Local Service that has its only backend on one node, and a
/// Cluster Service beside it.
pub(super) async fn inside_traffic_is_unharmed_side_by_side(scene: Arc<Scene>) -> Result<()> {
    let nodes = scene.nodes();
    let one = json!({ "app": ECHO, pods::NODE: nodes[0].name });
    let (local, local_vips) = scene.serve(&Spec::new("side-local", ECHO).with("selector", one)).await?;
    let (cluster, cluster_vips) = scene.serve(&Spec::new("side-cluster", ECHO).cluster()).await?;
    let mut targets = Vec::new();
    for (service, vips) in [(&local, local_vips), (&cluster, cluster_vips)] {
        targets.extend(cluster_ips(service)?);
        targets.extend([V4, V6].map(|family| vips.at(family, PORT)));
    }
    for pod in scene.suite.backends().await? {
        for to in &targets {
            for protocol in ["http", "udp"] {
                let what = format!("an answer of {to} to pod {} over {protocol}", pod.name_any());
                until(what, SOON, async || dial(pod, protocol, *to, "hostname").await).await?;
            }
        }
    }
    for node in &nodes {
        for to in targets.clone() {
            let ask = async || scene.suite.inside(node, async move || net::page(to, "/hostname").await);
            until(format!("an answer of {to} to {}", node.name), SOON, ask).await?;
        }
    }
    scene.answers(local_vips, PORT).await?;
    scene.answers(cluster_vips, PORT).await
}

/// Addresses of the cluster's own networks (`ServiceCIDR`) that no Service has: nobody says anything, be it kube-proxy or the agent in
/// its place. Left to themselves, such packets leave by the default route.
pub(super) async fn an_address_that_no_service_has_is_silent(scene: Arc<Scene>) -> Result<()> {
    let (service, _) = scene.serve(&Spec::new("gone", ECHO).cluster()).await?;
    let addresses = cluster_ips(&service)?;
    ensure!(addresses.len() == 2, "one address of each family: {addresses:?}");
    scene.delete("gone").await?;
    scene.gone("gone").await?;
    for pod in scene.suite.backends().await? {
        for to in &addresses {
            let silence = async || match dial(pod, "http", *to, "hostname").await {
                Ok(name) => Err(format!("{name} answers")),
                Err(error) if error.is::<Elapsed>() => Ok(()),
                Err(error) => Err(format!("{error:#}")),
            };
            until(format!("silence of {to} for pod {}", pod.name_any()), SOON, silence).await?;
        }
    }
    Ok(())
}

fn cluster_ips(service: &Service) -> Result<Vec<SocketAddr>> {
    let addresses =
        service.spec.as_ref().and_then(|spec| spec.cluster_ips.as_ref()).context("no ClusterIPs")?;
    addresses.iter().map(|address| Ok(SocketAddr::new(address.parse()?, PORT))).collect()
}

pub(super) async fn a_change_of_policy_reaches_a_live_service(scene: Arc<Scene>) -> Result<()> {
    let (_, vips) = scene.serve(&Spec::new("live", ECHO)).await?;
    let [client, _] = scene.suite.clients();
    for policy in ["Cluster", "Local", "Cluster", "Local"] {
        scene.patch("live", json!({ "spec": { "externalTrafficPolicy": policy } })).await?;
        for family in [V4, V6] {
            until(
                format!("a source address of policy {policy} over {family}"),
                SOON,
                async || -> Result<()> {
                    let seen: SocketAddr = net::page(vips.at(family, PORT), "/clientip").await?.parse()?;
                    let kept = seen.ip() == client.address(family);
                    ensure!(kept == (policy == "Local"), "{seen}");
                    Ok(())
                },
            )
            .await?;
        }
        ensure!(Vips::of(&scene.service("live").await?)? == vips, "the addresses changed with the policy");
    }
    Ok(())
}

pub(super) async fn client_ip_affinity_keeps_the_backend(scene: Arc<Scene>) -> Result<()> {
    let spec = Spec::new("affinity", ECHO).with("sessionAffinity", "ClientIP");
    let (_, vips) = scene.serve(&spec).await?;
    for family in [V4, V6] {
        let mut seen = BTreeSet::new();
        for _ in 0..15 {
            seen.insert(net::page(vips.at(family, PORT), "/hostname").await?);
        }
        ensure!(seen.len() == 1, "one client was served by {seen:?} over {family}");
    }
    Ok(())
}

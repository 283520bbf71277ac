// SPDX-License-Identifier: Apache-2.0
//! Traffic inside the cluster and from outside work beside each other with either policy.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;
use serde_json::json;
use steerage_model::Family::{V4, V6};
use tokio::time::error::Elapsed;

use crate::net;
use crate::pods::{self, dial};
use crate::services::{PORT, ServiceBuilder, Vips};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// Pod, node and client to cluster IP and VIP of a Local Service with one backend, and of a Cluster Service beside it.
pub(super) async fn traffic_inside_the_cluster_works_beside_local_and_cluster_services(
    test: Arc<TestContext>,
) -> Result<()> {
    let nodes = test.nodes();
    let one = json!({ "app": ECHO, pods::NODE: nodes[0].name });
    let (local, local_vips) =
        test.serve(&ServiceBuilder::new("side-local", ECHO).with("selector", one)).await?;
    let (cluster, cluster_vips) = test.serve(&ServiceBuilder::new("side-cluster", ECHO).cluster()).await?;
    let mut targets = Vec::new();
    for (service, vips) in [(&local, local_vips), (&cluster, cluster_vips)] {
        targets.extend(cluster_ips(service)?);
        targets.extend([V4, V6].map(|family| vips.at(family, PORT)));
    }
    for pod in test.suite.backends().await? {
        for to in &targets {
            for protocol in ["http", "udp"] {
                let what = format!("an answer of {to} to pod {} over {protocol}", pod.name_any());
                until(what, TIMEOUT, async || dial(pod, protocol, *to, "hostname").await).await?;
            }
        }
    }
    for node in &nodes {
        for to in targets.clone() {
            let ask = async || test.suite.inside(node, async move || net::page(to, "/hostname").await);
            until(format!("an answer of {to} to {}", node.name), TIMEOUT, ask).await?;
        }
    }
    test.wait_answers(local_vips, PORT).await?;
    test.wait_answers(cluster_vips, PORT).await
}

/// Packets to unused addresses of a `ServiceCIDR` are dropped. Otherwise they would leave by the default route. Not asked of kube-proxy
/// 1.36.3: where its list of `ServiceCIDR`s comes after its first sync, it does without these rules until its next full sync.
pub(super) async fn address_without_a_service_is_silent(test: Arc<TestContext>) -> Result<()> {
    let (service, _) = test.serve(&ServiceBuilder::new("gone", ECHO).cluster()).await?;
    let addresses = cluster_ips(&service)?;
    ensure!(addresses.len() == 2, "one address of each family: {addresses:?}");
    test.delete("gone").await?;
    test.wait_deleted("gone").await?;
    let pods = test.suite.backends().await?;
    let silences = pods.iter().flat_map(|pod| addresses.iter().map(move |to| silence(pod, *to)));
    try_join_all(silences).await.map(drop)
}

async fn silence(pod: &Pod, to: SocketAddr) -> Result<()> {
    let silence = async || match dial(pod, "http", to, "hostname").await {
        Ok(name) => Err(format!("{name} answers")),
        Err(error) if error.is::<Elapsed>() => Ok(()),
        Err(error) => Err(format!("{error:#}")),
    };
    until(format!("silence of {to} for pod {}", pod.name_any()), TIMEOUT, silence).await
}

fn cluster_ips(service: &Service) -> Result<Vec<SocketAddr>> {
    let addresses =
        service.spec.as_ref().and_then(|spec| spec.cluster_ips.as_ref()).context("no ClusterIPs")?;
    addresses.iter().map(|address| Ok(SocketAddr::new(address.parse()?, PORT))).collect()
}

pub(super) async fn policy_change_reaches_a_running_service(test: Arc<TestContext>) -> Result<()> {
    let (_, vips) = test.serve(&ServiceBuilder::new("live", ECHO)).await?;
    let [client, _] = test.suite.clients();
    for policy in ["Cluster", "Local", "Cluster", "Local"] {
        test.patch("live", json!({ "spec": { "externalTrafficPolicy": policy } })).await?;
        for family in [V4, V6] {
            until(
                format!("a source address of policy {policy} over {family}"),
                TIMEOUT,
                async || -> Result<()> {
                    let seen: SocketAddr = net::page(vips.at(family, PORT), "/clientip").await?.parse()?;
                    let kept = seen.ip() == client.address(family);
                    ensure!(kept == (policy == "Local"), "{seen}");
                    Ok(())
                },
            )
            .await?;
        }
        ensure!(Vips::of(&test.service("live").await?)? == vips, "the addresses changed with the policy");
    }
    Ok(())
}

pub(super) async fn client_ip_affinity_keeps_the_backend(test: Arc<TestContext>) -> Result<()> {
    let spec = ServiceBuilder::new("affinity", ECHO).with("sessionAffinity", "ClientIP");
    let (_, vips) = test.serve(&spec).await?;
    // A client has another target when one becomes healthy.
    let nodes = test.nodes();
    test.wait_healthy("affinity", &nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>()).await?;
    for family in [V4, V6] {
        let mut seen = BTreeSet::new();
        for _ in 0..15 {
            seen.insert(net::only_page(vips.at(family, PORT), "/hostname").await?);
        }
        ensure!(seen.len() == 1, "one client was served by {seen:?} over {family}");
    }
    Ok(())
}

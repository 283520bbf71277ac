// SPDX-License-Identifier: Apache-2.0
//! The source address that a backend sees: the client's under policy Local, a node's under Cluster.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kube::ResourceExt as _;
use steerage_model::Family::{self, V4, V6};
use steerage_model::Protocol::{self, Tcp, Udp};

use crate::net;
use crate::pods::{self, dial};
use crate::services::{PORT, ServiceBuilder};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

pub(super) async fn local_tcp_ipv4_keeps_the_clients_address_and_port(test: Arc<TestContext>) -> Result<()> {
    keeps(&test, "local-tcp4", Tcp, V4).await
}

pub(super) async fn local_tcp_ipv6_keeps_the_clients_address_and_port(test: Arc<TestContext>) -> Result<()> {
    keeps(&test, "local-tcp6", Tcp, V6).await
}

pub(super) async fn local_udp_ipv4_keeps_the_clients_address_and_port(test: Arc<TestContext>) -> Result<()> {
    keeps(&test, "local-udp4", Udp, V4).await
}

pub(super) async fn local_udp_ipv6_keeps_the_clients_address_and_port(test: Arc<TestContext>) -> Result<()> {
    keeps(&test, "local-udp6", Udp, V6).await
}

async fn keeps(test: &TestContext, name: &str, protocol: Protocol, family: Family) -> Result<()> {
    let (_, vips) = test.serve(&ServiceBuilder::new(name, ECHO)).await?;
    let [client, _] = test.suite.clients();
    // Outside of the range from which the system takes ports for other connections.
    let first = if family == V4 { 21_000 } else { 22_000 };
    for port in first..first + 20 {
        let seen = seen_by_backend(protocol, port, vips.at(family, PORT)).await?;
        let own = SocketAddr::new(client.address(family), port);
        ensure!(seen == own, "the client {own} is seen as {seen}");
    }
    Ok(())
}

pub(super) async fn seen_by_backend(protocol: Protocol, port: u16, to: SocketAddr) -> Result<SocketAddr> {
    let text = match protocol {
        Udp => net::ask_from(port, to, "clientip").await?,
        _ => net::get_from(port, to, "/clientip").await?.body,
    };
    text.trim().parse().with_context(|| format!("{to} answers {text:?}"))
}

pub(super) async fn cluster_policy_shows_a_node_address(test: Arc<TestContext>) -> Result<()> {
    let (_, vips) = test.serve(&ServiceBuilder::new("cluster", ECHO).cluster()).await?;
    let nodes = node_addresses(&test)?;
    for (protocol, family) in [(Tcp, V4), (Tcp, V6), (Udp, V4), (Udp, V6)] {
        for _ in 0..5 {
            let seen = seen_by_backend(protocol, 0, vips.at(family, PORT)).await?;
            ensure!(nodes.contains(&seen.ip()), "{protocol} over {family}: {seen} is no node's");
        }
    }
    Ok(())
}

/// Under Local a pod keeps its address, since its node sends it to any backend directly; under Cluster every connection to a VIP is
/// masqueraded; a node has one of its own addresses.
pub(super) async fn clients_inside_the_cluster_have_the_documented_source_address(
    test: Arc<TestContext>,
) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { anyhow::bail!("this takes two nodes") };
    // One backend, on the second node: the pod that asks is on another.
    let backend = serde_json::json!({ "app": ECHO, pods::NODE: second.name });
    let (_, local) =
        test.serve(&ServiceBuilder::new("inside-local", ECHO).with("selector", backend.clone())).await?;
    let (_, cluster) =
        test.serve(&ServiceBuilder::new("inside-cluster", ECHO).with("selector", backend).cluster()).await?;
    let addresses = node_addresses(&test)?;
    let asker = test.suite.backends().await?.iter().find(|pod| pod.name_any().ends_with(&first.name));
    let asker = asker.context("no backend on the first node")?;
    for family in [V4, V6] {
        let own = pods::address(asker, family)?;
        for (protocol, question) in [("http", "clientip"), ("udp", "clientip")] {
            let seen = pod_asks(asker, protocol, local.at(family, PORT), question).await?;
            ensure!(seen == own, "Local, {protocol} over {family}: the pod {own} is seen as {seen}");
            let seen = pod_asks(asker, protocol, cluster.at(family, PORT), question).await?;
            ensure!(addresses.contains(&seen), "Cluster, {protocol} over {family}: {seen} is no node's");
        }
        for (vips, node) in [(local, first), (local, second), (cluster, first), (cluster, second)] {
            let to = vips.at(family, PORT);
            let ask = async || test.suite.inside(node, async move || net::page(to, "/clientip").await);
            let seen = until(format!("an answer of {to} to {}", node.name), TIMEOUT, ask).await?;
            let seen: SocketAddr = seen.parse()?;
            ensure!(
                addresses.contains(&seen.ip()),
                "{} asks {to} and is seen as {seen}, no node's",
                node.name
            );
        }
    }
    Ok(())
}

async fn pod_asks(
    pod: &k8s_openapi::api::core::v1::Pod,
    protocol: &str,
    to: SocketAddr,
    question: &str,
) -> Result<IpAddr> {
    let what = format!("an answer of {to} to pod {}", pod.name_any());
    let text = until(what, TIMEOUT, async || dial(pod, protocol, to, question).await).await?;
    let seen: SocketAddr = text.trim().parse().with_context(|| format!("the answer is {text:?}"))?;
    Ok(seen.ip())
}

/// All addresses of all nodes, including those towards pods.
fn node_addresses(test: &TestContext) -> Result<BTreeSet<IpAddr>> {
    let mut addresses = BTreeSet::new();
    for node in test.nodes() {
        let text = test.suite.cluster(|cluster| cluster.exec(&node.name, &["ip", "-o", "address"]))?;
        let words = text.split_whitespace().filter_map(|word| word.split('/').next()?.parse::<IpAddr>().ok());
        addresses.extend(words.filter(|address| !address.is_loopback()));
    }
    Ok(addresses)
}

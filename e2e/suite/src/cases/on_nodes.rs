// SPDX-License-Identifier: Apache-2.0
//! Nodes as edge hosts: the chart's DaemonSet takes the VIPs over from the edge host outside of the cluster, and gives them back.
//!
//! While the nodes have the VIPs, a pod of the DaemonSet is killed, and all are restarted one after the other. Clients lose nothing.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use steerage_edge_api::Shards;
use steerage_model::Protocol::{Tcp, Udp};

use super::faults::{SHARED, expose};
use super::source_address::seen_by_backend;
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::cluster::Host;
use crate::edge;
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// The chart value that makes the nodes edge hosts.
const ON_NODES: &str = "edge.onNodes.enabled=true";

pub(super) async fn nodes_serve_the_vips_in_place_of_an_edge_host(test: Arc<TestContext>) -> Result<()> {
    let outside = test.suite.cluster(|cluster| cluster.edges()).into_iter().next().context("no edge host")?;
    test.suite.cluster(|cluster| cluster.install(&[ON_NODES]))?;
    let outcome = on_nodes(&test, &outside).await;
    test.suite.cluster(|cluster| cluster.start_edge(&outside.name))?;
    // Its pods hand over to the host outside.
    test.suite.cluster(|cluster| cluster.install(&[]))?;
    let given_back = wait_shards(&test, &[outside.name]).await;
    for node in test.nodes() {
        test.suite.cluster(|cluster| cluster.clean_edge(&node.name))?;
        system::delete_edge_host(&test.suite, &node.name).await?;
    }
    outcome.and(given_back)
}

async fn on_nodes(test: &TestContext, outside: &Host) -> Result<()> {
    let nodes: Vec<_> = test.nodes().into_iter().map(|node| node.name).collect();
    let clients = expose(test, SHARED, |spec| spec).await?;
    test.suite.cluster(|cluster| cluster.stop_edge(&outside.name))?;
    wait_shards(test, &nodes).await?;
    keeps_the_clients_address(test, &clients)?;

    let vips: Vec<_> = clients.iter().map(|client| client.to.address.ip()).collect();
    let before = edge::active_hosts(test.client(), &vips).await?;
    let vip = *vips.first().context("no VIP")?;
    let host = before.get(&vip).context("no host answers for the VIP")?;
    let pods = system::pods(&test.suite, system::EDGE).await?;
    let on_host = |pod: &&_| system::node_of(pod) == Some(host);
    let pod = pods.iter().find(on_host).with_context(|| format!("no edge runs on {host}"))?;
    let kill = async || {
        system::kill_container(&test.suite, pod)?;
        until(format!("another host for {vip} than {host}"), TIMEOUT, async || -> Result<()> {
            let now = edge::active_hosts(test.client(), &vips).await?;
            ensure!(now.len() == vips.len() && now.get(&vip) != Some(host), "{now:?}");
            Ok(())
        })
        .await
    };
    under_load(
        test,
        "edge pod killed (-9) on the node of a VIP",
        Promise::NothingLost,
        clients.clone(),
        kill,
    )
    .await?;
    system::wait_restarted(&test.suite, system::EDGE, pod).await?;

    let restart = async || system::restart_edges(&test.suite).await;
    under_load(test, "rolling restart of the edge on the nodes", Promise::NothingLost, clients, restart)
        .await?;
    wait_shards(test, &nodes).await
}

/// Returns when these hosts alone have all shards, and each shard has one host.
async fn wait_shards(test: &TestContext, hosts: &[String]) -> Result<()> {
    until(format!("all shards on {hosts:?}"), TIMEOUT, async || -> Result<()> {
        let found: BTreeMap<_, _> = edge::active_shards(test.client()).await?.into_iter().collect();
        let of = |host: &String| found.get(host).copied().unwrap_or(Shards::NONE);
        let sum: u32 = hosts.iter().map(|host| of(host).len()).sum();
        let all = hosts.iter().fold(Shards::NONE, |all, host| all | of(host));
        ensure!(sum == Shards::ALL.len() && all == Shards::ALL, "{found:?}");
        Ok(())
    })
    .await
}

/// Each client's backend sees its address and port, over both protocols.
fn keeps_the_clients_address(test: &TestContext, clients: &[Client]) -> Result<()> {
    for client in clients {
        let (host, to) = (client.host.clone(), client.to.address);
        let own: IpAddr = if to.is_ipv4() { host.ipv4.into() } else { host.ipv6.into() };
        test.suite.inside(&host, async || {
            for (protocol, first) in [(Tcp, 23_000), (Udp, 24_000)] {
                for port in first..first + 10 {
                    let seen = seen_by_backend(protocol, port, to).await?;
                    ensure!((seen.ip(), seen.port()) == (own, port), "{own}:{port} is seen as {seen}");
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

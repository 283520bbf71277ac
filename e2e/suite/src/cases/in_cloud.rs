// SPDX-License-Identifier: Apache-2.0
//! Services behind a cloud's load balancers: what their cases share.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use steerage_model::Protocol::{self, Tcp, Udp};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::deployments::{self, MODES};
use super::under_load::{Promise, each_under_load, under_load};
use crate::client::Client;
use crate::net;
use crate::services::ServiceBuilder;
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// Answers that show where new connections go: of two targets, one would have to be left out by chance each time.
const ANSWERS: usize = 20;

/// A port of a Service, which leads to that of the backends' protocol.
pub(super) fn port(protocol: Protocol, port: u16) -> Value {
    let target = if protocol == Udp { 8081 } else { 8080 };
    let name = format!("{protocol}-{port}").to_lowercase();
    json!({ "name": name, "protocol": protocol.to_string(), "port": port, "targetPort": target })
}

/// Makes a Service and returns its UID.
pub(super) async fn create(test: &TestContext, spec: &ServiceBuilder) -> Result<String> {
    test.create(spec).await?.uid().context("a Service without UID")
}

/// Waits until something answers at this address.
pub(super) async fn wait_answer(protocol: Protocol, to: SocketAddr) -> Result<()> {
    until(format!("an answer of {to} over {protocol}"), TIMEOUT, async || match protocol {
        Udp => net::ask(to, "hostname").await,
        _ => net::page(to, "/hostname").await,
    })
    .await
    .map(drop)
}

/// Waits until nothing answers at this address.
pub(super) async fn wait_silence(to: SocketAddr) -> Result<()> {
    until(format!("silence at {to}"), TIMEOUT, async || match net::page(to, "/hostname").await {
        Ok(answer) => Err(answer),
        Err(_) => Ok(()),
    })
    .await
}

/// Waits until new connections go to exactly these pods.
pub(super) async fn wait_served_by(to: SocketAddr, pods: &[&str]) -> Result<()> {
    let wanted: BTreeSet<_> = pods.iter().map(ToString::to_string).collect();
    until(format!("answers of {pods:?} at {to}"), TIMEOUT, async || -> Result<()> {
        let mut seen = BTreeSet::new();
        for _ in 0..ANSWERS {
            seen.insert(net::page(to, "/hostname").await?.trim().to_owned());
        }
        ensure!(seen == wanted, "{seen:?} answer");
        Ok(())
    })
    .await
}

/// That one client is answered by one backend, over both protocols. All targets have to be healthy: a load balancer without a memory
/// distributes clients anew when one becomes so.
pub(super) async fn ensure_sticky(to: SocketAddr) -> Result<()> {
    for protocol in [Tcp, Udp] {
        wait_answer(protocol, to).await?;
        let mut seen = BTreeSet::new();
        for _ in 0..ANSWERS {
            seen.insert(match protocol {
                Udp => net::ask_from(0, to, "hostname").await?,
                _ => net::only_page(to, "/hostname").await?,
            });
        }
        ensure!(seen.len() == 1, "{protocol}: {seen:?} answer one client");
    }
    Ok(())
}

/// The number of writes once those for other Services have ended.
pub(super) async fn wait_no_writes(cloud: &str, writes: impl AsyncFn() -> Result<u64>) -> Result<u64> {
    until(format!("an end of other writes to {cloud}"), TIMEOUT, async || -> Result<u64> {
        let before = writes().await?;
        // Longer than a provider waits before it asks again about a change, or tries a deletion again.
        sleep(Duration::from_secs(6)).await;
        let now = writes().await?;
        ensure!(now == before, "{before} writes, {now} a moment later");
        Ok(now)
    })
    .await
}

/// Kills the controllers' containers, and waits until others run.
pub(super) async fn restart_controllers(test: &TestContext) -> Result<()> {
    // As they are before: one may have restarted before the next one is killed.
    let pods = system::pods(&test.suite, system::CONTROLLER).await?;
    for pod in &pods {
        system::kill_container(&test.suite, pod)?;
    }
    for pod in &pods {
        system::wait_restarted(&test.suite, system::CONTROLLER, pod).await?;
    }
    Ok(())
}

/// The backend's name, on a connection that stays open.
pub(super) async fn ask_on(stream: &mut TcpStream) -> Result<String> {
    stream.write_all(b"GET /hostname HTTP/1.1\r\nHost: lab\r\n\r\n").await?;
    let mut answer = [0; 1024];
    let length = timeout(net::ONLY_ANSWER_TIMEOUT, stream.read(&mut answer)).await.context("no answer")??;
    let text = String::from_utf8_lossy(&answer[..length]);
    let (_, body) = text.split_once("\r\n\r\n").with_context(|| format!("the answer is {text:?}"))?;
    Ok(body.trim().to_owned())
}

/// Drains a node and brings it back, then updates all backends, under the load of these clients. `wait_settled` waits until the cloud has
/// what the Services ask for.
pub(super) async fn drain_and_update(
    test: &TestContext,
    clients: Vec<(Client, Promise)>,
    wait_settled: impl AsyncFn() -> Result<()>,
) -> Result<()> {
    wait_settled().await?;
    // First, while each node has one pod of each.
    let node = test.nodes()[0].name.clone();
    let drain = async || {
        deployments::drain(test, &node).await?;
        wait_ended(test).await
    };
    let outcome = each_under_load(test, "node drain (cordon, evict)", clients.clone(), drain).await;
    deployments::cordon(test, &node, false).await?;
    outcome?;
    wait_settled().await?;
    let update = async || {
        deployments::update(test, &MODES).await?;
        wait_ended(test).await
    };
    let clients = clients.into_iter().map(|(client, _)| client).collect();
    under_load(test, "rolling update of 3 pods", Promise::None, clients, update).await
}

/// Waits until no backend is ending, and in each group or pool of targets that `health` shows of a Service's UID, exactly the nodes with a
/// backend are in this state.
pub(super) async fn wait_settled(
    test: &TestContext,
    state: &str,
    health: impl Fn(&str) -> Result<Vec<BTreeMap<String, BTreeSet<String>>>>,
) -> Result<()> {
    wait_ended(test).await?;
    for mode in MODES {
        let uid = test.service(mode).await?.uid().context("a Service without UID")?;
        until(format!("healthy nodes of {mode}"), TIMEOUT, async || -> Result<()> {
            let pods = test.pods(mode).await?;
            let nodes = pods.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.clone()).collect();
            let seen = health(&uid)?;
            let healthy = seen.iter().all(|group| group.get(state) == Some(&nodes));
            ensure!(healthy, "backends on {nodes:?}, {seen:?}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Waits until no backend is ending.
pub(super) async fn wait_ended(test: &TestContext) -> Result<()> {
    for mode in MODES {
        until(format!("the end of backends of {mode}"), TIMEOUT, async || -> Result<()> {
            let pods = test.pods(mode).await?;
            let ending = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count();
            ensure!(ending == 0, "{ending} pods are ending");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

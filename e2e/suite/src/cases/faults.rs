// SPDX-License-Identifier: Apache-2.0
//! Loss of two clients while something happens to the cluster, judged by the meter.
//!
//! The first client uses a Service with `api` steering over IPv4, the second one with `health-check` steering over IPv6. Each Service
//! has backends of its own, so that the meter notices when one gets the traffic of the other. A case whose promise is broken fails.
//! Every measurement is reported.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;
use steerage_model::Family::{V4, V6};
use steerage_model::names;
use tokio::time::sleep;

use super::deployments::{self, MODES};
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::pods::{End, has_condition};
use crate::service_proxy::ServiceProxy;
use crate::services::{PORT, ServiceBuilder, Vips};
use crate::suite::{COMMON, ECHO, OTHER};
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

/// Seconds for which a backend continues to serve after SIGTERM.
const LINGER: u32 = 8;
/// How long the API server is down.
const ABSENCE: Duration = Duration::from_mins(1);

pub(super) async fn killed_controller_loses_no_packet(test: Arc<TestContext>) -> Result<()> {
    let leader = system::lease_holder(&test.suite).await?;
    let pods = system::pods(&test.suite, system::CONTROLLER).await?;
    let pod = pods
        .iter()
        .find(|pod| leader.contains(&pod.name_any()))
        .context("the lease holder is no pod of the chart")?;
    let clients = expose(&test, SHARED, |spec| spec).await?;
    under_load(&test, "controller killed (-9)", Promise::NothingLost, clients, async || {
        system::kill_container(&test.suite, pod)
    })
    .await?;
    system::wait_restarted(&test.suite, system::CONTROLLER, pod).await
}

/// Beside kube-proxy the agent serves only labelled Services, here the first one, and leaves the flows of the others alone.
pub(super) async fn killed_agent_loses_no_packet(test: Arc<TestContext>) -> Result<()> {
    let mut agents = system::pods(&test.suite, system::AGENT).await?;
    // A control plane may be a node with an agent, too, but is no target.
    let names: Vec<_> = test.nodes().iter().map(|node| node.name.clone()).collect();
    agents.retain(|agent| system::node_of(agent).is_some_and(|node| names.contains(node)));
    ensure!(agents.len() == names.len(), "{} agents run on {} nodes", agents.len(), names.len());
    let is_first = Cell::new(true);
    let labelled = |spec: ServiceBuilder| match test.suite.service_proxy {
        ServiceProxy::KubeProxy if is_first.replace(false) => {
            spec.labelled(names::PROXY_NAME_LABEL, names::PROXY_NAME)
        }
        _ => spec,
    };
    let clients = expose(&test, SHARED, labelled).await?;
    let kill = async || agents.iter().try_for_each(|agent| system::kill_container(&test.suite, agent));
    under_load(&test, "agent killed (-9) on every node", Promise::NothingLost, clients, kill).await?;
    for agent in &agents {
        system::wait_restarted(&test.suite, system::AGENT, agent).await?;
    }
    Ok(())
}

pub(super) async fn killed_edge_loses_no_packet(test: Arc<TestContext>) -> Result<()> {
    let clients = expose(&test, SHARED, |spec| spec).await?;
    let edges = test.suite.cluster(|cluster| cluster.edges());
    let edge = edges.first().context("no edge host")?;
    let kill = async || {
        test.suite.cluster(|cluster| cluster.kill_edge(&edge.name))?;
        sleep(Duration::from_secs(2)).await;
        test.suite.cluster(|cluster| cluster.start_edge(&edge.name))
    };
    under_load(&test, "edge killed (-9), started after 2 s", Promise::NothingLost, clients, kill).await
}

pub(super) async fn absent_api_server_loses_no_packet(test: Arc<TestContext>) -> Result<()> {
    let clients = expose(&test, SHARED, |spec| spec).await?;
    let away = async || {
        test.suite.cluster(|cluster| cluster.stop_api_server())?;
        sleep(ABSENCE).await;
        test.suite.cluster(|cluster| cluster.start_api_server())
    };
    under_load(&test, "API server down for 60 s", Promise::NothingLost, clients, away).await?;
    // A controller that lost its Lease restarts after the kubelet's backoff.
    test.create(&ServiceBuilder::new("after", ECHO)).await?;
    let what = "the addresses of a Service made after the API server's return";
    until(what, TIMEOUT * 5, async || Vips::of(&test.service("after").await?)).await?;
    // kube-proxy's watches back off for up to a minute, and until then its nodes keep rules of deleted Services. Started again, it
    // lists at once.
    for node in test.suite.cluster(|cluster| cluster.nodes()) {
        test.suite.cluster(|cluster| cluster.exec(&node.name, &["pkill", "-x", "kube-proxy"]))?;
    }
    Ok(())
}

pub(super) async fn rolling_update_is_measured(test: Arc<TestContext>) -> Result<()> {
    let clients = deploy(&test, 3).await?;
    let update = async || deployments::update(&test, &MODES).await;
    under_load(&test, "rolling update of 3 pods", Promise::None, clients, update).await
}

pub(super) async fn scale_down_is_measured(test: Arc<TestContext>) -> Result<()> {
    let clients = deploy(&test, 3).await?;
    let scale = async || {
        for name in MODES {
            deployments::scale(&test, name, 1).await?;
        }
        Ok(())
    };
    under_load(&test, "scale down from 3 pods to 1", Promise::None, clients, scale).await
}

pub(super) async fn policy_change_is_measured(test: Arc<TestContext>) -> Result<()> {
    let clients = expose_one_backend(&test).await?;
    let flip = async || {
        for policy in ["Cluster", "Local"] {
            for mode in MODES {
                test.patch(mode, json!({ "spec": { "externalTrafficPolicy": policy } })).await?;
            }
            sleep(Duration::from_secs(5)).await;
        }
        Ok(())
    };
    under_load(&test, "policy change to Cluster and back", Promise::None, clients, flip).await
}

pub(super) async fn steering_change_is_measured(test: Arc<TestContext>) -> Result<()> {
    let clients = expose_one_backend(&test).await?;
    let flip = async || {
        for (name, mode) in [("api", "health-check"), ("health-check", "api")] {
            test.patch(name, json!({ "metadata": { "annotations": { names::STEERING: mode } } })).await?;
        }
        Ok(())
    };
    under_load(&test, "change to the other steering", Promise::NothingLost, clients, flip).await
}

pub(super) async fn node_drain_is_measured(test: Arc<TestContext>) -> Result<()> {
    let clients = deploy(&test, 3).await?;
    let node = test.nodes()[0].name.clone();
    let drain = async || deployments::drain(&test, &node).await;
    let outcome = under_load(&test, "node drain (cordon, evict)", Promise::None, clients, drain).await;
    deployments::cordon(&test, &node, false).await?;
    outcome
}

pub(super) async fn node_death_is_measured(test: Arc<TestContext>) -> Result<()> {
    let clients = deploy(&test, 3).await?;
    // Not the first node: a single controller may run there, and most of DNS.
    let nodes = test.nodes();
    let node = nodes.last().context("no nodes")?;
    let shared = TestContext { suite: Arc::clone(&test.suite), namespace: COMMON.to_owned() };
    let mut backends = shared.pods(ECHO).await?;
    backends.extend(shared.pods(OTHER).await?);
    backends.retain(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&node.name));
    let kill = async || test.suite.cluster(|cluster| cluster.kill_node(&node.name));
    let outcome = under_load(&test, "node death", Promise::None, clients, kill).await;
    test.suite.cluster(|cluster| cluster.start_node(&node.name))?;
    // Those of the next case: one that becomes ready while it measures is sent to before kube-proxy knows it.
    until("the shared backends after the node's death", TIMEOUT * 3, async || -> Result<()> {
        for pod in &backends {
            let now = shared.api::<Pod>().get(&pod.name_any()).await?;
            ensure!(
                system::restarts(&now) > system::restarts(pod),
                "{} was not started again",
                pod.name_any()
            );
            ensure!(has_condition(&now, "Ready"), "{} is not ready", pod.name_any());
        }
        Ok(())
    })
    .await?;
    outcome
}

/// The labels of the shared backends, in the order of [`MODES`].
pub(super) const SHARED: [&str; 2] = [ECHO, OTHER];

/// Makes a Deployment and a Service for each steering.
async fn deploy(test: &TestContext, replicas: usize) -> Result<Vec<Client>> {
    deployments::make(test, &MODES, replicas, End::Unready(LINGER)).await?;
    expose(test, MODES, |spec| spec).await
}

/// One backend of each Service, on the last node: a packet that any other node gets under policy Local is lost.
async fn expose_one_backend(test: &TestContext) -> Result<Vec<Client>> {
    let nodes = test.nodes();
    let node = nodes.last().context("no nodes")?;
    for app in MODES {
        test.backend(&format!("{app}-only"), app, &node.name, true, LINGER).await?;
    }
    expose(test, MODES, |spec| spec).await
}

/// A Service with each steering, named after it, in front of the pods with its label, and a client for each. Waits until every node has rules for the addresses and every
/// node with a backend is healthy at the edge.
///
/// No client connects before: a node without rules tracks the connection untranslated for two minutes, and would drop a later one
/// from the same port. For the same reason no case uses the addresses of another.
pub(super) async fn expose(
    test: &TestContext,
    apps: [&str; 2],
    adapt: impl Fn(ServiceBuilder) -> ServiceBuilder,
) -> Result<Vec<Client>> {
    static NEXT: AtomicU8 = AtomicU8::new(0x60);
    let mut clients = Vec::new();
    let clients_of = MODES.into_iter().zip(apps).zip([V4, V6]).zip(test.suite.clients());
    for (((mode, app), family), host) in clients_of {
        let last = NEXT.fetch_add(1, Ordering::Relaxed);
        let addresses = format!("10.77.200.{last},fd77::c8{last:02x}");
        let spec = ServiceBuilder::new(mode, app).steered(mode).annotated(names::ADDRESSES, &addresses);
        let (_, vips) = test.expose(&adapt(spec)).await?;
        test.wait_programmed(mode, &vips.both()).await?;
        test.wait_answers(vips, PORT).await?;
        let address = vips.at(family, PORT);
        let to = Target { address, datagrams: address, backends: format!("{app}-") };
        clients.push(Client { host, to, what: format!("{mode}, {family}") });
    }
    for (mode, app) in MODES.into_iter().zip(apps) {
        let pods = test.pods(app).await?;
        let ready = pods.iter().filter(|pod| has_condition(pod, "Ready"));
        let mut nodes: Vec<_> = ready.filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        test.wait_healthy(mode, &nodes).await?;
    }
    Ok(clients)
}

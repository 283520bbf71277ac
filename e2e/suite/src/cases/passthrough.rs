// SPDX-License-Identifier: Apache-2.0
//! Services in GCE and Azure: stand-ins for their APIs, and `e2e/passthrough` for their load balancers, which change no packet.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::json;
use steerage_lab::Cloud;
use steerage_lab::addresses::NODES_IPV4;
use steerage_model::Family::{V4, V6};
use steerage_model::Protocol::{Tcp, Udp};
use tokio::net::TcpStream;

use super::deployments::{self, MODES};
use super::in_cloud::{
    ask_on, create, drain_and_update, ensure_sticky, port, restart_controllers, wait_answer, wait_ended,
    wait_served_by, wait_silence,
};
use super::in_passthrough::{
    ADDRESS, cloud, in_cloud, internal, look, release, reserve, wait_address, wait_healthy, wait_no_writes,
    wait_nothing_left, wait_targets,
};
use super::source_address::seen_by_backend;
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::net;
use crate::passthrough::Passthrough;
use crate::pods::End;
use crate::services::{PORT, published};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

/// Whether GCE distributes by the number of endpoints.
const WEIGHTED: &str = "networking.gke.io/weighted-load-balancing";

pub(super) async fn clients_address_is_kept_in_both_families(test: Arc<TestContext>) -> Result<()> {
    create(&test, &in_cloud(&test, "web", ECHO)?.steered("api")).await?;
    let [client, _] = test.suite.clients();
    for (family, first) in [(V4, 21_000), (V6, 22_000)] {
        let to = wait_address(&test, "web", family, PORT).await?;
        ensure_seen(client.address(family), first..first + 20, to).await?;
    }
    Ok(())
}

/// That backends see the client with its own address and each of these ports, over both protocols.
async fn ensure_seen(client: IpAddr, ports: Range<u16>, to: SocketAddr) -> Result<()> {
    for protocol in [Tcp, Udp] {
        wait_answer(protocol, to).await?;
        for own in ports.clone() {
            let own = SocketAddr::new(client, own);
            let seen = seen_by_backend(protocol, own.port(), to).await?;
            ensure!(seen == own, "{protocol}: the client {own} is seen as {seen}");
        }
    }
    Ok(())
}

pub(super) async fn source_ranges_and_affinity_follow_the_service(test: Arc<TestContext>) -> Result<()> {
    let [client, other] = test.suite.clients();
    let ranges =
        |host: &crate::cluster::Host| [format!("{}/32", host.ipv4), format!("{}/128", host.ipv6)].to_vec();
    let fenced = in_cloud(&test, "fenced", ECHO)?.with("loadBalancerSourceRanges", ranges(&other));
    create(&test, &fenced.steered("api")).await?;
    create(&test, &in_cloud(&test, "sticky", ECHO)?.with("sessionAffinity", "ClientIP").steered("api"))
        .await?;

    let mut fenced = Vec::new();
    for family in [V4, V6] {
        fenced.push(wait_address(&test, "fenced", family, PORT).await?);
    }
    for to in fenced.clone() {
        let of_other = async || test.suite.inside(&other, async move || net::page(to, "/hostname").await);
        until("an answer to a client in the source ranges", TIMEOUT, of_other).await?;
        for answered in [net::page(to, "/hostname").await, net::ask(to, "hostname").await] {
            ensure!(answered.is_err(), "a client outside of the source ranges is answered: {answered:?}");
        }
    }
    test.patch("fenced", json!({ "spec": { "loadBalancerSourceRanges": ranges(&client) } })).await?;
    for to in fenced {
        wait_answer(Tcp, to).await?;
        wait_answer(Udp, to).await?;
        let of_other = async || test.suite.inside(&other, async move || net::page(to, "/hostname").await);
        until(
            "silence for a client that is no longer in the source ranges",
            TIMEOUT,
            async || match of_other().await {
                Ok(answer) => Err(answer),
                Err(_) => Ok(()),
            },
        )
        .await?;
    }

    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    for family in [V4, V6] {
        let to = wait_address(&test, "sticky", family, PORT).await?;
        wait_healthy(&test, to, &all).await?;
        ensure_sticky(to).await?;
    }
    Ok(())
}

/// And a Service may become external, which gives it another address.
pub(super) async fn internal_load_balancer_keeps_the_clients_address(test: Arc<TestContext>) -> Result<()> {
    let (annotation, value) = internal(&test)?;
    let spec = in_cloud(&test, "inside", ECHO)?.with("ipFamilyPolicy", "SingleStack").steered("api");
    create(&test, &spec.annotated(annotation, value)).await?;
    let inside = wait_address(&test, "inside", V4, PORT).await?;
    let nodes: IpNet = NODES_IPV4.parse()?;
    ensure!(nodes.contains(&inside.ip()), "{inside} is not of the nodes' subnet");
    let [client, _] = test.suite.clients();
    ensure_seen(client.ipv4.into(), 23_000..23_010, inside).await?;
    test.patch("inside", json!({ "metadata": { "annotations": { annotation: null } } })).await?;
    let outside = until("an external address", TIMEOUT, async || {
        let found = published(&test.service("inside").await?);
        found.into_iter().find(|ip| !nodes.contains(ip)).context("none")
    })
    .await?;
    test.wait_programmed("inside", &[outside]).await?;
    wait_answer(Tcp, SocketAddr::new(outside, PORT)).await?;
    wait_silence(inside).await
}

/// A reserved address of the user outlives the Service, and serves the next one of the name.
pub(super) async fn address_is_kept_over_recreation(test: Arc<TestContext>) -> Result<()> {
    let annotation = reserve(&test)?;
    let spec = in_cloud(&test, "kept", ECHO)?.with("ipFamilyPolicy", "SingleStack").steered("api");
    let spec = spec.annotated(annotation, ADDRESS);
    create(&test, &spec).await?;
    let first = wait_address(&test, "kept", V4, PORT).await?;
    wait_answer(Tcp, first).await?;
    test.delete("kept").await?;
    test.wait_deleted("kept").await?;
    wait_silence(first).await?;
    create(&test, &spec).await?;
    let second = wait_address(&test, "kept", V4, PORT).await?;
    ensure!(first == second, "the address was {first}, and is {second}");
    wait_answer(Tcp, second).await?;
    wait_answer(Udp, second).await?;
    test.delete("kept").await?;
    test.wait_deleted("kept").await?;
    release(&test)
}

pub(super) async fn api_targets_follow_the_endpoints(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    create(&test, &in_cloud(&test, "web", "web")?.steered("api")).await?;
    let to = wait_address(&test, "web", V4, PORT).await?;
    let six = wait_address(&test, "web", V6, PORT).await?;
    wait_targets(&test, to, &[first]).await?;
    wait_healthy(&test, to, &[first]).await?;
    wait_served_by(to, &["one"]).await?;
    test.set_ready(&two, true).await?;
    wait_targets(&test, to, &[first, second]).await?;
    wait_served_by(to, &["one", "two"]).await?;
    wait_served_by(six, &["one", "two"]).await?;
    let mut held = TcpStream::connect(to).await?;
    let holder = ask_on(&mut held).await?;
    let (leaving, pod, staying, node) =
        if holder == "one" { (first, &one, "two", second) } else { (second, &two, "one", first) };
    test.set_ready(pod, false).await?;
    wait_targets(&test, to, &[node]).await?;
    wait_served_by(to, &[staying]).await?;
    if cloud(&test)?.cloud == Cloud::Gce {
        // In Azure it ends: it is not documented that it stays.
        let answer =
            ask_on(&mut held).await.with_context(|| format!("an established connection to {leaving}"))?;
        ensure!(answer == holder, "{answer} answers on a connection to another backend");
    }
    test.set_ready(pod, true).await?;
    wait_targets(&test, to, &[first, second]).await?;
    test.delete_pod(&two, true).await?;
    wait_targets(&test, to, &[first]).await?;
    wait_served_by(to, &["one"]).await?;
    wait_served_by(six, &["one"]).await
}

pub(super) async fn health_check_keeps_all_nodes_and_writes_nothing(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { bail!("this takes two nodes") };
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    let ports = [port(Tcp, PORT), port(Udp, PORT), port(Tcp, 81)].to_vec();
    create(&test, &in_cloud(&test, "web", "web")?.with("ports", ports).steered("health-check")).await?;
    let to = wait_address(&test, "web", V4, PORT).await?;
    let six = wait_address(&test, "web", V6, PORT).await?;
    wait_targets(&test, to, &all).await?;
    wait_healthy(&test, to, &[first]).await?;
    wait_served_by(to, &["one"]).await?;
    let before = wait_no_writes(&test).await?;
    test.set_ready(&two, true).await?;
    wait_healthy(&test, to, &[first, second]).await?;
    wait_healthy(&test, six, &[first, second]).await?;
    wait_served_by(to, &["one", "two"]).await?;
    test.set_ready(&one, false).await?;
    wait_healthy(&test, to, &[second]).await?;
    wait_healthy(&test, six, &[second]).await?;
    wait_served_by(to, &["two"]).await?;
    wait_served_by(SocketAddr::new(six.ip(), 81), &["two"]).await?;
    wait_answer(Udp, to).await?;
    wait_targets(&test, to, &all).await?;
    let writes = look(&test, Passthrough::writes)? - before;
    ensure!(writes == 0, "{writes} writes while endpoints moved");
    if cloud(&test)?.cloud == Cloud::Gce {
        // Azure's API does not tell the health of targets.
        let (reason, message) = test.wait_condition("web", "steerage.dev/Serving", "True").await?;
        ensure!(reason == "TargetsHealthy", "{reason}: {message}");
    }
    Ok(())
}

/// Nodes get connections in proportion to their endpoints.
pub(super) async fn weights_follow_the_endpoints(test: Arc<TestContext>) -> Result<()> {
    /// With a probability of a quarter, the deviation is 7: five of them are allowed.
    const ASKED: usize = 256;
    const EXPECTED: std::ops::RangeInclusive<usize> = 29..=99;
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { bail!("this takes two nodes") };
    for name in ["one", "two", "three"] {
        test.backend(name, "web", &first.name, true, 0).await?;
    }
    test.backend("four", "web", &second.name, true, 0).await?;
    let spec = in_cloud(&test, "web", "web")?.annotated(WEIGHTED, "pods-per-node");
    create(&test, &spec.steered("health-check")).await?;
    let to = wait_address(&test, "web", V4, PORT).await?;
    wait_healthy(&test, to, &[&first.name, &second.name]).await?;
    until("weights", TIMEOUT, async || -> Result<()> {
        let mut of_second = 0;
        for _ in 0..ASKED {
            of_second += usize::from(net::page(to, "/hostname").await?.trim() == "four");
        }
        ensure!(EXPECTED.contains(&of_second), "one of four backends got {of_second} of {ASKED}");
        Ok(())
    })
    .await
}

/// The backends stay ready while they linger, as in AWS.
pub(super) async fn node_drain_and_rolling_update_are_measured(test: Arc<TestContext>) -> Result<()> {
    let is_gce = cloud(&test)?.cloud == Cloud::Gce;
    // Seconds. In GCE longer than the 30s for which a detached endpoint keeps its flows over UDP; in Azure longer than two checks take.
    let linger = if is_gce { 33 } else { 20 };
    deployments::make(&test, &MODES, 3, End::Ready(linger)).await?;
    for mode in MODES {
        create(&test, &in_cloud(&test, mode, mode)?.steered(mode)).await?;
    }
    // In Azure, flows end with the registration of their target.
    let of_api = if is_gce { Promise::ExceptInFlight } else { Promise::None };
    let mut clients = Vec::new();
    for ((mode, promise), host) in MODES.into_iter().zip([of_api, Promise::None]).zip(test.suite.clients()) {
        let address = wait_address(&test, mode, V4, PORT).await?;
        wait_answer(Tcp, address).await?;
        wait_answer(Udp, address).await?;
        let to = Target { address, datagrams: address, backends: format!("{mode}-") };
        let what = format!("{}, {mode}", if is_gce { "GCE" } else { "Azure" });
        clients.push((Client { host, to, what }, promise));
    }
    drain_and_update(&test, clients, async || wait_settled(&test).await).await
}

/// Without the API nothing is lost while no endpoint moves, also not by a restart of the controller. What moved meanwhile follows.
pub(super) async fn traffic_goes_on_without_the_api(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    test.backend("web-one", "web", first, true, 0).await?;
    let two = test.backend("web-two", "web", second, false, 0).await?;
    create(&test, &in_cloud(&test, "web", "web")?.steered("api")).await?;
    let address = wait_address(&test, "web", V4, PORT).await?;
    wait_healthy(&test, address, &[first]).await?;
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, address).await?;
    let [host, _] = test.suite.clients();
    let to = Target { address, datagrams: address, backends: "web-".to_owned() };
    let client = Client { host, to, what: format!("{}, api", cloud(&test)?.cloud) };
    let restart = async || {
        look(&test, |cloud| cloud.set_api(false))?;
        restart_controllers(&test).await?;
        test.set_ready(&two, true).await
    };
    let event = "killed controllers, without the cloud's API";
    let outcome = under_load(&test, event, Promise::NothingLost, vec![client], restart).await;
    look(&test, |cloud| cloud.set_api(true))?;
    outcome?;
    wait_targets(&test, address, &[first, second]).await?;
    wait_served_by(address, &["web-one", "web-two"]).await
}

/// The last case: after it, the cloud has nothing of any case.
pub(super) async fn load_balancer_follows_its_service_and_leaves_nothing(
    test: Arc<TestContext>,
) -> Result<()> {
    wait_nothing_left(&test).await.context("of other cases")?;
    create(&test, &in_cloud(&test, "cycle", ECHO)?).await?;
    let to = wait_address(&test, "cycle", V4, PORT).await?;
    let six = wait_address(&test, "cycle", V6, PORT).await?;
    for to in [to, six] {
        wait_answer(Tcp, to).await?;
        wait_answer(Udp, to).await?;
    }
    test.patch("cycle", json!({ "spec": { "ports": [port(Tcp, 81)] } })).await?;
    for to in [to, six] {
        wait_answer(Tcp, SocketAddr::new(to.ip(), 81)).await?;
        wait_silence(to).await?;
    }
    test.patch("cycle", json!({ "spec": { "externalTrafficPolicy": "Cluster" } })).await?;
    let moved = SocketAddr::new(to.ip(), 81);
    let all: Vec<_> = test.nodes().into_iter().map(|node| node.name).collect();
    wait_healthy(&test, moved, &all.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    wait_answer(Tcp, moved).await?;
    test.delete("cycle").await?;
    test.wait_deleted("cycle").await?;
    wait_nothing_left(&test).await?;
    wait_silence(moved).await
}

/// Waits until no backend is ending, exactly the nodes with one are healthy, and each of these serves the VIP: a node whose service proxy
/// does not know it yet refuses connections.
async fn wait_settled(test: &TestContext) -> Result<()> {
    wait_ended(test).await?;
    for mode in MODES {
        let to = wait_address(test, mode, V4, PORT).await?;
        let pods = test.pods(mode).await?;
        let nodes: Vec<_> = pods.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
        wait_healthy(test, to, &nodes).await?;
        let names: Vec<_> = pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
        wait_served_by(to, &names).await?;
    }
    Ok(())
}

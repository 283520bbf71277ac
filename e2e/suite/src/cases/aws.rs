// SPDX-License-Identifier: Apache-2.0
//! Services in AWS: moto for its API, and a network load balancer on the lab's router, which checks nodes and forwards to node ports as
//! AWS documents it. `e2e/nlb` does both.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use steerage_model::Protocol::{Tcp, Udp};
use tokio::net::TcpStream;

use super::deployments::{self, MODES};
use super::in_aws::{
    GROUP_ATTRIBUTES, SHORT_DELAY, UDP_PORT, aws, in_aws, look, wait_address, wait_no_writes,
    wait_nothing_left, wait_state, wait_targets,
};
use super::in_cloud::{
    ask_on, create, drain_and_update, port, wait_answer, wait_served_by, wait_settled, wait_silence,
};
use super::source_address::seen_by_backend;
use super::under_load::Promise;
use crate::aws::Aws;
use crate::client::Client;
use crate::net;
use crate::pods::End;
use crate::services::PORT;
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

/// Seconds for which a backend that ends continues to serve: longer than two checks, each after the shortest interval of AWS, take
/// to find that a node has no ready endpoint.
const LINGER: u32 = 15;

/// A port with both protocols is a `TCP_UDP` listener, the others have target groups of their own kind.
/// And source ranges say who is a client.
pub(super) async fn clients_address_is_kept_unless_the_service_says_otherwise(
    test: Arc<TestContext>,
) -> Result<()> {
    let ports = [port(Tcp, PORT), port(Udp, PORT), port(Tcp, 81), port(Udp, 82)];
    test.create(&in_aws("kept", ECHO).with("ports", ports.to_vec())).await?;
    let hidden = in_aws("hidden", ECHO).with("ports", [port(Tcp, PORT)].to_vec());
    test.create(&hidden.annotated(GROUP_ATTRIBUTES, "preserve_client_ip.enabled=false")).await?;
    let [client, other] = test.suite.clients();
    let ranges = [format!("{}/32", other.ipv4)].to_vec();
    test.create(&in_aws("fenced", ECHO).with("loadBalancerSourceRanges", ranges)).await?;
    let (kept, hidden) =
        (wait_address(&test, "kept", PORT).await?, wait_address(&test, "hidden", PORT).await?);
    let listeners = [(Tcp, PORT), (Udp, PORT), (Tcp, 81), (Udp, 82)];
    // Outside of the range from which the system takes ports for other connections. All listeners lead to the same pods, where a
    // client's port can be kept once.
    for ((protocol, port), first) in listeners.into_iter().zip((21_000..).step_by(100)) {
        let to = SocketAddr::new(kept.ip(), port);
        wait_answer(protocol, to).await?;
        for own in first..first + 10 {
            let own = SocketAddr::new(client.ipv4.into(), own);
            let seen = seen_by_backend(protocol, own.port(), to).await?;
            ensure!(seen == own, "{protocol} port {port}: the client {own} is seen as {seen}");
        }
    }
    wait_answer(Tcp, hidden).await?;
    let seen = seen_by_backend(Tcp, 0, hidden).await?;
    let of_balancer = aws(&test)?.address_of_load_balancers();
    ensure!(seen.ip() == of_balancer, "{seen} is not the load balancer {of_balancer}");
    let fenced = wait_address(&test, "fenced", PORT).await?;
    let ask = async || test.suite.inside(&other, async move || net::page(fenced, "/hostname").await);
    until("an answer to a client in the source ranges", TIMEOUT, ask).await?;
    let outside = net::page(fenced, "/hostname").await;
    ensure!(outside.is_err(), "a client outside of the source ranges is answered: {outside:?}");
    Ok(())
}

pub(super) async fn api_targets_follow_the_endpoints(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    let uid = create(&test, &in_aws("web", "web").steered("api")).await?;
    wait_targets(&test, &uid, &[first]).await?;
    let to = wait_address(&test, "web", PORT).await?;
    wait_served_by(to, &["one"]).await?;
    test.set_ready(&two, true).await?;
    wait_targets(&test, &uid, &[first, second]).await?;
    wait_served_by(to, &["one", "two"]).await?;
    test.set_ready(&one, false).await?;
    wait_targets(&test, &uid, &[second]).await?;
    wait_state(&test, &uid, "draining", &[first]).await?;
    wait_served_by(to, &["two"]).await?;
    test.set_ready(&one, true).await?;
    test.delete_pod(&two, true).await?;
    wait_targets(&test, &uid, &[first]).await?;
    wait_served_by(to, &["one"]).await
}

pub(super) async fn health_check_keeps_all_nodes_and_writes_nothing(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { bail!("this takes two nodes") };
    // Deletions of other cases' Services write for a while, with pauses.
    wait_nothing_left(&test).await.context("of other cases")?;
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    let ports = [port(Tcp, PORT), port(Udp, PORT), port(Tcp, 81)].to_vec();
    let uid = create(&test, &in_aws("web", "web").with("ports", ports).steered("health-check")).await?;
    wait_targets(&test, &uid, &all).await?;
    let to = wait_address(&test, "web", PORT).await?;
    wait_state(&test, &uid, "healthy", &[first]).await?;
    wait_served_by(to, &["one"]).await?;
    // Through a target group of TCP alone, where AWS would end it by default once the node is unhealthy.
    let mut held = TcpStream::connect(SocketAddr::new(to.ip(), 81)).await?;
    ensure!(ask_on(&mut held).await? == "one", "another backend answers");
    let before = wait_no_writes(&test).await?;
    test.set_ready(&two, true).await?;
    wait_state(&test, &uid, "healthy", &[first, second]).await?;
    wait_served_by(to, &["one", "two"]).await?;
    test.set_ready(&one, false).await?;
    wait_state(&test, &uid, "healthy", &[second]).await?;
    wait_served_by(to, &["two"]).await?;
    let answer = ask_on(&mut held).await.context("an established connection to an unhealthy node")?;
    ensure!(answer == "one", "{answer} answers on a connection to another backend");
    wait_targets(&test, &uid, &all).await?;
    let writes = look(&test, Aws::writes)? - before;
    ensure!(writes == 0, "{writes} writes while endpoints moved");
    Ok(())
}

/// The backends stay ready while they linger. kube-proxy would not forward to one that fails its probe, long before AWS's checks fail.
///
/// A node that leaves the targets loses nothing that Steerage could keep. The rest is reported: kube-proxy learns of a node's first
/// endpoint at its own time, and a node that only fails its checks keeps its flows over UDP.
pub(super) async fn node_drain_and_rolling_update_are_measured(test: Arc<TestContext>) -> Result<()> {
    deployments::make(&test, &MODES, 3, End::Ready(LINGER)).await?;
    let mut clients = Vec::new();
    for mode in MODES {
        let ports = [port(Tcp, PORT), port(Udp, UDP_PORT)].to_vec();
        let measured = in_aws(mode, mode).with("ports", ports).annotated(GROUP_ATTRIBUTES, SHORT_DELAY);
        create(&test, &measured.steered(mode)).await?;
    }
    let promises = [Promise::ExceptInFlight, Promise::None];
    for ((mode, promise), host) in MODES.into_iter().zip(promises).zip(test.suite.clients()) {
        let address = wait_address(&test, mode, PORT).await?;
        let datagrams = SocketAddr::new(address.ip(), UDP_PORT);
        wait_answer(Tcp, address).await?;
        wait_answer(Udp, datagrams).await?;
        let to = Target { address, datagrams, backends: format!("{mode}-") };
        clients.push((Client { host, to, what: format!("AWS, {mode}") }, promise));
    }
    let health = |uid: &str| look(&test, |aws| aws.health(uid));
    drain_and_update(&test, clients, async || wait_settled(&test, "healthy", health).await).await
}

/// The last case: after it, AWS has nothing of any case.
pub(super) async fn load_balancer_follows_its_service_and_leaves_nothing(
    test: Arc<TestContext>,
) -> Result<()> {
    wait_nothing_left(&test).await.context("of other cases")?;
    create(&test, &in_aws("cycle", ECHO)).await?;
    let to = wait_address(&test, "cycle", PORT).await?;
    wait_answer(Tcp, to).await?;
    test.patch("cycle", json!({ "spec": { "ports": [port(Tcp, 81)] } })).await?;
    let moved = SocketAddr::new(to.ip(), 81);
    wait_answer(Tcp, moved).await?;
    wait_silence(to).await?;
    test.delete("cycle").await?;
    test.wait_deleted("cycle").await?;
    wait_nothing_left(&test).await?;
    wait_silence(moved).await
}

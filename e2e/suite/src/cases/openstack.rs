// SPDX-License-Identifier: Apache-2.0
//! Services in OpenStack: Neutron and Octavia for its APIs, and haproxy, configured by Octavia's own templates, for its load balancers.
//! `e2e/openstack` has both.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use steerage_model::Protocol::{Tcp, Udp};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::deployments::{self, MODES};
use super::in_cloud::{
    ask_on, create, drain_and_update, ensure_sticky, port, restart_controllers, wait_answer, wait_served_by,
    wait_settled, wait_silence,
};
use super::in_openstack::{
    CLIENT_TIMEOUT, INTERNAL, LB_METHOD, PROXY_PROTOCOL, Parts, in_openstack, look, openstack, wait_address,
    wait_address_that, wait_members, wait_no_writes, wait_nothing_left, wait_parts, wait_status,
};
use super::source_address::seen_by_backend;
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::net;
use crate::openstack::OpenStack;
use crate::pods::{self, End};
use crate::services::PORT;
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

/// Seconds for which a backend that ends continues to serve: longer than Octavia's checks take to find that a node has no ready
/// endpoint, and than Octavia needs for the changes of two pools on a busy machine.
const LINGER: u32 = 20;

/// By then, checks of a port that nobody answers have failed.
const CHECKS_FAIL: Duration = Duration::from_secs(20);

/// A backend that takes connections only with a header of the PROXY protocol, and tells what the header says.
fn behind_proxy(name: &str, app: &str, node: &str) -> Result<Pod> {
    let config = "pid /tmp/pid; error_log stderr; events {} http { access_log off; server { listen 8080 proxy_protocol; \
        location /clientip { return 200 $proxy_protocol_addr:$proxy_protocol_port; } } }";
    let script = format!("echo '{config}' >/tmp/nginx.conf; exec nginx -c /tmp/nginx.conf -g 'daemon off;'");
    let pod = json!({
        "metadata": { "name": name, "labels": { "app": app } },
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "nginx",
                "image": "registry.k8s.io/e2e-test-images/nginx:1.15-4",
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", script],
                "readinessProbe": { "tcpSocket": { "port": 8080 }, "periodSeconds": 1 },
            }],
        },
    });
    serde_json::from_value(pod).context("no Pod")
}

/// And connections from inside the cluster pass the load balancer, too: without its header no backend would take them.
pub(super) async fn backends_see_the_amphora_or_by_proxy_protocol_the_client(
    test: Arc<TestContext>,
) -> Result<()> {
    let node = test.nodes().swap_remove(0);
    test.backend("plain", "plain", &node.name, true, 0).await?;
    let nginx =
        pods::create(test.client(), &test.namespace, &behind_proxy("nginx", "nginx", &node.name)?).await?;
    pods::wait_ready(test.client(), &nginx, true).await?;
    // With the other steering the nodes without a backend get connections until they fail their checks.
    create(&test, &in_openstack("plain", "plain").steered("api")).await?;
    let only_tcp = in_openstack("proxied", "nginx").with("ports", [port(Tcp, PORT)].to_vec()).steered("api");
    create(&test, &only_tcp.annotated(PROXY_PROTOCOL, "v2")).await?;

    let plain = wait_address(&test, "plain", PORT).await?;
    let of_balancer = openstack(&test)?.address_of_load_balancers();
    for protocol in [Tcp, Udp] {
        wait_answer(protocol, plain).await?;
        let seen = seen_by_backend(protocol, 0, plain).await?;
        ensure!(seen.ip() == of_balancer, "{protocol}: {seen} is not the load balancer {of_balancer}");
    }

    let proxied = wait_address(&test, "proxied", PORT).await?;
    until("an answer to a header", TIMEOUT, async || net::page(proxied, "/clientip").await).await?;
    let [client, _] = test.suite.clients();
    for own in 21_000..21_010 {
        let own = SocketAddr::new(client.ipv4.into(), own);
        let seen = seen_by_backend(Tcp, own.port(), proxied).await?;
        ensure!(seen == own, "the client {own} is seen as {seen}");
    }
    let ingress = test.service("proxied").await?.status.and_then(|status| status.load_balancer?.ingress);
    let mode = ingress.and_then(|ingress| ingress.first()?.ip_mode.clone());
    ensure!(mode.as_deref() == Some("Proxy"), "ipMode {mode:?}");
    let ask = async || test.suite.inside(&node, async move || net::page(proxied, "/clientip").await);
    until("an answer to a node", TIMEOUT, ask).await.map(drop)
}

pub(super) async fn source_ranges_and_affinity_follow_the_service(test: Arc<TestContext>) -> Result<()> {
    let [client, other] = test.suite.clients();
    let range = |host: &crate::cluster::Host| [format!("{}/32", host.ipv4)].to_vec();
    let ports = [port(Tcp, PORT), port(Udp, PORT)].to_vec();
    let fenced = in_openstack("fenced", ECHO).with("ports", ports);
    create(&test, &fenced.with("loadBalancerSourceRanges", range(&other)).steered("api")).await?;
    let sticky = in_openstack("sticky", ECHO).with("sessionAffinity", "ClientIP");
    let sticky = create(&test, &sticky.steered("api")).await?;
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();

    let fenced = wait_address(&test, "fenced", PORT).await?;
    let of_other = async || test.suite.inside(&other, async move || net::page(fenced, "/hostname").await);
    until("an answer to a client in the source ranges", TIMEOUT, of_other).await?;
    for answered in [net::page(fenced, "/hostname").await, net::ask(fenced, "hostname").await] {
        ensure!(answered.is_err(), "a client outside of the source ranges is answered: {answered:?}");
    }
    test.patch("fenced", json!({ "spec": { "loadBalancerSourceRanges": range(&client) } })).await?;
    wait_answer(Tcp, fenced).await?;
    wait_answer(Udp, fenced).await?;
    let outside = of_other().await;
    ensure!(outside.is_err(), "a client that is no longer in the source ranges is answered: {outside:?}");

    let to = wait_address(&test, "sticky", PORT).await?;
    wait_status(&test, &sticky, "ONLINE", &all).await?;
    ensure_sticky(to).await
}

pub(super) async fn api_members_follow_the_endpoints(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    let uid = create(&test, &in_openstack("web", "web").steered("api")).await?;
    wait_members(&test, &uid, &[first]).await?;
    wait_status(&test, &uid, "ONLINE", &[first]).await?;
    let to = wait_address(&test, "web", PORT).await?;
    wait_served_by(to, &["one"]).await?;
    test.set_ready(&two, true).await?;
    wait_members(&test, &uid, &[first, second]).await?;
    wait_served_by(to, &["one", "two"]).await?;
    let mut held = TcpStream::connect(to).await?;
    let holder = ask_on(&mut held).await?;
    let (leaving, pod, staying, node) =
        if holder == "one" { (first, &one, "two", second) } else { (second, &two, "one", first) };
    test.set_ready(pod, false).await?;
    wait_members(&test, &uid, &[node]).await?;
    wait_served_by(to, &[staying]).await?;
    let answer =
        ask_on(&mut held).await.with_context(|| format!("an established connection to {leaving}"))?;
    ensure!(answer == holder, "{answer} answers on a connection to another backend");
    test.set_ready(pod, true).await?;
    wait_members(&test, &uid, &[first, second]).await?;
    test.delete_pod(&two, true).await?;
    wait_members(&test, &uid, &[first]).await?;
    wait_served_by(to, &["one"]).await
}

pub(super) async fn health_check_keeps_all_nodes_and_writes_nothing(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [first, second, ..] = all[..] else { bail!("this takes two nodes") };
    let one = test.backend("one", "web", first, true, 0).await?;
    let two = test.backend("two", "web", second, false, 0).await?;
    let ports = [port(Tcp, PORT), port(Udp, PORT), port(Tcp, 81)].to_vec();
    let uid = create(&test, &in_openstack("web", "web").with("ports", ports).steered("health-check")).await?;
    wait_members(&test, &uid, &all).await?;
    let to = wait_address(&test, "web", PORT).await?;
    wait_status(&test, &uid, "ONLINE", &[first]).await?;
    wait_served_by(to, &["one"]).await?;
    let before = wait_no_writes(&test).await?;
    test.set_ready(&two, true).await?;
    wait_status(&test, &uid, "ONLINE", &[first, second]).await?;
    wait_served_by(to, &["one", "two"]).await?;
    test.set_ready(&one, false).await?;
    wait_status(&test, &uid, "ONLINE", &[second]).await?;
    wait_served_by(to, &["two"]).await?;
    wait_answer(Udp, to).await?;
    wait_members(&test, &uid, &all).await?;
    let writes = look(&test, OpenStack::writes)? - before;
    ensure!(writes == 0, "{writes} writes while endpoints moved");
    let (reason, message) = test.wait_condition("web", "steerage.dev/Serving", "True").await?;
    ensure!(reason == "TargetsHealthy", "{reason}: {message}");
    Ok(())
}

/// The backends stay ready while they linger, as in AWS.
pub(super) async fn node_drain_and_rolling_update_are_measured(test: Arc<TestContext>) -> Result<()> {
    deployments::make(&test, &MODES, 3, End::Ready(LINGER)).await?;
    for mode in MODES {
        create(&test, &in_openstack(mode, mode).steered(mode)).await?;
    }
    let mut clients = Vec::new();
    let promises = [Promise::ExceptInFlightAtAmphora, Promise::None];
    for ((mode, promise), host) in MODES.into_iter().zip(promises).zip(test.suite.clients()) {
        let address = wait_address(&test, mode, PORT).await?;
        wait_answer(Tcp, address).await?;
        wait_answer(Udp, address).await?;
        let to = Target { address, datagrams: address, backends: format!("{mode}-") };
        clients.push((Client { host, to, what: format!("OpenStack, {mode}") }, promise));
    }
    let health = |uid: &str| look(&test, |openstack| openstack.health(uid));
    drain_and_update(&test, clients, async || wait_settled(&test, "ONLINE", health).await).await
}

type Fit = fn(Parts<'_>) -> bool;

/// What a running Service may change without loss: each change replaces the configuration of its load balancer.
pub(super) async fn changes_of_a_live_service_lose_nothing(test: Arc<TestContext>) -> Result<()> {
    // One node has no backend.
    deployments::make(&test, &["web"], 2, End::Ready(1)).await?;
    let both = [port(Tcp, PORT), port(Udp, PORT)].to_vec();
    let uid = create(&test, &in_openstack("web", "web").with("ports", both.clone()).steered("api")).await?;
    let address = wait_address(&test, "web", PORT).await?;
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, address).await?;
    let more = [&both[..], &[port(Tcp, 81), port(Udp, 81)]].concat();
    let annotated =
        |key: &str, value: serde_json::Value| json!({ "metadata": { "annotations": { key: value } } });
    // Each with what is there once it is complete.
    let changes: [(_, Fit); 8] = [
        (json!({ "spec": { "ports": more } }), |parts| {
            // A pool and its members come after its listener.
            (parts.count("listener "), parts.count("pool ")) == (4, 4) && !parts.has("pool ", "members []")
        }),
        (json!({ "spec": { "ports": both } }), |parts| {
            (parts.count("listener "), parts.count("pool ")) == (2, 2)
        }),
        (json!({ "spec": { "loadBalancerSourceRanges": ["10.78.0.0/16"] } }), |parts| {
            parts.all_have("listener ", "10.78.0.0/16")
        }),
        (json!({ "spec": { "loadBalancerSourceRanges": null } }), |parts| {
            !parts.has("listener ", "10.78.0.0/16")
        }),
        (json!({ "spec": { "sessionAffinity": "ClientIP" } }), |parts| {
            parts.all_have("pool ", "'SOURCE_IP'")
        }),
        (json!({ "spec": { "sessionAffinity": "None" } }), |parts| !parts.has("pool ", "'SOURCE_IP'")),
        (annotated(LB_METHOD, "LEAST_CONNECTIONS".into()), |parts| {
            parts.all_have("pool ", "'LEAST_CONNECTIONS'")
        }),
        (annotated(CLIENT_TIMEOUT, "60000".into()), |parts| parts.all_have("listener ", " 60000,")),
    ];
    let nodes = test.nodes();
    let nodes: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    let [host, _] = test.suite.clients();
    let to = Target { address, datagrams: address, backends: "web-".to_owned() };
    let client = Client { host, to, what: "OpenStack, api".to_owned() };
    let event = format!("{} changes of a Service", changes.len() + 1);
    let change = async || {
        for (change, fit) in changes {
            test.patch("web", change.clone()).await?;
            wait_parts(&test, fit).await.with_context(|| change.to_string())?;
        }
        // A change to policy Local is none of them: kube-proxy obeys it at once, and the load balancer a second later.
        test.patch("web", json!({ "spec": { "externalTrafficPolicy": "Cluster" } })).await?;
        wait_members(&test, &uid, &nodes).await?;
        wait_parts(&test, |_| true).await
    };
    under_load(&test, &event, Promise::NothingLost, vec![client], change).await
}

/// Under `health-check` steering the checks move to another port with the policy. A server of haproxy keeps the port of its check: changed in
/// place, all members would fail until somebody replaces the amphora. All nodes have an endpoint, so that no policy makes a difference.
pub(super) async fn policy_change_moves_the_checks_of_a_live_service(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let names: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
    for node in &names {
        test.backend(&format!("web-{node}"), "web", node, true, 0).await?;
    }
    let uid = create(&test, &in_openstack("web", "web").steered("health-check")).await?;
    let address = wait_address(&test, "web", PORT).await?;
    wait_status(&test, &uid, "ONLINE", &names).await?;
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, address).await?;
    for policy in ["Cluster", "Local"] {
        let [host, _] = test.suite.clients();
        let to = Target { address, datagrams: address, backends: "web-".to_owned() };
        let client = Client { host, to, what: "OpenStack, health-check".to_owned() };
        let change = async || {
            test.patch("web", json!({ "spec": { "externalTrafficPolicy": policy } })).await?;
            sleep(CHECKS_FAIL).await;
            // The former pool is gone, and nothing changes any more.
            wait_parts(&test, |parts| parts.count("pool ") == 2).await?;
            wait_status(&test, &uid, "ONLINE", &names).await
        };
        let event = format!("policy change to {policy} where all nodes have endpoints");
        under_load(&test, &event, Promise::NothingLost, vec![client], change).await?;
        wait_answer(Tcp, address).await?;
        wait_answer(Udp, address).await?;
    }
    Ok(())
}

/// Without Octavia's API nothing is lost while no endpoint moves, also not by a restart of the controller. What moved meanwhile follows.
pub(super) async fn traffic_goes_on_without_octavia(test: Arc<TestContext>) -> Result<()> {
    let nodes = test.nodes();
    let [first, second, ..] = &nodes[..] else { bail!("this takes two nodes") };
    let (first, second) = (first.name.as_str(), second.name.as_str());
    test.backend("web-one", "web", first, true, 0).await?;
    let two = test.backend("web-two", "web", second, false, 0).await?;
    let uid = create(&test, &in_openstack("web", "web").steered("api")).await?;
    let address = wait_address(&test, "web", PORT).await?;
    wait_status(&test, &uid, "ONLINE", &[first]).await?;
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, address).await?;
    let [host, _] = test.suite.clients();
    let to = Target { address, datagrams: address, backends: "web-".to_owned() };
    let client = Client { host, to, what: "OpenStack, api".to_owned() };
    let restart = async || {
        look(&test, |openstack| openstack.set_octavia(false))?;
        restart_controllers(&test).await?;
        test.set_ready(&two, true).await
    };
    let event = "killed controllers, without Octavia's API";
    let outcome = under_load(&test, event, Promise::NothingLost, vec![client], restart).await;
    look(&test, |openstack| openstack.set_octavia(true))?;
    outcome?;
    wait_members(&test, &uid, &[first, second]).await?;
    wait_served_by(address, &["web-one", "web-two"]).await
}

/// The last case: after it, OpenStack has nothing of any case.
pub(super) async fn load_balancer_follows_its_service_and_leaves_nothing(
    test: Arc<TestContext>,
) -> Result<()> {
    wait_nothing_left(&test).await.context("of other cases")?;
    create(&test, &in_openstack("cycle", ECHO)).await?;
    let to = wait_address(&test, "cycle", PORT).await?;
    wait_answer(Tcp, to).await?;
    wait_answer(Udp, to).await?;
    test.patch("cycle", json!({ "spec": { "ports": [port(Tcp, 81)] } })).await?;
    let moved = SocketAddr::new(to.ip(), 81);
    wait_answer(Tcp, moved).await?;
    wait_silence(to).await?;
    // Without its floating IP, and with another one.
    let internal = |value: serde_json::Value| json!({ "metadata": { "annotations": { INTERNAL: value } } });
    test.patch("cycle", internal("true".into())).await?;
    let is_other = |ip: IpAddr| ip != to.ip();
    let inside = wait_address_that(&test, "cycle", 81, is_other).await?;
    wait_answer(Tcp, inside).await?;
    wait_silence(moved).await?;
    test.patch("cycle", internal(serde_json::Value::Null)).await?;
    let outside = wait_address_that(&test, "cycle", 81, |ip| ip != inside.ip()).await?;
    wait_answer(Tcp, outside).await?;
    test.delete("cycle").await?;
    test.wait_deleted("cycle").await?;
    wait_nothing_left(&test).await?;
    wait_silence(outside).await?;
    wait_silence(inside).await
}

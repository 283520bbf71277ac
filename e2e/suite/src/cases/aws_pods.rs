// SPDX-License-Identifier: Apache-2.0
//! Services in AWS whose targets are pods: the load balancer on the lab's router checks and reaches them past the nodes' service proxy.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;
use steerage_model::Family::V4;
use steerage_model::Protocol::{Tcp, Udp};
use steerage_model::names;

use super::deployments;
use super::in_aws::{GROUP_ATTRIBUTES, SHORT_DELAY, UDP_PORT, aws, in_aws, look, wait_address};
use super::in_cloud::{create, port, wait_answer};
use super::source_address::seen_by_backend;
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::pods::{End, HEALTH_PATH, HTTP, address, has_condition};
use crate::services::{PORT, ServiceBuilder};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

const TARGET_TYPE: &str = "service.beta.kubernetes.io/aws-load-balancer-nlb-target-type";
const CHECK_INTERVAL: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval";
const CHECK_PORT: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-port";
const CHECK_PROTOCOL: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol";
const CHECK_PATH: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-path";
const PODS: &str = "pods";
/// Seconds for which a backend that ends continues to serve: longer than controller and AWS need on a busy machine.
const LINGER: u32 = 15;

/// One policy with checks by connections, the other with checks over HTTP. Nodes forward nothing, so that they need no ports.
pub(super) async fn clients_address_is_kept_under_both_policies(test: Arc<TestContext>) -> Result<()> {
    test.create(&to_pods("pods-cluster", ECHO).cluster()).await?;
    let over_http = to_pods("pods-local", ECHO).annotated(CHECK_PROTOCOL, "http");
    test.create(&over_http.annotated(CHECK_PATH, HEALTH_PATH)).await?;
    // AWS can hide clients over TCP only.
    let hidden = to_pods("pods-hidden", ECHO).with("ports", [port(Tcp, PORT)].to_vec());
    test.create(&hidden.annotated(GROUP_ATTRIBUTES, "preserve_client_ip.enabled=false")).await?;
    let [client, _] = test.suite.clients();
    // Outside of the range from which the system takes ports for other connections. Both Services lead to the same pods, where a
    // client's port can be kept once.
    for (name, first) in ["pods-cluster", "pods-local"].into_iter().zip((23_000..).step_by(1_000)) {
        for (protocol, to, first) in [(Tcp, PORT, first), (Udp, UDP_PORT, first + 500)] {
            let to = wait_address(&test, name, to).await?;
            wait_answer(protocol, to).await?;
            for own in first..first + 10 {
                let own = SocketAddr::new(client.ipv4.into(), own);
                let seen = seen_by_backend(protocol, own.port(), to).await?;
                ensure!(seen == own, "{protocol} through {name}: the client {own} is seen as {seen}");
            }
        }
    }
    let hidden = wait_address(&test, "pods-hidden", PORT).await?;
    wait_answer(Tcp, hidden).await?;
    let seen = seen_by_backend(Tcp, 0, hidden).await?;
    let of_balancer = aws(&test)?.address_of_load_balancers();
    ensure!(seen.ip() == of_balancer, "{seen} is not the load balancer {of_balancer}");
    Ok(())
}

/// And what clients lose meanwhile.
pub(super) async fn targets_follow_scaling_and_a_rolling_update(test: Arc<TestContext>) -> Result<()> {
    deployments::make(&test, &[PODS], 3, End::Ready(LINGER)).await?;
    let uid = create(&test, &to_pods(PODS, PODS).annotated(GROUP_ATTRIBUTES, SHORT_DELAY)).await?;
    let address = wait_address(&test, PODS, PORT).await?;
    let datagrams = SocketAddr::new(address.ip(), UDP_PORT);
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, datagrams).await?;
    wait_followed(&test, &uid, 3).await?;
    let [host, _] = test.suite.clients();
    let to = Target { address, datagrams, backends: format!("{PODS}-") };
    let client = || vec![Client { host: host.clone(), to: to.clone(), what: "AWS, pods".to_owned() }];
    let scale = async |replicas| {
        deployments::scale(&test, PODS, replicas).await?;
        wait_followed(&test, &uid, replicas).await
    };
    under_load(&test, "scale up from 3 pods to 4", Promise::NothingLost, client(), async || scale(4).await)
        .await?;
    under_load(&test, "scale down from 4 pods to 2", Promise::ExceptInFlight, client(), async || {
        scale(2).await
    })
    .await?;
    let update = async || {
        deployments::update(&test, &[PODS]).await?;
        wait_followed(&test, &uid, 2).await
    };
    under_load(&test, "rolling update of 2 pods", Promise::ExceptInFlight, client(), update).await
}

/// With the gate, a new pod is ready only once the load balancer finds it healthy, so that old pods serve until then.
pub(super) async fn rolling_update_of_gated_pods_always_has_a_healthy_target(
    test: Arc<TestContext>,
) -> Result<()> {
    deployments::make(&test, &[PODS], 3, End::Ready(LINGER)).await?;
    let service = to_pods(PODS, PODS).annotated(GROUP_ATTRIBUTES, SHORT_DELAY);
    let uid = create(&test, &service.annotated(CHECK_INTERVAL, "10")).await?;
    let address = wait_address(&test, PODS, PORT).await?;
    let datagrams = SocketAddr::new(address.ip(), UDP_PORT);
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, datagrams).await?;
    wait_followed(&test, &uid, 3).await?;

    let [host, _] = test.suite.clients();
    let to = Target { address, datagrams, backends: format!("{PODS}-") };
    let client = vec![Client { host: host.clone(), to, what: "AWS, gated pods".to_owned() }];
    let gate = json!({ "spec": { "template": {
        "metadata": { "labels": { names::POD_GATE_LABEL: "true" } },
        "spec": { "readinessGates": [{ "conditionType": names::POD_GATE }] },
    } } });
    let update = async || {
        let gated = async {
            deployments::change(&test, &[PODS], gate).await?;
            wait_followed(&test, &uid, 3).await
        };
        tokio::select! {
            done = gated => done,
            wrong = ready_too_early(&test, &uid) => bail!("{}", wrong?),
        }
    };
    under_load(&test, "rolling update of 3 gated pods", Promise::ExceptInFlight, client, update).await
}

/// Returns as soon as a gated pod is ready that a target group still checks or does not have, or if a group has no healthy target.
async fn ready_too_early(test: &TestContext, uid: &str) -> Result<String> {
    loop {
        let pods = test.pods(PODS).await?;
        let states = look(test, |aws| aws.health(uid))?;
        if !states.iter().all(|group| group.contains_key("healthy")) {
            return Ok(format!("no healthy target: {states:?}"));
        }
        let is_ready = |pod: &&Pod| {
            let is_gated = pod.labels().contains_key(names::POD_GATE_LABEL);
            is_gated && has_condition(pod, "Ready") && pod.metadata.deletion_timestamp.is_none()
        };
        for pod in pods.iter().filter(is_ready) {
            let address = address(pod, V4)?.to_string();
            // One that has begun to end meanwhile was healthy before.
            let was_healthy = |state: &str| ["healthy", "draining", "unhealthy"].contains(&state);
            let has_been = |group: &BTreeMap<String, BTreeSet<String>>| {
                group.iter().any(|(state, targets)| was_healthy(state) && targets.contains(&address))
            };
            if !states.iter().all(has_been) {
                return Ok(format!("pod {address} is ready before it is healthy: {states:?}"));
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A Service with pods as targets. Without a port over TCP, a target group needs to be told where to check.
fn to_pods(name: &str, app: &str) -> ServiceBuilder {
    in_aws(name, app)
        .with("ports", [port(Tcp, PORT), port(Udp, UDP_PORT)].to_vec())
        .with("allocateLoadBalancerNodePorts", false)
        .annotated(TARGET_TYPE, "ip")
        .annotated(CHECK_PORT, &HTTP.to_string())
}

/// Waits until so many backends are left, no other one is ending, and the targets of all groups are exactly these, and healthy.
async fn wait_followed(test: &TestContext, uid: &str, replicas: usize) -> Result<()> {
    until(format!("{replicas} pods as targets"), TIMEOUT * 2, async || -> Result<()> {
        let pods = test.pods(PODS).await?;
        ensure!(
            pods.len() == replicas && pods.iter().all(|pod| has_condition(pod, "Ready")),
            "the backends have not settled"
        );
        let wanted: BTreeSet<_> =
            pods.iter().map(|pod| Ok(address(pod, V4)?.to_string())).collect::<Result<_>>()?;
        let registered = look(test, |aws| aws.targets(uid))?;
        ensure!(registered == wanted, "{registered:?} are registered, {wanted:?} are ready");
        let states = look(test, |aws| aws.health(uid))?;
        ensure!(states.iter().all(|group| group.get("healthy") == Some(&wanted)), "{states:?}");
        Ok(())
    })
    .await
}

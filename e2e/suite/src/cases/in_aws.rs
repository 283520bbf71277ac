// SPDX-License-Identifier: Apache-2.0
//! Services in AWS: how the cases make them, and waits for what AWS and clients see of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use steerage_model::Protocol::{self, Udp};
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::aws::Aws;
use crate::net;
use crate::services::{ServiceBuilder, conditions, hostname};
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

const CLASS: &str = "steerage.dev/aws";
pub(super) const GROUP_ATTRIBUTES: &str =
    "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes";
/// The UDP port of Services whose loss is measured. It has a target group of its own: AWS ends the flows of a deregistered target there
/// after a delay, and keeps those over TCP.
pub(super) const UDP_PORT: u16 = 82;
/// The delay, in seconds: shorter than a backend that ends still serves. Its flows begin anew with others while it answers.
pub(super) const SHORT_DELAY: &str = "deregistration_delay.timeout_seconds=1";
/// Answers that show where new connections go: of two targets, one would have to be left out by chance each time.
const ANSWERS: usize = 20;

/// A Service that AWS serves, which has IPv4 only.
pub(super) fn in_aws(name: &str, app: &str) -> ServiceBuilder {
    ServiceBuilder::new(name, app).with("loadBalancerClass", CLASS).with("ipFamilyPolicy", "SingleStack")
}

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

/// The AWS of the cluster.
pub(super) fn aws(test: &TestContext) -> Result<Aws> {
    test.suite.aws().context("the cluster is not in AWS")
}

/// What AWS has.
pub(super) fn look<T>(test: &TestContext, at: impl FnOnce(&Aws) -> Result<T>) -> Result<T> {
    let aws = aws(test)?;
    block_in_place(|| at(&aws))
}

/// Where the host name of a Service leads to, once it is published.
pub(super) async fn wait_address(test: &TestContext, name: &str, port: u16) -> Result<SocketAddr> {
    let published = |service: &Service| {
        let seen = || format!("no host name; conditions {}", conditions(service));
        let hostname = hostname(service).with_context(seen)?;
        look(test, |aws| aws.resolve(hostname))
    };
    let address =
        until(format!("a host name of {name}"), TIMEOUT, async || published(&test.service(name).await?));
    Ok(SocketAddr::new(address.await?, port))
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

/// Waits until exactly these nodes are registered.
pub(super) async fn wait_targets(test: &TestContext, uid: &str, nodes: &[&str]) -> Result<()> {
    let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
    until(format!("targets {wanted:?}"), TIMEOUT, async || -> Result<()> {
        let seen = look(test, |aws| aws.targets(uid))?;
        ensure!(seen == wanted, "{seen:?}");
        Ok(())
    })
    .await
}

/// Waits until exactly these nodes are in a state of AWS, in each target group.
pub(super) async fn wait_state(test: &TestContext, uid: &str, state: &str, nodes: &[&str]) -> Result<()> {
    let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
    until(format!("{wanted:?} in state {state}"), TIMEOUT, async || -> Result<()> {
        let seen = look(test, |aws| aws.health(uid))?;
        ensure!(seen.iter().all(|group| group.get(state) == Some(&wanted)), "{seen:?}");
        Ok(())
    })
    .await
}

/// The number of writes once those for other Services have ended.
pub(super) async fn wait_no_writes(test: &TestContext) -> Result<u64> {
    until("an end of other writes to AWS", TIMEOUT, async || -> Result<u64> {
        let before = look(test, Aws::writes)?;
        // Longer than the provider waits before it tries a deletion again.
        sleep(Duration::from_secs(6)).await;
        let now = look(test, Aws::writes)?;
        ensure!(now == before, "{before} writes, {now} a moment later");
        Ok(now)
    })
    .await
}

/// Waits until AWS has nothing of any Service.
pub(super) async fn wait_nothing_left(test: &TestContext) -> Result<()> {
    until("nothing in AWS", TIMEOUT, async || -> Result<()> {
        let left = look(test, Aws::snapshot)?;
        ensure!(left.is_empty(), "{left}");
        Ok(())
    })
    .await
}

// SPDX-License-Identifier: Apache-2.0
//! Services in AWS: how the cases make them, and waits for what AWS and clients see of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use tokio::task::block_in_place;

use super::in_cloud;
use crate::aws::Aws;
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

/// A Service that AWS serves, which has IPv4 only.
pub(super) fn in_aws(name: &str, app: &str) -> ServiceBuilder {
    ServiceBuilder::new(name, app).with("loadBalancerClass", CLASS).with("ipFamilyPolicy", "SingleStack")
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
    in_cloud::wait_no_writes("AWS", async || look(test, Aws::writes)).await
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

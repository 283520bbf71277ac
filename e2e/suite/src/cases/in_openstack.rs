// SPDX-License-Identifier: Apache-2.0
//! Services in OpenStack: how the cases make them, and waits for what Octavia has of them.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use steerage_model::Family;
use tokio::task::block_in_place;

use super::in_cloud;
use crate::openstack::OpenStack;
use crate::services::{ServiceBuilder, conditions, published};
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

const CLASS: &str = "steerage.dev/openstack";
/// Whether the client's address is sent to backends, and how.
pub(super) const PROXY_PROTOCOL: &str = "loadbalancer.openstack.org/proxy-protocol";
/// Whether there is no floating IP.
pub(super) const INTERNAL: &str = "service.beta.kubernetes.io/openstack-internal-load-balancer";

/// How connections are distributed.
pub(super) const LB_METHOD: &str = "loadbalancer.openstack.org/lb-method";
/// For how long a client may be silent, in milliseconds.
pub(super) const CLIENT_TIMEOUT: &str = "loadbalancer.openstack.org/timeout-client-data";

/// A Service that OpenStack serves, with IPv4 only.
pub(super) fn in_openstack(name: &str, app: &str) -> ServiceBuilder {
    ServiceBuilder::new(name, app).with("loadBalancerClass", CLASS).with("ipFamilyPolicy", "SingleStack")
}

/// The OpenStack of the cluster.
pub(super) fn openstack(test: &TestContext) -> Result<OpenStack> {
    test.suite.openstack().context("the cluster is not in OpenStack")
}

/// What OpenStack has.
pub(super) fn look<T>(test: &TestContext, at: impl FnOnce(&OpenStack) -> Result<T>) -> Result<T> {
    let openstack = openstack(test)?;
    block_in_place(|| at(&openstack))
}

/// The address of a Service once it is published and fits, with a port.
pub(super) async fn wait_address_that(
    test: &TestContext,
    name: &str,
    port: u16,
    fits: impl Fn(IpAddr) -> bool,
) -> Result<SocketAddr> {
    let address = until(format!("an address of {name}"), TIMEOUT, async || {
        let service = test.service(name).await?;
        let found = published(&service).into_iter().find(|ip| Family::of(*ip) == Family::V4 && fits(*ip));
        found.with_context(|| format!("{:?}; conditions {}", published(&service), conditions(&service)))
    });
    Ok(SocketAddr::new(address.await?, port))
}

/// The same for any address.
pub(super) async fn wait_address(test: &TestContext, name: &str, port: u16) -> Result<SocketAddr> {
    wait_address_that(test, name, port, |_| true).await
}

/// Waits until exactly these nodes are members.
pub(super) async fn wait_members(test: &TestContext, uid: &str, nodes: &[&str]) -> Result<()> {
    let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
    until(format!("members {wanted:?}"), TIMEOUT, async || -> Result<()> {
        let seen = look(test, |openstack| openstack.targets(uid))?;
        ensure!(seen == wanted, "{seen:?}");
        Ok(())
    })
    .await
}

/// Waits until exactly these nodes are in an operating status of Octavia, in each pool.
pub(super) async fn wait_status(test: &TestContext, uid: &str, status: &str, nodes: &[&str]) -> Result<()> {
    let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
    until(format!("{wanted:?} in status {status}"), TIMEOUT, async || -> Result<()> {
        let seen = look(test, |openstack| openstack.health(uid))?;
        ensure!(seen.iter().all(|pool| pool.get(status) == Some(&wanted)), "{seen:?}");
        Ok(())
    })
    .await
}

/// The number of writes once those for other Services have ended.
pub(super) async fn wait_no_writes(test: &TestContext) -> Result<u64> {
    in_cloud::wait_no_writes("OpenStack", async || look(test, OpenStack::writes)).await
}

/// Waits until the parts of OpenStack's load balancers are so, and none of them is being changed.
pub(super) async fn wait_parts(test: &TestContext, fit: impl Fn(Parts<'_>) -> bool) -> Result<()> {
    until("what OpenStack has", TIMEOUT, async || -> Result<()> {
        let shown = look(test, OpenStack::snapshot)?;
        ensure!(!shown.contains("PENDING") && fit(Parts(&shown)), "{shown}");
        Ok(())
    })
    .await
}

/// The parts of load balancers, a line each.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a>(&'a str);

impl<'a> Parts<'a> {
    /// How many parts of a kind there are.
    pub(super) fn count(self, kind: &str) -> usize {
        self.of(kind).count()
    }

    fn of(self, kind: &str) -> impl Iterator<Item = &'a str> {
        self.0.lines().filter(move |line| line.starts_with(kind))
    }

    /// Whether one of them has this text.
    pub(super) fn has(self, kind: &str, text: &str) -> bool {
        self.of(kind).any(|part| part.contains(text))
    }

    /// Whether each of them has this text.
    pub(super) fn all_have(self, kind: &str, text: &str) -> bool {
        self.count(kind) > 0 && self.of(kind).all(|part| part.contains(text))
    }
}

/// Waits until OpenStack has nothing of any Service.
pub(super) async fn wait_nothing_left(test: &TestContext) -> Result<()> {
    until("nothing in OpenStack", TIMEOUT, async || -> Result<()> {
        let left = look(test, OpenStack::snapshot)?;
        ensure!(left.is_empty(), "{left}");
        Ok(())
    })
    .await
}

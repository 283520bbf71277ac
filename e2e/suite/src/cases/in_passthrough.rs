// SPDX-License-Identifier: Apache-2.0
//! Services in GCE and Azure: how the cases make them, and waits for what the cloud and its load balancers have of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use steerage_lab::Cloud;
use steerage_model::Family;
use tokio::task::block_in_place;

use super::in_cloud;
use crate::passthrough::Passthrough;
use crate::services::{ServiceBuilder, conditions, published};
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

/// The name of an address that a user has.
pub(super) const ADDRESS: &str = "mine";

/// The annotation that requests an internal load balancer.
pub(super) fn internal(test: &TestContext) -> Result<(&'static str, &'static str)> {
    Ok(match cloud(test)?.cloud {
        Cloud::Gce => ("networking.gke.io/load-balancer-type", "Internal"),
        _ => ("service.beta.kubernetes.io/azure-load-balancer-internal", "true"),
    })
}

/// The cloud of the cluster.
pub(super) fn cloud(test: &TestContext) -> Result<Passthrough> {
    test.suite.passthrough().context("the cluster is neither in GCE nor in Azure")
}

/// A Service of both IP families that the cloud serves.
pub(super) fn in_cloud(test: &TestContext, name: &str, app: &str) -> Result<ServiceBuilder> {
    let class = format!("steerage.dev/{}", cloud(test)?.cloud);
    Ok(ServiceBuilder::new(name, app).with("loadBalancerClass", class))
}

/// What the cloud has.
pub(super) fn look<T>(test: &TestContext, at: impl FnOnce(&Passthrough) -> Result<T>) -> Result<T> {
    let cloud = cloud(test)?;
    block_in_place(|| at(&cloud))
}

/// The address of a Service once it is published and every node has rules for it, with a port.
pub(super) async fn wait_address(
    test: &TestContext,
    name: &str,
    family: Family,
    port: u16,
) -> Result<SocketAddr> {
    let address = until(format!("an {family} address of {name}"), TIMEOUT, async || {
        let service = test.service(name).await?;
        let found = published(&service).into_iter().find(|ip| Family::of(*ip) == family);
        found.with_context(|| format!("{:?}; conditions {}", published(&service), conditions(&service)))
    });
    let address = address.await?;
    test.wait_programmed(name, &[address]).await?;
    Ok(SocketAddr::new(address, port))
}

/// Waits until exactly these nodes are targets.
pub(super) async fn wait_targets(test: &TestContext, to: SocketAddr, nodes: &[&str]) -> Result<()> {
    wait_nodes(test, "targets", to, nodes, Passthrough::targets).await
}

/// Waits until exactly these nodes are healthy.
pub(super) async fn wait_healthy(test: &TestContext, to: SocketAddr, nodes: &[&str]) -> Result<()> {
    wait_nodes(test, "healthy targets", to, nodes, Passthrough::healthy).await
}

async fn wait_nodes(
    test: &TestContext,
    what: &str,
    to: SocketAddr,
    nodes: &[&str],
    of: fn(&Passthrough, std::net::IpAddr) -> Result<BTreeSet<String>>,
) -> Result<()> {
    let wanted: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
    until(format!("{what} {wanted:?} of {to}"), TIMEOUT, async || -> Result<()> {
        let seen = look(test, |cloud| of(cloud, to.ip()))?;
        ensure!(seen == wanted, "{seen:?}");
        Ok(())
    })
    .await
}

/// The number of writes once those for other Services have ended.
pub(super) async fn wait_no_writes(test: &TestContext) -> Result<u64> {
    in_cloud::wait_no_writes("the cloud", async || look(test, Passthrough::writes)).await
}

/// Waits until the cloud has nothing of any Service.
pub(super) async fn wait_nothing_left(test: &TestContext) -> Result<()> {
    until("nothing in the cloud", TIMEOUT, async || -> Result<()> {
        let left = look(test, Passthrough::snapshot)?;
        ensure!(left.is_empty(), "{left}");
        Ok(())
    })
    .await
}

/// Reserves an IPv4 address as a user does. Returns the annotation by which a Service requests it.
pub(super) fn reserve(test: &TestContext) -> Result<&'static str> {
    look(test, |passthrough| {
        let api = passthrough.api()?;
        if passthrough.cloud == Cloud::Gce {
            let path = format!("regions/{}/addresses", api.setting("region"));
            api.compute("POST", &path, Some(&json!({ "name": ADDRESS })))?;
            return Ok("networking.gke.io/load-balancer-ip-addresses");
        }
        let address = json!({
            "location": api.setting("location"),
            "sku": { "name": "Standard" },
            "properties": { "publicIPAllocationMethod": "Static" },
        });
        api.network("PUT", &format!("publicIPAddresses/{ADDRESS}"), Some(&address))?;
        Ok("service.beta.kubernetes.io/azure-pip-name")
    })
}

/// Gives the address back, which exists.
pub(super) fn release(test: &TestContext) -> Result<()> {
    look(test, |passthrough| {
        let api = passthrough.api()?;
        if passthrough.cloud == Cloud::Gce {
            let path = format!("regions/{}/addresses/{ADDRESS}", api.setting("region"));
            return api.compute("DELETE", &path, None).map(drop);
        }
        let path = format!("publicIPAddresses/{ADDRESS}");
        let found = api.network("GET", &path, None)?;
        ensure!(found["name"] == ADDRESS, "the user's address is gone: {found}");
        api.network("DELETE", &path, None).map(drop)
    })
}

// SPDX-License-Identifier: Apache-2.0
//! Load balancers of cloud-provider-aws become Steerage's while clients use them: the real controller makes them, and the steps are
//! those of docs/providers/aws-adoption.md.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use steerage_model::Protocol::{self, Tcp, Udp};
use steerage_model::{annotations, names};
use steerage_requirements::requires;
use tokio::task::block_in_place;

use super::in_aws::{UDP_PORT, look, wait_address};
use super::in_cloud::{port, wait_answer};
use super::under_load::{Promise, under_load};
use crate::aws::Aws;
use crate::client::Client;
use crate::services::{PORT, ServiceBuilder, hostname};
use crate::suite::ECHO;
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

/// The controller's flag.
const ADOPT: &str = "--aws-adopt=cloud-provider-aws";
/// One Service for each protocol: cloud-provider-aws refuses both at one load balancer.
const SERVICES: [(&str, Protocol, u16); 2] = [("web", Tcp, PORT), ("datagrams", Udp, UDP_PORT)];
/// Seconds for which AWS keeps connections to a deregistered target: longer than clients are measured after the adoption.
const DELAY: u32 = 30;

pub(super) async fn load_balancers_of_cloud_provider_aws_are_adopted_under_load(
    test: Arc<TestContext>,
) -> Result<()> {
    requires!(Ok(()); Program("aws-cloud-controller-manager"));
    let peer = look(&test, Aws::start_peer)?;
    for (name, protocol, number) in SERVICES {
        test.create(&theirs(name, port(protocol, number))).await?;
    }
    let mut addresses = BTreeMap::new();
    for (name, protocol, number) in SERVICES {
        let address = wait_address(&test, name, number).await?;
        wait_answer(protocol, address).await?;
        addresses.insert(name, address);
    }
    let groups = look(&test, Aws::target_groups_of_peer)?;
    ensure!(groups.len() == SERVICES.len(), "cloud-provider-aws made {groups:?}");
    let names_before = host_names(&test).await?;
    look(&test, |aws| aws.shorten_delays_of_peer(DELAY))?;
    let [host, _] = test.suite.clients();
    let to =
        Target { address: addresses["web"], datagrams: addresses["datagrams"], backends: format!("{ECHO}-") };
    let clients = vec![Client { host, to, what: "AWS, of cloud-provider-aws at first".to_owned() }];
    let adopt = async || {
        block_in_place(|| peer.stop())?;
        system::set_argument(&test.suite, ADOPT, true).await?;
        for (name, ..) in SERVICES {
            test.patch(name, json!({ "metadata": { "annotations": { annotations::PAUSED: null } } })).await?;
        }
        for (name, ..) in SERVICES {
            test.wait_condition(name, names::PROGRAMMED, "True").await?;
        }
        Ok(())
    };
    let what = "adoption from cloud-provider-aws";
    let adopted = under_load(&test, what, Promise::NothingLost, clients, adopt).await;
    let complete = async || -> Result<()> {
        adopted?;
        ensure!(host_names(&test).await? == names_before, "the host names were {names_before:?}");
        check_addresses(&test, &addresses).await?;
        until("the end of the former target groups", TIMEOUT, async || -> Result<()> {
            let left = look(&test, Aws::target_groups_of_peer)?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })
        .await?;
        check_addresses(&test, &addresses).await
    };
    let outcome = complete().await;
    system::set_argument(&test.suite, ADOPT, false).await?;
    outcome
}

/// A Service without a class, which Steerage leaves to the other controller for now.
fn theirs(name: &str, port: Value) -> ServiceBuilder {
    ServiceBuilder::new(name, ECHO)
        .with("loadBalancerClass", Value::Null)
        .with("ipFamilyPolicy", "SingleStack")
        .with("ports", vec![port])
        .annotated(annotations::PAUSED, "true")
        .annotated("service.beta.kubernetes.io/aws-load-balancer-type", "nlb")
        .annotated("service.beta.kubernetes.io/aws-load-balancer-internal", "true")
}

async fn host_names(test: &TestContext) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for (name, ..) in SERVICES {
        let service = test.service(name).await?;
        names.push(hostname(&service).with_context(|| format!("{name} has no host name"))?.to_owned());
    }
    Ok(names)
}

/// Fails unless the load balancers have their addresses and answer there.
async fn check_addresses(test: &TestContext, addresses: &BTreeMap<&str, SocketAddr>) -> Result<()> {
    for (name, protocol, number) in SERVICES {
        let now = wait_address(test, name, number).await?;
        ensure!(now == addresses[name], "{name} moved from {} to {now}", addresses[name]);
        wait_answer(protocol, now).await?;
    }
    Ok(())
}

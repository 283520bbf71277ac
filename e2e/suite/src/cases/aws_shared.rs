// SPDX-License-Identifier: Apache-2.0
//! Services in AWS that share one load balancer, by port.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use steerage_lab::aws::SHARED;
use steerage_model::Protocol::{Tcp, Udp};
use steerage_model::annotations::SHARED_LOAD_BALANCER;

use super::in_aws::{UDP_PORT, in_aws, wait_address};
use super::in_cloud::{create, port, wait_answer, wait_silence};
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::services::{PORT, ServiceBuilder, conditions};
use crate::suite::ECHO;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Target;

/// Clients of one Service lose nothing while another one comes, changes its port, asks for one that is taken, and goes.
pub(super) async fn services_of_one_load_balancer_do_not_disturb_each_other(
    test: Arc<TestContext>,
) -> Result<()> {
    let measured = sharing("stays", &[port(Tcp, PORT), port(Udp, UDP_PORT)]);
    create(&test, &measured).await?;
    let address = wait_address(&test, "stays", PORT).await?;
    let datagrams = SocketAddr::new(address.ip(), UDP_PORT);
    wait_answer(Tcp, address).await?;
    wait_answer(Udp, datagrams).await?;
    let [host, _] = test.suite.clients();
    let to = Target { address, datagrams, backends: format!("{ECHO}-") };
    let clients = vec![Client { host, to, what: "AWS, shared".to_owned() }];
    let others = async || {
        create(&test, &sharing("moves", &[port(Tcp, 81)])).await?;
        let first = wait_address(&test, "moves", 81).await?;
        ensure!(first.ip() == address.ip(), "{first} and {address} are two load balancers");
        wait_answer(Tcp, first).await?;
        create(&test, &sharing("late", &[port(Tcp, PORT)])).await?;
        until("the reason PortInUse", TIMEOUT, async || -> Result<()> {
            let service = test.service("late").await?;
            ensure!(conditions(&service).contains("PortInUse"), "{}", conditions(&service));
            Ok(())
        })
        .await?;
        test.patch("moves", json!({ "spec": { "ports": [port(Tcp, 83)] } })).await?;
        let second = SocketAddr::new(address.ip(), 83);
        wait_answer(Tcp, second).await?;
        wait_silence(first).await?;
        test.delete("moves").await?;
        test.wait_deleted("moves").await?;
        wait_silence(second).await
    };
    under_load(&test, "other Services of the load balancer change", Promise::NothingLost, clients, others)
        .await?;
    test.delete("stays").await?;
    test.wait_deleted("stays").await?;
    // The port is free: no resync has to find that out.
    let late = wait_address(&test, "late", PORT).await.context("of the Service that waited for the port")?;
    wait_answer(Tcp, late).await?;
    test.delete("late").await?;
    test.wait_deleted("late").await
}

fn sharing(name: &str, ports: &[serde_json::Value]) -> ServiceBuilder {
    in_aws(name, ECHO).with("ports", ports.to_vec()).annotated(SHARED_LOAD_BALANCER, SHARED)
}

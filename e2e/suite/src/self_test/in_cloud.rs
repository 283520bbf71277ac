// SPDX-License-Identifier: Apache-2.0
//! The meter's tests of itself on a path through a cloud's load balancer: client, load balancer, node, pod. Faults are rules on the
//! interface where answers to the client leave: that of a node, or of a load balancer that is a proxy.

use std::ops::RangeInclusive;

use anyhow::{Context as _, Result, ensure};

use super::fault::{Fault, Hook};
use super::{ANSWER, AT_ONCE, FEW, connections, datagrams, drop_packets, ensure_dropped, expect};
use crate::client::Client;
use crate::cluster::Host;
use crate::pods::HTTP;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};
use steerage_meter::client::Observed;
use steerage_meter::loss::{LossKind, Measurement};
use steerage_meter::measure;

/// Matches the server's part of a handshake.
const SYN_ACK: &str = "tcp flags & (syn|ack) == (syn|ack)";
/// Of [`FEW`] connections at least this many go through the first node: more than the number of the last packet that is dropped.
const ENOUGH: usize = FEW / 10;

/// Runs them through a client's load balancer.
pub(super) async fn test_all(test: &TestContext, client: &Client) -> Result<()> {
    expect(test, "no fault, TCP", &[], || {
        Ok((measured(client, async || connections(&client.to, FEW, AT_ONCE).await)?, 0))
    })?;
    let from = client.host.ipv4.into();
    expect(test, "no fault, UDP", &[], || {
        Ok((measured(client, async || datagrams(from, &[client.to.datagrams]).await)?, 0))
    })?;
    let answers = Answers::to(test, client)?;
    answers.wait_until_seen().await?;
    // Client and server send again after the same second: either may be the first.
    let late = [LossKind::SynRetransmitted, LossKind::SlowHandshake];
    answers.report_one_lost("one SYN-ACK dropped", SYN_ACK, 4..=4, &late)?;
    let late = [LossKind::SlowAnswer, LossKind::AnswerRetransmitted];
    answers.report_one_lost("one answer dropped twice", ANSWER, 4..=5, &late)
}

/// What the first node, or a proxy in its place, sends to the client: from a VIP, a node port or a pod.
struct Answers<'a> {
    test: &'a TestContext,
    client: &'a Client,
    host: Host,
    /// Matches these packets.
    fits: String,
}

impl<'a> Answers<'a> {
    fn to(test: &'a TestContext, client: &'a Client) -> Result<Self> {
        let port = client.to.address.port();
        let (host, ports) = match test.suite.openstack() {
            Some(openstack) => (openstack.amphora().clone(), port.to_string()),
            None => (
                test.nodes().into_iter().next().context("no node")?,
                format!("{{ {port}, {HTTP}, 30000-32767 }}"),
            ),
        };
        let fits = format!("ip daddr {} tcp sport {ports}", client.host.ipv4);
        Ok(Self { test, client, host, fits })
    }

    /// A load balancer serves as soon as one node is healthy; the first node may be healthy later than others.
    async fn wait_until_seen(&self) -> Result<()> {
        until(format!("connections through {}", self.host.name), TIMEOUT, async || {
            let fault = self.inject(&format!("{SYN_ACK} counter"))?;
            measured(self.client, async || connections(&self.client.to, FEW, AT_ONCE).await)?;
            let seen = fault.end()?;
            ensure!(seen >= ENOUGH, "{seen} of {FEW}");
            Ok(())
        })
        .await
    }

    /// Drops packets with these numbers, of those that fit.
    fn report_one_lost(
        &self,
        what: &str,
        fits: &str,
        numbers: RangeInclusive<usize>,
        kinds: &[LossKind],
    ) -> Result<()> {
        expect(self.test, what, kinds, || {
            let fault = self.inject(&format!("{fits} {}", drop_packets(numbers.clone())))?;
            let measured = measured(self.client, async || connections(&self.client.to, FEW, 1).await)?;
            let dropped = fault.end()?;
            ensure_dropped(dropped, &numbers)?;
            Ok((measured, 1))
        })
    }

    fn inject(&self, rule: &str) -> Result<Fault<'a>> {
        let rules = [format!("{} {rule}", self.fits)];
        Fault::inject(self.test, vec![self.host.clone()], &[(Hook::Egress, &rules)])
    }
}

fn measured(client: &Client, work: impl AsyncFnOnce() -> Result<Observed> + Send) -> Result<Measurement> {
    let servers = [client.to.address.ip(), client.to.datagrams.ip()];
    tokio::task::block_in_place(|| measure(&client.host.source(), &servers, work))
}

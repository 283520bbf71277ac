// SPDX-License-Identifier: Apache-2.0
//! The meter's tests of itself on a path through a cloud's load balancer: client, load balancer, node, pod. Faults are rules on the
//! interface where answers to the client leave: that of a node, or of a load balancer that is a proxy.

use std::ops::RangeInclusive;

use anyhow::{Result, ensure};

use super::fault::{Fault, Hook};
use super::{ANSWER, AT_ONCE, FEW, connections, datagrams, drop_packets, expect};
use crate::meter::client::Observed;
use crate::meter::load::Client;
use crate::meter::loss::{LossKind, Measurement};
use crate::meter::measure;
use crate::pods::HTTP;
use crate::test_context::TestContext;

/// Runs them through a client's load balancer.
pub(super) fn test_all(test: &TestContext, client: &Client) -> Result<()> {
    expect(test, "no fault, TCP", &[], || {
        Ok((measured(client, async || connections(&client.to, FEW, AT_ONCE).await)?, 0))
    })?;
    let from = client.host.ipv4.into();
    expect(test, "no fault, UDP", &[], || {
        Ok((measured(client, async || datagrams(from, &[client.to.datagrams]).await)?, 0))
    })?;
    // Client and server send again after the same second: either may be the first.
    let late = [LossKind::SynRetransmitted, LossKind::SlowHandshake];
    let fits = "tcp flags & (syn|ack) == (syn|ack)";
    reports_one_lost(test, client, "one SYN-ACK dropped", fits, 4..=4, &late)?;
    let late = [LossKind::SlowAnswer, LossKind::AnswerRetransmitted];
    reports_one_lost(test, client, "one answer dropped twice", ANSWER, 4..=5, &late)
}

/// Drops packets with these numbers, of those that fit and that the first node, or a proxy in its place, sends to the client: from a
/// VIP, a node port or a pod.
fn reports_one_lost(
    test: &TestContext,
    client: &Client,
    what: &str,
    fits: &str,
    numbers: RangeInclusive<usize>,
    kinds: &[LossKind],
) -> Result<()> {
    let to = client.host.ipv4;
    let port = client.to.address.port();
    let (host, ports) = if let Some(openstack) = test.suite.openstack() {
        (vec![openstack.amphora().clone()], port.to_string())
    } else {
        let first = test.nodes().into_iter().take(1).collect();
        (first, format!("{{ {port}, {HTTP}, 30000-32767 }}"))
    };
    let rules = [format!("ip daddr {to} tcp sport {ports} {fits} {}", drop_packets(numbers.clone()))];
    expect(test, what, kinds, || {
        let fault = Fault::inject(test, host.clone(), &[(Hook::Egress, &rules)])?;
        let measured = measured(client, async || connections(&client.to, FEW, 1).await)?;
        let dropped = fault.end()?;
        ensure!(
            dropped == numbers.clone().count(),
            "the rule dropped {dropped} packets of {FEW} connections, not those of {numbers:?}"
        );
        Ok((measured, 1))
    })
}

fn measured(client: &Client, work: impl AsyncFnOnce() -> Result<Observed> + Send) -> Result<Measurement> {
    let servers = [client.to.address.ip(), client.to.datagrams.ip()];
    tokio::task::block_in_place(|| measure(&client.host, &servers, work))
}

// SPDX-License-Identifier: Apache-2.0
//! The meter tests itself on the path that it measures: client, edge, node, pod. Faults are rules on the interfaces of nodes, where
//! requests come and answers leave. On the edge host rules of nftables see no request: its own program takes them before.
//!
//! Each fault must be reported exactly as often as its rule counted it, with the right kind, and nothing else; without a fault
//! nothing may be reported. Until all this is so, no measurement counts. A test in which something else was slow, and nothing more, is
//! repeated: a machine that is busy for 200 ms delays answers, and the meter is right to say so.
//!
//! All this is about the edge. On the way through a cloud's load balancer, [`in_cloud`] has the tests that apply.

mod fault;
mod in_cloud;

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use steerage_model::Family::{V4, V6};

use crate::client::Client;
use crate::services::{PORT, ServiceBuilder, Vips};
use crate::suite::{COMMON, ECHO, OTHER};
use crate::test_context::TestContext;
use fault::{Fault, Hook};
use steerage_meter::asker::Asker;
use steerage_meter::client::{Observed, TIME_LIMIT, Target, connect};
use steerage_meter::loss::{LossKind, Measurement};
use steerage_meter::measure;

/// Connections of which one loses its SYN.
const MANY: usize = 10_000;
/// Of them at most this many at once.
const AT_ONCE: usize = 16;
/// Connections and datagrams of the other tests.
const FEW: usize = 100;
/// How often a test is tried on a machine that is busy now and then.
const ATTEMPTS: usize = 4;
/// A port that the Service has and its backends do not.
const CLOSED: u16 = 81;
/// Matches answers to requests, by their length: no other packet of a server is as long.
const ANSWER: &str = "ip length > 70";

/// Runs all tests, once per run of the suite. In a cloud they use the load balancer of the first client.
pub(crate) async fn run(test: &TestContext, clients: &[Client]) -> Result<()> {
    let tests = async || match (test.suite.cloud(), clients) {
        (None, _) => test_all(test).await,
        (Some(_), [client, ..]) => in_cloud::test_all(test, client).await,
        (Some(_), []) => anyhow::bail!("the tests in a cloud take a load balancer"),
    };
    test.suite.meter_tested.get_or_try_init(tests).await.map(drop)
}

/// In the shared namespace, whichever case comes first.
async fn test_all(test: &TestContext) -> Result<()> {
    let test = &TestContext { suite: Arc::clone(&test.suite), namespace: COMMON.to_owned() };
    test.suite.backends().await?;
    let ports = serde_json::json!([
        { "name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": 8080 },
        { "name": "udp", "protocol": "UDP", "port": PORT, "targetPort": 8081 },
        { "name": "closed", "protocol": "TCP", "port": CLOSED, "targetPort": 8099 },
    ]);
    let (_, vips) = test.serve(&ServiceBuilder::new("meter", ECHO).with("ports", ports)).await?;
    let (_, others) = test.serve(&ServiceBuilder::new("meter-other", OTHER)).await?;
    let bench = Bench { test, vips, others };
    bench.reports_nothing_without_a_fault().context("without a fault")?;
    bench.reports_a_dropped_syn().context("one SYN in 10,000 dropped")?;
    bench.reports_a_dropped_syn_ack().context("one SYN-ACK dropped")?;
    bench.reports_a_dropped_answer().context("one answer dropped")?;
    bench.reports_swapped_targets().context("the targets of two Services swapped")?;
    bench.reports_swapped_backends().context("the backends of two Services swapped")?;
    bench.reports_a_closed_port().context("a closed port")?;
    for name in ["meter", "meter-other"] {
        test.delete(name).await?;
        test.wait_deleted(name).await?;
    }
    Ok(())
}

struct Bench<'a> {
    test: &'a TestContext,
    vips: Vips,
    others: Vips,
}

impl Bench<'_> {
    /// Judges what a client does inside its namespace.
    fn measure(&self, work: impl AsyncFnOnce() -> Result<Observed> + Send) -> Result<Measurement> {
        let [client, _] = self.test.suite.clients();
        let servers = [self.vips.ipv4, self.vips.ipv6, self.others.ipv4, self.others.ipv6];
        tokio::task::block_in_place(|| measure(&client.source(), &servers, work))
    }

    fn reports_nothing_without_a_fault(&self) -> Result<()> {
        for family in [V4, V6] {
            let to = self.vips.at(family, PORT);
            self.expect("no fault, TCP", &[], || {
                Ok((self.measure(async || connections(&echo(to), FEW, AT_ONCE).await)?, 0))
            })?;
            let from = self.client(to);
            self.expect("no fault, UDP", &[], || {
                Ok((self.measure(async || datagrams(from, &[to]).await)?, 0))
            })?;
        }
        Ok(())
    }

    fn reports_a_dropped_syn(&self) -> Result<()> {
        let to = self.vips.at(V4, PORT);
        let rule = format!(
            "ip daddr {} tcp flags & (syn|ack) == syn numgen inc mod {MANY} == {} counter drop",
            to.ip(),
            MANY / 10
        );
        let rules = [rule];
        self.expect("one SYN in 10,000 dropped", &[LossKind::SynRetransmitted], || {
            // One node gets more than a tenth of the connections, and not all.
            let node = self.test.nodes().into_iter().take(1).collect();
            let fault = Fault::inject(self.test, node, &[(Hook::Ingress, &rules)])?;
            let measured = self.measure(async || connections(&echo(to), MANY, AT_ONCE).await)?;
            let dropped = fault.end()?;
            ensure!(dropped == 1, "the rule dropped {dropped} SYNs of {MANY} connections");
            Ok((measured, dropped))
        })
    }

    /// Client and server send again after the same second: either may be the first.
    fn reports_a_dropped_syn_ack(&self) -> Result<()> {
        let kinds = [LossKind::SynRetransmitted, LossKind::SlowHandshake];
        let fits = "tcp flags & (syn|ack) == (syn|ack)";
        self.reports_one_lost("one SYN-ACK dropped", fits, FEW / 20..=FEW / 20, &kinds)
    }

    /// Of a connection's two answers the first stands alone; the FIN after the second shows at once that this is missing. On a node
    /// they take turns. See [`drop_packets`] for why it is dropped twice.
    fn reports_a_dropped_answer(&self) -> Result<()> {
        let kinds = [LossKind::SlowAnswer, LossKind::AnswerRetransmitted];
        for number in [FEW / 10, FEW / 10 + 1] {
            self.reports_one_lost("one answer dropped twice", ANSWER, number..=number + 1, &kinds)?;
        }
        Ok(())
    }

    /// Drops packets with these numbers, of those that the first Service's backends on a node send and that fit.
    fn reports_one_lost(
        &self,
        what: &str,
        fits: &str,
        numbers: RangeInclusive<usize>,
        kinds: &[LossKind],
    ) -> Result<()> {
        let to = self.vips.at(V4, PORT);
        let rules = [format!(
            "ip saddr {} tcp sport {PORT} {fits} {}",
            self.vips.ipv4,
            drop_packets(numbers.clone())
        )];
        self.expect(what, kinds, || {
            let node = self.test.nodes().into_iter().take(1).collect();
            let fault = Fault::inject(self.test, node, &[(Hook::Egress, &rules)])?;
            let measured = self.measure(async || connections(&echo(to), FEW, 1).await)?;
            let dropped = fault.end()?;
            ensure_dropped(dropped, &numbers)?;
            Ok((measured, 1))
        })
    }

    fn reports_swapped_targets(&self) -> Result<()> {
        let [one, other] = [self.vips.at(V4, PORT), self.others.at(V4, PORT)];
        let rules = swap("daddr", "udp dport", one.ip(), other.ip());
        let from = self.client(one);
        self.expect("targets of two Services swapped", &[LossKind::WrongSource], || {
            let fault = Fault::inject(self.test, self.test.nodes(), &[(Hook::Ingress, &rules)])?;
            let measured = self.measure(async || datagrams(from, &[one, other]).await)?;
            let swapped = fault.end()?;
            ensure!(swapped == 2 * FEW, "the rules swapped {swapped} datagrams");
            Ok((measured, swapped))
        })
    }

    /// In both directions, so that every packet has the addresses that the client expects.
    fn reports_swapped_backends(&self) -> Result<()> {
        let [one, other] = [self.vips.at(V4, PORT), self.others.at(V4, PORT)];
        let requests = swap("daddr", "tcp dport", one.ip(), other.ip());
        let answers = swap("saddr", "tcp sport", one.ip(), other.ip());
        let chains: [(Hook, &[String]); 2] = [(Hook::Ingress, &requests), (Hook::Egress, &answers)];
        self.expect("backends of two Services swapped", &[LossKind::WrongBackend], || {
            let fault = Fault::inject(self.test, self.test.nodes(), &chains)?;
            let measured = self.measure(async || {
                let mut observed = connections(&echo(one), FEW, AT_ONCE).await?;
                let others = Target { address: other, datagrams: other, backends: format!("{OTHER}-") };
                observed.connections.extend(connections(&others, FEW, AT_ONCE).await?.connections);
                Ok(observed)
            })?;
            let swapped = fault.end()?;
            ensure!(swapped >= 4 * FEW, "the rules swapped {swapped} packets");
            Ok((measured, 2 * FEW))
        })
    }

    fn reports_a_closed_port(&self) -> Result<()> {
        let to = self.vips.at(V4, CLOSED);
        self.expect("closed port", &[LossKind::ConnectionRefused], || {
            Ok((self.measure(async || connections(&echo(to), FEW, AT_ONCE).await)?, FEW))
        })
    }

    fn client(&self, to: SocketAddr) -> IpAddr {
        let [client, _] = self.test.suite.clients();
        if to.is_ipv4() { client.ipv4.into() } else { client.ipv6.into() }
    }

    fn expect(
        &self,
        what: &str,
        kinds: &[LossKind],
        attempt: impl Fn() -> Result<(Measurement, usize)>,
    ) -> Result<()> {
        expect(self.test, what, kinds, attempt)
    }
}

/// Fails unless exactly what `attempt` injected is reported, as one of these kinds. Puts a row into the report for each attempt.
fn expect(
    test: &TestContext,
    what: &str,
    kinds: &[LossKind],
    attempt: impl Fn() -> Result<(Measurement, usize)>,
) -> Result<()> {
    for left in (0..ATTEMPTS).rev() {
        let (measured, injected) = attempt()?;
        record(test, what, &measured);
        let (fitting, others): (Vec<_>, Vec<_>) =
            measured.losses.iter().partition(|loss| kinds.contains(&loss.kind));
        if others.is_empty() && fitting.len() == injected {
            return Ok(());
        }
        let certain = fitting.iter().filter(|loss| !loss.kind.is_slow()).count();
        let only_slow = others.iter().all(|loss| loss.kind.is_slow());
        let busy = only_slow && fitting.len() >= injected && certain <= injected;
        ensure!(busy && left > 0, "{injected} of {kinds:?} was injected, {:?} is reported", measured.losses);
    }
    Ok(())
}

fn record(test: &TestContext, what: &str, measured: &Measurement) {
    let columns = ["fault", "connections", "datagrams", "reported"];
    let row = vec![
        what.to_owned(),
        measured.connections.to_string(),
        measured.datagrams.to_string(),
        measured.kinds(),
    ];
    test.suite.report.row("The meter's test of itself", &columns, row);
}

/// The end of a rule: drops packets with these numbers, from 0 on, of those that fit what precedes it.
///
/// An answer is dropped together with the packet that repeats it. The first repetition comes 200 ms after the answer, which is just as
/// long as the meter lets an answer take: where the kernel counts ticks late, it may come in time. And a busy server may have repeated
/// an answer that had arrived, so that the drop of one packet would have lost nothing.
fn drop_packets(numbers: RangeInclusive<usize>) -> String {
    let numbers: Vec<_> = numbers.map(|number| number.to_string()).collect();
    format!("numgen inc mod 1000000 {{ {} }} counter drop", numbers.join(", "))
}

/// The first Service at one of its addresses and ports.
fn echo(address: SocketAddr) -> Target {
    Target { address, datagrams: address, backends: format!("{ECHO}-") }
}

/// Fails unless the rule of [`drop_packets`] has dropped each of these packets.
fn ensure_dropped(dropped: usize, numbers: &RangeInclusive<usize>) -> Result<()> {
    ensure!(
        dropped == numbers.clone().count(),
        "the rule dropped {dropped} packets of {FEW} connections, not those of {numbers:?}"
    );
    Ok(())
}

/// Rules that swap two addresses at one end of packets. The first rule that changes a packet is its last.
fn swap(end: &str, port: &str, one: IpAddr, other: IpAddr) -> [String; 2] {
    [(one, other), (other, one)]
        .map(|(from, to)| format!("ip {end} {from} {port} {PORT} counter ip {end} set {to} accept"))
}

/// Opens this many connections, `at_once` at a time.
async fn connections(to: &Target, count: usize, at_once: usize) -> Result<Observed> {
    let connections =
        stream::iter(0..count).map(|_| connect(None, to)).buffer_unordered(at_once).try_collect().await?;
    Ok(Observed { connections, ..Observed::default() })
}

/// Sends [`FEW`] datagrams to each server, each from a socket of its own.
async fn datagrams(from: IpAddr, servers: &[SocketAddr]) -> Result<Observed> {
    let servers = servers.iter().flat_map(|server| std::iter::repeat_n(*server, FEW));
    let ask = |server| async move { Asker::bind(from).await?.ask(server, TIME_LIMIT).await };
    let datagrams = stream::iter(servers).map(ask).buffer_unordered(AT_ONCE).try_collect().await?;
    Ok(Observed { datagrams, ..Observed::default() })
}

// SPDX-License-Identifier: Apache-2.0
//! The meter tests itself on the path that it measures: client, edge, node, pod. Faults are rules on the edge host's interface.
//!
//! Each fault must be reported exactly as often as its rule counted it, with the right kind, and nothing else; without a fault
//! nothing may be reported. Until all this is so, no measurement counts.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use steerage_model::Family::{V4, V6};

use crate::cluster::Host;
use crate::meter::client::{Asker, Observed, connect};
use crate::meter::loss::{LossKind, Measurement};
use crate::meter::measure;
use crate::services::{PORT, ServiceBuilder, Vips};
use crate::suite::ECHO;
use crate::test_context::TestContext;

/// Connections of which one loses its SYN.
const MANY: usize = 10_000;
/// Of them at most so many at once.
const AT_ONCE: usize = 16;
/// Connections and datagrams of the other tests.
const FEW: usize = 100;
/// A port that the Service has and its backends do not.
const CLOSED: u16 = 81;
/// The table of a fault, in the edge host's namespace.
const TABLE: &str = "steerage_e2e";

/// Runs all tests, once per run of the suite.
pub(crate) async fn run(test: &TestContext) -> Result<()> {
    test.suite.meter_tested.get_or_try_init(|| test_all(test)).await.map(drop)
}

async fn test_all(test: &TestContext) -> Result<()> {
    let ports = serde_json::json!([
        { "name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": 8080 },
        { "name": "udp", "protocol": "UDP", "port": PORT, "targetPort": 8081 },
        { "name": "closed", "protocol": "TCP", "port": CLOSED, "targetPort": 8099 },
    ]);
    let (_, vips) = test.serve(&ServiceBuilder::new("meter", ECHO).with("ports", ports)).await?;
    let (_, others) = test.serve(&ServiceBuilder::new("meter-other", ECHO)).await?;
    let bench = Bench { test, edge: first_edge(test)?, vips, others };
    bench.reports_nothing_without_a_fault().context("without a fault")?;
    bench.reports_a_dropped_syn().context("one SYN in 10,000 dropped")?;
    bench.reports_swapped_targets().context("the targets of two Services swapped")?;
    bench.reports_a_closed_port().context("a closed port")?;
    for name in ["meter", "meter-other"] {
        test.delete(name).await?;
        test.wait_deleted(name).await?;
    }
    Ok(())
}

fn first_edge(test: &TestContext) -> Result<Host> {
    test.suite.cluster(|cluster| cluster.edges()).into_iter().next().context("no edge host")
}

struct Bench<'a> {
    test: &'a TestContext,
    edge: Host,
    vips: Vips,
    others: Vips,
}

impl Bench<'_> {
    /// Judges what a client does inside its namespace.
    fn measure(&self, work: impl AsyncFnOnce() -> Result<Observed> + Send) -> Result<Measurement> {
        let [client, _] = self.test.suite.clients();
        let servers = [self.vips.ipv4, self.vips.ipv6, self.others.ipv4, self.others.ipv6];
        tokio::task::block_in_place(|| measure(&client, &servers, work))
    }

    fn reports_nothing_without_a_fault(&self) -> Result<()> {
        for family in [V4, V6] {
            let to = self.vips.at(family, PORT);
            let measured = self.measure(async || connections(to, FEW).await)?;
            self.record("no fault, TCP", &measured, &[])?;
            let from = self.client(to);
            let measured = self.measure(async || datagrams(from, &[to]).await)?;
            self.record("no fault, UDP", &measured, &[])?;
        }
        Ok(())
    }

    fn reports_a_dropped_syn(&self) -> Result<()> {
        let to = self.vips.at(V4, PORT);
        let rule = format!(
            "ip daddr {} tcp flags & (syn|ack) == syn numgen inc mod {MANY} == {} counter drop",
            to.ip(),
            MANY / 2
        );
        let fault = Fault::inject(self, &[rule])?;
        let measured = self.measure(async || connections(to, MANY).await)?;
        let dropped = fault.end()?;
        ensure!(dropped == 1, "the rule dropped {dropped} SYNs of {MANY} connections");
        self.record("one SYN in 10,000 dropped", &measured, &[(LossKind::SynRetransmitted, dropped)])
    }

    fn reports_swapped_targets(&self) -> Result<()> {
        let [one, other] = [self.vips.at(V4, PORT), self.others.at(V4, PORT)];
        let swap =
            |from: IpAddr, to: IpAddr| format!("ip daddr {from} udp dport {PORT} counter ip daddr set {to}");
        let fault = Fault::inject(
            self,
            &[
                // The first rule that changes a packet is its last.
                swap(one.ip(), other.ip()) + " accept",
                swap(other.ip(), one.ip()) + " accept",
            ],
        )?;
        let from = self.client(one);
        let measured = self.measure(async || datagrams(from, &[one, other]).await)?;
        let swapped = fault.end()?;
        ensure!(swapped == 2 * FEW, "the rules swapped {swapped} datagrams");
        self.record("targets of two Services swapped", &measured, &[(LossKind::WrongSource, swapped)])
    }

    fn reports_a_closed_port(&self) -> Result<()> {
        let to = self.vips.at(V4, CLOSED);
        let measured = self.measure(async || connections(to, FEW).await)?;
        self.record("closed port", &measured, &[(LossKind::ConnectionRefused, FEW)])
    }

    fn client(&self, to: SocketAddr) -> IpAddr {
        let [client, _] = self.test.suite.clients();
        if to.is_ipv4() { client.ipv4.into() } else { client.ipv6.into() }
    }

    /// Puts a row into the report and fails unless exactly what was injected is reported.
    fn record(&self, what: &str, measured: &Measurement, injected: &[(LossKind, usize)]) -> Result<()> {
        let expected = injected.iter().copied().collect();
        let columns = ["fault", "connections", "datagrams", "reported"];
        let row = vec![
            what.to_owned(),
            measured.connections.to_string(),
            measured.datagrams.to_string(),
            measured.kinds(),
        ];
        self.test.suite.report.row("The meter's test of itself", &columns, row);
        ensure!(
            measured.counts() == expected,
            "{expected:?} was injected, {:?} is reported",
            measured.losses
        );
        Ok(())
    }
}

/// Opens so many connections, some at a time.
async fn connections(to: SocketAddr, count: usize) -> Result<Observed> {
    let connections =
        stream::iter(0..count).map(|_| connect(to)).buffer_unordered(AT_ONCE).try_collect().await?;
    Ok(Observed { connections, ..Observed::default() })
}

/// Sends [`FEW`] datagrams to each server, each from a socket of its own.
async fn datagrams(from: IpAddr, servers: &[SocketAddr]) -> Result<Observed> {
    let servers = servers.iter().flat_map(|server| std::iter::repeat_n(*server, FEW));
    let ask = |server| async move { Asker::bind(from).await?.ask(server, Duration::from_secs(1)).await };
    let datagrams = stream::iter(servers).map(ask).buffer_unordered(AT_ONCE).try_collect().await?;
    Ok(Observed { datagrams, ..Observed::default() })
}

/// Rules at the ingress of the edge host, before its own. They go when this is dropped.
struct Fault<'a>(&'a Bench<'a>);

impl<'a> Fault<'a> {
    fn inject(bench: &'a Bench<'a>, rules: &[String]) -> Result<Self> {
        let fault = Self(bench);
        let chain = format!(
            "add table netdev {TABLE}; delete table netdev {TABLE}; table netdev {TABLE} {{ chain ingress {{ \
             type filter hook ingress device \"eth0\" priority -500; policy accept; {}; }}; }}",
            rules.join("; ")
        );
        fault.nft(&[&chain])?;
        Ok(fault)
    }

    /// Takes the rules away; how many packets they counted.
    fn end(self) -> Result<usize> {
        let listed = self.nft(&["list", "table", "netdev", TABLE])?;
        let words: Vec<_> = listed.split_whitespace().collect();
        let counts = words.windows(3).filter(|words| words[..2] == ["counter", "packets"]);
        counts.map(|words| Ok(words[2].parse::<usize>()?)).sum()
    }

    fn nft(&self, arguments: &[&str]) -> Result<String> {
        let command = [&["nft"], arguments].concat();
        self.0.test.suite.cluster(|cluster| cluster.exec(&self.0.edge.name, &command))
    }
}

impl Drop for Fault<'_> {
    fn drop(&mut self) {
        let _ = self.nft(&["delete", "table", "netdev", TABLE]);
    }
}

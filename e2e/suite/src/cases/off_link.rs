// SPDX-License-Identifier: Apache-2.0
//! A node off the link of the edge host, which reaches it through the tunnel, by routes that a routing daemon has learned by BGP.
//!
//! The last node of the lab is moved behind two gateways, and back at the end. Agents receive by the chart's values, the edge host sends
//! by its flag. Two Services have a backend on that node and on one on the link: `local` under policy Local, `cluster` under Cluster.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use steerage_edge_api::TargetUse;
use steerage_meter::client::{Ending, Pace, Target, hold};
use steerage_model::Family::{self, V4, V6};
use steerage_model::Protocol::{Tcp, Udp};
use steerage_model::names;
use tokio::sync::watch;
use tokio::task::block_in_place;
use tokio::time::sleep;

use super::source_address::seen_by_backend;
use super::under_load::{Promise, under_load};
use crate::client::Client;
use crate::cluster::{Host, output};
use crate::edge;
use crate::net;
use crate::off_link::OffLink;
use crate::path_mtu;
use crate::self_test;
use crate::services::{PORT, ServiceBuilder, Vips};
use crate::system;
use crate::test_context::TestContext;
use crate::wait::{TIMEOUT, until};

const LOCAL: &str = "local";
const CLUSTER: &str = "cluster";
/// Flags of the edge.
const FLAGS: [&str; 1] = ["--tunnel-vni=7"];
/// What fits into the tunnel where all links have room for 1,500 bytes. The outer packet is of the node's family, which is the client's.
const MTUS: [(Family, u32); 2] = [(V4, 1450), (V6, 1430)];
/// After a change of routes, until the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// Connections that are open while the node moves.
const HELD: usize = 20;

/// What the case works with.
struct Bed {
    test: Arc<TestContext>,
    lab: OffLink,
    edge: Host,
    near: Host,
    far: Host,
}

pub(super) async fn node_off_the_link_is_served_through_the_tunnel(test: Arc<TestContext>) -> Result<()> {
    let lab = test.suite.off_link().context("no node of this cluster can get off the link")?;
    let edge = test.suite.cluster(|cluster| cluster.edges()).into_iter().next().context("no edge host")?;
    let nodes = test.nodes();
    let [.., near, far] = &nodes[..] else { anyhow::bail!("this takes two nodes") };
    let (near, far) = (near.clone(), far.clone());
    let bed = Bed { test, lab, edge, near, far };
    let outcome = Box::pin(bed.run()).await;
    outcome.and(bed.undo())
}

impl Bed {
    async fn run(&self) -> Result<()> {
        self.set_up().await.context("setting up")?;
        let (pods, vips) = Box::pin(self.serve()).await?;
        self.keeps_the_clients_address(vips[0]).await?;
        self.long_packets_pass(vips[0]).await?;
        let clients = self.clients(vips);
        self.endpoint_moves(&clients, &pods).await?;
        self.processes_end_and_routes_change(&clients).await?;
        self.connections_follow_the_node(vips[0]).await?;
        self.rules_have_dropped_nothing()
    }

    /// Nodes first, as `docs/off-link-nodes.md` says.
    async fn set_up(&self) -> Result<()> {
        // Its faults are rules that do not see the packets inside the tunnel.
        self_test::run(&self.test, &[]).await?;
        let sources = format!("edge.tunnel.sources={{{},{}}}", self.edge.ipv4, self.edge.ipv6);
        self.cluster(|cluster| cluster.install(&["edge.tunnel.vni=7", &sources]))?;
        block_in_place(|| self.lab.take_off(&self.far.name))?;
        self.wait_metric(&self.far, 10358, "steerage_agent_edge_tunnel_ready").await?;
        self.cluster(|cluster| cluster.stop_edge(&self.edge.name))?;
        block_in_place(|| self.lab.start_edge(&self.edge.name, &FLAGS))?;
        self.wait_metric(&self.edge, 10359, "steerage_edge_tunnel_ready").await
    }

    fn undo(&self) -> Result<()> {
        // It may not run.
        let _ = self.cluster(|cluster| cluster.stop_edge(&self.edge.name));
        let put_back = block_in_place(|| self.lab.put_back(&self.far.name));
        let device = block_in_place(|| self.lab.delete_device(&self.edge.name));
        self.cluster(|cluster| cluster.start_edge(&self.edge.name))?;
        self.cluster(|cluster| cluster.install(&[]))?;
        put_back.and(device)?;
        for node in self.test.nodes() {
            let left = self.cluster(|cluster| {
                cluster.exec(&node.name, &["ip", "-o", "link", "show", "type", "vxlan"])
            })?;
            ensure!(left.is_empty(), "the agent on {} has no tunnel, and leaves {left}", node.name);
        }
        Ok(())
    }

    /// The backends of `local` on the link and off it, of which the second one alone is ready, and the VIPs of both Services.
    async fn serve(&self) -> Result<([Pod; 2], [Vips; 2])> {
        let backend = async |app: &str, node: &Host, ready| {
            self.test.backend(&format!("{app}-{}", node.name), app, &node.name, ready, 0).await
        };
        let pods = [backend(LOCAL, &self.near, false).await?, backend(LOCAL, &self.far, true).await?];
        backend(CLUSTER, &self.near, true).await?;
        backend(CLUSTER, &self.far, true).await?;
        let local = ServiceBuilder::new(LOCAL, LOCAL).annotated(names::ADDRESSES, "10.77.200.161,fd77::c8a1");
        let cluster = ServiceBuilder::new(CLUSTER, CLUSTER)
            .cluster()
            .annotated(names::ADDRESSES, "10.77.200.162,fd77::c8a2");
        let mut vips = Vec::new();
        for spec in [local, cluster] {
            vips.push(self.test.serve(&spec.steered("health-check")).await?.1);
        }
        self.test.wait_healthy(LOCAL, &[&self.far.name]).await?;
        let nodes = self.test.nodes();
        let all: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
        self.test.wait_healthy(CLUSTER, &all).await?;
        Ok((pods, [vips[0], vips[1]]))
    }

    async fn keeps_the_clients_address(&self, vips: Vips) -> Result<()> {
        let [client, _] = self.test.suite.clients();
        for family in [V4, V6] {
            let (own, to) = (client.address(family), vips.at(family, PORT));
            let name = net::only_page(to, "/hostname").await?;
            ensure!(name.ends_with(&self.far.name), "{name} answers, which is not off the link");
            for (protocol, first) in [(Tcp, 25_000), (Udp, 26_000)] {
                for port in first..first + 10 {
                    let seen = seen_by_backend(protocol, port, to).await?;
                    ensure!((seen.ip(), seen.port()) == (own, port), "{own}:{port} is seen as {seen}");
                }
            }
        }
        Ok(())
    }

    /// Segments and datagrams that are too long for the tunnel.
    async fn long_packets_pass(&self, vips: Vips) -> Result<()> {
        for (family, mtu) in MTUS {
            let to = vips.at(family, PORT);
            // The client learns from ICMP what fits: datagrams without a fragment, segments of TCP.
            let learned = path_mtu::learned(to).await.with_context(|| format!("datagrams to {to}"))?;
            ensure!(learned == mtu, "the client has learned {learned} from datagrams to {to}");
            self.test.suite.inside(&self.test.suite.clients()[1], async || {
                let text = "x".repeat(100_000);
                let seen = net::only_page(to, &format!("/echo?msg={text}")).await?;
                // Between chunks are their lengths.
                let length = seen.matches('x').count();
                ensure!(length == text.len(), "{length} bytes came back of a long request");
                let route = output(Command::new("ip").args(["route", "get", &to.ip().to_string()]))?;
                ensure!(route.contains(&format!("mtu {mtu}")), "the client has learned: {route}");
                Ok(())
            })?;
            // Fragments, those of IPv4 inside fragments.
            for length in [1_400, 1_600, 1_900] {
                let text = "x".repeat(length);
                let seen = net::ask_from(0, to, &format!("echo {text}")).await?;
                ensure!(seen == text, "{} of {length} bytes came back from {to}", seen.len());
            }
        }
        Ok(())
    }

    fn clients(&self, [local, cluster]: [Vips; 2]) -> Vec<Client> {
        let [first, second] = self.test.suite.clients();
        let of = |what: &str, vips: Vips, family, host| {
            let address = vips.at(family, PORT);
            let to = Target { address, datagrams: address, backends: format!("{what}-") };
            Client { host, to, what: format!("{what}, {family}") }
        };
        vec![
            of(LOCAL, local, V4, first.clone()),
            of(LOCAL, local, V6, second),
            of(CLUSTER, cluster, V6, first),
        ]
    }

    async fn endpoint_moves(&self, clients: &[Client], [near, far]: &[Pod; 2]) -> Result<()> {
        let there_and_back = async || {
            self.move_endpoint((&self.far, far), (&self.near, near)).await?;
            self.move_endpoint((&self.near, near), (&self.far, far)).await
        };
        let promise = Promise::ExceptDatagramsInFlight;
        self.under_load("endpoint moved onto the link and off it", promise, clients, there_and_back).await
    }

    /// Moves the endpoint as an operator does who wants to lose nothing: the new one is ready before the node of the old one drains, and
    /// the old one is unready after that.
    async fn move_endpoint(&self, from: (&Host, &Pod), to: (&Host, &Pod)) -> Result<()> {
        self.test.set_ready(to.1, true).await?;
        self.test.wait_healthy(LOCAL, &[&from.0.name, &to.0.name]).await?;
        self.drain(from.0, json!("true")).await?;
        until(format!("no new connections to {}", from.0.name), TIMEOUT, async || -> Result<()> {
            for service in [LOCAL, CLUSTER] {
                let lb = edge::one(self.test.client(), &self.test.namespace, service).await?;
                let targets = edge::health(self.test.client(), &lb).await?;
                let mut used = targets.iter().filter(|target| target.usage == Some(TargetUse::Active));
                ensure!(!used.any(|target| target.node == from.0.name), "{targets:?}");
            }
            Ok(())
        })
        .await?;
        self.test.set_ready(from.1, false).await?;
        self.test.wait_healthy(LOCAL, &[&to.0.name]).await?;
        self.drain(from.0, Value::Null).await
    }

    async fn drain(&self, node: &Host, value: Value) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.test.client().clone());
        let change = json!({ "metadata": { "annotations": { "steerage.dev/drain": value } } });
        nodes.patch(&node.name, &PatchParams::default(), &Patch::Merge(change)).await?;
        Ok(())
    }

    /// In one load, since each takes a quarter of a minute.
    async fn processes_end_and_routes_change(&self, clients: &[Client]) -> Result<()> {
        let agents = system::pods(&self.test.suite, system::AGENT).await?;
        let is_far = |pod: &&Pod| system::node_of(pod) == Some(&self.far.name);
        let agent = agents.iter().find(is_far).context("no agent is off the link")?;
        let all = async || {
            system::kill_container(&self.test.suite, agent)?;
            self.cluster(|cluster| cluster.kill_edge(&self.edge.name))?;
            sleep(PAUSE * 2).await;
            block_in_place(|| self.lab.start_edge(&self.edge.name, &FLAGS))?;
            self.change_routes().await
        };
        let event = "edge, agent and routing daemon killed (-9), route moved";
        self.under_load(event, Promise::NothingLost, clients, all).await?;
        system::wait_restarted(&self.test.suite, system::AGENT, agent).await
    }

    /// The route goes by the other gateway and back, and the routing daemon ends and starts with the routes in the kernel.
    async fn change_routes(&self) -> Result<()> {
        let (edge, [first, second]) = (&self.edge.name, self.lab.gateways());
        for (is_up, gateway) in [(false, &second), (true, &first)] {
            block_in_place(|| self.lab.set_session(edge, &first, is_up))?;
            until(format!("routes by {}", gateway.name), TIMEOUT, async || {
                block_in_place(|| self.lab.check_routes(edge, &self.far.name, gateway))
            })
            .await?;
            sleep(PAUSE).await;
        }
        block_in_place(|| self.lab.kill_daemon(edge))?;
        sleep(PAUSE).await;
        block_in_place(|| self.lab.start_daemon(edge))?;
        until("the daemon's sessions", TIMEOUT, async || block_in_place(|| self.lab.check_sessions(edge)))
            .await?;
        sleep(PAUSE).await;
        block_in_place(|| self.lab.check_routes(edge, &self.far.name, &first))
    }

    /// Connections outlive the node's way onto the link and off it. Packets on their way are lost, and sent again by TCP.
    async fn connections_follow_the_node(&self, vips: Vips) -> Result<()> {
        let (stop, is_over) = watch::channel(false);
        let held = [V4, V6].into_iter().cycle().take(HELD).map(|family| {
            let address = vips.at(family, PORT);
            let to = Target { address, datagrams: address, backends: format!("{LOCAL}-{}", self.far.name) };
            let mut is_over = is_over.clone();
            tokio::spawn(async move { hold(None, &to, Pace::Every(PAUSE / 10), &mut is_over).await })
        });
        let held: Vec<_> = held.collect();
        sleep(PAUSE).await;
        let moved = block_in_place(|| self.lab.put_back(&self.far.name));
        sleep(PAUSE * 2).await;
        let moved = moved.and_then(|()| block_in_place(|| self.lab.take_off(&self.far.name)));
        sleep(PAUSE * 2).await;
        stop.send(true)?;
        for connection in held {
            let connection = connection.await??;
            ensure!(connection.ending == Ending::Complete, "a connection ended: {:?}", connection.ending);
        }
        moved
    }

    /// The node's rules have taken no packet of the edge host for one of another sender, or for one to no VIP.
    fn rules_have_dropped_nothing(&self) -> Result<()> {
        for family in ["ip", "ip6"] {
            let list = ["nft", "list", "counters", "table", family, "steerage-edge-tunnel"];
            let counters = self.cluster(|cluster| cluster.exec(&self.far.name, &list))?;
            for counter in ["no-edge-host", "no-vip", "forged"] {
                let after =
                    counters.split(counter).nth(1).with_context(|| format!("no {counter}: {counters}"))?;
                let packets = after.split_whitespace().skip_while(|word| *word != "packets").nth(1);
                ensure!(packets == Some("0"), "{} has dropped packets: {counters}", self.far.name);
            }
        }
        Ok(())
    }

    async fn wait_metric(&self, host: &Host, port: u16, name: &str) -> Result<()> {
        until(format!("{name} of {}", host.name), TIMEOUT, async || {
            self.test.suite.inside(host, async || {
                let text = net::page(([127, 0, 0, 1], port).into(), "/metrics").await?;
                ensure!(text.lines().any(|line| line == format!("{name} 1")), "it is not 1");
                Ok(())
            })
        })
        .await
    }

    async fn under_load(
        &self,
        event: &str,
        promise: Promise,
        clients: &[Client],
        happen: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let event = format!("off the link: {event}");
        under_load(&self.test, &event, promise, clients.to_vec(), happen).await
    }

    fn cluster<T>(&self, work: impl FnOnce(&dyn crate::cluster::Cluster) -> T) -> T {
        self.test.suite.cluster(work)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The forwarder's rules with real packets: a client, a router that forwards, and two nodes, each in a network namespace.

#![allow(clippy::unwrap_used)] // the helpers of a test may fail it too; the lint knows test functions only

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{self, Command};
use std::thread;
use std::time::Duration;

use ipnet::IpNet;
use steerage_lab::{in_netns, netns};
use steerage_nlb::cloud::{Check, Transport};
use steerage_nlb::probe::{self, Prober};
use steerage_passthrough::apply::{self, Guests};
use steerage_passthrough::cloud::{Affinity, Filter};
use steerage_passthrough::ruleset::{Ended, Route, ruleset};
use steerage_requirements::requires;

const VIPS: [&str; 2] = ["198.18.0.7", "fd79::8000:0:0:0"];
const PROBER: &str = "35.191.0.1";
const PORT: u16 = 80;
const LIMIT: Duration = Duration::from_secs(5);
/// What is silent is so for this long.
const SILENCE: Duration = Duration::from_millis(300);

/// Four namespaces. They go when this is dropped. The nodes have the marks 1 and 2 for IPv4, 3 and 4 for IPv6.
struct Net {
    client: String,
    router: String,
    nodes: [String; 2],
    guests: Guests,
}

impl Net {
    fn new(test: &str) -> Self {
        let name = |host: &str| format!("pt{}{test}-{host}", process::id());
        let nodes = ["node1", "node2"].map(name);
        let guests = Guests::new(nodes.to_vec());
        let mut net = Self { client: name("client"), router: name("router"), nodes, guests };
        netns::create(&net.router, true).unwrap();
        for (host, port, number) in
            [(&net.client, "c", 78), (&net.nodes[0], "n1", 1), (&net.nodes[1], "n2", 2)]
        {
            net.attach(host, port, number);
        }
        net.nodes.iter().for_each(|node| serve(node));
        net.guests.sync(&VIPS.iter().map(|vip| vip.parse::<IpAddr>().unwrap().into()).collect()).unwrap();
        in_netns(&net.router, || {
            for (mark, target) in (1..).zip(["10.77.1.1", "10.77.2.1", "fd77:1::1", "fd77:2::1"]) {
                apply::add_route(mark, target.parse().unwrap()).unwrap();
            }
            apply::add_prober(PROBER.parse().unwrap(), "n1").unwrap();
        })
        .unwrap();
        net
    }

    fn attach(&self, host: &str, port: &str, number: u8) {
        netns::create(host, false).unwrap();
        sh(
            &self.router,
            &format!("ip link add {port} type veth peer name eth0 netns {host}; ip link set {port} up"),
        );
        sh(host, "ip link set lo up; ip link set eth0 up");
        for (own, router, any) in [
            (format!("10.77.{number}.1"), format!("10.77.{number}.254"), "24"),
            (format!("fd77:{number}::1"), format!("fd77:{number}::fe"), "64 nodad"),
        ] {
            let (length, flags) = any.split_once(' ').unwrap_or((any, ""));
            sh(&self.router, &format!("ip addr add {router}/{length} dev {port} {flags}"));
            sh(
                host,
                &format!("ip addr add {own}/{length} dev eth0 {flags}; ip route add default via {router}"),
            );
        }
    }

    fn forward(&self, filters: &[Filter], routes: &[Route]) {
        let vips: [IpNet; 2] = ["198.18.0.0/16", "fd79::/64"].map(|range| range.parse().unwrap());
        let text = ruleset(&vips, "n1", filters, routes);
        in_netns(&self.router, || steerage_nlb::apply::write(&text).unwrap()).unwrap();
    }

    fn end(&self, kept: u16, mark: Option<u32>) -> usize {
        let ended = Ended { vip: vip(0), transport: Transport::Tcp, kept: vec![kept..=kept], mark };
        in_netns(&self.router, || apply::end(&[ended]).unwrap()).unwrap()
    }

    /// A connection that has to be made.
    fn connected(&self, vip: IpAddr) -> Flow {
        connect_within(LIMIT, &self.client, (vip, PORT).into()).unwrap()
    }

    /// A connection that may be answered by nobody.
    fn connect(&self, vip: IpAddr) -> Result<Flow, ErrorKind> {
        connect_from(&self.client, (vip, PORT).into())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in [&self.client, &self.router].into_iter().chain(&self.nodes) {
            let _ = netns::delete(name);
        }
    }
}

fn connect_from(host: &str, to: SocketAddr) -> Result<Flow, ErrorKind> {
    connect_within(SILENCE, host, to)
}

fn connect_within(limit: Duration, host: &str, to: SocketAddr) -> Result<Flow, ErrorKind> {
    let connect = || TcpStream::connect_timeout(&to, limit).map_err(|error| error.kind());
    in_netns(host, connect).unwrap().map(Flow::new)
}

fn sh(host: &str, script: &str) {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", netns::path(host).display())).args(["sh", "-ec", script]);
    assert!(command.status().unwrap().success(), "{script}");
}

/// A connection of the client.
struct Flow {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Flow {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self { reader: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// The node, and the addresses that it sees: the client's and its own.
    fn ask(&mut self) -> Result<(String, SocketAddr, SocketAddr), ErrorKind> {
        self.stream.write_all(b"who\n").map_err(|error| error.kind())?;
        let mut line = String::new();
        self.reader.read_line(&mut line).map_err(|error| error.kind())?;
        let [node, peer, own] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(ErrorKind::UnexpectedEof);
        };
        Ok((node.to_owned(), peer.parse().unwrap(), own.parse().unwrap()))
    }
}

/// Answers every line with the node's name and the addresses of the connection. The threads live as long as the process.
fn serve(node: &str) {
    for any in ["0.0.0.0", "::"] {
        let listen = || {
            let socket = socket2::Socket::new(
                if any == "::" { socket2::Domain::IPV6 } else { socket2::Domain::IPV4 },
                socket2::Type::STREAM,
                None,
            )
            .unwrap();
            if any == "::" {
                socket.set_only_v6(true).unwrap();
            }
            socket.bind(&SocketAddr::new(any.parse().unwrap(), PORT).into()).unwrap();
            socket.listen(16).unwrap();
            TcpListener::from(socket)
        };
        let (listener, name) = (in_netns(node, listen).unwrap(), node.to_owned());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, name) = (stream.unwrap(), name.clone());
                thread::spawn(move || {
                    let (peer, own) = (stream.peer_addr().unwrap(), stream.local_addr().unwrap());
                    for _ in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
                        let _ = writeln!(stream, "{name} {peer} {own}");
                    }
                });
            }
        });
    }
}

fn vip(family: usize) -> IpAddr {
    VIPS[family].parse().unwrap()
}

/// To both nodes, with these weights.
fn route(family: usize, weights: [u32; 2]) -> Route {
    let first = if family == 0 { 1 } else { 3 };
    let targets = (first..).zip(weights).filter(|(_, weight)| *weight > 0).collect();
    Route {
        vip: vip(family),
        transport: Transport::Tcp,
        ports: vec![PORT..=PORT],
        pool: "web".to_owned(),
        affinity: Affinity::Flow,
        targets,
    }
}

fn everybody() -> [Filter; 1] {
    [Filter { allows: true, ..Filter::default() }]
}

#[test]
fn packets_reach_all_targets_unchanged_in_both_families() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("a");
    net.forward(&everybody(), &[route(0, [1, 1]), route(1, [1, 1])]);
    for family in [0, 1] {
        let mut seen = BTreeSet::new();
        for _ in 0..30 {
            let mut flow = net.connected(vip(family));
            let own = flow.stream.local_addr().unwrap();
            let (node, peer, at) = flow.ask().unwrap();
            assert_eq!((peer, at), (own, SocketAddr::new(vip(family), PORT)));
            seen.insert(node);
        }
        assert_eq!(seen, BTreeSet::from(net.nodes.clone()));
    }
}

#[test]
fn weights_and_affinity_choose_the_target() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("b");
    let counts = |route: Route| {
        net.forward(&everybody(), &[route]);
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for _ in 0..160 {
            *counts.entry(net.connected(vip(0)).ask().unwrap().0).or_default() += 1;
        }
        net.nodes.each_ref().map(|node| counts.get(node).copied().unwrap_or(0))
    };
    // A quarter are 40, with a deviation of 5.5.
    let [_, second] = counts(route(0, [3, 1]));
    assert!((14..=66).contains(&second), "{second} of 160 with a quarter of the weight");
    assert_eq!(counts(route(0, [0, 1])), [0, 160]);
    let sticky = counts(Route { affinity: Affinity::Client, ..route(0, [1, 1]) });
    assert!(sticky.contains(&160), "{sticky:?}");
}

#[test]
fn who_is_not_admitted_cannot_open_flows_and_keeps_those_there_are() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("c");
    let from = |source: &str| {
        let sources = vec![source.parse().unwrap()];
        let ports = vec![PORT..=PORT];
        let transport = Some(Transport::Tcp);
        net.forward(
            &[Filter { allows: true, sources, transport, ports, ..Filter::default() }],
            &[route(0, [1, 0])],
        );
    };
    from("10.77.78.0/24");
    let mut flow = net.connected(vip(0));
    flow.ask().unwrap();
    from("10.77.79.0/24");
    assert_eq!(net.connect(vip(0)).err(), Some(ErrorKind::TimedOut));
    flow.ask().unwrap();
    net.forward(&[], &[route(0, [1, 0])]);
    assert_eq!(net.connect(vip(0)).err(), Some(ErrorKind::TimedOut), "without a filter nobody is admitted");
}

#[test]
fn established_flow_stays_until_it_is_ended_and_meets_another_target_then() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("d");
    net.forward(&everybody(), &[route(0, [1, 0])]);
    let mut first = net.connected(vip(0));
    first.ask().unwrap();
    net.forward(&everybody(), &[route(0, [0, 1])]);
    assert_eq!(first.ask().unwrap().0, net.nodes[0], "an established flow stays");
    let mut second = net.connected(vip(0));
    assert_eq!(second.ask().unwrap().0, net.nodes[1], "a new flow follows");
    assert_eq!(net.end(PORT, None), 0, "the port is kept");
    assert_eq!(net.end(PORT + 1, Some(7)), 0);
    assert_eq!(net.end(PORT + 1, Some(1)), 1);
    assert_eq!(first.ask().unwrap_err(), ErrorKind::ConnectionReset, "the other target does not know it");
    second.ask().unwrap();
}

#[test]
fn vip_without_a_rule_or_targets_is_silent_and_nodes_do_not_reach_it() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("e");
    net.forward(&everybody(), &[route(0, [0, 0]), route(1, [1, 0])]);
    assert_eq!(net.connect(vip(0)).err(), Some(ErrorKind::TimedOut), "no target");
    let other = (vip(1), PORT + 1).into();
    assert_eq!(connect_from(&net.client, other).err(), Some(ErrorKind::TimedOut), "another port");
    assert_eq!(net.connect(([198, 18, 0, 8]).into()).err(), Some(ErrorKind::TimedOut), "another VIP");
    // The first node has the VIPs itself. A second one of the same address would be reached by the router, if from anywhere.
    net.forward(&everybody(), &[Route { vip: [198, 18, 0, 9].into(), ..route(0, [0, 1]) }]);
    let from_inside = connect_from(&net.nodes[0], ([198, 18, 0, 9], PORT).into());
    assert_eq!(from_inside.err(), Some(ErrorKind::TimedOut));
}

#[test]
fn check_of_a_node_is_addressed_to_the_vip() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("f");
    net.forward(&[], &[]);
    // What answers is the second node: the first one drops what comes from the prober.
    let drop_all = format!("add rule ip t input ip saddr {PROBER} drop");
    let chain = "add table ip t; add chain ip t input { type filter hook input priority 0; }";
    sh(&net.nodes[0], &format!("nft '{chain}; {drop_all}'"));
    let check = Check {
        path: None,
        port: None,
        interval: LIMIT,
        timeout: LIMIT,
        healthy_threshold: 1,
        unhealthy_threshold: 1,
    };
    let source = Some(SocketAddr::new(PROBER.parse().unwrap(), 0));
    let passes = |mark| {
        let prober = Prober { agent: "GoogleHC/1.0", source, mark };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // Only a check that is dropped is waited for.
        let check = Check { timeout: if mark == 1 { SILENCE } else { LIMIT }, ..check.clone() };
        let ask = || runtime.block_on(probe::ask(&check, (vip(0), PORT).into(), &prober)).is_some();
        in_netns(&net.router, ask).unwrap()
    };
    assert!(!passes(1));
    assert!(passes(2));
}

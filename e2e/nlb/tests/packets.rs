// SPDX-License-Identifier: Apache-2.0
//! The forwarder's rules with real packets: a client, a router that forwards, and two nodes, each in a network namespace.

#![allow(clippy::unwrap_used)] // the helpers of a test may fail it too; the lint knows test functions only

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{self, Command};
use std::thread;
use std::time::Duration;

use steerage_lab::{in_netns, netns};
use steerage_nlb::apply;
use steerage_nlb::cloud::{Ended, Transport};
use steerage_nlb::ruleset::{Route, ruleset};
use steerage_requirements::requires;
use tokio::net::TcpSocket;
use tokio::runtime::Builder;
use tokio::time::timeout;

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 78, 1, 1);
const BALANCER: Ipv4Addr = Ipv4Addr::new(10, 77, 200, 4);
const NODE_PORT: u16 = 30080;
const LIMIT: Duration = Duration::from_secs(5);
/// What is silent is so for this long.
const SILENCE: Duration = Duration::from_millis(300);

/// Four namespaces. They go when this is dropped.
struct Net {
    client: String,
    router: String,
    nodes: [String; 2],
}

impl Net {
    fn new(test: &str) -> Self {
        let name = |host: &str| format!("nlb{}{test}-{host}", process::id());
        let net =
            Self { client: name("client"), router: name("router"), nodes: ["node1", "node2"].map(name) };
        netns::create(&net.router, true).unwrap();
        net.attach(&net.client, "c", "10.78.1");
        for (node, (port, prefix)) in net.nodes.iter().zip([("n1", "10.77.1"), ("n2", "10.77.2")]) {
            net.attach(node, port, prefix);
            serve(node);
        }
        // In a lab it lies in the nodes' network.
        sh(&net.router, "ip route add 10.77.200.0/24 dev n1");
        net
    }

    fn attach(&self, host: &str, port: &str, prefix: &str) {
        netns::create(host, false).unwrap();
        sh(&self.router, &format!("ip link add {port} type veth peer name eth0 netns {host}"));
        sh(&self.router, &format!("ip link set {port} up; ip addr add {prefix}.254/24 dev {port}"));
        sh(host, "ip link set lo up; ip link set eth0 up");
        sh(host, &format!("ip addr add {prefix}.1/24 dev eth0; ip route add default via {prefix}.254"));
    }

    fn forward(&self, routes: &[Route]) {
        let text = ruleset("10.77.200.0/24".parse().unwrap(), routes);
        in_netns(&self.router, || apply::write(&text).and_then(|()| apply::forget_reset_flows()).unwrap())
            .unwrap();
    }

    fn end(&self, ended: Ended) -> usize {
        in_netns(&self.router, || apply::end(&[ended]).unwrap()).unwrap()
    }

    /// A connection that has to be made.
    fn connected(&self, port: u16) -> Flow {
        self.connect_within(LIMIT, port).unwrap()
    }

    /// A connection that may be answered by nobody.
    fn connect(&self, port: u16) -> Option<Flow> {
        self.connect_within(SILENCE, port)
    }

    fn connect_within(&self, limit: Duration, port: u16) -> Option<Flow> {
        let to = SocketAddr::from((BALANCER, port));
        let stream = in_netns(&self.client, || TcpStream::connect_timeout(&to, limit)).unwrap().ok()?;
        Some(Flow::new(stream))
    }

    /// A connection from a port of the client that it has used before.
    fn connect_from(&self, own: SocketAddr) -> Flow {
        let connect = async {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_reuseaddr(true).unwrap();
            socket.bind(own).unwrap();
            timeout(LIMIT, socket.connect((BALANCER, 80).into())).await.unwrap().unwrap()
        };
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let stream = in_netns(&self.client, || runtime.block_on(connect).into_std().unwrap()).unwrap();
        stream.set_nonblocking(false).unwrap();
        Flow::new(stream)
    }

    /// The answer to a datagram: the node, and whom it saw.
    fn ask(&self) -> (String, SocketAddr) {
        let socket = in_netns(&self.client, || UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.send_to(b"who\n", (BALANCER, 80)).unwrap();
        let mut answer = [0; 256];
        let (length, from) = socket.recv_from(&mut answer).unwrap();
        assert_eq!(from, SocketAddr::from((BALANCER, 80)));
        parse(&String::from_utf8_lossy(&answer[..length]))
    }
}

fn sh(host: &str, script: &str) {
    let made = Command::new("nsenter")
        .arg(format!("--net={}", netns::path(host).display()))
        .args(["sh", "-ec", script])
        .status();
    assert!(made.unwrap().success(), "{script}");
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in [&self.client, &self.router].into_iter().chain(&self.nodes) {
            let _ = netns::delete(name);
        }
    }
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

    fn ask(&mut self) -> Result<(String, SocketAddr), ErrorKind> {
        self.stream.write_all(b"who\n").map_err(|error| error.kind())?;
        let mut line = String::new();
        self.reader.read_line(&mut line).map_err(|error| error.kind())?;
        Ok(parse(&line))
    }
}

fn parse(answer: &str) -> (String, SocketAddr) {
    let (node, peer) = answer.trim().rsplit_once(' ').unwrap();
    (node.to_owned(), peer.parse().unwrap())
}

/// Answers every line, and every datagram, with the node's name and the peer. The threads live as long as the process.
fn serve(node: &str) {
    let listener = in_netns(node, || TcpListener::bind(("0.0.0.0", NODE_PORT)).unwrap()).unwrap();
    let socket = in_netns(node, || UdpSocket::bind(("0.0.0.0", NODE_PORT)).unwrap()).unwrap();
    let name = node.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, name) = (stream.unwrap(), name.clone());
            thread::spawn(move || {
                let peer = stream.peer_addr().unwrap();
                for _ in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
                    let _ = writeln!(stream, "{name} {peer}");
                }
            });
        }
    });
    let name = node.to_owned();
    thread::spawn(move || {
        let mut request = [0; 256];
        while let Ok((_, peer)) = socket.recv_from(&mut request) {
            let _ = socket.send_to(format!("{name} {peer}").as_bytes(), peer);
        }
    });
}

fn target(node: u8) -> SocketAddr {
    SocketAddr::from(([10, 77, node, 1], NODE_PORT))
}

fn route(port: u16, transport: Transport, nodes: &[u8]) -> Route {
    Route {
        address: BALANCER,
        port,
        transport,
        group: "arn:group".to_owned(),
        receivers: nodes.iter().map(|node| target(*node)).collect(),
        is_sticky: false,
        keeps_client_address: true,
        sources: None,
    }
}

#[test]
fn flows_reach_all_receivers_with_the_clients_address() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("a");
    net.forward(&[route(80, Transport::Tcp, &[1, 2]), route(80, Transport::Udp, &[1, 2])]);
    let mut seen = BTreeSet::new();
    for _ in 0..30 {
        let mut flow = net.connected(80);
        let own = flow.stream.local_addr().unwrap();
        let (node, peer) = flow.ask().unwrap();
        assert_eq!(peer, own);
        seen.insert(node);
    }
    assert_eq!(seen, BTreeSet::from(net.nodes.clone()));
    let seen: BTreeSet<_> = (0..30).map(|_| net.ask()).collect();
    assert!(seen.iter().all(|(_, peer)| peer.ip() == CLIENT), "{seen:?}");
    assert_eq!(
        seen.into_iter().map(|(node, _)| node).collect::<BTreeSet<_>>(),
        BTreeSet::from(net.nodes.clone())
    );
}

#[test]
fn sticky_client_stays_with_its_node() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("b");
    net.forward(&[Route { is_sticky: true, ..route(80, Transport::Tcp, &[1, 2]) }]);
    let seen: BTreeSet<_> = (0..20).map(|_| net.connected(80).ask().unwrap().0).collect();
    assert_eq!(seen.len(), 1);
}

#[test]
fn hidden_client_has_the_routers_address() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("c");
    net.forward(&[Route { keeps_client_address: false, ..route(80, Transport::Tcp, &[1]) }]);
    let (_, peer) = net.connected(80).ask().unwrap();
    assert_eq!(peer.ip(), Ipv4Addr::new(10, 77, 1, 254));
}

#[test]
fn sources_without_a_rule_cannot_open_flows_and_keep_those_they_have() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("f");
    let fenced = |source: &str| {
        net.forward(&[Route {
            sources: Some(vec![source.parse().unwrap(), "192.0.2.0/24".parse().unwrap()]),
            ..route(80, Transport::Tcp, &[1])
        }]);
    };
    fenced("10.78.0.0/16");
    let mut flow = net.connected(80);
    flow.ask().unwrap();
    fenced("10.79.0.0/16");
    assert!(net.connect(80).is_none());
    flow.ask().unwrap();
}

#[test]
fn established_flow_stays_until_it_is_ended_by_a_reset() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("d");
    net.forward(&[route(80, Transport::Tcp, &[1])]);
    let [mut first, mut second] = [net.connected(80), net.connected(80)];
    first.ask().unwrap();
    net.forward(&[route(80, Transport::Tcp, &[2])]);
    assert_eq!(first.ask().unwrap().0, net.nodes[0], "an established flow stays");
    assert_eq!(second.ask().unwrap().0, net.nodes[0], "it was established without data");
    let mut third = net.connected(80);
    assert_eq!(third.ask().unwrap().0, net.nodes[1], "a new flow follows");

    let flows = |transport, target| Ended { address: BALANCER, port: 80, transport, target };
    assert_eq!(net.end(flows(Transport::Udp, Some(target(1)))), 0);
    assert_eq!(net.end(Ended { port: 81, ..flows(Transport::Tcp, Some(target(1))) }), 0);
    assert_eq!(net.end(flows(Transport::Tcp, Some(target(1)))), 2);
    for flow in [&mut first, &mut second] {
        assert_eq!(flow.ask().unwrap_err(), ErrorKind::ConnectionReset);
    }
    third.ask().unwrap();
    assert_eq!(net.end(flows(Transport::Tcp, None)), 1);
    assert_eq!(third.ask().unwrap_err(), ErrorKind::ConnectionReset);
}

#[test]
fn client_that_was_reset_uses_its_port_again_for_another_target() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("g");
    net.forward(&[route(80, Transport::Tcp, &[1])]);
    let mut flow = net.connected(80);
    flow.ask().unwrap();
    let own = flow.stream.local_addr().unwrap();
    let reject = format!("add rule ip t input tcp dport {NODE_PORT} reject with tcp reset");
    let chain = "add table ip t; add chain ip t input { type filter hook input priority 0; }";
    sh(&net.nodes[0], &format!("nft '{chain}; {reject}'"));
    assert_eq!(flow.ask().unwrap_err(), ErrorKind::ConnectionReset);
    net.forward(&[route(80, Transport::Tcp, &[2])]);
    thread::sleep(Duration::from_millis(1_500));
    assert_eq!(net.connect_from(own).ask().unwrap().0, net.nodes[1]);
}

#[test]
fn port_without_listener_or_receivers_is_silent() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let net = Net::new("e");
    net.forward(&[route(80, Transport::Tcp, &[]), route(82, Transport::Tcp, &[1])]);
    net.connected(82);
    for port in [80, 81] {
        let to = SocketAddr::from((BALANCER, port));
        let failed = in_netns(&net.client, || TcpStream::connect_timeout(&to, SILENCE)).unwrap();
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::TimedOut, "port {port}");
    }
}

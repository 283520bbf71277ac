// SPDX-License-Identifier: Apache-2.0
//! The loss meter against real packets: a client and an echo server in network namespaces, faults by nftables.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use steerage_e2e::cluster::Host;
use steerage_e2e::meter::client::{Asker, Ending, Observed, connect, hold};
use steerage_e2e::meter::loss::{LossKind, Measurement};
use steerage_e2e::meter::measure;
use steerage_lab::{in_netns, netns};
use steerage_requirements::requires;

const PORT: u16 = 80;
/// Never answers, and never refuses.
const SILENT: u16 = 82;
/// Answers with other bytes than it was sent.
const LYING: u16 = 83;
/// Resets a connection once a request has come.
const RESETTING: u16 = 84;
/// Reads a request, answers it, and ends the connection.
const LEAVING: u16 = 85;

/// Two namespaces with a link between them. Both go with this.
struct Link {
    client: Host,
    server: String,
}

impl Link {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("meter{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let [client, server] = ["client", "server"].map(|end| format!("{prefix}-{end}"));
        for end in [&client, &server] {
            netns::create(end, false).unwrap();
            sh(end, "ip link set lo up");
        }
        sh(&client, &format!("ip link add eth0 type veth peer name eth0 netns /run/netns/{server}"));
        for (end, number) in [(&client, 1), (&server, 2)] {
            sh(
                end,
                &format!(
                    "ip addr add 10.9.0.{number}/24 dev eth0; ip addr add fd09::{number}/64 dev eth0 nodad; ip link set eth0 up"
                ),
            );
        }
        // A second server's address.
        sh(&server, "ip addr add 10.9.0.3/24 dev eth0");
        serve(&server);
        let client = Host {
            name: "client".into(),
            netns: client,
            ipv4: "10.9.0.1".parse().unwrap(),
            ipv6: "fd09::1".parse().unwrap(),
        };
        Self { client, server }
    }

    fn measure(&self, work: impl AsyncFnOnce() -> anyhow::Result<Observed> + Send) -> Measurement {
        let servers = ["10.9.0.2", "10.9.0.3", "fd09::2"].map(|address| address.parse().unwrap());
        measure(&self.client, &servers, work).unwrap()
    }

    fn connections(&self, to: SocketAddr, count: usize) -> Measurement {
        self.measure(async || {
            let connections =
                stream::iter(0..count).map(|_| connect(to)).buffer_unordered(16).try_collect().await?;
            Ok(Observed { connections, ..Observed::default() })
        })
    }

    fn datagrams(&self, servers: &[SocketAddr], count: usize) -> Measurement {
        let from: IpAddr =
            if servers[0].is_ipv4() { self.client.ipv4.into() } else { self.client.ipv6.into() };
        self.measure(async || {
            let mut datagrams = Vec::new();
            for server in servers.iter().cycle().take(count) {
                let asker = Asker::bind(from).await?;
                datagrams.push(asker.ask(*server, Duration::from_millis(200)).await?);
            }
            Ok(Observed { datagrams, ..Observed::default() })
        })
    }

    /// Filters what comes to the server, after the client's capture has seen it.
    fn fault(&self, rules: &str) {
        sh(
            &self.server,
            &format!(
                "nft 'table ip fault {{ chain in {{ type filter hook prerouting priority -400; {rules} }}; }}'"
            ),
        );
    }

    /// How many packets the first counter of the fault counted.
    fn counted(&self) -> usize {
        let listed = sh(&self.server, "nft list table ip fault");
        let mut words = listed.split_whitespace().skip_while(|word| *word != "packets");
        words.nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = netns::delete(&self.client.netns);
        let _ = netns::delete(&self.server);
    }
}

fn sh(netns: &str, command: &str) -> String {
    let output = in_netns(netns, || Command::new("sh").args(["-ec", command]).output().unwrap()).unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The echo server, and its misbehaving neighbours. Their threads live as long as the process.
fn serve(netns: &str) {
    let listen = |port: u16| in_netns(netns, || TcpListener::bind(("::", port)).unwrap()).unwrap();
    let behave = |port: u16, answer: fn(TcpStream, String)| {
        let listener = listen(port);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                thread::spawn(move || converse(stream, answer));
            }
        });
    };
    behave(PORT, |mut stream, text| {
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    });
    behave(LYING, |mut stream, text| {
        let text = text.replace("steerage", "steerags");
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    });
    behave(RESETTING, |stream, _| {
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        let _ = socket2::SockRef::from(&stream).shutdown(std::net::Shutdown::Read);
        drop(stream);
    });
    behave(LEAVING, |mut stream, text| {
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    for address in ["10.9.0.2", "10.9.0.3", "fd09::2"] {
        let address: IpAddr = address.parse().unwrap();
        let socket = in_netns(netns, || UdpSocket::bind((address, PORT)).unwrap()).unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 256];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        });
    }
}

fn converse(mut stream: TcpStream, answer: fn(TcpStream, String)) {
    let mut request = Vec::new();
    let mut buffer = [0; 512];
    loop {
        match stream.read(&mut buffer) {
            Ok(length) if length > 0 => request.extend_from_slice(&buffer[..length]),
            _ => return,
        }
        if !request.ends_with(b"\r\n\r\n") {
            continue;
        }
        let head = String::from_utf8(std::mem::take(&mut request)).unwrap();
        let text = head.split(['=', ' ']).nth(2).unwrap().to_owned();
        let last = head.contains("Connection: close");
        answer(stream.try_clone().unwrap(), text);
        if last {
            return;
        }
    }
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

#[track_caller]
fn assert_lost(measured: &Measurement, expected: &[(LossKind, usize)]) {
    assert_eq!(measured.counts(), expected.iter().copied().collect::<BTreeMap<_, _>>(), "{measured:?}");
}

#[test]
fn meter_reports_nothing_without_a_fault() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    for address in ["10.9.0.2", "fd09::2"] {
        let measured = link.connections(at(address, PORT), 500);
        assert_lost(&measured, &[]);
        assert_eq!((measured.connections, measured.exchanges, measured.failed), (500, 500, 0));
        assert!(measured.slowest_handshake > Duration::ZERO);
        let measured = link.datagrams(&[at(address, PORT)], 500);
        assert_lost(&measured, &[]);
        assert_eq!(measured.datagrams, 500);
    }
}

#[test]
fn meter_reports_the_one_syn_of_ten_thousand_that_is_dropped() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    link.fault("tcp flags & (syn|ack) == syn numgen inc mod 10000 == 5000 counter drop;");
    let measured = link.connections(at("10.9.0.2", PORT), 10_000);
    assert_eq!(link.counted(), 1);
    assert_lost(&measured, &[(LossKind::SynRetransmitted, 1)]);
    assert_eq!(measured.failed, 0, "by the client's own view nothing happened");
}

#[test]
fn meter_reports_answers_from_the_wrong_one_of_two_servers() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    link.fault(
        "ip daddr 10.9.0.2 udp dport 80 counter ip daddr set 10.9.0.3 accept;
         ip daddr 10.9.0.3 udp dport 80 counter ip daddr set 10.9.0.2 accept;",
    );
    let measured = link.datagrams(&[at("10.9.0.2", PORT), at("10.9.0.3", PORT)], 40);
    assert_eq!(link.counted(), 20);
    assert_lost(&measured, &[(LossKind::WrongSource, 40)]);
}

#[test]
fn meter_reports_each_fault_of_a_connection_with_its_kind() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    assert_lost(&link.connections(at("10.9.0.2", 81), 20), &[(LossKind::ConnectionRefused, 20)]);
    assert_lost(&link.connections(at("10.9.0.2", RESETTING), 20), &[(LossKind::UnexpectedReset, 20)]);
    assert_lost(&link.connections(at("10.9.0.2", LYING), 20), &[(LossKind::BytesChanged, 20)]);
    link.fault(&format!("tcp dport {SILENT} drop;"));
    assert_lost(&link.connections(at("10.9.0.2", SILENT), 3), &[(LossKind::SynUnanswered, 3)]);
}

#[test]
fn meter_reports_dropped_data_and_dropped_datagrams() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    // Of each connection the first segment with data, by its length.
    link.fault("tcp dport 80 ip length > 100 numgen inc mod 10 == 3 counter drop; udp dport 80 numgen inc mod 10 == 3 drop;");
    let measured = link.connections(at("10.9.0.2", PORT), 45);
    assert_lost(&measured, &[(LossKind::DataRetransmitted, link.counted())]);
    assert_lost(&link.datagrams(&[at("10.9.0.2", PORT)], 40), &[(LossKind::DatagramUnanswered, 4)]);
}

#[test]
fn server_that_ends_a_held_connection_between_two_requests_costs_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let measured = link.measure(async || {
        let to = at("10.9.0.2", LEAVING);
        let connection = hold(to, Duration::from_millis(50), &|| false).await?;
        assert_eq!(connection.ending, Ending::ClosedByServer);
        Ok(Observed { connections: vec![connection], ..Observed::default() })
    });
    assert_lost(&measured, &[]);
    assert_eq!((measured.closed_by_server, measured.failed), (1, 0));
}

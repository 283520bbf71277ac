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
use steerage_lab::{in_netns, netns};
use steerage_meter::asker::Asker;
use steerage_meter::client::{Ending, Observed, Pace, Target, connect, hold};
use steerage_meter::loss::{LossKind, Measurement};
use steerage_meter::{Source, measure};
use steerage_requirements::requires;
use tokio::sync::watch;

const PORT: u16 = 80;
/// Never answers, and never refuses.
const SILENT: u16 = 82;
/// Answers with other bytes than it was sent.
const LYING: u16 = 83;
/// Says its name, and resets the connection once another request has come.
const RESETTING: u16 = 84;
/// Says its name, answers one request, and ends the connection.
const LEAVING: u16 = 85;
/// Answers datagrams [`LATE`] after they came.
const SLOW: u16 = 86;
/// Later than the client waits.
const LATE: Duration = Duration::from_millis(300);
/// How long the client waits for such an answer.
const IMPATIENCE: Duration = Duration::from_millis(200);
/// How long the client waits for other answers by datagram: only one that is lost takes as long.
const PATIENCE: Duration = Duration::from_secs(4);
/// How often a test is tried on a machine that is busy now and then.
const ATTEMPTS: usize = 6;
/// Answers that were sent [`LATE`].
static LATE_ANSWERS: AtomicU32 = AtomicU32::new(0);

/// Two namespaces, and one with a bridge between them. All go with this.
struct Link {
    client: Source,
    bridge: String,
    server: String,
}

impl Link {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("meter{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let [client, bridge, server] = ["client", "bridge", "server"].map(|part| format!("{prefix}-{part}"));
        for part in [&client, &bridge, &server] {
            netns::create(part, false).unwrap();
            sh(part, "ip link set lo up");
        }
        sh(&bridge, "ip link add bridge type bridge forward_delay 0 mcast_snooping 0; ip link set bridge up");
        for (end, port, number) in [(&client, "client", 1), (&server, "server", 2)] {
            sh(
                &bridge,
                &format!(
                    "ip link add {port} type veth peer name eth0 netns /run/netns/{end}; ip link set {port} master bridge up"
                ),
            );
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
        let addresses = ["10.9.0.1", "fd09::1"].map(|address| address.parse().unwrap());
        let client = Source { netns: client, addresses: addresses.to_vec() };
        // What is sent before the neighbours know each other waits for a second.
        for address in ["10.9.0.2", "10.9.0.3", "fd09::2"] {
            in_netns(&client.netns, || TcpStream::connect(at(address, PORT)).unwrap()).unwrap();
        }
        Self { client, bridge, server }
    }

    fn measure(&self, work: impl AsyncFnOnce() -> anyhow::Result<Observed> + Send) -> Measurement {
        let servers = ["10.9.0.2", "10.9.0.3", "fd09::2"].map(|address| address.parse().unwrap());
        measure(&self.client, &servers, work).unwrap()
    }

    fn connections(&self, to: SocketAddr, count: usize) -> Measurement {
        let to = target(to);
        self.measure(async || {
            let connections =
                stream::iter(0..count).map(|_| connect(None, &to)).buffer_unordered(16).try_collect().await?;
            Ok(Observed { connections, ..Observed::default() })
        })
    }

    /// One connection after the other.
    fn connections_in_turn(&self, to: SocketAddr, count: usize) -> Measurement {
        let to = target(to);
        self.measure(async || {
            let mut connections = Vec::new();
            for _ in 0..count {
                connections.push(connect(None, &to).await?);
            }
            Ok(Observed { connections, ..Observed::default() })
        })
    }

    fn datagrams(&self, servers: &[SocketAddr], count: usize) -> Measurement {
        let from = self.client.addresses[usize::from(servers[0].is_ipv6())];
        self.measure(async || {
            let mut datagrams = Vec::new();
            for server in servers.iter().cycle().take(count) {
                let asker = Asker::bind(from).await?;
                datagrams.push(asker.ask(*server, PATIENCE).await?);
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

    /// Filters what the client or the server sends, between the two: a sender notices when its own host drops a packet.
    fn fault_between(&self, sender: &str, rules: &str) {
        sh(
            &self.bridge,
            &format!(
                "nft 'table netdev fault {{ chain {sender} {{ type filter hook ingress device {sender} priority 0; {rules} }}; }}'"
            ),
        );
    }

    /// How many packets the first counter of the fault counted.
    fn counted(&self) -> usize {
        counted(&sh(&self.server, "nft list table ip fault"))
    }

    fn counted_between(&self) -> usize {
        counted(&sh(&self.bridge, "nft list table netdev fault"))
    }
}

fn counted(listed: &str) -> usize {
    let mut words = listed.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).unwrap().parse().unwrap()
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = netns::delete(&self.client.netns);
        let _ = netns::delete(&self.bridge);
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
    behave(PORT, |stream, text| say(stream, &text));
    behave(LYING, |stream, text| say(stream, &text.replace("steerage", "steerags")));
    behave(RESETTING, |stream, _| {
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        let _ = socket2::SockRef::from(&stream).shutdown(std::net::Shutdown::Read);
        drop(stream);
    });
    behave(LEAVING, |stream, text| {
        // Answer and end leave in one segment, also where this thread has no core in between.
        socket2::SockRef::from(&stream).set_tcp_cork(true).unwrap();
        say(stream.try_clone().unwrap(), &text);
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    for (address, port, after) in [
        ("10.9.0.2", PORT, Duration::ZERO),
        ("10.9.0.3", PORT, Duration::ZERO),
        ("fd09::2", PORT, Duration::ZERO),
        ("10.9.0.2", SLOW, LATE),
    ] {
        let address: IpAddr = address.parse().unwrap();
        let socket = in_netns(netns, || UdpSocket::bind((address, port)).unwrap()).unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 256];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                thread::sleep(after);
                let _ = socket.send_to(&buffer[..length], from);
                LATE_ANSWERS.fetch_add(u32::from(port == SLOW), Ordering::Relaxed);
            }
        });
    }
}

/// In one segment.
fn say(mut stream: TcpStream, text: &str) {
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    let _ = stream.write_all(answer.as_bytes());
}

/// How the names of a server's backends begin, as those of a Service's pods do.
fn backends(server: IpAddr) -> &'static str {
    if server == IpAddr::from([10, 9, 0, 3]) { "other-" } else { "echo-" }
}

fn target(address: SocketAddr) -> Target {
    Target { address, datagrams: address, backends: backends(address.ip()).to_owned() }
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
        if head.starts_with("GET /hostname ") {
            let server = stream.local_addr().unwrap().ip().to_canonical();
            say(stream.try_clone().unwrap(), &format!("{}1", backends(server)));
            continue;
        }
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

/// Fails unless exactly what an attempt says is reported. An attempt in which something else was slow, and nothing more, is repeated: a
/// machine that is busy for 200 ms delays answers, and the meter is right to say so. Where it stands still for longer, clients give up, too.
#[track_caller]
fn reports(mut attempt: impl FnMut() -> (Measurement, Vec<(LossKind, usize)>)) -> Measurement {
    for left in (0..ATTEMPTS).rev() {
        let (measured, expected) = attempt();
        let (counts, expected) = (measured.counts(), expected.into_iter().collect::<BTreeMap<_, _>>());
        if counts == expected {
            return measured;
        }
        let of = |kind: &LossKind| expected.get(kind).copied().unwrap_or(0);
        let may_be_more = |kind: &LossKind| kind.is_slow() || *kind == LossKind::BytesMissing;
        let more =
            counts.iter().all(|(kind, count)| *count == of(kind) || may_be_more(kind) && *count > of(kind));
        let was_slow = counts.iter().any(|(kind, count)| kind.is_slow() && *count > of(kind));
        let only_slow = more && was_slow && expected.keys().all(|kind| counts.contains_key(kind));
        let busy = only_slow || measured.retransmissions.spurious > 0;
        assert!(busy && left > 0, "not {expected:?}: {measured:?}");
    }
    unreachable!("the last attempt returns or fails")
}

#[test]
fn meter_reports_nothing_without_a_fault() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    for address in ["10.9.0.2", "fd09::2"] {
        let measured = reports(|| (link.connections(at(address, PORT), 500), vec![]));
        assert_eq!((measured.connections, measured.exchanges, measured.failed.len()), (500, 1000, 0));
        assert!(measured.slowest_handshake > Duration::ZERO);
        let measured = reports(|| (link.datagrams(&[at(address, PORT)], 500), vec![]));
        assert_eq!(measured.datagrams, 500);
    }
}

#[test]
fn meter_reports_the_one_syn_of_ten_thousand_that_is_dropped() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let measured = reports(|| {
        let link = Link::new();
        link.fault("tcp flags & (syn|ack) == syn numgen inc mod 10000 == 5000 counter drop;");
        let measured = link.connections(at("10.9.0.2", PORT), 10_000);
        assert_eq!(link.counted(), 1);
        (measured, vec![(LossKind::SynRetransmitted, 1)])
    });
    assert_eq!(measured.failed, [], "by the client's own view nothing happened");
}

#[test]
fn meter_reports_answers_from_the_wrong_one_of_two_servers() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    reports(|| {
        let link = Link::new();
        link.fault(
            "ip daddr 10.9.0.2 udp dport 80 counter ip daddr set 10.9.0.3 accept;
             ip daddr 10.9.0.3 udp dport 80 counter ip daddr set 10.9.0.2 accept;",
        );
        let measured = link.datagrams(&[at("10.9.0.2", PORT), at("10.9.0.3", PORT)], 40);
        assert_eq!(link.counted(), 20);
        (measured, vec![(LossKind::WrongSource, 40)])
    });
}

#[test]
fn meter_reports_each_fault_of_a_connection_with_its_kind() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    for (port, kind) in [
        (81, LossKind::ConnectionRefused),
        (RESETTING, LossKind::UnexpectedReset),
        (LYING, LossKind::BytesChanged),
    ] {
        reports(|| (link.connections(at("10.9.0.2", port), 20), vec![(kind, 20)]));
    }
    link.fault(&format!("tcp dport {SILENT} drop;"));
    reports(|| (link.connections(at("10.9.0.2", SILENT), 3), vec![(LossKind::SynUnanswered, 3)]));
}

#[test]
fn meter_reports_dropped_data_and_dropped_datagrams() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let faulty = || {
        let link = Link::new();
        // Of each connection the two requests, by their length.
        link.fault("tcp dport 80 ip length > 100 numgen inc mod 10 == 3 counter drop; udp dport 80 numgen inc mod 10 == 3 drop;");
        link
    };
    reports(|| {
        let link = faulty();
        let measured = link.connections(at("10.9.0.2", PORT), 45);
        (measured, vec![(LossKind::DataRetransmitted, link.counted())])
    });
    reports(|| (faulty().datagrams(&[at("10.9.0.2", PORT)], 40), vec![(LossKind::DatagramUnanswered, 4)]));
}

#[test]
fn server_that_ends_a_held_connection_between_two_requests_costs_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    let measured = reports(|| {
        let measured = link.measure(async || {
            let to = at("10.9.0.2", LEAVING);
            let (_told, mut stop) = watch::channel(false);
            let connection =
                hold(None, &target(to), Pace::Every(Duration::from_millis(50)), &mut stop).await?;
            assert_eq!(connection.ending, Ending::ClosedByServer);
            Ok(Observed { connections: vec![connection], ..Observed::default() })
        });
        (measured, vec![])
    });
    assert_eq!((measured.closed_by_server, measured.failed.len()), (1, 0));
}

#[test]
fn meter_reports_the_one_answer_that_is_lost() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    // Of a connection's two answers the first stands alone, and its first repetition comes just when the meter begins to call it slow:
    // this is dropped, too. The FIN after the second shows at once that the answer is missing.
    for (dropped, kind) in [(4..6, LossKind::SlowAnswer), (5..6, LossKind::AnswerRetransmitted)] {
        let attempt = || {
            let link = Link::new();
            let numbers = dropped.clone().map(|number| number.to_string()).collect::<Vec<_>>().join(", ");
            let rule =
                format!("tcp sport 80 ip length > 70 numgen inc mod 100000 {{ {numbers} }} counter drop;");
            link.fault_between("server", &rule);
            let measured = link.connections_in_turn(at("10.9.0.2", PORT), 20);
            assert_eq!(link.counted_between(), dropped.len());
            (measured, vec![(kind, 1)])
        };
        let is_timed_right = |_| {
            let measured = reports(attempt);
            assert_eq!(measured.failed, [], "by the client's own view nothing happened");
            (measured.slowest_answer > Duration::from_millis(200)) == (kind == LossKind::SlowAnswer)
        };
        assert!((0..ATTEMPTS).any(is_timed_right), "{kind}");
    }
}

#[test]
fn meter_reports_the_one_syn_ack_that_is_dropped() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    reports(|| {
        let link = Link::new();
        link.fault_between(
            "server",
            "tcp sport 80 tcp flags & (syn|ack) == (syn|ack) numgen inc mod 100000 == 5 counter drop;",
        );
        let measured = link.connections(at("10.9.0.2", PORT), 20);
        assert_eq!(link.counted_between(), 1);
        // Client and server send again after the same second, and either may be the first.
        let kinds = [LossKind::SynRetransmitted, LossKind::SlowHandshake];
        let kind = kinds.into_iter().find(|kind| measured.counts().contains_key(kind));
        let kind = kind.unwrap_or(LossKind::SynRetransmitted);
        (measured, vec![(kind, 1)])
    });
}

#[test]
fn meter_reports_connections_that_another_services_backend_serves() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    // The client sees the address that it asked in every packet.
    for (sender, end, port) in [("client", "daddr", "dport"), ("server", "saddr", "sport")] {
        link.fault_between(
            sender,
            &format!(
                "ip {end} 10.9.0.2 tcp {port} 80 ip {end} set 10.9.0.3 accept;
                 ip {end} 10.9.0.3 tcp {port} 80 ip {end} set 10.9.0.2 accept;"
            ),
        );
    }
    for server in ["10.9.0.2", "10.9.0.3"] {
        reports(|| (link.connections(at(server, PORT), 20), vec![(LossKind::WrongBackend, 20)]));
    }
}

#[test]
fn meter_reports_datagrams_that_were_answered_untranslated() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    // Neither a server that the client asks, nor one that it names to the capture.
    sh(&link.server, "ip addr add 10.9.0.4/24 dev eth0; ip addr add fd09::4/64 dev eth0 nodad");
    link.fault_between(
        "server",
        "ip saddr 10.9.0.2 udp sport 80 ip saddr set 10.9.0.4; ip6 saddr fd09::2 udp sport 80 ip6 saddr set fd09::4;",
    );
    for server in ["10.9.0.2", "fd09::2"] {
        reports(|| (link.datagrams(&[at(server, PORT)], 20), vec![(LossKind::WrongSource, 20)]));
    }
}

#[test]
fn meter_reports_a_datagram_that_is_answered_after_its_client_gave_up() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let link = Link::new();
    reports(|| {
        let before = LATE_ANSWERS.load(Ordering::Relaxed);
        let measured = link.measure(async || {
            let asker = Asker::bind(link.client.addresses[0]).await?;
            let datagram = asker.ask(at("10.9.0.2", SLOW), IMPATIENCE).await?;
            // The answer comes while this still listens.
            while LATE_ANSWERS.load(Ordering::Relaxed) == before {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            Ok(Observed { datagrams: vec![datagram], ..Observed::default() })
        });
        (measured, vec![(LossKind::DatagramLate, 1)])
    });
}

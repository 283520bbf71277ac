// SPDX-License-Identifier: Apache-2.0
//! The nodes' servers and the client's traffic. All of them are threads of this process.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::IpBindAddressNoPort;
use socket2::{Domain, SockRef, Socket, Type};
use steerage_model::Family;

use crate::edge_bed::addresses::{any, client};
use crate::edge_bed::{Bed, CHECK, FAMILIES, NODES, PORT, Size, node_netns};
use crate::traffic::listen_at;

/// A connection that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Threads of each node that serve connections, one at a time each: a proxy keeps some open a while longer than the client.
const SERVERS: usize = 8;
/// Flows of datagrams.
const FLOWS: usize = 64;

/// The nodes' servers. They run until the process ends.
#[derive(Debug)]
pub struct Servers {
    accepted: Vec<Arc<AtomicU64>>,
    /// Nobody reads them: the kernel drops what has no room, which costs least.
    #[allow(dead_code, reason = "open as long as the servers run")]
    datagrams: Vec<UdpSocket>,
}

impl Servers {
    /// Starts them.
    pub fn start(bed: &Bed) -> Result<Self> {
        let mut servers = Self { accepted: Vec::new(), datagrams: Vec::new() };
        for node in 0..NODES {
            let accepted = Arc::<AtomicU64>::default();
            servers.accepted.push(Arc::clone(&accepted));
            for family in FAMILIES {
                let (listeners, check, datagrams) = bed.inside(&node_netns(node), || -> Result<_> {
                    let at = |port| SocketAddr::new(any(family), port);
                    let listeners: Result<Vec<_>> = (0..SERVERS).map(|_| listen_at(at(PORT))).collect();
                    Ok((listeners?, listen_at(at(CHECK))?, receive_at(at(PORT))?))
                })??;
                servers.datagrams.push(datagrams);
                for listener in listeners {
                    let accepted = Arc::clone(&accepted);
                    thread::spawn(move || serve(&listener, &accepted));
                }
                thread::spawn(move || serve_checks(&check));
            }
        }
        Ok(servers)
    }

    /// Requests that each node has served.
    pub fn served(&self) -> Vec<u64> {
        self.accepted.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }
}

/// Receives datagrams at an address, of its family alone.
pub(crate) fn receive_at(address: SocketAddr) -> Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket.into())
}

fn serve(listener: &TcpListener, served: &AtomicU64) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut byte = [0; 1];
        let _ = stream.set_read_timeout(Some(TIMEOUT));
        if stream.read_exact(&mut byte).is_err() {
            continue;
        }
        // First: whoever has the answer finds it counted.
        served.fetch_add(1, Ordering::SeqCst);
        if stream.write_all(&byte).is_ok() {
            // The client closes first, so that no port of a node waits.
            let _ = stream.read(&mut byte);
        }
    }
}

fn serve_checks(listener: &TcpListener) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let _ = stream.set_read_timeout(Some(TIMEOUT));
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    }
}

/// Connects from one of the client's addresses, sends and receives one byte, and resets the connection, so that no port of the
/// client waits.
pub fn exchange(to: SocketAddr, from: u8) -> Result<Duration> {
    let begun = Instant::now();
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    // The port is chosen with the connection: as many as there are for each destination.
    setsockopt(&socket, IpBindAddressNoPort, &true)?;
    socket.bind(
        &SocketAddr::new(client(Family::of(to.ip()), u16::from(from) % Size::OF_COMPARISON.clients), 0)
            .into(),
    )?;
    socket.connect_timeout(&to.into(), TIMEOUT).with_context(|| format!("connecting to {to}"))?;
    let mut stream: TcpStream = socket.into();
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    let mut byte = [7; 1];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte).with_context(|| format!("no byte back from {to}"))?;
    Ok(begun.elapsed())
}

/// The result of a round of requests.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Time of each request that was answered.
    pub times: Vec<Duration>,
    /// Requests that failed.
    pub failed: u64,
    /// The last error.
    pub error: Option<String>,
    /// Length of the round.
    pub took: Duration,
}

impl Round {
    /// A round in which something was done, and nearly nothing failed.
    pub fn checked(self) -> Result<Self> {
        let error = self.error.as_deref().unwrap_or("no error");
        ensure!(!self.times.is_empty(), "no request was answered: {error}");
        let failed = usize::try_from(self.failed)?;
        ensure!(
            failed * 100 <= self.times.len(),
            "{failed} of {} requests failed: {error}",
            self.times.len() + failed
        );
        Ok(self)
    }
}

/// Requests to these addresses in turn, each on a new connection, from as many threads of the client.
pub fn requests(bed: &Bed, to: &[IpAddr], threads: u8, time: Duration) -> Result<Round> {
    let begun = Instant::now();
    let worker = |thread: u8| {
        bed.inside("client", move || {
            let mut round = Round::default();
            for (number, address) in to.iter().cycle().skip(usize::from(thread) * 7).enumerate() {
                if begun.elapsed() >= time {
                    break;
                }
                #[allow(clippy::cast_possible_truncation, reason = "any of the addresses will do")]
                match exchange(SocketAddr::new(*address, PORT), thread.wrapping_add(number as u8)) {
                    Ok(took) => round.times.push(took),
                    Err(error) => {
                        (round.failed, round.error) = (round.failed + 1, Some(format!("{error:#}")));
                    }
                }
            }
            round
        })
    };
    let rounds: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || worker(thread))).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    let mut all = Round { took: begun.elapsed(), ..Round::default() };
    for round in rounds {
        let round = round?;
        all.times.extend(round.times);
        (all.failed, all.error) = (all.failed + round.failed, round.error.or(all.error));
    }
    Ok(all)
}

/// Datagrams of a round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Datagrams {
    /// That the client sent.
    pub sent: u64,
    /// That arrived at the nodes' sockets.
    pub arrived: u64,
    /// How long it sent.
    pub took: Duration,
}

/// Datagrams to these addresses, from one thread: as fast as it can, or so many per second.
pub fn datagrams(bed: &Bed, to: &[IpAddr], time: Duration, rate: Option<u32>) -> Result<Datagrams> {
    let before = arrived(bed)?;
    let (sent, took) = bed.inside("client", || -> Result<_> {
        let mut sockets = Vec::new();
        for (flow, address) in (0..FLOWS).zip(to.iter().cycle()) {
            let socket =
                UdpSocket::bind((any(Family::of(*address)), 0)).with_context(|| format!("flow {flow}"))?;
            socket.connect((*address, PORT))?;
            sockets.push(socket);
        }
        let (begun, mut sent) = (Instant::now(), 0_u64);
        while begun.elapsed() < time {
            for socket in &sockets {
                // Refused where a node has said so for an earlier one.
                sent += u64::from(socket.send(&[7; 18]).is_ok());
            }
            if let Some(rate) = rate {
                let due = begun + Duration::from_secs_f64(f64::from(u32::try_from(sent)?) / f64::from(rate));
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
        Ok((sent, begun.elapsed()))
    })??;
    // What is still in queues.
    thread::sleep(Duration::from_millis(50));
    Ok(Datagrams { sent, arrived: arrived(bed)?.saturating_sub(before), took })
}

/// Datagrams that the nodes' kernels had for a socket, also without room in it.
fn arrived(bed: &Bed) -> Result<u64> {
    let mut sum = 0;
    for node in 0..NODES {
        let text = bed.inside(&node_netns(node), || {
            let read = |name| std::fs::read_to_string(format!("/proc/thread-self/net/{name}"));
            Ok::<_, std::io::Error>([read("snmp")?, read("snmp6")?])
        })??;
        let counts = udp_arrivals(&text[0]).zip(udp6_arrivals(&text[1]));
        let (v4, v6) = counts.context("the kernel counts no datagrams")?;
        sum += v4 + v6;
    }
    Ok(sum)
}

/// `InDatagrams` counts what was read, `RcvbufErrors` what had no room. What waits in a socket is the same before and after.
fn udp_arrivals(snmp: &str) -> Option<u64> {
    Some(snmp_counter(snmp, "Udp", "InDatagrams")? + snmp_counter(snmp, "Udp", "RcvbufErrors")?)
}

/// A counter of `/proc/net/snmp`, where names and values of a protocol stand in a line each.
pub(crate) fn snmp_counter(snmp: &str, protocol: &str, wanted: &str) -> Option<u64> {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(": "));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut both = names.split(' ').zip(values.split(' '));
    both.find(|(name, _)| *name == wanted)?.1.parse().ok()
}

/// The same of IPv6, whose counters stand in a line each.
fn udp6_arrivals(snmp6: &str) -> Option<u64> {
    let of = |wanted| {
        let mut lines = snmp6.lines().filter_map(|line| line.split_once(char::is_whitespace));
        lines.find(|(name, _)| *name == wanted)?.1.trim().parse::<u64>().ok()
    };
    Some(of("Udp6InDatagrams")? + of("Udp6RcvbufErrors")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_are_counted_with_those_without_room() {
        let text = "Ip: Forwarding\nIp: 1\nUdp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors\nUdp: 5 1 7 3 7\n";
        assert_eq!((udp_arrivals(text), udp_arrivals("Ip: x")), (Some(12), None));
        let text = "Ip6InReceives   \t9\nUdp6InDatagrams   \t5\nUdp6RcvbufErrors  \t7\n";
        assert_eq!((udp6_arrivals(text), udp6_arrivals("Udp6InDatagrams 5")), (Some(12), None));
    }

    #[test]
    fn round_fails_without_answers_and_with_many_failures() {
        let round = |answered: usize, failed| Round {
            times: vec![Duration::ZERO; answered],
            failed,
            ..Round::default()
        };
        assert!(round(100, 1).checked().is_ok());
        assert!(round(100, 2).checked().is_err() && round(0, 0).checked().is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The servers in pods, and the traffic of clients. One clock measures both ends.

use std::collections::BTreeMap;
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::errno::Errno;
use nix::libc::in_pktinfo;
use nix::sys::socket::sockopt::Ipv4PacketInfo;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt};
use socket2::{Domain, SockRef, Socket, Type};

use crate::objects::{Shape, Side, port, probe_addresses};
use crate::testbed::{At, Testbed};

/// A new connection that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A program on a busy machine may answer late, as while the kernel commits its rules.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
/// Time between two datagrams while waiting for the first one to arrive.
pub const PROBE_INTERVAL: Duration = Duration::from_micros(250);
/// Time between two requests to a health-check port.
const HEALTH_POLL: Duration = Duration::from_millis(1);
/// Threads that accept connections.
const ACCEPTORS: usize = 2;
/// Bytes in one write of the throughput measurement.
const CHUNK: usize = 128 * 1024;

/// The servers in the pods of a testbed. They run until the process ends.
#[derive(Debug)]
pub struct Pods {
    expected: Arc<Mutex<Option<Side>>>,
    arrivals: Receiver<Instant>,
    received: Arc<AtomicU64>,
    record: Arc<Mutex<Option<Vec<Instant>>>>,
}

impl Pods {
    /// Starts the servers.
    pub fn serve(testbed: &Testbed, shape: Shape) -> Result<Self> {
        let (echoes, sink, probes) = testbed.inside(At::Pods, || -> Result<_> {
            let echoes: Result<Vec<_>> = (0..ACCEPTORS).map(|_| listen(port::ECHO)).collect();
            // One socket for all endpoints: the time of an arrival must not depend on their number.
            let probes = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port::PROBE))?;
            setsockopt(&probes, Ipv4PacketInfo, &true)?;
            Ok((echoes?, listen(port::SINK)?, probes))
        })??;
        for listener in echoes {
            thread::spawn(move || echo_connections(&listener));
        }
        let received = Arc::<AtomicU64>::default();
        let count = Arc::clone(&received);
        thread::spawn(move || sink_connections(&sink, &count));
        let expected = Arc::<Mutex<Option<Side>>>::default();
        let record = Arc::<Mutex<Option<Vec<Instant>>>>::default();
        let (shared, (sender, arrivals)) = (Arc::clone(&expected), channel());
        let recording = Arc::clone(&record);
        let of = |side| probe_addresses(side, shape).into_iter().map(move |address| (address, side));
        let sides: BTreeMap<_, _> = of(Side::A).chain(of(Side::B)).collect();
        thread::spawn(move || record_arrivals(&probes, &sides, &shared, &recording, &sender));
        Ok(Self { expected, arrivals, received, record })
    }

    /// Records the arrival of the next datagram at this endpoint set of the probe Service.
    pub fn expect_packet(&self, side: Side) {
        while self.arrivals.try_recv().is_ok() {}
        if let Ok(mut expected) = self.expected.lock() {
            *expected = Some(side);
        }
    }

    /// The time of arrival of the expected datagram; `None` on timeout.
    pub fn first_packet(&self, within: Duration) -> Option<Instant> {
        self.arrivals.recv_timeout(within).ok()
    }

    /// Starts to record the times of all datagrams at the probe Service, from none, or ends it.
    pub fn record(&self, wanted: bool) {
        if let Ok(mut record) = self.record.lock() {
            *record = wanted.then(Vec::new);
        }
    }

    /// The times recorded so far.
    pub fn recorded(&self) -> Vec<Instant> {
        self.record.lock().ok().and_then(|record| record.clone()).unwrap_or_default()
    }

    /// Counter of the bytes that the sink has received.
    pub fn received_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.received)
    }
}

/// Listens on a port of all IPv4 addresses, beside others that do so too.
pub(crate) fn listen(port: u16) -> Result<TcpListener> {
    listen_at(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
}

/// Listens at an address, for its family alone, beside others that do so too.
pub(crate) fn listen_at(address: SocketAddr) -> Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

fn echo_connections(listener: &TcpListener) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut byte = [0; 1];
        let _ = stream.set_read_timeout(Some(TIMEOUT));
        let _ = stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte));
        // Waits until the client closes first, so that no TIME_WAIT stays on this side.
        let _ = stream.read(&mut byte);
    }
}

fn sink_connections(listener: &TcpListener, received: &AtomicU64) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut buffer = vec![0; CHUNK];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            received.fetch_add(length as u64, Ordering::Relaxed);
        }
    }
}

fn record_arrivals(
    probes: &UdpSocket,
    sides: &BTreeMap<Ipv4Addr, Side>,
    expected: &Mutex<Option<Side>>,
    record: &Mutex<Option<Vec<Instant>>>,
    arrivals: &Sender<Instant>,
) {
    while let Some(address) = receive(probes) {
        let now = Instant::now();
        let Some(side) = sides.get(&address) else { continue };
        if let Ok(mut record) = record.lock() {
            record.iter_mut().for_each(|times| times.push(now));
        }
        let Ok(mut expected) = expected.lock() else { return };
        if *expected == Some(*side) {
            *expected = None;
            if arrivals.send(now).is_err() {
                return;
            }
        }
    }
}

/// Waits for a datagram. Returns the address that it was sent to.
fn receive(socket: &UdpSocket) -> Option<Ipv4Addr> {
    let mut buffer = [0; 16];
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let mut space = nix::cmsg_space!(in_pktinfo);
    loop {
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty()) {
            Ok(message) => {
                return message.cmsgs().ok()?.find_map(|part| match part {
                    ControlMessageOwned::Ipv4PacketInfo(info) => {
                        Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)))
                    }
                    _ => None,
                });
            }
            Err(Errno::EINTR) => {}
            Err(_) => return None,
        }
    }
}

/// The least recently used source port. The node may still have a conntrack entry of a recent one, to an earlier endpoint.
fn next_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const PORTS: std::ops::RangeInclusive<u16> = 2048..=u16::MAX;
    let index = NEXT.fetch_add(1, Ordering::Relaxed) % u32::try_from(PORTS.len()).unwrap_or(1);
    u16::try_from(index).map_or(*PORTS.end(), |index| PORTS.start() + index)
}

/// Sends datagrams from the client, each from another port, until `stop`.
fn send_probes(testbed: &Testbed, to: SocketAddrV4, interval: Duration, stop: &AtomicBool) -> Result<()> {
    testbed.inside(At::Client, || {
        while !stop.load(Ordering::Relaxed) {
            let port = next_port();
            // Skips a port that is in use.
            let Ok(socket) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)) else { continue };
            // Ignores errors: the Service may be unreachable until it is programmed.
            let _ = socket.send_to(b"?", to);
            thread::sleep(interval);
        }
        Ok(())
    })?
}

/// Runs `work` while the client sends a datagram to `to` in every `interval`.
pub fn while_probing<T>(
    testbed: &Testbed,
    to: SocketAddrV4,
    interval: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| send_probes(testbed, to, interval, &stop));
        let done = work();
        stop.store(true, Ordering::Relaxed);
        match sender.join() {
            Ok(sent) => sent.and(done),
            Err(_) => bail!("the sender panicked"),
        }
    })
}

/// Requests a health-check port from the client until it returns this status. Returns the time of that response.
pub fn await_status(testbed: &Testbed, to: SocketAddrV4, status: u16, within: Duration) -> Result<Instant> {
    let begun = Instant::now();
    testbed.inside(At::Client, || {
        loop {
            let answer = get(to, "/healthz");
            let now = Instant::now();
            match answer {
                Ok((found, _)) if found == status => return Ok(now),
                other => ensure!(now - begun < within, "no {status} from {to} but {other:?}"),
            }
            thread::sleep(HEALTH_POLL);
        }
    })?
}

/// Sends an HTTP request from the calling thread's namespace. Returns status and body.
pub fn get(to: SocketAddrV4, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&to.into(), TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok()).context("no status")?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    Ok((status, body.unwrap_or_default()))
}

/// Connects, and sends and receives one byte. Returns the time to connect. The connection is reset, so that none stays in `TIME_WAIT`
/// on the client.
pub fn exchange(to: SocketAddrV4) -> Result<Duration> {
    let begun = Instant::now();
    let mut stream =
        TcpStream::connect_timeout(&to.into(), TIMEOUT).with_context(|| format!("connecting to {to}"))?;
    let connect_time = begun.elapsed();
    stream.set_read_timeout(Some(TIMEOUT))?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    let mut byte = [7; 1];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte).with_context(|| format!("no byte back from {to}"))?;
    Ok(connect_time)
}

/// The result of a round of new connections.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Time to connect, for each successful connection.
    pub connect_times: Vec<Duration>,
    /// Number of failed connections, and the last error.
    pub failed: (usize, Option<String>),
    /// Length of the round.
    pub time: Duration,
}

/// Opens connections from the client to `targets` in turn, with this many threads.
pub fn connect(testbed: &Testbed, targets: &[SocketAddrV4], threads: usize, time: Duration) -> Result<Round> {
    ensure!(!targets.is_empty(), "nothing to connect to");
    let begun = Instant::now();
    let rounds: Vec<Result<Round>> = thread::scope(|scope| {
        let worker = |first: usize| {
            testbed.inside(At::Client, || {
                let mut round = Round::default();
                for to in targets.iter().cycle().skip(first) {
                    if begun.elapsed() >= time {
                        break;
                    }
                    match exchange(*to) {
                        Ok(connect_time) => round.connect_times.push(connect_time),
                        Err(error) => round.failed = (round.failed.0 + 1, Some(format!("{error:#}"))),
                    }
                }
                round
            })
        };
        let workers: Vec<_> = (0..threads).map(|first| scope.spawn(move || worker(first))).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| bail!("a client panicked")))
            .collect()
    });
    let mut all = Round { time: begun.elapsed(), ..Round::default() };
    for round in rounds {
        let round = round?;
        all.connect_times.extend(round.connect_times);
        all.failed = (all.failed.0 + round.failed.0, round.failed.1.or(all.failed.1));
    }
    Ok(all)
}

/// Sends as fast as possible over one connection. Returns the received bits per second.
pub fn stream(testbed: &Testbed, pods: &Pods, to: SocketAddrV4, time: Duration) -> Result<f64> {
    let arrived = pods.received_bytes();
    testbed.inside(At::Client, || {
        let mut stream = TcpStream::connect_timeout(&to.into(), TIMEOUT)?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let chunk = vec![0; CHUNK];
        let send = |stream: &mut TcpStream, until: Instant| -> Result<()> {
            while Instant::now() < until {
                match stream.write(&chunk) {
                    Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error.into()),
                    _ => {}
                }
            }
            Ok(())
        };
        // Lets the window of the connection grow first.
        send(&mut stream, Instant::now() + time / 5)?;
        let (begun, before) = (Instant::now(), arrived.load(Ordering::Relaxed));
        send(&mut stream, begun + time)?;
        let (received, took) = (arrived.load(Ordering::Relaxed) - before, begun.elapsed());
        stream.shutdown(Shutdown::Both)?;
        ensure!(received > 0, "nothing arrived at {to}");
        #[allow(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
        Ok(received as f64 * 8.0 / took.as_secs_f64())
    })?
}

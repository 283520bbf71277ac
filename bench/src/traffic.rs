// SPDX-License-Identifier: Apache-2.0
//! The pods' servers and the clients' traffic. Times are the driver's own clock on both ends.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, SockRef, Socket, Type};

use crate::objects::{Side, port, probe_addresses};
use crate::world::{At, World};

/// A new connection that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two datagrams where the first one to arrive is timed.
pub const BEAT: Duration = Duration::from_micros(250);
/// Between two questions for health.
const ASK: Duration = Duration::from_millis(1);
/// Threads that take connections.
const ACCEPTORS: usize = 2;
/// Bytes written at once where much is sent.
const CHUNK: usize = 128 * 1024;

/// The servers in a world's pods. They run until the process ends.
#[derive(Debug)]
pub struct Pods {
    wanted: Arc<Mutex<Option<Side>>>,
    heard: Receiver<Instant>,
    taken: Arc<AtomicU64>,
}

impl Pods {
    /// Starts them.
    pub fn serve(world: &World) -> Result<Self> {
        let (echoes, sink, probes) = world.inside(At::Pods, || -> Result<_> {
            let echoes: Result<Vec<_>> = (0..ACCEPTORS).map(|_| listen(port::ECHO)).collect();
            let mut probes = Vec::new();
            for side in [Side::A, Side::B] {
                for address in probe_addresses(side) {
                    let socket =
                        UdpSocket::bind((address, port::PROBE)).context("the pods' addresses are missing")?;
                    socket.set_nonblocking(true)?;
                    probes.push((side, socket));
                }
            }
            Ok((echoes?, listen(port::SINK)?, probes))
        })??;
        for listener in echoes {
            thread::spawn(move || echo(&listener));
        }
        let taken = Arc::<AtomicU64>::default();
        let count = Arc::clone(&taken);
        thread::spawn(move || swallow(&sink, &count));
        let wanted = Arc::<Mutex<Option<Side>>>::default();
        let (shared, (hears, heard)) = (Arc::clone(&wanted), channel());
        thread::spawn(move || note(&probes, &shared, &hears));
        Ok(Self { wanted, heard, taken })
    }

    /// Notes the next datagram that reaches the probe's endpoints of this side.
    pub fn want(&self, side: Side) {
        while self.heard.try_recv().is_ok() {}
        if let Ok(mut wanted) = self.wanted.lock() {
            *wanted = Some(side);
        }
    }

    /// When it came; `None` when it did not come in time.
    pub fn heard(&self, within: Duration) -> Option<Instant> {
        self.heard.recv_timeout(within).ok()
    }

    /// The bytes that the sink has taken so far.
    pub fn taken(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken)
    }
}

fn listen(port: u16) -> Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

fn echo(listener: &TcpListener) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut byte = [0; 1];
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte));
        // Until the client has gone, so that nothing of the connection is left on this side.
        let _ = stream.read(&mut byte);
    }
}

fn swallow(listener: &TcpListener, taken: &AtomicU64) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut buffer = vec![0; CHUNK];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            taken.fetch_add(length as u64, Ordering::Relaxed);
        }
    }
}

fn note(probes: &[(Side, UdpSocket)], wanted: &Mutex<Option<Side>>, hears: &Sender<Instant>) {
    let mut files: Vec<_> =
        probes.iter().map(|(_, socket)| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
    let mut buffer = [0; 16];
    while poll(&mut files, PollTimeout::NONE).is_ok() {
        let now = Instant::now();
        for (side, socket) in probes {
            let mut any = false;
            while socket.recv(&mut buffer).is_ok() {
                any = true;
            }
            let Ok(mut wanted) = wanted.lock() else { return };
            if any && *wanted == Some(*side) {
                *wanted = None;
                if hears.send(now).is_err() {
                    return;
                }
            }
        }
    }
}

/// A port that was not used for the longest time: one that the node still tracks would lead to an earlier endpoint.
fn next_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const PORTS: std::ops::RangeInclusive<u16> = 2048..=u16::MAX;
    let index = NEXT.fetch_add(1, Ordering::Relaxed) % u32::try_from(PORTS.len()).unwrap_or(1);
    u16::try_from(index).map_or(*PORTS.end(), |index| PORTS.start() + index)
}

/// Sends datagrams from ever new ports, from the client, until `stop`.
fn knock(world: &World, to: SocketAddrV4, beat: Duration, stop: &AtomicBool) -> Result<()> {
    world.inside(At::Client, || {
        while !stop.load(Ordering::Relaxed) {
            let port = next_port();
            // One that is taken just now is passed over.
            let Ok(socket) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)) else { continue };
            // An unreachable network is what we wait to see the end of.
            let _ = socket.send_to(b"?", to);
            thread::sleep(beat);
        }
        Ok(())
    })?
}

/// Runs `work` while the client sends datagrams to `to`, one in each `beat`.
pub fn knocking<T>(
    world: &World,
    to: SocketAddrV4,
    beat: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| knock(world, to, beat, &stop));
        let done = work();
        stop.store(true, Ordering::Relaxed);
        match sender.join() {
            Ok(sent) => sent.and(done),
            Err(_) => bail!("the sender panicked"),
        }
    })
}

/// Asks a node's health-check port from the client until it answers so; returns when it did.
pub fn await_status(world: &World, to: SocketAddrV4, status: u16, within: Duration) -> Result<Instant> {
    let begun = Instant::now();
    world.inside(At::Client, || {
        loop {
            let answer = get(to, "/healthz");
            let now = Instant::now();
            match answer {
                Ok((found, _)) if found == status => return Ok(now),
                other => ensure!(now - begun < within, "no {status} from {to} but {other:?}"),
            }
            thread::sleep(ASK);
        }
    })?
}

/// One HTTP request from the calling thread's namespace: the status and the body.
pub fn get(to: SocketAddrV4, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&to.into(), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok()).context("no status")?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    Ok((status, body.unwrap_or_default()))
}

/// One exchange of a byte; returns how long the connection took to stand. No trace of it stays on the client.
pub fn exchange(to: SocketAddrV4) -> Result<Duration> {
    let begun = Instant::now();
    let mut stream =
        TcpStream::connect_timeout(&to.into(), PATIENCE).with_context(|| format!("connecting to {to}"))?;
    let stood = begun.elapsed();
    stream.set_read_timeout(Some(PATIENCE))?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    let mut byte = [7; 1];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte).with_context(|| format!("no byte back from {to}"))?;
    Ok(stood)
}

/// What a round of new connections brought.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// How long each took to stand.
    pub stood: Vec<Duration>,
    /// Those that failed, and the last reason.
    pub failed: (usize, Option<String>),
    /// How long the round took.
    pub time: Duration,
}

/// New connections from the client to `targets` in turn, `threads` at a time.
pub fn connect(world: &World, targets: &[SocketAddrV4], threads: usize, time: Duration) -> Result<Round> {
    ensure!(!targets.is_empty(), "nothing to connect to");
    let begun = Instant::now();
    let rounds: Vec<Result<Round>> = thread::scope(|scope| {
        let worker = |first: usize| {
            world.inside(At::Client, || {
                let mut round = Round::default();
                for to in targets.iter().cycle().skip(first) {
                    if begun.elapsed() >= time {
                        break;
                    }
                    match exchange(*to) {
                        Ok(stood) => round.stood.push(stood),
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
        all.stood.extend(round.stood);
        all.failed = (all.failed.0 + round.failed.0, round.failed.1.or(all.failed.1));
    }
    Ok(all)
}

/// Sends as much as goes over one connection for so long; returns the bits a second that arrived.
pub fn stream(world: &World, pods: &Pods, to: SocketAddrV4, time: Duration) -> Result<f64> {
    let arrived = pods.taken();
    world.inside(At::Client, || {
        let mut stream = TcpStream::connect_timeout(&to.into(), PATIENCE)?;
        stream.set_write_timeout(Some(PATIENCE))?;
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
        // The connection's window grows first.
        send(&mut stream, Instant::now() + time / 5)?;
        let (begun, before) = (Instant::now(), arrived.load(Ordering::Relaxed));
        send(&mut stream, begun + time)?;
        let (taken, took) = (arrived.load(Ordering::Relaxed) - before, begun.elapsed());
        stream.shutdown(Shutdown::Both)?;
        ensure!(taken > 0, "nothing arrived at {to}");
        #[allow(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
        Ok(taken as f64 * 8.0 / took.as_secs_f64())
    })?
}

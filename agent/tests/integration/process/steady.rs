// SPDX-License-Identifier: Apache-2.0
//! Clients that begin at a steady rate, whatever happened to those before, and repeat what is not answered as real ones do: UDP flows
//! that keep their ports, and TCP connections, whose SYNs the kernel repeats. Counts what was lost.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::world::{At, World, udp_socket};

/// Time between the beginnings of two UDP flows.
const FLOW: Duration = Duration::from_millis(2);
/// Time between the beginnings of two TCP connections.
const CONNECTION: Duration = Duration::from_millis(20);
/// A flow repeats its datagram after this time. One that is answered later has lost its first.
const REPEAT: Duration = Duration::from_millis(250);
/// Longest wait for the answer to a flow, and for a connection.
const LIMIT: Duration = Duration::from_mins(1);

/// A flow or connection: when it began, and how long its answer took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun {
    pub(crate) at: Duration,
    pub(crate) answered: Option<Duration>,
}

/// All that began.
#[derive(Debug, Default)]
pub(crate) struct Steady {
    pub(crate) flows: Vec<Begun>,
    pub(crate) connections: Vec<Begun>,
}

impl Steady {
    /// Those whose first packet was lost, or who got no answer at all.
    pub(crate) fn lost(all: &[Begun]) -> Vec<Begun> {
        let is_lost = |begun: &&Begun| begun.answered.is_none_or(|took| took >= REPEAT);
        all.iter().filter(is_lost).copied().collect()
    }

    /// Prints what was lost, and fails if a flow or connection never got an answer.
    pub(crate) fn all_answered(&self, what: &str) {
        self.print(what);
        for begun in self.flows.iter().chain(&self.connections) {
            assert!(begun.answered.is_some(), "{what}: no answer to what began at {:?}", begun.at);
        }
    }

    /// Prints what was lost.
    pub(crate) fn print(&self, what: &str) {
        for (kind, all) in [("UDP flows", &self.flows), ("TCP connections", &self.connections)] {
            let lost = Self::lost(all);
            let longest = all.iter().filter_map(|begun| begun.answered).max().unwrap_or_default();
            let never = all.iter().filter(|begun| begun.answered.is_none()).count();
            println!(
                "{what}: {} {kind}, {} lost their first packet, {never} unanswered, longest wait {} ms",
                all.len(),
                lost.len(),
                longest.as_millis()
            );
        }
    }
}

/// Runs `work` while clients begin flows and connections to `to`. Afterwards waits until all are answered, or `limit`.
pub(crate) fn steady<T>(world: &World, to: SocketAddr, work: impl FnOnce() -> T) -> (T, Steady) {
    steady_for(world, to, LIMIT, work)
}

/// The same, where some may stay without an answer: waits no longer than `limit` for them.
pub(crate) fn steady_for<T>(
    world: &World,
    to: SocketAddr,
    limit: Duration,
    work: impl FnOnce() -> T,
) -> (T, Steady) {
    let (stop, begun) = (AtomicBool::default(), Instant::now());
    std::thread::scope(|scope| {
        let flows = scope.spawn(|| world.run(At::Client, || flows(to, begun, &stop, limit)));
        let connections = scope.spawn(|| connections(world, to, begun, &stop, limit));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        let steady = Steady {
            flows: flows.join().expect("no panic"),
            connections: connections.join().expect("no panic"),
        };
        (result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)), steady)
    })
}

/// A UDP flow without an answer.
struct Flow {
    socket: UdpSocket,
    begun: Instant,
    sent: Instant,
}

fn flows(to: SocketAddr, start: Instant, stop: &AtomicBool, limit: Duration) -> Vec<Begun> {
    let mut done = Vec::new();
    let mut waiting: VecDeque<Flow> = VecDeque::new();
    let mut stopped = None;
    loop {
        let now = Instant::now();
        if stop.load(Ordering::Relaxed) {
            let stopped = *stopped.get_or_insert(now);
            if waiting.is_empty() || now - stopped > limit {
                break;
            }
        } else {
            let socket = udp_socket(to);
            socket.set_nonblocking(true).expect("nonblocking");
            socket.connect(to).expect("connect");
            // An error of the first datagram is not the flow's end.
            let _ = socket.send(b"?");
            waiting.push_back(Flow { socket, begun: now, sent: now });
        }
        waiting.retain_mut(|flow| {
            let mut buffer = [0; 128];
            if flow.socket.recv(&mut buffer).is_ok() {
                done.push(Begun { at: flow.begun - start, answered: Some(flow.begun.elapsed()) });
                return false;
            }
            if flow.sent.elapsed() >= REPEAT {
                flow.sent = Instant::now();
                let _ = flow.socket.send(b"?");
            }
            true
        });
        std::thread::sleep(FLOW);
    }
    done.extend(waiting.iter().map(|flow| Begun { at: flow.begun - start, answered: None }));
    done
}

fn connections(
    world: &World,
    to: SocketAddr,
    start: Instant,
    stop: &AtomicBool,
    limit: Duration,
) -> Vec<Begun> {
    std::thread::scope(|scope| {
        let mut under_way = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            under_way.push(scope.spawn(move || {
                let begun = Instant::now();
                let connected = world.run(At::Client, || TcpStream::connect_timeout(&to, limit).is_ok());
                Begun { at: begun - start, answered: connected.then(|| begun.elapsed()) }
            }));
            std::thread::sleep(CONNECTION);
        }
        under_way.into_iter().map(|one| one.join().expect("no panic")).collect()
    })
}

// SPDX-License-Identifier: Apache-2.0
//! The time without service when the active load-balancer host fails: a pair of edges, and `HAProxy` under keepalived.
//!
//! A client begins a new connection every millisecond. The time without service is the longest time between the beginnings of two
//! connections that opened.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Socket, Type};
use steerage_model::Family;

use super::configs;
use super::contender::{Contender, Programs, Running};
use crate::edge_bed::addresses::{vip, vips};
use crate::edge_bed::{Bed, Host, PORT};

/// What keepalived and the edge are compared with.
const FAMILY: Family = Family::V4;
/// Time between the beginnings of two connections.
const INTERVAL: Duration = Duration::from_millis(1);
/// A connection that needs longer did not open: its first packet was lost.
const PATIENCE: Duration = Duration::from_millis(200);
/// How long the stream runs before and after the failure.
const BEFORE: Duration = Duration::from_secs(2);
/// Longer than keepalived's default needs.
const AFTER: Duration = Duration::from_secs(10);

/// How the active host fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// SIGKILL to its processes, while its kernel continues.
    Process,
    /// It is disconnected, as without power.
    Host,
}

/// A pair of hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pair {
    /// steerage-edge with its defaults: found dead after three heartbeats of 200 ms.
    Edges,
    /// keepalived with an advertisement every second, its default.
    Keepalived,
    /// keepalived with an advertisement every 50 ms.
    FastKeepalived,
}

impl Pair {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Edges, Self::Keepalived, Self::FastKeepalived];

    /// Heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Edges => "steerage-edge",
            Self::Keepalived => "keepalived",
            Self::FastKeepalived => "keepalived, 50 ms",
        }
    }

    /// Starts both hosts, lets the active one fail, and returns the time without service.
    pub fn fail(self, bed: &Bed, programs: &Programs, failure: Failure) -> Result<Duration> {
        let address = vip(FAMILY, 0);
        let mut hosts = Vec::new();
        for host in Host::BOTH {
            hosts.push(self.start(bed, programs, host)?);
        }
        // The second host has seen the first one.
        thread::sleep(Duration::from_secs(5));
        let active = self.active(bed, &hosts)?;
        let gap = without_service(bed, address, || {
            if failure == Failure::Host {
                bed.set_connected(&hosts[active].host.netns(), false)?;
            }
            hosts[active].kill();
            Ok(())
        });
        for host in Host::BOTH {
            bed.set_connected(&host.netns(), true)?;
        }
        for running in hosts {
            if self != Self::Edges {
                // What a killed keepalived leaves.
                let netns = running.host.netns();
                let interface = running.host.interface();
                bed.shell(&netns, &format!("ip addr del {address}/32 dev {interface} 2>/dev/null || true"))?;
            }
            running.end(bed, programs)?;
        }
        gap
    }

    fn start(self, bed: &Bed, programs: &Programs, host: Host) -> Result<Running> {
        if self == Self::Edges {
            let mut running = Running::launched(bed, programs, Contender::Edge, FAMILY, host, 1)?;
            running.wait_until_ready()?;
            return Ok(running);
        }
        let mut running = Running::launched(bed, programs, Contender::Haproxy, FAMILY, host, 1)?;
        // keepalived decides who has the VIP; HAProxy may bind it everywhere.
        bed.shell(&host.netns(), &format!("ip route del local {} dev lo", vips(FAMILY)))?;
        let interval = if self == Self::Keepalived { "1" } else { "0.05" };
        let name = format!("keepalived-{}", host.netns());
        let file = bed.folder.join(format!("{name}.conf"));
        fs::write(&file, configs::keepalived(&host.interface(), vip(FAMILY, 0), 100 + host.0, interval))?;
        let pid = |kind: &str| bed.folder.join(format!("{name}-{kind}.pid")).display().to_string();
        for kind in ["main", "vrrp"] {
            // Of a killed one: keepalived would take a process that has its number by now for another keepalived.
            let _ = fs::remove_file(pid(kind));
        }
        let file = file.display().to_string();
        running.spawn(
            &bed.folder,
            &["keepalived", "-n", "-l", "-P", "-f", &file, "-p", &pid("main"), "-r", &pid("vrrp")],
        )?;
        Ok(running)
    }

    /// The host that has the VIP: the one whose link-layer address the router learns.
    fn active(self, bed: &Bed, hosts: &[Running]) -> Result<usize> {
        bed.forget_neighbours()?;
        let address = vip(FAMILY, 0);
        let opened = bed.inside("client", || {
            std::net::TcpStream::connect_timeout(&SocketAddr::from((address, PORT)), Duration::from_secs(5))
                .map(drop)
        })?;
        opened.with_context(|| format!("{} serves nothing", self.title()))?;
        let neighbour = bed.shell("router", &format!("ip neigh show {address} dev eth0"))?;
        for (index, running) in hosts.iter().enumerate() {
            let file = format!("cat /sys/class/net/{}/address", running.host.interface());
            let own = bed.shell(
                &running.host.netns(),
                &format!("unshare -m sh -ec 'mount -t sysfs sysfs /sys; {file}'"),
            )?;
            if neighbour.contains(own.trim()) {
                return Ok(index);
            }
        }
        bail!("no host has {address}: {neighbour}")
    }
}

/// The longest time between the beginnings of two connections that opened, while `fail` happens.
fn without_service(bed: &Bed, to: IpAddr, fail: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let stop = AtomicBool::new(false);
    let opened = thread::scope(|scope| {
        let client = scope.spawn(|| bed.inside("client", || stream(to, &stop))?);
        thread::sleep(BEFORE);
        let failed = fail();
        thread::sleep(AFTER);
        stop.store(true, Ordering::Relaxed);
        let opened = client.join().unwrap_or_else(|_| bail!("the client panicked"));
        failed.and(opened)
    })?;
    let last = opened.last().copied().context("no connection opened")?;
    let end = opened.iter().map(|(_, now)| *now).max().unwrap_or(last.1);
    ensure!(end.duration_since(last.0) < Duration::from_secs(1), "the service did not come back");
    Ok(longest_gap(&opened.into_iter().map(|(begun, _)| begun).collect::<Vec<_>>()))
}

fn longest_gap(begun: &[Instant]) -> Duration {
    begun.windows(2).map(|pair| pair[1].duration_since(pair[0])).max().unwrap_or_default()
}

/// Begins a connection every millisecond. When each one that opened was begun, in order, and when this client looked last.
fn stream(to: IpAddr, stop: &AtomicBool) -> Result<Vec<(Instant, Instant)>> {
    let (mut opening, mut opened) = (Vec::<(Instant, Socket)>::new(), Vec::new());
    let mut due = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if Instant::now() >= due {
            due += INTERVAL;
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            socket.set_linger(Some(Duration::ZERO))?;
            // In progress; what it comes to is asked below.
            let _ = socket.connect(&SocketAddr::from((to, PORT)).into());
            opening.push((Instant::now(), socket));
        }
        let mut events: Vec<_> =
            opening.iter().map(|(_, socket)| PollFd::new(socket.as_fd(), PollFlags::POLLOUT)).collect();
        let wait = due.saturating_duration_since(Instant::now()).min(INTERVAL);
        poll(&mut events, PollTimeout::from(u8::from(wait > INTERVAL / 4)))?;
        let ready: Vec<_> = events.iter().map(|event| event.any().unwrap_or(false)).collect();
        let now = Instant::now();
        let mut waiting = Vec::new();
        for ((begun, socket), ready) in opening.into_iter().zip(ready) {
            if ready {
                if socket.take_error()?.is_none() {
                    opened.push((begun, now));
                }
            } else if now.duration_since(begun) < PATIENCE {
                waiting.push((begun, socket));
            }
        }
        opening = waiting;
    }
    let now = Instant::now();
    opened.sort_unstable();
    if let Some(last) = opened.last_mut() {
        last.1 = now;
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_is_the_longest_between_two() {
        let start = Instant::now();
        let times = [0, 1, 2, 700, 701].map(|ms| start + Duration::from_millis(ms));
        assert_eq!(longest_gap(&times), Duration::from_millis(698));
        assert_eq!(longest_gap(&times[..1]), Duration::ZERO);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The client: one thread that sends the datagrams of all Services, each from an address and port that were not used before, so that
//! the edge knows no flow of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

use super::cell::Cell;
use super::objects::LISTENER;
use crate::edge_nodes::cluster::vip;

/// Source addresses follow this one; they are on the nodes' link, and no host has them.
const FIRST_SOURCE: u32 = 0x0a20_0200;
const FIRST_PORT: u16 = 1024;
/// Of each source address.
const PORTS: u64 = 60_000;
/// Header of IPv4 without options, header of UDP, and some bytes.
const LENGTH: usize = 20 + 8 + 4;

/// The running client. It ends when this value is dropped.
pub(super) struct Sender {
    /// Nanoseconds between two datagrams of each Service.
    gaps: Arc<Vec<AtomicU64>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sender {
    /// Begins in the namespace of the calling thread.
    pub(super) fn start(cells: &[Cell]) -> Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
        let gaps: Arc<Vec<_>> =
            Arc::new(cells.iter().map(|cell| AtomicU64::new(nanoseconds(cell.gap()))).collect());
        let stop = Arc::<AtomicBool>::default();
        let thread = {
            let (gaps, stop) = (Arc::clone(&gaps), Arc::clone(&stop));
            thread::spawn(move || send_all(&socket, &gaps, &stop))
        };
        Ok(Self { gaps, stop, thread: Some(thread) })
    }

    /// The time between two datagrams of a Service from the next one on.
    pub(super) fn set_gap(&self, service: u32, gap: Duration) {
        if let Some(place) = usize::try_from(service).ok().and_then(|at| self.gaps.get(at)) {
            place.store(nanoseconds(gap), Ordering::Relaxed);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn send_all(socket: &Socket, gaps: &[AtomicU64], stop: &AtomicBool) {
    let begun = Instant::now();
    let mut due: BinaryHeap<_> = (0..gaps.len()).map(|service| Reverse((begun, service))).collect();
    let mut sent = 0;
    while let Some(Reverse((at, service))) = due.pop() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep(at.saturating_duration_since(Instant::now()));
        let to = vip(u32::try_from(service).unwrap_or(0));
        // A full queue loses one of many.
        let _ = socket.send_to(&datagram(sent, to), &SocketAddrV4::new(to, 0).into());
        sent += 1;
        let gap = gaps.get(service).map_or(0, |gap| gap.load(Ordering::Relaxed));
        // Late ones are left out: what is measured is when, not how many.
        let next = (at + Duration::from_nanos(gap)).max(Instant::now());
        due.push(Reverse((next, service)));
    }
}

/// The packet with this number. The kernel fills in the checksum of the IP header; that of UDP may be 0 in IPv4 (RFC 768).
fn datagram(number: u64, to: Ipv4Addr) -> [u8; LENGTH] {
    let source = Ipv4Addr::from(FIRST_SOURCE + u32::try_from(number / PORTS).unwrap_or(0));
    let port = FIRST_PORT + u16::try_from(number % PORTS).unwrap_or(0);
    let length = u16::try_from(LENGTH).unwrap_or(0);
    let mut packet = [0; LENGTH];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    packet[8] = 64;
    packet[9] = 17;
    packet[12..16].copy_from_slice(&source.octets());
    packet[16..20].copy_from_slice(&to.octets());
    packet[20..22].copy_from_slice(&port.to_be_bytes());
    packet[22..24].copy_from_slice(&LISTENER.to_be_bytes());
    packet[24..26].copy_from_slice(&(length - 20).to_be_bytes());
    packet
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_datagrams_have_the_same_source() {
        let sources = |numbers: std::ops::Range<u64>| {
            numbers
                .map(|number| datagram(number, Ipv4Addr::LOCALHOST)[12..22].to_vec())
                .collect::<BTreeSet<_>>()
        };
        assert_eq!(sources(0..1000).len(), 1000);
        assert_eq!(sources(PORTS - 10..PORTS + 10).len(), 20);
        let packet = datagram(PORTS + 1, Ipv4Addr::new(10, 64, 0, 9));
        assert_eq!(packet[12..26], [10, 32, 2, 1, 10, 64, 0, 9, 4, 1, 0, 80, 0, 12]);
    }
}

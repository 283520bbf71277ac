// SPDX-License-Identifier: Apache-2.0
//! Which node the edge sends packets to, seen on the nodes' own wires and so past every service proxy.

use std::io::{ErrorKind, Read as _};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::cluster::Host;

/// `ETH_P_IP` of `linux/if_ether.h`.
const ETH_P_IP: u16 = 0x0800;
/// `IPPROTO_UDP`.
const UDP: u8 = 17;

/// One packet's arrival: when, and at which node by its index.
pub type Arrival = (Instant, usize);

/// Listens on all nodes for datagrams to one address until it is dropped.
pub struct Sniffer {
    seen: Arc<Mutex<Vec<Arrival>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Sniffer {
    /// Starts to listen on the nodes.
    pub fn start(nodes: &[Host], vip: Ipv4Addr) -> Result<Self> {
        let mut sniffer = Self { seen: Arc::default(), stop: Arc::default(), threads: Vec::new() };
        for (index, node) in nodes.iter().enumerate() {
            let socket = steerage_lab::in_netns(&node.netns, open)?
                .with_context(|| format!("listening to the packets of {}", node.name))?;
            let (seen, stop) = (Arc::clone(&sniffer.seen), Arc::clone(&sniffer.stop));
            sniffer.threads.push(thread::spawn(move || listen(socket, vip, index, &seen, &stop)));
        }
        Ok(sniffer)
    }

    /// The arrivals since some time.
    pub fn since(&self, time: Instant) -> Vec<Arrival> {
        let Ok(mut seen) = self.seen.lock() else { return Vec::new() };
        seen.retain(|(at, _)| *at >= time);
        seen.clone()
    }
}

impl Drop for Sniffer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn open() -> Result<Socket> {
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(i32::from(ETH_P_IP.to_be()))))?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    Ok(socket)
}

fn listen(mut socket: Socket, vip: Ipv4Addr, node: usize, seen: &Mutex<Vec<Arrival>>, stop: &AtomicBool) {
    let mut packet = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        match socket.read(&mut packet) {
            Ok(length) if to(&packet[..length], vip) => {
                if let Ok(mut seen) = seen.lock() {
                    seen.push((Instant::now(), node));
                }
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

/// Whether an IPv4 packet is a datagram to this address. The header's layout is RFC 791's.
fn to(packet: &[u8], vip: Ipv4Addr) -> bool {
    packet.get(9) == Some(&UDP) && packet.get(16..20) == Some(&vip.octets())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_datagrams_to_the_address_count() {
        let mut packet = [0; 28];
        packet[9] = UDP;
        packet[16..20].copy_from_slice(&[10, 0, 0, 1]);
        assert!(to(&packet, Ipv4Addr::new(10, 0, 0, 1)));
        assert!(!to(&packet, Ipv4Addr::new(10, 0, 0, 2)));
        packet[9] = 6;
        assert!(!to(&packet, Ipv4Addr::new(10, 0, 0, 1)));
        assert!(!to(&packet[..18], Ipv4Addr::new(10, 0, 0, 1)));
    }
}

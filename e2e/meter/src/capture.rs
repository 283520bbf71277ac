// SPDX-License-Identifier: Apache-2.0
//! Captures of packets with the kernel's timestamps, by a packet socket in some network namespace.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use socket2::Type;
use steerage_lab::packet_socket::PacketSocket;
pub use steerage_lab::packet_socket::now;

use super::filter::{SNAP, filter};
use super::packet::{Packet, parse};

/// A running capture. It ends when it is dropped.
pub struct Capture {
    packets: Arc<Mutex<Vec<Packet>>>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<Result<()>>>,
}

impl Capture {
    /// Captures packets on all interfaces of a network namespace, from this call's return on: those to and from some servers, and
    /// all datagrams to some clients, whoever sends them.
    pub fn start(netns: &str, servers: &[IpAddr], clients: &[IpAddr]) -> Result<Self> {
        let socket = steerage_lab::in_netns(netns, || {
            // Only a socket for all protocols sees what the host itself sends.
            PacketSocket::open(libc::ETH_P_ALL, Type::DGRAM, &filter(servers, clients))
        })?
        .with_context(|| format!("in {netns}"))?;
        let (packets, stop) = (Arc::default(), Arc::default());
        let reader = {
            let (packets, stop) = (Arc::clone(&packets), Arc::clone(&stop));
            thread::spawn(move || read(&socket, &packets, &stop))
        };
        Ok(Self { packets, stop, reader: Some(reader) })
    }

    /// The packets since some time; forgets those before.
    pub fn since(&self, time: Duration) -> Vec<Packet> {
        let Ok(mut packets) = self.packets.lock() else { return Vec::new() };
        packets.retain(|packet| packet.at >= time);
        packets.clone()
    }

    /// Ends the capture; all its packets in the order in which the kernel queued them. An error when the kernel had to drop any.
    ///
    /// They are not sorted by time: the kernel starts to stamp packets a moment after it was asked to, and a packet of that
    /// moment is stamped when it is read, later than the packets that answer it.
    pub fn stop(mut self) -> Result<Vec<Packet>> {
        self.join()?;
        Ok(self.packets.lock().map(|mut all| std::mem::take(&mut *all)).unwrap_or_default())
    }

    fn join(&mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(reader) = self.reader.take() else { return Ok(()) };
        reader.join().map_err(|_| anyhow!("the reader of a capture panicked"))?
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// Reads all packets from before it is told to stop.
fn read(socket: &PacketSocket, packets: &Mutex<Vec<Packet>>, stop: &AtomicBool) -> Result<()> {
    let mut end = None;
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        if stopping && end.is_none() {
            end = Some(now());
        }
        let mut bytes = [0; SNAP];
        let Some((at, length)) = socket.receive(&mut bytes)? else {
            if stopping {
                break;
            }
            continue;
        };
        if end.is_some_and(|end| at > end) {
            break;
        }
        if let Some(packet) = parse(at, &bytes[..length])
            && let Ok(mut packets) = packets.lock()
        {
            packets.push(packet);
        }
    }
    socket.check()
}

// SPDX-License-Identifier: Apache-2.0
//! When datagrams arrive at which node, by a packet socket in the nodes' namespace and the kernel's clock.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::libc::{self, BPF_ABS, BPF_B, BPF_H, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET};
use socket2::{SockFilter, Type};
use steerage_lab::packet_socket::PacketSocket;
pub(super) use steerage_lab::packet_socket::now;

use super::cell;
use super::objects::LISTENER;
use crate::edge_nodes::cluster::service_at;

/// Of an Ethernet frame: as far as the ports.
const SNAP: u32 = 64;
/// Where the destination of the packet is in the frame.
const VIP: Range<usize> = 30..34;

/// The last packet of each node, as they come. The reader ends when this value is dropped.
pub(super) struct Seen {
    /// Nanoseconds since the epoch, 0 if none came.
    last: Arc<Vec<AtomicU64>>,
    stop: Arc<AtomicBool>,
    socket: Arc<PacketSocket>,
    reader: Option<JoinHandle<Result<()>>>,
}

impl Seen {
    /// Begins in the namespace of the calling thread.
    pub(super) fn start(nodes: u32) -> Result<Self> {
        let socket = PacketSocket::open(libc::ETH_P_IP, Type::RAW, &filter())?;
        let socket = Arc::new(socket);
        let last: Arc<Vec<_>> = Arc::new((0..nodes).map(|_| AtomicU64::new(0)).collect());
        let stop = Arc::<AtomicBool>::default();
        let reader = {
            let (socket, last, stop) = (Arc::clone(&socket), Arc::clone(&last), Arc::clone(&stop));
            thread::spawn(move || read(&socket, &last, &stop))
        };
        Ok(Self { last, stop, socket, reader: Some(reader) })
    }

    /// When the last packet came to a node.
    pub(super) fn last(&self, node: u32) -> Duration {
        let last = usize::try_from(node).ok().and_then(|at| self.last.get(at));
        Duration::from_nanos(last.map_or(0, |last| last.load(Ordering::SeqCst)))
    }

    /// Fails if the reader has ended, or the kernel had to drop packets: then a last packet may not have been seen.
    pub(super) fn check(&self) -> Result<()> {
        self.socket.check()?;
        ensure!(
            !self.reader.as_ref().is_none_or(JoinHandle::is_finished),
            "not measured: the reader of the capture has ended"
        );
        Ok(())
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn read(socket: &PacketSocket, last: &[AtomicU64], stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let mut bytes = [0; SNAP as usize];
        let Some((at, length)) = socket.receive(&mut bytes)? else { continue };
        let node = bytes.get(..length).and_then(receiver);
        if let Some(place) = node.and_then(|node| last.get(usize::try_from(node).ok()?)) {
            let nanoseconds = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
            place.fetch_max(nanoseconds, Ordering::SeqCst);
        }
    }
    Ok(())
}

/// The node of a frame's destination (see `edge_nodes::cluster::mac`), if it is one of the Service's: while no target of another
/// Service is healthy, all nodes may get packets of that one.
fn receiver(frame: &[u8]) -> Option<u32> {
    let [0x02, 0x4e, 0, 0, high, low] = *frame.first_chunk::<6>()? else { return None };
    let node = u16::from_be_bytes([high, low]).into();
    let service = service_at(Ipv4Addr::from(*frame.get(VIP)?.first_chunk::<4>()?))?;
    cell::nodes_of(service).contains(&node).then_some(node)
}

/// Datagrams to the listeners' port, by offsets in an Ethernet frame with an IPv4 header that has no options.
fn filter() -> [SockFilter; 6] {
    let statement = |code: u32, value| SockFilter::new(u16::try_from(code).unwrap_or(0), 0, 0, value);
    let unless = |value, skipped| {
        SockFilter::new(u16::try_from(BPF_JMP | BPF_JEQ | BPF_K).unwrap_or(0), 0, skipped, value)
    };
    [
        statement(BPF_LD | BPF_B | BPF_ABS, 23),
        unless(17, 3),
        statement(BPF_LD | BPF_H | BPF_ABS, 36),
        unless(LISTENER.into(), 1),
        statement(BPF_RET | BPF_K, SNAP),
        statement(BPF_RET | BPF_K, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edge_nodes::cluster::{mac, vip};

    #[test]
    fn receivers_are_nodes_of_the_service() {
        let frame = |node: u32, service: u32| {
            let mut frame = [0; 64];
            for (place, byte) in frame.iter_mut().zip(mac(node).split(':')) {
                *place = u8::from_str_radix(byte, 16).unwrap();
            }
            frame[VIP].copy_from_slice(&vip(service).octets());
            frame
        };
        for node in [0, 1, 299] {
            assert_eq!(receiver(&frame(node, node / 2)), Some(node));
            assert_eq!(receiver(&frame(node, node / 2 + 1)), None, "another Service's packet");
        }
        assert_eq!(receiver(&[0xff; 64]), None);
        assert_eq!(receiver(&frame(0, 0)[..33]), None);
    }
}

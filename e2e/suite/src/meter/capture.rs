// SPDX-License-Identifier: Apache-2.0
//! Captures of packets with the kernel's timestamps, by a packet socket in some network namespace.

use std::io::IoSliceMut;
use std::net::IpAddr;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::errno::Errno;
use nix::sys::socket::sockopt::{RcvBufForce, ReceiveTimestampns};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, getsockopt, recvmsg, setsockopt};
use socket2::{Domain, Protocol, Socket, Type};

use super::filter::{SNAP, filter};
use super::packet::{Packet, parse};

/// Room for the packets of a second or more, should the reader have to wait for a core.
const BUFFER: usize = 32 << 20;
/// Between two looks at whether to stop.
const TICK: Duration = Duration::from_millis(50);

mod statistics {
    #![allow(missing_docs, reason = "made by nix's macro")]
    use nix::{getsockopt_impl, sockopt_impl};
    sockopt_impl!(Statistics, GetOnly, libc::SOL_PACKET, libc::PACKET_STATISTICS, libc::tpacket_stats);
}

/// Now, by the clock of the timestamps.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

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
        let socket = steerage_lab::in_netns(netns, || open(servers, clients))?
            .with_context(|| format!("opening a packet socket in {netns}"))?;
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

fn open(servers: &[IpAddr], clients: &[IpAddr]) -> Result<Socket> {
    // Only a socket for all protocols sees what the host itself sends.
    let all = Protocol::from(i32::from(u16::try_from(libc::ETH_P_ALL)?.to_be()));
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(all))?;
    socket.attach_filter(&filter(servers, clients))?;
    setsockopt(&socket, RcvBufForce, &BUFFER)?;
    setsockopt(&socket, ReceiveTimestampns, &true)?;
    socket.set_read_timeout(Some(TICK))?;
    Ok(socket)
}

/// Reads all packets from before it is told to stop.
fn read(socket: &Socket, packets: &Mutex<Vec<Packet>>, stop: &AtomicBool) -> Result<()> {
    let mut space = nix::cmsg_space!(libc::timespec);
    let mut end = None;
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        if stopping && end.is_none() {
            end = Some(now());
        }
        let mut bytes = [0; SNAP];
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::empty());
        let (at, length) = match received {
            Ok(message) => (timestamp(message.cmsgs()?)?, message.bytes),
            Err(Errno::EAGAIN | Errno::EINTR) if !stopping => continue,
            Err(Errno::EAGAIN | Errno::EINTR) => break,
            // An interface that goes down, as one of a pod that ends.
            Err(Errno::ENETDOWN) => continue,
            Err(error) => return Err(error).context("reading a packet socket"),
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
    let dropped = getsockopt(socket, statistics::Statistics)?.tp_drops;
    ensure!(dropped == 0, "not measured: the kernel dropped {dropped} packets of the capture");
    Ok(())
}

fn timestamp(messages: impl Iterator<Item = ControlMessageOwned>) -> Result<Duration> {
    for message in messages {
        if let ControlMessageOwned::ScmTimestampns(time) = message {
            return Ok(time.into());
        }
    }
    Err(anyhow!("not measured: a packet without timestamp"))
}

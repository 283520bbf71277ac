// SPDX-License-Identifier: Apache-2.0
//! Packet sockets that stamp packets with the kernel's time and know whether all were read. The suite's captures and the benchmarks
//! read them. It decides nothing about packets.

use std::io::IoSliceMut;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::socket::sockopt::{RcvBufForce, ReceiveTimestampns};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, getsockopt, recvmsg, setsockopt};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

/// Room for the packets of a second or more, should the reader have to wait for a core.
const BUFFER: usize = 32 << 20;
/// The longest time without packets until [`PacketSocket::receive`] returns.
const TICK: Duration = Duration::from_millis(50);

mod statistics {
    #![allow(missing_docs, reason = "made by nix's macro")]
    use nix::{getsockopt_impl, libc, sockopt_impl};
    sockopt_impl!(Statistics, GetOnly, libc::SOL_PACKET, libc::PACKET_STATISTICS, libc::tpacket_stats);
}

/// Now, by the clock of the timestamps.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A packet socket on all interfaces of the network namespace that its opener was in.
#[derive(Debug)]
pub struct PacketSocket(Socket);

impl PacketSocket {
    /// Opens one in the calling thread's namespace: for this Ethernet protocol ([`nix::libc::ETH_P_ALL`] for all, also those that
    /// the host sends), with packets from the Ethernet header (`Type::RAW`) or the network header on (`Type::DGRAM`).
    pub fn open(protocol: i32, from: Type, filter: &[SockFilter]) -> Result<Self> {
        let protocol = Protocol::from(i32::from(u16::try_from(protocol)?.to_be()));
        let socket = Socket::new(Domain::PACKET, from, Some(protocol)).context("opening a packet socket")?;
        socket.attach_filter(filter)?;
        setsockopt(&socket, RcvBufForce, &BUFFER)?;
        setsockopt(&socket, ReceiveTimestampns, &true)?;
        socket.set_read_timeout(Some(TICK))?;
        Ok(Self(socket))
    }

    /// The next packet: its time since the epoch, and the length of what is in `bytes`. `None` if none has come for 50 ms, or an
    /// interface went down, as one of a pod that ends.
    pub fn receive(&self, bytes: &mut [u8]) -> Result<Option<(Duration, usize)>> {
        let mut space = nix::cmsg_space!(nix::libc::timespec);
        let mut slices = [IoSliceMut::new(bytes)];
        match recvmsg::<()>(self.0.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::empty()) {
            Ok(message) => Ok(Some((timestamp(message.cmsgs()?)?, message.bytes))),
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ENETDOWN) => Ok(None),
            Err(error) => Err(error).context("reading a packet socket"),
        }
    }

    /// Fails if the kernel had to drop packets since the last call: then not all were seen.
    pub fn check(&self) -> Result<()> {
        let dropped = getsockopt(&self.0, statistics::Statistics)?.tp_drops;
        ensure!(dropped == 0, "not measured: the kernel dropped {dropped} packets of the capture");
        Ok(())
    }
}

fn timestamp(messages: impl Iterator<Item = ControlMessageOwned>) -> Result<Duration> {
    for message in messages {
        if let ControlMessageOwned::ScmTimestampns(time) = message {
            return Ok(time.into());
        }
    }
    bail!("not measured: a packet without timestamp")
}

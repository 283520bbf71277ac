// SPDX-License-Identifier: Apache-2.0
//! Sockets for whole frames on one interface (packet(7)). They do not interpret the frames.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::unix::AsyncFd;

use crate::link::frames::{IPV6, NEIGHBOUR_ADVERTISEMENT};
use crate::link::mac::Mac;

/// Longer frames are truncated; the edge's own are shorter.
const MAX_FRAME: usize = 2048;

#[derive(Debug)]
pub(crate) struct PacketSocket {
    socket: AsyncFd<Socket>,
}

impl PacketSocket {
    /// Receives the frames of one ethertype; with 0 it only sends. Needs `CAP_NET_RAW`.
    pub(crate) fn open(index: u32, ethertype: u16) -> io::Result<Self> {
        let socket = raw(index, ethertype, |_| Ok(()))?;
        Ok(Self { socket: register(socket)? })
    }

    /// Receives neighbour advertisements.
    pub(crate) fn advertisements(index: u32) -> io::Result<Self> {
        let socket = raw(index, IPV6, |socket| filter(socket, &only_advertisements()))?;
        Ok(Self { socket: register(socket)? })
    }

    /// Also receives frames to a group address.
    pub(crate) fn join(&self, index: u32, group: Mac) -> io::Result<()> {
        const PACKET_ADD_MEMBERSHIP: libc::c_int = 1;
        let mut request = libc::packet_mreq {
            mr_ifindex: index.cast_signed(),
            mr_type: 0, // PACKET_MR_MULTICAST
            mr_alen: 6,
            mr_address: [0; 8],
        };
        request.mr_address[..6].copy_from_slice(&group);
        set(self.socket.get_ref(), libc::SOL_PACKET, PACKET_ADD_MEMBERSHIP, &request)
    }

    pub(crate) async fn receive(&self) -> io::Result<Vec<u8>> {
        loop {
            let mut ready = self.socket.readable().await?;
            let mut frame = [MaybeUninit::new(0_u8); MAX_FRAME];
            if let Ok(received) = ready.try_io(|socket| socket.get_ref().recv(&mut frame)) {
                let length = received?;
                return Ok(frame[..length].iter().copied().map(initialised).collect());
            }
        }
    }

    /// Fails when the device's queue is full.
    pub(crate) fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.socket.get_ref().send(frame).map(drop)
    }
}

#[allow(unsafe_code, reason = "the buffer is filled with zeros before the kernel writes to it")]
fn initialised(byte: MaybeUninit<u8>) -> u8 {
    // SAFETY: `receive` fills the buffer with zeros, and the kernel only writes bytes.
    unsafe { byte.assume_init() }
}

#[allow(unsafe_code, reason = "tokio requires a descriptor that stays open and the same")]
fn register(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: a `Socket` owns one descriptor for its whole life, and the `AsyncFd` owns the `Socket`.
    unsafe { Ok(AsyncFd::register(socket)?) }
}

/// Opened with protocol 0, so that nothing is received before the filter and the interface are set.
fn raw(index: u32, ethertype: u16, prepare: impl FnOnce(&Socket) -> io::Result<()>) -> io::Result<Socket> {
    let socket = Socket::new(Domain::PACKET, Type::RAW.nonblocking().cloexec(), Some(Protocol::from(0)))?;
    prepare(&socket)?;
    bind(&socket, index, ethertype)?;
    Ok(socket)
}

#[allow(unsafe_code, reason = "bind reads the address behind the pointer and keeps nothing")]
fn bind(socket: &Socket, index: u32, ethertype: u16) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).unwrap_or(0),
        sll_protocol: ethertype.to_be(),
        sll_ifindex: index.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or(0);
    // SAFETY: the address outlives the call and is `length` bytes long.
    let done = unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), length) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(unsafe_code, reason = "setsockopt reads the value behind the pointer and keeps nothing of it")]
fn set<T>(socket: &Socket, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    // SAFETY: the value outlives the call and is `length` bytes long.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), length)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn filter(socket: &Socket, program: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).unwrap_or(0),
        // The kernel copies the program and does not write to it.
        filter: program.as_ptr().cast_mut(),
    };
    set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Classic BPF (`linux/filter.h`): `ICMPv6` directly after the IPv6 header, with the type of an advertisement. The kernel filters,
/// so that other IPv6 traffic is not copied to this process.
fn only_advertisements() -> [libc::sock_filter; 6] {
    const LOAD_BYTE: u16 = 0x30;
    const JUMP_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    [
        step(LOAD_BYTE, 0, 0, 14 + 6),
        step(JUMP_EQUAL, 0, 3, 58),
        step(LOAD_BYTE, 0, 0, 14 + 40),
        step(JUMP_EQUAL, 0, 1, NEIGHBOUR_ADVERTISEMENT.into()),
        step(RETURN, 0, 0, 0xffff),
        step(RETURN, 0, 0, 0),
    ]
}

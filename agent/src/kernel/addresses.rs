// SPDX-License-Identifier: Apache-2.0
//! Notices that addresses of this host come and go (rtnetlink). Which they are, the listener asks for himself.

use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket};
use tokio::net::UdpSocket;

/// `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`
const GROUPS: u32 = 0x10 | 0x100;

/// A subscription to changes of addresses.
#[derive(Debug)]
pub struct AddressWatch {
    /// A netlink socket. It is read as any other socket of datagrams, and tokio has a type for those of one kind only.
    socket: UdpSocket,
}

impl AddressWatch {
    /// Opens it in the network namespace of the calling thread, on a runtime.
    pub fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
        Ok(Self { socket: UdpSocket::from_std(socket.into())? })
    }

    /// Returns when addresses have changed since the last call.
    pub async fn changed(&self) -> io::Result<()> {
        let mut message = [0; 4096];
        let mut told = false;
        while !told {
            self.socket.readable().await?;
            loop {
                match self.socket.try_recv(&mut message) {
                    Ok(_) => told = true,
                    // What was lost was a change too.
                    Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => told = true,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

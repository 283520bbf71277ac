// SPDX-License-Identifier: Apache-2.0
//! The addresses of this host, and notice of changes of addresses or routes (rtnetlink).

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket};
use tokio::net::UdpSocket;

/// `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`
const ADDRESSES: u32 = 0x10 | 0x100;
/// `RTMGRP_LINK`, `RTMGRP_IPV4_ROUTE` and `RTMGRP_IPV6_ROUTE`
const ROUTES: u32 = 0x1 | 0x40 | 0x400;

/// A subscription to changes of addresses or routes.
#[derive(Debug)]
pub struct AddressWatch {
    /// A netlink socket: tokio has no type for it, but reads all datagram sockets alike.
    socket: UdpSocket,
}

impl AddressWatch {
    /// Watches addresses in the network namespace of the calling thread. Needs a tokio runtime.
    pub fn open() -> io::Result<Self> {
        Self::of(ADDRESSES)
    }

    /// Watches routes and devices instead.
    pub fn of_routes() -> io::Result<Self> {
        Self::of(ROUTES)
    }

    fn of(groups: u32) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(Self { socket: UdpSocket::from_std(socket.into())? })
    }

    /// Returns when something has changed since the last call.
    pub async fn changed(&self) -> io::Result<()> {
        let mut message = [0; 4096];
        let mut changed = false;
        while !changed {
            self.socket.readable().await?;
            loop {
                match self.socket.try_recv(&mut message) {
                    Ok(_) => changed = true,
                    // A lost message was a change, too.
                    Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => changed = true,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// Whether this host uses IPv6, as kube-proxy decides it: the kernel knows it, and no setting disables it for all interfaces.
pub(super) fn has_ipv6() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|value| value.trim() != "1")
}

/// All addresses of this host's interfaces, except IPv6 link-local ones, which mean nothing without their link.
pub fn host_addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = nix::ifaddrs::getifaddrs()?;
    let mut addresses: Vec<_> = interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|addr| IpAddr::V4(addr.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|addr| IpAddr::V6(addr.ip())))
        })
        .filter(|addr| !matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local()))
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

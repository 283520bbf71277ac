// SPDX-License-Identifier: Apache-2.0
//! Which way the kernel would send packets, and notice of changes (rtnetlink). Asked by the loop for addresses of other nodes.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, send, socket,
};

use crate::peers::NextHop;

const REQUEST: u16 = 1;
const ERROR: u16 = 2;
const NEWROUTE: u16 = 24;
const GETROUTE: u16 = 26;
/// `RTA_DST`, `RTA_OIF`, `RTA_GATEWAY`, `RTA_VIA`
const DESTINATION: u16 = 1;
const DEVICE: u16 = 4;
const GATEWAYS: [u16; 2] = [5, 18];
/// `RTN_UNICAST`
const UNICAST: u8 = 1;
/// Bytes of a message's header, and of a route's.
const HEADER: usize = 16;
const ROUTE: usize = 12;

/// Looks routes up in the network namespace in which it was opened.
#[derive(Debug)]
pub struct NextHops {
    socket: OwnedFd,
    sequence: u32,
    /// Ethernet-like devices by index, and whether they resolve neighbours.
    devices: BTreeMap<u32, (String, bool)>,
}

impl NextHops {
    /// Opens a socket.
    pub fn open() -> io::Result<Self> {
        let kind = (AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC);
        let socket = socket(kind.0, kind.1, kind.2, SockProtocol::NetlinkRoute)?;
        nix::sys::socket::connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, devices: BTreeMap::new() })
    }

    /// Takes note of the devices that there are now, in the network namespace of the calling thread.
    pub fn update_devices(&mut self) -> io::Result<()> {
        let is_link = |flags: InterfaceFlags| {
            !flags.intersects(
                InterfaceFlags::IFF_NOARP | InterfaceFlags::IFF_POINTOPOINT | InterfaceFlags::IFF_LOOPBACK,
            )
        };
        self.devices = nix::ifaddrs::getifaddrs()?
            .filter_map(|interface| {
                let index = interface.address?.as_link_addr()?.ifindex();
                let index = u32::try_from(index).ok()?;
                Some((index, (interface.interface_name, is_link(interface.flags))))
            })
            .collect();
        Ok(())
    }

    /// The next hop on the way to `addr`; `None` if there is no way, or it ends here.
    pub fn next_hop(&mut self, addr: IpAddr) -> io::Result<Option<NextHop>> {
        self.sequence = self.sequence.wrapping_add(1);
        send(self.socket.as_raw_fd(), &request(addr, self.sequence), MsgFlags::empty())?;
        let mut buffer = [0; 4096];
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let message = &buffer[..length];
            // An answer to an earlier request whose reading was interrupted.
            if word(message, 8) != Some(self.sequence) {
                continue;
            }
            return self.decode(message);
        }
    }

    fn decode(&self, message: &[u8]) -> io::Result<Option<NextHop>> {
        let too_short = || io::Error::from(ErrorKind::UnexpectedEof);
        match half_word(message, 4).ok_or_else(too_short)? {
            ERROR => {
                let code = word(message, HEADER).ok_or_else(too_short)?.cast_signed().saturating_neg();
                let no_way = [Errno::ENETUNREACH, Errno::EHOSTUNREACH, Errno::EACCES, Errno::EINVAL];
                if no_way.contains(&Errno::from_raw(code)) {
                    return Ok(None);
                }
                Err(io::Error::from_raw_os_error(code))
            }
            NEWROUTE => {
                let kind = message.get(HEADER + 7).ok_or_else(too_short)?;
                let mut attributes = attributes(message.get(HEADER + ROUTE..).ok_or_else(too_short)?);
                let gateway = attributes.clone().any(|(kind, _)| GATEWAYS.contains(&kind));
                let device = attributes.find(|(kind, _)| *kind == DEVICE).and_then(|(_, data)| word(data, 0));
                let device = device.filter(|_| *kind == UNICAST).and_then(|index| self.devices.get(&index));
                Ok(device.map(|(name, is_link)| NextHop {
                    device: name.clone(),
                    is_on_link: *is_link && !gateway,
                }))
            }
            _ => Ok(None),
        }
    }
}

fn request(addr: IpAddr, sequence: u32) -> Vec<u8> {
    let (family, octets) = match addr {
        IpAddr::V4(addr) => (AddressFamily::Inet, addr.octets().to_vec()),
        IpAddr::V6(addr) => (AddressFamily::Inet6, addr.octets().to_vec()),
    };
    let attribute = 4 + octets.len();
    let mut message = Vec::with_capacity(HEADER + ROUTE + attribute);
    message.extend(u32::try_from(HEADER + ROUTE + attribute).unwrap_or_default().to_ne_bytes());
    message.extend(GETROUTE.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    message.extend([0; 4]);
    let bits = u8::try_from(octets.len() * 8).unwrap_or_default();
    message.extend([u8::try_from(family as i32).unwrap_or_default(), bits]);
    message.extend([0; ROUTE - 2]);
    message.extend(u16::try_from(attribute).unwrap_or_default().to_ne_bytes());
    message.extend(DESTINATION.to_ne_bytes());
    message.extend(octets);
    message
}

/// Kinds and data.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> + Clone {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(half_word(rest, 0)?);
        let kind = half_word(rest, 2)?;
        let data = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    })
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

pub(super) fn half_word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

// SPDX-License-Identifier: Apache-2.0
//! Rtnetlink: reads the host's interfaces, addresses, routes and neighbours, lets the interface receive the neighbour
//! solicitations for VIPs, and writes the routes of VIPs (`exported`). Calls are synchronous.
//!
//! The interface joins multicast groups by addresses with `autojoin`: the kernel keeps them without this process, and reports them
//! to switches.
//! Written by hand: eight requests do not outweigh three more crates (netlink-packet-route, netlink-packet-core, netlink-sys).

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use ipnet::IpNet;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendmsg, socket,
};

use crate::link::mac::Mac;

mod changes;
mod exported;

pub(crate) use changes::RouteChanges;

/// Marks an address as the edge's (`IFA_PROTO`). The kernel itself uses only numbers below 4 (`IFAPROT_*` in `linux/if_addr.h`).
const EDGE_PROTOCOL: u8 = 0x53;

const REQUEST: u16 = 0x1;
/// The kernel's mark of a list that changed while it was read.
const INTERRUPTED: u16 = 0x10;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const REPLACE: u16 = 0x100;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const NEWLINK: u16 = 16;
const GETLINK: u16 = 18;
const NEWADDR: u16 = 20;
const DELADDR: u16 = 21;
const GETADDR: u16 = 22;
const NEWROUTE: u16 = 24;
const DELROUTE: u16 = 25;
const GETROUTE: u16 = 26;
const NEWNEIGH: u16 = 28;
const GETNEIGH: u16 = 30;
const HEADER: usize = 16;
/// The main table of routes.
const MAIN: u8 = 254;
/// A list that changes while it is read is read again, so many times.
const MOST_DUMPS: usize = 20;
const IFF_UP: u32 = 1;
/// Receives frames to all multicast addresses (`linux/if.h`).
const IFF_ALLMULTI: u32 = 0x200;

/// A failed rtnetlink request.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
pub(crate) struct RouteError {
    what: String,
    source: io::Error,
}

impl RouteError {
    /// Whether the interface is in the group, although it has no address of it: so it is after it was down.
    pub(crate) fn is_joined_already(&self) -> bool {
        self.source.raw_os_error() == Some(libc::EADDRINUSE)
    }

    /// Whether the list changed each time that it was read. Entries may have been missing.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.source.kind() == io::ErrorKind::Interrupted
    }

    /// Whether the kernel has no room for another group: it has a limit for all that are joined by addresses
    /// (`net.core.optmem_max`).
    pub(crate) fn is_lack_of_room(&self) -> bool {
        matches!(self.source.raw_os_error(), Some(libc::ENOMEM | libc::ENOBUFS))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) mac: Mac,
    pub(crate) up: bool,
    /// Whether the interface is connected: frames that it sends leave it.
    pub(crate) has_carrier: bool,
    /// How often the interface was connected or disconnected (`IFLA_CARRIER_CHANGES`).
    pub(crate) carrier_changes: u32,
}

/// A route of the main table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// The destination.
    pub(crate) net: IpNet,
    /// The interface's index, if the route has one.
    pub(crate) device: Option<u32>,
    pub(crate) gateway: bool,
    /// The gateway's address, if there is one path to it.
    pub(crate) next_hop: Option<IpAddr>,
}

/// The addresses of an interface. What an earlier version of the edge has marked as VIPs is in neither list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    /// Its own, with their networks.
    pub(crate) own: Vec<IpNet>,
    /// The multicast groups that it joins by addresses, and whether these carry the edge's mark.
    pub(crate) groups: Vec<(Ipv6Addr, bool)>,
}

/// A socket in the network namespace in which it was opened.
#[derive(Debug)]
pub(crate) struct Rtnetlink {
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Rtnetlink {
    pub(crate) fn open() -> Result<Self, RouteError> {
        let fd =
            socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)
                .map_err(|errno| failed("open a netlink socket")(errno.into()))?;
        Ok(Self { fd, sequence: 0, buffer: vec![0; 1 << 17] })
    }

    pub(crate) fn link(&mut self, name: &str) -> Result<Option<Link>, RouteError> {
        let found = self.dump(GETLINK, &[0; 16], "list the interfaces", |kind, body| {
            let head = body.get(..16).filter(|_| kind == NEWLINK)?;
            let attributes = Attributes(&body[16..]);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
            (attributes.find(3).map(text).as_deref() == Some(name)).then(|| Link {
                name: name.to_owned(),
                index: u32_at(head, 4).unwrap_or(0),
                mac: attributes.find(1).and_then(|mac| mac.try_into().ok()).unwrap_or_default(),
                up: u32_at(head, 8).unwrap_or(0) & IFF_UP != 0,
                has_carrier: attributes.find(33).is_none_or(|carrier| carrier != [0]),
                carrier_changes: attributes.find(35).and_then(|changes| u32_at(changes, 0)).unwrap_or(0),
            })
        })?;
        Ok(found.into_iter().next())
    }

    /// The MTU of each interface, by its index.
    pub(crate) fn mtus(&mut self) -> Result<Vec<(u32, u32)>, RouteError> {
        self.dump(GETLINK, &[0; 16], "list the interfaces", |kind, body| {
            let mtu = Attributes(body.get(16..).filter(|_| kind == NEWLINK)?).find(4)?;
            u32_at(body, 4).zip(u32_at(mtu, 0))
        })
    }

    fn name(&mut self, index: u32) -> Result<Option<String>, RouteError> {
        let found = self.dump(GETLINK, &[0; 16], "list the interfaces", |_, body| {
            u32_at(body, 4).filter(|of| *of == index)?;
            let name = Attributes(body.get(16..)?).find(3)?;
            Some(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
        })?;
        Ok(found.into_iter().next())
    }

    /// The interface of the default route, of IPv4 first.
    pub(crate) fn default_interface(&mut self) -> Result<Option<String>, RouteError> {
        let routes = self.routes()?;
        let mut defaults: Vec<_> = routes.iter().filter(|route| route.net.prefix_len() == 0).collect();
        defaults.sort_by_key(|route| route.net.addr().is_ipv6());
        match defaults.iter().find_map(|route| route.device) {
            Some(index) => self.name(index),
            None => Ok(None),
        }
    }

    /// The addresses of an interface.
    pub(crate) fn addresses(&mut self, index: u32) -> Result<Addresses, RouteError> {
        let found = self.dump(GETADDR, &[0; 8], "list the addresses", |kind, body| {
            if kind != NEWADDR || u32_at(body, 4) != Some(index) {
                return None;
            }
            let attributes = Attributes(body.get(8..)?);
            let is_marked = attributes.find(11) == Some(&[EDGE_PROTOCOL]);
            let found = attributes.find(2).or(attributes.find(1)).and_then(address)?;
            Some((found, body[1], is_marked))
        })?;
        let mut addresses = Addresses::default();
        for (address, length, is_marked) in found {
            match address {
                IpAddr::V6(group) if group.is_multicast() => addresses.groups.push((group, is_marked)),
                address if !is_marked => addresses.own.extend(IpNet::new(address, length)),
                _ => {}
            }
        }
        Ok(addresses)
    }

    /// All addresses that carry the edge's mark, with the interface's index: groups, and VIPs of versions before the data plane in
    /// eBPF.
    pub(crate) fn marked(&mut self) -> Result<Vec<(u32, IpAddr)>, RouteError> {
        self.dump(GETADDR, &[0; 8], "list the addresses", |kind, body| {
            let attributes = Attributes(body.get(8..).filter(|_| kind == NEWADDR)?);
            attributes.find(11).filter(|mark| *mark == [EDGE_PROTOCOL])?;
            let address = attributes.find(2).or(attributes.find(1)).and_then(address);
            u32_at(body, 4).zip(address)
        })
    }

    /// The unicast routes of the main table.
    pub(crate) fn routes(&mut self) -> Result<Vec<Route>, RouteError> {
        const UNICAST: u8 = 1;
        self.dump(GETROUTE, &[0; 12], "list the routes", |kind, body| {
            let head = body.get(..12)?;
            if kind != NEWROUTE || head[4] != MAIN || head[7] != UNICAST {
                return None;
            }
            let attributes = Attributes(&body[12..]);
            let any: IpAddr =
                if i32::from(head[0]) == libc::AF_INET6 { [0; 16].into() } else { [0; 4].into() };
            let to = attributes.find(1).and_then(address).unwrap_or(any);
            Some(Route {
                net: IpNet::new(to, head[1]).ok()?,
                device: attributes.find(4).and_then(|bytes| u32_at(bytes, 0)),
                gateway: [5, 9, 18].iter().any(|kind| attributes.find(*kind).is_some()),
                next_hop: attributes.find(5).and_then(address),
            })
        })
    }

    /// The link-layer addresses of the neighbours on an interface.
    pub(crate) fn neighbours(&mut self, index: u32) -> Result<Vec<(IpAddr, Mac)>, RouteError> {
        self.dump(GETNEIGH, &[0; 12], "list the neighbours", |kind, body| {
            if kind != NEWNEIGH || u32_at(body, 4) != Some(index) {
                return None;
            }
            let attributes = Attributes(body.get(12..)?);
            let mac = attributes.find(2).and_then(|mac| mac.try_into().ok());
            attributes.find(1).and_then(address).zip(mac)
        })
    }

    /// Lets an interface join a multicast group, also without this process.
    pub(crate) fn join(&mut self, index: u32, group: Ipv6Addr) -> Result<(), RouteError> {
        const NODAD: u32 = 0x02;
        const NO_PREFIX_ROUTE: u32 = 0x200;
        const AUTOJOIN: u32 = 0x400;
        let mut body = address_body(index, group.into());
        attribute(&mut body, 8, &(NODAD | NO_PREFIX_ROUTE | AUTOJOIN).to_ne_bytes());
        attribute(&mut body, 11, &[EDGE_PROTOCOL]);
        self.request(NEWADDR, CREATE | REPLACE, &body, &format!("join the group {group}"))
    }

    /// Lets an interface receive the frames of all multicast groups, also without this process.
    pub(crate) fn receive_all_multicast(&mut self, index: u32) -> Result<(), RouteError> {
        // `struct ifinfomsg`: family and type, index, flags, and which of them to change.
        let body = [0, index, IFF_ALLMULTI, IFF_ALLMULTI].map(u32::to_ne_bytes).concat();
        self.request(NEWLINK, 0, &body, "receive all multicast frames")
    }

    /// Removes an address from an interface; none is success.
    pub(crate) fn remove(&mut self, index: u32, address: IpAddr) -> Result<(), RouteError> {
        let body = address_body(index, address);
        match self.request(DELADDR, 0, &body, &format!("remove the address {address}")) {
            Err(error) if error.source.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Ok(()),
            other => other,
        }
    }

    /// What `visit` makes of each entry of a list. One that changed meanwhile is read again, as entries may be missing.
    fn dump<T>(
        &mut self,
        kind: u16,
        body: &[u8],
        what: &str,
        visit: impl Fn(u16, &[u8]) -> Option<T>,
    ) -> Result<Vec<T>, RouteError> {
        for _ in 0..MOST_DUMPS {
            let (mut found, mut is_interrupted) = (Vec::new(), false);
            self.exchange(kind, DUMP, body, what, |kind, flags, body| {
                is_interrupted |= flags & INTERRUPTED != 0;
                found.extend(visit(kind, body));
            })?;
            if !is_interrupted {
                return Ok(found);
            }
        }
        Err(failed(what)(io::ErrorKind::Interrupted.into()))
    }

    fn request(&mut self, kind: u16, flags: u16, body: &[u8], what: &str) -> Result<(), RouteError> {
        self.exchange(kind, flags | ACK, body, what, |_, _, _| {})
    }

    /// Sends a request, and hands over the type, the flags and the body of each response, also of the one that ends a list.
    fn exchange(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        what: &str,
        mut visit: impl FnMut(u16, u16, &[u8]),
    ) -> Result<(), RouteError> {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let mut request = Vec::with_capacity(HEADER + body.len());
        request.extend_from_slice(&u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX).to_ne_bytes());
        request.extend_from_slice(&kind.to_ne_bytes());
        request.extend_from_slice(&(REQUEST | flags).to_ne_bytes());
        request.extend_from_slice(&self.sequence.to_ne_bytes());
        request.extend_from_slice(&[0; 4]);
        request.extend_from_slice(body);
        let failed = failed(what);
        let kernel = NetlinkAddr::new(0, 0);
        sendmsg(self.fd.as_raw_fd(), &[IoSlice::new(&request)], &[], MsgFlags::empty(), Some(&kernel))
            .map_err(|errno| failed(errno.into()))?;
        loop {
            let length = match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::empty()) {
                Err(Errno::EINTR) => continue,
                result => result.map_err(|errno| failed(errno.into()))?,
            };
            let mut rest = self.buffer.get(..length).unwrap_or_default();
            while let Some((kind, flags, sequence, body)) = next(&mut rest) {
                if sequence != self.sequence {
                    continue;
                }
                match kind {
                    DONE => {
                        visit(kind, flags, &[]);
                        return Ok(());
                    }
                    ERROR => match u32_at(body, 0).unwrap_or(0).cast_signed() {
                        0 => return Ok(()),
                        code => return Err(failed(io::Error::from_raw_os_error(code.saturating_neg()))),
                    },
                    _ => visit(kind, flags, body),
                }
            }
        }
    }
}

fn failed(what: &str) -> impl Fn(io::Error) -> RouteError {
    let what = what.to_owned();
    move |source| RouteError { what: what.clone(), source }
}

fn address_body(index: u32, address: IpAddr) -> Vec<u8> {
    let (family, length, octets) = match address {
        IpAddr::V4(address) => (libc::AF_INET, 32, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, 128, address.octets().to_vec()),
    };
    let mut body = vec![u8::try_from(family).unwrap_or(0), length, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    attribute(&mut body, 2, &octets);
    attribute(&mut body, 1, &octets);
    body
}

fn attribute(body: &mut Vec<u8>, kind: u16, data: &[u8]) {
    body.extend_from_slice(&u16::try_from(4 + data.len()).unwrap_or(u16::MAX).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(data);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// Takes the next message: its type, its flags, its sequence number and its body.
fn next<'b>(rest: &mut &'b [u8]) -> Option<(u16, u16, u32, &'b [u8])> {
    let length = usize::try_from(u32_at(rest, 0)?).ok()?;
    let whole = rest.get(..length).filter(|whole| whole.len() >= HEADER)?;
    let message = (u16_at(whole, 4)?, u16_at(whole, 6)?, u32_at(whole, 8)?, &whole[HEADER..]);
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(message)
}

/// The attributes of a message.
#[derive(Clone, Copy)]
struct Attributes<'b>(&'b [u8]);

impl<'b> Attributes<'b> {
    fn find(self, wanted: u16) -> Option<&'b [u8]> {
        const KIND: u16 = 0x3fff;
        let mut rest = self.0;
        loop {
            let length = usize::from(u16_at(rest, 0)?);
            let data = rest.get(4..length)?;
            if u16_at(rest, 2)? & KIND == wanted {
                return Some(data);
            }
            rest = rest.get(length.next_multiple_of(4)..)?;
        }
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match <[u8; 4]>::try_from(bytes) {
        Ok(four) => Some(four.into()),
        Err(_) => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! Connection tracking: lists the kernel's conntrack entries and deletes single ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::error::Error;
use crate::socket::{Reply, Socket, classify};
use crate::table::Family;
use crate::wire::{Attrs, Header, Message, Writer, flag};

/// `NFNL_SUBSYS_CTNETLINK`
const SUBSYSTEM: u16 = 1 << 8;
/// Names of the operations in errors.
const LIST: &str = "list conntrack entries";
const DELETE_ENTRIES: &str = "delete conntrack entries";
/// `IPCTNL_MSG_CT_GET`, `IPCTNL_MSG_CT_DELETE`
const GET: u16 = 1;
const DELETE: u16 = 2;
/// Number of deletions in one datagram; their replies are read before the next one.
const CHUNK: usize = 256;
/// Attempts at a dump that others interrupt.
const ATTEMPTS: usize = 16;

/// One direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// Source of the packets.
    pub source: SocketAddr,
    /// Destination of the packets.
    pub destination: SocketAddr,
    /// IPPROTO_*.
    pub protocol: u8,
}

/// A conntrack entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConntrackEntry {
    /// The first packet as received, before any translation.
    pub original: Tuple,
    /// The replies as received, before they are translated back: their source is the server that answers.
    pub reply: Tuple,
    /// IPS_*, see `Ct::DNAT`.
    pub status: u32,
    /// The mark that a rule gave it.
    pub mark: u32,
    id: u32,
    /// Of both directions, where it is not the default one.
    zone: Option<u16>,
    /// One direction has a zone of its own.
    has_direction_zone: bool,
}

impl ConntrackEntry {
    /// An entry in the default zone, as for tests of what is decided about entries.
    pub fn new(original: Tuple, reply: Tuple, status: u32) -> Self {
        Self { original, reply, status, mark: 0, id: 0, zone: None, has_direction_zone: false }
    }

    /// The same in another zone.
    #[must_use]
    pub fn in_zone(self, zone: u16) -> Self {
        Self { zone: Some(zone), ..self }
    }

    /// Whether both directions are in zone 0. Rules that do not mention zones see no others.
    pub fn is_in_default_zone(&self) -> bool {
        self.zone.unwrap_or(0) == 0 && !self.has_direction_zone
    }
}

/// A connection to conntrack, in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

impl Conntrack {
    /// Opens a connection in the network namespace of the calling thread. Needs `CAP_NET_ADMIN` there.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(0)? })
    }

    /// The entries of a family (`Ip` or `Ip6`) for which `keep` returns true. Protocols without ports have port 0.
    pub fn entries(
        &mut self,
        family: Family,
        keep: impl Fn(&ConntrackEntry) -> bool,
    ) -> Result<Vec<ConntrackEntry>, Error> {
        for _ in 0..ATTEMPTS {
            let sequence = self.socket.reserve_sequences(1);
            let mut request = Writer::new();
            request.message(header(GET, flag::DUMP, sequence, family), |_| {});
            let mut found = Vec::new();
            let visit = |message: &Message<'_>| found.extend(entry(message.attrs()).filter(&keep));
            if self.socket.exchange(&request, sequence, LIST, visit)? {
                return Ok(found);
            }
        }
        Err(Error::DumpInterrupted(LIST))
    }

    /// Deletes entries. An entry that no longer exists is not an error. Returns the number of deleted entries.
    pub fn delete(&mut self, entries: &[ConntrackEntry]) -> Result<usize, Error> {
        let mut deleted = 0;
        for chunk in entries.chunks(CHUNK) {
            self.socket.discard_pending()?;
            let mut request = Writer::new();
            for entry in chunk {
                let family = if entry.original.source.is_ipv4() { Family::Ip } else { Family::Ip6 };
                let sequence = self.socket.reserve_sequences(1);
                request.message(header(DELETE, flag::ACK, sequence, family), |m| {
                    m.nest(1, |tuple| write_tuple(tuple, &entry.original));
                    m.attr_u32(12, entry.id);
                    if let Some(zone) = entry.zone {
                        m.attr(18, &zone.to_be_bytes());
                    }
                });
            }
            self.socket.send(&[request.bytes()])?;
            let mut replies = 0;
            while replies < chunk.len() {
                let Some(messages) = self.socket.receive()? else {
                    return Err(Error::NoReply(DELETE_ENTRIES.to_owned()));
                };
                for message in messages {
                    match classify(&message, DELETE_ENTRIES) {
                        Reply::Done => deleted += 1,
                        Reply::Error(error) if error.errno == nix::errno::Errno::ENOENT => {}
                        Reply::Error(error) => return Err(error.into()),
                        Reply::Data => continue,
                    }
                    replies += 1;
                }
            }
        }
        Ok(deleted)
    }
}

fn header(message: u16, flags: u16, sequence: u32, family: Family) -> Header {
    let flags = flag::REQUEST | flags;
    Header { kind: SUBSYSTEM | message, flags, sequence, family: family as u8, resource: 0 }
}

fn write_tuple(out: &mut Writer, tuple: &Tuple) {
    out.nest(1, |ip| match (tuple.source.ip(), tuple.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ip.attr(1, &source.octets());
            ip.attr(2, &destination.octets());
        }
        (source, destination) => {
            ip.attr(3, &v6(source).octets());
            ip.attr(4, &v6(destination).octets());
        }
    });
    out.nest(2, |proto| {
        proto.attr_u8(1, tuple.protocol);
        proto.attr(2, &tuple.source.port().to_be_bytes());
        proto.attr(3, &tuple.destination.port().to_be_bytes());
    });
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

pub(crate) fn entry(attrs: Attrs<'_>) -> Option<ConntrackEntry> {
    Some(ConntrackEntry {
        original: tuple(attrs.nested(1))?,
        reply: tuple(attrs.nested(2))?,
        status: attrs.u32(3).unwrap_or(0),
        mark: attrs.u32(8).unwrap_or(0),
        id: attrs.u32(12)?,
        zone: attrs.find(18).and_then(number),
        has_direction_zone: [1, 2]
            .iter()
            .any(|direction| zone_of(attrs.nested(*direction)).is_some_and(|zone| zone != 0)),
    })
}

fn tuple(attrs: Attrs<'_>) -> Option<Tuple> {
    let (ip, proto) = (attrs.nested(1), attrs.nested(2));
    let address = |v4: u16, v6: u16| {
        let four = ip.find(v4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
        let six = ip.find(v6).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
        four.map(|octets| IpAddr::V4(Ipv4Addr::from(octets)))
            .or(six.map(|octets| IpAddr::V6(Ipv6Addr::from(octets))))
    };
    let port = |kind: u16| proto.find(kind).and_then(number).unwrap_or(0);
    Some(Tuple {
        source: SocketAddr::new(address(1, 3)?, port(2)),
        destination: SocketAddr::new(address(2, 4)?, port(3)),
        protocol: *proto.find(1)?.first()?,
    })
}

/// `CTA_TUPLE_ZONE`
fn zone_of(tuple: Attrs<'_>) -> Option<u16> {
    tuple.find(3).and_then(number)
}

fn number(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn written_tuple_decodes_to_itself() {
        for (source, destination) in [("10.0.0.1:5000", "10.0.0.2:53"), ("[fd00::1]:5000", "[fd00::2]:53")] {
            let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
            let written = Tuple { source, destination, protocol: 17 };
            let mut out = Writer::new();
            write_tuple(&mut out, &written);
            assert_eq!(tuple(Attrs(out.bytes())), Some(written));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (entry(Attrs(&bytes)), tuple(Attrs(&bytes)));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Connection tracking: reads the kernel's table of flows and deletes single ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::error::Error;
use crate::socket::{Answer, Socket, refusal};
use crate::table::Family;
use crate::wire::{Attrs, Head, Message, Writer, flag};

/// `NFNL_SUBSYS_CTNETLINK`
const SUBSYSTEM: u16 = 1 << 8;
/// `IPCTNL_MSG_CT_GET`, `IPCTNL_MSG_CT_DELETE`
const GET: u16 = 1;
const DELETE: u16 = 2;
/// How many deletions go out before their answers are read.
const CHUNK: usize = 256;
/// How often a disturbed dump is tried again.
const TRIES: usize = 16;

/// One direction of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// Where its packets come from.
    pub source: SocketAddr,
    /// Where its packets go.
    pub destination: SocketAddr,
    /// IPPROTO_*.
    pub protocol: u8,
}

/// A flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// As its first packet came, before any translation.
    pub original: Tuple,
    /// As the answers come, before they are translated back: their source is who really answers.
    pub reply: Tuple,
    /// IPS_*, see `Ct::DNAT`.
    pub status: u32,
    id: u32,
    zone: Option<u16>,
}

/// A connection to conntrack of the network namespace in which it was opened.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

impl Conntrack {
    /// Opens it in the network namespace of the calling thread. Needs `CAP_NET_ADMIN` there.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(0)? })
    }

    /// The flows of a family (`Ip` or `Ip6`) that `keep` says yes to. Flows without ports come with port 0.
    pub fn flows(&mut self, family: Family, keep: impl Fn(&Flow) -> bool) -> Result<Vec<Flow>, Error> {
        for _ in 0..TRIES {
            let sequence = self.socket.reserve(1);
            let mut request = Writer::new();
            request.message(head(GET, flag::DUMP, sequence, family), |_| {});
            let mut found = Vec::new();
            let visit = |message: &Message<'_>| found.extend(flow(message.attrs()).filter(&keep));
            if self.socket.exchange(&request, sequence, "list flows", visit)? {
                return Ok(found);
            }
        }
        Err(Error::Torn("conntrack"))
    }

    /// Deletes flows; one that has gone meanwhile is no error. Returns how many were deleted.
    pub fn delete(&mut self, flows: &[Flow]) -> Result<usize, Error> {
        let mut deleted = 0;
        for chunk in flows.chunks(CHUNK) {
            self.socket.drain()?;
            let mut request = Writer::new();
            for flow in chunk {
                let family = if flow.original.source.is_ipv4() { Family::Ip } else { Family::Ip6 };
                let sequence = self.socket.reserve(1);
                request.message(head(DELETE, flag::ACK, sequence, family), |m| {
                    m.nest(1, |tuple| write_tuple(tuple, &flow.original));
                    m.attr_u32(12, flow.id);
                    if let Some(zone) = flow.zone {
                        m.attr(18, &zone.to_be_bytes());
                    }
                });
            }
            self.socket.send(&[request.bytes()])?;
            let mut answers = 0;
            while answers < chunk.len() {
                let Some(messages) = self.socket.receive()? else {
                    return Err(Error::NoAnswer("delete flows".to_owned()));
                };
                for message in messages {
                    match refusal(&message, "delete a flow") {
                        Answer::Done => deleted += 1,
                        Answer::Refused(refusal) if refusal.errno == nix::errno::Errno::ENOENT => {}
                        Answer::Refused(refusal) => return Err(refusal.into()),
                        Answer::Data => continue,
                    }
                    answers += 1;
                }
            }
        }
        Ok(deleted)
    }
}

fn head(message: u16, flags: u16, sequence: u32, family: Family) -> Head {
    let flags = flag::REQUEST | flags;
    Head { kind: SUBSYSTEM | message, flags, sequence, family: family as u8, resource: 0 }
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

pub(crate) fn flow(attrs: Attrs<'_>) -> Option<Flow> {
    Some(Flow {
        original: tuple(attrs.nested(1))?,
        reply: tuple(attrs.nested(2))?,
        status: attrs.u32(3).unwrap_or(0),
        id: attrs.u32(12)?,
        zone: attrs.find(18).and_then(number),
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

fn number(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_tuple_is_read_as_it_was_written() {
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
            let _ = (flow(Attrs(&bytes)), tuple(Attrs(&bytes)));
        }
    }
}

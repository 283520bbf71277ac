// SPDX-License-Identifier: Apache-2.0
//! Builds the frames of tests. Lengths and checksums are correct, so that a kernel accepts them.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{checksum, protocol};

/// The sender of frames, unless another is chosen: the clients' router.
pub const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// A packet to build.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Link-layer destination.
    pub to: [u8; 6],
    /// Link-layer sender.
    pub from: [u8; 6],
    /// Bytes between the Ethernet addresses and the type of IP: VLAN tags.
    pub tags: Vec<u8>,
    /// Source address.
    pub source: IpAddr,
    /// Destination address, of the same family.
    pub destination: IpAddr,
    /// Protocol of the payload.
    pub protocol: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv4 options, or IPv6 extension headers, whose last "next header" is the protocol. Padded to
    /// four bytes for IPv4. The first byte of this vector for IPv6 is the first extension's type.
    pub options: Vec<u8>,
    /// IPv4: id, flags and offset.
    pub fragment: [u8; 4],
    /// Payload.
    pub payload: Vec<u8>,
}

impl Frame {
    /// A packet with this payload.
    pub fn new(source: IpAddr, destination: IpAddr, protocol: u8, payload: Vec<u8>) -> Self {
        Self {
            to: [0; 6],
            from: ROUTER,
            tags: Vec::new(),
            source,
            destination,
            protocol,
            hop_limit: 64,
            options: Vec::new(),
            fragment: [0; 4],
            payload,
        }
    }

    /// A TCP segment.
    pub fn tcp(client: (IpAddr, u16), vip: (IpAddr, u16), flags: u8) -> Self {
        let mut header = vec![0; 20];
        header[..2].copy_from_slice(&client.1.to_be_bytes());
        header[2..4].copy_from_slice(&vip.1.to_be_bytes());
        header[12] = 5 << 4;
        header[13] = flags;
        let sum = transport_checksum(client.0, vip.0, protocol::TCP, &header);
        header[16..18].copy_from_slice(&sum.to_be_bytes());
        Self::new(client.0, vip.0, protocol::TCP, header)
    }

    /// A datagram.
    pub fn udp(client: (IpAddr, u16), vip: (IpAddr, u16), data: &[u8]) -> Self {
        let mut header = [client.1.to_be_bytes(), vip.1.to_be_bytes()].concat();
        let length = u16::try_from(8 + data.len()).unwrap_or(u16::MAX);
        header.extend(length.to_be_bytes());
        header.extend([0, 0]);
        header.extend(data);
        let sum = transport_checksum(client.0, vip.0, protocol::UDP, &header);
        header[6..8].copy_from_slice(&sum.to_be_bytes());
        Self::new(client.0, vip.0, protocol::UDP, header)
    }

    /// An ICMP message of the addresses' family.
    pub fn icmp(source: IpAddr, destination: IpAddr, kind: u8, code: u8, body: &[u8]) -> Self {
        let mut message = vec![kind, code, 0, 0];
        message.extend(body);
        let (protocol, sum) = if destination.is_ipv4() {
            (protocol::ICMP, checksum::finish(checksum::sum(&message)))
        } else {
            (protocol::ICMP6, transport_checksum(source, destination, protocol::ICMP6, &message))
        };
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        Self::new(source, destination, protocol, message)
    }

    /// An ICMP error that quotes the first `length` bytes of this packet.
    pub fn error(
        source: IpAddr,
        destination: IpAddr,
        kind: u8,
        code: u8,
        quoted: &Self,
        length: usize,
    ) -> Self {
        let packet = quoted.packet();
        let body = [&[0; 4][..], &packet[..packet.len().min(length)]].concat();
        Self::icmp(source, destination, kind, code, &body)
    }

    /// A fragment of an IPv4 packet.
    #[must_use]
    pub fn fragment4(mut self, id: u16, offset: u16, more: bool) -> Self {
        let position = (offset / 8) | if more { 0x2000 } else { 0 };
        let ([a, b], [c, d]) = (id.to_be_bytes(), position.to_be_bytes());
        self.fragment = [a, b, c, d];
        self
    }

    /// A fragment of an IPv6 packet.
    #[must_use]
    pub fn fragment6(mut self, id: u32, offset: u16, more: bool) -> Self {
        let position = (offset & !7) | u16::from(more);
        self.options = vec![44, self.protocol, 0];
        self.options.extend(position.to_be_bytes());
        self.options.extend(id.to_be_bytes());
        self
    }

    /// A fragment of either family.
    #[must_use]
    pub fn fragment(self, id: u16, offset: u16, more: bool) -> Self {
        if self.destination.is_ipv4() {
            self.fragment4(id, offset, more)
        } else {
            self.fragment6(u32::from(id), offset, more)
        }
    }

    /// The IP packet.
    pub fn packet(&self) -> Vec<u8> {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => self.packet4(source, destination),
            (IpAddr::V6(source), IpAddr::V6(destination)) => self.packet6(source, destination),
            _ => Vec::new(),
        }
    }

    fn packet4(&self, source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
        let length = 20 + self.options.len();
        let words = u8::try_from(length / 4).unwrap_or(15) & 15;
        let total = u16::try_from(length + self.payload.len()).unwrap_or(u16::MAX);
        let mut header = vec![0x40 | words, 0];
        header.extend(total.to_be_bytes());
        header.extend(self.fragment);
        header.extend([self.hop_limit, self.protocol, 0, 0]);
        header.extend(source.octets());
        header.extend(destination.octets());
        header.extend(&self.options);
        let sum = checksum::finish(checksum::sum(&header));
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        header.extend(&self.payload);
        header
    }

    fn packet6(&self, source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
        let (first, extensions) = match self.options.split_first() {
            Some((first, extensions)) => (*first, extensions),
            None => (self.protocol, &[][..]),
        };
        let length = u16::try_from(extensions.len() + self.payload.len()).unwrap_or(u16::MAX);
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend(length.to_be_bytes());
        packet.extend([first, self.hop_limit]);
        packet.extend(source.octets());
        packet.extend(destination.octets());
        packet.extend(extensions);
        packet.extend(&self.payload);
        packet
    }

    /// The frame.
    pub fn bytes(&self) -> Vec<u8> {
        let kind = if self.destination.is_ipv4() { [8, 0] } else { [0x86, 0xdd] };
        [&self.to[..], &self.from, &self.tags, &kind, &self.packet()].concat()
    }
}

/// An ARP request of `ROUTER`.
pub fn arp_request(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(ROUTER);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(ROUTER);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// A neighbour solicitation of `ROUTER`, with its link-layer address unless the sender is
/// unspecified.
pub fn solicitation(sender: Ipv6Addr, target: Ipv6Addr) -> Frame {
    let last = target.octets();
    let mut group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).octets();
    group[13..].copy_from_slice(&last[13..]);
    let mut body = vec![0; 4];
    body.extend(last);
    if !sender.is_unspecified() {
        body.extend([1, 1]);
        body.extend(ROUTER);
    }
    let mut frame = Frame::icmp(sender.into(), IpAddr::from(group), 135, 0, &body);
    frame.to = [0x33, 0x33, 0xff, last[13], last[14], last[15]];
    frame.hop_limit = 255;
    frame
}

/// The checksum over the pseudo-header and a message whose checksum is zero.
pub fn transport_checksum(source: IpAddr, destination: IpAddr, protocol: u8, message: &[u8]) -> u16 {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => checksum::sum(&address.octets()),
        IpAddr::V6(address) => checksum::sum(&address.octets()),
    };
    let length = u32::try_from(message.len()).unwrap_or(0);
    let sum = octets(source) + octets(destination) + u32::from(protocol) + length + checksum::sum(message);
    checksum::finish(sum)
}

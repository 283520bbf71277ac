// SPDX-License-Identifier: Apache-2.0
//! The ports of TCP and UDP.

use crate::read::word;
use crate::{Address, Datagram, Packet, protocol};

/// What the program needs of a packet's transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP: both ports as in the header, and the flags.
    Tcp(u32, TcpFlags),
    /// UDP: both ports as in the header.
    Udp(u32),
    /// ICMP of the datagram's family.
    Icmp,
    /// A protocol without ports.
    Other,
}

/// The flags of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    const FIN: u8 = 1;
    const SYN: u8 = 2;
    const RST: u8 = 4;
    const ACK: u8 = 16;

    /// Whether the segment opens a connection.
    #[inline(always)]
    pub fn opens(self) -> bool {
        self.0 & (Self::FIN | Self::SYN | Self::RST | Self::ACK) == Self::SYN
    }

    /// Whether the segment closes its connection, or its direction of it.
    #[inline(always)]
    pub fn closes(self) -> bool {
        self.0 & (Self::FIN | Self::RST) != 0
    }

    /// Whether the segment resets its connection: none of it follows.
    #[inline(always)]
    pub fn resets(self) -> bool {
        self.0 & Self::RST != 0
    }
}

/// Parses the transport header of a whole packet or of a first fragment. `None` if it is cut off.
#[inline(always)]
pub fn transport<A: Address, P: Packet + ?Sized>(packet: &P, datagram: &Datagram<A>) -> Option<Transport> {
    Some(match datagram.protocol {
        protocol::TCP => {
            let header: &[u8; 20] = packet.at(datagram.payload)?;
            Transport::Tcp(word(header, 0), TcpFlags(header[13]))
        }
        protocol::UDP => Transport::Udp(word(packet.at::<8>(datagram.payload)?, 0)),
        other if other == A::ICMP => Transport::Icmp,
        _ => Transport::Other,
    })
}

/// The ports in the first bytes of TCP or UDP, which is all that an ICMP error must quote.
#[inline(always)]
pub fn quoted_ports<A: Address, P: Packet + ?Sized>(packet: &P, datagram: &Datagram<A>) -> Option<u32> {
    let has_ports = matches!(datagram.protocol, protocol::TCP | protocol::UDP);
    has_ports.then(|| Some(word(packet.at::<8>(datagram.payload)?, 0)))?
}

/// Exchanges source and destination port.
#[inline(always)]
pub fn swapped(ports: u32) -> u32 {
    ports.rotate_left(16)
}

/// The source port of both ports as in the header.
#[inline(always)]
pub fn source_port(ports: u32) -> u16 {
    let [a, b, ..] = ports.to_ne_bytes();
    u16::from_be_bytes([a, b])
}

/// The destination port of both ports as in the header.
#[inline(always)]
pub fn destination_port(ports: u32) -> u16 {
    let [.., a, b] = ports.to_ne_bytes();
    u16::from_be_bytes([a, b])
}

/// Both ports as in a header.
pub fn ports(source: u16, destination: u16) -> u32 {
    let ([a, b], [c, d]) = (source.to_be_bytes(), destination.to_be_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

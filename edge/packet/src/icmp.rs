// SPDX-License-Identifier: Apache-2.0
//! ICMP to a VIP: echo requests, and errors that are about a target's packet to a client.

use crate::maps::FlowKey;
use crate::{Address, Datagram, Fragment, Packet, transport};

const HEADER: usize = 8;
const ECHO4: u8 = 8;
const UNREACHABLE4: u8 = 3;
const TIME_EXCEEDED4: u8 = 11;
const PARAMETER_PROBLEM4: u8 = 12;
const ECHO6: u8 = 128;
/// Types 1 to 4 of `ICMPv6`: unreachable, too big, time exceeded, parameter problem.
const LAST_ERROR6: u8 = 4;
const SOLICITATION6: u8 = 135;
const ADVERTISEMENT6: u8 = 136;

/// What an ICMP message to a VIP asks of the edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpKind {
    /// An echo request.
    Echo,
    /// An error about a packet that the sender quotes.
    Error,
    /// A neighbour solicitation or advertisement.
    Neighbour,
    /// Anything else.
    Other,
}

/// An ICMP message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Icmp {
    /// Kind of the message.
    pub kind: IcmpKind,
    /// Offset of the message in the frame.
    pub offset: usize,
}

/// Parses the header of an ICMP message. `None` if it is cut off.
#[inline(always)]
pub fn icmp<A: Address, P: Packet + ?Sized>(packet: &P, datagram: &Datagram<A>) -> Option<Icmp> {
    let header: &[u8; HEADER] = packet.at(datagram.payload)?;
    let is_v4 = A::ICMP == crate::protocol::ICMP;
    let kind = match header[0] {
        ECHO4 if is_v4 => IcmpKind::Echo,
        UNREACHABLE4 | TIME_EXCEEDED4 | PARAMETER_PROBLEM4 if is_v4 => IcmpKind::Error,
        ECHO6 if !is_v4 => IcmpKind::Echo,
        1..=LAST_ERROR6 if !is_v4 => IcmpKind::Error,
        SOLICITATION6 | ADVERTISEMENT6 if !is_v4 => IcmpKind::Neighbour,
        _ => IcmpKind::Other,
    };
    Some(Icmp { kind, offset: datagram.payload })
}

/// The flow that an ICMP error to `vip` is about. The error quotes a target's reply to the client,
/// so source and destination are swapped. `None` if the quoted packet is not from the VIP, has no
/// ports, or is cut off before them.
#[inline(always)]
pub fn quoted_flow<A: Address, P: Packet + ?Sized>(packet: &P, icmp: Icmp, vip: A) -> Option<FlowKey<A>> {
    let quoted = A::quoted(packet, icmp.offset + HEADER)?;
    if quoted.source != vip || matches!(quoted.fragment, Fragment::Later(_)) {
        return None;
    }
    let ports = transport::quoted_ports(packet, &quoted)?;
    Some(FlowKey {
        client: quoted.destination,
        vip,
        ports: transport::swapped(ports),
        protocol: u32::from(quoted.protocol),
    })
}

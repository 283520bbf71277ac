// SPDX-License-Identifier: Apache-2.0
//! IPv6 headers and extension headers (RFC 8200).

use crate::read::{MAX_HEADERS, be16, word};
use crate::{Datagram, Fragment, Packet, V6};

const LENGTH: usize = 40;
/// More extension headers than this have no use (RFC 9098 has numbers), and the verifier follows
/// each path.
const MAX_EXTENSIONS: usize = 6;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;

#[inline(always)]
pub(crate) fn destination<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<V6> {
    let header: &[u8; LENGTH] = packet.at(offset)?;
    (header[0] >> 4 == 6).then(|| address(header, 24))
}

#[inline(always)]
fn address(header: &[u8; LENGTH], at: usize) -> V6 {
    V6([word(header, at), word(header, at + 4), word(header, at + 8), word(header, at + 12)])
}

/// The headers of a packet that lies whole in the frame.
#[inline(always)]
pub(crate) fn datagram<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<V6>> {
    whole(packet, offset, header(packet, offset)?)
}

/// The same without extension headers.
#[inline(always)]
pub(crate) fn plain<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<V6>> {
    let datagram = first(packet, offset)?;
    if is_extension(datagram.protocol) { None } else { whole(packet, offset, datagram) }
}

#[inline(always)]
fn whole<P: Packet + ?Sized>(packet: &P, offset: usize, datagram: Datagram<V6>) -> Option<Datagram<V6>> {
    let end = offset + LENGTH + usize::from(be16(packet.at::<LENGTH>(offset)?, 4));
    (end <= packet.length() && datagram.payload <= end).then_some(datagram)
}

/// The headers alone.
#[inline(always)]
pub(crate) fn header<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<V6>> {
    let datagram = first(packet, offset)?;
    if is_extension(datagram.protocol) { extensions(packet, datagram) } else { Some(datagram) }
}

/// The first header alone.
#[inline(always)]
fn first<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<V6>> {
    let header: &[u8; LENGTH] = packet.at(offset)?;
    if header[0] >> 4 != 6 {
        return None;
    }
    Some(Datagram {
        source: address(header, 8),
        destination: address(header, 24),
        protocol: header[6],
        hop_limit: header[7],
        payload: offset + LENGTH,
        fragment: Fragment::Whole,
    })
}

#[inline(always)]
fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION_OPTIONS)
}

/// Skips the extension headers. What follows the header of a later fragment is payload.
#[inline(always)]
fn extensions<P: Packet + ?Sized>(packet: &P, mut datagram: Datagram<V6>) -> Option<Datagram<V6>> {
    for _ in 0..MAX_EXTENSIONS {
        if datagram.payload > MAX_HEADERS {
            return None;
        }
        let header: &[u8; 8] = packet.at(datagram.payload)?;
        let length = match datagram.protocol {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (usize::from(header[1]) + 1) * 8,
            AUTHENTICATION => (usize::from(header[1]) + 2) * 4,
            FRAGMENT => {
                let (position, id) = (be16(header, 2), u32::from_be(word(header, 4)));
                datagram.fragment = if position & !7 != 0 {
                    Fragment::Later(id)
                } else if position & 1 != 0 {
                    Fragment::First(id)
                } else {
                    // An "atomic" fragment (RFC 6946).
                    Fragment::Whole
                };
                8
            }
            _ => return Some(datagram),
        };
        datagram.protocol = header[0];
        datagram.payload += length;
        if matches!(datagram.fragment, Fragment::Later(_)) {
            return Some(datagram);
        }
    }
    (!is_extension(datagram.protocol)).then_some(datagram)
}

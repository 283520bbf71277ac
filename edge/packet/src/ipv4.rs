// SPDX-License-Identifier: Apache-2.0
//! IPv4 headers (RFC 791).

use crate::read::{be16, word};
use crate::{Datagram, Fragment, Packet, V4};

const LENGTH: usize = 20;
const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

#[inline(always)]
pub(crate) fn destination<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<V4> {
    let header: &[u8; LENGTH] = packet.at(offset)?;
    (header[0] >> 4 == 4).then(|| V4(word(header, 16)))
}

/// The header of a packet that lies whole in the frame.
#[inline(always)]
pub(crate) fn datagram<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<V4>> {
    let datagram = header(packet, offset)?;
    let total = usize::from(be16(packet.at::<LENGTH>(offset)?, 2));
    let is_whole = offset + total <= packet.length() && datagram.payload <= offset + total;
    is_whole.then_some(datagram)
}

/// The header alone.
#[inline(always)]
pub(crate) fn header<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<V4>> {
    let header: &[u8; LENGTH] = packet.at(offset)?;
    let length = usize::from(header[0] & 15) * 4;
    if header[0] >> 4 != 4 || length < LENGTH {
        return None;
    }
    let position = be16(header, 6);
    let id = u32::from(be16(header, 4));
    let fragment = if position & (MORE_FRAGMENTS | FRAGMENT_OFFSET) == 0 {
        Fragment::Whole
    } else if position & FRAGMENT_OFFSET == 0 {
        Fragment::First(id)
    } else {
        Fragment::Later(id)
    };
    Some(Datagram {
        source: V4(word(header, 12)),
        destination: V4(word(header, 16)),
        protocol: header[9],
        hop_limit: header[8],
        payload: offset + length,
        fragment,
    })
}

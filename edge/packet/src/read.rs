// SPDX-License-Identifier: Apache-2.0
//! The only way in which parsers see a packet.

/// Headers may reach this far into a frame. The program makes so much of each frame readable, and
/// the verifier needs a limit of all offsets.
pub const MAX_HEADERS: usize = 256;

/// A frame from its Ethernet header on.
pub trait Packet {
    /// `N` bytes at `offset`, or `None` if the frame, or the readable part of it, ends before.
    fn at<const N: usize>(&self, offset: usize) -> Option<&[u8; N]>;

    /// The length of the whole frame.
    fn length(&self) -> usize;
}

impl Packet for [u8] {
    fn at<const N: usize>(&self, offset: usize) -> Option<&[u8; N]> {
        let readable = &self[..self.len().min(MAX_HEADERS)];
        readable.get(offset..)?.first_chunk()
    }

    fn length(&self) -> usize {
        self.len()
    }
}

/// Four bytes of a header, in the order in which they lie in the packet.
#[inline(always)]
pub(crate) fn word<const N: usize>(header: &[u8; N], at: usize) -> u32 {
    u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

/// A number of two bytes.
#[inline(always)]
pub(crate) fn be16<const N: usize>(header: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([header[at], header[at + 1]])
}

// SPDX-License-Identifier: Apache-2.0
//! Rtnetlink requests about one link, by hand: four requests do not outweigh the crates. Calls are synchronous.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendmsg, socket,
};

/// Bytes of `nlmsghdr` and of `ifinfomsg`.
const HEADER: usize = 16;
const LINK: usize = 16;
const REQUEST_WITH_ACK: u16 = 0x1 | 0x4;
const ERROR: u16 = 2;
/// The upper bits of an attribute's kind are flags.
const KIND: u16 = 0x3fff;

/// A socket in the network namespace of the calling thread.
#[derive(Debug)]
pub(crate) struct Netlink {
    fd: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        Ok(Self { fd, sequence: 0 })
    }

    /// Sends a request, and returns the body of the last message before the acknowledgement, if there is one.
    pub(crate) fn request(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Option<Vec<u8>>> {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let length = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
        let mut request = length.to_ne_bytes().to_vec();
        request.extend_from_slice(&kind.to_ne_bytes());
        request.extend_from_slice(&(REQUEST_WITH_ACK | flags).to_ne_bytes());
        request.extend_from_slice(&self.sequence.to_ne_bytes());
        request.extend_from_slice(&[0; 4]);
        request.extend_from_slice(body);
        let kernel = NetlinkAddr::new(0, 0);
        sendmsg(self.fd.as_raw_fd(), &[IoSlice::new(&request)], &[], MsgFlags::empty(), Some(&kernel))?;
        let (mut answer, mut buffer) = (None, vec![0; 1 << 16]);
        loop {
            let length = match recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Err(Errno::EINTR) => continue,
                length => length?,
            };
            let mut rest = buffer.get(..length).unwrap_or_default();
            while let Some((kind, sequence, body)) = next(&mut rest) {
                if sequence != self.sequence {
                    continue;
                }
                if kind != ERROR {
                    answer = Some(body.to_vec());
                    continue;
                }
                return match word(body, 0).unwrap_or_default().cast_signed() {
                    0 => Ok(answer),
                    code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                };
            }
        }
    }
}

/// Takes the next message: its kind, its sequence number and its body.
fn next<'b>(rest: &mut &'b [u8]) -> Option<(u16, u32, &'b [u8])> {
    let length = usize::try_from(word(rest, 0)?).ok()?;
    let whole = rest.get(..length).filter(|whole| whole.len() >= HEADER)?;
    let kind = u16::from_ne_bytes(whole.get(4..6)?.try_into().ok()?);
    let message = (kind, word(whole, 8)?, whole.get(HEADER..)?);
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(message)
}

/// `struct ifinfomsg` of a link by its index (zero: by an attribute), with these flags of the mask.
pub(crate) fn link(index: u32, flags: u32, mask: u32) -> Vec<u8> {
    [0, index, flags, mask].map(u32::to_ne_bytes).concat()
}

pub(crate) fn attribute(body: &mut Vec<u8>, kind: u16, data: &[u8]) {
    body.extend_from_slice(&u16::try_from(4 + data.len()).unwrap_or(u16::MAX).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(data);
    body.resize(body.len().next_multiple_of(4), 0);
}

pub(crate) fn nested(body: &mut Vec<u8>, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut inner = Vec::new();
    fill(&mut inner);
    attribute(body, kind, &inner);
}

/// The attributes of a link's message.
pub(crate) fn of_link(message: &[u8]) -> &[u8] {
    message.get(LINK..).unwrap_or_default()
}

/// The data of the first attribute of this kind.
pub(crate) fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(attributes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(attributes.get(2..4)?.try_into().ok()?);
        let data = attributes.get(4..length)?;
        if kind & KIND == wanted {
            return Some(data);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

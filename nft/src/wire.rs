// SPDX-License-Identifier: Apache-2.0
//! Encodes and decodes netlink messages and their attributes.
//!
//! The rest of the crate writes requests and reads replies through this module. It knows the framing of linux/netlink.h and
//! the header of linux/netfilter/nfnetlink.h, but not the meaning of attributes. Decoding never fails: a truncated message
//! or a wrong length ends the iteration.

/// Set on an attribute that holds other attributes (`NLA_F_NESTED`).
const NESTED: u16 = 0x8000;
/// Mask of an attribute's number: its type without `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const KIND_MASK: u16 = 0x3fff;
/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Length of `struct nfgenmsg`.
const SUBHEADER: usize = 4;

pub(crate) mod flag {
    //! Flags of a request (linux/netlink.h).
    pub(crate) const REQUEST: u16 = 0x1;
    pub(crate) const ACK: u16 = 0x4;
    /// On a reply: a change interrupted the dump, which may be inconsistent.
    pub(crate) const DUMP_INTERRUPTED: u16 = 0x10;
    pub(crate) const DUMP: u16 = 0x300;
    pub(crate) const EXCLUSIVE: u16 = 0x200;
    pub(crate) const CREATE: u16 = 0x400;
    pub(crate) const APPEND: u16 = 0x800;
    /// On an error: attributes of the extended acknowledgement follow.
    pub(crate) const ACK_TLVS: u16 = 0x200;
}

/// Encodes messages into one buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    overflow: bool,
}

impl Writer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether an attribute exceeded the 16 bits of its length. Such a buffer must not be sent.
    pub(crate) fn overflowed(&self) -> bool {
        self.overflow
    }

    /// Writes one netfilter message: both headers, and the attributes that `body` writes.
    pub(crate) fn message(&mut self, header: Header, body: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&header.kind.to_ne_bytes());
        self.bytes.extend_from_slice(&header.flags.to_ne_bytes());
        self.bytes.extend_from_slice(&header.sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&[header.family, 0]);
        self.bytes.extend_from_slice(&header.resource.to_be_bytes());
        body(self);
        if let Ok(length) = u32::try_from(self.bytes.len() - start) {
            self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        } else {
            self.overflow = true;
        }
    }

    /// Adds flags to the message that starts at `offset`.
    pub(crate) fn add_flags(&mut self, offset: usize, flags: u16) {
        let at = offset + 6;
        let old = u16::from_ne_bytes([self.bytes[at], self.bytes[at + 1]]);
        self.bytes[at..at + 2].copy_from_slice(&(old | flags).to_ne_bytes());
    }

    /// Gives the messages consecutive sequence numbers from `first` on.
    pub(crate) fn renumber(&mut self, first: u32) {
        let (mut at, mut sequence) = (0, first);
        while let Some(length) = ne_u32(&self.bytes, at).and_then(|length| usize::try_from(length).ok()) {
            self.bytes[at + 8..at + 12].copy_from_slice(&sequence.to_ne_bytes());
            at += length.max(HEADER);
            sequence = sequence.wrapping_add(1);
        }
    }

    pub(crate) fn attr(&mut self, kind: u16, data: &[u8]) {
        let start = self.open(kind);
        self.bytes.extend_from_slice(data);
        self.close(start);
    }

    pub(crate) fn attr_u8(&mut self, kind: u16, value: u8) {
        self.attr(kind, &[value]);
    }

    /// Network byte order, which all numbers of `nf_tables` and ctnetlink have.
    pub(crate) fn attr_u32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_be_bytes());
    }

    pub(crate) fn attr_u64(&mut self, kind: u16, value: u64) {
        self.attr(kind, &value.to_be_bytes());
    }

    /// Writes a zero after the string.
    pub(crate) fn attr_str(&mut self, kind: u16, value: &str) {
        let start = self.open(kind);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.close(start);
    }

    pub(crate) fn nest(&mut self, kind: u16, body: impl FnOnce(&mut Self)) {
        let start = self.open(kind | NESTED);
        body(self);
        self.close(start);
    }

    /// Appends attributes from another writer.
    pub(crate) fn append(&mut self, other: &Self) {
        self.bytes.extend_from_slice(&other.bytes);
        self.overflow |= other.overflow;
    }

    fn open(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    fn close(&mut self, start: usize) {
        match u16::try_from(self.bytes.len() - start) {
            Ok(length) => self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes()),
            Err(_) => self.overflow = true,
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Both headers of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Subsystem in the upper byte and message in the lower, or a control message of netlink.
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    pub(crate) family: u8,
    pub(crate) resource: u16,
}

/// A received message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    /// Netlink port of the sender; 0 is the kernel.
    pub(crate) port: u32,
    /// Everything after `struct nlmsghdr`.
    pub(crate) payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Family in the netfilter header, if there is one.
    pub(crate) fn family(&self) -> Option<u8> {
        self.payload.first().copied()
    }

    /// Attributes after the netfilter header.
    pub(crate) fn attrs(&self) -> Attrs<'a> {
        Attrs(self.payload.get(SUBHEADER..).unwrap_or_default())
    }
}

/// Iterates over the messages of one received datagram.
#[derive(Debug, Clone)]
pub(crate) struct Messages<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let length = usize::try_from(ne_u32(self.0, 0)?).ok()?;
        let whole = self.0.get(..length).filter(|whole| whole.len() >= HEADER)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: ne_u16(whole, 4)?,
            flags: ne_u16(whole, 6)?,
            sequence: ne_u32(whole, 8)?,
            port: ne_u32(whole, 12)?,
            payload: &whole[HEADER..],
        })
    }
}

/// A list of attributes: numbers and contents.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attrs<'a>(pub(crate) &'a [u8]);

impl<'a> Attrs<'a> {
    /// The first attribute with this number.
    pub(crate) fn find(self, kind: u16) -> Option<&'a [u8]> {
        self.into_iter().find_map(|(found, data)| (found == kind).then_some(data))
    }

    /// The attributes inside the first attribute with this number; empty if there is none.
    pub(crate) fn nested(self, kind: u16) -> Attrs<'a> {
        Attrs(self.find(kind).unwrap_or_default())
    }

    pub(crate) fn u32(self, kind: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.find(kind)?.try_into().ok()?))
    }

    pub(crate) fn u64(self, kind: u16) -> Option<u64> {
        Some(u64::from_be_bytes(self.find(kind)?.try_into().ok()?))
    }

    pub(crate) fn string(self, kind: u16) -> Option<String> {
        let bytes = self.find(kind)?;
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

impl<'a> IntoIterator for Attrs<'a> {
    type Item = (u16, &'a [u8]);
    type IntoIter = AttrIter<'a>;

    fn into_iter(self) -> AttrIter<'a> {
        AttrIter(self.0)
    }
}

/// Iterates over attributes.
#[derive(Debug, Clone)]
pub(crate) struct AttrIter<'a>(&'a [u8]);

impl<'a> Iterator for AttrIter<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let length = usize::from(ne_u16(self.0, 0)?);
        let kind = ne_u16(self.0, 2)? & KIND_MASK;
        let data = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    }
}

/// A number in host byte order at an offset.
pub(crate) fn ne_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn ne_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEST_HEADER: Header = Header { kind: 0xa00, flags: 1, sequence: 7, family: 2, resource: 10 };

    #[test]
    fn written_messages_decode_to_their_content() {
        let mut writer = Writer::new();
        writer.message(TEST_HEADER, |m| {
            m.attr_str(1, "abc");
            m.nest(2, |n| n.attr_u32(3, 9));
        });
        writer.message(Header { sequence: 8, ..TEST_HEADER }, |_| {});
        let messages: Vec<_> = Messages(writer.bytes()).collect();
        assert_eq!(messages.iter().map(|m| m.sequence).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(messages[0].attrs().string(1).as_deref(), Some("abc"));
        assert_eq!(messages[0].attrs().nested(2).u32(3), Some(9));
        assert_eq!(messages[1].attrs().into_iter().count(), 0);
    }

    #[test]
    fn attribute_over_64_kib_overflows() {
        let mut writer = Writer::new();
        writer.attr(1, &vec![0; 70_000]);
        assert!(writer.overflowed());
    }

    proptest! {
        #[test]
        fn iteration_over_arbitrary_bytes_ends(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            for message in Messages(&bytes) {
                prop_assert!(message.attrs().into_iter().count() <= bytes.len());
            }
        }
    }
}

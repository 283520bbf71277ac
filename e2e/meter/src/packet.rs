// SPDX-License-Identifier: Apache-2.0
//! Captured packets, parsed from their network header on: only the fields that the verdicts use.
//!
//! Layouts: RFC 791 (IPv4), RFC 8200 (IPv6), RFC 9293 (TCP), RFC 2018 and 2883 (SACK, D-SACK), RFC 768 (UDP), RFC 792 and 4443
//! (ICMP errors).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Precedes the number of a request, in its 16 hexadecimal digits.
pub const MARK: &str = "steerage-";

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// One packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// When the kernel saw it, since the Unix epoch.
    pub at: Duration,
    /// Its sender.
    pub from: SocketAddr,
    /// Its receiver.
    pub to: SocketAddr,
    /// What it carries.
    pub content: Content,
}

/// What a packet carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A TCP segment.
    Tcp(Segment),
    /// A UDP datagram, with its number if it has one.
    Udp(Option<u64>),
    /// An ICMP error that answers a packet from [`Packet::to`] to [`Packet::from`], whoever sent it.
    Unreachable,
}

/// The header of a TCP segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the flags of the header")]
pub struct Segment {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// SYN.
    pub syn: bool,
    /// ACK.
    pub acks: bool,
    /// FIN.
    pub fin: bool,
    /// RST.
    pub rst: bool,
    /// Bytes of data.
    pub length: u32,
    /// Left and right edge of the bytes that arrived twice (D-SACK).
    pub duplicate: Option<(u32, u32)>,
}

/// The request text of a number.
pub fn mark(number: u64) -> String {
    format!("{MARK}{number:016x}")
}

/// The number in a request or its answer.
pub fn number(payload: &[u8]) -> Option<u64> {
    let at = payload.windows(MARK.len()).position(|window| window == MARK.as_bytes())? + MARK.len();
    u64::from_str_radix(str::from_utf8(payload.get(at..at + 16)?).ok()?, 16).ok()
}

/// Parses a packet from its network header on. `None` for what is no whole header of a protocol that is measured.
pub fn parse(at: Duration, bytes: &[u8]) -> Option<Packet> {
    let header = Header::parse(bytes)?;
    let Header { from, to, protocol, rest, length } = header;
    if protocol == ICMP || protocol == ICMPV6 {
        return unreachable_error(at, protocol, rest);
    }
    let (from, to) = (SocketAddr::new(from, word(rest, 0)?), SocketAddr::new(to, word(rest, 2)?));
    let content = match protocol {
        TCP => Content::Tcp(segment(rest, length)?),
        UDP => Content::Udp(number(rest.get(8..)?)),
        _ => return None,
    };
    Some(Packet { at, from, to, content })
}

struct Header<'a> {
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    /// What was captured after the header.
    rest: &'a [u8],
    /// What was sent after the header.
    length: usize,
}

impl<'a> Header<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        match bytes.first()? >> 4 {
            4 => {
                let header = usize::from(bytes[0] & 0xf) * 4;
                // A fragment that is not the first has no ports.
                if word(bytes, 6)? & 0x1fff != 0 {
                    return None;
                }
                let address =
                    |at| Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?).into());
                Some(Self {
                    from: address(12)?,
                    to: address(16)?,
                    protocol: *bytes.get(9)?,
                    rest: bytes.get(header..)?,
                    length: usize::from(word(bytes, 2)?).checked_sub(header)?,
                })
            }
            6 => {
                let address =
                    |at| Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok()?).into());
                Some(Self {
                    from: address(8)?,
                    to: address(24)?,
                    protocol: *bytes.get(6)?,
                    rest: bytes.get(40..)?,
                    length: word(bytes, 4)?.into(),
                })
            }
            _ => None,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn segment(bytes: &[u8], length: usize) -> Option<Segment> {
    let header = usize::from(bytes.get(12)? >> 4) * 4;
    let flags = *bytes.get(13)?;
    let ack = long(bytes, 8)?;
    Some(Segment {
        seq: long(bytes, 4)?,
        ack,
        fin: flags & 1 != 0,
        syn: flags & 2 != 0,
        rst: flags & 4 != 0,
        acks: flags & 16 != 0,
        length: u32::try_from(length.checked_sub(header)?).ok()?,
        duplicate: duplicate(bytes.get(20..header)?, ack),
    })
}

/// The first SACK block, if it reports bytes that had arrived before: below the acknowledgement, or within the second block.
fn duplicate(mut options: &[u8], ack: u32) -> Option<(u32, u32)> {
    loop {
        match *options {
            [0, ..] | [] => return None,
            [1, ref rest @ ..] => options = rest,
            [5, length, ..] => {
                let blocks = options.get(2..length.into())?;
                let block = |index: usize| Some((long(blocks, index * 8)?, long(blocks, index * 8 + 4)?));
                let (left, right) = block(0)?;
                let within = |(outer_left, outer_right)| {
                    !before(left, outer_left)
                        && !before(outer_right, right)
                        && (left, right) != (outer_left, outer_right)
                };
                return (!before(ack, right) || block(1).is_some_and(within)).then_some((left, right));
            }
            [_, length, ..] => options = options.get(usize::from(length.max(2))..)?,
            [_] => return None,
        }
    }
}

/// Whether one sequence number comes before another, modulo 2³².
pub fn before(left: u32, right: u32) -> bool {
    right != left && right.wrapping_sub(left) < 1 << 31
}

/// The error carries the beginning of the packet that it answers.
fn unreachable_error(at: Duration, protocol: u8, bytes: &[u8]) -> Option<Packet> {
    // Destination unreachable, in each protocol's numbering.
    if *bytes.first()? != if protocol == ICMP { 3 } else { 1 } {
        return None;
    }
    let Header { from, to, protocol, rest, .. } = Header::parse(bytes.get(8..)?)?;
    if protocol != TCP && protocol != UDP {
        return None;
    }
    let (client, server) = (SocketAddr::new(from, word(rest, 0)?), SocketAddr::new(to, word(rest, 2)?));
    Some(Packet { at, from: server, to: client, content: Content::Unreachable })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 20];
        bytes[0] = 0x45;
        bytes[2..4].copy_from_slice(&u16::try_from(20 + payload.len()).unwrap().to_be_bytes());
        bytes[9] = protocol;
        bytes[12..16].copy_from_slice(&[10, 0, 0, 1]);
        bytes[16..20].copy_from_slice(&[10, 0, 0, 2]);
        bytes.extend(payload);
        bytes
    }

    fn tcp(flags: u8, options: &[u8], data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 20];
        bytes[..4].copy_from_slice(&[0x9c, 0x40, 0, 80]);
        bytes[4..8].copy_from_slice(&7_u32.to_be_bytes());
        bytes[8..12].copy_from_slice(&9_u32.to_be_bytes());
        bytes[12] = u8::try_from((20 + options.len()) / 4).unwrap() << 4;
        bytes[13] = flags;
        bytes.extend(options);
        bytes.extend(data);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Segment {
        match parse(Duration::ZERO, bytes).unwrap().content {
            Content::Tcp(segment) => segment,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn tcp_segment_over_ipv4_is_parsed() {
        let bytes = ipv4(TCP, &tcp(0b1_0010, &[1, 1, 1, 0], b"abc"));
        let packet = parse(Duration::from_secs(1), &bytes).unwrap();
        assert_eq!(
            (packet.from, packet.to),
            ("10.0.0.1:40000".parse().unwrap(), "10.0.0.2:80".parse().unwrap())
        );
        let expected = Segment { seq: 7, ack: 9, syn: true, acks: true, length: 3, ..Segment::default() };
        assert_eq!(packet.content, Content::Tcp(expected));
    }

    #[test]
    fn length_is_the_sent_one_when_the_capture_cut_the_packet_short() {
        let bytes = ipv4(TCP, &tcp(16, &[], &[0; 1000]));
        assert_eq!(parsed(&bytes[..64]).length, 1000);
    }

    #[test]
    fn only_sack_blocks_of_bytes_that_came_twice_are_duplicates() {
        let sack = |blocks: &[u32]| {
            let mut options = vec![1, 1, 5, u8::try_from(2 + blocks.len() * 4).unwrap()];
            options.extend(blocks.iter().flat_map(|edge| edge.to_be_bytes()));
            parsed(&ipv4(TCP, &tcp(16, &options, &[]))).duplicate
        };
        assert_eq!(sack(&[4, 9]), Some((4, 9)), "below the acknowledgement, which is 9");
        assert_eq!(sack(&[20, 30]), None, "a hole lies before it");
        assert_eq!(sack(&[20, 30, 15, 40]), Some((20, 30)), "within the second block");
        assert_eq!(sack(&[20, 30, 40, 50]), None);
    }

    #[test]
    fn datagrams_over_ipv6_carry_their_number() {
        let payload = format!("echo {}", mark(0xfeed));
        let mut bytes = vec![0; 40];
        bytes[0] = 0x60;
        bytes[4..6].copy_from_slice(&u16::try_from(8 + payload.len()).unwrap().to_be_bytes());
        bytes[6] = UDP;
        bytes[23] = 1;
        bytes[39] = 2;
        bytes.extend([0, 53, 0, 80, 0, 0, 0, 0]);
        bytes.extend(payload.as_bytes());
        let packet = parse(Duration::ZERO, &bytes).unwrap();
        assert_eq!((packet.from, packet.to), ("[::1]:53".parse().unwrap(), "[::2]:80".parse().unwrap()));
        assert_eq!(packet.content, Content::Udp(Some(0xfeed)));
        assert_eq!(number(b"steerage-00"), None);
    }

    #[test]
    fn icmp_errors_name_the_flow_that_they_answer() {
        let mut error = vec![3, 3, 0, 0, 0, 0, 0, 0];
        error.extend(ipv4(TCP, &tcp(2, &[], &[])));
        let packet = parse(Duration::ZERO, &ipv4(ICMP, &error)).unwrap();
        assert_eq!(
            (packet.from, packet.to),
            ("10.0.0.2:80".parse().unwrap(), "10.0.0.1:40000".parse().unwrap())
        );
        assert_eq!(packet.content, Content::Unreachable);
        error[0] = 8;
        assert_eq!(parse(Duration::ZERO, &ipv4(ICMP, &error)), None);
    }

    #[test]
    fn fragments_and_cut_headers_are_nothing() {
        let mut bytes = ipv4(UDP, &[0; 30]);
        assert!(parse(Duration::ZERO, &bytes).is_some());
        assert!(parse(Duration::ZERO, &bytes[..22]).is_none());
        bytes[7] = 1;
        assert!(parse(Duration::ZERO, &bytes).is_none());
        assert!(parse(Duration::ZERO, &[]).is_none());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(0..=255_u8, 0..120)) {
            let _ = parse(Duration::ZERO, &bytes);
        }
    }
}

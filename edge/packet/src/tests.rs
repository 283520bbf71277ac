//! The parsers on whole packets, on packets cut off anywhere, and on changed bytes.

use std::net::IpAddr;

use proptest::prelude::*;

use crate::ethernet::{IPV4, IPV6, LENGTH, ethernet};
use crate::frames::{Frame, solicitation};
use crate::maps::FlowKey;
use crate::{
    Address, Datagram, Fragment, IcmpKind, Packet, TcpFlags, Transport, V4, V6, icmp, neighbour, quoted_flow,
    transport,
};

fn address(text: &str) -> IpAddr {
    text.parse().expect("address")
}

/// Client, VIP and router of each family.
fn families() -> [[IpAddr; 3]; 2] {
    [
        ["192.0.2.7", "10.0.0.100", "198.51.100.1"].map(address),
        ["2001:db8::7", "fd00::100", "2001:db8::1"].map(address),
    ]
}

const SYN: u8 = 2;

/// What the program learns from a frame, of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parsed {
    source: V6,
    destination: V6,
    fragment: Fragment,
    hop_limit: u8,
    transport: Option<Transport>,
    quoted: Option<FlowKey<V6>>,
    icmp: Option<IcmpKind>,
}

fn parse(frame: &[u8]) -> Option<Parsed> {
    let link = ethernet(frame)?;
    match link.kind {
        IPV4 => parse_as::<V4>(frame, LENGTH, FlowKey::<V4>::mapped),
        IPV6 => parse_as::<V6>(frame, LENGTH, |key| key),
        _ => None,
    }
}

fn parse_as<A: Address>(
    frame: &[u8],
    at: usize,
    mapped: impl Fn(FlowKey<A>) -> FlowKey<V6>,
) -> Option<Parsed> {
    let datagram = A::datagram(frame, at)?;
    let Datagram { source, destination, fragment, hop_limit, .. } = datagram;
    let transport = match fragment {
        Fragment::Later(_) => None,
        _ => transport(frame, &datagram),
    };
    let message = if transport == Some(Transport::Icmp) { icmp(frame, &datagram) } else { None };
    let quoted = message.and_then(|message| quoted_flow(frame, message, destination)).map(mapped);
    Some(Parsed {
        source: source.mapped(),
        destination: destination.mapped(),
        fragment,
        hop_limit,
        transport,
        quoted,
        icmp: message.map(|message| message.kind),
    })
}

#[test]
fn ports_and_flags_of_both_families_are_parsed() {
    for [client, vip, _] in families() {
        let parsed = parse(&Frame::tcp((client, 40_000), (vip, 443), SYN).bytes()).expect("parsed");
        assert_eq!((parsed.source, parsed.destination), (client.into(), vip.into()));
        assert_eq!(parsed.fragment, Fragment::Whole);
        assert_eq!(parsed.transport, Some(Transport::Tcp(transport::ports(40_000, 443), TcpFlags(SYN))));
        let parsed = parse(&Frame::udp((client, 53), (vip, 5353), b"data").bytes()).expect("parsed");
        assert_eq!(parsed.transport, Some(Transport::Udp(transport::ports(53, 5353))));
    }
}

#[test]
fn options_and_extension_headers_are_skipped() {
    let [[client4, vip4, _], [client6, vip6, _]] = families();
    for words in 1..=10 {
        let mut frame = Frame::tcp((client4, 1), (vip4, 2), SYN);
        frame.options = vec![1; words * 4];
        let parsed = parse(&frame.bytes()).expect("parsed");
        assert_eq!(parsed.transport, Some(Transport::Tcp(transport::ports(1, 2), TcpFlags(SYN))));
    }
    let mut frame = Frame::udp((client6, 1), (vip6, 2), b"");
    // Hop-by-hop, routing, destination options, authentication.
    frame.options = vec![0, 43, 0, 1, 4, 0, 0, 0, 0];
    frame.options.extend([60, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    frame.options.extend([51, 0, 1, 4, 0, 0, 0, 0]);
    frame.options.extend([17, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let parsed = parse(&frame.bytes()).expect("parsed");
    assert_eq!(parsed.transport, Some(Transport::Udp(transport::ports(1, 2))));
}

#[test]
fn too_many_or_too_long_extension_headers_are_refused() {
    let [_, [client, vip, _]] = families();
    let chain = |count: usize| {
        let mut frame = Frame::udp((client, 1), (vip, 2), b"");
        frame.options = vec![60];
        for number in 1..=count {
            frame.options.extend([if number == count { 17 } else { 60 }, 0, 1, 4, 0, 0, 0, 0]);
        }
        parse(&frame.bytes()).map(|parsed| parsed.transport)
    };
    assert_eq!(chain(6), Some(Some(Transport::Udp(transport::ports(1, 2)))));
    assert_eq!(chain(7), None);
    let mut frame = Frame::udp((client, 1), (vip, 2), b"");
    frame.options = vec![60, 17, 40];
    frame.options.extend([0; 41 * 8 - 2]);
    assert_eq!(parse(&frame.bytes()), None, "beyond the limit");
}

#[test]
fn fragments_are_told_apart() {
    for [client, vip, _] in families() {
        let of = |offset, more| {
            let frame = Frame::udp((client, 1), (vip, 2), &[0; 64]).fragment(7, offset, more);
            parse(&frame.bytes()).expect("parsed")
        };
        assert_eq!(of(0, false).fragment, Fragment::Whole);
        assert_eq!(of(0, true).fragment, Fragment::First(7));
        assert_eq!(of(8, true).fragment, Fragment::Later(7));
        assert_eq!(of(8, false).fragment, Fragment::Later(7));
        assert_eq!(of(0, true).transport, Some(Transport::Udp(transport::ports(1, 2))));
    }
}

#[test]
fn icmp_errors_quote_the_flow() {
    for [client, vip, router] in families() {
        let errors: &[u8] = if vip.is_ipv4() { &[3, 11, 12] } else { &[1, 2, 3, 4] };
        let reply = Frame::tcp((vip, 443), (client, 40_000), 16);
        let expected = FlowKey {
            client: V6::from(client),
            vip: vip.into(),
            ports: transport::ports(40_000, 443),
            protocol: 6,
        };
        for kind in errors {
            // Only the first eight bytes of the quoted packet's payload must be there.
            let header = if vip.is_ipv4() { 20 } else { 40 };
            let bytes = Frame::error(router, vip, *kind, 4, &reply, header + 8).bytes();
            let parsed = parse(&bytes).expect("parsed");
            assert_eq!(parsed.icmp, Some(IcmpKind::Error));
            assert_eq!(parsed.quoted, Some(expected));
            let short = Frame::error(router, vip, *kind, 4, &reply, header + 7).bytes();
            assert_eq!(parse(&short).expect("parsed").quoted, None);
        }
        let foreign = Frame::tcp((router, 443), (client, 40_000), 16);
        let bytes = Frame::error(router, vip, errors[0], 4, &foreign, 64).bytes();
        assert_eq!(parse(&bytes).expect("parsed").quoted, None, "quotes another address's packet");
        let later = Frame::udp((vip, 443), (client, 40_000), &[0; 64]).fragment(7, 8, false);
        let bytes = Frame::error(router, vip, errors[0], 4, &later, 64).bytes();
        assert_eq!(parse(&bytes).expect("parsed").quoted, None, "has no ports");
    }
}

#[test]
fn kinds_of_icmp_differ_between_the_families() {
    for [client, vip, _] in families() {
        let kind = |number| {
            let frame = Frame::icmp(client, vip, number, 0, &[0; 60]);
            parse(&frame.bytes()).expect("parsed").icmp.expect("a message")
        };
        let (echo, other) = if vip.is_ipv4() { (8, 128) } else { (128, 8) };
        assert_eq!(kind(echo), IcmpKind::Echo);
        assert_eq!(kind(other), IcmpKind::Other);
    }
}

#[test]
fn neighbour_solicitation_of_the_builder_is_parsed() {
    let (sender, target) = ("fd00::9".parse().expect("address"), "fd00::100".parse().expect("address"));
    let frame = solicitation(sender, target);
    let parsed = neighbour::solicitation(&frame.bytes()[..], 14, frame.from).expect("parsed");
    assert_eq!((parsed.sender, parsed.target), (sender.into(), target.into()));
}

fn samples() -> Vec<Vec<u8>> {
    let mut samples = Vec::new();
    for [client, vip, router] in families() {
        let reply = Frame::tcp((vip, 443), (client, 40_000), 16);
        let frames = [
            Frame::tcp((client, 40_000), (vip, 443), SYN),
            Frame::udp((client, 1), (vip, 2), &[0; 64]),
            Frame::udp((client, 1), (vip, 2), &[0; 64]).fragment(7, 0, true),
            Frame::udp((client, 1), (vip, 2), &[0; 64]).fragment(7, 8, false),
            Frame::error(router, vip, 3, 4, &reply, 60),
            Frame::icmp(client, vip, if vip.is_ipv4() { 8 } else { 128 }, 0, &[0; 60]),
        ];
        samples.extend(frames.iter().map(Frame::bytes));
    }
    samples
}

/// A frame that is cut off never parses as a longer one would, except behind its headers.
#[test]
fn truncated_packets_have_no_transport() {
    for frame in samples() {
        let whole = parse(&frame).expect("parsed");
        for length in 0..frame.len() {
            let parsed = parse(&frame[..length]);
            assert!(parsed.is_none(), "{length} of {}: {parsed:?} of {whole:?}", frame.len());
        }
    }
}

/// Sees which bytes are read.
struct Spy<'a>(&'a [u8]);

impl Packet for Spy<'_> {
    fn at<const N: usize>(&self, offset: usize) -> Option<&[u8; N]> {
        let found = self.0.at::<N>(offset);
        let end = offset.saturating_add(N);
        assert_eq!(found.is_some(), end <= self.0.len().min(crate::MAX_HEADERS), "{N} bytes at {offset}");
        found
    }

    fn length(&self) -> usize {
        self.0.len()
    }
}

fn parse_everything(frame: &[u8]) {
    let _ = parse(frame);
    let spy = Spy(frame);
    for at in [0, 14, 18] {
        let _ = neighbour::arp_request(&spy, at);
        let _ = neighbour::solicitation(&spy, at, [0; 6]);
        if let Some(datagram) = V4::datagram(&spy, at) {
            let _ = (transport(&spy, &datagram), icmp(&spy, &datagram));
        }
        if let Some(datagram) = V6::datagram(&spy, at) {
            let _ = (transport(&spy, &datagram), icmp(&spy, &datagram));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bytes_never_panic(frame in prop::collection::vec(any::<u8>(), 0..320)) {
        parse_everything(&frame);
    }

    #[test]
    fn changed_packets_never_panic(
        sample in 0..12_usize,
        changes in prop::collection::vec((0..120_usize, any::<u8>()), 1..8),
        length in 0..160_usize,
    ) {
        let mut frame = samples().swap_remove(sample);
        for (at, value) in changes {
            let at = at % frame.len();
            frame[at] = value;
        }
        frame.truncate(length);
        parse_everything(&frame);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Every kind of packet, one by one.

use std::net::IpAddr;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use steerage_edge_dataplane::packet::checksum;
use steerage_edge_dataplane::packet::frames::{Frame, arp_request, solicitation};
use steerage_edge_dataplane::packet::maps::{Event, FORWARDING, ListenerKey};
use steerage_edge_dataplane::packet::model::Verdict;
use steerage_edge_dataplane::{Options, Path};
use steerage_requirements::requires;

use crate::bed::{
    ACK, AFFINE, Bed, EMPTY, FORWARDER_MAC, Family, LOCAL, MAC, NODE_MAC, RANGED, SELF, SYN, TCP, UDP,
    address, families, options, state,
};

fn is_forwarded(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Forward(1..=3))
}

fn syn(family: &Family, port: u16) -> Frame {
    Frame::tcp((family.client, 40_000), (family.vip, port), SYN)
}

#[test]
fn packet_to_a_listener_is_forwarded_with_one_hop_less() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        for frame in [syn(&family, TCP), Frame::udp((family.client, 1), (family.vip, UDP), b"data")] {
            let (verdict, out) = bed.verdict_and_frame(&frame.bytes());
            assert!(is_forwarded(&verdict), "{verdict:?}");
            let mut expected = frame.clone();
            expected.hop_limit -= 1;
            assert_eq!(out, expected.bytes(), "only the hop limit and its checksum change");
        }
        let counters = bed.counted(ListenerKey::new(family.vip, 6, TCP));
        assert_eq!((counters.packets, counters.flows, counters.drops), (1, 1, 0));
        assert_eq!(counters.bytes, u64::try_from(syn(&family, TCP).bytes().len()).unwrap());
    }
}

#[test]
fn what_is_for_no_vip_is_left_to_the_kernel() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let other = Frame::tcp((family.client, 40_000), (family.node, TCP), SYN).bytes();
        assert_eq!(bed.verdict(&other), Verdict::Pass);
        let mut elsewhere = syn(&family, TCP);
        elsewhere.to = [2, 0, 0, 0, 0, 99];
        assert_eq!(bed.verdict(&elsewhere.bytes()), Verdict::Pass, "flooded by a bridge");
        let mut tagged = syn(&family, TCP);
        tagged.tags = vec![0x81, 0, 0, 5];
        assert_eq!(bed.verdict(&tagged.bytes()), Verdict::Pass, "a VLAN's");
    }
    let mut unknown = syn(&families()[0], TCP).bytes();
    unknown[12..14].copy_from_slice(&[0x88, 0xb5]);
    assert_eq!(bed.verdict(&unknown), Verdict::Pass);
}

#[test]
fn vip_without_such_a_listener_drops() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        assert_eq!(bed.verdict(&syn(&family, 80).bytes()), Verdict::Drop(Event::NoListener));
        let datagram = Frame::udp((family.client, 1), (family.vip, TCP), b"").bytes();
        assert_eq!(bed.verdict(&datagram), Verdict::Drop(Event::NoListener), "TCP's port");
        let gre = Frame::new(family.client, family.vip, 47, vec![0; 40]).bytes();
        assert_eq!(bed.verdict(&gre), Verdict::Drop(Event::NoListener));
        assert_eq!(bed.verdict(&syn(&family, EMPTY).bytes()), Verdict::Drop(Event::NoTarget));
        assert_eq!(bed.verdict(&syn(&family, LOCAL).bytes()), Verdict::Local(SELF));
    }
}

#[test]
fn client_outside_the_source_ranges_gets_nothing() {
    requires!(Root);
    let mut bed = Bed::new();
    for family in families() {
        let from = |client, flags| Frame::tcp((client, 40_000), (family.vip, RANGED), flags).bytes();
        assert_eq!(bed.verdict(&from(family.outsider, SYN)), Verdict::Drop(Event::OutsideSourceRanges));
        assert_eq!(bed.verdict(&from(family.outsider, ACK)), Verdict::Drop(Event::OutsideSourceRanges));
        for flags in [SYN, ACK, ACK, ACK] {
            assert!(is_forwarded(&bed.verdict(&from(family.client, flags))));
        }
        let key = ListenerKey::new(family.vip, 6, RANGED);
        assert_eq!(bed.counted(key).drops, 2);
    }
    // Established connections end, too, when the ranges change.
    bed.change(|state| {
        for listener in state.listeners.values_mut().filter(|listener| listener.ranges.is_some()) {
            listener.ranges = Some(
                ["10.9.0.0/16".parse().expect("range")]
                    .into_iter()
                    .collect::<std::collections::BTreeSet<_>>()
                    .into(),
            );
        }
    });
    for family in families() {
        let established = Frame::tcp((family.client, 40_000), (family.vip, RANGED), ACK).bytes();
        assert_eq!(bed.verdict(&established), Verdict::Drop(Event::OutsideSourceRanges));
    }
}

#[test]
fn node_may_send_only_from_its_own_addresses() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let mut looped = syn(&family, TCP);
        looped.from = NODE_MAC;
        assert_eq!(bed.verdict(&looped.bytes()), Verdict::Drop(Event::ForeignSource));
        let mut own = Frame::tcp((family.node, 40_000), (family.vip, TCP), SYN);
        own.from = NODE_MAC;
        assert!(is_forwarded(&bed.verdict(&own.bytes())));
        // Also a packet of a flow that the router had begun.
        for flags in [SYN, ACK, ACK, ACK] {
            let mut frame = Frame::tcp((family.client, 40_001), (family.vip, TCP), flags);
            assert!(is_forwarded(&bed.verdict(&frame.bytes())));
            frame.from = NODE_MAC;
            assert_eq!(bed.verdict(&frame.bytes()), Verdict::Drop(Event::ForeignSource));
        }
    }
}

/// Other hosts have the VIPs, and the daemon is gone: what it knew may be old.
#[test]
fn program_leaves_all_to_the_kernel_once_its_time_is_over() {
    requires!(Root);
    let bed = Bed::new();
    let clock = || Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).expect("clock"));
    let mut solicited = Vec::new();
    for family in families() {
        let mut from_node = syn(&family, TCP);
        from_node.from = NODE_MAC;
        let echo = if family.vip.is_ipv4() { 8 } else { 128 };
        let asked = match (family.vip, family.node) {
            (IpAddr::V4(vip), IpAddr::V4(node)) => arp_request(node, vip),
            (IpAddr::V6(vip), IpAddr::V6(node)) => {
                let asked = solicitation(node, vip);
                // As a host asks that knew the Ethernet address: not the group.
                let mut direct = Frame::icmp(family.node, family.vip, 135, 0, &asked.payload[4..]);
                direct.hop_limit = 255;
                solicited.push(direct.bytes());
                asked.bytes()
            }
            _ => unreachable!("of one family"),
        };
        let datagram = Frame::udp((family.client, 1), (family.vip, UDP), &[0; 64]);
        let established = Frame::tcp((family.client, 40_001), (family.vip, TCP), ACK).bytes();
        for _ in 0..3 {
            assert!(is_forwarded(&bed.verdict(&established)));
        }
        let frames = [
            syn(&family, TCP).bytes(),
            syn(&family, 80).bytes(),
            from_node.bytes(),
            established,
            datagram.bytes(),
            datagram.clone().fragment(7, 0, true).bytes(),
            datagram.fragment(9, 8, false).bytes(),
            Frame::icmp(family.client, family.vip, echo, 0, &[0; 20]).bytes(),
            Frame::icmp(family.client, family.vip, 99, 0, &[0; 20]).bytes(),
            asked,
        ];
        for frame in frames.iter().chain(&solicited) {
            for ended in [Duration::from_nanos(1), clock().saturating_sub(Duration::from_millis(100))] {
                bed.dataplane.leases().set_forwarding(ended);
                assert_eq!(bed.dataplane.leases().forwarding(), ended);
                let (verdict, out) = bed.verdict_and_frame(frame);
                assert_eq!(verdict, Verdict::Pass, "{frame:02x?}");
                assert_eq!(&out, frame);
            }
            for end in [clock() + Duration::from_mins(1), Duration::MAX] {
                bed.dataplane.leases().set_forwarding(end);
                assert_ne!(bed.verdict(frame), Verdict::Pass, "{frame:02x?}");
            }
        }
    }
    assert!(!bed.dataplane.leases().set(FORWARDING, Duration::ZERO), "it is no lease");
}

/// The other edge host has chosen this node, which must not choose again.
#[test]
fn node_takes_what_another_edge_host_has_forwarded() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        for port in [TCP, LOCAL, EMPTY, 9] {
            for flags in [SYN, ACK] {
                let mut frame = Frame::tcp((family.client, 40_000), (family.vip, port), flags);
                frame.from = FORWARDER_MAC;
                assert_eq!(bed.verdict(&frame.bytes()), Verdict::Pass, "port {port}");
            }
        }
        // A flow that this host forwards itself, of which a router sends one packet and then that host another one.
        for flags in [SYN, ACK, ACK, ACK] {
            let mut frame = Frame::tcp((family.client, 40_001), (family.vip, TCP), flags);
            assert!(is_forwarded(&bed.verdict(&frame.bytes())));
            frame.from = FORWARDER_MAC;
            assert_eq!(bed.verdict(&frame.bytes()), Verdict::Pass);
        }
    }
}

#[test]
fn options_and_extension_headers_change_nothing() {
    requires!(Root);
    let bed = Bed::new();
    let [family4, family6] = families();
    for words in [1, 5, 10] {
        let mut frame = syn(&family4, TCP);
        frame.options = vec![1; words * 4];
        assert_eq!(bed.verdict(&frame.bytes()), bed.verdict(&syn(&family4, TCP).bytes()));
    }
    for count in 1..=7 {
        let mut frame = syn(&family6, TCP);
        frame.options = vec![60];
        for number in 1..=count {
            frame.options.extend([if number == count { 6 } else { 60 }, 0, 1, 4, 0, 0, 0, 0]);
        }
        let expected = match count {
            7 => Verdict::Drop(Event::Malformed),
            _ => bed.verdict(&syn(&family6, TCP).bytes()),
        };
        assert_eq!(bed.verdict(&frame.bytes()), expected, "{count} headers");
    }
    let mut long = syn(&family6, TCP);
    long.options = [&[60, 6, 30][..], &[0; 31 * 8 - 2]].concat();
    assert_eq!(bed.verdict(&long.bytes()), Verdict::Drop(Event::Malformed), "beyond the limit");
}

#[test]
fn fragments_follow_the_first_one() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let whole = |port| Frame::udp((family.client, port), (family.vip, UDP), &[7; 120]);
        for (id, port) in (1..50).zip(1000..) {
            let mut rest = whole(port).fragment(id, 64, false);
            rest.payload = vec![7; 64];
            assert_eq!(bed.verdict(&rest.bytes()), Verdict::Drop(Event::UnknownFragment), "before the first");
            let mut first = whole(port).fragment(id, 0, true);
            first.payload.truncate(64);
            let verdict = bed.verdict(&first.bytes());
            assert!(is_forwarded(&verdict));
            assert_eq!(bed.verdict(&rest.bytes()), verdict, "{}, packet {id}", family.vip);
            let mut middle = rest.clone().fragment(id, 72, true);
            middle.payload.truncate(8);
            assert_eq!(bed.verdict(&middle.bytes()), verdict);
            let other = rest.fragment(id + 1000, 64, false);
            assert_eq!(
                bed.verdict(&other.bytes()),
                Verdict::Drop(Event::UnknownFragment),
                "another packet's"
            );
            // Without more fragments, the first one is the packet.
            assert_eq!(bed.verdict(&whole(port).fragment(id, 0, false).bytes()), verdict);
        }
        let segment = syn(&family, TCP).fragment(9, 0, true);
        let verdict = bed.verdict(&segment.bytes());
        assert!(is_forwarded(&verdict));
        let mut rest = syn(&family, TCP).fragment(9, 64, false);
        rest.payload = vec![0; 64];
        assert_eq!(bed.verdict(&rest.bytes()), verdict, "TCP's");
        let ping =
            Frame::icmp(family.client, family.vip, if family.vip.is_ipv4() { 8 } else { 128 }, 0, &[0; 60]);
        assert_eq!(bed.verdict(&ping.fragment(9, 0, true).bytes()), Verdict::Drop(Event::UnknownIcmp));
    }
}

#[test]
fn icmp_errors_follow_the_flow() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let errors: &[(u8, u8)] = if family.vip.is_ipv4() {
            &[(3, 4), (3, 1), (11, 0), (12, 0)]
        } else {
            &[(2, 0), (1, 4), (3, 0), (4, 0)]
        };
        for port in 1000..1020 {
            let verdict = bed.verdict(&Frame::tcp((family.client, port), (family.vip, TCP), SYN).bytes());
            let reply = Frame::tcp((family.vip, TCP), (family.client, port), ACK);
            for (kind, code) in errors {
                let error = Frame::error(family.router, family.vip, *kind, *code, &reply, 60);
                assert_eq!(bed.verdict(&error.bytes()), verdict);
            }
        }
        let error = |source, quoted: &Frame, length| {
            let (kind, code) = errors[0];
            Frame::error(source, family.vip, kind, code, quoted, length)
        };
        let other = Frame::tcp((family.vip, 80), (family.client, 1000), ACK);
        assert_eq!(
            bed.verdict(&error(family.router, &other, 60).bytes()),
            Verdict::Drop(Event::UnknownIcmp),
            "about no listener"
        );
        let foreign = Frame::tcp((family.node, TCP), (family.client, 1000), ACK);
        let foreign = error(family.router, &foreign, 60).bytes();
        assert_eq!(bed.verdict(&foreign), Verdict::Drop(Event::UnknownIcmp), "about another's packet");
        let cut =
            error(family.router, &Frame::tcp((family.vip, TCP), (family.client, 1000), ACK), 24).bytes();
        assert_eq!(bed.verdict(&cut), Verdict::Drop(Event::UnknownIcmp), "cut off");
        let outsider = Frame::tcp((family.vip, RANGED), (family.outsider, 1000), ACK);
        let outsider = error(family.router, &outsider, 60).bytes();
        assert_eq!(bed.verdict(&outsider), Verdict::Drop(Event::OutsideSourceRanges));
    }
}

#[test]
fn echo_requests_are_answered() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let (request, reply) = if family.vip.is_ipv4() { (8, 0) } else { (128, 129) };
        for length in [4, 60, 1400] {
            let mut frame = Frame::icmp(family.client, family.vip, request, 0, &vec![7; length]);
            frame.hop_limit = 3;
            let mut expected = Frame::icmp(family.vip, family.client, reply, 0, &vec![7; length]);
            (expected.to, expected.from) = (frame.from, frame.to);
            assert_eq!(
                bed.verdict(&frame.bytes()),
                Verdict::Answer(Event::Echo, expected.bytes()),
                "with correct checksums"
            );
        }
        let other =
            Frame::icmp(family.client, family.vip, if family.vip.is_ipv4() { 13 } else { 130 }, 0, &[0; 60]);
        assert_eq!(bed.verdict(&other.bytes()), Verdict::Drop(Event::UnknownIcmp));
        let node = Frame::icmp(family.client, family.node, request, 0, &[0; 60]).bytes();
        assert_eq!(bed.verdict(&node), Verdict::Pass);
    }
    // The expected frame of the builder is correct by its own sum.
    let [family, _] = families();
    let packet = Frame::icmp(family.vip, family.client, 0, 0, &[7; 60]).packet();
    assert_eq!(checksum::finish(checksum::sum(&packet[..20])), 0);
}

#[test]
fn exhausted_hop_limit_ends_a_loop() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        for (hop_limit, is_dropped) in [(0, true), (1, true), (2, false), (255, false)] {
            let mut frame = syn(&family, TCP);
            frame.hop_limit = hop_limit;
            let verdict = bed.verdict(&frame.bytes());
            assert_eq!(verdict == Verdict::Drop(Event::HopLimit), is_dropped, "{hop_limit}: {verdict:?}");
        }
        let mut local = syn(&family, LOCAL);
        local.hop_limit = 1;
        assert_eq!(bed.verdict(&local.bytes()), Verdict::Local(SELF), "this host is the last hop");
    }
}

#[test]
fn packet_cut_off_anywhere_is_dropped() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let reply = Frame::tcp((family.vip, TCP), (family.client, 1000), ACK);
        let kind = if family.vip.is_ipv4() { 3 } else { 1 };
        for frame in [
            syn(&family, TCP),
            Frame::udp((family.client, 1), (family.vip, UDP), b"data"),
            Frame::udp((family.client, 1), (family.vip, UDP), &[0; 64]).fragment(7, 64, false),
            Frame::error(family.router, family.vip, kind, 4, &reply, 60),
        ] {
            let bytes = frame.bytes();
            let addressed = 14 + if family.vip.is_ipv4() { 20 } else { 40 };
            // With less the kernel tests no program: see `bed::is_testable`.
            for length in addressed..bytes.len() {
                let verdict = bed.verdict(&bytes[..length]);
                assert_eq!(verdict, Verdict::Drop(Event::Malformed), "{length} of {} bytes", bytes.len());
            }
        }
        let mut wrong = syn(&family, TCP).bytes();
        wrong[14] = 0x51;
        assert_eq!(bed.verdict(&wrong), Verdict::Pass, "neither version");
    }
    let mut short = syn(&families()[0], TCP).bytes();
    short[14] = 0x44;
    assert_eq!(bed.verdict(&short), Verdict::Drop(Event::Malformed), "a header of 16 bytes");
}

#[test]
fn affinity_keeps_a_client_on_one_target() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let targets = |port: u16, clients: &dyn Fn(u16) -> (std::net::IpAddr, u16)| {
            let mut seen = std::collections::BTreeSet::new();
            for number in 1..60 {
                let verdict = bed.verdict(&Frame::tcp(clients(number), (family.vip, port), SYN).bytes());
                let Verdict::Forward(target) = verdict else { panic!("{verdict:?}") };
                seen.insert(target);
            }
            seen.len()
        };
        let ports = |number| (family.client, 1000 + number);
        assert_eq!(targets(AFFINE, &ports), 1);
        assert_eq!(targets(TCP, &ports), 3);
        let v4 = family.vip.is_ipv4();
        let hosts = |number: u16| {
            let text = if v4 { format!("192.0.2.{number}") } else { format!("2001:db8::{number:x}") };
            (address(&text), 1000)
        };
        assert_eq!(targets(AFFINE, &hosts), 3);
    }
}

/// A target beyond the link.
fn with_tunnel(bed: &mut Bed) {
    bed.change(|state| {
        for target in state.targets.values_mut().filter(|target| target.path == Path::Neighbour) {
            target.path = Path::Tunnel { mac: [2, 0, 0, 0, 9, 9], mtu: 1450, vni: 7 };
        }
    });
}

#[test]
fn packet_through_the_tunnel_gets_the_nodes_address() {
    requires!(Root);
    let mut bed = Bed::with(Options { tunnel: Some(1), ..options() }, state());
    with_tunnel(&mut bed);
    for family in families() {
        let frame = syn(&family, TCP);
        let (verdict, out) = bed.verdict_and_frame(&frame.bytes());
        assert!(is_forwarded(&verdict), "{verdict:?}");
        let mut expected = frame.clone();
        (expected.to, expected.from) = ([2, 0, 0, 0, 9, 9], MAC);
        expected.hop_limit -= 1;
        assert_eq!(out, expected.bytes());
    }
    let mut bed = Bed::new();
    with_tunnel(&mut bed);
    let (action, _) = bed.run(&syn(&families()[0], TCP).bytes());
    assert_eq!(action, 2, "without a tunnel it is dropped");
}

#[test]
fn client_learns_the_longest_packet_for_the_tunnel() {
    requires!(Root);
    let mut bed = Bed::with(Options { tunnel: Some(1), ..options() }, state());
    with_tunnel(&mut bed);
    for family in families() {
        let v4 = family.vip.is_ipv4();
        let header = if v4 { 20 } else { 40 };
        let datagram = |length: usize| {
            let mut frame = Frame::udp((family.client, 1), (family.vip, UDP), &vec![7; length - header - 8]);
            frame.fragment = [0, 0, 0x40, 0];
            frame
        };
        assert_eq!(bed.run(&datagram(1450).bytes()).0, 7);
        assert_eq!(bed.dataplane.counts().events().expect("events")[&Event::TooBig], 0, "fits");
        let long = datagram(1451);
        let (action, out) = bed.run(&long.bytes());
        let mut quoted = long.clone();
        quoted.hop_limit -= 1;
        let body = [&[0, 0, 5, 0xaa][..], &quoted.packet()[..header + 8]].concat();
        let (kind, code) = if v4 { (3, 4) } else { (2, 0) };
        let mut expected = Frame::icmp(family.vip, family.client, kind, code, &body);
        (expected.to, expected.from) = (long.from, long.to);
        assert_eq!((action, out), (7, expected.bytes()));
        assert_eq!(bed.dataplane.counts().events().expect("events")[&Event::TooBig], 1);
        let mut divisible = long.clone();
        divisible.fragment = [0; 4];
        let (action, out) = bed.run(&divisible.bytes());
        let is_answered = out.len() < divisible.bytes().len();
        assert_eq!((action, is_answered), (7, !v4), "the tunnel may fragment it");
        bed = Bed::with(Options { tunnel: Some(1), ..options() }, state());
        with_tunnel(&mut bed);
    }
}

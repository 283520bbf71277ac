// SPDX-License-Identifier: Apache-2.0
//! The program and the model decide the same about sequences of random and changed packets, while
//! tables change.

use std::net::IpAddr;

use steerage_edge_dataplane::packet::checksum;
use steerage_edge_dataplane::packet::frames::{Frame, arp_request, solicitation};
use steerage_edge_dataplane::packet::hash::mix64;
use steerage_edge_dataplane::packet::model::{Model, Verdict};
use steerage_requirements::requires;

use crate::bed::{self, Bed, FORWARDER_MAC, Family, NODE_MAC, families, table};

/// Frames between two changes of the tables. Clients are new then, so that no flow becomes as old as
/// a timeout that the model does not have.
const EPOCH: u64 = 400;
const EPOCHS: u64 = 60;

/// Numbers from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 += 1;
        mix64(self.0)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit).unwrap()).unwrap()
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn byte(&mut self) -> u8 {
        self.next().to_ne_bytes()[0]
    }
}

/// One of a few clients of this epoch, inside or outside the source ranges.
fn client(random: &mut Random, epoch: u64, family: &Family) -> IpAddr {
    let host = u8::try_from(1 + (epoch % 50) * 4).unwrap() + u8::try_from(random.below(4)).unwrap();
    let is_outside = random.below(4) == 0;
    match (family.vip.is_ipv4(), is_outside) {
        (true, false) => IpAddr::from([192, 0, 2, host]),
        (true, true) => IpAddr::from([203, 0, 113, host]),
        (false, false) => bed::address(&format!("2001:db8::{host:x}")),
        (false, true) => bed::address(&format!("2001:db9::{host:x}")),
    }
}

fn frame(random: &mut Random, epoch: u64) -> Frame {
    let all = families();
    let family = &all[random.below(2)];
    let client = client(random, epoch, family);
    let vip = random.pick(&[family.vip, family.vip, family.vip, family.stale, family.node]);
    let port = u16::try_from(1000 + epoch * 10).unwrap() + u16::try_from(random.below(6)).unwrap();
    let listener = random.pick(&[bed::TCP, bed::TCP, bed::AFFINE, bed::RANGED, bed::EMPTY, bed::LOCAL, 80]);
    let flags = random.pick(&[bed::SYN, bed::ACK, bed::ACK, bed::ACK, bed::FIN_ACK, bed::RST, 0]);
    let id = u16::try_from(epoch * 4).unwrap() + u16::try_from(random.below(4)).unwrap();
    let tcp = || Frame::tcp((client, port), (vip, listener), flags);
    let udp_port = random.pick(&[bed::UDP, bed::UDP, bed::UDP, bed::TCP]);
    let udp = |length| Frame::udp((client, port), (vip, udp_port), &vec![7; length]);
    let v4 = vip.is_ipv4();
    let mut frame = match random.below(12) {
        0..=3 => tcp(),
        4..=6 => udp(random.below(40)),
        7 => udp(32).fragment(id, 0, true),
        8 => udp(32).fragment(id, 64, random.below(2) == 0),
        9 => {
            let reply = Frame::tcp((vip, listener), (client, port), bed::ACK);
            let kinds: &[u8] = if v4 { &[3, 11, 5] } else { &[1, 2, 3, 4] };
            Frame::error(family.router, vip, random.pick(kinds), 4, &reply, 28 + random.below(40))
        }
        10 => Frame::icmp(client, vip, if v4 { 8 } else { 128 }, 0, &[0; 20]),
        _ if v4 => tcp().fragment(id, 0, random.below(2) == 0),
        _ => {
            let mut frame = udp(8);
            frame.options = vec![60, 17, 0, 1, 4, 0, 0, 0, 0];
            frame
        }
    };
    frame.hop_limit = random.pick(&[64, 64, 64, 64, 2, 1]);
    frame.from = random.pick(&[frame.from, frame.from, frame.from, frame.from, NODE_MAC, FORWARDER_MAC]);
    frame
}

fn bytes(random: &mut Random, epoch: u64) -> Vec<u8> {
    let mut bytes = match random.below(24) {
        0 => {
            let target = random.pick(&["10.0.0.100", "10.0.0.101", "10.0.0.21"]);
            arp_request("10.0.0.9".parse().unwrap(), target.parse().unwrap())
        }
        1 => {
            let sender = random.pick(&["::", "fd00::9"]).parse().unwrap();
            solicitation(sender, random.pick(&["fd00::100", "fd00::101", "fd00::21"]).parse().unwrap())
                .bytes()
        }
        2 => (0..15 + random.below(200)).map(|_| random.byte()).collect(),
        _ => frame(random, epoch).bytes(),
    };
    // Changes behind the Ethernet addresses: what is for another host is left to the kernel in any case.
    if random.below(3) == 0 {
        for _ in 0..=random.below(3) {
            let at = 12 + random.below(bytes.len() - 12);
            bytes[at] = if random.below(2) == 0 { random.byte() } else { bytes[at] ^ (1 << random.below(8)) };
        }
    }
    if random.below(10) == 0 {
        bytes.truncate(15 + random.below(bytes.len() - 14));
    }
    bytes
}

/// Only the hop limit of a forwarded packet changes, and the checksum with it.
fn assert_unchanged(before: &[u8], after: &[u8]) {
    let mut expected = before.to_vec();
    let (hop_limit, sum) = if before[12] == 8 { (22, Some(24..26)) } else { (21, None) };
    expected[hop_limit] -= 1;
    if let Some(sum) = sum {
        let end = 14 + usize::from(before[14] & 15) * 4;
        let header = |frame: &[u8]| checksum::finish(checksum::sum(&frame[14..end]));
        // Both forms of zero.
        assert_eq!(header(before) % 0xffff, header(after) % 0xffff);
        expected[sum.clone()].copy_from_slice(&after[sum]);
    }
    assert_eq!(expected, after);
}

#[test]
fn program_decides_as_the_model_does() {
    requires!(Root);
    let mut bed = Bed::new();
    let mut model: Model = bed::model(&bed.state);
    let mut random = Random(1);
    let mut seen = std::collections::BTreeMap::<String, u32>::new();
    for epoch in 0..EPOCHS {
        for number in 0..EPOCH {
            let frame = bytes(&mut random, epoch);
            if !bed::is_testable(&frame) {
                continue;
            }
            let expected = model.decide(&frame);
            let (verdict, out) = bed.verdict_and_frame(&frame);
            assert_eq!(verdict, expected, "frame {number} of epoch {epoch}: {frame:02x?}");
            let kind = match &verdict {
                Verdict::Forward(_) => "Forward".to_owned(),
                Verdict::Answer(event, _) => format!("Answer({event:?})"),
                other => format!("{other:?}"),
            };
            *seen.entry(kind).or_default() += 1;
            match verdict {
                Verdict::Forward(_) => assert_unchanged(&frame, &out),
                Verdict::Answer(..) => {}
                _ => assert_eq!(frame, out),
            }
        }
        let members = [&[1, 2, 3][..], &[1, 3], &[2], &[2, 3], &[1, 2]][random.below(5)];
        bed.change(|state| drop(state.tables.insert(1, table(random.pick(&[251, 509]), members))));
        model.services = bed::model(&bed.state).services;
        model.is_over = random.below(8) == 0;
        bed.end_forwarding(model.is_over);
    }
    println!("{seen:?}");
    assert!(seen.len() >= 14, "the frames are of few kinds: {seen:?}");
}

// SPDX-License-Identifier: Apache-2.0
//! Tests: corrupted messages of the kernel must not make a decoder panic or loop. Corruption targets lengths, types and
//! numbers, the structure of netlink; coverage is not measured.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;

use proptest::prelude::*;
use steerage_requirements::{in_new_netns, requires};

use crate::batch::{SUBSYSTEM, message};
use crate::conntrack::entry;
use crate::monitor::notification;
use crate::socket::{Reply, Socket, classify};
use crate::trace::step;
use crate::wire::{Attrs, Header, Messages, Writer, flag};
use crate::{
    Batch, Chain, ChainType, Ct, DataType, Element, Expression, Family, Field, Hook, Nft, RowShape, Rows,
    Rule, Set, Table, Verdict, concat, decode,
};

const CONNTRACK_LIST: u16 = 1 << 8 | 1;

/// All datagrams that wait on the socket.
fn datagrams(socket: &mut Socket) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(Messages(bytes)) = socket.receive().unwrap() {
        all.push(bytes.to_vec());
    }
    all
}

fn dump(kind: u16, set: Option<&str>) -> Vec<Vec<u8>> {
    let mut socket = Socket::open(0).unwrap();
    let sequence = socket.reserve_sequences(1);
    let header =
        Header { kind, flags: flag::REQUEST | flag::DUMP, sequence, family: Family::Ip as u8, resource: 0 };
    let mut request = Writer::new();
    request.message(header, |m| {
        if let Some(set) = set {
            m.attr_str(1, "t");
            m.attr_str(2, set);
        }
    });
    socket.send(&[request.bytes()]).unwrap();
    datagrams(&mut socket)
}

/// Loads a table with one object of every kind that the decoders read.
fn load(nft: &mut Nft) {
    let table = Table::new(Family::Ip, "t");
    let pair = [DataType::Ipv4Addr, DataType::InetService];
    let end = |n: u32| concat(&[Field::V4(n.into()), Field::Port(80)]);
    let mut batch = Batch::new();
    batch
        .add_table(&table, Some("a comment"))
        .add_set(&table, &Set::new("map", &[DataType::Mark]).maps_to(&pair))
        .add_set(&table, &Set::new("ranges", &pair).interval())
        .add_set(&table, &Set::new("verdicts", &[DataType::Mark]).maps_to_verdict())
        .add_chain(&table, &Chain::regular("c"))
        .add_chain(&table, &Chain::base("out", ChainType::Nat, Hook::Output, -100))
        .add_rule(
            &table,
            "c",
            &Rule::new().in_set("ranges", &[Expression::daddr(Family::Ip), Expression::dport()]).drop(),
        )
        // The kernel tracks connections only if a rule uses their state.
        .add_rule(&table, "c", &Rule::new().has_any(Expression::Ct(Ct::State), Ct::ESTABLISHED).accept())
        .add_rule(&table, "c", &Rule::new().return_().comment("the last"));
    let entry = |n: u32| Element::entry(concat(&[Field::Number(n)]), end(n));
    batch.add_elements(&table, "map", &(0..50).map(entry).collect::<Vec<_>>());
    batch.add_elements(&table, "ranges", &[Element::range(end(10), end(20))]);
    let verdict = Element::verdict(concat(&[Field::Number(1)]), Verdict::Goto("c".to_owned()));
    batch.add_elements(&table, "verdicts", &[verdict]);
    nft.commit(batch).unwrap();
}

/// Messages of the kernel: dumps, notifications, an error.
fn captured() -> Vec<Vec<u8>> {
    in_new_netns(|| {
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        let mut monitor = Socket::open(1 << 6).unwrap();
        let mut nft = Nft::open().unwrap();
        load(&mut nft);
        let to: SocketAddr = "127.0.0.1:9".parse().unwrap();
        UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"?", to).unwrap();
        let mut all = datagrams(&mut monitor);
        for kind in [message::GETTABLE, message::GETCHAIN, message::GETRULE, message::GETSET] {
            all.extend(dump(SUBSYSTEM | kind, None));
        }
        for set in ["map", "ranges", "verdicts", "none"] {
            all.extend(dump(SUBSYSTEM | message::GETSETELEM, Some(set)));
        }
        all.extend(dump(CONNTRACK_LIST, None));
        all
    })
}

/// The number of objects that each decoder found.
fn decode_all(bytes: &[u8]) -> [usize; 9] {
    let mut found = [0; 9];
    for message in Messages(bytes) {
        found[0] += 1;
        found[1] += usize::from(decode::table(&message).is_some());
        found[2] += usize::from(decode::chain(&message).is_some());
        found[3] += usize::from(decode::set(&message).is_some());
        found[4] += usize::from(decode::rule(&message).is_some());
        found[5] += decode::elements(&message).len();
        for shape in [RowShape { key: 4, range: false, data: 8 }, RowShape { key: 8, range: true, data: 0 }] {
            let mut rows = Rows::new(shape);
            decode::rows(&message, &mut rows);
            found[5] += rows.len();
        }
        found[6] += entry(message.attrs()).iter().count();
        found[7] += usize::from(notification(&message).is_some()) + usize::from(step(&message).is_some());
        found[8] += usize::from(matches!(classify(&message, "x"), Reply::Error(_)));
        let Attrs(rest) = message.attrs();
        assert!(message.attrs().into_iter().count() <= rest.len() / 4 + 1);
    }
    assert!(found[0] <= bytes.len() / 16 + 1, "a message has at least a header");
    assert!(found[5] <= 3 * bytes.len(), "an element has at least a byte");
    found
}

/// Corrupts `bytes` at one place, in one of eight ways, with the given number.
fn corrupt(bytes: &mut Vec<u8>, at: usize, way: u8, number: u32) {
    /// Lengths that are too short for a header, exact, and too long.
    const LENGTHS: [u16; 10] = [0, 1, 3, 4, 5, 8, 15, 16, 0x7fff, 0xffff];
    if bytes.is_empty() {
        return;
    }
    // Headers and attributes start at multiples of four.
    let (at, word) = (at % bytes.len(), at % bytes.len() / 4 * 4);
    let pick = LENGTHS[usize::try_from(number).unwrap() % LENGTHS.len()];
    let mut put = |at: usize, new: &[u8]| {
        if let Some(old) = bytes.get_mut(at..at + new.len()) {
            old.copy_from_slice(new);
        }
    };
    match way {
        0 => put(at, &number.to_ne_bytes()[..1]),
        1 => put(word, &pick.to_ne_bytes()),
        2 => put(word, &u32::from(pick).to_ne_bytes()),
        3 => put(word, &number.to_ne_bytes()),
        // Another type of attribute, nested or not.
        4 => put(word + 2, &number.to_ne_bytes()[..2]),
        5 => bytes.truncate(at),
        6 => drop(bytes.drain(word..(word + 4).min(bytes.len()))),
        _ => {
            let piece: Vec<u8> = bytes[word..].iter().copied().take(usize::from(pick.min(64))).collect();
            bytes.splice(word..word, piece);
        }
    }
}

#[test]
fn decoders_survive_corrupted_messages() {
    requires!(NetworkNamespace, Program("ip"));
    let captured = captured();
    let mut totals = [0; 9];
    for datagram in &captured {
        for (sum, found) in totals.iter_mut().zip(decode_all(datagram)) {
            *sum += found;
        }
    }
    assert!(totals.iter().all(|found| *found > 0), "every decoder has input: {totals:?}");
    assert!(totals[5] >= 102, "{totals:?}");

    let corruptions = proptest::collection::vec((any::<usize>(), 0_u8..8, any::<u32>()), 1..12);
    let case = (any::<prop::sample::Index>(), corruptions);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let survive = |(which, corruptions): (prop::sample::Index, Vec<(usize, u8, u32)>)| {
        let mut bytes = which.get(&captured).clone();
        for (at, way, number) in corruptions {
            corrupt(&mut bytes, at, way, number);
        }
        decode_all(&bytes);
        Ok(())
    };
    runner.run(&case, survive).unwrap();
}

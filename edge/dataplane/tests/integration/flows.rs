// SPDX-License-Identifier: Apache-2.0
//! Flows keep their target while slots move.

use std::sync::Arc;

use steerage_edge_dataplane::packet::frames::Frame;
use steerage_edge_dataplane::packet::maps::{CLOSING, Event};
use steerage_edge_dataplane::packet::model::Verdict;
use steerage_requirements::requires;

use crate::bed::{ACK, Bed, FIN_ACK, Family, RST, SYN, TCP, UDP, families, table};

fn target(bed: &Bed, frame: &Frame) -> u32 {
    match bed.verdict(&frame.bytes()) {
        Verdict::Forward(target) => target,
        other => panic!("{other:?}"),
    }
}

fn segment(family: &Family, port: u16, flags: u8) -> Frame {
    Frame::tcp((family.client, port), (family.vip, TCP), flags)
}

fn datagram(family: &Family, port: u16) -> Frame {
    Frame::udp((family.client, port), (family.vip, UDP), b"data")
}

/// Opens connections, of each as many packets as told.
fn open(bed: &Bed, family: &Family, packets: usize) -> Vec<(u16, u32)> {
    let connection = |port| {
        let first = target(bed, &segment(family, port, SYN));
        for _ in 1..packets {
            assert_eq!(target(bed, &segment(family, port, ACK)), first);
        }
        (port, first)
    };
    (1000..1030).map(connection).collect()
}

#[test]
fn connection_stays_while_its_slot_moves() {
    requires!(Root);
    for packets in [1, 2, 3, 5] {
        let mut bed = Bed::new();
        for family in families() {
            let connections = open(&bed, &family, packets);
            assert!(connections.iter().any(|(_, target)| *target == 2));
            // The target is removed from the table, then the table grows.
            for (size, members) in [(251, &[1, 3][..]), (509, &[1, 3]), (251, &[1, 2, 3])] {
                bed.change(|state| drop(state.tables.insert(1, table(size, members))));
                for (port, first) in &connections {
                    assert_eq!(
                        target(&bed, &segment(&family, *port, ACK)),
                        *first,
                        "{packets} packets before"
                    );
                }
            }
            bed.change(|state| drop(state.tables.insert(1, table(251, &[3]))));
            for (port, _) in &connections {
                assert_eq!(
                    target(&bed, &segment(&family, *port, SYN)),
                    3,
                    "a new connection follows the slots"
                );
                assert_eq!(target(&bed, &segment(&family, *port, ACK)), 3);
                assert_eq!(target(&bed, &segment(&family, *port, ACK)), 3);
            }
            bed.change(|state| drop(state.tables.insert(1, table(251, &[1, 2, 3]))));
        }
    }
}

#[test]
fn datagrams_leave_a_target_without_slots() {
    requires!(Root);
    for packets in [1, 2, 4] {
        let mut bed = Bed::new();
        for family in families() {
            let mut exchanges = Vec::new();
            for port in 1000..1030 {
                let first = target(&bed, &datagram(&family, port));
                for _ in 1..packets {
                    assert_eq!(target(&bed, &datagram(&family, port)), first);
                }
                exchanges.push((port, first));
            }
            bed.change(|state| drop(state.tables.insert(1, table(251, &[1, 3]))));
            let mut moved = Vec::new();
            for (port, first) in &exchanges {
                let now = target(&bed, &datagram(&family, *port));
                assert_ne!(now, 2);
                if *first != 2 {
                    assert_eq!(now, *first, "only those move that must");
                }
                moved.push((*port, now));
            }
            bed.change(|state| drop(state.tables.insert(1, table(251, &[1, 2, 3]))));
            for (port, before) in &moved {
                assert_eq!(target(&bed, &datagram(&family, *port)), *before, "and none moves back");
            }
        }
    }
}

#[test]
fn connection_leaves_a_target_that_is_deleted() {
    requires!(Root);
    let mut bed = Bed::new();
    for family in families() {
        let connections = open(&bed, &family, 3);
        let removed = bed.state.targets.get(&2).copied();
        bed.change(|state| {
            state.tables.insert(1, table(251, &[1, 3]));
            state.targets.remove(&2);
        });
        for (port, _) in &connections {
            assert_ne!(target(&bed, &segment(&family, *port, ACK)), 2);
        }
        bed.change(|state| {
            state.tables.insert(1, table(251, &[1, 2, 3]));
            state.targets.extend(removed.map(|removed| (2, removed)));
        });
    }
}

#[test]
fn removed_listener_ends_its_connections() {
    requires!(Root);
    let mut bed = Bed::new();
    let state = bed.state.clone();
    for family in families() {
        open(&bed, &family, 3);
        bed.change(|state| state.listeners.clear());
        let frame = segment(&family, 1000, ACK);
        assert_eq!(bed.verdict(&frame.bytes()), Verdict::Drop(Event::NoListener));
        bed.change(|state| state.vips.clear());
        assert_eq!(bed.verdict(&frame.bytes()), Verdict::Pass);
        bed.change(|all| *all = state.clone());
        assert!(matches!(bed.verdict(&frame.bytes()), Verdict::Forward(_)));
    }
}

/// The flow of a Service whose number another one has got is not the other's.
#[test]
fn number_of_a_removed_service_is_used_again_without_its_flows() {
    requires!(Root);
    let mut bed = Bed::new();
    for family in families() {
        let connections = open(&bed, &family, 3);
        let all = bed.state.listeners.clone();
        bed.change(|state| state.listeners.clear());
        bed.change(|state| {
            for (key, listener) in all.iter().rev() {
                let mut listener = listener.clone();
                listener.table = 3;
                state.listeners.insert(*key, listener);
            }
            state.tables.insert(3, table(251, &[3]));
        });
        for (port, _) in &connections {
            assert_eq!(target(&bed, &segment(&family, *port, SYN)), 3);
        }
        bed.change(|state| *state = crate::bed::state());
    }
}

#[test]
fn second_packet_makes_a_flow_established() {
    requires!(Root);
    let bed = Bed::new();
    for family in families() {
        let count = || {
            bed.dataplane
                .flows()
                .expect("flows")
                .iter()
                .filter(|(key, _)| key.vip == family.vip.into())
                .count()
        };
        target(&bed, &segment(&family, 1, SYN));
        target(&bed, &segment(&family, 1, SYN));
        assert_eq!(count(), 0, "a flood of first packets makes none");
        target(&bed, &segment(&family, 1, ACK));
        assert_eq!(count(), 1);
        target(&bed, &datagram(&family, 1));
        assert_eq!(count(), 1);
        target(&bed, &datagram(&family, 1));
        assert_eq!(count(), 2);
        target(&bed, &segment(&family, 2, RST));
        target(&bed, &segment(&family, 2, RST));
        assert_eq!(count(), 2, "a stray reset makes none");
    }
}

#[test]
fn flood_of_first_packets_evicts_no_established_flow() {
    requires!(Root);
    let mut bed = Bed::new();
    let [family, _] = families();
    let connections = open(&bed, &family, 3);
    for number in 0..20_000_u32 {
        let [_, a, b, c] = number.to_be_bytes();
        let client = std::net::IpAddr::from([100, a, b, c]);
        bed.run(&Frame::tcp((client, 1), (family.vip, TCP), SYN).bytes());
        bed.run(&Frame::tcp((client, 2), (family.vip, TCP), ACK).bytes());
    }
    bed.change(|state| drop(state.tables.insert(1, table(251, &[1]))));
    for (port, first) in &connections {
        assert_eq!(target(&bed, &segment(&family, *port, ACK)), *first);
    }
}

#[test]
fn closed_connection_is_marked() {
    requires!(Root);
    let bed = Bed::new();
    let [family, _] = families();
    open(&bed, &family, 3);
    target(&bed, &segment(&family, 1000, FIN_ACK));
    let closing = bed.dataplane.flows().expect("flows");
    let closing: Vec<_> = closing.iter().filter(|(_, flow)| flow.seen & CLOSING != 0).collect();
    assert_eq!(closing.len(), 1);
    target(&bed, &segment(&family, 1000, SYN));
    target(&bed, &segment(&family, 1000, ACK));
    let flows = bed.dataplane.flows().expect("flows");
    assert!(flows.iter().all(|(_, flow)| flow.seen & CLOSING == 0), "the port is used again");
}

#[test]
fn written_state_is_read_back() {
    requires!(Root);
    let mut bed = Bed::new();
    let mut state = bed.state.clone();
    assert_eq!(bed.dataplane.written(), Some(&state));
    // A failed write makes the next one read the maps.
    let full = Arc::new(steerage_edge_dataplane::Table { slots: vec![1; 1 << 20], ..Default::default() });
    state.tables.insert(9, full);
    let error = bed.dataplane.write(state.clone()).expect_err("does not fit");
    assert_eq!(error.to_string(), "SLOTS is full");
    assert_eq!(bed.dataplane.written(), None);
    state.tables.remove(&9);
    bed.dataplane.write(state.clone()).expect("write");
    assert_eq!(bed.dataplane.written(), Some(&state));
    assert!(matches!(bed.verdict(&segment(&families()[0], 1, SYN).bytes()), Verdict::Forward(_)));
}

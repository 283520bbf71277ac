// SPDX-License-Identifier: Apache-2.0
//! Flows that stay on another target than their slot's, on the host that has them and on another one.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use steerage_edge_dataplane::packet::frames::Frame;
use steerage_edge_dataplane::packet::maps::{CLOSING, FlowKey, ListenerKey, TCP_IDLE, UDP_IDLE, seconds};
use steerage_edge_dataplane::packet::model::Verdict;
use steerage_edge_dataplane::packet::{Address as _, V4, V6, hash, transport};
use steerage_edge_dataplane::{Exception, Pinned, Refusal};
use steerage_requirements::requires;

use crate::bed::{ACK, Bed, FIN_ACK, Family, SYN, TCP, UDP, address, families, table};

const PORTS: std::ops::Range<u16> = 1000..1060;

fn now() -> u32 {
    let time: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("time").into();
    seconds(u64::try_from(time.as_nanos()).expect("time"))
}

fn key(family: &Family, port: u16, protocol: u32, to: u16) -> FlowKey<V6> {
    FlowKey {
        client: family.client.into(),
        vip: family.vip.into(),
        ports: transport::ports(port, to),
        protocol,
    }
}

fn segment(family: &Family, port: u16, flags: u8) -> Vec<u8> {
    Frame::tcp((family.client, port), (family.vip, TCP), flags).bytes()
}

fn datagram(family: &Family, port: u16) -> Vec<u8> {
    Frame::udp((family.client, port), (family.vip, UDP), b"data").bytes()
}

/// The address of the target that the frame goes to.
fn target(bed: &Bed, frame: &[u8]) -> IpAddr {
    match bed.verdict(frame) {
        Verdict::Forward(number) => bed.state.targets[&number].address,
        other => panic!("{other:?}"),
    }
}

/// Opens connections and exchanges of datagrams, of each as many packets as told.
fn open(bed: &Bed, packets: usize) -> BTreeMap<FlowKey<V6>, IpAddr> {
    let mut opened = BTreeMap::new();
    for family in families() {
        for port in PORTS {
            opened.insert(key(&family, port, 6, TCP), target(bed, &segment(&family, port, SYN)));
            opened.insert(key(&family, port, 17, UDP), target(bed, &datagram(&family, port)));
            for _ in 1..packets {
                bed.verdict(&segment(&family, port, ACK));
                bed.verdict(&datagram(&family, port));
            }
        }
    }
    opened
}

/// The address of the target that a new flow goes to.
fn slot(bed: &Bed, key: &FlowKey<V6>) -> IpAddr {
    let slots = &bed.state.tables[&1].slots;
    let hash = match IpAddr::from(key.client) {
        IpAddr::V4(client) => V4::from(client).flow_hash(transport::source_port(key.ports)),
        IpAddr::V6(_) => key.hash(0),
    };
    let slot = hash::slot(hash, u32::try_from(slots.len()).expect("size"));
    bed.state.targets[&slots[usize::try_from(slot).expect("slot")]].address
}

fn scan(bed: &Bed) -> BTreeMap<FlowKey<V6>, Pinned> {
    let mut found = BTreeMap::new();
    bed.dataplane
        .flow_table()
        .scan(now(), |key, pinned| assert!(found.insert(key, pinned).is_none(), "{key:?} twice"))
        .expect("scan");
    found
}

fn exceptions(bed: &Bed) -> Vec<Exception> {
    let flows = bed.dataplane.flow_table();
    let exception = |(key, pinned): (FlowKey<V6>, Pinned)| Exception {
        key,
        target: flows.target(pinned.target).expect("a target"),
        idle: pinned.idle(now()),
        is_closing: pinned.is_closing(),
    };
    scan(bed).into_iter().map(exception).collect()
}

/// Another host, with other numbers for the same targets and listeners.
fn other_host(size: u32, members: &[u32]) -> Bed {
    let mut bed = Bed::new();
    let listeners = bed.state.listeners.clone();
    bed.change(|state| state.listeners.clear());
    for (key, listener) in listeners.into_iter().rev() {
        bed.change(|state| drop(state.listeners.insert(key, listener)));
    }
    let mut table = (*table(size, members)).clone();
    let renumber = |number: u32| 8 - number;
    table.slots = table.slots.into_iter().map(renumber).collect();
    table.members = table.members.into_iter().map(renumber).collect();
    bed.change(|state| {
        state.targets = state.targets.iter().map(|(number, target)| (renumber(*number), *target)).collect();
        state.tables.insert(1, table.into());
    });
    bed
}

#[test]
fn exceptions_are_the_flows_whose_slot_has_moved() {
    requires!(Root);
    for packets in [1, 3] {
        let mut bed = Bed::new();
        let opened = open(&bed, packets);
        assert_eq!(scan(&bed), BTreeMap::new());
        let before = bed.dataplane.changes();
        bed.change(|state| drop(state.tables.insert(1, table(251, &[1, 3]))));
        assert_ne!(bed.dataplane.changes(), before);
        let found = scan(&bed);
        for (key, target) in &opened {
            let has_slots = *target != bed.state.targets[&2].address;
            // Datagrams leave a target without slots.
            let is_exception = slot(&bed, key) != *target && (key.protocol == 6 || has_slots);
            assert_eq!(found.contains_key(key), is_exception, "{key:?}");
        }
        assert!(found.len() > 20, "{}", found.len());
        assert!(found.values().all(|pinned| pinned.is_established == (packets > 1)));
        bed.change(|state| drop(state.tables.insert(1, table(509, &[1, 2, 3]))));
        let found = scan(&bed);
        assert!(found.keys().any(|key| key.protocol == 17), "datagrams stay on a target with slots");
        let flows = bed.dataplane.flow_table();
        for (key, pinned) in &found {
            let established = (packets > 1).then_some(*pinned);
            assert_eq!(flows.get(key, now()).expect("get"), established);
            let limit = if key.protocol == 6 { TCP_IDLE } else { UDP_IDLE };
            assert_eq!(flows.get(key, now() + limit + 2).expect("get"), None, "no longer remembered");
        }
        let unchanged = bed.dataplane.changes();
        bed.change(|_| {});
        assert_eq!(bed.dataplane.changes(), unchanged);
        bed.change(|state| drop(state.tables.insert(1, table(251, &[1, 2, 3]))));
        assert_eq!(scan(&bed), BTreeMap::new(), "the slots are back");
    }
}

#[test]
fn another_host_keeps_exceptions_on_their_targets() {
    requires!(Root);
    let mut first = Bed::new();
    let opened = open(&first, 3);
    first.change(|state| drop(state.tables.insert(1, table(509, &[1, 2, 3]))));
    let second = other_host(509, &[1, 2, 3]);
    let told = exceptions(&first);
    assert!(told.len() > 40, "{}", told.len());
    let results =
        second.dataplane.flow_table().insert(&told, now(), |_| false, |_, _| false).expect("insert");
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    for family in families() {
        for port in PORTS {
            for frame in [segment(&family, port, ACK), datagram(&family, port)] {
                let protocol = if frame == datagram(&family, port) { (17, UDP) } else { (6, TCP) };
                let wanted = opened[&key(&family, port, protocol.0, protocol.1)];
                // The second packet takes the short path.
                assert_eq!([target(&second, &frame), target(&second, &frame)], [wanted; 2]);
                assert_eq!(target(&first, &frame), wanted);
            }
        }
    }
    let keys: Vec<_> = told.iter().map(|told| told.key).collect();
    second.dataplane.flow_table().delete(&keys).expect("delete");
    assert!(exceptions(&second).is_empty());
}

#[test]
fn removed_target_that_is_remembered_keeps_its_exceptions() {
    requires!(Root);
    let mut first = Bed::new();
    open(&first, 2);
    first.change(|state| drop(state.tables.insert(1, table(251, &[1, 3]))));
    let mut second = Bed::new();
    second.change(|state| drop(state.tables.insert(1, table(251, &[1, 3]))));
    let told = exceptions(&first);
    assert!(!told.is_empty());
    let results =
        second.dataplane.flow_table().insert(&told, now(), |_| false, |_, _| false).expect("insert");
    assert!(results.iter().all(Result::is_ok));
    for family in families() {
        for port in PORTS {
            let frame = segment(&family, port, ACK);
            assert_eq!(target(&second, &frame), target(&first, &frame));
        }
    }
}

#[test]
fn only_what_this_host_has_and_does_not_know_better_is_inserted() {
    requires!(Root);
    let bed = Bed::new();
    let flows = bed.dataplane.flow_table();
    for family in families() {
        let exception = |port, target: &str| Exception {
            key: key(&family, port, 6, TCP),
            target: address(target),
            idle: 3,
            is_closing: false,
        };
        let known = exception(1, "10.0.0.22");
        let half_open = exception(2, "10.0.0.22");
        for port in [1, 2] {
            target(&bed, &segment(&family, port, SYN));
        }
        target(&bed, &segment(&family, 1, ACK));
        let unknown_target = exception(3, "10.0.0.99");
        let mut unknown_listener = exception(4, "10.0.0.22");
        unknown_listener.key.ports = transport::ports(4, 9999);
        let mut foreign = exception(5, "10.0.0.22");
        foreign.key.vip = address("10.0.0.77").into();
        let old = Exception { idle: TCP_IDLE + 1, ..exception(6, "10.0.0.22") };
        let absurd = Exception { idle: u32::MAX, ..exception(6, "10.0.0.22") };
        let fine = exception(7, "10.0.0.22");
        let all = [known, half_open, unknown_target, unknown_listener, foreign, old, absurd, fine];
        let refused = [
            Err(Refusal::Known),
            Err(Refusal::Known),
            Err(Refusal::UnknownTarget),
            Err(Refusal::UnknownListener),
            Err(Refusal::UnknownListener),
            Err(Refusal::Expired),
            Err(Refusal::Expired),
            Ok(()),
        ];
        let before: Vec<_> = [1, 2].map(|port| target(&bed, &segment(&family, port, ACK))).into();
        assert_eq!(flows.insert(&all, now(), |_| true, |_, _| false).expect("insert"), refused);
        let after: Vec<_> = [1, 2].map(|port| target(&bed, &segment(&family, port, ACK))).into();
        assert_eq!(before, after, "this host answers and knows better");
        // So does one that does not answer, of flows whose packets it sees.
        let results = flows.insert(&all[..2], now(), |_| false, |_, _| true).expect("insert");
        assert_eq!(results, refused[..2]);
        let after: Vec<_> = [1, 2].map(|port| target(&bed, &segment(&family, port, ACK))).into();
        assert_eq!(before, after);
        // A host that does not answer believes the one that does.
        let results = flows.insert(&all, now(), |_| false, |_, _| false).expect("insert");
        assert_eq!((&results[..2], &results[2..]), (&[Ok(()), Ok(())][..], &refused[2..]));
        for port in [1, 2, 7] {
            assert_eq!(target(&bed, &segment(&family, port, ACK)), address("10.0.0.22"));
        }
        assert_eq!(flows.get(&old.key, now()).expect("get"), None);
        // The same again with an earlier time.
        let told_again = Exception { idle: 1000, ..fine };
        let results = flows.insert(&[told_again], now(), |_| false, |_, _| false).expect("insert");
        assert_eq!(results, [Ok(())]);
        let seen = |key| flows.known(&key).expect("seen").map(|known| known.seen);
        assert!(seen(fine.key).is_some_and(|seen| now() - seen < 100));
        assert_eq!(seen(old.key), None);
    }
}

#[test]
fn idle_time_and_closing_are_told() {
    requires!(Root);
    let bed = Bed::new();
    let [family, _] = families();
    let flows = bed.dataplane.flow_table();
    let exception = |port, idle, is_closing| Exception {
        key: key(&family, port, 6, TCP),
        target: address("10.0.0.22"),
        idle,
        is_closing,
    };
    let told: Vec<_> = PORTS.map(|port| exception(port, 7, port % 2 == 0)).collect();
    flows.insert(&told, now(), |_| false, |_, _| false).expect("insert");
    let found = scan(&bed);
    assert!(!found.is_empty());
    for (key, pinned) in &found {
        let told = told.iter().find(|told| told.key == *key).expect("told");
        assert_eq!(pinned.is_closing(), told.is_closing);
        assert!((7..20).contains(&pinned.idle(now())), "{pinned:?}");
        assert_eq!(pinned.seen & CLOSING != 0, told.is_closing);
    }
    // A closing one is forgotten after a minute.
    let later = |key: &FlowKey<V6>| flows.get(key, now() + 70).expect("get").is_some();
    assert!(found.iter().all(|(key, pinned)| later(key) != pinned.is_closing()));
    let port = PORTS.start + 1;
    target(&bed, &segment(&family, port, FIN_ACK));
    assert_eq!(bed.dataplane.flows().expect("flows").len(), PORTS.len());
}

/// The same listener has another number, and a Service with another number has the flow.
#[test]
fn flow_of_a_listener_that_is_gone_is_no_exception() {
    requires!(Root);
    let mut bed = Bed::new();
    open(&bed, 2);
    bed.change(|state| drop(state.tables.insert(1, table(251, &[1, 3]))));
    assert!(!scan(&bed).is_empty());
    bed.change(|state| state.listeners.retain(|key, _| *key != ListenerKey::new(key.vip.into(), 6, TCP)));
    assert!(scan(&bed).keys().all(|key| key.protocol == 17));
}

/// As while many flows are scanned: the clock was read before.
#[test]
fn flows_with_packets_since_the_scan_began_are_exceptions_and_stay() {
    requires!(Root);
    let mut bed = Bed::new();
    open(&bed, 2);
    bed.change(|state| drop(state.tables.insert(1, table(509, &[1, 2, 3]))));
    let expected = scan(&bed);
    assert!(!expected.is_empty());
    let mut found = BTreeMap::new();
    let scanned = bed
        .dataplane
        .flow_table()
        .scan(now() - 2, |key, pinned| assert!(found.insert(key, pinned).is_none(), "{key:?} twice"))
        .expect("scan");
    assert_eq!((found, scanned.flows, scanned.ended), (expected.clone(), PORTS.len() * 4, Vec::new()));
    assert_eq!(scan(&bed), expected);
}

#[test]
fn scan_deletes_what_has_ended() {
    requires!(Root);
    let bed = Bed::new();
    let opened = open(&bed, 2);
    let flows = bed.dataplane.flow_table();
    let known = |protocol| {
        let of_protocol = opened.keys().filter(|key| key.protocol == protocol);
        let is_established =
            |key: &&FlowKey<V6>| flows.known(key).expect("known").is_some_and(|known| known.is_established);
        of_protocol.filter(is_established).count()
    };
    let end = |later: u32| {
        let scanned = flows.scan(now() + later, |_, _| ()).expect("scan");
        flows.delete_ended(&scanned.ended, || now() + later).expect("delete");
        (scanned.flows, scanned.ended.len())
    };
    let half = PORTS.len() * 2;
    assert_eq!((end(UDP_IDLE + 5), known(6), known(17)), ((half, half), half, 0));
    // They have begun anew since they were scanned.
    let ended = flows.scan(now() + TCP_IDLE + 5, |_, _| ()).expect("scan").ended;
    flows.delete_ended(&ended, now).expect("delete");
    assert_eq!((ended.len(), known(6)), (half, half));
    assert_eq!((end(TCP_IDLE + 5), known(6), known(17)), ((0, half), 0, 0));
}

// SPDX-License-Identifier: Apache-2.0
//! What is written is what the maps hold, in any order of states.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aya::maps::{Array, Map, MapData, PerCpuArray, PerCpuValues};
use aya::{TestRun as _, TestRunOptions};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use steerage_edge_dataplane::packet::frames::Frame;
use steerage_edge_dataplane::packet::hash::mix64;
use steerage_edge_dataplane::packet::maps::{Counters, ListenerKey, Service, Target};
use steerage_edge_dataplane::{
    Dataplane, Listener, Options, Path, Sender, State, StateChange, Table, TargetState,
};
use steerage_requirements::requires;

use crate::bed::{self, Pins, address, table};

/// Few of everything, so that numbers, prefixes and places are used again.
fn any_state() -> impl Strategy<Value = State> {
    let vip = || prop::sample::select(vec!["10.0.0.100", "10.0.0.101", "fd00::100"]).prop_map(address);
    let nets = || {
        let net = prop::sample::select(vec!["10.1.0.0/16", "10.0.0.0/8", "2001:db8::/32", "192.0.2.1/32"]);
        prop::collection::btree_set(net.prop_map(|net| net.parse().expect("net")), 0..4).prop_map(Arc::new)
    };
    let listener = (vip(), 1..5_u16, 1..4_u32, any::<bool>(), prop::option::of(nets()));
    let sender = prop_oneof![3 => nets().prop_map(Sender::Own), 1 => Just(Sender::Forwarder)];
    let members = prop::collection::btree_set(1..5_u32, 0..4);
    let table = (1..4_u32, prop::sample::select(vec![251, 509]), members);
    (
        prop::collection::btree_map(vip(), 1..3_u32, 0..4),
        prop::collection::vec(listener, 0..8),
        prop::collection::vec(table, 0..4),
        prop::collection::btree_map(1..5_u32, (0..3_u8, any::<bool>()), 0..5),
        prop::collection::btree_map(prop::array::uniform6(0..2_u8), sender, 0..4),
    )
        .prop_map(|(vips, listeners, tables, targets, senders)| {
            let mut state = State { vips, senders, ..State::default() };
            state.tables =
                tables.into_iter().map(|(number, size, members)| (number, of(size, &members))).collect();
            for (vip, port, table, has_affinity, ranges) in listeners {
                let listener = Listener { table, has_affinity, ranges };
                state.listeners.insert(ListenerKey::new(vip, 6, port), listener);
                // The maps know a table by its listeners.
                state.tables.entry(table).or_default();
            }
            let used: BTreeSet<u32> = state.listeners.values().map(|listener| listener.table).collect();
            state.tables.retain(|number, _| used.contains(number));
            let target = |(host, is_local)| TargetState {
                address: IpAddr::from([10, 0, 0, host]),
                path: if is_local { Path::Local } else { Path::Neighbour },
            };
            state.targets = targets.into_iter().map(|(number, of)| (number, target(of))).collect();
            state
        })
}

fn of(size: u32, members: &BTreeSet<u32>) -> Arc<Table> {
    table(size, &members.iter().copied().collect::<Vec<_>>())
}

/// What makes one state of the other, and nothing else.
fn change(old: &State, new: &State) -> StateChange {
    fn differences<K: Ord + Clone, V: Clone + PartialEq>(
        old: &BTreeMap<K, V>,
        new: &BTreeMap<K, V>,
    ) -> BTreeMap<K, Option<V>> {
        let keys = old.keys().chain(new.keys()).filter(|key| old.get(key) != new.get(key));
        keys.map(|key| (key.clone(), new.get(key).cloned())).collect()
    }
    StateChange {
        vips: differences(&old.vips, &new.vips),
        listeners: differences(&old.listeners, &new.listeners),
        tables: differences(&old.tables, &new.tables),
        targets: differences(&old.targets, &new.targets),
        senders: differences(&old.senders, &new.senders),
    }
}

#[test]
fn maps_hold_the_state_that_was_written_last() {
    requires!(Root);
    let dataplane = Dataplane::load(bed::options()).expect("load");
    let dataplane = std::cell::RefCell::new(dataplane);
    let mut runner = TestRunner::new(ProptestConfig { cases: 300, ..ProptestConfig::default() });
    let result = runner.run(&(any_state(), any::<bool>(), any::<bool>()), |(state, checks, is_change)| {
        let mut dataplane = dataplane.borrow_mut();
        if is_change {
            let change = change(dataplane.written().expect("a state"), &state);
            dataplane.write_change(change).expect("write");
        } else {
            dataplane.write(state.clone()).expect("write");
        }
        // Without a check the writer continues with its own memory of the maps.
        if checks {
            prop_assert!(dataplane.check().expect("check"), "the maps hold {:?}", dataplane.written());
        }
        prop_assert_eq!(dataplane.written(), Some(&state));
        Ok(())
    });
    result.expect("equal");
    let mut dataplane = dataplane.into_inner();
    assert!(dataplane.check().expect("check"));
    dataplane.write(State::default()).expect("write");
    assert!(dataplane.check().expect("check"));
    assert_eq!(dataplane.used_slots(), 0, "no slot is leaked");
}

#[test]
fn one_table_is_written_alone() {
    requires!(Root);
    let mut dataplane = Dataplane::load(bed::options()).expect("load");
    let mut state = bed::state();
    dataplane.write(state.clone()).expect("write");
    for (size, members) in [(251, &[1, 2][..]), (509, &[1, 2, 3]), (251, &[]), (1021, &[3])] {
        let table = table(size, members);
        state.tables.insert(1, Arc::clone(&table));
        let tables = [(1, Some(table))].into();
        dataplane.write_change(StateChange { tables, ..StateChange::default() }).expect("write");
        assert_eq!(dataplane.written(), Some(&state));
        assert!(dataplane.check().expect("check"), "{size}");
    }
    dataplane.write(state.clone()).expect("write");
    assert!(dataplane.check().expect("check"));
}

const SMALL: u32 = 251;
/// A quarter of the slots that the maps of tests have.
const LARGE: u32 = 16_381;

/// One listener for each table of these sizes.
fn tables(sizes: impl IntoIterator<Item = (u32, u32)>) -> State {
    let mut state = State::default();
    for (number, size) in sizes {
        let key = ListenerKey::new(address("10.0.0.100"), 6, u16::try_from(number).expect("port"));
        state.listeners.insert(key, Listener { table: number, has_affinity: false, ranges: None });
        state.tables.insert(number, table(size, &[number, number + 1]));
    }
    state
}

#[test]
fn tables_make_place_for_a_large_one() {
    requires!(Root);
    let mut dataplane = Dataplane::load(bed::options()).expect("load");
    // One small table in each quarter, wherever the others were.
    dataplane.write(tables((1..=128).map(|number| (number, SMALL)))).expect("write");
    let more = (201..=326).map(|number| (number, SMALL));
    dataplane.write(tables([1, 65].map(|number| (number, SMALL)).into_iter().chain(more))).expect("write");
    let few = [1, 65, 201, 326].map(|number| (number, SMALL));
    dataplane.write(tables(few)).expect("write");
    assert!(dataplane.check().expect("check"));
    let state = tables(few.into_iter().chain([(400, LARGE)]));
    dataplane.write(state.clone()).expect("write");
    assert!(dataplane.check().expect("check"));
    assert_eq!(dataplane.written(), Some(&state));
    dataplane.write(State::default()).expect("write");
    assert_eq!(dataplane.used_slots(), 0, "no slot is leaked");
}

#[test]
fn tables_of_half_of_the_slots_are_always_written() {
    requires!(Root);
    let dataplane = std::cell::RefCell::new(Dataplane::load(bed::options()).expect("load"));
    let sizes = prop::sample::select(vec![0, SMALL, SMALL, SMALL, 509, 1021, 4093, LARGE]);
    let any_tables = prop::collection::btree_map(1..60_u32, sizes, 0..40);
    let mut runner = TestRunner::new(ProptestConfig { cases: 60, ..ProptestConfig::default() });
    let result = runner.run(&(any_tables, any::<bool>()), |(sizes, is_checked)| {
        let mut dataplane = dataplane.borrow_mut();
        let (mut total, mut wanted) = (0, BTreeMap::new());
        for (number, size) in sizes {
            if total + Table::room(size) <= bed::options().sizes.slots / 2 {
                total += Table::room(size);
                wanted.insert(number, size);
            }
        }
        let mut state = tables(wanted.into_iter().filter(|(_, size)| *size > 0));
        // Another number for every other one, so that old and new slots stand side by side.
        if is_checked {
            for (number, table) in &mut state.tables {
                *table = self::table(u32::try_from(table.slots.len()).expect("size"), &[*number]);
            }
        }
        dataplane.write(state.clone()).expect("write");
        prop_assert!(dataplane.check().expect("check"));
        prop_assert_eq!(dataplane.written(), Some(&state));
        Ok(())
    });
    result.expect("written");
}

/// A packet that is under way while tables move must not find another table's slots.
#[test]
fn packets_find_their_own_slots_while_tables_move() {
    requires!(Root);
    let pins = Pins::new();
    let load = || Dataplane::load(Options { pins: Some(pins.0.join("lo")), ..bed::options() }).expect("load");
    let mut dataplane = load();
    let mut base = bed::state();
    base.tables.insert(1, table(SMALL, &[1]));
    dataplane.write(base.clone()).expect("write");
    let other = load();
    let is_stopped = AtomicBool::new(false);
    let sent = std::thread::scope(|scope| {
        let packets = scope.spawn(|| {
            let [family, _] = bed::families();
            let mut sent = 0;
            while !is_stopped.load(Ordering::Relaxed) {
                let port = u16::try_from(sent % 60_000).expect("port") + 1;
                let frame = Frame::tcp((family.client, port), (family.vip, bed::TCP), bed::SYN).bytes();
                let mut options = TestRunOptions::new();
                options.data_in = Some(&frame);
                other.program().expect("program").test_run(options).expect("test run");
                sent += 1;
            }
            sent
        });
        for round in 0..150 {
            let mut state = base.clone();
            // Another size for the table of the packets, and other tables where it was.
            let size = if round % 2 == 0 { SMALL } else { 509 };
            let mut total = Table::room(size) + 2 * Table::room(SMALL);
            state.tables.insert(1, table(size, &[1]));
            for item in 0..100 {
                let hash = mix64(round << 8 | item);
                let number = 10 + u32::try_from(hash % 300).expect("number");
                let size = [SMALL, SMALL, SMALL, 509, 1021, 4093, LARGE]
                    [usize::try_from(hash >> 32).expect("size") % 7];
                if total + Table::room(size) <= bed::options().sizes.slots / 2
                    && !state.tables.contains_key(&number)
                {
                    total += Table::room(size);
                    let key =
                        ListenerKey::new(address("10.0.0.200"), 6, u16::try_from(number).expect("port"));
                    let listener = Listener { table: number, has_affinity: false, ranges: None };
                    state.listeners.insert(key, listener);
                    state.tables.insert(number, table(size, &[2]));
                }
            }
            dataplane.write(state).expect("write");
        }
        is_stopped.store(true, Ordering::Relaxed);
        packets.join().expect("packets")
    });
    let packets = |target| dataplane.counts().target(target).expect("counters").packets;
    println!("{sent} packets");
    assert!(sent > 100);
    assert_eq!((packets(1), packets(2)), (sent, 0));
}

fn array<T: aya::Pod>(pins: &FilePath, name: &str) -> Array<MapData, T> {
    let data = MapData::from_pin(pins.join("maps-1").join(name)).expect("map");
    Array::try_from(Map::Array(data)).expect("array")
}

fn counters(pins: &FilePath, name: &str) -> PerCpuArray<MapData, Counters> {
    let data = MapData::from_pin(pins.join("maps-1").join(name)).expect("map");
    PerCpuArray::try_from(Map::PerCpuArray(data)).expect("array")
}

/// What a process leaves that is killed between two Services of a table with another place.
#[test]
fn services_of_a_table_agree_after_a_kill() {
    requires!(Root);
    let pins = Pins::new();
    let load = || Dataplane::load(Options { pins: Some(pins.0.join("lo")), ..bed::options() });
    let mut state = bed::state();
    let mut dataplane = load().expect("load");
    dataplane.write(state.clone()).expect("write");
    let mut services = array::<Service>(&pins.0.join("lo"), "SERVICES");
    let of_table = |services: &Array<MapData, Service>| {
        let service = |number| (number, services.get(&number, 0).expect("service"));
        (1..100).map(service).filter(|(_, service)| service.table == 1).collect::<Vec<_>>()
    };
    let before = of_table(&services);
    assert!(before.len() > 10);
    state.tables.insert(1, table(509, &bed::NODES));
    dataplane.write(state.clone()).expect("write");
    drop(dataplane);
    for (number, old) in &before[1..] {
        let service = services.get(number, 0).expect("service");
        assert_ne!(service.slots, old.slots);
        services.set(*number, Service { slots: old.slots, ..service }, 0).expect("write");
    }
    let mut dataplane = load().expect("load");
    dataplane.write(state.clone()).expect("write");
    let slots: BTreeSet<u64> = of_table(&services).iter().map(|(_, service)| service.slots).collect();
    assert_eq!(slots.len(), 1, "one place");
    assert!(dataplane.check().expect("check"));
}

#[test]
fn what_a_kill_leaves_of_a_service_and_a_target_is_cleared() {
    const NUMBER: u32 = 200;
    const TARGET: u32 = 20;
    requires!(Root);
    let pins = Pins::new();
    let folder = pins.0.join("lo");
    let load = || Dataplane::load(Options { pins: Some(folder.clone()), ..bed::options() });
    let mut dataplane = load().expect("load");
    dataplane.write(bed::state()).expect("write");
    drop(dataplane);
    let mut services = array::<Service>(&folder, "SERVICES");
    let mut of_services = counters(&folder, "SERVICE_COUNTERS");
    let left = Service { version: 7, ..services.get(&1, 0).expect("service") };
    services.set(NUMBER, left, 0).expect("write");
    let count = Counters { packets: 1, ..Counters::default() };
    let cpus = of_services.get(&NUMBER, 0).expect("counters").len();
    let values = || PerCpuValues::try_from(vec![count; cpus]).expect("values");
    of_services.set(NUMBER, values(), 0).expect("write");
    let (mut targets, mut of_targets) =
        (array::<Target>(&folder, "TARGETS"), counters(&folder, "TARGET_COUNTERS"));
    let left = Target { version: 7, family: 0, ..targets.get(&1, 0).expect("target") };
    targets.set(TARGET, left, 0).expect("write");
    of_targets.set(TARGET, values(), 0).expect("write");
    let dataplane = load().expect("load");
    assert_eq!(dataplane.written(), Some(&bed::state()));
    assert_eq!(targets.get(&TARGET, 0).expect("target"), Target { version: 8, ..Target::default() });
    let sums = of_targets.get(&TARGET, 0).expect("counters");
    assert!(sums.iter().all(|sum| *sum == Counters::default()));
    let cleared = Service { version: 8, ..Service::default() };
    assert_eq!(services.get(&NUMBER, 0).expect("service"), cleared);
    let sums = of_services.get(&NUMBER, 0).expect("counters");
    assert!(sums.iter().all(|sum| *sum == Counters::default()));
}

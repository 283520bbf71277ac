// SPDX-License-Identifier: Apache-2.0
//! What is written is what the maps hold, in any order of states.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Dataplane, Listener, Path, State, TargetState};
use steerage_requirements::requires;

use crate::bed::{self, address, table};

/// Few of everything, so that numbers, prefixes and places are used again.
fn any_state() -> impl Strategy<Value = State> {
    let vip = || prop::sample::select(vec!["10.0.0.100", "10.0.0.101", "fd00::100"]).prop_map(address);
    let nets = || {
        let net = prop::sample::select(vec!["10.1.0.0/16", "10.0.0.0/8", "2001:db8::/32", "192.0.2.1/32"]);
        prop::collection::btree_set(net.prop_map(|net| net.parse().expect("net")), 0..4).prop_map(Arc::new)
    };
    let listener = (vip(), 1..5_u16, 1..4_u32, any::<bool>(), prop::option::of(nets()));
    let members = prop::collection::btree_set(1..5_u32, 0..4);
    let table = (1..4_u32, prop::sample::select(vec![251, 509]), members);
    (
        prop::collection::btree_map(vip(), 1..3_u32, 0..4),
        prop::collection::vec(listener, 0..8),
        prop::collection::vec(table, 0..4),
        prop::collection::btree_map(1..5_u32, (0..3_u8, any::<bool>()), 0..5),
        prop::collection::btree_map(prop::array::uniform6(0..2_u8), nets(), 0..4),
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

fn of(size: u32, members: &BTreeSet<u32>) -> Arc<steerage_edge_dataplane::Table> {
    table(size, &members.iter().copied().collect::<Vec<_>>())
}

#[test]
fn maps_hold_the_state_that_was_written_last() {
    requires!(Root);
    let dataplane = Dataplane::load(bed::options()).expect("load");
    let dataplane = std::cell::RefCell::new(dataplane);
    let mut runner = TestRunner::new(ProptestConfig { cases: 300, ..ProptestConfig::default() });
    let result = runner.run(&(any_state(), any::<bool>()), |(state, checks)| {
        let mut dataplane = dataplane.borrow_mut();
        dataplane.write(state.clone()).expect("write");
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
        dataplane.write_table(1, table).expect("write");
        assert_eq!(dataplane.written(), Some(&state));
        assert!(dataplane.check().expect("check"), "{size}");
    }
    dataplane.write(state.clone()).expect("write");
    assert!(dataplane.check().expect("check"));
}

// SPDX-License-Identifier: Apache-2.0
//! A part of a state that is to be another one, as plain values: the plan makes it, and `writer` writes it without a look at the rest.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use steerage_edge_packet::maps::ListenerKey;

use crate::state::{Listener, MacAddress, Sender, State, Table, TargetState};

/// What is to be set, and what, with `None`, is to go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateChange {
    /// The VIPs, and the lease of each.
    pub vips: BTreeMap<IpAddr, Option<u32>>,
    /// The listeners of VIPs.
    pub listeners: BTreeMap<ListenerKey, Option<Listener>>,
    /// The tables, by number.
    pub tables: BTreeMap<u32, Option<Arc<Table>>>,
    /// The targets, by number.
    pub targets: BTreeMap<u32, Option<TargetState>>,
    /// What frames of nodes and of other edge hosts may be.
    pub senders: BTreeMap<MacAddress, Option<Sender>>,
}

/// The values that are set.
fn set<K: Ord + Clone, V: Clone>(change: &BTreeMap<K, Option<V>>) -> BTreeMap<K, V> {
    change.iter().filter_map(|(key, value)| Some((key.clone(), value.clone()?))).collect()
}

/// The values that a change replaces.
fn replaced<K: Ord + Clone, V: Clone>(
    change: &BTreeMap<K, Option<V>>,
    values: &BTreeMap<K, V>,
) -> BTreeMap<K, V> {
    change.keys().filter_map(|key| Some((key.clone(), values.get(key)?.clone()))).collect()
}

fn apply<K: Ord, V>(change: BTreeMap<K, Option<V>>, values: &mut BTreeMap<K, V>) {
    for (key, value) in change {
        match value {
            Some(value) => drop(values.insert(key, value)),
            None => drop(values.remove(&key)),
        }
    }
}

impl StateChange {
    /// Whether nothing is to change.
    pub fn is_empty(&self) -> bool {
        let Self { vips, listeners, tables, targets, senders } = self;
        vips.is_empty()
            && listeners.is_empty()
            && tables.is_empty()
            && targets.is_empty()
            && senders.is_empty()
    }

    /// What it sets.
    pub(crate) fn new_part(&self) -> State {
        let Self { vips, listeners, tables, targets, senders } = self;
        State {
            vips: set(vips),
            listeners: set(listeners),
            tables: set(tables),
            targets: set(targets),
            senders: set(senders),
        }
    }

    /// What this state has in place of it.
    pub(crate) fn old_part(&self, state: &State) -> State {
        let Self { vips, listeners, tables, targets, senders } = self;
        State {
            vips: replaced(vips, &state.vips),
            listeners: replaced(listeners, &state.listeners),
            tables: replaced(tables, &state.tables),
            targets: replaced(targets, &state.targets),
            senders: replaced(senders, &state.senders),
        }
    }

    /// Changes the state.
    pub fn apply_to(self, state: &mut State) {
        let Self { vips, listeners, tables, targets, senders } = self;
        apply(vips, &mut state.vips);
        apply(listeners, &mut state.listeners);
        apply(tables, &mut state.tables);
        apply(targets, &mut state.targets);
        apply(senders, &mut state.senders);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Divides a large change into several transactions, because nobody else can change tables in the network namespace during one. Pure.
//!
//! What a frontend needs is there before a transaction that changes the frontend, and what it no longer needs stays until after it. All
//! elements of a frontend change together, except what its clients remember, and so do all elements of a long list. No number of a list
//! may have been given to another list by the same change.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use steerage_nft::{Row, RowShape, Rows};

use super::list_digests::{list_digests, list_of_key};
use super::{Changes, SetId};

/// Elements of an ordinary transaction. What has to change together can be more: at most the longest list, with all its endpoints
/// replaced.
pub const LARGEST_STEP: usize = 1 << 14;

/// The transactions of a change, in order, each of at most `largest` elements where that is possible.
pub fn steps(changes: &Changes, largest: usize) -> Vec<Cow<'_, Changes>> {
    if changes.count() <= largest {
        return vec![Cow::Borrowed(changes)];
    }
    let (lists, exchanged) = (growing_lists(changes), exchanged_clients(changes));
    let is_single = |id: SetId, row: &Row<'_>| match id {
        SetId::Hairpins | SetId::Sources(_) => true,
        SetId::Sticky(_) => !exchanged.contains(&(id, row.key)),
        _ => false,
    };
    let list = |id: SetId, row: &Row<'_>, grows: bool| {
        let list = matches!(id, SetId::Endpoints | SetId::Digests).then(|| list_of_key(row.key)).flatten();
        list.filter(|list| lists.get(list).copied().unwrap_or(true) == grows)
    };
    let mut steps = Steps { done: Vec::new(), room: 0, largest };
    steps.each(Op::Add, changes, is_single);
    steps.together(changes, |id, _| matches!(id, SetId::Shares(_)).then_some(()));
    steps.together(changes, |id, row| list(id, row, true));
    // A packet to an address of the cluster whose port nobody has is rejected.
    steps.each(Op::Delete, changes, |id, _| id == SetId::ClusterAddresses);
    steps.together(changes, |id, row| {
        let frontend = id.frontend_of_key(row.key)?;
        (!is_single(id, row)).then(|| frontend.to_vec())
    });
    steps.each(Op::Add, changes, |id, _| id == SetId::ClusterAddresses);
    steps.together(changes, |id, row| list(id, row, false));
    steps.each(Op::Delete, changes, is_single);
    steps.done.into_iter().map(Cow::Owned).collect()
}

/// The long lists that change, and whether they do before their frontends: all that grow. One that becomes shorter may leave the range
/// of slots in which its frontends look.
fn growing_lists(changes: &Changes) -> BTreeMap<u32, bool> {
    let lengths = |sets: &BTreeMap<SetId, Rows>| -> BTreeMap<u32, u32> {
        let digests = sets.get(&SetId::Digests).map(list_digests).unwrap_or_default();
        digests.into_iter().map(|(list, digest)| (list, digest.length)).collect()
    };
    let (old, new) = (lengths(&changes.delete), lengths(&changes.add));
    old.keys().chain(new.keys()).map(|list| (*list, new.get(list) >= old.get(list))).collect()
}

/// What clients remember, where another endpoint takes the place of one: it is deleted and added at once.
fn exchanged_clients(changes: &Changes) -> BTreeSet<(SetId, &[u8])> {
    let sticky = |wanted| {
        let of_op = all(changes).filter(move |(op, id, ..)| *op == wanted && matches!(id, SetId::Sticky(_)));
        of_op.map(|(_, id, _, row)| (id, row.key))
    };
    let added: BTreeSet<_> = sticky(Op::Add).collect();
    sticky(Op::Delete).filter(|client| added.contains(client)).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Delete,
    Add,
}

/// All elements of a change.
fn all(changes: &Changes) -> impl Iterator<Item = (Op, SetId, RowShape, Row<'_>)> {
    let sets = changes.delete.iter().map(|set| (Op::Delete, set));
    let sets = sets.chain(changes.add.iter().map(|set| (Op::Add, set)));
    sets.flat_map(|(op, (id, rows))| rows.iter().map(move |row| (op, *id, rows.shape(), row)))
}

struct Steps {
    done: Vec<Changes>,
    /// Of the last step.
    room: usize,
    largest: usize,
}

impl Steps {
    /// The number of the step for so many elements that belong together.
    fn reserve(&mut self, elements: usize) -> usize {
        if self.done.is_empty() || elements > self.room && self.room < self.largest {
            self.done.push(Changes::default());
            self.room = self.largest;
        }
        self.room = self.room.saturating_sub(elements);
        self.done.len() - 1
    }

    fn put(&mut self, step: usize, (op, id, shape, row): (Op, SetId, RowShape, Row<'_>)) {
        let Some(changes) = self.done.get_mut(step) else { return };
        let sets = if op == Op::Add { &mut changes.add } else { &mut changes.delete };
        sets.entry(id).or_insert_with(|| Rows::new(shape)).push_row(row);
    }

    /// Elements of which each may change by itself.
    fn each(&mut self, only: Op, changes: &Changes, is_meant: impl Fn(SetId, &Row<'_>) -> bool) {
        for element in all(changes).filter(|(op, id, _, row)| *op == only && is_meant(*id, row)) {
            let step = self.reserve(1);
            self.put(step, element);
        }
    }

    /// Elements that change together with all others of the same unit.
    fn together<U: Ord>(&mut self, changes: &Changes, unit: impl Fn(SetId, &Row<'_>) -> Option<U>) {
        let mut units: BTreeMap<U, usize> = BTreeMap::new();
        for unit in all(changes).filter_map(|(_, id, _, row)| unit(id, &row)) {
            *units.entry(unit).or_default() += 1;
        }
        for place in units.values_mut() {
            *place = self.reserve(*place);
        }
        for element @ (_, id, _, row) in all(changes) {
            if let Some(step) = unit(id, &row).and_then(|unit| units.get(&unit)) {
                self.put(*step, element);
            }
        }
    }
}

#[cfg(test)]
mod tests;

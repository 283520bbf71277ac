// SPDX-License-Identifier: Apache-2.0
//! Divides a large change into several transactions, because nobody else can change tables in the network namespace during one. Pure.
//!
//! What a frontend needs is there before a transaction that changes the frontend, and what it no longer needs stays until after it. All
//! elements of a frontend change together, except what its clients remember, and so do all elements of a long list. No number of a list
//! may have been given to another list by the same change.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use steerage_nft::{Row, RowShape, Rows};

use super::list_digests::{list_digests, list_of_frontend, list_of_key};
use super::{Changes, SetId};

/// Elements of an ordinary transaction: the kernel takes up to 40 ms for them, also if it has to grow a set. What has to change together
/// can be more: at most the longest list, with all its endpoints replaced.
pub const LARGEST_STEP: usize = 1 << 13;

/// The transactions of a change, in order, each of at most `largest` elements where that is possible.
pub fn steps(changes: &Changes, largest: usize) -> Vec<Cow<'_, Changes>> {
    if changes.count() <= largest {
        return vec![Cow::Borrowed(changes)];
    }
    let (lists, exchanged) = (list_changes(changes), exchanged_clients(changes));
    let is_single = |id: SetId, row: &Row<'_>| match id {
        SetId::Hairpins | SetId::Sources(_) => true,
        SetId::Sticky(_) => !exchanged.contains(&(id, row.key)),
        _ => false,
    };
    let is_of =
        |row: &Row<'_>, change| list_of_key(row.key).and_then(|list| lists.get(&list)) == Some(&change);
    let all_of = |id, row: &Row<'_>, change| {
        let of_list = matches!(id, SetId::Endpoints | SetId::Digests) && is_of(row, change);
        of_list.then(|| list_of_key(row.key)).flatten()
    };
    let mut steps = Steps { done: Vec::new(), room: 0, largest };
    steps.each(Op::Add, changes, is_single);
    steps.together(changes, |id, _| matches!(id, SetId::Shares(_)).then_some(()));
    // A list always has a digest, so that a new process finds what an interrupted write has left.
    for id in [SetId::Digests, SetId::Endpoints] {
        steps.each(Op::Add, changes, |of, row| of == id && is_of(row, ListChange::Begins));
    }
    steps.together(changes, |id, row| all_of(id, row, ListChange::Stays));
    // A packet to an address of the cluster whose port nobody has is rejected.
    steps.each(Op::Delete, changes, |id, _| id == SetId::ClusterAddresses);
    steps.together(changes, |id, row| {
        let frontend = id.frontend_of_key(row.key)?;
        (!is_single(id, row)).then(|| frontend.to_vec())
    });
    steps.each(Op::Add, changes, |id, _| id == SetId::ClusterAddresses);
    steps.together(changes, |id, row| all_of(id, row, ListChange::Shrinks));
    for id in [SetId::Endpoints, SetId::Digests] {
        steps.each(Op::Delete, changes, |of, row| of == id && is_of(row, ListChange::Ends));
    }
    steps.each(Op::Delete, changes, is_single);
    steps.done.into_iter().map(Cow::Owned).collect()
}

/// The transactions of a repair, which turns whatever the kernel has into what is wanted. One, if several could lead a frontend to a list
/// that was another Service's, or if what the kernel has is in no order that [`steps`] knows.
pub fn repair_steps(changes: &Changes, largest: usize) -> Vec<Cow<'_, Changes>> {
    let steps = steps(changes, largest);
    let is_whole = steps.iter().map(|step| step.count()).sum::<usize>() == changes.count();
    if is_whole && !gives_list_to_another(changes) { steps } else { vec![Cow::Borrowed(changes)] }
}

/// Whether a frontend would lead to what a list holds for others between two steps: before the frontend leaves it, or after it joins it.
fn gives_list_to_another(changes: &Changes) -> bool {
    let led_to = |wanted: Op| -> BTreeSet<(bool, u32)> {
        let list = |(op, id, _, row): (Op, SetId, RowShape, Row<'_>)| {
            let is_sources = match id {
                SetId::Lists(_) => false,
                SetId::Restricted => true,
                _ => return None,
            };
            (op == wanted).then_some((is_sources, list_of_frontend(row.data?)?))
        };
        all(changes).filter_map(list).collect()
    };
    let (left, joined) = (led_to(Op::Delete), led_to(Op::Add));
    if left.is_empty() && joined.is_empty() {
        return false;
    }
    let lists = list_changes(changes);
    let is_given = |(op, id, _, row): (Op, SetId, RowShape, Row<'_>)| {
        let Some(list) = list_of_key(row.key) else { return false };
        match id {
            SetId::Endpoints => {
                // All others change before the frontends.
                let is_later = matches!(lists.get(&list), Some(ListChange::Shrinks | ListChange::Ends));
                if is_later { &joined } else { &left }.contains(&(false, list))
            }
            // New ones come before the frontends change, and old ones go after that.
            SetId::Sources(_) if op == Op::Add => left.contains(&(true, list)),
            SetId::Sources(_) => joined.contains(&(true, list)),
            _ => false,
        }
    };
    all(changes).any(is_given)
}

/// What happens to a long list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListChange {
    /// No frontend leads to it yet.
    Begins,
    /// It has at least as many endpoints as before. Frontends may look at more slots afterwards.
    Stays,
    /// Frontends may look at fewer slots before.
    Shrinks,
    /// No frontend leads to it any more.
    Ends,
}

fn list_changes(changes: &Changes) -> BTreeMap<u32, ListChange> {
    let lengths = |sets: &BTreeMap<SetId, Rows>| -> BTreeMap<u32, u32> {
        let digests = sets.get(&SetId::Digests).map(list_digests).unwrap_or_default();
        digests.into_iter().map(|(list, digest)| (list, digest.length)).collect()
    };
    let (old, new) = (lengths(&changes.delete), lengths(&changes.add));
    // Only the repair of a list leaves its digest.
    let repaired = all(changes).filter(|(_, id, ..)| *id == SetId::Endpoints);
    let mut lists: BTreeMap<u32, ListChange> =
        repaired.filter_map(|(.., row)| list_of_key(row.key)).map(|list| (list, ListChange::Stays)).collect();
    lists.extend(old.keys().chain(new.keys()).map(|list| {
        let change = match (old.get(list), new.get(list)) {
            (None, _) => ListChange::Begins,
            (_, None) => ListChange::Ends,
            (old, new) if new >= old => ListChange::Stays,
            _ => ListChange::Shrinks,
        };
        (*list, change)
    }));
    lists
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

// SPDX-License-Identifier: Apache-2.0
//! How much of a table a write reads before it compares: everything, what digests do not tell, or what is damaged. Never writes.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Family;
use steerage_nft::{Error, Nft, Rows, Table};

use super::inspect::{read_elements, read_once};
use crate::rules::{
    BaseRuleset, Elements, ListDigest, SetId, Side, list_digests, list_of_frontend, list_of_key, slot_keys,
};

/// How much is read.
#[derive(Debug, Clone, Copy)]
pub enum Scope<'a> {
    /// All elements.
    Everything,
    /// All elements but those of long lists whose digest and frontends are the wanted ones, which are believed, and of those without a
    /// digest, which are taken to be empty. `is_settled`: no set has grown for some 100 ms, and a single listing of each lacks nothing.
    Digests {
        /// Whether nobody has written just before.
        is_settled: bool,
    },
    /// These sets, by a single listing of each, which may lack elements. Then nothing is read or written that takes long: a table that is
    /// missing or has another layout is left as it is.
    Damaged(&'a [SetId]),
}

/// The elements of a table.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) elements: Elements,
    /// The wanted long lists that were not read. They have to be, later.
    pub(super) unread: BTreeSet<u32>,
}

/// Reads those sets of the base ruleset that are among `sets`, and in the scope. Lists that are believed are taken to be as `wanted`.
pub(super) fn read(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    wanted: &Elements,
    sets: &[String],
    scope: Scope<'_>,
) -> Result<Found, Error> {
    let mut found = Found { elements: Elements::new(wanted.family()), unread: BTreeSet::new() };
    let ids = base_ruleset.filled.iter().copied().filter(|id| sets.contains(&id.name()));
    match scope {
        Scope::Everything => {
            found.elements = read_elements(nft, table, base_ruleset, wanted.family(), sets)?;
        }
        Scope::Digests { is_settled } => {
            let (endpoints, others): (Vec<_>, Vec<_>) = ids.partition(|id| *id == SetId::Endpoints);
            for id in others {
                found.elements.listed(id, read_whole(nft, table, id, wanted, is_settled)?);
            }
            for id in endpoints {
                let rows = if sets.contains(&SetId::Digests.name()) {
                    let rows;
                    (rows, found.unread) = read_differing_lists(nft, table, &found.elements, wanted)?;
                    rows
                } else {
                    read_whole(nft, table, id, wanted, is_settled)?
                };
                found.elements.listed(id, rows);
            }
        }
        Scope::Damaged(damaged) => {
            found.elements = read_once(nft, table, damaged, wanted.family(), sets)?;
        }
    }
    Ok(found)
}

/// A single listing is enough of a set that holds what is wanted and has not grown for some 100 ms. While it grows, a listing may lack
/// just what another program added.
fn read_whole(
    nft: &mut Nft,
    table: &Table,
    id: SetId,
    wanted: &Elements,
    is_settled: bool,
) -> Result<Rows, Error> {
    let shape = id.row_shape(wanted.family());
    if is_settled
        && let Some(rows) = nft.rows_once(table, &id.name(), shape)?
        && rows == rows_of(wanted, id)
    {
        return Ok(rows);
    }
    nft.rows(table, &id.name(), shape)
}

/// The lists that had another number, or other frontends. A digest says what a list holds, and not whose it is: a number may have been
/// another Service's, whose endpoints may have been chosen for their digest.
fn moved_lists(kernel: &Elements, wanted: &Elements) -> BTreeSet<u32> {
    let of_side = |side| {
        let lists = SetId::Lists(side);
        let (_, new) = rows_of(kernel, lists).difference(&rows_of(wanted, lists));
        new.iter().filter_map(|row| list_of_frontend(row.data?)).collect::<Vec<_>>()
    };
    Side::ALL.into_iter().flat_map(of_side).collect()
}

/// The endpoints of the long lists, of which those are read whose digest is not the wanted one and those that moved, and the lists that
/// were not read. `kernel` are the elements of all other sets.
fn read_differing_lists(
    nft: &mut Nft,
    table: &Table,
    kernel: &Elements,
    wanted: &Elements,
) -> Result<(Rows, BTreeSet<u32>), Error> {
    let (family, moved) = (wanted.family(), moved_lists(kernel, wanted));
    let mut differing = list_digests(&rows_of(kernel, SetId::Digests));
    let digests = list_digests(&rows_of(wanted, SetId::Digests));
    let believed =
        digests.iter().filter(|(list, digest)| differing.get(list) == Some(*digest) && !moved.contains(list));
    let believed: BTreeSet<u32> = believed.map(|(list, _)| *list).collect();
    differing.retain(|list, _| !believed.contains(list));
    let mut rows = read_lists(nft, table, family, &differing, &digests)?;
    for row in rows_of(wanted, SetId::Endpoints).iter() {
        if list_of_key(row.key).is_some_and(|list| believed.contains(&list)) {
            rows.push_row(row);
        }
    }
    rows.sort();
    let unread = digests.into_keys().filter(|list| !differing.contains_key(list)).collect();
    Ok((rows, unread))
}

/// The digests that the kernel has. One that a listing lacks makes a list unknown, no more.
pub(super) fn read_digests(
    nft: &mut Nft,
    table: &Table,
    family: Family,
) -> Result<BTreeMap<u32, ListDigest>, Error> {
    let digests = SetId::Digests;
    let shape = digests.row_shape(family);
    let rows = match nft.rows_once(table, &digests.name(), shape)? {
        Some(rows) => rows,
        None => nft.rows(table, &digests.name(), shape)?,
    };
    Ok(list_digests(&rows))
}

/// Reads lists, sorted, as far as packets look at them by any of the two digests.
pub(super) fn read_lists(
    nft: &mut Nft,
    table: &Table,
    family: Family,
    lists: &BTreeMap<u32, ListDigest>,
    others: &BTreeMap<u32, ListDigest>,
) -> Result<Rows, Error> {
    let (endpoints, shape) = (SetId::Endpoints.name(), SetId::Endpoints.row_shape(family));
    let slots = |list: &u32, digest: &ListDigest| {
        digest.slots().max(others.get(list).map_or(0, |other| other.slots()))
    };
    // By their keys, also if they are all: the kernel walks the whole map again for each 32 KiB of a listing.
    let keys = lists.iter().flat_map(|(list, digest)| slot_keys(*list, slots(list, digest)));
    nft.rows_at(table, &endpoints, shape, keys)
}

fn rows_of(elements: &Elements, id: SetId) -> Rows {
    elements.of_set(id).cloned().unwrap_or_else(|| Rows::new(id.row_shape(elements.family())))
}

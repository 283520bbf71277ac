// SPDX-License-Identifier: Apache-2.0
//! How much of a table a write reads before it compares: everything, what digests do not tell, or what is damaged. Never writes.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::Family;
use steerage_nft::{Error, Nft, Rows, Table};

use super::inspect::{read_elements, read_once};
use crate::rules::{BaseRuleset, Elements, ListDigest, SetId, list_digests, list_of_key, slot_keys};

/// If unknown lists have more slots, a listing of all lists costs less.
const MOST_SLOTS: u64 = 100_000;

/// How much is read.
#[derive(Debug, Clone, Copy)]
pub enum Scope<'a> {
    /// All elements.
    Everything,
    /// All elements but those of long lists whose digest is the wanted one. These are believed, until they are read.
    Digests,
    /// These sets, by a single listing of each, which may lack elements. Then nothing is read or written that takes long: a table that is
    /// missing or has another layout is left as it is.
    Damaged(&'a [SetId]),
}

/// The elements of a table, and the long lists that were believed.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) elements: Elements,
    pub(super) believed: BTreeSet<u32>,
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
    let mut found = Found { elements: Elements::new(wanted.family()), believed: BTreeSet::new() };
    let ids = base_ruleset.filled.iter().copied().filter(|id| sets.contains(&id.name()));
    match scope {
        Scope::Everything => {
            found.elements = read_elements(nft, table, base_ruleset, wanted.family(), sets)?;
        }
        Scope::Digests => {
            for id in ids {
                let rows = if id == SetId::Endpoints && sets.contains(&SetId::Digests.name()) {
                    let rows;
                    (rows, found.believed) = read_unknown_lists(nft, table, wanted)?;
                    rows
                } else {
                    read_matching(nft, table, id, wanted)?
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

/// A single listing is enough of a set that holds what is wanted and has not grown for some 100 ms.
fn read_matching(nft: &mut Nft, table: &Table, id: SetId, wanted: &Elements) -> Result<Rows, Error> {
    let shape = id.row_shape(wanted.family());
    match nft.rows_once(table, &id.name(), shape)? {
        Some(rows) if rows == rows_of(wanted, id) => Ok(rows),
        _ => nft.rows(table, &id.name(), shape),
    }
}

/// The endpoints of the long lists, of which those are read whose digest is not as wanted. Returns the others, too. Lists that the
/// kernel has no digest of are taken to be empty.
fn read_unknown_lists(
    nft: &mut Nft,
    table: &Table,
    wanted: &Elements,
) -> Result<(Rows, BTreeSet<u32>), Error> {
    let family = wanted.family();
    let kernel = read_digests(nft, table, family)?;
    let digests = list_digests(&rows_of(wanted, SetId::Digests));
    let believed: BTreeSet<u32> = kernel
        .iter()
        .filter(|(list, digest)| digests.get(list) == Some(*digest))
        .map(|(list, _)| *list)
        .collect();
    let mut unknown = kernel;
    unknown.retain(|list, _| !believed.contains(list));
    if unknown.values().map(|digest| u64::from(digest.slots())).sum::<u64>() > MOST_SLOTS {
        let endpoints = SetId::Endpoints;
        return Ok((nft.rows(table, &endpoints.name(), endpoints.row_shape(family))?, BTreeSet::new()));
    }
    let mut rows = read_lists(nft, table, family, &unknown, &digests)?;
    for row in rows_of(wanted, SetId::Endpoints).iter() {
        if list_of_key(row.key).is_some_and(|list| believed.contains(&list)) {
            rows.push_row(row);
        }
    }
    rows.sort();
    Ok((rows, believed))
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

/// Reads lists, sorted, as far as packets look at them: those of any of the two digests.
pub(super) fn read_lists(
    nft: &mut Nft,
    table: &Table,
    family: Family,
    lists: &BTreeMap<u32, ListDigest>,
    others: &BTreeMap<u32, ListDigest>,
) -> Result<Rows, Error> {
    let endpoints = SetId::Endpoints;
    let keys = lists.iter().flat_map(|(list, digest)| {
        let other = others.get(list).map_or(0, |digest| digest.slots());
        slot_keys(*list, digest.slots().max(other))
    });
    nft.rows_at(table, &endpoints.name(), endpoints.row_shape(family), keys)
}

fn rows_of(elements: &Elements, id: SetId) -> Rows {
    elements.of_set(id).cloned().unwrap_or_else(|| Rows::new(id.row_shape(elements.family())))
}

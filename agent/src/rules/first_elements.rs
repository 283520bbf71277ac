// SPDX-License-Identifier: Apache-2.0
//! Which elements an empty table gets first, so that Services with few endpoints need not wait for those with many. Pure, called by
//! `crate::kernel::load`.

use std::collections::{BTreeMap, BTreeSet};

use steerage_nft::Rows;

use super::list_digests::{list_of_frontend, list_of_key};
use super::{Elements, SetId, Side};

/// Endpoints of a list whose frontends wait. Lists of so many are a few hundred µs of the kernel's time each.
const LONG: usize = 256;
/// Less is loaded at once: the kernel takes some 40 ms for it.
const WORTH_IT: usize = 1 << 14;

/// The elements without those of long lists and of the frontends that lead to them; `None` if there is little to gain.
pub fn first_elements(wanted: &Elements) -> Option<Elements> {
    let mut lengths: BTreeMap<u32, usize> = BTreeMap::new();
    for list in wanted.of_set(SetId::Endpoints)?.iter().filter_map(|row| list_of_key(row.key)) {
        *lengths.entry(list).or_default() += 1;
    }
    lengths.retain(|_, length| *length >= LONG);
    if lengths.values().sum::<usize>() < WORTH_IT {
        return None;
    }
    let leads_to_long =
        |data: Option<&[u8]>| data.and_then(list_of_frontend).is_some_and(|list| lengths.contains_key(&list));
    let lists = Side::ALL.into_iter().filter_map(|side| wanted.of_set(SetId::Lists(side)));
    let frontends: BTreeSet<&[u8]> =
        lists.flat_map(Rows::iter).filter(|row| leads_to_long(row.data)).map(|row| row.key).collect();
    let waits = |id: SetId, key: &[u8]| match id {
        SetId::Endpoints | SetId::Digests => list_of_key(key).is_some_and(|list| lengths.contains_key(&list)),
        // At a port that nobody has there, a packet would be rejected. A key of a frontend begins with its address.
        SetId::ClusterAddresses => {
            frontends.range(key..).next().is_some_and(|frontend| frontend.starts_with(key))
        }
        _ => id.frontend_of_key(key).is_some_and(|frontend| frontends.contains(frontend)),
    };
    Some(wanted.without(waits))
}

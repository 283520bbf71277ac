// SPDX-License-Identifier: Apache-2.0
//! Reads the chains of other programs' tables, for `check` and for the monitor. Never writes.

use steerage_nft::{ChainInfo, Error, Family, Nft, Table};

use super::FAMILIES;
use crate::edge_tunnel;
use crate::foreign::{ForeignChain, KUBE_SERVICES};
use crate::instance_lock;
use crate::rules::TABLE;

/// The base chains of other programs, and [`KUBE_SERVICES`].
pub(super) fn foreign_chains(nft: &mut Nft) -> Result<Vec<ForeignChain>, Error> {
    let mut found = Vec::new();
    for family in FAMILIES.map(|(_, family)| family).into_iter().chain([Family::Inet]) {
        let chains = match nft.all_chains(family) {
            Err(error) if error.is_unsupported() => continue,
            chains => chains?,
        };
        for ChainInfo { table, name, base } in chains {
            let is_asked = base.is_some() || name == KUBE_SERVICES;
            let own = [TABLE, instance_lock::NAME, edge_tunnel::TABLE];
            if own.contains(&table.as_str()) || !is_asked {
                continue;
            }
            let table = Table::new(family, table);
            let drops = match base {
                Some(base) => base.drops || has_unconditional_drop(nft, &table, &name)?,
                None => false,
            };
            found.push(ForeignChain {
                table: table.to_string(),
                chain: name,
                hook: base.map(|base| base.hook),
                drops,
            });
        }
    }
    Ok(found)
}

fn has_unconditional_drop(nft: &mut Nft, table: &Table, chain: &str) -> Result<bool, Error> {
    match nft.rules_of_chain(table, chain) {
        Ok(rules) => Ok(rules.iter().any(steerage_nft::RuleInfo::is_unconditional_drop)),
        // The table has just been deleted.
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

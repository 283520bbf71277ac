// SPDX-License-Identifier: Apache-2.0
//! Reads one of the agent's tables as it is. Never writes.

use std::collections::BTreeMap;

use steerage_model::Family;
use steerage_nft::{ChainInfo, Error, Nft, Table};

use super::FAMILIES;
use super::repair::{ChainRules, by_chain};
use crate::rules::{AFFINITY_LIMITED, BaseRuleset, DropReason, Elements, SetId, TABLE, TO_PEERS};

/// A table in the kernel.
#[derive(Debug, Clone)]
pub struct KernelTable {
    /// Its comment, which identifies the layout.
    pub layout: Option<String>,
    /// No packet sees its base chains.
    pub is_dormant: bool,
    /// Each chain with the number of its rules and the comment of the first one.
    pub chains: BTreeMap<String, (usize, Option<String>)>,
    /// The chains as such.
    pub chain_infos: Vec<ChainInfo>,
    /// The rules as the kernel lists them.
    pub rules: ChainRules,
    /// The names of its sets and maps.
    pub sets: Vec<String>,
    /// The elements of those that the agent fills.
    pub elements: Elements,
}

/// Reads a table in the network namespace of the calling thread. `None` if it does not exist, or the kernel lacks the family.
pub fn read_table(model: Family, base_ruleset: &BaseRuleset) -> Result<Option<KernelTable>, Error> {
    let family = if model == Family::V4 { steerage_nft::Family::Ip } else { steerage_nft::Family::Ip6 };
    let table = Table::new(family, TABLE);
    let mut nft = Nft::open()?;
    let info = match nft.table(&table) {
        Ok(Some(info)) => info,
        Ok(None) => return Ok(None),
        Err(error) if error.is_unsupported() => return Ok(None),
        Err(error) => return Err(error),
    };
    let chain_infos = nft.chain_infos(&table)?;
    let mut chains: BTreeMap<_, _> =
        chain_infos.iter().map(|chain| (chain.name.clone(), (0, None))).collect();
    let listed = nft.rules(&table)?;
    let rules = by_chain(&listed);
    for rule in listed {
        let (count, first) = chains.entry(rule.chain).or_default();
        if *count == 0 {
            *first = rule.comment;
        }
        *count += 1;
    }
    let sets = nft.sets(&table)?;
    let elements = read_elements(&mut nft, &table, base_ruleset, model, &sets)?;
    let (layout, is_dormant) = (info.comment, info.is_dormant);
    Ok(Some(KernelTable { layout, is_dormant, chains, chain_infos, rules, sets, elements }))
}

/// Packets that the rules of a family dropped or rejected for one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DroppedPackets {
    /// The family.
    pub family: Family,
    /// Why.
    pub reason: DropReason,
    /// The number since the table was created.
    pub packets: u64,
}

/// What the tables count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CountedPackets {
    /// Dropped or rejected packets.
    pub dropped: Vec<DroppedPackets>,
    /// Packets that were forwarded to other nodes, by family, where they are.
    pub forwarded: Vec<(Family, u64)>,
    /// Packets that the limit of affinity concerned, by family: their client was not remembered, because its namespace had added too many.
    pub affinity_limited: Vec<(Family, u64)>,
}

/// Reads the counters in the network namespace of the calling thread. Nothing for a family that the kernel lacks.
pub fn counted_packets() -> Result<CountedPackets, Error> {
    let mut found = CountedPackets::default();
    let mut nft = Nft::open()?;
    for (model, family) in FAMILIES {
        let counters = match nft.counters(&Table::new(family, TABLE)) {
            Err(error) if error.is_unsupported() => continue,
            counters => counters?,
        };
        let of = |name| counters.get(name).map(|packets| (model, *packets));
        found.forwarded.extend(of(TO_PEERS));
        found.affinity_limited.extend(of(AFFINITY_LIMITED));
        found.dropped.extend(DropReason::ALL.into_iter().filter_map(|reason| {
            let packets = *counters.get(reason.name())?;
            Some(DroppedPackets { family: model, reason, packets })
        }));
    }
    Ok(found)
}

/// The elements of those of `ids` that are among `sets`, by a single listing of each, which may lack some.
pub(super) fn read_once(
    nft: &mut Nft,
    table: &Table,
    ids: &[SetId],
    family: Family,
    sets: &[String],
) -> Result<Elements, Error> {
    let mut elements = Elements::new(family);
    for id in ids.iter().filter(|id| sets.contains(&id.name())) {
        let rows = nft.rows_once(table, &id.name(), id.row_shape(family))?;
        elements.listed(*id, rows.ok_or(Error::DumpInterrupted("list damaged elements"))?);
    }
    Ok(elements)
}

/// The elements of those sets of the base ruleset that are among `sets`.
pub(super) fn read_elements(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    family: Family,
    sets: &[String],
) -> Result<Elements, Error> {
    let mut elements = Elements::new(family);
    for id in base_ruleset.filled.iter().filter(|id| sets.contains(&id.name())) {
        elements.listed(*id, nft.rows(table, &id.name(), id.row_shape(family))?);
    }
    Ok(elements)
}

// SPDX-License-Identifier: Apache-2.0
//! Our table of one family: created, adopted, repaired, updated.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_model::Family;
use steerage_nft::{Batch, Data, Element, Error, Nft, RuleInfo, Table};

use super::inspect::read_elements;
use super::load::{add_chains, load};
use crate::rules::{BaseRuleset, Changes, Elements, RulesetConfig, TABLE, difference};

/// What is left of a client's affinity, at the least, for it to be taken over: an element whose time comes to nothing in the
/// kernel's clock would stay for ever.
const WORTH_KEEPING: Duration = Duration::from_secs(1);

/// The rules of a table as the kernel lists them, by chain.
type ChainRules = BTreeMap<String, Vec<Vec<u8>>>;

/// The table of one family.
#[derive(Debug)]
pub struct FamilyTable {
    nft: Nft,
    model: Family,
    family: steerage_nft::Family,
    table: Table,
    /// The rules as the kernel listed them right after we wrote them, by chain.
    written: Option<ChainRules>,
}

impl FamilyTable {
    /// The table of `family`, as yet unread.
    pub fn new(nft: Nft, model: Family, family: steerage_nft::Family) -> Self {
        Self { nft, model, family, table: Table::new(family, TABLE), written: None }
    }

    /// Its family.
    pub fn model(&self) -> Family {
        self.model
    }

    /// The netlink port by which its changes are known to be ours.
    pub fn port(&self) -> Result<u32, Error> {
        self.nft.port()
    }

    /// Writes a difference in one transaction.
    pub fn write(&mut self, changes: &Changes) -> Result<(), Error> {
        let mut batch = Batch::new();
        append(&mut batch, &self.table, changes);
        self.nft.commit(batch)
    }

    /// Makes the table what it should be, whatever it is now, in one transaction; writes only what differs, save where others
    /// commit so often that what is there can't be read: then it is replaced. Returns how many elements were written, and the
    /// generations of the ruleset before it and, if nobody else has written, after it; 0, which none has, when that is not known.
    pub fn synchronise(
        &mut self,
        shape: &RulesetConfig,
        wanted: &Elements,
    ) -> Result<(usize, (u32, u32)), Error> {
        let base_ruleset = BaseRuleset::new(self.family, shape);
        let (table, written) = (self.table.clone(), self.written.as_ref());
        let mut count = 0;
        if self.nft.table(&table)?.is_none() {
            let generations = load(&mut self.nft, &table, &base_ruleset, wanted)?;
            self.written = self.listed()?;
            return Ok((wanted.len(), generations));
        }
        let repaired = self.nft.transact(|nft| {
            let (batch, elements) = repair(nft, &table, &base_ruleset, wanted, written)?;
            count = elements;
            Ok::<_, Error>(batch)
        });
        let generations = match repaired {
            // Others commit too often for us to read what is there.
            Err(error @ (Error::DumpInterrupted(_) | Error::StaleGeneration)) => {
                tracing::warn!(%table, %error, "the table is replaced unread");
                let mut batch = Batch::new();
                batch.destroy_table(&table);
                create(&mut batch, &table, &base_ruleset, wanted);
                self.nft.commit(batch)?;
                count = wanted.len();
                (0, 0)
            }
            repaired => repaired?,
        };
        self.written = self.listed()?;
        Ok((count, generations))
    }

    /// The rules as the kernel lists them; `None` where others commit too often: then only the digests in their comments tell
    /// whether rules were changed.
    fn listed(&mut self) -> Result<Option<ChainRules>, Error> {
        match self.nft.rules(&self.table) {
            Ok(rules) => Ok(Some(by_chain(&rules))),
            Err(Error::DumpInterrupted(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The generation of the ruleset now.
    pub fn generation(&mut self) -> Result<u32, Error> {
        self.nft.generation()
    }
}

/// Reads what is there and plans what makes it right.
fn repair(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    wanted: &Elements,
    written: Option<&ChainRules>,
) -> Result<(Batch, usize), Error> {
    let mut batch = Batch::new();
    let Some(info) = nft.table(table)? else {
        create(&mut batch, table, base_ruleset, wanted);
        return Ok((batch, wanted.len()));
    };
    let mut chains = nft.chains(table)?;
    let mut ours: Vec<_> = base_ruleset.chains.iter().map(|chain| chain.name.clone()).collect();
    chains.sort_unstable();
    ours.sort_unstable();
    let sets = nft.sets(table)?;
    if info.comment.as_deref() != Some(base_ruleset.version.as_str()) || chains != ours {
        let remembered = remembered(nft, table, base_ruleset, &sets);
        let clients: usize = remembered.iter().map(|(_, clients)| clients.len()).sum();
        tracing::info!(%table, clients, "table of another version or shape: it is replaced");
        batch.delete_table(table);
        create(&mut batch, table, base_ruleset, wanted);
        for (map, clients) in &remembered {
            batch.add_elements(table, map, clients);
        }
        return Ok((batch, wanted.len()));
    }

    for (name, set) in &base_ruleset.sets {
        if !sets.contains(name) {
            batch.add_set(table, set);
        }
    }
    let rules = nft.rules(table)?;
    let found = by_chain(&rules);
    for chain in &base_ruleset.chains {
        let mine: Vec<_> = rules.iter().filter(|rule| rule.chain == chain.name).collect();
        let digest = mine.first().and_then(|rule| rule.comment.as_deref());
        let untouched = written.is_none_or(|written| written.get(&chain.name) == found.get(&chain.name));
        if digest != Some(chain.digest.as_str()) || mine.len() != chain.rules.len() || !untouched {
            tracing::info!(%table, chain = chain.name, "chain is written anew");
            batch.flush_chain(table, &chain.name);
            for rule in &chain.rules {
                batch.add_rule(table, &chain.name, rule);
            }
        }
    }
    let held = read_elements(nft, table, base_ruleset, wanted.family(), &sets)?;
    let changes = difference(&held, wanted);
    append(&mut batch, table, &changes);
    // After the chains that named them were written anew: sets of timeouts that nobody uses any more.
    for name in sets.iter().filter(|name| !base_ruleset.sets.iter().any(|(wanted, _)| wanted == *name)) {
        batch.delete_set(table, name);
    }
    Ok((batch, changes.count()))
}

/// The clients that maps of our names and lengths remember, whatever layout they are of: clients keep their endpoints when the
/// layout changes. What means something else there is no endpoint of ours here, and forgotten when it is looked up.
fn remembered(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    sets: &[String],
) -> Vec<(String, Vec<Element>)> {
    let mut found = Vec::new();
    for (map, shape) in base_ruleset.remembering.iter().filter(|(map, _)| sets.contains(map)) {
        let fits = |element: &Element| {
            let length = match &element.data {
                Some(Data::Value(value)) => value.len(),
                Some(Data::Verdict(_)) | None => 0,
            };
            let lengths = (element.key.len(), element.key_end.is_some(), length);
            lengths == (shape.key, shape.range, shape.data)
                && element.timeout.is_some_and(|left| left >= WORTH_KEEPING)
        };
        match nft.expiring(table, map) {
            Ok(clients) => found.push((map.clone(), clients.into_iter().filter(fits).collect())),
            // The rules do not wait for it.
            Err(error) => tracing::warn!(%table, map, %error, "clients' affinity starts anew"),
        }
    }
    found
}

fn create(batch: &mut Batch, table: &Table, base_ruleset: &BaseRuleset, wanted: &Elements) {
    batch.add_table(table, Some(&base_ruleset.version));
    for (_, set) in &base_ruleset.sets {
        batch.add_set(table, set);
    }
    // All of it becomes true in one moment. The kernel walks a map whenever a rule is bound to it: rules come first.
    add_chains(batch, table, &base_ruleset.chains);
    for (id, rows) in wanted.sets() {
        batch.add_rows(table, &id.name(), rows.iter());
    }
}

fn append(batch: &mut Batch, table: &Table, changes: &Changes) {
    for (id, rows) in &changes.delete {
        batch.delete_rows(table, &id.name(), rows);
    }
    for (id, rows) in &changes.add {
        batch.add_rows(table, &id.name(), rows.iter());
    }
}

fn by_chain(rules: &[RuleInfo]) -> ChainRules {
    let mut chains: ChainRules = BTreeMap::new();
    for rule in rules {
        chains.entry(rule.chain.clone()).or_default().push(rule.expressions.clone());
    }
    chains
}

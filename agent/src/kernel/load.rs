// SPDX-License-Identifier: Apache-2.0
//! Creates a table and fills it. Called by [`super::FamilyTable`] for a table that does not exist.
//!
//! A worker in the kernel grows hash tables to twice their size, but only while the loading process pauses. Until then new
//! elements queue up in long chains, which was most of a large load's time. So sets are filled in steps, each as large as all
//! before it up to a limit, with a pause after each.
//!
//! No packet meets a partly filled table: base chains come last. A process that is killed before leaves a table without them, which the
//! next start replaces. Only Services with very many endpoints come after the base chains of all tables, as in updates: each frontend
//! at once, and its list before. So the others need not wait for them.

use std::time::Duration;

use steerage_nft::{Batch, Error, Nft, Rows, Table};

use super::repair::append;
use crate::rules::{
    self, BaseRuleset, Changes, Elements, RulesetChain, SetId, difference, first_elements, steps,
};

/// Elements of each set in the first step.
const FIRST_STEP: usize = 512;
/// Elements of each set in a later step: while the kernel makes a transaction, nobody else changes a table in this network namespace.
const LARGEST_STEP: usize = 1 << 15;
/// Time for the kernel's worker to grow a hash table.
pub(super) const PAUSE: Duration = Duration::from_micros(300);

/// The generations of the ruleset before some writes and, if no other program writes, after them.
pub(super) struct Commits {
    pub(super) before: u32,
    pub(super) after: u32,
}

impl Commits {
    pub(super) fn new(nft: &mut Nft) -> Result<Self, Error> {
        let before = nft.generation()?;
        Ok(Self { before, after: before })
    }

    pub(super) fn commit(&mut self, nft: &mut Nft, batch: Batch) -> Result<(), Error> {
        // The kernel skips generation 0.
        self.after = self.after.checked_add(u32::from(!batch.is_empty())).unwrap_or(1);
        nft.commit(batch)
    }
}

/// What [`load`] did.
pub(super) struct Loaded {
    /// The generations of the ruleset before it and, if no other program writes, after it.
    pub(super) generations: (u32, u32),
    /// What [`load_rest`] is to load.
    pub(super) rest: Option<Changes>,
}

/// Creates the table with these elements, but those of Services with very many endpoints.
pub(super) fn load(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    wanted: &Elements,
) -> Result<Loaded, Error> {
    let mut commits = Commits::new(nft)?;
    let mut batch = Batch::new();
    batch.add_table(table, Some(&base_ruleset.version));
    for (_, set) in &base_ruleset.sets {
        batch.add_set(table, set);
    }
    for counter in &base_ruleset.counters {
        batch.add_counter(table, counter);
    }
    // The kernel walks a map whenever a rule is bound to it: bind rules while the maps are empty.
    let (base, others): (Vec<_>, Vec<_>) =
        base_ruleset.chains.iter().partition(|chain| chain.chain.is_base());
    add_chains(&mut batch, table, others);
    commits.commit(nft, batch)?;
    let first = first_elements(wanted);
    for batch in fill(table, first.as_ref().unwrap_or(wanted).sets().collect()) {
        commits.commit(nft, batch)?;
        std::thread::sleep(PAUSE);
    }
    let mut batch = Batch::new();
    add_chains(&mut batch, table, base);
    commits.commit(nft, batch)?;
    let rest = first.map(|first| difference(&first, wanted));
    Ok(Loaded { generations: (commits.before, commits.after), rest })
}

/// Loads what [`load`] has left. Returns the generations of the ruleset before it and, if no other program writes, after it.
pub(super) fn load_rest(nft: &mut Nft, table: &Table, mut rest: Changes) -> Result<(u32, u32), Error> {
    let mut commits = Commits::new(nft)?;
    // No packet looks at a list before a frontend leads there. Digests come first: a process that is killed leaves no endpoints of which a
    // next one does not know, and without its frontends no list is believed.
    for id in [SetId::Digests, SetId::Endpoints] {
        let rows = rest.add.remove(&id);
        for batch in fill(table, rows.iter().map(|rows| (&id, rows)).collect()) {
            commits.commit(nft, batch)?;
            std::thread::sleep(PAUSE);
        }
    }
    for step in steps(&rest, rules::LARGEST_STEP) {
        let mut batch = Batch::new();
        append(&mut batch, table, &step);
        commits.commit(nft, batch)?;
        std::thread::sleep(PAUSE);
    }
    Ok((commits.before, commits.after))
}

/// Transactions that add these elements.
fn fill<'r>(table: &'r Table, sets: Vec<(&'r SetId, &'r Rows)>) -> impl Iterator<Item = Batch> {
    let largest = sets.iter().map(|(_, rows)| rows.len()).max().unwrap_or(0);
    let mut done = 0;
    std::iter::from_fn(move || {
        let step = done.clamp(FIRST_STEP, LARGEST_STEP);
        let mut batch = Batch::new();
        for (id, rows) in &sets {
            batch.add_rows(table, &id.name(), rows.iter().skip(done).take(step));
        }
        let is_over = done >= largest;
        done += step;
        (!is_over).then_some(batch)
    })
}

pub(super) fn add_chains<'s>(
    batch: &mut Batch,
    table: &Table,
    chains: impl IntoIterator<Item = &'s RulesetChain>,
) {
    for chain in chains {
        batch.add_chain(table, &chain.chain);
        for rule in &chain.rules {
            batch.add_rule(table, &chain.name, rule);
        }
    }
}

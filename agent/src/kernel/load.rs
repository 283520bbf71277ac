// SPDX-License-Identifier: Apache-2.0
//! Fills a table that is not there yet. Called by [`super::FamilyTable`]; never touches one that is.
//!
//! The kernel's hash tables grow by a worker that runs only when the loading process lets it, to twice their size at a time; until
//! then new elements queue up in long chains, which was most of a large load's time. So the sets are filled in steps, each as
//! large as all before it, with a pause after each for the worker. No packet sees any of it: the chains that packets enter by come with the last
//! transaction. A process killed before it leaves a table without them, which is replaced at the next start.

use std::time::Duration;

use steerage_nft::{Batch, Error, Nft, Table};

use crate::rules::{BaseRuleset, Elements, RulesetChain};

/// Elements of each set in the first step.
const FIRST: usize = 512;
/// Time for the kernel's worker.
const PAUSE: Duration = Duration::from_micros(300);

/// Creates the table with these elements. Returns the generation of the ruleset before it, and the one that our writes alone lead
/// to.
pub(super) fn load(
    nft: &mut Nft,
    table: &Table,
    base_ruleset: &BaseRuleset,
    wanted: &Elements,
) -> Result<(u32, u32), Error> {
    let before = nft.generation()?;
    let mut generation = before;
    let mut commit = |nft: &mut Nft, batch: Batch| {
        // The kernel leaves 0 out.
        generation = generation.checked_add(u32::from(!batch.is_empty())).unwrap_or(1);
        nft.commit(batch)
    };
    let mut batch = Batch::new();
    batch.add_table(table, Some(&base_ruleset.version));
    for (_, set) in &base_ruleset.sets {
        batch.add_set(table, set);
    }
    // Whenever a rule is bound to a map, the kernel walks the map: rules come while it is empty.
    let (entered, others): (Vec<_>, Vec<_>) =
        base_ruleset.chains.iter().partition(|chain| chain.chain.is_base());
    add_chains(&mut batch, table, others);
    commit(nft, batch)?;
    let largest = wanted.sets().map(|(_, rows)| rows.len()).max().unwrap_or(0);
    let mut done = 0;
    while done < largest {
        let step = done.max(FIRST);
        let mut batch = Batch::new();
        for (id, rows) in wanted.sets() {
            batch.add_rows(table, &id.name(), rows.iter().skip(done).take(step));
        }
        commit(nft, batch)?;
        done += step;
        std::thread::sleep(PAUSE);
    }
    let mut batch = Batch::new();
    add_chains(&mut batch, table, entered);
    commit(nft, batch)?;
    Ok((before, generation))
}

/// Chains with their rules.
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

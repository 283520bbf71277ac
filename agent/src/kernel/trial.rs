// SPDX-License-Identifier: Apache-2.0
//! The rules of a base ruleset as the kernel lists them: from a table that exists for a moment, and that no packet passes.
//!
//! The kernel lists a rule in other bytes than it was written in, and with a name for each set: two listings of the same rules agree.
//! To write the rules of the agent's own table anew would take longer: the kernel walks a map whenever a rule is bound to it (0.5 s with
//! 250,000 endpoints), and the maps of this table are empty.

use steerage_nft::{Batch, Chain, Error, Family, Nft, Table};

use super::load::Commits;
use super::repair::{ChainRules, by_chain};
use crate::rules::BaseRuleset;

/// The name of the table. The kernel deletes it with the connection if the process ends before.
pub(crate) const TRIAL: &str = "steerage-trial";

/// The rules by chain, and the generations of the ruleset before the trial and, if no other program writes, after it.
pub(super) fn try_rules(
    nft: &mut Nft,
    family: Family,
    base_ruleset: &BaseRuleset,
) -> Result<(ChainRules, (u32, u32)), Error> {
    let table = Table::new(family, TRIAL);
    let mut commits = Commits::new(nft)?;
    let mut batch = Batch::new();
    batch.add_owned_table(&table);
    for (_, set) in &base_ruleset.sets {
        batch.add_set(&table, set);
    }
    for counter in &base_ruleset.counters {
        batch.add_counter(&table, counter);
    }
    for chain in &base_ruleset.chains {
        // Without a hook.
        batch.add_chain(&table, &Chain::regular(chain.name.as_str()));
        for rule in &chain.rules {
            batch.add_rule(&table, &chain.name, rule);
        }
    }
    commits.commit(nft, batch)?;
    let rules = nft.rules(&table);
    let mut batch = Batch::new();
    batch.delete_table(&table);
    commits.commit(nft, batch)?;
    Ok((by_chain(&rules?), (commits.before, commits.after)))
}
